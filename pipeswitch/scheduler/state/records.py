"""Records of a model, a request, a job and a worker. Owned by the scheduler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from ...base.errors import PipeSwitchError
from ...ipc.messages.base import JobName, ModelName, OpId, SlabTensor, Slot, Turn
from ...ipc.messages.daemon import TransmitEnded
from ...ipc.messages.worker import InferenceDone, SamplingParams
from ...planning.grouping import Plan
from ...planning.profile import Profile
from ...planning.streaming import StagingLayout
from ...programs.interface.layout import Manifest
from ...programs.interface.processors import Processor
from ...wire.request_timing import RequestTiming
from ..events import Token
from ..policies.job_orders import JobView
from .fair_queue import Charge
from .regions import Owner
from .states import (
    MODEL_TRANSITIONS,
    RESIDENCY_TRANSITIONS,
    TASK_TRANSITIONS,
    VERSION_TRANSITIONS,
    WORKER_TRANSITIONS,
    ModelEvent,
    ModelState,
    Residency,
    ResidencyEvent,
    StateMachine,
    TaskEvent,
    TaskState,
    VersionEvent,
    VersionState,
    WorkerEvent,
    WorkerState,
)

NO_OP_ID = OpId(0)
NO_TURN = Turn(0)
NO_NAME = ModelName("")
Version = tuple[str, Plan]  # digest and groups: what a worker has loaded


@dataclass
class Registration:
    """Registration of a model: spec, build, and the clients that wait for its result or end."""

    model: ModelName
    spec: bytes
    spec_digest: str
    client: str  # builds take turns among clients
    build_id: OpId
    storing: int | None = None  # the device whose daemon was told to bring its bytes to the store
    takes_over: bool = False  # its name stands for it as soon as it is there
    is_known: bool = False  # an earlier server had it: it is listed as failed if it is refused
    waiters: list[Token] = field(default_factory=list)
    end_waiters: list[Token] = field(default_factory=list)  # for the end of this version alone
    error: PipeSwitchError | None = None  # why it was refused


@dataclass
class Served:
    """Name that requests use. Its versions have records of their own."""

    name: ModelName
    current: int  # the version that it stands for
    last: int  # the highest number that it ever gave
    spec_digest: str  # of the registration that began it: the same again is a no-op
    born: OpId  # tells its versions from those of another registration under this name
    shares: dict[int, int] = field(default_factory=dict)  # percent of requests, of other versions
    drawn: int = 0  # requests that were dealt out by them
    end_waiters: list[Token] = field(default_factory=list)  # for the end of its last version


@dataclass
class Model:
    """Version that is served, or will be: the same on all devices."""

    name: ModelName  # of the version: versions.version_name
    priority: int
    want_pinned: bool
    registered_at_ms: float
    base: ModelName = NO_NAME  # the name that requests use; none: this one
    version: int = 1
    tenant: str = ""  # who registered it; empty: the server's owner
    devices: tuple[str, ...] = ()  # that may serve it; none named: all
    processor: Processor | None = None  # what makes its inputs; None: its clients
    split: Served | None = None  # it is the current one, and others get a share of its requests
    chosen_op_id: OpId = NO_OP_ID  # when its name came to stand for it, the last time
    state: StateMachine[ModelState, ModelEvent] = field(init=False)
    serving: StateMachine[VersionState, VersionEvent] = field(init=False)
    manifest: Manifest | None = None  # as it was built; until then an earlier server's, if at all
    store_offset_bytes: int = -1
    reason: str = ""  # why it failed or is quarantined
    deaths: int = 0  # workers it killed since its last success
    last_batch: int = 0  # of the last run; 0: none yet
    failed_batches: int = 0  # joined runs in a row that ended badly

    def __post_init__(self) -> None:
        self.state = StateMachine(f"model {self.name}", ModelState.BUILDING, MODEL_TRANSITIONS)
        self.base = self.base or self.name
        self.serving = StateMachine(
            f"version {self.name}", VersionState.COMING, VERSION_TRANSITIONS
        )

    @property
    def built(self) -> Manifest:
        """Program of a model that was built."""
        assert self.manifest is not None
        return self.manifest

    @property
    def owner(self) -> Owner:
        """Owner of the model's bytes on a device and in the host store, and of its words."""
        return Owner("model", self.name)


