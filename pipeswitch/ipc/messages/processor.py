"""Messages between the controller and a stage process."""

from __future__ import annotations

from .base import Message, OpId, SlabTensor


class StageSettings(Message, frozen=True):
    """Settings of a stage process. Descriptors: its results' memory, the server's environment."""

    result_bytes: int


class CheckStage(Message, frozen=True):
    """Settings of a process that imports a registration's functions, sends StageReady or
    StageFailed, and exits. Descriptor: the server's environment."""

    functions: tuple[str, ...]  # package.module:function
    inputs: tuple[str, ...]  # that the first will be called with; none: not known yet
    timeout_s: float  # 0: as long as it takes


class StageReady(Message, frozen=True):
    """stage -> controller: it takes requests; or the function can be called."""

    pid: int


class RunStage(Message, frozen=True):
    """controller -> stage: call the function. Descriptor: the file that the raw inputs lie in."""

    op_id: OpId
    function: str  # package.module:function
    inputs: tuple[SlabTensor, ...]


class StageDone(Message, frozen=True):
    """stage -> controller: what it returned lies in the memory of results, from its start."""

    op_id: OpId
    outputs: tuple[SlabTensor, ...]


class StageFailed(Message, frozen=True):
    """stage -> controller: it raised, what it returned is no arrays, or it cannot be imported."""

    op_id: OpId
    reason: str
