"""Messages between the controller and a stage process, which runs pre- and postprocessing."""

from __future__ import annotations

from .base import Message, OpId, SlabTensor


class StageSettings(Message, frozen=True):
    """Settings of a stage process. Descriptors: memory for results, the server's environment."""

    result_bytes: int


class CheckStage(Message, frozen=True):
    """Settings of a process that imports a registration's functions, sends StageReady or
    StageFailed, and exits. Descriptor: the server's environment."""

    functions: tuple[str, ...]  # package.module:function
    inputs: tuple[str, ...]  # input names that the first function will get; empty: not known yet
    timeout_s: float  # 0: no limit


class CheckSchema(Message, frozen=True):
    """Settings of a process that tries an answer's schema, sends StageReady or StageFailed, and
    exits, or dies if that takes too long."""

    schema: str


class StageReady(Message, frozen=True):
    """stage -> controller: ready for requests; after CheckStage: the functions can be called."""

    pid: int


class RunStage(Message, frozen=True):
    """controller -> stage: call the function. Descriptor: the request pool with the raw inputs."""

    op_id: OpId
    function: str  # package.module:function
    inputs: tuple[SlabTensor, ...]


class StageDone(Message, frozen=True):
    """stage -> controller: the function's outputs are at the start of the memory for results."""

    op_id: OpId
    outputs: tuple[SlabTensor, ...]


class StageFailed(Message, frozen=True):
    """stage -> controller: the function raised, returned no arrays, or cannot be imported."""

    op_id: OpId
    reason: str
