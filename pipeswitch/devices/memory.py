"""The memory daemon's side of a device: its arena, and the thread that copies models into it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from ..base.errors import RemoteProtocolError
from ..ipc.control_page import Board, ring
from ..ipc.messages.base import ByteRange, OpId
from ..ipc.messages.daemon import DaemonSettings, TransmitEnded, TransmitModel
from .order_checks import FENCE_BYTES, check_range
from .worker_device import now_ms

OnEnd = Callable[[TransmitEnded], None]


class Transmission:
    """One order to copy a model, from ``transmit`` until its end is reported."""

    __slots__ = ("cancelled", "on_end", "order")

    def __init__(self, order: TransmitModel, on_end: OnEnd) -> None:
        self.order = order
        self.on_end = on_end
        self.cancelled = threading.Event()

    def ended(
        self, started_at_ms: float, group_ends_at_ms: Sequence[float], copied_bytes: int
    ) -> TransmitEnded:
        """Return the report of this transmission; it is complete if every group has an end time."""
        order = self.order
        return TransmitEnded(
            model=order.model,
            op_id=order.op_id,
            is_complete=len(group_ends_at_ms) == len(order.groups),
            group_count=len(group_ends_at_ms),
            copied_bytes=copied_bytes,
            started_at_ms=started_at_ms,
            ended_at_ms=now_ms(),
            group_ends_at_ms=tuple(group_ends_at_ms),
        )


class DeviceMemory:
    """The memory daemon's arena on one device. Sizes and offsets are bytes.

    The daemon checks orders before it passes them (``order_checks.py``). Transmissions run one
    after the other on the copy thread, which ``close`` ends.
    """

    def __init__(
        self,
        settings: DaemonSettings,
        *,
        store: int,
        doorbells: Sequence[int],
        control_page: int = -1,
        doorbell: int = -1,
    ) -> None:
        """Set up. The caller keeps the descriptors, which must outlive this object.

        Args:
            doorbells: the workers' doorbells.
            control_page, doorbell: the page where workers write how far a streamed model has
                computed, and the doorbell that then wakes the copy thread; -1: no model can stream.

        Raises:
            RemoteProtocolError: the sizes contradict each other.
        """
        limits = settings.limits
        self.arena_bytes, self.store_bytes = limits.arena_bytes, limits.store_bytes
        if limits.fence_count * FENCE_BYTES > self.arena_bytes:
            text = f"{limits.fence_count} words do not fit in {self.arena_bytes} bytes"
            raise RemoteProtocolError(text)
        check_range("store", 0, self.store_bytes, os.fstat(store).st_size)
        self._bells = tuple(doorbells)
        self._doorbell = doorbell
        self._control_page = Board(control_page) if control_page >= 0 else None
        self._orders: SimpleQueue[Transmission | None] = SimpleQueue()
        self._live: dict[OpId, Transmission] = {}
        self._copier = threading.Thread(target=self._copy_all, name="copy-to-device", daemon=True)

    # -- what workers map ----------------------------------------------------------------------

    def export_descriptors(self) -> list[int]:
        """Return the descriptors for ``DeviceKind.open_view`` in order; this object owns them."""
        raise NotImplementedError

    def export_handle(self) -> bytes:
        """Return the IPC handle that workers need besides the descriptors; empty if none."""
        return b""

    def open_tenant(self, tenant: str, descriptor: int) -> None:
        """Use a file for a tenant's models; the caller keeps the descriptor.

        Raises:
            RemoteProtocolError: tenants share the arena, or the file has another size.
        """
        raise RemoteProtocolError("tenants share this arena")

    # -- host store and slices -----------------------------------------------------------------

    def store_view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Allocate pages of the host store and return a writable view, to load a model (blocks).

        Raises:
            RemoteProtocolError: the range is outside of the store.
            OSError: the machine has no memory for these pages.
        """
        raise NotImplementedError

    def pin(self, place: memoryview) -> Callable[[], None] | None:
        """Try to pin the place, which speeds up ``read_slice`` (blocks). Return a function that
        unpins it, to be called before unmapping, or None."""
        return None

    def read_slice(self, offset_bytes: int, ranges: Sequence[ByteRange], into: memoryview) -> None:
        """Copy ranges of a training slice to the host, concatenated into ``into`` (blocks)."""
        raise NotImplementedError

    def save_slice(self, offset_bytes: int, size_bytes: int, image: int) -> None:
        """Copy a slice to the file of a descriptor (blocks).

        Raises:
            OSError: the machine has no memory for the file's pages.
        """
        raise NotImplementedError

    def load_slice(
        self, offset_bytes: int, size_bytes: int, image: int, is_cancelled: Callable[[], bool]
    ) -> None:
        """Copy the file of a descriptor to a slice, or only a part after a cancel (blocks).

        Raises:
            OSError: the machine has no memory for the slice's pages.
        """
        raise NotImplementedError

    def scrub(self, offset_bytes: int, size_bytes: int) -> None:
        """Make a released range of a training slice read as zeros (blocks)."""
        raise NotImplementedError

    # -- host to device ------------------------------------------------------------------------

    def transmit(self, order: TransmitModel, on_end: OnEnd) -> None:
        """Copy groups in order; after each, set its fence to the operation id and ring doorbells.

        Returns at once; ``on_end`` is called exactly once, on the copy thread.
        """
        self._live[order.op_id] = job = Transmission(order, on_end)
        self._orders.put(job)

    def cancel(self, op_id: OpId) -> None:
        """Stop a transmission within a chunk; ``on_end`` is still called. Ignore unknown ids."""
        job = self._live.get(op_id)
        if job is not None:
            job.cancelled.set()
            if job.order.waits:
                ring(self._doorbell)

    def _must_wait(self, job: Transmission, index: int) -> bool:
        """Return True if an earlier group, which has not computed yet, occupies the place."""
        order, control_page = job.order, self._control_page
        if not order.waits or job.cancelled.is_set():
            return False
        if control_page is None:
            raise RemoteProtocolError("nothing can stream without a board")
        return not control_page.has_computed(order.op_id, order.waits[index])

    def _wait_computed(self, job: Transmission, index: int) -> None:
        """Block the copy thread until the group's place is free, or the job is cancelled.

        No wake-up is lost: the control page is written before the doorbell, and read after it.
        """
        while self._must_wait(job, index):
            os.eventfd_read(self._doorbell)

    def _perform(self, job: Transmission) -> TransmitEnded:
        """Copy the groups; return an incomplete report after an error or a cancel."""
        raise NotImplementedError

    def _tidy(self) -> None:
        """Clean up after a transmission's report; called on the copy thread."""

    def _copy_all(self) -> None:
        while (job := self._orders.get()) is not None:
            ended = self._perform(job)
            del self._live[job.order.op_id]
            job.on_end(ended)
            self._tidy()

    def _ring_all(self) -> None:
        for doorbell in self._bells:
            ring(doorbell)

    def close(self) -> None:
        """Cancel all transmissions, end the copy thread, and free the memory (blocks)."""
        for job in list(self._live.values()):
            self.cancel(job.order.op_id)
        self._orders.put(None)
        self._copier.join()
        if self._control_page is not None:
            self._control_page.close()
