"""The memory daemon's side of the cpu device: two memfds as the arena, a thread as the copy engine.

The device is not a mock: workers compute on these bytes, so the system runs on any machine (ADR 4).
One memfd, *models* (or one for each tenant, ``arenas.py``), begins with the fences; only the memory
daemon can map it for writing. The other, *work*, has the training slices; all workers may write it.

A reader that sees a fence also sees the data: one thread copies the data and then stores the fence.
x86 keeps stores in order, and the C library fences its streaming stores.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from ...base.failpoints import reach
from ...ipc.control_page import sealed_memfd
from ...ipc.messages.base import ByteRange
from ...ipc.messages.daemon import DaemonSettings, GroupCopy, TransmitEnded, TransmitModel
from ...programs.interface.layout import aligned
from ..memory import DeviceMemory, OnEnd, Transmission
from ..order_checks import FENCE_MASK, check_range
from ..worker_device import now_ms
from .arenas import Bytes, FilePerTenant, Models, OneFile
from .page_protection import UNIT_BYTES, unmap

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 8 << 20  # a cancel is noticed after each chunk; larger chunks are not faster
THROTTLED_CHUNK_BYTES: Final = 1 << 20


class SimulatedLink:
    """One direction of a simulated link: after each piece, wait until it would have arrived."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._busy_until_s = 0.0
        self.chunk_bytes = THROTTLED_CHUNK_BYTES if bytes_per_s > 0 else CHUNK_BYTES

    def begin(self) -> None:
        """Begin a transfer; the link does not save up bandwidth while it is idle."""
        self._busy_until_s = max(self._busy_until_s, time.monotonic())

    def pieces(self, size_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield offset and size of the pieces in which a transfer is made."""
        for done in range(0, size_bytes, self.chunk_bytes):
            yield done, min(self.chunk_bytes, size_bytes - done)

    def pace(self, size_bytes: int, cancelled: threading.Event | None = None) -> None:
        """Block until the link would have carried the piece just copied, or until a cancel."""
        if self._bytes_per_s <= 0:
            return
        # The schedule is absolute: if one wait takes too long, the next one is shorter.
        self._busy_until_s += size_bytes / self._bytes_per_s
        delay_s = self._busy_until_s - time.monotonic()
        if delay_s <= 0:
            return
        if cancelled is None:
            time.sleep(delay_s)
        else:
            cancelled.wait(delay_s)


class CpuDeviceMemory(DeviceMemory):
    """See ``DeviceMemory``."""

    def __init__(self, settings: DaemonSettings, *, store: int, **descriptors: Any) -> None:
        """Allocate the memory and start the copy thread.

        Raises:
            OSError: not enough memory.
            RemoteProtocolError: the sizes contradict each other.
        """
        super().__init__(settings, store=store, **descriptors)
        self._store_descriptor = store
        kind = FilePerTenant if settings.limits.separates_tenants else OneFile
        self._models: Models = kind(self.arena_bytes, settings.limits.fence_count)
        self._work_descriptor = sealed_memfd("pipeswitch-work", self.arena_bytes)
        self._work_map = mmap.mmap(self._work_descriptor, self.arena_bytes)
        self._store_map = mmap.mmap(store, self.store_bytes)
        self._work: Bytes = np.frombuffer(self._work_map, dtype=np.uint8)
        self._store: Bytes = np.frombuffer(self._store_map, dtype=np.uint8)
        self._to_device = SimulatedLink(settings.limits.link_bytes_per_s)
        self._to_host = SimulatedLink(settings.limits.link_bytes_per_s)  # the link is full duplex
        self._copier.start()

    def export_descriptors(self) -> list[int]:
        """Return [models, work], or [work] with separate tenants; this object owns them."""
        return [*self._models.descriptors, self._work_descriptor]

    def store_view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        check_range("store view", offset_bytes, size_bytes, self.store_bytes)
        if size_bytes:
            os.posix_fallocate(self._store_descriptor, offset_bytes, size_bytes)
        return memoryview(self._store_map)[offset_bytes : offset_bytes + size_bytes]

    def open_tenant(self, tenant: str, descriptor: int) -> None:
        self._models.open_tenant(tenant, descriptor)

    def transmit(self, order: TransmitModel, on_end: OnEnd) -> None:
        """Implement ``DeviceMemory.transmit``.

        Raises:
            RemoteProtocolError: the order's tenant has no file.
        """
        self._models.take(order)
        super().transmit(order, on_end)

    def _tidy(self) -> None:
        self._models.tidy()

    def read_slice(self, offset_bytes: int, ranges: Sequence[ByteRange], into: memoryview) -> None:
        target: Bytes = np.frombuffer(into, dtype=np.uint8)
        position = 0
        self._to_host.begin()
        for piece in ranges:
            start = offset_bytes + piece.offset_bytes
            for done, size in self._to_host.pieces(piece.size_bytes):
                source = self._work[start + done : start + done + size]
                np.copyto(target[position : position + size], source)
                position += size
                self._to_host.pace(size)

    def save_slice(self, offset_bytes: int, size_bytes: int, image: int) -> None:
        self._to_host.begin()
        for done, size in self._to_host.pieces(size_bytes):
            _copy_bytes(self._work_descriptor, offset_bytes + done, image, done, size)
            self._to_host.pace(size)

    def load_slice(
        self, offset_bytes: int, size_bytes: int, image: int, is_cancelled: Callable[[], bool]
    ) -> None:
        self._to_device.begin()
        for done, size in self._to_device.pieces(size_bytes):
            if is_cancelled():
                return
            _copy_bytes(image, done, self._work_descriptor, offset_bytes + done, size)
            self._to_device.pace(size)

    def scrub(self, offset_bytes: int, size_bytes: int) -> None:
        """Clear a range of *work*; whole pages are returned to the system."""
        end = offset_bytes + size_bytes
        first_page = -(-offset_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        last_page = end // mmap.PAGESIZE * mmap.PAGESIZE
        if first_page >= last_page:
            self._work[offset_bytes:end] = 0
            return
        self._work[offset_bytes:first_page] = 0
        self._work[last_page:end] = 0
        try:
            # On shared memory this is fallocate(PUNCH_HOLE), so every mapping reads zeros.
            self._work_map.madvise(mmap.MADV_REMOVE, first_page, last_page - first_page)
        except OSError as error:
            log.warning("scrub=zero-fill cause=%s", error)
            self._work[first_page:last_page] = 0

    def close(self) -> None:
        super().close()
        self._models.close()
        del self._work, self._store
        for mapping in (self._work_map, self._store_map):
            unmap(mapping)
        os.close(self._work_descriptor)

    def _perform(self, job: Transmission) -> TransmitEnded:
        order = job.order
        started_at_ms = now_ms()
        ends_at_ms: list[float] = []
        copied_bytes = 0
        self._to_device.begin()
        try:
            reach("daemon.transmit.begin")
            copied = [0] * len(order.groups)
            self._clear_end(order)
            for index, group in enumerate(order.groups):
                if self._must_wait(job, index):
                    self._wait_computed(job, index)
                    self._to_device.begin()
                bring = self._bring_rows if group.row_bytes else self._bring
                copied_bytes += bring(order, index, copied, job.cancelled)
                if job.cancelled.is_set():
                    break  # perhaps in the middle of this group, so do not set its fence
                reach("daemon.transmit.group")
                ends_at_ms.append(now_ms())  # before a woken worker takes this core
                self._models.signal_fence(order.tenant, group.fence, order.op_id & FENCE_MASK)
                self._ring_all()
        except Exception:
            log.exception("transmission=%d failed", order.op_id)
        reach("daemon.transmit.end")
        return job.ended(started_at_ms, ends_at_ms, copied_bytes)

    def _clear_end(self, order: TransmitModel) -> None:
        """Zero the rest of the page after the model's last byte, which workers open, too."""
        end = max([one.arena_offset_bytes + one.size_bytes for one in order.groups], default=0)
        if not order.waits:
            region_end = order.arena_offset_bytes + order.region_bytes
            self._models.clear(order.tenant, end, min(aligned(end, mmap.PAGESIZE), region_end))

    def _bring_rows(
        self, order: TransmitModel, index: int, copied: list[int], cancelled: threading.Event
    ) -> int:
        """Copy rows of a table, and its ends in units that are shared with other groups."""
        group = order.groups[index]
        start, end = group.arena_offset_bytes, group.arena_offset_bytes + group.size_bytes
        first, last = aligned(start, UNIT_BYTES) - start, group.size_bytes - end % UNIT_BYTES
        ends = *group.within(0, first), *group.within(last, group.size_bytes)
        total = 0
        for source, at, size in (*ends, *group.pieces()):
            self._models.write(order.tenant, start + at, self._store[source : source + size])
            total += size
        self._to_device.pace(total, cancelled)
        return total

    def _bring(
        self, order: TransmitModel, index: int, copied: list[int], cancelled: threading.Event
    ) -> int:
        """Copy the rest of a group, and fill its last unit; return the number of bytes copied.

        A worker opens whole units of 2 MiB, which may have another model's old bytes. So before the
        group's fence is set

        1. parts of later groups in this group's last unit are copied,
        2. or, in a streamed model, whose groups share no unit, the rest of the unit is zeroed.

        ``copied``: bytes of each group that are copied already; updated here.
        """
        group = order.groups[index]
        total = self._copy(order.tenant, group, copied, index, group.size_bytes, cancelled)
        end = group.arena_offset_bytes + group.size_bytes
        unit_end = aligned(end, UNIT_BYTES)
        if not group.size_bytes or (order.waits and group.parts == ()):
            return 0  # a streamed model's group is resident, and so is its last unit
        if order.waits:
            if not cancelled.is_set():
                self._models.clear(order.tenant, end, unit_end)  # 2.
            return total
        for later in range(index + 1, len(order.groups)):
            following = order.groups[later]
            if following.arena_offset_bytes >= unit_end or cancelled.is_set():
                break
            if following.arena_offset_bytes < end:
                continue  # a table, whose part ``_bring_rows`` has copied
            upto = min(following.size_bytes, unit_end - following.arena_offset_bytes)
            total += self._copy(order.tenant, following, copied, later, upto, cancelled)  # 1.
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
        """Copy a group's bytes up to ``upto`` or a cancel; return the number of bytes copied."""
        target, total = group.arena_offset_bytes, 0
        for source, at, part_bytes in group.within(copied[index], upto):
            for done, size in self._to_device.pieces(part_bytes):
                if cancelled.is_set():
                    return total
                piece = self._store[source + done : source + done + size]
                self._models.write(tenant, target + at + done, piece)
                total += size
                self._to_device.pace(size, cancelled)
        copied[index] = upto
        return total


def _copy_bytes(source: int, start: int, target: int, target_start: int, size_bytes: int) -> None:
    """Copy bytes between two memfds in the kernel, without mapping a page: mapping 1 GiB takes
    longer than copying it.
    Raises OSError: the machine has no memory for the target's pages."""
    while size_bytes:
        count = os.copy_file_range(source, target, size_bytes, start, target_start)
        if not count:
            raise OSError(errno.EIO, "the slice or its image is too short")
        start, target_start, size_bytes = start + count, target_start + count, size_bytes - count
