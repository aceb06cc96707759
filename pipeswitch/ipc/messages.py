"""Every message between PipeSwitch's own processes, one frozen struct each.

Direction stands in each docstring. Bytes are wire.py's business. Sizes and offsets are bytes;
instants are milliseconds of the system-wide monotonic clock. ``epoch`` names one dispatch, lease
or transfer for ever: it only grows, so a late message of an older one is recognised and dropped.
``turn`` is the permission to compute on the device (invariant I5): it has its own growing number.
"""

from __future__ import annotations

from typing import Any, Literal, NewType

import msgspec

ModelName = NewType("ModelName", str)
JobName = NewType("JobName", str)
Slot = NewType("Slot", int)  # a worker's place; processes in it come and go
Epoch = NewType("Epoch", int)
Turn = NewType("Turn", int)


class Message(
    msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True, gc=False
):
    """Base of all internal messages."""


# ---- controller <-> fork server -------------------------------------------------------------


class Fork(Message, frozen=True):
    """controller -> fork server: fork a child; the descriptors of its sockets come along."""

    ticket: int
    kind: Literal["worker", "builder", "daemon", "stage"]
    name: str  # process name, e.g. "pipeswitch-worker-0"
    settings: bytes  # msgpack of the kind's own settings struct, opaque here


class ForkServerReady(Message, frozen=True):
    """fork server -> controller: torch is imported, children can be had."""

    pid: int
    import_ms: float


class Forked(Message, frozen=True):
    """fork server -> controller: the child's pid."""

    ticket: int
    pid: int  # 0: the system had no room for another process


class ChildExited(Message, frozen=True):
    """fork server -> controller: reaped; its memory is gone for good."""

    pid: int
    status: int  # as os.waitstatus_to_exitcode: negative is a signal


# ---- controller <-> memory daemon -----------------------------------------------------------


class DaemonSettings(Message, frozen=True):
    """What a memory daemon is started with (descriptors: control, store, board, bells…)."""

    device: str
    arena_bytes: int
    store_bytes: int
    words: int  # arrival words at the start of the models memory
    link_bytes_per_s: float  # 0: as fast as it goes
    log_path: str = ""
    log_bytes: int = 0  # what stays of the log, beside two older ones; 0: all
    separates_tenants: bool = False  # each tenant's models lie in a file of their own (ADR 23)
    options: bytes = b""  # the device kind's own


class DaemonReady(Message, frozen=True):
    """memory daemon -> controller: memory is taken.

    Descriptors, for the workers: on cpu models (sealed) and work, or work alone where tenants are
    separate; on cuda the host's copy of the arrival words.
    """

    pid: int
    handle: bytes = b""  # cuda: the allocation's IPC handle


class StoreModel(Message, frozen=True):
    """controller -> memory daemon: load a built program's tensors into the host store."""

    model: ModelName
    epoch: Epoch
    directory: str  # holds manifest.json and the weights file
    store_offset_bytes: int
    size_bytes: int


class ModelStored(Message, frozen=True):
    """memory daemon -> controller: the bytes lie in the store and match their digest."""

    model: ModelName
    epoch: Epoch
    load_ms: float


class StoreFailed(Message, frozen=True):
    """memory daemon -> controller: unreadable or corrupt; nothing of it is used."""

    model: ModelName
    epoch: Epoch
    reason: str


class GroupCopy(Message, frozen=True):
    """One layer group's copy: host store -> arena, then its arrival word becomes the epoch."""

    store_offset_bytes: int
    arena_offset_bytes: int
    size_bytes: int
    word: int  # index of its uint32 arrival word


class TransmitModel(Message, frozen=True):
    """controller -> memory daemon: copy groups in order, raise each word (PipeSwitch 4.2).

    Where tenants are separate, the first one of a tenant carries its file of the arena.
    """

    model: ModelName
    epoch: Epoch
    arena_offset_bytes: int  # the leased region; every copy must lie inside
    region_bytes: int
    groups: tuple[GroupCopy, ...]
    tenant: str = ""  # whose file of the arena, where tenants are separate (ADR 23)
    # Of a model that streams through a ring (ADR 43), for each group: its copy begins when so many
    # groups have computed, as the board's word says.
    waits: tuple[int, ...] = ()


class CancelTransmit(Message, frozen=True):
    """controller -> memory daemon: stop after the group in flight; answered by TransmitEnded."""

    epoch: Epoch


