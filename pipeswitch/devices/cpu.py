"""The cpu device: the arena is two memfds, the copy engine a thread, a wait an eventfd.

Not a mock: a worker computes on these bytes, and the whole system runs on any machine with them
(ADR 4). *models* is written by the memory daemon alone, and no other process can map it for
writing; it begins with the arrival words, and may be one file for each tenant (``arenas.py``).
*work* holds training slices and may be
written by all.

Why a reader that sees a word sees the data: the copy, then the word's store, are done by one
thread in this order, and x86 keeps stores in order; the C library fences its streaming stores.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from ..errors import RemoteProtocolError
from ..failpoints import reach
from ..ipc.board import Board, ring, sealed_memfd
from ..ipc.messages import ByteRange, Epoch, GroupCopy, MoveTask, TransmitEnded, TransmitModel
from ..programs.layout import TensorSpec, aligned
from .arenas import Bytes, FilePerTenant, Models, OneFile
from .orders import WORD_BYTES, WORD_MASK, check_range, check_slice_reads
from .transmissions import OnEnd, Transmission, TransmissionQueue
from .waiting import Waiter, now_ms
from .windows import (
    UNIT_BYTES,
    Guarded,
    Window,
    address_of,
    move_pages,
    replace_by_nothing,
    whole_pages,
)

if TYPE_CHECKING:
    import torch

    from ..programs.executor import BoundProgram

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 8 << 20  # between two looks at the cancel flag; larger gains nothing
THROTTLED_CHUNK_BYTES: Final = 1 << 20


class Link:
    """One direction of a simulated link: after each piece, wait until it would have arrived."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._busy_until_s = 0.0
        self.chunk_bytes = THROTTLED_CHUNK_BYTES if bytes_per_s > 0 else CHUNK_BYTES

    def begin(self) -> None:
        """A transfer starts: the link does not save up bandwidth while it is idle."""
        self._busy_until_s = max(self._busy_until_s, time.monotonic())

    def pace(self, size_bytes: int, cancelled: threading.Event | None = None) -> None:
        """Account for a piece that was copied; returns when the link would have carried it."""
        if self._bytes_per_s <= 0:
            return
        # An absolute schedule: what one wait oversleeps, the next is shorter.
        self._busy_until_s += size_bytes / self._bytes_per_s
        delay_s = self._busy_until_s - time.monotonic()
        if delay_s <= 0:
            return
        if cancelled is None:
            time.sleep(delay_s)
        else:
            cancelled.wait(delay_s)


