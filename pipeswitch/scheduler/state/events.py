"""Typed events that go into the scheduler, and typed commands that come out.

The scheduler is pure: ``handle(event, now_ms) -> [command]``. The frontend and the process watcher
only translate bytes and exits into the events below; ``effects.py`` performs the commands. The
simulator and the model checker use the same types.

``Token`` names one accepted client request inside the controller. The frontend creates it and must
send the client exactly one final answer (invariant I1). ``Address`` names one process; all kinds of
processes share five types: ``Spawn``, ``Send``, ``Kill``, ``Received`` and ``Exited``.
"""

from __future__ import annotations

from typing import Any, Literal, NewType

import msgspec

from ...base.errors import PipeSwitchError
from ...ipc.messages.base import JobName, Message, ModelName, OpId, SlabTensor, Slot, Turn
from ...ipc.messages.run import Run
from ...ipc.messages.worker import JobSpec as JobSpec
from ...planning.grouping import Plan
from ...planning.planned_groups import PlannedFile
from ...programs.interface.layout import Composite, Manifest, Wrapper
from ...wire.request_timing import RequestTiming
from .variants import Lent

Token = NewType("Token", int)


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of events and commands; five times faster to create than a frozen dataclass."""


class Address(msgspec.Struct, frozen=True):
    """Unique name of one process: each process in a slot has its own incarnation.

    Attributes:
        device: Index of the device, for a daemon or a worker.
        kind: "daemon", "worker" or "builder", or a kind of helper processes.
        slot: Index among the workers of a device, or among the helper processes of a kind.
        incarnation: Number of the process in its slot; a builder's is the build's operation id.
    """

    kind: str
    device: int = 0
    slot: Slot = Slot(0)
    incarnation: int = 0


# ---- events: from clients (frontend) ---------------------------------------------------------


class ClientRequest(_Message, frozen=True):
    """Base of events that need one final answer. One part handles each kind (``core.handles``)."""

    token: Token


class Origin(_Message, frozen=True):
    """Sender of a run, its arrival, and its urgency: all that decides when it computes.
    For policies each run of a request is a new arrival."""

    arrived_at_ms: float  # when the request was read from its client
    priority: int = 1  # 0 is the most urgent
    deadline_at_ms: float | None = None
    caller: str = ""  # tenant of the client; empty: the server's owner
    connection: str = ""  # the client's session, or its address behind the gateway


class InferArrived(ClientRequest, frozen=True):
    """Valid inference request; the request pool has its tensors, and space for its reply.
    If its run has ``sampling_params``, it may need several runs."""

    model: ModelName
    digest: str
    run: Run
    origin: Origin
    tenant: str = ""  # the tenant whose pool file has the tensors (as in ModelAvailable)
    registration_id: int = 0  # any version with this id may serve it; 0: only ``model``
    is_computed: bool = False  # ``inputs`` are the model's outputs, for its wrapper
    continues: bool = False  # a later step of an accepted request
    follows: bool = False  # another step of the request will follow


class Prepared(_Message, frozen=True):
    """End of ``TakeResult``: the request pool has the function's result, or ``error`` is set."""

    token: Token
    source: Address
    run: Run | None = None  # None: the result is dropped, or there is an error
    digest: str = ""  # digest of the program that the inputs fit
    error: PipeSwitchError | None = None


class PoolFreed(_Message, frozen=True):
    """Release of memory in the request pool, for which requests wait between two runs."""


class PrefetchHint(_Message, frozen=True):
    """Hint that a large payload for ``model`` is on its way; it gets no answer."""

    model: ModelName


class CancelRequest(_Message, frozen=True):
    """Cancellation of a request, by its client or by the connection's end."""

    token: Token


