"""A worker's side of the cpu device: mappings of the daemon's memfds, and tensors over them."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec.structs import replace

from ...ipc.messages.worker import WorkerSettings
from ...programs.interface.layout import TensorSpec, aligned
from ..order_checks import FENCE_MASK, check_range
from ..worker_device import WorkerDevice
from . import page_protection
from .memory import SimulatedLink

if TYPE_CHECKING:
    import torch

    from ...programs.interface.packing import Layout
    from ...programs.running.executor import PackedKernels

PIECE_BYTES: Final = 256 << 10  # the copying thread checks for other orders after each piece


class CpuWorkerDevice(WorkerDevice):
    """See ``WorkerDevice``. It imports torch when the first tensor is requested."""

    def __init__(
        self,
        settings: WorkerSettings,
        arena: Sequence[int],
        *,
        control_page: int,
        doorbells: Sequence[int],
    ) -> None:
        """Map the arena. The caller keeps the descriptors; doorbells must outlive this object.

        Before ``enter`` and ``slice_bytes`` only the fences are readable. With separate tenants,
        the models' file has pages for this tenant's models only, and each copy adds new pages.

        Args:
            arena: the files of the models and of training slices. With separate tenants, a worker
                without a training script gets only the first.
        """
        models, *work = arena
        doorbell = doorbells[settings.slot]
        super().__init__(
            models,
            settings.limits.fence_count,
            control_page=control_page,
            doorbell=doorbell,
            doorbells=doorbells,
        )
        self._window = page_protection.ProtectedMapping(models, settings.limits.arena_bytes)
        self._entered = (0, 0, 0, 0)  # region's start and end, operation id, last fence
        self._open_end = 0
        self._landed: set[int] = set()  # units that ``show_landing`` has opened
        self._is_one_tenants = settings.limits.separates_tenants
        self._link_bytes_per_s = settings.limits.link_bytes_per_s
        self._populated: dict[int, tuple[int, int]] = {}  # region start -> operation id, end
        self._work_map: mmap.mmap | None = None
        self._work_descriptor = -1
        self._is_hidden = self._is_child = False
        self._slice_at = (0, 0, 0)  # the slice's offset in the mapping, and in the file; its size
        if work:
            self._map_work(work[0])
        self._pool_windows: page_protection.Guarded | None = None
        self._lent: tuple[tuple[tuple[int, int], ...], bool] | None = None

    device = "cpu"

    def _map_work(self, descriptor: int) -> None:
        size_bytes = os.fstat(descriptor).st_size
        self._work_descriptor = os.dup(descriptor)
        self._work_map = mmap.mmap(descriptor, size_bytes)
        self._work_windows = page_protection.Guarded(
            page_protection.address_of(self._work_map), size_bytes
        )
        self.__dict__.pop("_work", None)
        keep = weakref.WeakMethod(self._keep_writes_private)
        os.register_at_fork(after_in_child=lambda: (method := keep()) and method())

    def _keep_writes_private(self) -> None:
        """Keep a forked child's writes out of the slice, whose range may get another owner."""
        if self._is_child:
            return  # a child of the child gets its parent's bytes
        self._is_child = True
        place, at, size = self._slice_at
        windows, is_hidden = self._work_windows, self._is_hidden
        windows.hide()
        if not is_hidden and self._work_map is not None:
            windows.show(place, size, self._work_descriptor, at, mmap.MAP_PRIVATE)

    @cached_property
    def _models(self) -> torch.UntypedStorage:
        from ...programs.running.tensor_views import bytes_over

        window = self._window
        return bytes_over(window.reserve, window.reserve_offset_bytes, window.size_bytes)

    @cached_property
    def _work(self) -> torch.UntypedStorage:
        from ...programs.running.tensor_views import bytes_over

        assert self._work_map is not None, "this worker does not run a training script"
        return bytes_over(self._work_map)

    def prefault(self, offset_bytes: int, size_bytes: int) -> None:
        self._window.populate(offset_bytes, size_bytes)

    def enter(self, offset_bytes: int, size_bytes: int, last_fence: int, op_id: int) -> None:
        """Select a region; close the previous one if an argument differs.

        Raises:
            RemoteProtocolError: the region is outside of the arena.
        """
        check_range("region", offset_bytes, size_bytes, self._window.size_bytes)
        entered = (offset_bytes, offset_bytes + size_bytes, op_id, last_fence)
        if self._entered != entered:
            self._window.close()
            self._entered = entered
            self._landed.clear()
            self._open_end, _ = page_protection.whole_pages(offset_bytes, 0)

    def show(self, arrived_bytes: int) -> None:
        """Open the region's first ``arrived_bytes`` in whole units, which the daemon has filled."""
        start, region_end, op_id, last_fence = self._entered
        arrived_end = start + arrived_bytes
        if arrived_end <= self._open_end:
            return
        if self._fences[last_fence] == op_id & FENCE_MASK:
            arrived_end = region_end  # all groups have arrived, so open them in one step
        end = min(
            aligned(arrived_end, page_protection.UNIT_BYTES), aligned(region_end, mmap.PAGESIZE)
        )
        if self._is_one_tenants and self._populated.get(start, (0, 0)) < (op_id, end):
            self._window.populate(self._open_end, end)
            self._populated[start] = (op_id, end)
        self._window.open(self._open_end, end)
        self._open_end = end

    def show_landing(self, offset_bytes: int, size_bytes: int) -> None:
        """Open the units of a group, unless an earlier group has opened them."""
        start, region_end, *_ = self._entered
        check_range("landing", offset_bytes, size_bytes, region_end - start)
        first, size = start + offset_bytes, page_protection.UNIT_BYTES
        spans: list[tuple[int, int]] = []  # neighbours are opened in one step
        for unit in range(first // size * size if size_bytes else first, first + size_bytes, size):
            if unit not in self._landed:
                begin = spans.pop()[0] if spans and spans[-1][1] == unit else unit
                spans.append((begin, min(unit + size, aligned(region_end, mmap.PAGESIZE))))
        for begin, end in spans:
            if self._is_one_tenants:
                self._window.populate(begin, end - begin)
            self._window.open(begin, end)
            self._landed.update(range(begin, end, size))

    def table_of(
        self, spec: TensorSpec, region_offset_bytes: int, rows: torch.Tensor
    ) -> torch.Tensor:
        """See ``WorkerDevice``. Only pages with rows get memory. Units of the table stay closed to
        kernels, because they still have other models' bytes, too."""
        import torch

        from ...programs.running.tensor_views import bytes_over, tensor_over

        memory = bytes_over(mmap.mmap(-1, spec.size_bytes))  # shared, so RLIMIT_DATA does not count
        table = tensor_over(memory, replace(spec, offset_bytes=0), 0)
        hidden = tensor_over(bytes_over(self._window.hidden_bytes()), spec, region_offset_bytes)
        table.view(torch.uint8)[rows] = hidden.view(torch.uint8)[rows]
        return table

    def leave(self) -> None:
        self._window.close()
        self._landed.clear()
        self._entered, self._open_end = (0, 0, 0, 0), 0

    def _tensor(self, spec: TensorSpec, region_offset_bytes: int) -> torch.Tensor:
        """Return a read-only tensor; reading it before ``show`` kills the process."""
        from ...programs.running.tensor_views import tensor_over

        return tensor_over(self._models, spec, region_offset_bytes)

    def _slice(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor, and open its pages. Its storage is the file of all training slices."""
        from ...programs.running.tensor_views import tensor_over

        place, at, mapped_bytes = self._slice_at
        offset, size = spec.offset_bytes, spec.size_bytes
        if place != at:  # a swap has moved the slice
            if offset == at and size <= mapped_bytes:
                return tensor_over(self._work, replace(spec, offset_bytes=place), 0)
            self._work_windows.hide()
        tensor = tensor_over(self._work, spec, 0)
        # Swaps may have replaced pages at these addresses, so map them again.
        self._work_windows.show(offset, size, self._work_descriptor, offset)
        # What an earlier, larger slice at this place has opened stays open after a swap, too.
        self._slice_at = offset, offset, max(size, mapped_bytes if offset == place == at else 0)
        return tensor

    def hide_slice(self) -> None:
        """See ``WorkerDevice``; an access ends the process, which resumes from its last commit."""
        self._is_hidden = True  # first: another thread may fork now
        self._work_windows.hide()

    def show_slice(self, offset_bytes: int) -> None:
        place, _, size = self._slice_at
        self._slice_at = place, offset_bytes, size
        self._work_windows.show(place, size, self._work_descriptor, offset_bytes)
        self._is_hidden = False

    def kernels(self, layout: Layout) -> PackedKernels:
        from ..torch_kernels import TorchKernels
        from .packed import KERNELS

        return KERNELS if layout == KERNELS.layout else TorchKernels()

    def host_copies(self) -> CpuCopies:
        return CpuCopies(self._link_bytes_per_s)

    def pin(self, pointer: int, size_bytes: int) -> None:
        self._pool_windows = page_protection.Guarded(pointer, size_bytes)

    def map_inputs(self, slabs: tuple[tuple[int, int], ...], *, writable: bool) -> None:
        """Open these slabs and close the previous ones; do nothing if they are open already.

        Raises:
            RemoteProtocolError: a slab is outside of the pool.
        """
        mapping = (slabs, writable)
        if self._pool_windows is not None and self._lent != mapping:
            self.unmap_inputs()
            for start, end in slabs:
                self._pool_windows.open(start, end - start, writable=writable)
            self._lent = mapping

    def unmap_inputs(self) -> None:
        if self._pool_windows is not None:
            self._pool_windows.close()
            self._lent = None

    def close(self) -> None:
        """Unmap the arena; a mapping stays until the last tensor over it is freed."""
        self.control_page.close()
        self.__dict__.pop("_work", None)
        self._fences.release()
        self.__dict__.pop("_models", None)
        self._window.unmap()
        for mapping in (self._fences_map, self._window.reserve):
            page_protection.unmap(mapping)
        if self._work_map is not None:
            page_protection.unmap(self._work_map)
            os.close(self._work_descriptor)
            self._work_map, self._slice_at = None, (0, 0, 0)


class CpuCopies:
    """See ``HostCopies``. Both sides are host memory, and copies take the simulated link's time."""

    def __init__(self, link_bytes_per_s: float) -> None:
        self._links = {to_host: SimulatedLink(link_bytes_per_s) for to_host in (True, False)}

    def mark(self) -> Any:
        """Return None: this device computes in the calling thread, so nothing is pending."""

    def target(self, size_bytes: int, *, on_host: bool, mark: Any) -> torch.Tensor:
        import torch

        return torch.empty(size_bytes, dtype=torch.uint8)

    def pieces(
        self, source: torch.Tensor, target: torch.Tensor, mark: Any, *, to_host: bool
    ) -> Iterator[int]:
        """Implement ``HostCopies.pieces`` with numpy, because torch would use more cores."""
        copied, into = source.numpy(), target.numpy()
        link = self._links[to_host]
        link.begin()
        for start in range(0, copied.size, PIECE_BYTES):
            piece = copied[start : start + PIECE_BYTES]
            np.copyto(into[start : start + PIECE_BYTES], piece)
            link.pace(piece.size)
            yield piece.size
