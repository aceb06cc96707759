"""A worker's side of a device: the daemon's memory mapped, and how its thread waits."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..base.errors import PipeSwitchError, RemoteProtocolError
from ..ipc.control_page import Board, ring
from ..ipc.messages.base import OpId
from ..programs.interface.layout import TensorSpec
from .order_checks import FENCE_BYTES, FENCE_MASK

if TYPE_CHECKING:
    import torch

    from ..programs.running.executor import BoundProgram, PackedKernels


def now_ms() -> float:
    """Milliseconds of the system-wide monotonic clock."""
    return time.monotonic() * 1000.0


_NOTHING: Final = nullcontext()


class HostCopies(Protocol):
    """Copies of flat uint8 tensors between a process's own memory on a device and on the host.

    The computing thread calls ``mark``: the copy starts after the work that it has enqueued. Two
    other threads, one for each direction, allocate memory (``target``) and copy; ``pieces`` yields
    the size of each piece that has arrived.
    """

    def mark(self) -> Any: ...

    def target(self, size_bytes: int, *, on_host: bool, mark: Any) -> torch.Tensor: ...

    def pieces(
        self, source: torch.Tensor, target: torch.Tensor, mark: Any, *, to_host: bool
    ) -> Iterator[int]: ...


class Signals:
    """A worker's words and doorbells: how its main thread waits, and wakes others."""

    def __init__(
        self,
        fences_descriptor: int,
        fence_count: int,
        *,
        control_page: int,
        doorbell: int,
        doorbells: Sequence[int],
    ) -> None:
        """Set up; the descriptors stay the caller's; doorbells must outlive this object.

        Args:
            fences_descriptor: the fences lie at its start.
            doorbell: this worker's own eventfd; ``doorbells`` are all of them, by slot, and the
                memory daemon's.
        """
        self.control_page = Board(control_page)
        self._doorbell, self._bells = doorbell, tuple(doorbells)
        self._fences_bytes = fence_count * FENCE_BYTES
        self._fences_map = mmap.mmap(fences_descriptor, self._fences_bytes, prot=mmap.PROT_READ)
        self._fences = memoryview(self._fences_map).cast("I")

    def wait_group(self, fence: int, op_id: OpId) -> float:
        """Return when the word carries ``op_id``, or the device waits for it by itself.

        Milliseconds this thread was blocked.
        """
        fences, value = self._fences, op_id & FENCE_MASK
        return self._wait(lambda: fences[fence] == value)

    def wait_turn(self, turn: int) -> float:
        """Return when the control page's turn word is exactly ``turn``; milliseconds blocked."""
        control_page = self.control_page
        return self._wait(lambda: control_page.turn == turn)

    def _wait(self, is_true: Callable[[], bool]) -> float:
        """Milliseconds blocked. No wake-up is lost: the word is written before the doorbell, and
        read after it. Who waits for what will not come is killed by the controller."""
        if is_true():
            return 0.0
        began_at_ms = now_ms()
        while not is_true():
            os.eventfd_read(self._doorbell)
        return now_ms() - began_at_ms

    def report_computed(self, op_id: OpId, count: int) -> None:
        """Report that ``count`` groups of a copy have computed: others may land in their places."""
        self.quiesce()
        self.control_page.write_computed(op_id, count)
        ring(self._bells[-1])

    def raise_turn(self, turn: int, slot: int) -> None:
        """Hand the device to the worker in ``slot`` (called by the one who parks)."""
        self.control_page.write_turn(turn)
        ring(self._bells[slot])

    def quiesce(self) -> None:
        """Return when everything this worker's main thread enqueued has run."""


