"""Messages between the controller and a worker: models, requests, jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from .base import (
    ByteRange,
    JobName,
    Message,
    ModelName,
    OpId,
    ResourceLimits,
    SlabTensor,
    Slot,
    Turn,
)
from .run import Run


class WorkerSettings(Message, frozen=True):
    """Settings of a worker.

    Descriptors: task and signal channel, control page, doorbells, request pool,
    and the descriptors of DaemonReady. With separate tenants, BindTenant carries pool and memory.
    """

    slot: Slot
    device: str
    limits: ResourceLimits
    handle: bytes = b""  # as in DaemonReady


class WorkerReady(Message, frozen=True):
    """worker -> controller: the memory is mapped, and the worker waits for messages."""

    slot: Slot
    pid: int


class BindTenant(Message, frozen=True):
    """controller -> worker: from now on this process serves one tenant (ADR 23).

    Sent only with separate tenants, before any other message. Descriptors: the tenant's file of the
    request pool, its read-only file of the arena, and the training slices if ``is_code``.
    """

    tenant: str
    is_code: bool


Shapes = tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
"""Dtype and shape of each input; address and strides of an input that is used where it is."""


class PrepareModel(Message, frozen=True):
    """controller -> worker (standby): load a program's structure ahead of its first request.

    A worker in the sandbox cannot open files. So the first message that names a program carries the
    descriptors of its manifest and its bundle.
    """

    model: ModelName
    digest: str
    directory: str
    arena_offset_bytes: int  # the model's region, to bind parameters now; -1: no region yet
    plan: tuple[int, ...] = ()  # first layer of each group; empty: the groups it was built with
    staging: tuple[int, ...] = ()  # offsets of a streamed model's groups in the region
    is_code: bool = False  # the operator's own module, which runs outside of the sandbox
    # To capture CUDA graphs of these inputs (ADR 13), unless the turn is higher than ``op_id``.
    shapes: Shapes = ()
    op_id: OpId = OpId(0)


class ModelPrepared(Message, frozen=True):
    """worker -> controller: the structure is loaded, or ``error`` says why not."""

    model: ModelName
    digest: str
    plan: tuple[int, ...] = ()
    error: str = ""


class ForgetModel(Message, frozen=True):
    """controller -> worker: drop a program's structure."""

    model: ModelName


class RunInference(Message, frozen=True):
    """controller -> worker: compute these runs when the worker has the turn, group by group.

    Several runs are computed as one batch, in this order (ADR 28).

    With ``is_timed`` the worker waits for the device after each group, so that a group's times are
    those of its computation (``pipeswitch profile``).

    The outputs of runs with ``sampling_params`` are tokens (no logits) and all steps' cache rows.
    The control page's stop word ends such a run after its current step.
    """

    op_id: OpId  # also the number of the turn in which this task computes
    model: ModelName
    digest: str
    directory: str
    arena_offset_bytes: int
    first_fence: int  # fence of group 0; group i has first_fence + i
    residency_id: OpId  # value of a group's fence when the group has arrived
    runs: tuple[Run, ...]
    plan: tuple[int, ...] = ()  # as in PrepareModel
    staging: tuple[int, ...] = ()  # as in PrepareModel
    is_timed: bool = False
    is_code: bool = False  # as in PrepareModel
    last_group: int = -1  # the group that was copied last
    by_rows: bool = False  # the rows that the runs look up are copied first (ADR 67)


class InferenceDone(Message, frozen=True):
    """worker -> controller: the outputs are in the reply slabs."""

    op_id: OpId
    outputs: tuple[tuple[SlabTensor, ...], ...]  # outputs of each run
    turn_at_ms: float  # when the task got the turn
    first_group_at_ms: float  # when the first group began to compute
    ended_at_ms: float
    stall_ms: float  # time spent waiting for groups, and for tasks to which it yielded
    is_clean: bool = False  # no ``WorkerClean`` follows, because all references are dropped
    tokens: tuple[tuple[int, ...], ...] = ()  # each request's tokens, with ``sampling_params``
    # Log probabilities of each request's tokens (``sampling.Chance``), if a request has logprobs.
    chances: tuple[tuple[tuple[float, tuple[tuple[int, float], ...]], ...], ...] = ()
    group_begins_at_ms: tuple[float, ...] = ()
    group_ends_at_ms: tuple[float, ...] = ()


class Yielded(Message, frozen=True):
    """worker -> controller: a streamed model's pass has paused between two groups, because of the
    control page's stop word. It continues when the turn word has the task's number again."""

    op_id: OpId


class InferenceFailed(Message, frozen=True):
    """worker -> controller: the model's code raised, or its output is too large for the slab."""

    op_id: OpId
    error: str  # a name of errors.py
    message: str
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class WorkerClean(Message, frozen=True):
    """worker -> controller: the worker no longer has references to the task's memory."""

    op_id: OpId
    model: ModelName = ModelName("")
    captured: tuple[Shapes, ...] = ()  # runs of ``model`` that are CUDA graphs from now on


@dataclass(frozen=True)
class JobSpec:
    """A training job as its user submitted it."""

    name: JobName
    entry: str
    args: tuple[str, ...]
    priority: int
    tenant: str = ""  # empty: the server's owner
    share: str = ""  # the group of jobs that read the same input; empty: none
    devices: tuple[str, ...] = ()  # names of the devices that may train it; empty: all
    defaults: tuple[tuple[str, str], ...] = ()  # arguments of ``job.steps`` that the script omits
    folder: str = ""  # current folder of the script; empty: the script's own
    env: tuple[str, ...] = ()  # variables of the script, as NAME=VALUE; values may be secret

    @property
    def group(self) -> str:
        """Name of the group of its tenant's jobs that share its input; empty: none."""
        return f"{self.tenant}/{self.share}" if self.share else ""


