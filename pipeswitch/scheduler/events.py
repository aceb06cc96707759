"""Typed events that go into the scheduler, and typed commands that come out.

The scheduler is pure: ``handle(event, now_ms) -> [command]``. The frontend and the process watcher
only translate bytes and exits into the events below; ``effects.py`` performs the commands. The
simulator and the model checker use the same types.

``Token`` names one accepted client request inside the controller; the frontend makes it and owes
its client exactly one final answer for it (invariant I1). ``Address`` names one process: every
family of processes uses the same five types to spawn, send, kill, receive and report an exit.
"""

from __future__ import annotations

from typing import Any, Literal, NewType

import msgspec

from ..base.errors import PipeSwitchError
from ..ipc.messages.base import JobName, Message, ModelName, OpId, SlabTensor, Slot, Turn
from ..ipc.messages.worker import SamplingParams
from ..planning.profile import Profile, ProfileFile
from ..programs.interface.chains import Chain, ChainStep
from ..programs.interface.layout import Manifest
from ..programs.interface.processors import Processor
from ..wire.request_timing import RequestTiming

Token = NewType("Token", int)


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events: created in a fifth of a frozen dataclass's time, ten for each request."""


ProcessKind = Literal["daemon", "worker", "stage", "builder"]


class Address(msgspec.Struct, frozen=True):
    """Permanent name of one process: each process in a slot has its own generation.

    Attributes:
        device: Index of the device, for a daemon or a worker.
        slot: Index among the workers of a device, or among the stages.
        generation: Number of the process in its slot; a builder's is the build's operation id.
    """

    kind: ProcessKind
    device: int = 0
    slot: Slot = Slot(0)
    generation: int = 0


# ---- events: from clients (frontend) ---------------------------------------------------------


class ClientRequest(_Message, frozen=True):
    """Base of events that need one final answer. One part takes each kind (``core.handles``)."""

    token: Token


class InferArrived(ClientRequest, frozen=True):
    """A checked request; its tensors lie in the pool, room for its reply is taken."""

    request_id: str
    model: ModelName
    digest: str
    priority: int  # 0 is the most urgent
    deadline_at_ms: float | None
    inputs: tuple[SlabTensor, ...]
    reply_offset_bytes: int
    reply_bytes: int
    caller: str = ""  # who asks: Standing.tenant of its client; empty: the server's owner
    connection: str = ""  # the caller's session, or its address over the gateway
    tenant: str = ""  # Announce's: in whose file of the pool they lie
    registration_id: int = (
        0  # Announce's: any of its versions does as well; 0: it asked for this one
    )
    arrived_at_ms: float | None = None  # when it was read from its client; None: now
    is_postprocess: bool = (
        False  # its model has computed: ``inputs`` go to the function behind that
    )
    is_chain_continuation: bool = False  # a later step of a chain: what was accepted is finished
    follows: bool = False  # and another step will come
    sequence: int = 0  # whose step it is; 0: it stands alone
    sampling_params: SamplingParams | None = (
        None  # of a generation: it takes as many runs as it needs
    )
    after: OpId = OpId(0)  # the run that answered its step before
    leader: Token | None = None  # an earlier generation, whose next run computes tokens of both


class Prepared(_Message, frozen=True):
    """End of ``TakeResult``: a request's inputs lie in the pool, or an error says why not."""

    token: Token
    slot: Slot
    inputs: tuple[SlabTensor, ...] = ()
    reply_offset_bytes: int = 0
    reply_bytes: int = 0
    digest: str = ""  # of the program that they fit
    error: PipeSwitchError | None = None


class NextRun(_Message, frozen=True):
    """Next run of a generation; without ``sampling_params`` it waits, since its cache has no room
    or is being copied."""

    token: Token
    inputs: tuple[SlabTensor, ...] = ()
    reply_offset_bytes: int = 0
    reply_bytes: int = 0
    sampling_params: SamplingParams | None = None
    sequence: int = 0
    after: OpId = OpId(0)
    leader: Token | None = None  # as of InferArrived


