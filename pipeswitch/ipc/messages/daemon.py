"""Messages between the controller and a memory daemon."""

from __future__ import annotations

from .base import ByteRange, JobName, Message, ModelName, OpId


class DaemonSettings(Message, frozen=True):
    """Settings of a memory daemon (descriptors: control, store, board, doorbells…)."""

    device: str
    arena_bytes: int
    store_bytes: int
    fence_count: int  # fences at the start of the models memory
    link_bytes_per_s: float  # 0: as fast as it goes
    log_path: str = ""
    log_bytes: int = 0  # what stays of the log, beside two older ones; 0: all
    separates_tenants: bool = False  # each tenant's models lie in a file of their own (ADR 23)
    options: bytes = b""  # the device kind's own


class DaemonReady(Message, frozen=True):
    """memory daemon -> controller: memory is taken.

    Descriptors, for the workers: on cpu models (sealed) and work, or work alone where tenants are
    separate; on cuda the host's copy of the fences.
    """

    pid: int
    handle: bytes = b""  # cuda: the allocation's IPC handle


class StoreModel(Message, frozen=True):
    """controller -> memory daemon: load a built program's tensors into the host store."""

    model: ModelName
    op_id: OpId
    directory: str  # holds manifest.json and the weights file
    store_offset_bytes: int
    size_bytes: int


class ModelStored(Message, frozen=True):
    """memory daemon -> controller: the bytes lie in the store and match their digest."""

    model: ModelName
    op_id: OpId
    load_ms: float


class StoreFailed(Message, frozen=True):
    """memory daemon -> controller: unreadable or corrupt; nothing of it is used."""

    model: ModelName
    op_id: OpId
    reason: str


class GroupCopy(Message, frozen=True):
    """One layer group's copy to the arena; then its fence becomes the operation id."""

    store_offset_bytes: int
    arena_offset_bytes: int
    size_bytes: int
    fence: int  # index of its uint32 fence


class TransmitModel(Message, frozen=True):
    """controller -> memory daemon: copy groups in order, raise each word (PipeSwitch 4.2).

    Where tenants are separate, the first one of a tenant carries its file of the arena.
    """

    model: ModelName
    op_id: OpId
    arena_offset_bytes: int  # the leased region; every copy must lie inside
    region_bytes: int
    groups: tuple[GroupCopy, ...]
    tenant: str = ""  # whose file of the arena, where tenants are separate (ADR 23)
    # Of a model that streams through a ring (ADR 43), for each group: its copy begins when so many
    # groups have computed, as the control page's word says.
    waits: tuple[int, ...] = ()


class CancelTransmit(Message, frozen=True):
    """controller -> memory daemon: stop after the group in flight; answered by TransmitEnded."""

    op_id: OpId


class TransmitEnded(Message, frozen=True):
    """memory daemon -> controller: no byte of this operation id will be written any more."""

    model: ModelName
    op_id: OpId
    is_complete: bool
    group_count: int
    copied_bytes: int
    started_at_ms: float
    ended_at_ms: float
    group_ends_at_ms: tuple[float, ...] = ()


class Scrub(Message, frozen=True):
    """controller -> memory daemon: zero a released range of ``work`` before another owner."""

    op_id: OpId
    offset_bytes: int
    size_bytes: int


class Scrubbed(Message, frozen=True):
    """memory daemon -> controller: the range reads as zeros."""

    op_id: OpId


class OpenCommits(Message, frozen=True):
    """controller -> memory daemon: a job's double-buffered commit area (one memfd comes along).

    Layout of the memfd: a 4 KiB header, then two slots of ``slot_bytes``.
    """

    job: JobName
    slot_bytes: int


class CloseCommits(Message, frozen=True):
    """controller -> memory daemon: the job is over, unmap."""

    job: JobName


class CommitCopy(Message, frozen=True):
    """controller -> memory daemon: copy slice pieces into the idle slot, then flip (ADR 8)."""

    job: JobName
    op_id: OpId
    number: int  # CommitStep's; told again, it is not copied again
    step: int
    slice_offset_bytes: int  # of the slice in ``work``
    slice_bytes: int
    ranges: tuple[ByteRange, ...]


class PersistCommit(Message, frozen=True):
    """controller -> memory daemon: write the job's newest commit to disk, crash-safe."""

    job: JobName
    op_id: OpId
    directory: str


class CommitPersisted(Message, frozen=True):
    """memory daemon -> controller: on disk and fsynced, or why not (the old one is intact)."""

    job: JobName
    op_id: OpId
    step: int
    error: str = ""


class DaemonFault(Message, frozen=True):
    """memory daemon -> controller: it refused something (out of bounds, overlapping, stale)."""

    op_id: OpId
    reason: str