class RunJob(Message, frozen=True):
    """controller -> worker: run a training script from its start.

    Descriptors: the job's commit area, if any; the ring of batches shared by its group (ADR 32)."""

    op_id: OpId
    turn: Turn  # 0: a GrantTurn follows later
    spec: JobSpec
    log_path: str
    slot_bytes: int  # maximum size of a commit in its area; 0: there is no commit yet
    commit_every_ms: float
    log_bytes: int = 0  # number of newest bytes that stay in the log; 0: all
    restarts: int = 0  # restarts so far
    steps_recomputed: int = 0  # steps that were computed again after restarts so far
    last_step: int = 0  # last step of the previous process that the controller knows
    activation_bytes: int = 0  # budget that all jobs of the device share; 0: each has its own

    @property
    def job(self) -> JobName:
        return self.spec.name


class LeaseRequest(Message, frozen=True):
    """worker -> controller: a job's first job.steps requests its slice, and waits for it."""

    op_id: OpId
    slice_bytes: int
    state_bytes: int  # size of the largest commit


class LeaseGranted(Message, frozen=True):
    """controller -> worker: the position of the slice in ``work`` (descriptor: commit area)."""

    op_id: OpId
    offset_bytes: int
    size_bytes: int


class LeaseRefused(Message, frozen=True):
    """controller -> worker: the slice can never fit; or a ``HostRequest`` does not fit now."""

    op_id: OpId
    error: str
    message: str
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class HostRequest(Message, frozen=True):
    """worker -> controller: a job's script requests host memory for activations, and waits."""

    op_id: OpId
    size_bytes: int


class HostGranted(Message, frozen=True):
    """controller -> worker: the requested memory is granted, and counts against the host store."""

    op_id: OpId


class StopTask(Message, frozen=True):
    """controller -> worker (termination thread): park, then write the next task's turn."""

    op_id: OpId
    turn: Turn
    next_turn: Turn  # write it as the turn word and ring next_slot's doorbell; 0: no worker waits
    next_slot: Slot
    at_boundary: bool = False  # park when the script next leaves the device, for another job


class JobParked(Message, frozen=True):
    """worker -> controller: the job no longer computes, and has given ``turn`` up."""

    op_id: OpId
    turn: Turn
    next_turn: Turn
    where: Literal["forward", "backward", "boundary", "loader", "copies", "stream"]
    asked_at_ms: float
    parked_at_ms: float


class JobReady(Message, frozen=True):
    """worker -> controller: a job needs the device again; it was away when it lost ``turn``."""

    op_id: OpId
    turn: Turn
    is_blocked: bool = False  # the job has the turn, but needs memory that other jobs must free


class GrantTurn(Message, frozen=True):
    """controller -> worker (termination thread): the job may compute, with this new turn."""

    op_id: OpId
    turn: Turn


class EvictTask(Message, frozen=True):
    """controller -> worker (termination thread): commit the last step, unwind the script."""

    op_id: OpId


class HideSlice(Message, frozen=True):
    """controller -> worker (termination thread): as soon as the script waits for the device, make
    its slice inaccessible and answer with SliceHidden."""

    op_id: OpId
    swap_id: OpId


class SliceHidden(Message, frozen=True):
    """worker -> controller (task channel): this process does not use its slice any more."""

    op_id: OpId
    swap_id: OpId


class ShowSlice(Message, frozen=True):
    """controller -> worker (termination thread): the slice is at this offset of ``work``; map it at
    its former addresses."""

    op_id: OpId
    offset_bytes: int


OPENING: Final = (GrantTurn, EvictTask, HideSlice)
"""Messages after which the job's work on the device runs, or must run to its end. The controller
opens the held stream, too (``Board.write_run``): the worker's termination thread cannot if the
script blocks in a call that keeps the interpreter's lock."""


class CommitStep(Message, frozen=True):
    """worker -> controller: commit these pieces of the job's slice as the state after ``step``.

    The worker does not change them before the answer, which has the same ``number``.
    """

    op_id: OpId
    number: int  # counts this operation id's commits from 1, to recognise late and repeated ones
    step: int
    ranges: tuple[ByteRange, ...]
    older: ByteRange | None = None  # part of the last commit that is added at the end (ADR 65)


class PublishStep(Message, frozen=True):
    """worker -> controller: make the state after ``step`` the model's next version.

    The script commits this step before or after this message. PublishAnswered is the answer.
    """

    op_id: OpId
    model: ModelName
    step: int
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, dtype, shape, for all parts
    part: str = ""  # the part to publish; empty: the only one that fits the model


class PublishAnswered(Message, frozen=True):
    """controller -> worker (termination thread): accepted, or ``error`` is a name of errors.py."""

    op_id: OpId
    error: str = ""
    message: str = ""
    hint: str = ""
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class PublishCopied(Message, frozen=True):
    """controller -> worker (termination thread): the published state is copied, or dropped."""

    op_id: OpId


class JobReport(Message, frozen=True):
    """worker -> controller: start of computing, progress, a user's log values, or a warning."""

    op_id: OpId
    kind: str
    values: dict[str, Any]


class JobEnded(Message, frozen=True):
    """worker -> controller: the script has ended; the process exits after this."""

    op_id: OpId
    outcome: Literal["done", "preempted", "failed"]
    step: int
    error_type: str = ""
    error_text: str = ""