class NextRuns(_Message, frozen=True):
    """Answer to ``RunEnded``, or the next run of a generation that waited."""

    runs: tuple[NextRun, ...]


class PrefetchHint(_Message, frozen=True):
    """A large payload for ``model`` is on its way (no answer is owed)."""

    model: ModelName


class CancelRequest(_Message, frozen=True):
    """The client takes an infer/register request back, or its connection is gone."""

    token: Token


class RegisterModelRequest(ClientRequest, frozen=True):
    """Request to register a model."""

    model: ModelName
    spec: bytes  # msgpack of programs.build.BuildSpec
    spec_digest: str  # same name and same spec again is a no-op
    priority: int
    is_pinned: bool
    client: str = ""  # builds take turns among clients; empty: the server's own
    tenant: str = ""  # whose model it will be; empty: the server's owner's
    devices: tuple[str, ...] = ()  # that may serve it; none named: all
    is_known: bool = False  # of an earlier server, as the journal has it
    restored: Manifest | None = None  # then: requests come, and wait for the build
    processor: Processor | None = None  # what makes its inputs; None: its clients
    aliases: tuple[ModelName, ...] = ()  # further names


class VersionRequest(ClientRequest, frozen=True):
    """Request to serve a file of weights as a model's next version; answered when it serves."""

    model: ModelName
    spec: bytes  # msgpack of programs.build.BuildSpec: its weights
    tenant: str = ""  # whose model it must be; empty: anybody's


class ChainRequest(ClientRequest, frozen=True):
    """Request to register a chain."""

    model: ModelName  # the chain's name
    steps: tuple[ChainStep, ...] = ()
    returns: dict[str, str] = {}
    tenant: str = ""  # whose it will be; empty: the server's owner's
    restored: Chain | None = None  # of an earlier server, as the journal has it


class PublishRequest(ClientRequest, frozen=True):
    """Request to serve a job's newest commit as a model's next version; answered when it serves."""

    model: ModelName
    job: JobName
    step: int = -1  # that it must be of; -1: whatever is the newest
    part: str = ""  # of what it trains; empty: the only one that fits


class RollbackRequest(ClientRequest, frozen=True):
    """Request to make a version current, or to give it a share."""

    model: ModelName
    version: int = 0  # 0: the newest before the current one
    share: int = -1  # percent of requests that shall be its; -1: all, it becomes the current one
    tenant: str | None = None  # as UnregisterRequest's


class UnregisterRequest(ClientRequest, frozen=True):
    """Request to remove a model or a chain."""

    model: ModelName
    tenant: str | None = None  # only when it is this one's; None: whosever it is


class PinRequest(ClientRequest, frozen=True):
    """``load`` (pin, bring to the device, pardon a quarantined model) and ``unload`` (unpin)."""

    model: ModelName
    pin: bool


class LoadedCommit(msgspec.Struct, frozen=True):
    """Commit that is loaded into its own commit area, outside the scheduler's loop."""

    slot_bytes: int
    step: int
    descriptor: int = -1  # the frontend's, until its asker is answered


class TrainRequest(ClientRequest, frozen=True):
    """Request to start a training job."""

    job: JobName
    entry: str
    args: tuple[str, ...]
    priority: int
    tenant: str = ""  # whose job it will be; empty: the server's owner's
    share: str = ""  # jobs of one group share their input; empty: none
    devices: tuple[str, ...] = ()  # that may train it; none named: all
    defaults: tuple[tuple[str, str], ...] = ()  # of ``job.steps``: not named there
    resumes: bool = False  # at the commit that lies in ``jobs/NAME/commit``, of another server
    is_paused: bool = False  # as it was there
    loaded: LoadedCommit | None = None  # of what it resumes at; None: the job had not committed
    restarts: int = 0  # on other servers, like the next two
    steps_recomputed: int = 0
    last_step: int = 0  # that its last process did


