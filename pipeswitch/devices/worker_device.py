"""A worker's side of a device: mappings of the daemon's memory, and waits for fences and turns."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from ..base.errors import PipeSwitchError, RemoteProtocolError
from ..ipc.control_page import Board, ring
from ..ipc.gate import Where
from ..ipc.messages.base import OpId
from ..ipc.messages.worker import Shapes
from ..programs.interface.layout import TensorSpec
from .order_checks import FENCE_BYTES, FENCE_MASK

if TYPE_CHECKING:
    import torch

    from ..programs.interface.packing import Layout
    from ..programs.running.executor import BoundProgram, PackedKernels


def now_ms() -> float:
    """Return the system-wide monotonic clock in milliseconds."""
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


class Pacer:
    """Limit on the work that a script's thread enqueues ahead of its device.

    Attributes:
        holds: ``hold`` can stop the device before the queue is empty.
        current: the limit of this process's script; None: its device computes in the thread.
        waits, waited_ms: how often, and for how long in all, the limit made the thread wait.
    """

    current: ClassVar[Pacer | None] = None
    holds = False
    waits = 0
    waited_ms = 0.0

    def look(self) -> None:
        """Limit the queue; each hook of a layer calls this."""

    def mark(self) -> None:
        """Make the device stop here if it is held; called before and after an optimizer's step."""

    def enter(self) -> None:
        """Record that the script may enqueue work again."""

    def leave(self, where: Where) -> None:
        """Mark the end of the queue; called when the script leaves the device."""

    def hold(self) -> bool:
        """Stop the device in the queue; any thread may call this and ``release``."""
        return True

    def has_queue(self) -> bool:
        """Return True if work is held, for which the script may wait."""
        return False

    def release(self, *, for_good: bool = False) -> None:
        """Let held work run; with ``for_good``, no later ``hold`` stops it."""


class Signals:
    """A worker's fences, control page and doorbells, by which its main thread waits and wakes."""

    waited_ms = 0.0  # after ``quiesce``: for how long the device itself waited for groups

    def __init__(
        self,
        fences_descriptor: int,
        fence_count: int,
        *,
        control_page: int,
        doorbell: int,
        doorbells: Sequence[int],
    ) -> None:
        """Map fences and control page. The caller keeps all descriptors.

        Args:
            fences_descriptor: a file that begins with the fences.
            doorbell: this worker's own eventfd; must outlive this object.
            doorbells: all workers' doorbells by slot, then the daemon's; must outlive this object.
        """
        self.control_page = Board(control_page)
        self._doorbell, self._bells = doorbell, tuple(doorbells)
        self._fences_bytes = fence_count * FENCE_BYTES
        self._fences_map = mmap.mmap(fences_descriptor, self._fences_bytes, prot=mmap.PROT_READ)
        self._fences = memoryview(self._fences_map).cast("I")

    def wait_group(self, fence: int, op_id: OpId) -> float:
        """Block until the fence has ``op_id``, unless the device itself can wait for that.

        Return the milliseconds for which this thread was blocked.
        """
        fences, value = self._fences, op_id & FENCE_MASK
        return self._wait(lambda: fences[fence] == value)

    def wait_turn(self, turn: int) -> float:
        """Block until the control page's turn word is ``turn``; return the milliseconds blocked."""
        control_page = self.control_page
        return self._wait(lambda: control_page.turn == turn)

    def wait_first_turn(self, turn: int, slot: int) -> bool:
        """Block like ``wait_turn``; return False if the task of this turn was taken back."""
        control_page, is_taken_back = self.control_page, False
        if control_page.turn == turn:
            return True

        def is_decided() -> bool:
            nonlocal is_taken_back
            if control_page.turn == turn:
                return True
            is_taken_back = control_page.is_taken_back(slot, turn)
            return is_taken_back

        self._wait(is_decided)
        return not is_taken_back

    def _wait(self, is_true: Callable[[], bool]) -> float:
        """Block until the condition is true; return the milliseconds blocked. No wake-up is lost:
        the word is written before the doorbell, and read after it. A worker whose word is never
        written is killed by the controller."""
        if is_true():
            return 0.0
        began_at_ms = now_ms()
        while not is_true():
            os.eventfd_read(self._doorbell)
        return now_ms() - began_at_ms

    def report_computed(self, op_id: OpId, count: int) -> None:
        """Report that ``count`` groups have computed, so later groups may overwrite them."""
        self.quiesce()
        self.control_page.write_computed(op_id, count)
        ring(self._bells[-1])

    def raise_turn(self, turn: int, slot: int) -> None:
        """Give the device to the worker in ``slot``; called by the worker that parks."""
        self.control_page.write_turn(turn)
        ring(self._bells[slot])

    def quiesce(self) -> None:
        """Block until all work that this worker's main thread enqueued has run."""


