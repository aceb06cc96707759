"""A worker's side of the cuda device: a mapping of the daemon's memory, and tensors over it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Final

from ...base.errors import RemoteProtocolError, TaskFailed
from ...ipc.control_page import ring
from ...ipc.messages.base import OpId
from ...ipc.messages.worker import Shapes, WorkerSettings
from ...programs.interface.layout import TensorSpec
from ..order_checks import FENCE_BYTES, FENCE_MASK
from ..worker_device import Pacer, WorkerDevice
from .bindings import DEVICE_ASSERT, INDEX, Cuda, CudaError
from .ladder import CudaOptions
from .stream_gate import RunAhead, StreamGate

if TYPE_CHECKING:
    import torch

    from ...programs.interface.packing import Layout
    from ...programs.running.executor import BoundProgram, PackedKernels
    from .copies import CudaCopies
    from .graphs import DeviceProgram
    from .torch import CudaTorch

log = logging.getLogger(__name__)

ENDING_S: Final = 5.0  # limit for queued work to end; it hangs on a fence that is never set
LOOK_S: Final = 0.001
ROOM_BYTES: Final = 512 << 20  # stays free beside work that is not urgent
SHORT_BYTES: Final = 2 << 30  # below this, idle workers empty caches, which may fill the device


class CudaWorkerDevice(WorkerDevice):
    """See ``WorkerDevice``. The main thread creates it after the fork.

    All workers are one trust domain: unlike on the cpu device, every worker can write the arena. A
    model that writes to its weights is refused at registration, but not stopped at runtime.
    """

    def __init__(
        self,
        cuda: Cuda,
        side: CudaTorch,
        settings: WorkerSettings,
        options: CudaOptions,
        *,
        fences_descriptor: int,
        control_page: int,
        doorbells: Sequence[int],
    ) -> None:
        """Map the daemon's allocation and the host's fences. The caller keeps the descriptors.

        Raises:
            CudaError: this process cannot open the allocation.
        """
        self._cuda, self._side = cuda, side
        self._options, self._arena_bytes = options, settings.limits.arena_bytes
        doorbell, self._slot = doorbells[settings.slot], settings.slot
        super().__init__(
            fences_descriptor,
            settings.limits.fence_count,
            control_page=control_page,
            doorbell=doorbell,
            doorbells=doorbells,
        )
        self.device = side.device
        cuda.set_device(INDEX)
        self._base = cuda.open_handle(settings.handle)
        self._pinned_pools: list[int] = []
        self._running: BoundProgram | None = None
        self._events = RunEvents(cuda)

    @cached_property
    def _arena(self) -> torch.UntypedStorage:
        return self._side.storage(self._base, self._arena_bytes)

    # -- tensors -------------------------------------------------------------------------------

    def _tensor(self, spec: TensorSpec, region_offset_bytes: int) -> torch.Tensor:
        return self._side.tensor(self._arena, spec, region_offset_bytes)

    def _slice(self, spec: TensorSpec) -> torch.Tensor:
        self._slice_offset_bytes = spec.offset_bytes
        return self._side.tensor(self._arena, spec, 0)

    def show_slice(self, offset_bytes: int) -> None:
        """See ``WorkerDevice``. The addresses in the arena are fixed."""
        if offset_bytes != self._slice_offset_bytes:
            raise RemoteProtocolError(f"a slice cannot move to {offset_bytes} on this device")

    def take_slice(self, size_bytes: int) -> None:
        """Make programs allocate behind the arena; call it once, before other threads start."""
        self._side.take_slice(self._base + self._arena_bytes, size_bytes)
        self.can_yield = False  # another task would overwrite the paused task's activations

    # -- programs ------------------------------------------------------------------------------

    @cached_property
    def _program_maker(self) -> Callable[[BoundProgram], DeviceProgram]:
        from .graphs import DeviceProgram, GraphBudget

        budget = GraphBudget(self._options.graph_bytes)
        recorder = self._side.recorder() if self._options.use_graphs else None
        return lambda bound: DeviceProgram(bound, self.device, recorder, budget)

    def program(self, bound: BoundProgram) -> DeviceProgram:
        """Return the program for this device, which copies inputs in and may use CUDA graphs."""
        return self._program_maker(bound)

    def kernels(self, layout: Layout) -> PackedKernels:
        from ..torch_kernels import TorchKernels

        return TorchKernels()

    def can_improve(self, program: BoundProgram) -> bool:
        return bool(getattr(program, "is_capture_wanted", False))

    def improve(self, program: BoundProgram, *more: Shapes) -> tuple[Shapes, ...]:
        from .graphs import DeviceProgram

        with self._side.computing(in_slice=False):
            return program.improve(*more) if isinstance(program, DeviceProgram) else ()

    def trim(self, needed_bytes: int = 0) -> bool:
        if self._cuda.memory_info()[0] < SHORT_BYTES + needed_bytes:
            self._side.empty_cache()
        return self._cuda.memory_info()[0] >= ROOM_BYTES + needed_bytes

    def drop(self, program: BoundProgram) -> None:
        """Free the graphs of a program whose weights have moved, or that is no longer used."""
        from .graphs import DeviceProgram

        if isinstance(program, DeviceProgram):
            program.close()

    def computing(self, program: BoundProgram | None) -> AbstractContextManager[None]:
        self._running = program
        self._events.begin()
        in_slice = bool(getattr(program, "may_use_slice", False))
        return self._side.computing(in_slice=in_slice)

    def leave_slice(self, program: BoundProgram) -> bool:
        """Move a program to ordinary memory, because the slice is too small; return False if it
        uses that already. Blocks until its enqueued work has run."""
        from .graphs import DeviceProgram

        if not isinstance(program, DeviceProgram) or not program.may_use_slice:
            return False
        self.quiesce()
        program.may_use_slice = False
        log.warning("slice=left cause=out of memory: the program uses private memory")
        return True

    def pin(self, pointer: int, size_bytes: int) -> None:
        try:
            self._cuda.register(pointer, size_bytes)
        except CudaError as error:
            if not self._cuda.still_works():
                raise
            log.warning("pool=pageable cause=%s: copies are staged", error)
        else:
            self._pinned_pools.append(pointer)

    # -- waiting -------------------------------------------------------------------------------

    def wait_group(self, fence: int, op_id: OpId) -> float:
        """Implement ``Signals.wait_group``. The device waits only between replays of graphs.

        After a device-side wait, loading a kernel or allocating memory may block this thread in the
        driver until the group arrives, or forever if it does not.
        """
        value = op_id & FENCE_MASK
        is_replay = getattr(self._running, "is_replaying", False)
        if self._options.waits == "cpu" or not is_replay or self._fences[fence] == value:
            return super().wait_group(fence, op_id)  # the host's fence is enough
        self._events.wait(self._side.stream, self._base + fence * FENCE_BYTES, value)
        return 0.0

    def report_computed(self, op_id: OpId, count: int) -> None:
        """Implement ``Signals.report_computed``. If the device waits for groups, this thread
        runs ahead, and the report is sent after an event."""
        if self._options.waits == "cpu" or not getattr(self._running, "is_replaying", False):
            super().report_computed(op_id, count)
            return

        def report() -> None:
            self.control_page.write_computed(op_id, count)
            ring(self._bells[-1])

        self._events.mark(self._side.stream, report)
        self._events.report(leave=1)  # the device computes one group while the next is enqueued

    def quiesce(self) -> None:
        """Implement ``WorkerDevice.quiesce``.

        Raises:
            CudaError: an enqueued operation failed.
        """
        self._events.report(leave=0)  # the last groups are copied only after these reports
        self._cuda.synchronize(self._side.stream)
        self.waited_ms = self._events.waited_ms()

    def synchronize(self) -> None:
        """Block until this process's work on *all* its streams has run. Any thread may call this.

        Only training needs it, because a script may use streams of its own.
        """
        self._cuda.set_device(INDEX)
        self._cuda.synchronize_device()

    def host_copies(self) -> CudaCopies:
        from .copies import CudaCopies

        return CudaCopies(INDEX)

    def pacer(self) -> Pacer:
        current_stream = self._side.current_stream
        if self._options.holds == "drain":
            return RunAhead(self._cuda, current_stream)
        return StreamGate(self._cuda, self.control_page, self._slot, current_stream)

    def is_lost(self, error: BaseException) -> bool:
        if isinstance(error, CudaError) and error.is_sticky:
            return True
        try:
            return not has_ended(self._cuda, self._side.stream)
        except CudaError as problem:
            return problem.is_sticky

    def fault(self) -> TaskFailed | None:
        """Return a kernel's failed assertion as the model's error, because a retry fails too.

        Return None for other errors, which the device may have caused: the task is tried again.
        """
        try:
            has_ended(self._cuda, self._side.stream)
        except CudaError as problem:
            if problem.data["code"] == DEVICE_ASSERT:
                text = "an assertion failed on the device: mostly an index out of its range"
                return TaskFailed(text, type="DeviceAssert", text=str(problem))
        return None

    def close(self) -> None:
        """Close the mapping; no tensor over it may be used afterwards."""
        self.__dict__.pop("_arena", None)
        self.__dict__.pop("_program_maker", None)
        for pointer in self._pinned_pools:
            self._cuda.unregister(pointer)
        self._fences.release()
        self._fences_map.close()
        self.control_page.close()
        self._cuda.close_handle(self._base)


def has_ended(cuda: Cuda, stream: int) -> bool:
    """Return True if a stream's work ends within ``ENDING_S``; blocks at most that long.

    Raises:
        CudaError: an enqueued operation failed.
    """
    ends_at_s = time.monotonic() + ENDING_S
    event = cuda.event()
    try:
        cuda.record(event, stream)
        while not cuda.is_done(event):
            if time.monotonic() > ends_at_s:
                return False
            time.sleep(LOOK_S)
        return True
    finally:
        with contextlib.suppress(CudaError):  # the context is broken
            cuda.destroy_event(event)


class RunEvents:
    """Events of a run in a stream: around its waits for groups, and behind computed groups."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._timed: list[tuple[int, int]] = []  # around the waits of a run; kept for other runs
        self._waits = 0  # the number of waits of the present run
        self._marks: deque[tuple[int, Callable[[], None]]] = deque()  # oldest first
        self._spare: list[int] = []

    def begin(self) -> None:
        """Start a run; drop the reports of one that failed."""
        self._waits = 0
        while self._marks:
            self._spare.append(self._marks.popleft()[0])

    def wait(self, stream: int, address: int, value: int) -> None:
        """Make the stream wait for a word, and measure for how long."""
        if self._waits == len(self._timed):
            self._timed.append((self._cuda.event(is_timed=True), self._cuda.event(is_timed=True)))
        begin, end = self._timed[self._waits]
        self._waits += 1
        self._cuda.record(begin, stream)
        self._cuda.wait_value(stream, address, value)
        self._cuda.record(end, stream)

    def waited_ms(self) -> float:
        """Return the sum of the run's waits, which must have ended."""
        return sum(self._cuda.elapsed_ms(*pair) for pair in self._timed[: self._waits])

    def mark(self, stream: int, report: Callable[[], None]) -> None:
        """Record an event, after which ``RunEvents.report`` calls ``report``."""
        event = self._spare.pop() if self._spare else self._cuda.event()
        self._cuda.record(event, stream)
        self._marks.append((event, report))

    def report(self, leave: int) -> None:
        """Wait for all but the newest ``leave`` events, in order, and call their reports."""
        while len(self._marks) > leave:
            event, report = self._marks[0]
            self._cuda.wait(event)
            self._spare.append(self._marks.popleft()[0])
            report()