class WorkerDevice(Signals):
    """The device's memory, mapped by one worker. Used by its main thread, but for ``synchronize``.

    A device overrides what it has need of: the rest does nothing, as on a device that computes in
    this very thread.
    """

    can_yield = True  # between two groups: what it has computed is its own
    device: str  # where tensors live, in torch's words: ``cpu`` or ``cuda:0``

    # -- reach: on cpu a kernel can touch what its task was shown, and nothing else (ADR 19) -----

    def prefault(self, offset_bytes: int, size_bytes: int) -> None:
        """Take a region's page faults now (standby), not in its first inference."""

    def enter(self, offset_bytes: int, size_bytes: int, last_fence: int, op_id: OpId) -> None:
        """Open this region for a task: no kernel can reach another region any more.

        Of the region itself it can reach what ``show`` says, all when ``last_fence`` has risen. A
        task for the same region and operation id finds it as the last one left it.
        """

    def show(self, arrived_bytes: int) -> None:
        """Show the region's first bytes, which have arrived: kernels may read them."""

    def show_landing(self, offset_bytes: int, size_bytes: int) -> None:
        """Show a part of a landing region that has arrived, like ``show``.

        It begins a unit, and its last unit is filled.
        """

    def leave(self) -> None:
        """Close the regions: no kernel can reach one until the next ``enter``."""

    def pin(self, pointer: int, size_bytes: int) -> None:
        """Prepare the request pool: asynchronous copies on cuda, protected pages on cpu."""

    def map_inputs(self, slabs: tuple[tuple[int, int], ...], *, writable: bool) -> None:
        """Let kernels reach these ranges of the pool, begin and end in bytes, and no others."""

    def unmap_inputs(self) -> None:
        """Close the slabs: no kernel can reach one."""

    # -- tensors -------------------------------------------------------------------------------

    def tensor(self, spec: TensorSpec, region_offset_bytes: int) -> torch.Tensor:
        """Return a read-only tensor over a model's region.

        Raises:
            RemoteProtocolError, LocalProtocolError: out of bounds, over the fences, or a
                wrong size.
        """
        if region_offset_bytes < self._fences_bytes:
            raise RemoteProtocolError(f"a region at {region_offset_bytes} overlaps the fences")
        return self._tensor(spec, region_offset_bytes)

    def _tensor(self, spec: TensorSpec, region_offset_bytes: int) -> torch.Tensor:
        raise NotImplementedError

    def slice_bytes(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """Return a writable uint8 tensor over a training slice.

        Raises:
            RemoteProtocolError, LocalProtocolError: out of bounds.
        """
        spec = TensorSpec(
            name="slice",
            dtype="uint8",
            shape=(size_bytes,),
            offset_bytes=offset_bytes,
            size_bytes=size_bytes,
            file_offset_bytes=0,
        )
        return self._slice(spec)

    def _slice(self, spec: TensorSpec) -> torch.Tensor:
        raise NotImplementedError

    def host_copies(self) -> HostCopies:
        """Return the copier that moves a script's own tensors between this device and the host."""
        raise NotImplementedError

    # -- programs ------------------------------------------------------------------------------

    def program(self, bound: BoundProgram) -> BoundProgram:
        """Return the program as this device runs it; it takes inputs in host memory."""
        return bound

    def kernels(self) -> PackedKernels | None:
        """Return the kernels for packed weights on this device, or None."""
        return None

    def can_improve(self, program: BoundProgram) -> bool:
        """Return True if ``improve`` would do something."""
        return False

    def improve(self, program: BoundProgram) -> None:
        """Make the next run of the last program faster, in an idle moment."""

    def drop(self, program: BoundProgram) -> None:
        """Drop a program that will not run again."""

    def computing(self, program: BoundProgram | None) -> AbstractContextManager[None]:
        """Around everything that a task enqueues, its copies in and out included."""
        return _NOTHING

    def leave_slice(self, program: BoundProgram) -> bool:
        """Return True if a program that ran out of torch memory can run in other memory."""
        return False

    # -- the whole process ---------------------------------------------------------------------

    def synchronize(self) -> None:
        """Return when nothing that this process enqueued anywhere runs any more. Any thread."""

    def pacer(self) -> Callable[[], None] | None:
        """Return a function for a training script's gate points, if it could outrun the device."""
        return None

    def is_lost(self, error: BaseException) -> bool:
        """Return True if this process cannot use the device any more and must be replaced."""
        return False

    def fault(self) -> PipeSwitchError | None:
        """Return, after a loss, the task's own fault, if the next worker would suffer it too."""
        return None

    def close(self) -> None:
        """Unmap."""
        raise NotImplementedError