class TransmitEnded(Message, frozen=True):
    """memory daemon -> controller: no byte of this epoch will be written any more."""

    model: ModelName
    epoch: Epoch
    is_complete: bool
    group_count: int
    copied_bytes: int
    started_at_ms: float
    ended_at_ms: float
    group_ends_at_ms: tuple[float, ...] = ()


class Scrub(Message, frozen=True):
    """controller -> memory daemon: zero a released range of ``work`` before another owner."""

    epoch: Epoch
    offset_bytes: int
    size_bytes: int


class Scrubbed(Message, frozen=True):
    """memory daemon -> controller: the range reads as zeros."""

    epoch: Epoch


class OpenCommits(Message, frozen=True):
    """controller -> memory daemon: a job's double-buffered commit area (one memfd comes along).

    Layout of the memfd: a 4 KiB header, then two slots of ``slot_bytes``.
    """

    job: JobName
    slot_bytes: int


class CloseCommits(Message, frozen=True):
    """controller -> memory daemon: the job is over, unmap."""

    job: JobName


class ByteRange(Message, frozen=True):
    """A piece of a training slice."""

    offset_bytes: int  # from the start of the slice
    size_bytes: int


class CommitCopy(Message, frozen=True):
    """controller -> memory daemon: copy slice pieces into the idle slot, then flip (ADR 8)."""

    job: JobName
    epoch: Epoch
    number: int  # CommitStep's; told again, it is not copied again
    step: int
    slice_offset_bytes: int  # of the slice in ``work``
    slice_bytes: int
    ranges: tuple[ByteRange, ...]


class PersistCommit(Message, frozen=True):
    """controller -> memory daemon: write the job's newest commit to disk, crash-safe."""

    job: JobName
    epoch: Epoch
    directory: str


class CommitPersisted(Message, frozen=True):
    """memory daemon -> controller: on disk and fsynced, or why not (the old one is intact)."""

    job: JobName
    epoch: Epoch
    step: int
    error: str = ""


class DaemonFault(Message, frozen=True):
    """memory daemon -> controller: it refused something (out of bounds, overlapping, stale)."""

    epoch: Epoch
    reason: str


# ---- controller <-> worker ------------------------------------------------------------------


class WorkerSettings(Message, frozen=True):
    """What a worker is started with.

    Descriptors: task and signal channel, board, ``bell_count`` bells; then the pool and
    DaemonReady's, which come with BindTenant where tenants are separate.
    """

    slot: Slot
    device: str
    arena_bytes: int
    words: int
    pool_bytes: int
    threads: int
    bell_count: int
    handle: bytes = b""  # DaemonReady's
    is_sandboxed: bool = False  # from the first program on that is not code
    task_memory_bytes: int = 0  # in the sandbox, beyond what it has then; 0: no limit
    separates_tenants: bool = False  # it waits for BindTenant before anything else
    link_bytes_per_s: float = 0.0  # as DaemonSettings
    options: bytes = b""  # the device kind's own


class WorkerReady(Message, frozen=True):
    """worker -> controller: mapped and waiting."""

    slot: Slot
    pid: int


class BindTenant(Message, frozen=True):
    """controller -> worker: from now on this process serves one tenant (ADR 23).

    Only where tenants are separate, and before anything else. Descriptors: the tenant's file of
    the request pool, its file of the arena for reading, and for code the training slices.
    """

    tenant: str
    is_code: bool


class PrepareModel(Message, frozen=True):
    """controller -> worker (standby): load a program's structure ahead of its first request.

    For a worker in the sandbox, which opens no files, the first message that names a program
    carries two descriptors: of its manifest and of its bundle.
    """

    model: ModelName
    digest: str
    directory: str
    arena_offset_bytes: int  # its home, to bind parameters now; -1 when it has none yet
    plan: tuple[int, ...] = ()  # layers that open a group; empty: the groups it was built with
    landings: tuple[int, ...] = ()  # of one that streams: where its groups land, from its home
    is_code: bool = False  # the operator's own module, which runs outside of the sandbox


class ModelPrepared(Message, frozen=True):
    """worker -> controller: structure loaded; ``error`` is empty or says why not."""

    model: ModelName
    digest: str
    plan: tuple[int, ...] = ()
    error: str = ""


class ForgetModel(Message, frozen=True):
    """controller -> worker: drop a program's structure."""

    model: ModelName


class SlabTensor(Message, frozen=True):
    """A tensor in the request/reply pool: contiguous, at ``offset_bytes`` of the pool."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


class Choosing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a language model's tokens are chosen, as ``programs.sampling`` does it, and for how many
    steps the worker may go on by itself (ADR 54). Part of RunInference, no message."""

    steps: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    rows: int = 0  # that the cache is to have room for, with this step
    waits: bool = False  # for room: the answer has begun


class JoinedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request that another one takes along (ADR 28). Part of RunInference, no message."""

    request_id: str
    inputs: tuple[SlabTensor, ...]
    reply_offset_bytes: int
    reply_bytes: int
    choosing: Choosing | None = None
    sequence: int = 0
    after: Epoch = Epoch(0)


class RunInference(Message, frozen=True):
    """controller -> worker: run one request as its groups arrive, when the turn word says so.

    Those of ``joined`` run with it, as one batch in this order; each has its own reply slab.

    With ``is_timed`` the worker waits for the device after each group, so that a group's times are
    those of its computation (``pipeswitch profile``).

    With ``choosing`` the tokens are answered instead of their logits, and of all steps the rows;
    that word ends it after the step that it is at.
    """

    epoch: Epoch  # also the turn this task computes under
    request_id: str
    model: ModelName
    digest: str
    directory: str
    arena_offset_bytes: int
    first_word: int  # arrival word of group 0; group i has first_word + i
    residency_epoch: Epoch  # the words carry this when the groups have arrived
    inputs: tuple[SlabTensor, ...]
    reply_offset_bytes: int
    reply_bytes: int
    plan: tuple[int, ...] = ()  # as PrepareModel's
    landings: tuple[int, ...] = ()  # as PrepareModel's
    joined: tuple[JoinedRequest, ...] = ()
    is_timed: bool = False
    is_code: bool = False  # as PrepareModel's
    choosing: Choosing | None = None  # None: its outputs are answered
    sequence: int = 0  # whose step it is; 0: it stands alone
    after: Epoch = Epoch(0)  # the run that made the last of its state, if the worker knows it yet


class InferenceDone(Message, frozen=True):
    """worker -> controller: outputs lie in the reply slab."""

    epoch: Epoch
    outputs: tuple[SlabTensor, ...]
    turn_at_ms: float  # when it had the device's turn
    first_group_at_ms: float  # first group began to compute
    ended_at_ms: float
    stall_ms: float  # waiting for groups while holding the turn, and for those that were let in
    joined_outputs: tuple[tuple[SlabTensor, ...], ...] = ()  # of each joined request
    is_clean: bool = False  # no ``Cleaned`` follows: it holds nothing of the task any more
    steps: int = 1  # of ``choosing``
    group_begins_at_ms: tuple[float, ...] = ()
    group_ends_at_ms: tuple[float, ...] = ()


class SteppedAside(Message, frozen=True):
    """worker -> controller: a pass of a model that streams lets another task in between two groups,
    as the board's stop word said; it goes on when the turn word is its own again."""

    epoch: Epoch


class InferenceFailed(Message, frozen=True):
    """worker -> controller: the model's code raised, or the output does not fit; worker is fine."""

    epoch: Epoch
    error: str  # a name of errors.py
    message: str
    data: dict[str, Any] = {}


class Cleaned(Message, frozen=True):
    """worker -> controller: the task's references are dropped."""

    epoch: Epoch


class RunJob(Message, frozen=True):
    """controller -> worker: run a training script from the top.

    Its commit memfd comes along, if it has one; then its group's ring of batches (ADR 32)."""

    epoch: Epoch
    turn: Turn  # 0: the device is not yours yet
    job: JobName
    entry: str  # path of a script, or package.module:function
    args: tuple[str, ...]
    log_path: str
    slot_bytes: int  # of the commit area; 0 when there is no commit yet
    commit_every_ms: float
    log_bytes: int = 0  # what stays of the log, the newest; 0: all
    restarts: int = 0  # until now; the two are kept beside the step that it is at
    steps_recomputed: int = 0
    last_step: int = 0  # last step of the previous process that the controller knows
    share: str = ""  # tenant/group: those whose input it shares; empty: none
    defaults: tuple[tuple[str, str], ...] = ()  # of ``job.steps``: offload, activation_bytes
    activation_bytes: int = 0  # of the device, for all jobs; 0: each has its own


class LeaseRequest(Message, frozen=True):
    """worker -> controller: a job's first job.steps asks for its slice; blocks until answered."""

    epoch: Epoch
    slice_bytes: int
    state_bytes: int  # one commit image


class LeaseGranted(Message, frozen=True):
    """controller -> worker: the slice in ``work``; the commit memfd comes along."""

    epoch: Epoch
    offset_bytes: int
    size_bytes: int