@dataclass
class Grouping:
    """Layer groups of a model on a device, and their reason."""

    plan: Plan = ()  # empty: as built
    source: str = "buckets"
    why: str = "it has no profile"
    next: tuple[Plan, str, str] | None = None  # plan, source, why: when it can be cut
    profile: Profile | None = None  # the one the plan was made from
    planned: Plan = ()  # what it planned


@dataclass
class Transfer:
    """Latest copy of a model to a device."""

    started_at_ms: float = 0.0
    ended_at_ms: float = 0.0
    report: TransmitEnded | None = None  # of the last complete one
    ahead_id: OpId = NO_OP_ID  # of a copy that was sent ahead of its request
    is_prefetch: bool = False  # in flight only because of a hint: may be cancelled
    retry_at_ms: float = 0.0  # after one that broke off


@dataclass
class DeviceModel:
    """Model on one device: its groups there, their place, its measurements."""

    model: Model
    name: ModelName = field(init=False)  # of that
    residency: StateMachine[Residency, ResidencyEvent] = field(init=False)
    manifest: Manifest | None = None  # in the groups of ``plan``
    grouping: Grouping = field(default_factory=Grouping)
    transfer: Transfer = field(default_factory=Transfer)
    resident_groups: int = 0  # of a model that streams: groups that stay between two passes
    resident_bytes: int = 0  # bytes of those groups that the last transfer did not send
    predicted_ms: dict[int, float] = field(default_factory=dict)  # a cold switch, by batch
    region_bytes: int = 0  # of the arena: for all of it, or the window that it streams through
    staging: StagingLayout | None = None  # of one that is larger than the arena: it streams
    min_bytes: int = 0  # the smallest window that such a one can do with
    preferred_offset_bytes: int = -1  # sticky arena offset: cached views stay valid
    first_fence: int = -1
    residency_id: OpId = NO_OP_ID
    computed_op_id: OpId = NO_OP_ID  # residency operation id of the last copy that computed
    users: int = 0  # dispatched tasks that read it now
    last_used_at_ms: float = 0.0
    use_count: int = 0

    def __post_init__(self) -> None:
        self.name = self.model.name
        self.residency = StateMachine(f"model {self.name}", Residency.HOST, RESIDENCY_TRANSITIONS)

    @property
    def owner(self) -> Owner:
        """Owner of its fences and its bytes; if it streams, of the bytes that it keeps."""
        return self.model.owner

    @property
    def rest(self) -> Owner:
        """Owner of the ring that a model streams through."""
        return Owner("rest", self.name)

    @property
    def built(self) -> Manifest:
        """Program in the groups of its plan; the model was built."""
        assert self.manifest is not None
        return self.manifest

    @property
    def needs_bytes(self) -> int:
        """Smallest part of the arena that can serve the model."""
        return self.min_bytes or self.built.total_bytes

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that each pass of a streaming model copies."""
        resident = self.staging.resident if self.staging is not None else ()
        return sum(
            g.size_bytes for index, g in enumerate(self.built.groups) if index not in resident
        )

    @property
    def is_code(self) -> bool:
        """True if the model, which was built, is the operator's own module instead of a graph."""
        return self.built.mode == "module"

    @property
    def version(self) -> Version:
        """Version that a worker must have loaded to run the model, which has a manifest."""
        assert self.manifest is not None
        return (self.manifest.digest, self.grouping.plan)

    @property
    def is_on_device(self) -> bool:
        """True if the model is resident or on its way: nothing needs to be sent for it."""
        return self.residency.state in (
            Residency.TRANSMITTING,
            Residency.RESIDENT,
            Residency.PINNED,
        )

    @property
    def is_being_sent(self) -> bool:
        """True if the daemon may still write to its region."""
        return self.residency.state in (Residency.TRANSMITTING, Residency.ABANDONED)


@dataclass
class Runs:
    """Runs of a generation so far. For policies each run is a new arrival."""

    born_at_ms: float  # when the first one arrived
    allowed_ms: float | None  # to the first token, and for each run after it
    timing: RequestTiming | None = None  # their sum
    is_returning: bool = False  # one has ended, and the next one is not known yet
    is_cancelled: bool = False  # while one was dispatched, whose end is the request's


