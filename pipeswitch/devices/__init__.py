"""Two protocols and, per device, their two implementations; nothing else knows the device.

``DeviceMemory`` is the memory daemon's side, ``PoolView`` a worker's side (DESIGN 7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ..messages import ByteRange, Epoch, TransmitEnded, TransmitModel

if TYPE_CHECKING:
    import torch

    from ..programs.layout import TensorSpec


class DeviceMemory(Protocol):
    """The arena the memory daemon owns on one device. Sizes and offsets are bytes.

    All calls return at once; what takes time is reported through ``on_end`` callbacks, which run
    on the implementation's own thread.
    """

    arena_bytes: int
    store_bytes: int

    def export_descriptors(self) -> list[int]:
        """What a worker needs to map the same memory, in the order PoolView expects."""
        ...

    def store_view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """A writable view of the host store, to load a model into."""
        ...

    def transmit(self, order: TransmitModel, on_end: Callable[[TransmitEnded], None]) -> None:
        """Copy groups in order; after each, its arrival word becomes the epoch, then bells ring."""
        ...

    def cancel(self, epoch: Epoch) -> None:
        """Stop that transmission after the group in flight; its on_end still comes."""
        ...

    def read_slice(self, offset_bytes: int, ranges: Sequence[ByteRange], into: memoryview) -> None:
        """Device to host: concatenate pieces of a training slice into ``into`` (blocks)."""
        ...

    def scrub(self, offset_bytes: int, size_bytes: int) -> None:
        """Make a released range of a training slice read as zeros (blocks)."""
        ...

    def close(self) -> None: ...


class PoolView(Protocol):
    """The same memory, mapped by one worker. Used by its main thread only."""

    def tensor(self, spec: TensorSpec, region_offset_bytes: int) -> torch.Tensor:
        """A read-only tensor over a model's region; bounds are checked."""
        ...

    def slice_bytes(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """A writable uint8 tensor over a training slice."""
        ...

    def wait_group(self, word: int, epoch: Epoch) -> float:
        """Return when the word carries ``epoch``; milliseconds this thread was blocked."""
        ...

    def wait_turn(self, turn: int) -> float:
        """Return when the board's turn word is ``turn``; milliseconds blocked."""
        ...

    def raise_turn(self, turn: int, slot: int) -> None:
        """Hand the device to the worker in ``slot`` (called by the one who parks)."""
        ...

    def quiesce(self) -> None:
        """Return when nothing queued touches the memory any more."""
        ...

    def close(self) -> None: ...