class SliceAccess(Signals):
    """A worker's access to the training slice of its job."""

    def slice_bytes(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """Return a writable uint8 tensor over a training slice.

        Raises:
            RemoteProtocolError, LocalProtocolError: the range is out of bounds.
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

    def hide_slice(self) -> None:
        """Make the slice inaccessible to this process; its range gets another owner."""

    def show_slice(self, offset_bytes: int) -> None:
        """Make the slice accessible again at its former addresses; it is at this offset now.

        Raises:
            RemoteProtocolError: this device cannot map another range at these addresses.
        """
        raise NotImplementedError

    def host_copies(self) -> HostCopies:
        """Return the copier for a script's own tensors, between this device and the host."""
        raise NotImplementedError


class WorkerDevice(SliceAccess):
    """One worker's mapping of a device. Only its main thread uses it, except ``synchronize``.

    The default methods do nothing, which is right for a device that computes in this thread.
    Devices override the methods that they need.
    """

    can_yield = True  # a task may pause between groups; other tasks do not touch its activations
    device: str  # torch's name of the tensors' device: ``cpu`` or ``cuda:0``

    # -- open memory: on cpu a kernel can access only memory that is open to its task (ADR 19) ---

    def prefault(self, offset_bytes: int, size_bytes: int) -> None:
        """Take a region's page faults now, in a standby worker, not in its first inference."""

    def enter(self, offset_bytes: int, size_bytes: int, last_fence: int, op_id: OpId) -> None:
        """Select a region for a task, and close all other regions to its kernels.

        ``show`` then opens parts of the region, or all of it if ``last_fence`` is set. If region
        and operation id are the previous task's, the open parts stay open.
        """

    def show(self, arrived_bytes: int) -> None:
        """Open the region's first ``arrived_bytes``, so that kernels may read them."""

    def show_landing(self, offset_bytes: int, size_bytes: int) -> None:
        """Open a group of a streamed model, or of a run by rows, wherever it is in the region.

        The daemon has filled all its units of 2 MiB.
        """

    def table_of(
        self, spec: TensorSpec, region_offset_bytes: int, rows: torch.Tensor
    ) -> torch.Tensor | None:
        """Return a private copy of a table that has only these rows, which have arrived; None: the
        table may be read where it is, although other rows have not arrived."""
        return None

    def leave(self) -> None:
        """Close the region: no kernel can access it until the next ``enter``."""

    def pin(self, pointer: int, size_bytes: int) -> None:
        """Prepare the request pool: pin it on cuda, close it to kernels on cpu."""

    def map_inputs(self, slabs: tuple[tuple[int, int], ...], *, writable: bool) -> None:
        """Open only these ranges of the pool to kernels; each is (start, end) in bytes."""

    def unmap_inputs(self) -> None:
        """Close all slabs to kernels."""

    # -- tensors -------------------------------------------------------------------------------

    def tensor(self, spec: TensorSpec, region_offset_bytes: int) -> torch.Tensor:
        """Return a read-only tensor over a model's region.

        Raises:
            RemoteProtocolError, LocalProtocolError: the tensor is out of bounds, overlaps the
                fences, or has a wrong size.
        """
        if region_offset_bytes < self._fences_bytes:
            raise RemoteProtocolError(f"a region at {region_offset_bytes} overlaps the fences")
        return self._tensor(spec, region_offset_bytes)

    def _tensor(self, spec: TensorSpec, region_offset_bytes: int) -> torch.Tensor:
        raise NotImplementedError

    # -- programs ------------------------------------------------------------------------------

    def program(self, bound: BoundProgram) -> BoundProgram:
        """Return a program that runs ``bound`` on this device, with inputs in host memory."""
        return bound

    def kernels(self, layout: Layout) -> PackedKernels | None:
        """Return the kernels that read weights in this layout, or None."""
        return None

    def can_improve(self, program: BoundProgram) -> bool:
        """Return True if ``improve`` would do something."""
        return False

    def improve(self, program: BoundProgram, *more: Shapes) -> tuple[Shapes, ...]:
        """Make runs at earlier runs' shapes, and at ``more``, faster; return the faster shapes.
        May block, so call it when idle."""
        return ()

    def trim(self, needed_bytes: int = 0) -> bool:
        """Free the memory that this process keeps and does not use, if others may need it.

        Return True if this process may take ``needed_bytes`` more for work that is not urgent.
        """
        return True

    def drop(self, program: BoundProgram) -> None:
        """Drop a program that will not run again."""

    def computing(self, program: BoundProgram | None) -> AbstractContextManager[None]:
        """Return a context for all work that a task enqueues, its copies in and out included."""
        return _NOTHING

    def leave_slice(self, program: BoundProgram) -> bool:
        """Move a program out of the activation slice, which was too small; False if impossible."""
        return False

    # -- the whole process ---------------------------------------------------------------------

    def synchronize(self) -> None:
        """Block until all work of this process has run, on any stream. Any thread may call this."""

    def pacer(self) -> Pacer | None:
        """Return the limit on a script's queue; None if the device computes in its thread."""
        return None

    def is_lost(self, error: BaseException) -> bool:
        """Return True if this process cannot use the device any more and must be replaced."""
        return False

    def fault(self) -> PipeSwitchError | None:
        """Return the error of a task that broke the device if a retry would fail too, else None."""
        return None

    def close(self) -> None:
        """Unmap the memory."""
        raise NotImplementedError