class JobRequest(ClientRequest, frozen=True):
    """Request about a job. ``wait`` is answered when the job is final, ``export`` when its
    newest commit is on disk, ``move`` when the job has arrived; the others when the job's
    state has changed."""

    job: JobName
    action: Literal["show", "pause", "resume", "cancel", "wait", "export", "rm", "move"]
    to: str = ""  # of ``move``: a device
    loaded: LoadedCommit | None = None  # of ``resume``: the answer to ``LoadCommits``


class Query(ClientRequest, frozen=True):
    """A listing; answered from the scheduler's own state, so it is consistent."""

    what: Literal["models", "show", "ps", "jobs", "stats", "trace", "plan"]
    name: str = ""
    seconds: float = 0.0
    version: int = 0  # of ``show``; 0: the current one
    all_versions: bool = False  # of ``models``


class ProfileRequest(ClientRequest, frozen=True):
    """Measure a model on an idle device; the final answer is the profile."""

    model: ModelName
    batches: tuple[int, ...] = ()  # empty: the one its requests come with


class PingRequest(ClientRequest, frozen=True):
    """Ping every process; answered with the times of the processes that reply."""


class DrainRequest(_Message, frozen=True):
    """Stop admitting, finish what was accepted, then leave. A second one leaves at once."""

    token: Token | None
    grace_ms: float


# ---- events: from processes (watcher) --------------------------------------------------------


class Received(_Message, frozen=True):
    """Message from a process, possibly from a replaced one: compare its generation.

    Attributes:
        manifest: With ``BuildDone``: the manifest on disk, read and checked.
        profiles: With ``BuildDone``: the program's measurements on disk.
    """

    source: Address
    message: Message
    manifest: Manifest | None = None
    profiles: tuple[ProfileFile, ...] = ()


class Exited(_Message, frozen=True):
    """A process was reaped: it writes nothing any more, and all its messages were received."""

    source: Address
    status: int
    begun_op_id: int | None = None  # the last task that a worker began to compute; None: unknown


class Tick(_Message, frozen=True):
    """Time has passed; the loop sends one when ``next_wakeup_ms`` is reached."""