class RegisterModelRequest(ClientRequest, frozen=True):
    """Request to register a model."""

    model: ModelName
    spec: bytes  # msgpack of programs.compiler.BuildSpec
    spec_digest: str  # a repeated registration with the same digest is a no-op
    priority: int | None  # None: normal, or that of the registered model
    is_pinned: bool
    is_configured: bool = False  # from ``[[model]]``
    client: str = ""  # clients take turns with builds; empty: the server itself
    tenant: str = ""  # tenant that will own the model; empty: the server's owner
    devices: tuple[str, ...] = ()  # names of the devices that may serve it; empty: all
    is_known: bool = False  # whether it comes from the journal of an earlier server
    restored: Manifest | None = None  # manifest from the journal: requests may wait for the build
    lent: Lent = ()  # from the journal: ``HostStoreAllocator.lent``
    wrapper: Wrapper | None = None  # what converts its inputs and outputs
    aliases: tuple[ModelName, ...] = ()  # further names
    like: ModelName = ModelName("")  # model whose program it takes, with the weights of ``spec``


class VersionRequest(ClientRequest, frozen=True):
    """Request to serve a weight file as a model's next version; answered when that is current."""

    model: ModelName
    spec: bytes  # msgpack of programs.compiler.BuildSpec, with the weights
    tenant: str = ""  # tenant that must own the model; empty: any


class PublishRequest(ClientRequest, frozen=True):
    """Request to make a job's newest commit a model's next version; answered when it is current."""

    model: ModelName
    job: JobName
    step: int = -1  # required step of the commit; -1: any
    part: str = ""  # name of the trained module; empty: the only module that fits


class RollbackRequest(ClientRequest, frozen=True):
    """Request to make a version current, or to give it a share of the requests."""

    model: ModelName
    version: int = 0  # 0: the newest version before the current one
    share: int = -1  # percentage of the requests; -1: make the version current
    tenant: str | None = None  # as in UnregisterRequest


class UnregisterRequest(ClientRequest, frozen=True):
    """Request to remove a model or another name."""

    model: ModelName
    tenant: str | None = None  # tenant that must own it; None: any


class PinRequest(ClientRequest, frozen=True):
    """Request of ``load`` (pin, copy to the device, end a quarantine) or ``unload`` (unpin)."""

    model: ModelName
    pin: bool


class LoadedCommit(msgspec.Struct, frozen=True):
    """Commit that was read into a new commit area, outside the scheduler's loop."""

    slot_bytes: int
    step: int
    descriptor: int = -1  # file descriptor, owned by the frontend until the client is answered
    why: str = ""  # newer commits that are damaged; empty: it is the newest one


class TrainRequest(ClientRequest, frozen=True):
    """Request to start a training job."""

    spec: JobSpec
    resumes: bool = False  # resume from another server's commit in ``jobs/NAME/commit``
    is_paused: bool = False  # the job was paused on the other server
    loaded: LoadedCommit | None = None  # the commit to resume from; None: there was none
    restarts: int = 0  # number of restarts on other servers; the next two values are from there
    steps_recomputed: int = 0
    last_step: int = 0  # last step of the job's last process


class JobRequest(ClientRequest, frozen=True):
    """Request about a job. ``show`` is answered at once, ``wait`` when the job has ended.
    ``export`` is answered when the newest commit is on disk, ``move`` when the job is on its new
    device, and each other action when the job's state has changed."""

    job: JobName
    action: Literal["show", "pause", "resume", "cancel", "wait", "export", "rm", "move"]
    to: str = ""  # device to ``move`` to
    loaded: LoadedCommit | None = None  # for ``resume``: the answer to ``LoadCommits``


class Query(ClientRequest, frozen=True):
    """Request for a listing, answered from the scheduler's own state, so it is consistent."""

    what: Literal["models", "show", "ps", "jobs", "stats", "trace", "plan"]
    name: str = ""
    seconds: float = 0.0
    version: int = 0  # version for ``show``; 0: the current one
    all_versions: bool = False  # whether ``models`` lists all versions


class RegroupRequest(ClientRequest, frozen=True):
    """Request to try other layer groups of a model on an idle device, or to use planned ones.

    Attributes:
        plan: Groups to try; empty: one for each layer.
        is_cold: Whether the model must be off the device before the run.
        trial: The client's previous trial, which this one follows; 0: none.
        planned: File with the groups to use from now on, instead of a trial.
    """

    model: ModelName
    plan: Plan = ()
    is_cold: bool = True
    trial: Token = Token(0)
    planned: bytes = b""


class PingRequest(ClientRequest, frozen=True):
    """Request to ping every process; answered with the times of the processes that reply."""


