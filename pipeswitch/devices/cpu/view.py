"""The cpu device, a worker's side: the daemon's memfds mapped, and tensors over them."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Final

from ...errors import RemoteProtocolError
from ...ipc.board import Board
from ...ipc.messages import MoveTask
from ...programs.layout import TensorSpec, aligned
from ..orders import WORD_BYTES, WORD_MASK, check_range
from ..waiting import Waiter
from .windows import (
    UNIT_BYTES,
    Guarded,
    Window,
    address_of,
    move_pages,
    replace_by_nothing,
    unmap,
    whole_pages,
)

if TYPE_CHECKING:
    import torch

    from ...programs.executor import BoundProgram


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
        from ...programs.views import bytes_over

        window = self._window
        return bytes_over(window.reserve, window.reserve_offset_bytes, window.size_bytes)

    @cached_property
    def _work(self) -> torch.UntypedStorage:
        from ...programs.views import bytes_over

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
        from ...programs.views import tensor_over

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
        from ...programs.views import tensor_over

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
            unmap(self._work_map)
        for descriptor in self._lent_by:
            os.close(descriptor)

    def _unmap_models(self) -> None:
        if self._words_map.closed:
            return
        self._words.release()
        self.__dict__.pop("_models", None)
        self._window.unmap()
        for mapping in (self._words_map, self._window.reserve):
            unmap(mapping)