@dataclass
class BatchingFacts:
    """Facts that decide which requests one run may serve together.

    Attributes:
        padded: Extents by ``Manifest.pads``; empty: the request is not padded.
        fixed: The other extents of a padded request, except the batch.
        is_alone: A run with other requests failed, or its schema forbids one: it runs alone.
        deaths: Number of workers that died while the request ran alone.
        leader: Generation whose run computes tokens that both have; the request runs after it.
    """

    padded: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()
    never_batch: bool = False
    deaths: int = 0
    leader: Token | None = None


@dataclass
class RequestForecast:
    """Predictions of a request's end, and the decisions that rest on them.

    Attributes:
        infeasible_after_ms: Instant after which no answer can arrive before the deadline.
        predicted_end_ms: Prediction made at dispatch; None: nobody needs one.
        is_probe: Accepted although it seems late, so that its model is measured again.
        placed: Reason for the choice of its device, if there are several.
    """

    infeasible_after_ms: float | None = None
    predicted_end_ms: float | None = None
    is_probe: bool = False
    placed: str = ""


@dataclass
class Steps:
    """Steps of a request before and after its model's run.

    Attributes:
        is_raw: A preprocessing function has yet to make the inputs.
        is_after: The inputs are the model's outputs, of which postprocessing makes the answer.
        follows: Another step of the chain will come.
        preprocess_ms: Time that preprocessing took.
    """

    is_raw: bool = False
    is_postprocess: bool = False
    follows: bool = False
    preprocess_ms: float | None = None


@dataclass
class Request:
    """One accepted inference request."""

    token: Token
    request_id: str
    model: ModelName
    priority: int
    deadline_at_ms: float | None
    inputs: tuple[SlabTensor, ...]
    reply_offset_bytes: int
    reply_bytes: int
    arrived_at_ms: float
    caller: str = ""  # who asks; empty: the server's owner
    batch: int = 1
    size_bytes: int = 0  # of its model
    batching: BatchingFacts = field(default_factory=BatchingFacts)
    forecast: RequestForecast = field(default_factory=RequestForecast)
    steps: Steps = field(default_factory=Steps)
    sequence: tuple[int, OpId] = (0, NO_OP_ID)  # its number (0: none), and its last run
    sampling_params: SamplingParams | None = None  # of a generation's next or current run
    runs: Runs | None = None  # of a generation
    state: StateMachine[TaskState, TaskEvent] = field(init=False)
    connection: str = ""  # the caller's session, or its address over the gateway

    def __post_init__(self) -> None:
        first = TaskState.PREPROCESSING if self.steps.is_raw else TaskState.QUEUED
        self.state = StateMachine(f"request {self.request_id}", first, TASK_TRANSITIONS)
        if self.sampling_params is not None:
            deadline_at_ms, at_ms = self.deadline_at_ms, self.arrived_at_ms
            self.runs = Runs(at_ms, None if deadline_at_ms is None else deadline_at_ms - at_ms)
            self.batching.never_batch = self.sampling_params.never_batch

    @property
    def due_ms(self) -> float:
        """Deadline; infinity if there is none."""
        return math.inf if self.deadline_at_ms is None else self.deadline_at_ms


Wanted = Literal["run", "pause", "cancel", "drain"]


