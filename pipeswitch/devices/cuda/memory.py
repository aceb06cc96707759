"""The memory daemon's side of the cuda device: one ``cudaMalloc``, a pinned store, copy streams.

The daemon runs no kernel and never imports ``torch.cuda``. A group's fence on the device follows
its bytes (``fences.py``). When the copy thread sees that a group's event has run, it also sets the
fence in a host page and rings the doorbells. Workers that wait on the CPU read the host page; a GPU
that waits reads the device's memory.

At most ``WINDOW_BYTES`` are enqueued at a time. So a cancelled transmission ends within one or two
milliseconds, and the link still never waits for the copy thread.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import numpy as np

from ...ipc.control_page import sealed_memfd
from ...ipc.messages.base import ByteRange
from ...ipc.messages.daemon import DaemonSettings, GroupCopy, TransmitEnded
from ..cpu.arenas import Bytes
from ..memory import DeviceMemory, Transmission
from ..order_checks import FENCE_BYTES, FENCE_MASK, check_range
from ..worker_device import now_ms
from .bindings import INDEX, Cuda, CudaError
from .fences import RING_FENCES, FenceWriter
from .ladder import Words
from .pinned import PinnedBuffer, PinnedMapping, next_boundary

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 16 << 20  # size of one copy call; a cancel takes effect between two calls
WINDOW_BYTES: Final = 64 << 20  # maximum of enqueued bytes: 1.2 ms at 55 GB/s
BOUNCE_BYTES: Final = 8 << 20
BOUNCE_COUNT: Final = 2  # the copy engine fills one buffer while the thread empties the other


class _Mark(NamedTuple):
    """Event after a chunk; ``fence`` is the fence of the group that ends there, or -1."""

    event: int
    size_bytes: int
    fence: int


class CudaDeviceMemory(DeviceMemory):
    """See ``DeviceMemory``.

    The control thread calls ``transmit`` and ``cancel``, the store thread ``store_view``, and the
    to-host thread ``read_slice`` and ``scrub``. This object has two threads: one copies, the other
    pins parts of the store that another device's daemon or an earlier daemon has written.
    """

    def __init__(
        self,
        cuda: Cuda,
        settings: DaemonSettings,
        *,
        store: int,
        extra_bytes: int = 0,
        fence_writer: Words = "write",
        on_lost: Callable[[], None] | None = None,
        **descriptors: Any,
    ) -> None:
        """Create the context, allocate the memory and start the threads.

        Args:
            extra_bytes: size of the activation slice behind the arena; no copy writes to it.
            on_lost: called on any thread when the context is broken.

        Raises:
            CudaError: the device does not exist, or has not enough memory.
            RemoteProtocolError: the sizes contradict each other.
        """
        super().__init__(settings, store=store, **descriptors)
        self._cuda = cuda
        self._on_lost = on_lost
        cuda.set_device(INDEX)
        self._base = cuda.malloc(self.arena_bytes + extra_bytes)
        self._to_device, self._to_host = cuda.stream(), cuda.stream()
        cuda.fill(self._base, 0, self.arena_bytes, self._to_device)
        cuda.synchronize(self._to_device)
        self._store = PinnedMapping(cuda, store, self.store_bytes)
        self._fence_writer = FenceWriter(cuda, fence_writer, self._to_device)
        self._bounces = [PinnedBuffer(cuda, BOUNCE_BYTES) for _ in range(BOUNCE_COUNT)]
        self._bounce_events = [cuda.event() for _ in range(BOUNCE_COUNT)]
        fences_bytes = settings.limits.fence_count * FENCE_BYTES
        self._words_descriptor = sealed_memfd(
            "pipeswitch-fences", fences_bytes, reserve_bytes=fences_bytes
        )
        self._fences_map = mmap.mmap(self._words_descriptor, fences_bytes)
        self._host_fences = memoryview(self._fences_map).cast("I")
        self._pinned: dict[int, int] = {}  # address and size of each place of ``pin``
        self._idle_events: list[int] = []
        self._to_pin: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._pinner = threading.Thread(target=self._pin_store, name="pin", daemon=True)
        self._pinner.start()
        self._copier.start()

    # -- what workers map ----------------------------------------------------------------------

    def export_descriptors(self) -> list[int]:
        """Return [host copy of the fences]; this object owns it."""
        return [self._words_descriptor]

    def export_handle(self) -> bytes:
        """Return the IPC handle of arena and slice, which are one allocation.

        Raises:
            CudaError: this driver or container cannot share memory between processes.
        """
        with self._watched():
            return self._cuda.export_handle(self._base)

    # -- host store ----------------------------------------------------------------------------

    def store_view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Implement ``DeviceMemory.store_view``; the view is pinned."""
        check_range("store view", offset_bytes, size_bytes, self.store_bytes)
        with self._watched():
            self._store.pin(offset_bytes, size_bytes)
        return self._store.view(offset_bytes, size_bytes)

    # -- host to device ------------------------------------------------------------------------

    def _perform(self, job: Transmission) -> TransmitEnded:
        order = job.order
        started_at_ms = now_ms()
        flight = _Flight(self, order.op_id)
        try:
            with self._watched():
                try:
                    self._enqueue(job, flight)
                    flight.land_all()
                except Exception:  # a copy may have been enqueued without its event
                    self._fence_writer.drain()  # even after an error no byte is written after this
                    flight.land_all(have_run=True)
                    raise
        except Exception:
            log.exception("transmission=%d failed", order.op_id)
        ended = job.ended(started_at_ms, flight.ends_at_ms, flight.enqueued_bytes)
        for group in order.groups:  # unpinned parts were copied slowly this time
            for part in group.within(0, group.size_bytes):
                if self._store.needs_pin(part.store_offset_bytes, part.size_bytes):
                    self._to_pin.put((part.store_offset_bytes, part.size_bytes))
        return ended

    def _pin_store(self) -> None:
        """Pin queued ranges of the store, to make later copies faster; runs on its own thread."""
        while (place := self._to_pin.get()) is not None:
            try:
                with self._watched():
                    self._store.pin(*place)
            except OSError as error:  # no memory for the range's missing pages
                log.warning("pinning=put-off offset=%d cause=%s", place[0], error)
            except Exception:  # this range's copies are staged; the next range is tried
                log.exception("pinning=failed offset=%d", place[0])

    def _enqueue(self, job: Transmission, flight: _Flight) -> None:
        for index, group in enumerate(job.order.groups):
            if self._must_wait(job, index):
                flight.land_all()  # the worker must get these groups before it computes more
                self._wait_computed(job, index)
            pieces = [*chunks(group)]
            for number, (source, offset, size) in enumerate(pieces, 1):
                flight.make_room(size)
                if job.cancelled.is_set():
                    return  # perhaps in the middle of this group, so do not set its fence
                if size:
                    self._cuda.copy_to_device(
                        self._base + group.arena_offset_bytes + offset,
                        self._store.address + source,
                        size,
                        self._to_device,
                    )
                if group.row_bytes and size:
                    flight.enqueued_bytes += size  # the event of the fence suffices for all rows
                    continue
                flight.enqueued(size, group.fence if number == len(pieces) else -1)

    # -- device to host ------------------------------------------------------------------------

    def pin(self, place: memoryview) -> Callable[[], None] | None:
        """Implement ``DeviceMemory.pin``: the device then copies there without staging."""
        start, size = int(np.frombuffer(place, dtype=np.uint8).ctypes.data), len(place)
        with self._watched():
            try:
                self._cuda.register(start, size)
            except CudaError as error:
                if not self._cuda.still_works():
                    raise
                log.warning("commits=staged cause=%s", error)
                return None
        self._pinned[start] = size
        return functools.partial(self._unpin, start)

    def _unpin(self, start: int) -> None:
        del self._pinned[start]
        with self._watched():
            self._cuda.unregister(start)

    def read_slice(self, offset_bytes: int, ranges: Sequence[ByteRange], into: memoryview) -> None:
        """Read ranges (blocks); the worker has waited for its kernels (``synchronize``).

        If ``into`` is not pinned, two pinned buffers are used in turn.
        """
        target = np.frombuffer(into, dtype=np.uint8)
        address, position = int(target.ctypes.data), 0
        filling: deque[tuple[int, Bytes]] = deque()  # buffer, place
        with self._watched():
            if self._is_pinned(address, len(into)):
                for one in ranges:
                    source = self._base + offset_bytes + one.offset_bytes
                    self._cuda.copy_to_host(address, source, one.size_bytes, self._to_host)
                    address += one.size_bytes
                self._cuda.record(self._bounce_events[0], self._to_host)
                self._cuda.wait(self._bounce_events[0])
                return
            for number, (start, size) in enumerate(_pieces(offset_bytes, ranges)):
                buffer = number % BOUNCE_COUNT
                if len(filling) == BOUNCE_COUNT:
                    self._empty(*filling.popleft())
                into_buffer = self._bounces[buffer].address
                self._cuda.copy_to_host(into_buffer, self._base + start, size, self._to_host)
                self._cuda.record(self._bounce_events[buffer], self._to_host)
                filling.append((buffer, target[position : position + size]))
                position += size
            while filling:
                self._empty(*filling.popleft())

    def _empty(self, buffer: int, place: Bytes) -> None:
        self._cuda.wait(self._bounce_events[buffer])
        np.copyto(place, self._bounces[buffer].array[: len(place)])

    def save_slice(self, offset_bytes: int, size_bytes: int, image: int) -> None:
        os.posix_fallocate(image, 0, size_bytes)  # a lack of memory is an error, not a SIGBUS
        with mmap.mmap(image, size_bytes) as mapping, memoryview(mapping) as view:
            whole = (ByteRange(offset_bytes=0, size_bytes=size_bytes),)
            self.read_slice(offset_bytes, whole, view)

    def load_slice(
        self, offset_bytes: int, size_bytes: int, image: int, is_cancelled: Callable[[], bool]
    ) -> None:
        """See ``DeviceMemory``. Two pinned buffers are used in turn, as in ``read_slice``."""
        with self._watched():
            for number, done in enumerate(range(0, size_bytes, BOUNCE_BYTES)):
                if is_cancelled():
                    break
                size, buffer = min(BOUNCE_BYTES, size_bytes - done), number % BOUNCE_COUNT
                if number >= BOUNCE_COUNT:
                    self._cuda.wait(self._bounce_events[buffer])
                os.preadv(image, [self._bounces[buffer].array[:size].data], done)
                place, source = self._base + offset_bytes + done, self._bounces[buffer].address
                self._cuda.copy_to_device(place, source, size, self._to_host)
                self._cuda.record(self._bounce_events[buffer], self._to_host)
            self._cuda.synchronize(self._to_host)

    def _is_pinned(self, address: int, size_bytes: int) -> bool:
        end, pinned = address + size_bytes, [*self._pinned.items()]  # other threads unpin
        return any(one <= address and end <= one + size for one, size in pinned)

    def scrub(self, offset_bytes: int, size_bytes: int) -> None:
        with self._watched():
            self._cuda.fill(self._base + offset_bytes, 0, size_bytes, self._to_host)
            self._cuda.synchronize(self._to_host)

    # -- end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the memory. Call this only after all workers have exited or closed their mapping."""
        super().close()
        self._to_pin.put(None)
        self._pinner.join()
        self._host_fences.release()
        self._fences_map.close()
        os.close(self._words_descriptor)
        cuda = self._cuda
        cuda.set_device(INDEX)
        for event in (*self._idle_events, *self._bounce_events):
            cuda.destroy_event(event)
        self._fence_writer.close()
        for stream in (self._to_device, self._to_host):
            cuda.synchronize(stream)
            cuda.destroy_stream(stream)
        for buffer in self._bounces:
            buffer.close()
        self._store.close()
        cuda.free(self._base)

    # -- shared with a flight ------------------------------------------------------------------

    def _landed(self, fence: int, value: int) -> None:
        self._host_fences[fence] = value
        self._ring_all()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Enclose CUDA calls of any thread; call ``on_lost`` if an error broke the context."""
        try:
            self._cuda.set_device(INDEX)
            yield
        except CudaError as error:
            if error.is_sticky and self._on_lost is not None:
                log.critical("device=lost cause=%s", error)
                self._on_lost()
            raise


class _Flight:
    """Chunks of one transmission that are enqueued and have not arrived, oldest first."""

    def __init__(self, memory: CudaDeviceMemory, op_id: int) -> None:
        self._memory = memory
        self._value = op_id & FENCE_MASK
        self._marks: deque[_Mark] = deque()
        self._bytes = 0
        self.enqueued_bytes = 0
        self.ends_at_ms: list[float] = []

    def make_room(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` more fit into the window; an empty window fits any chunk."""
        memory = self._memory
        while self._marks and self._bytes + size_bytes > WINDOW_BYTES:
            self._land_oldest()
        while self._marks and memory._cuda.is_done(self._marks[0].event):
            self._land_oldest()

    def enqueued(self, size_bytes: int, fence: int) -> None:
        """Record an event behind an enqueued chunk, and set the fence of the group that ends here
        (``fence`` is -1 if none does)."""
        memory = self._memory
        if len(self._marks) >= RING_FENCES // 2:  # with many tiny groups the ring could overflow
            self._land_oldest()
        if not memory._idle_events:
            memory._idle_events.append(memory._cuda.event())
        event = memory._idle_events[-1]  # it stays there if a call fails
        if fence < 0:
            memory._cuda.record(event, memory._to_device)
        else:
            memory._fence_writer.write(event, memory._base + fence * FENCE_BYTES, self._value)
        self._marks.append(_Mark(memory._idle_events.pop(), size_bytes, fence))
        self._bytes += size_bytes
        self.enqueued_bytes += size_bytes

    def land_all(self, *, have_run: bool = False) -> None:
        """Wait until all chunks have arrived and all fences are written, if not ``have_run``."""
        while self._marks:
            self._land_oldest(has_run=have_run)
        if not have_run:
            self._memory._fence_writer.finish()

    def _land_oldest(self, *, has_run: bool = False) -> None:
        memory, mark = self._memory, self._marks[0]
        if not has_run:
            memory._cuda.wait(mark.event)
        self._marks.popleft()
        memory._idle_events.append(mark.event)
        self._bytes -= mark.size_bytes
        if mark.fence >= 0:
            self.ends_at_ms.append(now_ms())  # before a woken worker takes this core
            memory._landed(mark.fence, self._value)


def chunks(group: GroupCopy) -> Iterator[tuple[int, int, int]]:
    """Yield (offset in the store, offset in the group, bytes) of each copy; bytes are 0 after rows,
    and if nothing is copied. No copy crosses a pinned piece's end."""
    source = at = size = 0
    for source, at, left in group.pieces():
        while left:
            size = min(CHUNK_BYTES, left, next_boundary(source) - source)
            yield source, at, size
            source, at, left = source + size, at + size, left - size
    if group.row_bytes or not size:
        yield 0, group.size_bytes, 0


def _pieces(offset_bytes: int, ranges: Sequence[ByteRange]) -> Iterator[tuple[int, int]]:
    """Yield (offset in the arena, bytes) of each copy into a pinned buffer."""
    for piece in ranges:
        for done in range(0, piece.size_bytes, BOUNCE_BYTES):
            size = min(BOUNCE_BYTES, piece.size_bytes - done)
            yield offset_bytes + piece.offset_bytes + done, size
