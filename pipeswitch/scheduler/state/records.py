"""Records of models, requests, jobs and workers. The scheduler owns them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ...base.errors import PipeSwitchError
from ...ipc.messages.base import JobName, ModelName, OpId, Slot, Turn
from ...ipc.messages.daemon import CopyPart, TransmitEnded
from ...ipc.messages.run import Run
from ...ipc.messages.worker import InferenceDone, Shapes
from ...planning.grouping import Plan
from ...planning.planned_groups import PlannedGroups
from ...planning.streaming import StagingLayout
from ...programs.interface.groups import TableByRows
from ...programs.interface.layout import Manifest, Wrapper
from ...wire.request_timing import RequestTiming
from ..policies.job_orders import JobView
from .events import (
    Exited,
    JobSpec,
    Origin,
    Prepared,
    Received,
    Reply,
    Token,
    UnregisterRequest,
)
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
from .variants import Family, Image, Lent

NO_OP_ID = OpId(0)
NO_TURN = Turn(0)
NO_NAME = ModelName("")
PRIORITY_NAMES = {0: "high", 1: "normal", 2: "low"}
Version = tuple[str, Plan]  # digest and groups of a program, as a worker loads it


@dataclass
class Registration:
    """Registration of a model: spec, build, and clients that wait for its result or its removal."""

    model: ModelName
    spec: bytes
    spec_digest: str
    client: str  # client that registers; clients take turns with builds
    build_id: OpId
    storing: int | None = None  # index of the device whose daemon loads it into the host store
    takes_over: bool = False  # the version becomes current as soon as it is ready
    is_known: bool = False  # restored from the journal: listed as failed if it is refused
    like: Model | None = None  # its build waits for this model's program, to take it
    lent: Lent = ()  # restored: how the place that it shared before differs from it
    rebuilds: str = ""  # digest of its program, whose derived file is damaged
    waiters: list[Token] = field(default_factory=list)
    end_waiters: list[Token] = field(default_factory=list)  # clients that await its removal
    error: PipeSwitchError | None = None  # reason for the refusal


@dataclass
class Served:
    """Name that requests use. Each of its versions has its own record (``Model``)."""

    name: ModelName
    current: int  # number of the current version
    last: int  # highest version number so far
    spec_digest: str  # digest of the first registration; repeating that one is a no-op
    born: OpId  # registration id of its versions; a name that is used again gets a new one
    shares: dict[int, int] = field(default_factory=dict)  # version -> percent of requests
    drawn: int = 0  # number of requests that the shares have distributed
    note: str = ""  # reason why the configuration's ``[[model]]`` was refused
    end_waiters: list[Token] = field(default_factory=list)  # clients that await its removal


@dataclass
class Model:
    """Version of a model that is or will be served; the record is the same for all devices."""

    name: ModelName  # versions.version_name(base, version)
    priority: int
    want_pinned: bool
    registered_at_ms: float
    base: ModelName = NO_NAME  # name that requests use; empty: ``name``
    version: int = 1
    tenant: str = ""  # tenant that registered it; empty: the server's owner
    devices: tuple[str, ...] = ()  # names of the devices that may serve it; empty: all
    wrapper: Wrapper | None = None  # what converts its inputs and outputs; None: nothing
    split: Served | None = None  # set if this version is current and others have shares
    chosen_op_id: OpId = NO_OP_ID  # id taken when it last became current
    state: StateMachine[ModelState, ModelEvent] = field(init=False)
    serving: StateMachine[VersionState, VersionEvent] = field(init=False)
    manifest: Manifest | None = None  # made by the build; until then the journal's
    store_offset_bytes: int = -1
    image: Image = ()  # where the host store has its bytes, if variants have some; else empty
    reason: str = ""  # reason for its failure or quarantine
    deaths: int = 0  # number of workers that it killed since its last success
    last_batch: int = 0  # batch of its last run; 0: it has not run yet
    failed_batches: int = 0  # number of failed runs of several requests, in a row

    def __post_init__(self) -> None:
        self.state = StateMachine(f"model {self.name}", ModelState.BUILDING, MODEL_TRANSITIONS)
        self.base = self.base or self.name
        self.serving = StateMachine(
            f"version {self.name}", VersionState.COMING, VERSION_TRANSITIONS
        )

    @property
    def built(self) -> Manifest:
        """Manifest of the model, which must have been built."""
        assert self.manifest is not None
        return self.manifest

    @property
    def pieces(self) -> Image:
        """Parts of the model in the host store, in order."""
        return self.image or (CopyPart(self.store_offset_bytes, 0, self.built.total_bytes),)

    @property
    def owner(self) -> Owner:
        """Owner of the model's bytes on a device and in the host store, and of its fences."""
        return Owner("model", self.name)