class DrainRequest(_Message, frozen=True):
    """Request to finish accepted requests, refuse new ones and stop; a second one stops at once."""

    token: Token | None
    grace_ms: float


# ---- events: from processes (watcher) --------------------------------------------------------


class Received(_Message, frozen=True):
    """Message from a process, which may have been replaced: compare ``source.incarnation``.

    Attributes:
        manifest: With ``BuildDone``: the checked manifest from disk.
        planned: With ``BuildDone``: files with planned groups of the program.
    """

    source: Address
    message: Message
    manifest: Manifest | None = None
    planned: tuple[PlannedFile, ...] = ()


class Exited(_Message, frozen=True):
    """Exit of a reaped process: it no longer writes, and all its messages were received."""

    source: Address
    status: int
    begun_op_id: int | None = None  # the last task that a worker began to compute; None: unknown


class Tick(_Message, frozen=True):
    """Passage of time; the loop sends a Tick when ``next_wakeup_ms`` is reached."""


Event = (
    ClientRequest
    | Prepared
    | PoolFreed
    | PrefetchHint
    | CancelRequest
    | DrainRequest
    | Received
    | Exited
    | Tick
)

# ---- commands --------------------------------------------------------------------------------


class Spawn(_Message, frozen=True):
    """Start a process, and kill the previous one in the same slot.

    Builders are started by ``StartBuild``, because a build needs a specification, too.
    """

    target: Address


class Send(_Message, frozen=True):
    """Send a message to a process; drop it if the process has exited.

    Attributes:
        channel: Channel of a worker; its termination thread, which is never busy, reads "signal".
        commits_of: Attach this job's commit memfd.
        image_of: Attach the image of this job's slice.
        tenant: With ``HelperCall``: the tenant whose pool file has the inputs.
    """

    target: Address
    message: Message
    channel: Literal["task", "signal"] = "task"
    commits_of: JobName | None = None
    image_of: JobName | None = None
    tenant: str = ""


class Kill(_Message, frozen=True):
    """Send SIGKILL; ``Exited`` follows when the process is reaped."""

    target: Address
    reason: str = ""


class RaiseTurn(_Message, frozen=True):
    """Write the turn word of the control page and wake the worker through its bell."""

    target: Address
    turn: Turn


class Interrupt(_Message, frozen=True):
    """Write the worker's stop word, and release its stream (ADR 14).
    A streamed model's pass then yields between two groups, or a multi-step run ends early. A script
    that keeps the interpreter's lock while its queue is held can answer its stop. If the turn word
    differs from ``turn``, the script has stopped meanwhile, and its stream stays held."""

    target: Address
    op_id: OpId
    turn: Turn = Turn(0)  # 0: of no script


class TakeBack(_Message, frozen=True):
    """Write the worker's taken-back word and wake it: the task never gets its turn."""

    target: Address
    op_id: OpId


class TakeResult(_Message, frozen=True):
    """Check the result of a function, and copy it to the request pool.

    It must fit the model's inputs, or the declared answer. ``Prepared`` follows; until then
    the process gets no other call.
    """

    token: Token
    target: Address
    model: ModelName
    function: str
    outputs: tuple[SlabTensor, ...]  # the result, in the memory of the process's slot
    is_computed: bool = False  # the result is the answer, not the model's inputs


class StartBuild(_Message, frozen=True):
    """Start a builder for a registration."""

    model: ModelName
    op_id: OpId
    spec: bytes
    tenant: str = ""  # tenant whose share of the disk the build uses
    wrapper: Wrapper | None = None  # to be checked before the build
    rebuilds: str = ""  # digest of a program to be built again from the bundle in its folder


class DropPublished(_Message, frozen=True):
    """Remove a copied commit: its publication has ended, or the copy begins again elsewhere."""

    directory: str


class SweepPrograms(_Message, frozen=True):
    """Remove program files that no model needs any more; sent only while no build runs."""

    digests: frozenset[str]  # digests of the models that stay