@dataclass(frozen=True)
class JobSpec:
    """A training job as its user submitted it."""

    name: JobName
    entry: str
    args: tuple[str, ...]
    priority: int
    tenant: str = ""  # empty: the server's owner
    share: str = ""  # the group of jobs that read the same input; empty: none
    devices: tuple[str, ...] = ()  # that may train it; empty: all
    defaults: tuple[tuple[str, str], ...] = ()  # arguments of ``job.steps`` that the script omits

    @classmethod
    def from_row(cls, name: JobName, row: Mapping[str, Any]) -> JobSpec:
        """Read a job of the journal. Raises msgspec.ValidationError: it is not one."""
        return msgspec.convert({**row, "name": name}, cls)

    @property
    def row(self) -> dict[str, Any]:
        """Row of the job in the journal (``from_row``)."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in vars(self).items()
        }

    @property
    def group(self) -> str:
        """Group of the jobs of one tenant that share its input; empty: none."""
        return f"{self.tenant}/{self.share}" if self.share else ""


@dataclass
class JobProgress:
    """Progress of a job, its interruptions, and the text that its user reads."""

    step: int = 0
    epoch_index: int = 0
    steps_per_s: float = 0.0
    steps_left: int = -1  # until its script ends, by its last report; -1: not known
    reported_op_id: OpId = NO_OP_ID  # dispatch of its last report
    steps_recomputed: int = 0
    suspensions: int = 0
    evictions: int = 0
    restarts: int = 0  # after its worker crashed
    deaths_without_progress: int = 0
    stops_missed: int = 0  # graces in a row that it used up: it did not stop, or did not leave
    missed_at: int = 0  # suspensions by the last one
    beside: dict[str, object] = field(default_factory=dict)  # whose turn began before its last one
    last_log: dict[str, object] = field(default_factory=dict)
    error: str = ""
    why: str = ""


@dataclass
class JobMemory:
    """A job's memory on the device, and its commits in the host store and on disk."""

    lease_bytes: int = 0
    lease_asked_bytes: int = 0  # waiting for memory
    activations: dict[str, object] = field(default_factory=dict)  # of its last step, if limited
    is_blocked: bool = False  # it needs memory for activations that other jobs have
    blocked_at_ms: float = 0.0  # since when, or since another job left for it
    beside_blocked: dict[JobName, int] = field(default_factory=dict)  # steps of others by then
    commit_slot_bytes: int = 0  # 0: no commit area yet
    committed_step: int = -1
    commit_number: int = 0  # last commit of this dispatch that the daemon was sent
    copy_id: OpId = NO_OP_ID  # dispatch whose commit the daemon copies now
    copying_number: int = 0  # number of that commit
    persisted_step: int = -1
    is_persisting: bool = False
    persist_id: OpId = NO_OP_ID  # names the write under way
    persist_began_at_ms: float = 0.0  # the last write to disk
    persist_due_at_ms: float = 0.0  # earliest start of the next one


@dataclass
class JobTiming:
    """Times at which a job got and lost the device, and how long it had it."""

    dispatched_at_ms: float = 0.0
    start_ms: float = 0.0  # from its dispatch to its lease request: the cost of an eviction
    turn_left_ms: float = 0.0  # of training, before another job may take its memory
    cycle_began_at_ms: float = 0.0
    cycle_left_ms: float = 0.0
    stop_asked_at_ms: float = 0.0
    evict_asked_at_ms: float = 0.0
    last_ran_at_ms: float = 0.0
    parked_at_ms: float = 0.0  # when it was suspended last
    preempted_ms: float = 0.0  # all that it waited in place for requests
    away_ms: float = -1.0  # of a step, by its last report: it fetched, and others could compute
    trained_ms: float = 0.0  # of the device's time
    counted_from_ms: float = 0.0  # of that, when a job came to its device last
    reported_trained_ms: float = 0.0  # of that, by its last report
    ended_at_ms: float = 0.0  # by the calendar, once it is over