@dataclass
class Grouping:
    """Layer groups of a model on a device, and the reason for them."""

    plan: Plan = ()  # empty: the groups of the build
    source: str = "buckets"
    why: str = "it has no profile"
    next: tuple[Plan, str, str] | None = None  # plan, source and why, to apply when possible
    planned: PlannedGroups | None = None


@dataclass
class Transfer:
    """Latest copy of a model to a device."""

    started_at_ms: float = 0.0
    ended_at_ms: float = 0.0
    report: TransmitEnded | None = None  # report of the last complete copy
    ahead_id: OpId = NO_OP_ID  # residency id of a copy that began before its request
    is_prefetch: bool = False  # copied only because of a hint: may be cancelled
    retry_at_ms: float = 0.0  # earliest retry after a failed copy
    order: tuple[int, ...] = ()  # groups in the order of their copies; below 0: rows
    share: float = 1.0  # part of the model's bytes that is copied; the rest was a variant's
    by_rows: tuple[Run, ...] = ()  # the runs whose rows are copied first, until the copy ends


@dataclass
class DeviceModel:
    """Model on one device: its groups there, their place, its measurements."""

    model: Model
    name: ModelName = field(init=False)  # name of ``model``
    residency: StateMachine[Residency, ResidencyEvent] = field(init=False)
    manifest: Manifest | None = None  # the model's manifest, with the groups of the plan
    grouping: Grouping = field(default_factory=Grouping)
    transfer: Transfer = field(default_factory=Transfer)
    resident_groups: int = 0  # number of a streaming model's groups that stay between passes
    resident_bytes: int = 0  # bytes that the last transfer did not send, since they were there
    region_bytes: int = 0  # needed part of the arena: the whole model, or a streaming window
    staging: StagingLayout | None = None  # set if the model streams: the arena is too small
    min_bytes: int = 0  # smallest window in which the model can stream; 0: it does not stream
    preferred_offset_bytes: int = -1  # last arena offset: reuse keeps workers' views valid
    first_fence: int = -1
    family: Family | None = None  # models with its layout, if there are others
    table: TableByRows | None = None  # group that may be copied last, after rows of it
    residency_id: OpId = NO_OP_ID
    computed_op_id: OpId = NO_OP_ID  # residency id of the last copy that a finished run used
    users: int = 0  # number of dispatched tasks that read it
    last_used_at_ms: float = 0.0
    use_count: int = 0

    def __post_init__(self) -> None:
        self.name = self.model.name
        self.residency = StateMachine(f"model {self.name}", Residency.HOST, RESIDENCY_TRANSITIONS)

    @property
    def owner(self) -> Owner:
        """Owner of its fences and bytes on the device; if it streams, of the groups that stay."""
        return self.model.owner

    @property
    def rest(self) -> Owner:
        """Owner of the ring that a model streams through."""
        return Owner("rest", self.name)

    @property
    def built(self) -> Manifest:
        """Manifest with the groups of its plan; the model must have been built."""
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
        """True if the built model is the operator's own module instead of a graph."""
        return self.built.mode == "module"

    @property
    def version(self) -> Version:
        """Digest and groups that a worker must have loaded to run the built model."""
        assert self.manifest is not None
        return (self.manifest.digest, self.grouping.plan)

    @property
    def is_on_device(self) -> bool:
        """True if the model is resident or being copied: no copy needs to be started."""
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
class RunHistory:
    """Runs so far of a request that may need several."""

    born_at_ms: float  # arrival of the request
    allowed_ms: float | None  # time limit of the first token and each later run
    timing: RequestTiming | None = None  # sum of the times of its runs
    is_cancelled: bool = False  # cancelled during a run: the request ends with that run


@dataclass
class BatchingFacts:
    """Facts that decide which requests one run may serve together.

    Attributes:
        padded: Extents of the dimensions in ``Manifest.pads``; empty: it is not padded.
        fixed: The other extents of a padded request, except the batch.
        never_batch: True if it runs alone: a batch with it failed, or its schema forbids batches.
        deaths: Number of workers that died while the request ran alone.
        number: Place among equal requests when it was queued last; it returns there (``is_back``).
    """

    padded: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()
    never_batch: bool = False
    deaths: int = 0
    number: int = 0


