"""Ids, the base of every message, and messages of several pairs of processes.

Each message is a frozen struct whose docstring names its direction. Sizes and offsets are
bytes; instants are milliseconds of the system-wide monotonic clock. ``op_id`` names one dispatch,
lease or transfer for ever: it only grows, so a late message of an older one is recognised and
dropped. ``turn`` is the permission to compute on the device (invariant I5): it has its own growing
number. On the wire, the name of its class identifies a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NewType

import msgspec

ModelName = NewType("ModelName", str)
JobName = NewType("JobName", str)
Slot = NewType("Slot", int)  # a worker's place; processes in it come and go
OpId = NewType("OpId", int)
Turn = NewType("Turn", int)


class Message(
    msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True, gc=False
):
    """Base of all internal messages."""


class ByteRange(Message, frozen=True):
    """A piece of a training slice."""

    offset_bytes: int  # from the start of the slice
    size_bytes: int


class SlabTensor(Message, frozen=True):
    """A tensor in the request/reply pool: contiguous at ``offset_bytes`` of the pool, or in
    ``pieces``. Pieces have ``size_bytes`` of it, the rest is zeros; they may have room for more."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    pieces: tuple[int, ...] = ()  # their offsets
    piece_bytes: int = 0  # of each

    def places(self, at: int, size_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the offset and the size of each place of the bytes from ``at``, by pieces.

        Raises:
            IndexError: the pieces end before.
        """
        end = at + size_bytes
        while at < end:
            index, skip = divmod(at, self.piece_bytes)
            size = min(self.piece_bytes - skip, end - at)
            yield self.pieces[index] + skip, size
            at += size


class StepCommitted(Message, frozen=True):
    """memory daemon -> controller -> worker: flipped; ``error`` says why it was not."""

    job: JobName
    op_id: OpId
    number: int  # CommitStep's
    step: int
    copy_ms: float
    error: str = ""


class Ping(Message, frozen=True):
    """controller -> memory daemon, worker (termination thread): are you there? No task notices."""

    op_id: OpId


class Pong(Message, frozen=True):
    """memory daemon, worker -> controller: yes."""

    op_id: OpId


class Exit(Message, frozen=True):
    """controller -> anyone: finish and leave with status 0."""