class LeaseRefused(Message, frozen=True):
    """controller -> worker: it can never fit; or, to a ``HostRequest``, not now."""

    epoch: Epoch
    error: str
    message: str
    data: dict[str, Any] = {}


class HostRequest(Message, frozen=True):
    """worker -> controller: so much of a job's activations is to lie in host memory; blocks."""

    epoch: Epoch
    size_bytes: int


class HostGranted(Message, frozen=True):
    """controller -> worker: it counts as the host store's."""

    epoch: Epoch


class StopTask(Message, frozen=True):
    """controller -> worker (termination thread): park, then raise the next task's turn."""

    epoch: Epoch
    turn: Turn
    next_turn: Turn  # 0: no worker waits; otherwise write the turn word and ring next_slot's bell
    next_slot: Slot
    at_boundary: bool = False  # for another job: when it next leaves the device (its step is over,
    # as a rule), unless it is told again


class Parked(Message, frozen=True):
    """worker -> controller: it computes no more under ``turn``."""

    epoch: Epoch
    turn: Turn
    next_turn: Turn
    where: Literal["forward", "backward", "boundary", "loader", "copies"]
    asked_at_ms: float
    parked_at_ms: float


class Back(Message, frozen=True):
    """worker -> controller: away as it gave up ``turn`` (for a batch, for copies), it is back."""

    epoch: Epoch
    turn: Turn
    is_blocked: bool = False  # it has the turn, and needs memory that other jobs must let go first


class GrantTurn(Message, frozen=True):
    """controller -> worker (termination thread): the device is yours under a new turn."""

    epoch: Epoch
    turn: Turn


class EvictTask(Message, frozen=True):
    """controller -> worker (termination thread): commit the last step, unwind the script."""

    epoch: Epoch


class CommitStep(Message, frozen=True):
    """worker -> controller: these pieces of my slice are the state after ``step``.

    They are so until it is answered. The number tells it from one that comes late or again.
    """

    epoch: Epoch
    number: int  # 1, 2, …: of this epoch's commits
    step: int
    ranges: tuple[ByteRange, ...]


class StepCommitted(Message, frozen=True):
    """memory daemon -> controller -> worker: flipped; ``error`` says why it was not."""

    job: JobName
    epoch: Epoch
    number: int  # CommitStep's
    step: int
    copy_ms: float
    error: str = ""


class PublishStep(Message, frozen=True):
    """worker -> controller: the state after ``step`` shall be the model's next version.

    Its commit is asked for by the script, before or after this. Answered by PublishAnswered.
    """

    epoch: Epoch
    model: ModelName
    step: int
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]  # its parts': name, dtype, shape
    part: str = ""  # of its parts; empty: the only one that fits


class PublishAnswered(Message, frozen=True):
    """controller -> worker (termination thread): accepted, or a name of errors.py and its text."""

    epoch: Epoch
    error: str = ""
    message: str = ""
    hint: str = ""
    data: dict[str, Any] = {}


class PublishCopied(Message, frozen=True):
    """controller -> worker (termination thread): what it published is copied, or given up."""

    epoch: Epoch


class JobReport(Message, frozen=True):
    """worker -> controller: started computing, progress, a user's log line, a warning."""

    epoch: Epoch
    kind: str
    values: dict[str, Any]


class JobEnded(Message, frozen=True):
    """worker -> controller: the script is over; the process retires after this."""

    epoch: Epoch
    outcome: Literal["done", "preempted", "failed"]
    step: int
    error_type: str = ""
    error_text: str = ""


class Ping(Message, frozen=True):
    """controller -> memory daemon, worker (termination thread): are you there? No task notices."""

    epoch: Epoch


class Pong(Message, frozen=True):
    """memory daemon, worker -> controller: yes."""

    epoch: Epoch


class Exit(Message, frozen=True):
    """controller -> anyone: finish and leave with status 0."""


# ---- controller <-> builder -----------------------------------------------------------------


class BuildSettings(Message, frozen=True):
    """What a builder is started with: one registration, then it exits."""

    model: ModelName
    epoch: Epoch
    spec: bytes  # msgpack of programs.build.BuildSpec
    directory: str
    threads: int
    timeout_s: float = 0.0  # 0: as long as it takes
    memory_bytes: int = 0  # beyond what a fresh child has mapped; 0: no limit
    disk_bytes: int = 0  # what may be written; 0: no limit
    task_memory_bytes: int = 0  # what a run may take for its intermediate values; 0: no limit
    is_sandboxed: bool = False  # where the program is a client's
    is_owners: bool = False  # what it fetches from a hub lands in the owner's caches