@dataclass
class Job:
    """A training job from its acceptance to its end."""

    spec: JobSpec
    sent_to: str = ""  # the one of its devices that its user moved it to
    progress: JobProgress = field(default_factory=JobProgress)
    memory: JobMemory = field(default_factory=JobMemory)
    timing: JobTiming = field(default_factory=JobTiming)
    state: StateMachine[TaskState, TaskEvent] = field(init=False)
    wanted: Wanted = "run"  # what to do when it has unwound
    created_op_id: OpId = NO_OP_ID  # operation ids up to it name an older job of this name
    op_id: OpId = NO_OP_ID  # of its current dispatch
    turn: Turn = NO_TURN
    slot: Slot | None = None
    place: OpId = NO_OP_ID  # in the round robin: the smallest goes first
    stops_at_boundary: bool = False  # the stop asked for may wait for a step boundary
    is_away: bool = False  # it gave its turn up, and has not reported that it can compute again
    leaves_for: int | None = None  # index of the device for which it was evicted
    waiters: list[Token] = field(default_factory=list)
    answer_on_change: list[Token] = field(default_factory=list)
    exporters: list[Token] = field(default_factory=list)  # wait for its newest commit on disk
    movers: list[Token] = field(default_factory=list)  # wait until it is placed where they asked

    def __post_init__(self) -> None:
        self.state = StateMachine(f"job {self.spec.name}", TaskState.QUEUED, TASK_TRANSITIONS)

    @property
    def allowed(self) -> tuple[str, ...]:
        """Devices that the job may be on now; none: all."""
        return (self.sent_to,) if self.sent_to else self.spec.devices

    def view(self, now_ms: float) -> JobView:
        """Return what job orders see at ``now_ms``; 0: the job does not have the device."""
        progress, timing = self.progress, self.timing
        left_s = progress.steps_left / progress.steps_per_s if progress.steps_per_s else 0.0
        return JobView(
            self.place,
            timing.trained_ms
            - timing.counted_from_ms
            + max(0.0, now_ms - timing.cycle_began_at_ms if now_ms else 0.0),
            max(0.0, 1000.0 * left_s),
            self.memory.commit_slot_bytes,
            self.created_op_id,
            self.spec.priority,
            timing.away_ms,
        )

    @property
    def slice(self) -> Owner:
        """Owner of its state's range on the device."""
        return Owner("slice", self.spec.name)

    @property
    def commits(self) -> Owner:
        """Owner of its commit area in the host store."""
        return Owner("commits", self.spec.name)


@dataclass
class Worker:
    """A slot and the process in it."""

    slot: Slot
    generation: int = 0
    pid: int = 0
    state: StateMachine[WorkerState, WorkerEvent] = field(init=False)
    warm: dict[ModelName, Version] = field(default_factory=dict)  # what it has loaded
    unpreparable: set[tuple[ModelName, Version]] = field(default_factory=set)
    complete_at: int = -1  # the edition of the models of which it lacks no program it could load
    preparing: ModelName | None = None
    dispatch_id: OpId = NO_OP_ID
    job: JobName | None = None  # from its dispatch until the process is reaped
    retired_at_ms: float = 0.0
    deaths: int = 0  # in a row, without a task ended well
    respawn_at_ms: float | None = None
    kill_reason: str = ""  # of a doomed one
    runs_code: bool | None = None  # its process ran the operator's code; False: programs; None: yet
    tenant: str | None = None  # the one its process serves, where tenants are separate; None: yet
    is_blamed: bool = True  # killed for what it did itself

    def __post_init__(self) -> None:
        self.state = StateMachine(f"worker {self.slot}", WorkerState.DEAD, WORKER_TRANSITIONS)

    @property
    def is_alive(self) -> bool:
        """True if the process is not reaped: it may still write to all its memory."""
        return self.state.state is not WorkerState.DEAD


@dataclass
class RunningTask:
    """An inference task on a worker: computing, or dispatched and waiting for its turn."""

    op_id: OpId
    slot: Slot
    tokens: tuple[Token, ...]  # of all requests that it computes, in the order of their rows
    model: ModelName
    dispatched_at_ms: float
    was_resident: bool
    batch: int = 1  # of all of them
    residency_id: OpId = NO_OP_ID  # of the copy it reads
    resident_bytes: int = 0  # bytes of a streaming model that were on the device before
    streamed: int = 0  # bytes of a model larger than the arena, which come while it computes
    is_multi_step: bool = False  # with further steps, until another request waits
    chooses: bool = False  # tokens, for generations
    began_at_ms: float = 0.0  # when it was given the turn; later by what it was aside
    yielded_at_ms: float = 0.0  # when it stepped aside last
    yielded_ms: float = 0.0  # all that it was aside, without that
    hung_why: str = ""  # it computed for too long: its worker is killed
    preempted: str = ""  # the job that stepped aside for it
    charge: Charge | None = None
    event: int = 0  # number of the event that caused the dispatch

    @property
    def turn(self) -> Turn:
        return Turn(self.op_id)

    @property
    def is_batched(self) -> bool:
        """True if the task computes several requests together."""
        return len(self.tokens) > 1


@dataclass(frozen=True)
class MeasuredRun:
    """One run of a model under measurement, and the times that its worker reported."""

    activation: RunningTask
    message: InferenceDone