@dataclass
class RequestForecast:
    """Predictions of a request's end, and the decisions that rest on them.

    Attributes:
        infeasible_after_ms: Instant after which no answer can arrive before the deadline.
        predicted_end_ms: End that was predicted at dispatch; None if no prediction is needed.
        is_probe: True if it is accepted although it seems late, to measure its model again.
        placed: Reason for the choice of its device; empty if there is only one device.
    """

    infeasible_after_ms: float | None = None
    predicted_end_ms: float | None = None
    is_probe: bool = False
    placed: str = ""


@dataclass
class Steps:
    """Steps of a request before and after its model's run.

    Attributes:
        is_raw: A helper process has yet to convert the inputs.
        is_computed: The inputs are the model's outputs, of which the answer is made.
        follows: The frontend will send another step of the request.
        preprocess_ms: Time that the last conversion took.
    """

    is_raw: bool = False
    is_computed: bool = False
    follows: bool = False
    preprocess_ms: float | None = None


@dataclass
class Request:
    """One accepted inference request."""

    token: Token
    model: ModelName
    run: Run  # the run that computes, or is next
    origin: Origin
    batch: int = 1
    size_bytes: int = 0  # size of its model
    batching: BatchingFacts = field(default_factory=BatchingFacts)
    forecast: RequestForecast = field(default_factory=RequestForecast)
    steps: Steps = field(default_factory=Steps)
    history: RunHistory | None = None  # set if it may need several runs
    state: StateMachine[TaskState, TaskEvent] = field(init=False)

    def __post_init__(self) -> None:
        first = TaskState.PREPROCESSING if self.steps.is_raw else TaskState.QUEUED
        self.state = StateMachine(f"request {self.run.request_id}", first, TASK_TRANSITIONS)
        if self.run.sampling_params is not None:
            due_ms, at_ms = self.origin.deadline_at_ms, self.origin.arrived_at_ms
            self.history = RunHistory(at_ms, None if due_ms is None else due_ms - at_ms)
            self.batching.never_batch = self.run.sampling_params.never_batch

    @property
    def due_ms(self) -> float:
        """Deadline; infinity if there is none."""
        due_ms = self.origin.deadline_at_ms
        return math.inf if due_ms is None else due_ms


class RunKind(Protocol):
    """Kind of requests that need one run after the other.

    The scheduler decides when a run computes. The kind knows its contents, and the memory that a
    request keeps between its runs. It answers at once and takes no turn itself.
    """

    def ended(self, request: Request, answer: Reply) -> Reply:
        """Record the result of a run, which is the last one unless ``answer.more``.
        Return the client's answer; one without ``more``, such as an error, ends the request."""

    def renew(self, request: Request) -> None:
        """Drop the next run: its leader has computed a part of it."""

    def prepare(self, request: Request) -> Run | None:
        """Return the next run, or None until there is memory (the event ``PoolFreed``)."""

    def poll(self, waiting: Mapping[Token, Request]) -> Iterable[tuple[Token, Run]]:
        """Return the next runs of those waiting requests for which there is memory now."""


class Composites(Protocol):
    """Names in requests that stand for several models."""

    def row(self, name: ModelName) -> dict[str, Any]:
        """Return the row of a name: it has the keys of a model's row."""

    def unregister(self, event: UnregisterRequest) -> None: ...


class HelperQueue(Protocol):
    """Requests before a device has them or after it, and the helper processes that serve them.

    Attributes:
        waits: the requests, in order of arrival.
    """

    waits: Mapping[Token, object]

    def __len__(self) -> int: ...
    def count(self, name: ModelName) -> int: ...
    def held_by(self, caller: str, model: str = "") -> int:
        """Return the number of a caller's requests, for one model or for all."""

    def take(self, request: Request, wrapper: Wrapper, born: OpId, tenant: str) -> None:
        """Queue a request; its model has the wrapper and the registration id ``born``."""

    def prepared(self, event: Prepared) -> Request | None:
        """Remove a request whose result was copied; return it unless it failed or was cancelled."""

    def cancel(self, token: Token) -> bool:
        """Cancel a request. Return False if it is not here."""

    def refuse_all(self, error: PipeSwitchError) -> None:
        """Refuse every waiting client: the server stops."""

    def received(self, event: Received) -> None: ...
    def exited(self, event: Exited) -> None: ...
    def advance(self) -> int:
        """Give free processes requests; return the bits of the changes that it waits for."""

    def rows(self) -> Iterable[tuple[str, str, str, int]]:
        """Yield name, state, reason and pid of each process."""

    def stats(self) -> dict[str, int]: ...
    def check(self) -> None:
        """Assert the invariants."""


