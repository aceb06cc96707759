"""Batches in shared memory: a sealed memfd with a table of the batches at its start.

Each subscriber maps a batch privately (copy on write), so other subscribers do not see its writes.
The table has two copies. A writer overwrites the older copy, so the newer one survives its death.

Locks are open file description locks of one byte each, which end with their process. One protects
the table. Each subscriber has two: it holds the first while it lives, and the second while it loads
a batch. Other subscribers wait for the second lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import torch

from ...base import state_codec
from ...base.errors import InvalidInput
from .table import READY, SHARERS_BYTE, BatchTable, Entry, Label, differs

PAGE_BYTES: Final = mmap.PAGESIZE
HALF_BYTES: Final = 256 << 10  # fits a table of MAX_ENTRIES entries with long names
HEAD_BYTES: Final = PAGE_BYTES + 2 * HALF_BYTES
ALIGNED: Final = 64
MAX_SUBSCRIBERS: Final = 64
TABLE_LOCK, ALIVE, LOADING = 0, 1, 1 + MAX_SUBSCRIBERS  # first byte of each kind of lock
_FLOCK: Final = struct.Struct("hhqqi4x")  # struct flock of fcntl(2)

_decoder = msgspec.msgpack.Decoder(BatchTable)
_encoder = msgspec.msgpack.Encoder()


class Lent:
    """A batch, and the versions of its tensors, which show whether a script has written to them.

    Attributes:
        value: the batch as the loader returned it.
        was_found: True if another job had loaded the batch.
    """

    def __init__(self, value: Any, tensors: list[torch.Tensor], *, was_found: bool) -> None:
        self.value = value
        self.was_found = was_found
        self._versions = [(tensor, tensor._version) for tensor in tensors]

    @property
    def is_written(self) -> bool:
        """True if an operation of torch wrote to the batch in place."""
        return any(tensor._version != version for tensor, version in self._versions)


def private(value: Any) -> Lent:
    """Return a batch that is not in the ring.

    Raises:
        InvalidInput: a value in the batch could not be shared; the error names it.
    """
    parts = [part.source for part in _encoded(value)[1]]
    return Lent(value, [p for p in parts if isinstance(p, torch.Tensor)], was_found=False)


class Ring:
    """Ring of batches, as one subscriber (a job's process) sees it.

    Args:
        descriptor: the writable memfd, which this object owns from now on.
        job: name of this process's job, which errors in other jobs show.
    """

    def __init__(self, descriptor: int, job: str) -> None:
        self._descriptor, self._job = descriptor, job
        size_bytes = os.fstat(descriptor).st_size
        self._capacity_bytes = (size_bytes - HEAD_BYTES) // PAGE_BYTES * PAGE_BYTES
        # Locks belong to an open file. The script's children must not inherit it.
        self._locks = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        os.register_at_fork(after_in_child=lambda: os.close(self._locks))
        self._head = mmap.mmap(descriptor, HEAD_BYTES)
        self._newer = memoryview(self._head)[:8].cast("q")
        self._sharers = memoryview(self._head)[SHARERS_BYTE:][:8].cast("q")  # 0: not counted
        self._held: dict[int, weakref.ref[mmap.mmap]] = {}  # entry id -> mapping, oldest first
        self._exhausted: set[str] = set()  # loaders with no later batch in a lone job's ring
        self._compared: set[str] = set()  # loaders whose batches equal those of the other jobs
        self._me = self._join()

    def get(self, label: Label, facts: dict[str, str], load: Callable[[], Any]) -> Lent:
        """Return a batch that another job loaded, or call ``load`` and put the batch into the ring.

        Blocks while another job loads the batch.

        Raises:
            SharedInputRefused: the jobs' loaders differ.
            InvalidInput: a value in the batch cannot be shared; the error names it.
        """
        if self._me is None or self._is_alone(label):
            return private(load())
        while True:
            self._keep_what_is_old()
            with self._table() as table:
                self._drop_the_dead(table)
                entry = table.take(self._me, self._job, label, facts, list(self._held))
                if entry.loading == self._me:
                    self._lock(LOADING + self._me, fcntl.F_WRLCK)
            if entry.loading == READY:
                return self._found(entry, load)
            if entry.loading == self._me:
                try:
                    return self._loaded(entry.id, load)
                finally:
                    self._lock(LOADING + self._me, fcntl.F_UNLCK)
            self._lock(LOADING + entry.loading, fcntl.F_RDLCK)
            self._lock(LOADING + entry.loading, fcntl.F_UNLCK)

    def _is_alone(self, label: Label) -> bool:
        """Return True if no other job shares the ring and it has no batch from ``label`` on."""
        if self._sharers[0] != 1:
            self._exhausted.clear()
            return False
        if label.loader not in self._exhausted:
            with self._table() as table:
                if table.has_from(label):
                    return False
            self._exhausted.add(label.loader)
        return True

    # -- batches -------------------------------------------------------------------------------

    def _loaded(self, id: int, load: Callable[[], Any]) -> Lent:
        """Load the batch, write it to the ring if there is room, and return it."""
        entry = None
        try:
            value = load()
            data, parts = _encoded(value)
            head, places, size_bytes = _laid_out(data, parts)
            with self._table() as table:
                offset = table.place(id, size_bytes)
            if offset is None or not self._has_memory(offset, size_bytes):
                return private(value)
            with (
                mmap.mmap(self._descriptor, size_bytes, offset=HEAD_BYTES + offset) as target,
                memoryview(target) as view,
            ):
                view[: len(head)] = head
                for part, (start, size) in zip(parts, places, strict=True):
                    view[start : start + size] = _bytes_of(part)
            with self._table() as table:
                entry = table.done(id)
                return self._lent(entry, was_found=False)
        finally:
            if entry is None:
                with self._table() as table:
                    table.abandon(id)

    def _has_memory(self, offset: int, size_bytes: int) -> bool:
        """Allocate the range; return False if memory is short: writes would raise SIGBUS."""
        try:
            os.posix_fallocate(self._descriptor, HEAD_BYTES + offset, size_bytes)
        except OSError:
            return False
        return True

    def _found(self, entry: Entry, load: Callable[[], Any]) -> Lent:
        """Return another job's batch; load the first batch of each loader, too, to compare it."""
        lent = self._lent(entry, was_found=True)
        loader = entry.label.loader
        if loader not in self._compared:
            if not _same(lent.value, load()):
                what = f"batch {entry.label.index} has other bytes"
                raise differs(entry.label, entry.job, what)
            self._compared.add(loader)
        return lent

    def _lent(self, entry: Entry, *, was_found: bool) -> Lent:
        own = mmap.mmap(
            self._descriptor,
            entry.size_bytes,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=HEAD_BYTES + entry.offset_bytes,
        )
        self._held[entry.id] = weakref.ref(own)
        everything = torch.frombuffer(own, dtype=torch.uint8)
        size = int.from_bytes(own[:8], "little")
        content = json.loads(own[8 : 8 + size])
        blobs = [everything[start : start + size] for start, size in content["places"]]
        return Lent(state_codec.decode(content["data"], blobs), [everything], was_found=was_found)

    def _keep_what_is_old(self) -> None:
        """Release batches that the script dropped, and copy the others into private memory.
        The newest batch is not copied: usually only the loop's variable refers to it."""
        alive = {id: own for id, ref in self._held.items() if (own := ref()) is not None}
        for id in list(alive)[:-1]:
            with memoryview(alive.pop(id)) as view:
                view[::PAGE_BYTES] = bytes(view[::PAGE_BYTES])  # a write copies the page
        self._held = {id: weakref.ref(own) for id, own in alive.items()}

    # -- the table -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _table(self) -> Iterator[BatchTable]:
        """Lock and yield the table; write it back unless the block raises."""
        self._lock(TABLE_LOCK, fcntl.F_WRLCK)
        try:
            newer = self._newer[0]
            start = PAGE_BYTES + newer % 2 * HALF_BYTES
            size = int.from_bytes(self._head[start : start + 8], "little")
            table = BatchTable(self._capacity_bytes)
            if newer:
                table = _decoder.decode(self._head[start + 8 : start + 8 + size])
            yield table
            data = _encoder.encode(table)
            assert len(data) + 8 <= HALF_BYTES
            start = PAGE_BYTES + (newer + 1) % 2 * HALF_BYTES
            self._head[start : start + 8 + len(data)] = len(data).to_bytes(8, "little") + data
            self._newer[0] = newer + 1
        finally:
            self._lock(TABLE_LOCK, fcntl.F_UNLCK)

    def _join(self) -> int | None:
        """Return a free subscriber number, or None if MAX_SUBSCRIBERS processes are alive."""
        with self._table() as table:
            for number in range(MAX_SUBSCRIBERS):
                if self._try(ALIVE + number):
                    table.drop(number)
                    return number
        return None

    def _drop_the_dead(self, table: BatchTable) -> None:
        for other in table.subscribers() - {self._me}:
            if self._try(ALIVE + other):
                table.drop(other)
                self._lock(ALIVE + other, fcntl.F_UNLCK)

    def _lock(self, byte: int, kind: int) -> None:
        fcntl.fcntl(self._locks, fcntl.F_OFD_SETLKW, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))

    def _try(self, byte: int) -> bool:
        order = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        try:
            fcntl.fcntl(self._locks, fcntl.F_OFD_SETLK, order)
        except BlockingIOError:
            return False
        return True


