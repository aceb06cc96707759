"""Messages between the controller and a memory daemon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .base import ByteRange, JobName, Message, ModelName, OpId, ResourceLimits, SlabTensor


class DaemonSettings(Message, frozen=True):
    """Settings of a memory daemon (descriptors: channel, store, control page, doorbells)."""

    device: str
    limits: ResourceLimits
    log_path: str = ""


class DaemonReady(Message, frozen=True):
    """memory daemon -> controller: the memory is allocated.

    Descriptors for the workers. On cpu: the memory of models (sealed; not with separate tenants),
    and that of training slices (*work*). On cuda: the host copy of the fences.
    """

    pid: int
    handle: bytes = b""  # cuda: the allocation's IPC handle


class CopyPart(NamedTuple):
    """Range of a group that is copied, or of a model in the host store."""

    store_offset_bytes: int
    offset_bytes: int  # from the start of the group, or of the model's region
    size_bytes: int


class StoreModel(Message, frozen=True):
    """controller -> memory daemon: load a built program's tensors into the host store."""

    model: ModelName
    op_id: OpId
    directory: str  # has manifest.json and the weights file
    store_offset_bytes: int
    size_bytes: int
    image: tuple[CopyPart, ...] = ()  # parts elsewhere are another model's; empty: all is there
    fills: bool = False  # write each tensor that is missing there, also in others' parts


class ModelStored(Message, frozen=True):
    """memory daemon -> controller: the store has the model's bytes, and they match their digest."""

    model: ModelName
    op_id: OpId
    load_ms: float


class StoreFailed(Message, frozen=True):
    """memory daemon -> controller: the model's files are unreadable or corrupt."""

    model: ModelName
    op_id: OpId
    reason: str


class GroupCopy(Message, frozen=True):
    """Copy of one layer group to the arena; after it the group's fence gets the operation id.

    With ``row_bytes`` it copies only rows of a table, and another copy brings all of it (ADR 67).
    """

    store_offset_bytes: int
    arena_offset_bytes: int
    size_bytes: int
    fence: int  # index of its uint32 fence
    row_bytes: int = 0
    indices: tuple[SlabTensor, ...] = ()  # the controller reads ``rows`` from there
    rows: tuple[int, ...] = ()  # ascending
    parts: tuple[CopyPart, ...] | None = None  # ascending, others are there; None: all of it

    def within(self, start: int, end: int) -> Iterator[CopyPart]:
        """Yield what is copied of a range of the group, without regard to rows."""
        parts = self.parts
        if parts is None:
            parts = (CopyPart(self.store_offset_bytes, 0, self.size_bytes),)
        for source, at, size in parts:
            low, high = max(start, at), min(end, at + size)
            if low < high:
                yield CopyPart(source + low - at, low, high - low)

    @property
    def copied_bytes(self) -> int:
        """Number of copied bytes; for a copy of rows, the whole table's."""
        return sum([part.size_bytes for part in self.within(0, self.size_bytes)])

    def pieces(self) -> Iterator[CopyPart]:
        """Yield what is copied; of a table, its ``rows``."""
        step = self.row_bytes
        for row in self.rows:
            yield from self.within(row * step, (row + 1) * step)
        if not step:
            yield from self.within(0, self.size_bytes)


class TransmitModel(Message, frozen=True):
    """controller -> memory daemon: copy groups in order, set a fence after each (PipeSwitch 4.2).

    With separate tenants, a tenant's first TransmitModel carries the tenant's file of the arena.
    """

    model: ModelName
    op_id: OpId
    arena_offset_bytes: int  # the leased region; every copy must lie inside
    region_bytes: int
    groups: tuple[GroupCopy, ...]
    tenant: str = ""  # whose file of the arena to use, with separate tenants (ADR 23)
    # Only for a streamed model (ADR 43): for each group, the number of groups that must have
    # computed before its copy begins, because the copy overwrites them (see the control page).
    waits: tuple[int, ...] = ()


class CancelTransmit(Message, frozen=True):
    """controller -> memory daemon: stop after the current chunk; TransmitEnded is the answer."""

    op_id: OpId


class TransmitEnded(Message, frozen=True):
    """memory daemon -> controller: no more bytes will be written for this operation id."""

    model: ModelName
    op_id: OpId
    is_complete: bool
    group_count: int
    copied_bytes: int
    started_at_ms: float
    ended_at_ms: float
    group_ends_at_ms: tuple[float, ...] = ()


class Scrub(Message, frozen=True):
    """controller -> memory daemon: zero a released range of ``work`` before another job gets it."""

    op_id: OpId
    offset_bytes: int
    size_bytes: int


class Scrubbed(Message, frozen=True):
    """memory daemon -> controller: the range reads as zeros."""

    op_id: OpId


class OpenCommits(Message, frozen=True):
    """controller -> memory daemon: a job's double-buffered commit area (descriptor: its memfd).

    Layout of the memfd: a 4 KiB header, then two slots of ``slot_bytes``.
    """

    job: JobName
    slot_bytes: int


class CloseCommits(Message, frozen=True):
    """controller -> memory daemon: unmap a commit area, because the job is over."""

    job: JobName


class CommitCopy(Message, frozen=True):
    """controller -> memory daemon: commit pieces of a slice to the job's commit area (ADR 8)."""

    job: JobName
    op_id: OpId
    number: int  # as in CommitStep; a repeated number copies nothing again
    step: int
    slice_offset_bytes: int  # offset of the slice in ``work``
    slice_bytes: int
    ranges: tuple[ByteRange, ...]
    older: ByteRange | None = None  # as in CommitStep


class CopySliceOut(Message, frozen=True):
    """controller -> memory daemon: copy a slice to its job's image, then zero its range (ADR 64).

    Descriptor, here and in CopySliceIn: the image, a memfd of ``size_bytes`` at least.
    """

    job: JobName
    op_id: OpId
    offset_bytes: int
    size_bytes: int


class CopySliceIn(Message, frozen=True):
    """controller -> memory daemon: copy a job's image to a range of ``work``."""

    job: JobName
    op_id: OpId
    offset_bytes: int
    size_bytes: int


class CancelSlice(Message, frozen=True):
    """controller -> memory daemon: end a CopySliceIn after the current chunk."""

    op_id: OpId


class SliceCopied(Message, frozen=True):
    """memory daemon -> controller: a copy of a slice has ended.

    If ``error`` is set, a copy out has changed nothing, and a copy in is incomplete. With
    ``needs_scrub``, a copy out has succeeded, but its range was not zeroed completely.
    """

    op_id: OpId
    began_at_ms: float
    ended_at_ms: float
    error: str = ""
    needs_scrub: bool = False


class PersistCommit(Message, frozen=True):
    """controller -> memory daemon: write the job's newest commit to disk, crash-safe."""

    job: JobName
    op_id: OpId
    directory: str
    is_lasting: bool = True  # False: this server alone reads it, soon; it need not be crash-safe


class CommitPersisted(Message, frozen=True):
    """memory daemon -> controller: the commit is on disk and synced; or ``error`` says why not, and
    the older commit is intact."""

    job: JobName
    op_id: OpId
    step: int
    error: str = ""


class DaemonFault(Message, frozen=True):
    """memory daemon -> controller: it refused an order (out of bounds, overlapping, stale)."""

    op_id: OpId
    reason: str
