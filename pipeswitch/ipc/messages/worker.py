"""Messages between the controller and a worker: models, requests, jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from .base import ByteRange, JobName, Message, ModelName, OpId, SlabTensor, Slot, Turn

LARGE_BYTES: Final = 3000  # of one request's sampling: 64 of them fit in a packet


class WorkerSettings(Message, frozen=True):
    """Settings of a worker.

    Descriptors: task and signal channel, board, ``doorbell_count`` doorbells; then the pool and
    DaemonReady's, which come with BindTenant where tenants are separate.
    """

    slot: Slot
    device: str
    arena_bytes: int
    fence_count: int
    pool_bytes: int
    threads: int
    doorbell_count: int
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
    staging: tuple[int, ...] = ()  # of one that streams: where its groups land, from its home
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


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling of a generation's tokens (``programs.decoding.sampling``), and the number of
    steps that a worker may continue in one run (ADR 54). Part of RunInference, not a message."""

    steps: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    options: dict[str, Any] | None = None
    seen: tuple[tuple[int, int], ...] = ()  # earlier tokens, each with its count in the answer
    stop: tuple[int, ...] = ()  # tokens that end the generation
    left: int = 1  # tokens that may still come, with those of this run
    answer: tuple[int, ...] = ()  # its tokens so far, if it follows a schema
    forced: tuple[int, ...] = ()  # tokens of the prompt that come first; only their chances count
    is_piece: bool = False  # more of the prompt follows: no token is chosen

    @property
    def schema(self) -> str:
        """JSON schema that the answer follows; empty: none."""
        return "" if self.options is None else self.options.get("json_schema", "")

    @property
    def never_batch(self) -> bool:
        """True if no other request joins: the first token shows if a schema can be used, and large
        ones together would not fit in a packet."""
        if self.options is None or not self.schema:
            return False
        return not self.answer or len(self.schema) + 5 * len(self.answer) > LARGE_BYTES

    def ends_with(self, tokens: Sequence[int]) -> str:
        """Return why the generation ends with the tokens of this run: ``stop``, ``length``, or an
        empty text while there is more to do."""
        if tokens and tokens[-1] in self.stop:
            return "stop"
        return "length" if not self.is_piece and len(tokens) >= self.left else ""

    def allows(self, tokens: Sequence[int]) -> bool:
        """Return whether a worker may have chosen so many tokens."""
        most = 0 if self.is_piece else min(self.steps, self.left)
        return min(1, most) <= len(tokens) <= most


class BatchedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request that another one takes along (ADR 28). Part of RunInference, no message."""

    request_id: str
    inputs: tuple[SlabTensor, ...]
    reply_offset_bytes: int
    reply_bytes: int
    sampling_params: SamplingParams | None = None
    sequence: int = 0
    after: OpId = OpId(0)


class RunInference(Message, frozen=True):
    """controller -> worker: run one request as its groups arrive, when the turn word says so.

    Those of ``batched`` run with it, as one batch in this order; each has its own reply slab.

    With ``is_timed`` the worker waits for the device after each group, so that a group's times are
    those of its computation (``pipeswitch profile``).

    With ``sampling_params`` the tokens are answered instead of their logits, and the new cache rows
    of all steps; the stop word ends the run after its current step.
    """

    op_id: OpId  # also the turn this task computes under
    request_id: str
    model: ModelName
    digest: str
    directory: str
    arena_offset_bytes: int
    first_fence: int  # fence of group 0; group i has first_fence + i
    residency_id: OpId  # the words carry this when the groups have arrived
    inputs: tuple[SlabTensor, ...]
    reply_offset_bytes: int
    reply_bytes: int
    plan: tuple[int, ...] = ()  # as PrepareModel's
    staging: tuple[int, ...] = ()  # as PrepareModel's
    batched: tuple[BatchedRequest, ...] = ()
    is_timed: bool = False
    is_code: bool = False  # as PrepareModel's
    sampling_params: SamplingParams | None = None  # None: its outputs are answered
    sequence: int = 0  # whose step it is; 0: it stands alone
    after: OpId = OpId(0)  # the run that made the last of its state, if the worker knows it yet


class InferenceDone(Message, frozen=True):
    """worker -> controller: outputs lie in the reply slab."""

    op_id: OpId
    outputs: tuple[SlabTensor, ...]
    turn_at_ms: float  # when it had the device's turn
    first_group_at_ms: float  # first group began to compute
    ended_at_ms: float
    stall_ms: float  # waiting for groups while holding the turn, and for those that were let in
    batched_outputs: tuple[tuple[SlabTensor, ...], ...] = ()  # of each joined request
    is_clean: bool = False  # no ``WorkerClean`` follows: it holds nothing of the task any more
    tokens: tuple[tuple[int, ...], ...] = ()  # of each request, if it has ``sampling_params``
    # Log probabilities of each request's tokens (``sampling.Chance``), if a request has logprobs.
    chances: tuple[tuple[tuple[float, tuple[tuple[int, float], ...]], ...], ...] = ()
    group_begins_at_ms: tuple[float, ...] = ()
    group_ends_at_ms: tuple[float, ...] = ()


class Yielded(Message, frozen=True):
    """worker -> controller: a pass of a model that streams lets another task in between two groups,
    as the control page's stop word said; it goes on when the turn word is its own again."""

    op_id: OpId


