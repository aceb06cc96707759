"""What goes into the scheduler and what comes out: typed events, typed commands.

The scheduler is pure: ``handle(event, now_ms) -> [command]``. The frontend and the process
watcher only translate bytes and exits into the events below; ``effects.py`` performs the
commands. The simulator and the model checker use the same types.

``Token`` names one accepted client request inside the controller; the frontend makes it and
owes its client exactly one final answer for it (invariant I1). ``device`` is the place of a device
among those of the server: slots and generations are numbered on each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NewType

from ..errors import PipeSwitchError
from ..ipc.messages import Epoch, JobName, Message, ModelName, SlabTensor, Slot, Turn
from ..planning.profile import Found, Profile
from ..programs.layout import Manifest

Token = NewType("Token", int)

# ---- events: from clients (frontend) ---------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InferArrived:
    """A checked request; its tensors lie in the pool, room for its reply is taken."""

    token: Token
    request_id: str
    model: ModelName
    digest: str
    priority: int  # 0 is the most urgent
    deadline_at_ms: float | None
    inputs: tuple[SlabTensor, ...]
    reply_offset_bytes: int
    reply_bytes: int
    tenant: str = ""  # Announce's: in whose file of the pool they lie
    lineage: int = 0  # Announce's: any of its versions does as well; 0: it asked for this one


@dataclass(frozen=True, kw_only=True)
class PrefetchHint:
    """A large payload for ``model`` is on its way (no answer is owed)."""

    model: ModelName


@dataclass(frozen=True, kw_only=True)
class CancelAsked:
    """The client takes an infer/register request back, or its connection is gone."""

    token: Token


@dataclass(frozen=True, kw_only=True)
class RegisterAsked:
    token: Token
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


@dataclass(frozen=True, kw_only=True)
class PublishAsked:
    """The newest commit of a job shall be the next version of a model."""

    token: Token  # answered when it serves
    model: ModelName
    job: JobName
    step: int = -1  # that it must be of; -1: whatever is the newest


@dataclass(frozen=True, kw_only=True)
class RollbackAsked:
    token: Token
    model: ModelName
    version: int = 0  # 0: the newest before the current one
    tenant: str | None = None  # as UnregisterAsked's


@dataclass(frozen=True, kw_only=True)
class UnregisterAsked:
    token: Token
    model: ModelName
    tenant: str | None = None  # only when it is this one's; None: whosever it is


@dataclass(frozen=True, kw_only=True)
class PinAsked:
    """``load`` (pin, bring to the device, pardon a quarantined model) and ``unload`` (unpin)."""

    token: Token
    model: ModelName
    pin: bool


@dataclass(frozen=True, kw_only=True)
class TrainAsked:
    token: Token
    job: JobName
    entry: str
    args: tuple[str, ...]
    priority: int
    tenant: str = ""  # whose job it will be; empty: the server's owner's
    share: str = ""  # jobs of one group share their input; empty: none
    devices: tuple[str, ...] = ()  # that may train it; none named: all


@dataclass(frozen=True, kw_only=True)
class JobAsked:
    """``wait`` is answered when the job is final, ``export`` when its newest commit is on disk,
    ``move`` when it is there;
    the others when the table has taken them."""

    token: Token
    job: JobName
    action: Literal["show", "pause", "resume", "cancel", "wait", "export", "rm", "move"]
    to: str = ""  # of ``move``: a device


@dataclass(frozen=True, kw_only=True)
class Query:
    """A listing; answered from the scheduler's own state, so it is consistent."""

    token: Token
    what: Literal["models", "show", "ps", "jobs", "stats", "trace", "plan"]
    name: str = ""
    seconds: float = 0.0
    version: int = 0  # of ``show``; 0: the current one
    all_versions: bool = False  # of ``models``


@dataclass(frozen=True, kw_only=True)
class ProfileAsked:
    """Measure a model layer by layer when no request waits; answered with its profile."""

    token: Token
    model: ModelName
    batches: tuple[int, ...] = ()  # empty: the one its requests come with


@dataclass(frozen=True, kw_only=True)
class PingAsked:
    """Ask every process whether it is there; answered with the times of those that are."""

    token: Token


@dataclass(frozen=True, kw_only=True)
class DrainAsked:
    """Stop admitting, finish what was accepted, then leave. A second one leaves at once."""

    token: Token | None
    grace_ms: float


# ---- events: from processes (watcher) --------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FromWorker:
    slot: Slot
    generation: int  # of the process in the slot; an older one's messages are dropped
    message: Message
    device: int = 0


@dataclass(frozen=True, kw_only=True)
class WorkerExited:
    """The process is reaped: nothing of it writes any more."""

    slot: Slot
    generation: int
    status: int
    begun_epoch: int | None = None  # of the last task it began to compute; None: not known
    device: int = 0


@dataclass(frozen=True, kw_only=True)
class FromDaemon:
    generation: int
    message: Message
    device: int = 0


@dataclass(frozen=True, kw_only=True)
class DaemonExited:
    generation: int
    status: int
    device: int = 0


@dataclass(frozen=True, kw_only=True)
class FromBuilder:
    message: Message
    manifest: Manifest | None = None  # with BuildDone, read by the watcher
    profiles: tuple[Found, ...] = ()  # the same


