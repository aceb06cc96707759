"""Messages between the controller and helper processes, which serve requests beside workers."""

from __future__ import annotations

from .base import Message, OpId, SlabTensor


class HelperSettings(Message, frozen=True):
    """Settings of a helper process, whose function is in the table ``PROCESSES`` of an extra."""

    kind: str
    values: bytes = b""  # settings in the extra's own form


class HelperReady(Message, frozen=True):
    """helper -> controller: ready for requests or, from a process that checks, the check passed."""

    pid: int


class HelperCall(Message, frozen=True):
    """controller -> helper: call the function. Descriptor: the request pool with the inputs."""

    op_id: OpId
    function: str  # package.module:function
    inputs: tuple[SlabTensor, ...]


class HelperDone(Message, frozen=True):
    """helper -> controller: the outputs are at the start of the memory for results."""

    op_id: OpId
    outputs: tuple[SlabTensor, ...]


class HelperFailed(Message, frozen=True):
    """helper -> controller: the call, or the check, failed."""

    op_id: OpId
    reason: str