class CpuDeviceMemory:
    """The memory daemon's side (see ``DeviceMemory``). ``close`` ends its copy thread."""

    def __init__(
        self,
        *,
        store: int,
        bells: Sequence[int],
        arena_bytes: int,
        store_bytes: int,
        words: int,
        link_bytes_per_s: float = 0.0,
        separates_tenants: bool = False,
    ) -> None:
        """Take the memory. The descriptors stay the caller's and must outlive this object.

        Raises:
            OSError: not enough memory.
            RemoteProtocolError: sizes that contradict each other.
        """
        if words * WORD_BYTES > arena_bytes:
            raise RemoteProtocolError(f"{words} words do not fit in {arena_bytes} bytes")
        check_range("store", 0, store_bytes, os.fstat(store).st_size)
        self.arena_bytes = arena_bytes
        self.store_bytes = store_bytes
        self._bells = tuple(bells)
        self._store_descriptor = store
        self._models: Models = (FilePerTenant if separates_tenants else OneFile)(arena_bytes, words)
        self._work_descriptor = sealed_memfd("pipeswitch-work", arena_bytes)
        self._work_map = mmap.mmap(self._work_descriptor, arena_bytes)
        self._store_map = mmap.mmap(store, store_bytes)
        self._work: Bytes = np.frombuffer(self._work_map, dtype=np.uint8)
        self._store: Bytes = np.frombuffer(self._store_map, dtype=np.uint8)
        self._to_device = Link(link_bytes_per_s)
        self._to_host = Link(link_bytes_per_s)  # a link is full duplex
        self._transmissions = TransmissionQueue(
            self._perform,
            arena_bytes=arena_bytes,
            store_bytes=store_bytes,
            words=words,
            settle=self._models.tidy,
        )

    def export_descriptors(self) -> list[int]:
        """[models, work], owned by this object; where tenants are separate [work]."""
        return [*self._models.descriptors, self._work_descriptor]

    def export_handle(self) -> bytes:
        """Nothing: descriptors say it all."""
        return b""

    def store_view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """A writable view of the host store, its pages reserved.

        Raises:
            RemoteProtocolError: outside of the store.
            OSError: the machine has no memory for these pages.
        """
        check_range("store view", offset_bytes, size_bytes, self.store_bytes)
        if size_bytes:
            os.posix_fallocate(self._store_descriptor, offset_bytes, size_bytes)
        return memoryview(self._store_map)[offset_bytes : offset_bytes + size_bytes]

    def open_tenant(self, tenant: str, descriptor: int) -> None:
        """As ``DeviceMemory``."""
        self._models.open_tenant(tenant, descriptor)

    def transmit(self, order: TransmitModel, on_end: OnEnd) -> None:
        """Queue a transmission; ``on_end`` comes exactly once, on the copy thread.

        Raises:
            RemoteProtocolError: out of bounds, this epoch is being transmitted already, or its
                tenant has no file.
        """
        self._models.take(order)
        self._transmissions.put(order, on_end)

    def cancel(self, epoch: Epoch) -> None:
        """Stop it within a chunk; unknown means that it has just ended, and is fine."""
        self._transmissions.cancel(epoch)

    def read_slice(self, offset_bytes: int, ranges: Sequence[ByteRange], into: memoryview) -> None:
        """Concatenate pieces of the slice at ``offset_bytes`` of *work* into ``into`` (blocks).

        Raises:
            RemoteProtocolError: a piece out of bounds, or ``into`` of another size.
        """
        check_slice_reads(offset_bytes, ranges, len(into), self.arena_bytes)
        target: Bytes = np.frombuffer(into, dtype=np.uint8)
        position = 0
        self._to_host.begin()
        for piece in ranges:
            start = offset_bytes + piece.offset_bytes
            for done in range(0, piece.size_bytes, self._to_host.chunk_bytes):
                size = min(self._to_host.chunk_bytes, piece.size_bytes - done)
                source = self._work[start + done : start + done + size]
                np.copyto(target[position : position + size], source)
                position += size
                self._to_host.pace(size)

    def scrub(self, offset_bytes: int, size_bytes: int) -> None:
        """Make a range of *work* read as zeros, and give its whole pages back (blocks).

        Raises:
            RemoteProtocolError: outside of *work*.
        """
        check_range("scrub", offset_bytes, size_bytes, self.arena_bytes)
        end = offset_bytes + size_bytes
        first_page = -(-offset_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        last_page = end // mmap.PAGESIZE * mmap.PAGESIZE
        if first_page >= last_page:
            self._work[offset_bytes:end] = 0
            return
        self._work[offset_bytes:first_page] = 0
        self._work[last_page:end] = 0
        try:
            # On shared memory this is fallocate(PUNCH_HOLE): every mapping reads zeros.
            self._work_map.madvise(mmap.MADV_REMOVE, first_page, last_page - first_page)
        except OSError as error:
            log.warning("scrub=zero-fill cause=%s", error)
            self._work[first_page:last_page] = 0

    def close(self) -> None:
        """Cancel what is under way, end the copy thread, let the memory go."""
        self._transmissions.close()
        self._models.close()
        del self._work, self._store
        for mapping in (self._work_map, self._store_map):
            _unmap(mapping)
        os.close(self._work_descriptor)

    def _perform(self, job: Transmission) -> TransmitEnded:
        """Copy the groups; an error in between ends it incomplete, like a cancel."""
        order = job.order
        started_at_ms = now_ms()
        ends_at_ms: list[float] = []
        copied_bytes = 0
        self._to_device.begin()
        try:
            reach("daemon.transmit.begin")
            copied = [0] * len(order.groups)
            for index, group in enumerate(order.groups):
                copied_bytes += self._bring(order, index, copied, job.cancelled)
                if job.cancelled.is_set():
                    break  # perhaps in the middle of this group: its word must not rise
                reach("daemon.transmit.group")
                ends_at_ms.append(now_ms())  # before the bell: a woken worker takes the core
                self._models.raise_word(order.tenant, group.word, order.epoch & WORD_MASK)
                self._ring_all()
        except Exception:
            log.exception("transmission=%d failed", order.epoch)
        reach("daemon.transmit.end")
        ended = job.ended(started_at_ms, ends_at_ms, copied_bytes)
        if not ended.is_complete:
            self._ring_all()  # a worker that waits for a group that will not come looks once more
        return ended

    def _bring(
        self, order: TransmitModel, index: int, copied: list[int], cancelled: threading.Event
    ) -> int:
        """Copy what is missing of a group, and what shares its last unit; bytes copied.

        A worker opens a group's units whole (``Window``). What lay there before is another
        model's, so when the group's word rises

        1. the later groups that begin in its last unit have come as far as that unit goes,
        2. behind the model's last byte the page is zeros.

        ``copied`` says how far each group has come.
        """
        group = order.groups[index]
        total = self._copy(order.tenant, group, copied, index, group.size_bytes, cancelled)
        end = group.arena_offset_bytes + group.size_bytes
        unit_end = aligned(end, UNIT_BYTES)
        if not group.size_bytes:
            return 0  # nothing of it was missing, nor of its last unit
        for later in range(index + 1, len(order.groups)):
            following = order.groups[later]
            if following.arena_offset_bytes >= unit_end or cancelled.is_set():
                break
            upto = min(following.size_bytes, unit_end - following.arena_offset_bytes)
            total += self._copy(order.tenant, following, copied, later, upto, cancelled)  # 1.
            end = max(end, following.arena_offset_bytes + upto)
        region_end = order.arena_offset_bytes + order.region_bytes
        self._models.clear(order.tenant, end, min(aligned(end, mmap.PAGESIZE), region_end))  # 2.
        return total

    def _copy(
        self,
        tenant: str,
        group: GroupCopy,
        copied: list[int],
        index: int,
        upto: int,
        cancelled: threading.Event,
    ) -> int:
        """Store → models, chunk by chunk until ``upto`` or cancelled; bytes copied."""
        source, target = group.store_offset_bytes, group.arena_offset_bytes
        first = done = copied[index]
        while done < upto and not cancelled.is_set():
            size = min(self._to_device.chunk_bytes, upto - done)
            piece = self._store[source + done : source + done + size]
            self._models.write(tenant, target + done, piece)
            done += size
            self._to_device.pace(size, cancelled)
        copied[index] = done
        return done - first

    def _ring_all(self) -> None:
        for bell in self._bells:
            ring(bell)


class CpuPoolView:
    """A worker's side (see ``PoolView``). Imports torch with the first tensor."""

    def __init__(
        self,
        *,
        models: int,
        work: int | None,
        board: int,
        bell: int,
        bells: Sequence[int],
        arena_bytes: int,
        words: int,
        on_wake: Callable[[], None] | None = None,
        is_one_tenants: bool = False,
    ) -> None:
        """Map everything; the descriptors stay the caller's, bells must outlive this object.

        Only the arrival words can be read until ``enter`` and ``slice_bytes``.

        Args:
            work: None for a worker that runs no training script, where tenants are separate.
            is_one_tenants: ``models`` has pages where this tenant's models lie, new ones with each
                copy; in an arena of all tenants they were there before.
            bell, bells, on_wake: as ``Waiter``.
        """
        self._waiter = Waiter(board=board, bell=bell, bells=bells, on_wake=on_wake)
        self._words_bytes = words * WORD_BYTES
        self._words_map = mmap.mmap(models, self._words_bytes, prot=mmap.PROT_READ)
        self._words = memoryview(self._words_map).cast("I")
        self._window = Window(models, arena_bytes)
        self._entered = (0, 0, 0)  # region's start and end, epoch
        self._last_word = 0
        self._open_end = 0
        self._is_one_tenants = is_one_tenants
        self._populated: dict[int, tuple[int, int]] = {}  # by region: its epoch, up to where
        self._work_map: mmap.mmap | None = None
        self._slice = (0, 0)  # the last one: address, and bytes of whole pages
        self._lent_by: Sequence[int] = ()  # descriptors of the device that it moved to
        self._has_moved = False  # since the last slice was leased
        if work is not None:
            self._map_work(work)
        self._pool_windows: Guarded | None = None
        self._lent: tuple[int, int, bool] | None = None

    device: Final = "cpu"

    def _map_work(self, descriptor: int) -> None:
        size_bytes = os.fstat(descriptor).st_size
        self._work_map = mmap.mmap(descriptor, size_bytes)
        self._work_windows = Guarded(address_of(self._work_map), size_bytes)
        self.__dict__.pop("_work", None)

    @property
    def board(self) -> Board:
        return self._waiter.board

    @cached_property
    def _models(self) -> torch.UntypedStorage:
        from ..programs.views import bytes_over

        window = self._window
        return bytes_over(window.reserve, window.reserve_offset_bytes, window.size_bytes)

    @cached_property
    def _work(self) -> torch.UntypedStorage:
        from ..programs.views import bytes_over

        assert self._work_map is not None, "this worker runs no training script"
        return bytes_over(self._work_map)

    def prefault(self, offset_bytes: int, size_bytes: int) -> None:
        """Take the page faults of a region now (standby), not in its first inference.

        Raises:
            RemoteProtocolError: outside of the arena.
        """
        check_range("prefault", offset_bytes, size_bytes, self._window.size_bytes)
        self._window.populate(offset_bytes, size_bytes)

    def enter(self, offset_bytes: int, size_bytes: int, last_word: int, epoch: int) -> None:
        """Close what any other task could read; repeated, it keeps what has been shown.

        Raises:
            RemoteProtocolError: outside of the arena.
        """
        check_range("region", offset_bytes, size_bytes, self._window.size_bytes)
        entered = (offset_bytes, offset_bytes + size_bytes, epoch)
        if self._entered != entered:
            self._window.close()
            self._entered = entered
            self._last_word = last_word
            self._open_end, _ = whole_pages(offset_bytes, 0)

    def show(self, arrived_bytes: int) -> None:
        """Open what has arrived, in whole units (the daemon fills a unit before it says so)."""
        start, region_end, epoch = self._entered
        arrived_end = start + arrived_bytes
        if arrived_end <= self._open_end:
            return
        if self._words[self._last_word] == epoch & WORD_MASK:
            arrived_end = region_end  # in one step
        end = min(aligned(arrived_end, UNIT_BYTES), aligned(region_end, mmap.PAGESIZE))
        if self._is_one_tenants and self._populated.get(start, (0, 0)) < (epoch, end):
            self._window.populate(self._open_end, end)
            self._populated[start] = (epoch, end)
        self._window.open(self._open_end, end)
        self._open_end = end

    def leave(self) -> None:
        """Close it."""
        self._window.close()
        self._entered, self._open_end = (0, 0, 0), 0

    def tensor(self, spec: TensorSpec, region_offset_bytes: int) -> torch.Tensor:
        """A tensor over a model's region. Writing to it kills this process, and so does reading
        before ``show``.

        Raises:
            RemoteProtocolError: out of bounds, over the arrival words, or a wrong size.
        """
        if region_offset_bytes < self._words_bytes:
            raise RemoteProtocolError(
                f"a region at {region_offset_bytes} overlaps the arrival words"
            )
        from ..programs.views import tensor_over

        return tensor_over(self._models, spec, region_offset_bytes)

    def slice_bytes(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """A writable uint8 tensor over a training slice; its storage is all of *work*.

        Raises:
            RemoteProtocolError: out of bounds.
        """
        spec = TensorSpec(
            name="slice", dtype="uint8", shape=(size_bytes,), offset_bytes=offset_bytes,
            size_bytes=size_bytes, file_offset_bytes=0,
        )  # fmt: skip
        from ..programs.views import tensor_over

        if self._has_moved:  # the former slice is not used any more
            self._map_work(self._lent_by[0])
            self._has_moved = False
        tensor = tensor_over(self._work, spec, 0)
        self._work_windows.open(offset_bytes, size_bytes, writable=True)
        assert self._work_map is not None
        self._slice = address_of(self._work_map) + offset_bytes, aligned(size_bytes, mmap.PAGESIZE)
        return tensor

    def move(self, order: MoveTask, descriptors: Sequence[int]) -> int:
        """As ``PoolView``: one copy, then the pages of the copy lie where those of the slice did.

        No tensor is told of it, whether a script, an optimizer or autograd refers to it.
        """
        (start, size), (work, board, *bells) = self._slice, descriptors
        check_range("move", 0, size, order.size_bytes)
        with memoryview((ctypes.c_char * size).from_address(start)) as source:
            written = 0
            while written < size:  # by the kernel, which need not zero the new pages first
                written += os.pwrite(work, source[written:], order.offset_bytes + written)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        copy = mmap.mmap(work, size, flags=flags, offset=order.offset_bytes)
        move_pages(address_of(copy), start, size)
        copy.close()
        self._forget_device(start, start + size)
        self._waiter = Waiter(board=board, bell=bells[0], bells=bells)
        for descriptor in self._lent_by:
            os.close(descriptor)
        self._lent_by, self._has_moved = tuple(descriptors), True
        return size

    def _forget_device(self, start: int, end: int) -> None:
        """Of its memory nothing stays mapped; addresses around the slice lead nowhere."""
        assert self._work_map is not None
        first = address_of(self._work_map)
        replace_by_nothing(first, start)
        replace_by_nothing(end, first + len(self._work_map))
        self._waiter.close()
        self._unmap_models()

    def wait_group(self, word: int, epoch: int) -> float:
        """Block until arrival word ``word`` is exactly ``epoch``; milliseconds blocked."""
        words, wanted = self._words, epoch & WORD_MASK
        return self._waiter.wait(lambda: words[word] == wanted)

    def wait_turn(self, turn: int) -> float:
        """Block until the board's turn is exactly ``turn``; milliseconds blocked."""
        return self._waiter.wait_turn(turn)

    def raise_turn(self, turn: int, slot: int) -> None:
        """Give the device away: write the turn, ring that slot's bell."""
        self._waiter.raise_turn(turn, slot)

    def program(self, bound: BoundProgram) -> BoundProgram:
        """As it is: its inputs lie where it computes."""
        return bound

    def can_improve(self, program: BoundProgram) -> bool:
        """No."""
        return False

    def improve(self, program: BoundProgram) -> None:
        """Nothing: it is as fast as it gets."""

    def drop(self, program: BoundProgram) -> None:
        """Nothing to let go."""

    def computing(self, program: BoundProgram | None) -> AbstractContextManager[None]:
        """Nothing to set up."""
        return nullcontext()

    def pin(self, pointer: int, size_bytes: int) -> None:
        """Close it: each task opens its slabs (``lend``)."""
        self._pool_windows = Guarded(pointer, size_bytes)

    def lend(self, offset_bytes: int, size_bytes: int, *, writable: bool) -> None:
        """Open a slab, and close the one before; the next request often lies where it did.

        Raises:
            RemoteProtocolError: outside of the pool.
        """
        wanted = (offset_bytes, size_bytes, writable)
        if self._pool_windows is not None and self._lent != wanted:
            self.take_back()
            self._pool_windows.open(offset_bytes, size_bytes, writable=writable)
            self._lent = wanted

    def take_back(self) -> None:
        """Close it."""
        if self._pool_windows is not None:
            self._pool_windows.close()
            self._lent = None

    def quiesce(self) -> None:
        """Nothing is ever queued here: kernels have ended when they return."""

    def settle(self) -> None:
        """As ``quiesce``."""

    def pacer(self) -> None:
        """Nothing: a kernel has ended when it returns."""

    def is_lost(self, error: BaseException) -> bool:
        """Never: there is no context to break."""
        return False

    def fault(self) -> None:
        """Nothing is ever lost."""

    def close(self) -> None:
        """Unmap; tensors that still live keep their mapping until the last is gone."""
        self._waiter.close()
        self.__dict__.pop("_work", None)
        self._unmap_models()
        if self._work_map is not None:
            _unmap(self._work_map)
        for descriptor in self._lent_by:
            os.close(descriptor)

    def _unmap_models(self) -> None:
        if self._words_map.closed:
            return
        self._words.release()
        self.__dict__.pop("_models", None)
        self._window.unmap()
        for mapping in (self._words_map, self._window.reserve):
            _unmap(mapping)


def _unmap(mapping: mmap.mmap) -> None:
    try:
        mapping.close()
    except BufferError:  # a view is still held; the mapping goes with the last of them
        log.debug("unmap=later bytes=%d", len(mapping))