Event = (
    ClientRequest
    | Prepared
    | NextRuns
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

    ``StartBuild`` starts builders: a build needs a specification, and starts zero to two processes.
    """

    target: Address


class Send(_Message, frozen=True):
    """Send a message to a process; drop it if the process has exited.

    Attributes:
        channel: A worker has two; its termination thread, which is never busy, reads "signal".
        commits_of: Attach this job's commit memfd.
        tenant: With ``RunStage``: tenant whose pool file holds the raw inputs.
    """

    target: Address
    message: Message
    channel: Literal["task", "signal"] = "task"
    commits_of: JobName | None = None
    tenant: str = ""


class Kill(_Message, frozen=True):
    """Send SIGKILL; ``Exited`` follows when the process is reaped."""

    target: Address
    reason: str = ""


class RaiseTurn(_Message, frozen=True):
    """Write the control page's turn word and ring the worker's bell."""

    target: Address
    turn: Turn


class Interrupt(_Message, frozen=True):
    """Write the worker's stop word. A streamed model's pass then yields between two groups,
    and a run of several steps ends between two steps."""

    target: Address
    op_id: OpId


class TakeResult(_Message, frozen=True):
    """Copy what a function returned to its request's place in the pool, if the model takes it or it
    is the answer that was declared.

    ``Prepared`` follows; until then the process in that slot is given nothing.
    """

    token: Token
    slot: Slot
    model: ModelName
    function: str
    outputs: tuple[SlabTensor, ...]  # in the memory of the slot
    is_postprocess: bool = False  # it is the answer


class StartBuild(_Message, frozen=True):
    """Start a builder for a registration."""

    model: ModelName
    op_id: OpId
    spec: bytes
    tenant: str = ""  # whose disk it takes


class DropPublished(_Message, frozen=True):
    """Remove the copy of a commit from which a version was, or would have been, made."""

    directory: str


class SweepPrograms(_Message, frozen=True):
    """Remove the files that only removed models needed; no build runs."""

    digests: frozenset[str]  # of the models that stay


class CreateCommits(_Message, frozen=True):
    """Create the job's commit memfd (header + two slots); the controller keeps it."""

    job: JobName
    slot_bytes: int
    loaded: int = -1  # a descriptor of one that is made, and whose file is to be the job's own
    is_on_disk: bool = False  # that file is the job's own already


class LoadCommits(_Message, frozen=True):
    """Read an ended job's commit from disk, then post the request again with it."""

    request: JobRequest


class DropCommits(_Message, frozen=True):
    """Give back the job's commit memfd; what is on disk stays."""

    job: JobName


class CountSharers(_Message, frozen=True):
    """Number of unfinished jobs that share an input: a lone job shares nothing that it loads."""

    group: str  # as in RunJob
    jobs: int


class RemoveJob(_Message, frozen=True):
    """Remove what an ended job left on disk: commits, log, history."""

    job: JobName


class ModelAvailable(_Message, frozen=True):
    """Command to the frontend: accept requests for this model, with this signature."""

    model: ModelName
    manifest: Manifest
    priority: int
    tenant: str = ""  # where tenants are separate, whose file of the pool its requests lie in
    base: str = ""  # the name that requests use; empty: the model's
    version: int = 1
    is_current: bool = True  # requests without a number are its
    registration_id: int = 0  # equal for all versions of one registration, and for no other's
    processor: Processor | None = None  # what makes its inputs of those that clients send
    chain: Chain | None = None  # it is none: its steps' models are asked, at their own priority
    aliases: tuple[str, ...] = ()  # further names that requests use


class ModelRemoved(_Message, frozen=True):
    """Tell the frontend that a model is gone."""

    model: ModelName


class Reply(_Message, frozen=True):
    """One reply to a client. Exactly one without ``more`` per token; outputs lie in the pool."""

    token: Token
    body: dict[str, Any] = {}
    outputs: tuple[SlabTensor, ...] = ()
    timing: RequestTiming | None = None  # of an inference
    error: PipeSwitchError | None = None
    more: bool = False


class RunEnded(_Message, frozen=True):
    """Command to the frontend: these generations need more runs. The frontend appends their
    cache rows and answers with one ``NextRuns``; until then their next batch is not formed. An
    answer without a body is of a generation that waited for its leader's run."""

    answers: tuple[Reply, ...]


class Publish(_Message, frozen=True):
    """An event for subscribers: topic (``switch. model. job. worker. queue.``) and record."""

    topic: str
    body: dict[str, Any]


class Span(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A named interval for the timeline. ``track``: scheduler, copy, or ``worker N``."""

    track: str
    name: str
    begin_ms: float
    end_ms: float
    args: dict[str, Any] = {}
    flow: int = 0  # operation id: draws arrows request -> switch -> groups
    event: int = 0  # number of the event that caused it


class Spans(_Message, frozen=True):
    """Completed timeline intervals: runs and copies with their groups, training cycles."""

    spans: list[Span]


class Journal(_Message, frozen=True):
    """Record that must survive the server: models and jobs (state_dir/journal).

    ``accepts``: requests to be answered after the write. If it fails they are refused instead, and
    their effects are taken back.
    """

    entry: dict[str, Any]
    accepts: tuple[Token, ...] = ()


class SaveProfile(_Message, frozen=True):
    """Save a profile in the state directory; the next server restores it."""

    profile: Profile


class LogWarning(_Message, frozen=True):
    """One line for the operator, in the server's log."""

    text: str


class Shutdown(_Message, frozen=True):
    """Stop the server: everything is drained (status 0) or it cannot go on (non-zero)."""

    status: int
    reason: str


Command = (
    Spawn
    | Send
    | Kill
    | RaiseTurn
    | Interrupt
    | StartBuild
    | TakeResult
    | CreateCommits
    | LoadCommits
    | DropCommits
    | CountSharers
    | RemoveJob
    | ModelAvailable
    | ModelRemoved
    | Reply
    | RunEnded
    | Publish
    | Spans
    | DropPublished
    | Journal
    | SweepPrograms
    | SaveProfile
    | LogWarning
    | Shutdown
)