Wanted = Literal["run", "pause", "cancel", "drain"]


@dataclass
class JobProgress:
    """Progress of a job, its interruptions, and the text that its user reads."""

    step: int = 0
    epoch_index: int = 0
    steps_per_s: float = 0.0
    steps_left: int = -1  # steps until its script ends, from its last report; -1: unknown
    reported_op_id: OpId = NO_OP_ID  # dispatch that sent its last report
    steps_recomputed: int = 0
    suspensions: int = 0
    swaps: int = 0
    evictions: int = 0
    restarts: int = 0  # number of restarts after its worker died
    deaths_without_progress: int = 0
    stops_missed: int = 0  # grace periods in a row in which it did not stop or did not unwind
    missed_at: int = 0  # value of ``suspensions`` when it last missed a grace period
    beside: dict[str, object] = field(default_factory=dict)  # job that had the turn before it
    last_log: dict[str, object] = field(default_factory=dict)
    not_restored: list[str] = field(default_factory=list)  # what a resumed script would not have
    error: str = ""
    why: str = ""


@dataclass
class JobMemory:
    """A job's memory on the device, and its commits in the host store and on disk."""

    lease_bytes: int = 0
    lease_asked_bytes: int = 0  # size of the lease that it waits for
    activations: dict[str, object] = field(default_factory=dict)  # report of its last step
    is_blocked: bool = False  # the job waits for activation memory that other jobs use
    blocked_at_ms: float = 0.0  # start of that wait, or of the last eviction to end it
    beside_blocked: dict[JobName, int] = field(default_factory=dict)  # job -> its step at that time
    commit_slot_bytes: int = 0  # 0: no commit area yet
    committed_step: int = -1
    commit_number: int = 0  # number of this dispatch's last commit that the daemon got
    copy_id: OpId = NO_OP_ID  # dispatch whose commit the daemon copies now
    copying_number: int = 0  # number of that commit
    persisted_step: int = -1
    is_persisting: bool = False
    persist_id: OpId = NO_OP_ID  # operation id of the current write to disk
    persist_began_at_ms: float = 0.0  # start of the last write to disk
    persist_due_at_ms: float = 0.0  # earliest start of the next write to disk


@dataclass
class JobSwap:
    """A job's last swap (``training/swaps.py``)."""

    swap_id: OpId = NO_OP_ID  # operation id of the current or last copy
    size_bytes: int = 0
    offset_bytes: int = 0  # range of its slice, now or before the swap
    is_hidden: bool = False  # its process does not use the slice
    goes_in: bool = False  # the current or last copy goes in
    asked_at_ms: float = 0.0
    blocked_at_ms: float = 0.0  # since when its range has been in use; 0: it is free
    leaves_at_ms: float = 0.0  # when its process is killed, if its user has ordered it to leave
    cost_ms: float = 0.0  # duration of the last copies, out and in
    error: str = ""  # why its slice could not be copied out


@dataclass
class JobTiming:
    """Times at which a job got and lost the device, and durations of its use."""

    dispatched_at_ms: float = 0.0
    start_ms: float = 0.0  # time from dispatch to lease request: the cost of an eviction
    turn_left_ms: float = 0.0  # training time left before another job may take its memory
    cycle_began_at_ms: float = 0.0
    cycle_left_ms: float = 0.0
    stop_asked_at_ms: float = 0.0
    opened_for_ms: float = -1.0  # the stop for which the job's stream was opened
    evict_asked_at_ms: float = 0.0
    last_ran_at_ms: float = 0.0
    parked_at_ms: float = 0.0  # time of its last suspension
    preempted_ms: float = 0.0  # total time that it was suspended
    away_ms: float = -1.0  # reported part of a step without the device (fetches, copies)
    trained_ms: float = 0.0  # total time that it had the device
    counted_from_ms: float = 0.0  # ``trained_ms`` when any job was last added to its device
    reported_trained_ms: float = 0.0  # ``trained_ms`` at its last report
    ended_at_ms: float = 0.0  # Unix time of its end