def _encoded(batch: Any) -> tuple[Any, list[state_codec.Attachment]]:
    try:
        return state_codec.encode(batch)
    except InvalidInput as error:
        error.hint = (
            "let the loader's collate_fn return tensors, numpy arrays, numbers and texts, in "
            "lists, tuples and dicts"
        )
        raise


def _laid_out(
    data: Any, parts: list[state_codec.Attachment]
) -> tuple[bytes, list[tuple[int, int]], int]:
    """Return the batch's head, its attachments' (offset, size), and the total bytes, in pages."""
    head = json.dumps({"data": data, "places": []}).encode()
    offset = 8 + len(head) + 64 * len(parts)  # 64 bytes for the two numbers of each attachment
    places = []
    for part in parts:
        offset = -(-offset // ALIGNED) * ALIGNED
        places.append((offset, part.size_bytes))
        offset += part.size_bytes
    head = json.dumps({"data": data, "places": places}).encode()
    return len(head).to_bytes(8, "little") + head, places, -(-offset // PAGE_BYTES) * PAGE_BYTES


def _bytes_of(part: state_codec.Attachment) -> Any:
    """Return a tensor's bytes, without a copy if it is contiguous and on the cpu."""
    source = part.source
    if isinstance(source, torch.Tensor) and source.device.type == "cpu" and source.numel():
        # A tensor of one element is contiguous with any strides, but ``view`` needs stride 1.
        flat = source.detach().contiguous().as_strided((source.numel(),), (1,))
        return flat.view(torch.uint8).numpy()
    return part.read()


def _same(other: Any, own: Any) -> bool:
    """Return whether two batches are equal bit by bit."""
    (data, parts), (own_data, own_parts) = state_codec.encode(other), state_codec.encode(own)
    if data != own_data:
        return False
    return all(a.read() == b.read() for a, b in zip(parts, own_parts, strict=True))