class InferenceFailed(Message, frozen=True):
    """worker -> controller: the model's code raised, or the output does not fit; worker is fine."""

    op_id: OpId
    error: str  # a name of errors.py
    message: str
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class WorkerClean(Message, frozen=True):
    """worker -> controller: the task's references are dropped."""

    op_id: OpId


class RunJob(Message, frozen=True):
    """controller -> worker: run a training script from the top.

    Its commit memfd comes along, if it has one; then its group's ring of batches (ADR 32)."""

    op_id: OpId
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

    op_id: OpId
    slice_bytes: int
    state_bytes: int  # one commit image


class LeaseGranted(Message, frozen=True):
    """controller -> worker: the slice in ``work``; the commit memfd comes along."""

    op_id: OpId
    offset_bytes: int
    size_bytes: int


class LeaseRefused(Message, frozen=True):
    """controller -> worker: it can never fit; or, to a ``HostRequest``, not now."""

    op_id: OpId
    error: str
    message: str
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class HostRequest(Message, frozen=True):
    """worker -> controller: so much of a job's activations is to lie in host memory; blocks."""

    op_id: OpId
    size_bytes: int


class HostGranted(Message, frozen=True):
    """controller -> worker: it counts as the host store's."""

    op_id: OpId


class StopTask(Message, frozen=True):
    """controller -> worker (termination thread): park, then raise the next task's turn."""

    op_id: OpId
    turn: Turn
    next_turn: (
        Turn  # 0: no worker waits; otherwise write the turn word and ring next_slot's doorbell
    )
    next_slot: Slot
    at_boundary: bool = False  # for another job: when it next leaves the device (its step is over,


class JobParked(Message, frozen=True):
    """worker -> controller: it computes no more under ``turn``."""

    op_id: OpId
    turn: Turn
    next_turn: Turn
    where: Literal["forward", "backward", "boundary", "loader", "copies"]
    asked_at_ms: float
    parked_at_ms: float


class JobReady(Message, frozen=True):
    """worker -> controller: away as it gave up ``turn`` (for a batch, for copies), it is back."""

    op_id: OpId
    turn: Turn
    is_blocked: bool = False  # it has the turn, and needs memory that other jobs must let go first


class GrantTurn(Message, frozen=True):
    """controller -> worker (termination thread): the device is yours under a new turn."""

    op_id: OpId
    turn: Turn


class EvictTask(Message, frozen=True):
    """controller -> worker (termination thread): commit the last step, unwind the script."""

    op_id: OpId


class CommitStep(Message, frozen=True):
    """worker -> controller: these pieces of my slice are the state after ``step``.

    They are so until it is answered. The number tells it from one that comes late or again.
    """

    op_id: OpId
    number: int  # 1, 2, …: of this operation id's commits
    step: int
    ranges: tuple[ByteRange, ...]


class PublishStep(Message, frozen=True):
    """worker -> controller: the state after ``step`` shall be the model's next version.

    Its commit is asked for by the script, before or after this. Answered by PublishAnswered.
    """

    op_id: OpId
    model: ModelName
    step: int
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]  # its parts': name, dtype, shape
    part: str = ""  # of its parts; empty: the only one that fits


class PublishAnswered(Message, frozen=True):
    """controller -> worker (termination thread): accepted, or a name of errors.py and its text."""

    op_id: OpId
    error: str = ""
    message: str = ""
    hint: str = ""
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class PublishCopied(Message, frozen=True):
    """controller -> worker (termination thread): what it published is copied, or given up."""

    op_id: OpId


class JobReport(Message, frozen=True):
    """worker -> controller: started computing, progress, a user's log line, a warning."""

    op_id: OpId
    kind: str
    values: dict[str, Any]


class JobEnded(Message, frozen=True):
    """worker -> controller: the script is over; the process retires after this."""

    op_id: OpId
    outcome: Literal["done", "preempted", "failed"]
    step: int
    error_type: str = ""
    error_text: str = ""