@dataclass
class Job:
    """A training job from its acceptance to its end."""

    spec: JobSpec
    sent_to: str = ""  # name of the device that its user moved it to; empty: none
    progress: JobProgress = field(default_factory=JobProgress)
    memory: JobMemory = field(default_factory=JobMemory)
    timing: JobTiming = field(default_factory=JobTiming)
    swap: JobSwap = field(default_factory=JobSwap)
    state: StateMachine[TaskState, TaskEvent] = field(init=False)
    wanted: Wanted = "run"  # the next action, after it has unwound
    created_op_id: OpId = NO_OP_ID  # ids up to this one belong to an older job of this name
    op_id: OpId = NO_OP_ID  # operation id of its current dispatch
    turn: Turn = NO_TURN
    slot: Slot | None = None
    place: OpId = NO_OP_ID  # position in the round robin: the smallest goes first
    stops_at_boundary: bool = False  # the last stop may wait for a step boundary
    is_away: bool = False  # the job gave its turn up, and has not reported that it is back
    leaves_for: int | None = None  # index of the device for which it was evicted
    waiters: list[Token] = field(default_factory=list)
    answer_on_change: list[Token] = field(default_factory=list)
    exporters: list[Token] = field(default_factory=list)  # clients that wait for a disk write
    movers: list[Token] = field(default_factory=list)  # clients that wait for its move

    def __post_init__(self) -> None:
        self.state = StateMachine(f"job {self.spec.name}", TaskState.QUEUED, TASK_TRANSITIONS)

    @property
    def allowed(self) -> tuple[str, ...]:
        """Names of the devices that may hold the job now; empty: all."""
        return (self.sent_to,) if self.sent_to else self.spec.devices

    def view(self, now_ms: float) -> JobView:
        """Return the job as job orders see it; ``now_ms`` is 0 if it does not have the device."""
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
    """Slot for a worker, and the process in it."""

    slot: Slot
    incarnation: int = 0
    pid: int = 0
    state: StateMachine[WorkerState, WorkerEvent] = field(init=False)
    warm: dict[ModelName, Version] = field(default_factory=dict)  # programs that it has loaded
    unpreparable: set[tuple[ModelName, Version]] = field(default_factory=set)
    complete_at: int = -1  # ``model_changes`` at which it had nothing left to load
    preparing: ModelName | None = None
    # CUDA graphs that a worker has captured; False: this one shall capture them, too.
    graphs: dict[tuple[ModelName, Shapes], bool] = field(default_factory=dict)
    dispatch_id: OpId = NO_OP_ID
    job: JobName | None = None  # its job, from the dispatch until the process is reaped
    retired_at_ms: float = 0.0
    deaths: int = 0  # deaths in a row before its process was ready
    respawn_at_ms: float | None = None
    kill_reason: str = ""  # reason for its kill, if it is DOOMED
    runs_code: bool | None = None  # True: it ran operator code; False: programs; None: neither
    tenant: str | None = None  # tenant that its process is bound to; None: not bound
    is_blamed: bool = True  # a death counts against the worker's task

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
    tokens: tuple[Token, ...]  # all requests that it computes, in the order of their rows
    model: ModelName
    queued_until_ms: float  # from then on it waited for no other task; 0: it still waits
    was_resident: bool
    copied_at_ms: float = 0.0  # end of a copy that no run had used: earlier requests waited for it
    batch: int = 1  # total batch of its requests
    residency_id: OpId = NO_OP_ID  # operation id of the copy that it reads
    resident_bytes: int = 0  # bytes of a streaming model that were on the device before
    streamed: int = 0  # bytes copied during the run of a model larger than the arena
    is_multi_step: bool = False  # the task computes steps until another request waits
    chooses: bool = False  # the task samples tokens
    began_at_ms: float = 0.0  # start of its turn, moved later by the time that it yielded
    yielded_at_ms: float = 0.0  # start of its last yield
    yielded_ms: float = 0.0  # total time of its finished yields
    hung_why: str = ""  # set if it hangs: the reason for the kill of its worker
    preempted: str = ""  # name of the job that was stopped for it
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
    """A timed run of a model: its task, and its worker's message with the times."""

    activation: RunningTask
    message: InferenceDone
