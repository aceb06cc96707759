"""Ids, the base class of messages, and messages that several pairs of processes exchange.

Each message is a frozen struct whose docstring begins with its direction. Sizes and offsets are
bytes; instants are milliseconds of the system-wide monotonic clock. ``op_id`` identifies one
dispatch, lease or transfer. It only grows, so a late message with an older id is recognised and
dropped. ``turn`` is the permission to compute on the device (invariant I5), and has its own growing
number. On the wire a message is identified by the name of its class.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NewType

import msgspec

ModelName = NewType("ModelName", str)
JobName = NewType("JobName", str)
Slot = NewType("Slot", int)  # index of a worker; a new process takes the slot of one that exited
OpId = NewType("OpId", int)
Turn = NewType("Turn", int)


class Message(
    msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True, gc=False
):
    """Base of all internal messages."""


class ResourceLimits(Message, frozen=True):
    """Sizes and limits of one device's processes, as each of them gets them. The devices of a
    server differ only in ``arena_bytes`` and ``options``."""

    arena_bytes: int = 0
    store_bytes: int = 0
    pool_bytes: int = 0
    fence_count: int = 0  # number of fences at the start of the arena
    doorbell_count: int = 0
    threads: int = 1  # number of compute threads of a worker or builder
    build_timeout_s: float = 0.0  # 0: no limit, here and below
    build_memory_bytes: int = 0  # memory that a build maps itself
    task_memory_bytes: int = 0  # intermediate values of a client's program
    is_sandboxed: bool = False  # clients' programs run in the sandbox
    separates_tenants: bool = False  # each tenant has its own processes and memory (ADR 23)
    packs_weights: bool = True  # in the layout of this processor's kernels
    link_bytes_per_s: float = 0.0  # speed of the simulated link; 0: full speed
    log_bytes: int = 0  # size at which a log is rotated; two older files stay; 0: never
    options: bytes = b""  # encoded options of the device's kind


class ByteRange(Message, frozen=True):
    """A piece of a training slice."""

    offset_bytes: int  # from the start of the slice
    size_bytes: int


class SlabTensor(Message, frozen=True):
    """Tensor in the request pool: contiguous at ``offset_bytes``, or in ``pieces``. The pieces have
    its first ``size_bytes``, and possibly unused space; the rest of the tensor is zeros."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    pieces: tuple[int, ...] = ()  # offsets of the pieces
    piece_bytes: int = 0  # size of each piece

    def places(self, at: int, size_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the pool's ranges (offset, size) of ``size_bytes`` from the pieces' byte ``at``.

        Raises:
            IndexError: the pieces are too short.
        """
        end = at + size_bytes
        while at < end:
            index, skip = divmod(at, self.piece_bytes)
            size = min(self.piece_bytes - skip, end - at)
            yield self.pieces[index] + skip, size
            at += size


class SliceRead(Message, frozen=True):
    """memory daemon -> controller -> worker: the commit's bytes are copied, but it is not current
    yet. The worker may write its slice again."""

    job: JobName
    op_id: OpId
    number: int  # as in CommitStep


class StepCommitted(Message, frozen=True):
    """memory daemon -> controller -> worker: the step is committed, or ``error`` says why not."""

    job: JobName
    op_id: OpId
    number: int  # as in CommitStep
    step: int
    copy_ms: float  # with the checksum, which takes longer than the job waits
    error: str = ""


class Ping(Message, frozen=True):
    """controller -> memory daemon, worker (termination thread): answer with Pong."""

    op_id: OpId


class Pong(Message, frozen=True):
    """memory daemon, worker -> controller: answer to Ping."""

    op_id: OpId


class Exit(Message, frozen=True):
    """controller -> any process: finish, and exit with status 0."""