class CreateCommits(_Message, frozen=True):
    """Create the job's commit memfd (header + two slots); the controller keeps it."""

    job: JobName
    slot_bytes: int
    loaded: int = -1  # memfd to use, loaded from files that the job takes over; -1: none
    is_on_disk: bool = False  # whether the job already owns these files


class LoadCommits(_Message, frozen=True):
    """Read an ended job's commit from disk, then send the request again with ``loaded``."""

    request: JobRequest


class DropCommits(_Message, frozen=True):
    """Release the job's commit memfd; its commits on disk stay."""

    job: JobName


class CreateImage(_Message, frozen=True):
    """Create the memfd for the image of a job's slice; the controller keeps it."""

    job: JobName
    size_bytes: int


class DropImage(_Message, frozen=True):
    """Release the image of a job's slice."""

    job: JobName


class CountSharers(_Message, frozen=True):
    """Report the number of unfinished jobs that share an input; a single job shares no batches."""

    group: str  # name of the group, as in RunJob
    jobs: int


class RemoveJob(_Message, frozen=True):
    """Remove an ended job's files: commits, log, history."""

    job: JobName


class ModelAvailable(_Message, frozen=True):
    """Command to the frontend: accept requests for this model, with this signature."""

    model: ModelName
    manifest: Manifest
    priority: int
    tenant: str = ""  # tenant whose pool file its requests use, if tenants are separate
    base: str = ""  # name that requests use; empty: ``model``
    version: int = 1
    is_current: bool = True  # the version serves requests without a version number
    registration_id: int = 0  # equal for all versions of a name, until the name is removed
    wrapper: Wrapper | None = None  # what converts its inputs and outputs
    composite: Composite | None = None  # set if the name stands for several models
    aliases: tuple[str, ...] = ()  # further names that requests may use


class ModelRemoved(_Message, frozen=True):
    """Command to the frontend: refuse requests for this model, which was removed or has failed."""

    model: ModelName
    failure: str = ""  # reason, if it stays registered as a failed model
    aliases: tuple[ModelName, ...] = ()  # of a failed model


class Reply(_Message, frozen=True):
    """Reply; ``outputs`` are in the request pool. Each token gets one reply without ``more``."""

    token: Token
    body: dict[str, Any] = {}
    outputs: tuple[SlabTensor, ...] = ()
    timing: RequestTiming | None = None  # times of an inference
    error: PipeSwitchError | None = None
    more: bool = False


class Publish(_Message, frozen=True):
    """Event for subscribers; ``topic`` begins with switch, model, job, worker or queue."""

    topic: str
    body: dict[str, Any]


class Span(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Named interval for the timeline; ``track`` is "scheduler", "copy" or "worker N"."""

    track: str
    name: str
    begin_ms: float
    end_ms: float
    args: dict[str, Any] = {}
    flow: int = 0  # operation id; spans with the same id are connected by arrows
    event: int = 0  # number of the scheduler's event that caused the span


class Spans(_Message, frozen=True):
    """Completed timeline intervals: runs and copies with their groups, training cycles."""

    spans: list[Span]


class Journal(_Message, frozen=True):
    """Record of a model or a job that must survive the server (state_dir/journal).

    ``accepts``: requests that are answered after the write. If the write fails, they are refused
    instead, and their effects are undone.
    """

    entry: dict[str, Any]
    accepts: tuple[Token, ...] = ()


class SavePlanned(_Message, frozen=True):
    """Save planned groups in the state directory, for the next server."""

    file_name: str
    document: bytes


class LogWarning(_Message, frozen=True):
    """One line for the operator, in the server's log."""

    text: str


class Shutdown(_Message, frozen=True):
    """Stop the server: it has drained (status 0), or it cannot continue (non-zero)."""

    status: int
    reason: str


Command = (
    Spawn
    | Send
    | Kill
    | RaiseTurn
    | Interrupt
    | TakeBack
    | StartBuild
    | TakeResult
    | CreateCommits
    | LoadCommits
    | DropCommits
    | CreateImage
    | DropImage
    | CountSharers
    | RemoveJob
    | ModelAvailable
    | ModelRemoved
    | Reply
    | Publish
    | Spans
    | DropPublished
    | Journal
    | SweepPrograms
    | SavePlanned
    | LogWarning
    | Shutdown
)