@dataclass(frozen=True, kw_only=True)
class BuilderExited:
    model: ModelName
    epoch: Epoch
    status: int


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time has passed; the loop sends one when ``next_wakeup_ms`` is reached."""


Event = (
    InferArrived | PrefetchHint | CancelAsked | RegisterAsked | PublishAsked | RollbackAsked
    | UnregisterAsked | PinAsked | TrainAsked | JobAsked | ProfileAsked | PingAsked | Query
    | DrainAsked | FromWorker | WorkerExited | FromDaemon | DaemonExited | FromBuilder
    | BuilderExited | Tick
)  # fmt: skip

# ---- commands --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ToDaemon:
    message: Message
    commits_of: JobName | None = None  # attach this job's commit memfd
    device: int = 0


@dataclass(frozen=True, kw_only=True)
class ToWorker:
    slot: Slot
    message: Message
    channel: Literal["task", "signal"] = "task"
    commits_of: JobName | None = None
    device: int = 0


@dataclass(frozen=True, kw_only=True)
class RaiseTurn:
    """Write the board's turn word and ring the slot's bell."""

    turn: Turn
    slot: Slot
    device: int = 0


@dataclass(frozen=True, kw_only=True)
class SpawnDaemon:
    generation: int
    device: int = 0


@dataclass(frozen=True, kw_only=True)
class SpawnWorker:
    slot: Slot
    generation: int
    device: int = 0


@dataclass(frozen=True, kw_only=True)
class KillWorker:
    """SIGKILL; WorkerExited follows when it is reaped."""

    slot: Slot
    generation: int
    reason: str
    device: int = 0


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """A slot's process goes to a slot of another device; one that is there is killed."""

    slot: Slot
    device: int
    to_device: int
    to_slot: Slot
    to_generation: int


@dataclass(frozen=True, kw_only=True)
class StartBuild:
    model: ModelName
    epoch: Epoch
    spec: bytes
    tenant: str = ""  # whose disk it takes


@dataclass(frozen=True, kw_only=True)
class DropPublished:
    """Remove the copy of a commit that a version was made of, or would have been."""

    directory: str


@dataclass(frozen=True, kw_only=True)
class KillBuild:
    model: ModelName
    epoch: Epoch


@dataclass(frozen=True, kw_only=True)
class SweepPrograms:
    """No build runs, and models are gone: give back what was kept on disk for them alone."""

    digests: frozenset[str]  # of the models that stay
    specs: frozenset[bytes]
    gone_specs: frozenset[bytes]


@dataclass(frozen=True, kw_only=True)
class CreateCommits:
    """Make the job's commit memfd (header + two slots); the controller keeps it."""

    job: JobName
    slot_bytes: int


@dataclass(frozen=True, kw_only=True)
class DropCommits:
    """Give back the job's commit memfd; what is on disk stays."""

    job: JobName


@dataclass(frozen=True, kw_only=True)
class CountSharers:
    """So many jobs that share their input are not over: what one loads alone no other one finds."""

    group: str  # as in RunJob
    jobs: int


@dataclass(frozen=True, kw_only=True)
class RemoveJob:
    """Remove what an ended job left on disk: commits, log, history."""

    job: JobName


@dataclass(frozen=True, kw_only=True)
class Announce:
    """To the frontend: this model may be asked for, with this signature."""

    model: ModelName
    manifest: Manifest
    priority: int
    tenant: str = ""  # where tenants are separate, whose file of the pool its requests lie in
    base: str = ""  # the name that requests use; empty: the model's
    version: int = 1
    is_current: bool = True  # requests without a number are its
    lineage: int = 0  # equal for all versions of one registration, and for no other's


@dataclass(frozen=True, kw_only=True)
class Retract:
    model: ModelName


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One reply to a client. Exactly one without ``more`` per token; outputs lie in the pool."""

    token: Token
    body: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[SlabTensor, ...] = ()
    timing: dict[str, Any] | None = None
    error: PipeSwitchError | None = None
    more: bool = False


@dataclass(frozen=True, kw_only=True)
class Publish:
    """An event for subscribers: topic (``switch. model. job. worker. queue.``) and record."""

    topic: str
    body: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Span:
    """A named interval for the timeline. ``track``: scheduler, copy, or ``worker N``."""

    track: str
    name: str
    begin_ms: float
    end_ms: float
    args: dict[str, Any] = field(default_factory=dict)
    flow: int = 0  # epoch: draws arrows request -> switch -> groups


@dataclass(frozen=True, kw_only=True)
class Journal:
    """A fact that must survive the server: models and jobs (state_dir/journal).

    ``accepts``: whose acceptance it is, to be answered after it. When it cannot be written they
    are refused instead, and what they asked for is taken back.
    """

    entry: dict[str, Any]
    accepts: tuple[Token, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StopTrial:
    """Write the board's stop word of that slot: its trial leaves between two groups."""

    slot: Slot
    epoch: Epoch
    device: int = 0


@dataclass(frozen=True, kw_only=True)
class SaveProfile:
    """Keep it in the state directory; the next server has it again."""

    profile: Profile


@dataclass(frozen=True, kw_only=True)
class Warn:
    """One line for the operator, in the server's log."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Everything is drained (status 0) or cannot go on (non-zero): stop the server."""

    status: int
    reason: str


Command = (
    ToDaemon | ToWorker | RaiseTurn | SpawnDaemon | SpawnWorker | KillWorker | StartBuild
    | KillBuild | CreateCommits | DropCommits | CountSharers | RemoveJob | Announce | Retract
    | Answer | Publish | Span | DropPublished | Journal | SweepPrograms | StopTrial | SaveProfile
    | Warn | Leave | HandOver
)  # fmt: skip
OfDevice = (
    ToDaemon | ToWorker | RaiseTurn | SpawnDaemon | SpawnWorker | KillWorker | StopTrial
)  # fmt: skip
"""Commands that are performed on one device."""