class BuildProgress(Message, frozen=True):
    """builder -> controller: stage and fraction of the whole."""

    model: ModelName
    epoch: Epoch
    stage: str
    fraction: float


class BuildDone(Message, frozen=True):
    """builder -> controller: the folder, inside the models' one, holds a complete program."""

    model: ModelName
    epoch: Epoch
    digest: str
    folder: str = ""  # empty: it has its place already


class BuildFailed(Message, frozen=True):
    """builder -> controller: refused; a name of errors.py, the text and its values."""

    model: ModelName
    epoch: Epoch
    error: str
    message: str
    hint: str = ""
    data: dict[str, Any] = {}


# ---- controller <-> stage -------------------------------------------------------------------


class StageSettings(Message, frozen=True):
    """What a stage process is started with. Descriptors: the memory it returns results in, the
    server's environment."""

    result_bytes: int


class CheckStage(Message, frozen=True):
    """What a process is started with that imports functions for a registration, says StageReady
    or StageFailed, and leaves. Descriptor: the server's environment."""

    functions: tuple[str, ...]  # package.module:function
    inputs: tuple[str, ...]  # that the first will be called with; none: not known yet
    timeout_s: float  # 0: as long as it takes


class StageReady(Message, frozen=True):
    """stage -> controller: it takes requests; or the function can be called."""

    pid: int


class RunStage(Message, frozen=True):
    """controller -> stage: call the function. Descriptor: the file that the raw inputs lie in."""

    epoch: Epoch
    function: str  # package.module:function
    inputs: tuple[SlabTensor, ...]


class StageDone(Message, frozen=True):
    """stage -> controller: what it returned lies in the memory of results, from its start."""

    epoch: Epoch
    outputs: tuple[SlabTensor, ...]


class StageFailed(Message, frozen=True):
    """stage -> controller: it raised, what it returned is no arrays, or it cannot be imported."""

    epoch: Epoch
    reason: str


# ---- controller -> gateway ------------------------------------------------------------------


class KeyedSettings(Message, frozen=True):
    """inside GatewaySettings: where clients with keys come in."""

    address: str  # that its socket has
    keys_dir: str
    roles: tuple[str, ...]  # of every key
    max_message_bytes: int
    max_connections: int
    client_bytes: int  # held of one client's unfinished messages; twice as much of all


class GatewaySettings(Message, frozen=True):
    """What a gateway is started with.

    Descriptors: what keeps two gateways out of one state directory; with ``http`` and ``keyed`` the
    socket of each.
    """

    address: str  # of the owner's socket
    http: bool
    max_body_bytes: int
    max_connections: int
    grpc: str = ""  # host:port to listen on
    hosts: tuple[str, ...] = ()  # names it may be asked under; none: any
    origins: tuple[str, ...] = ()  # other sites whose pages may ask
    roles: tuple[str, ...] = ()  # of every caller
    tokens: str = ""  # file
    owner_token: str = ""  # file
    allow_code: tuple[str, ...] = ()
    needs_token: bool = False
    nv_metrics: bool = False
    text_processes: int = 8
    tls_cert: str = ""  # file
    tls_key: str = ""  # file
    cluster: str = ""  # file of a cluster's table; empty: the server is alone
    keyed: KeyedSettings | None = None


AnyMessage = (
    Fork | ForkServerReady | Forked | ChildExited | DaemonSettings | DaemonReady | StoreModel
    | ModelStored | StoreFailed | GroupCopy | TransmitModel | CancelTransmit | TransmitEnded | Scrub
    | Scrubbed | OpenCommits | CloseCommits | ByteRange | CommitCopy | PersistCommit
    | CommitPersisted | DaemonFault | WorkerSettings | WorkerReady | BindTenant | PrepareModel
    | ModelPrepared | ForgetModel | SlabTensor | RunInference | InferenceDone | InferenceFailed
    | SteppedAside | Cleaned | RunJob | LeaseRequest | LeaseGranted | LeaseRefused | StopTask
    | HostRequest | HostGranted | Parked | Back | GrantTurn
    | EvictTask | CommitStep | StepCommitted | PublishStep | PublishAnswered
    | PublishCopied | JobReport | JobEnded | Ping | Pong | Exit
    | BuildSettings | BuildProgress | BuildDone | BuildFailed | StageSettings | CheckStage
    | StageReady | RunStage | StageDone | StageFailed | GatewaySettings | KeyedSettings
)  # fmt: skip
