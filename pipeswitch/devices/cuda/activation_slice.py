"""The activation slice: memory behind the arena from which torch's allocator takes segments.

The paper's PipeSwitch patches torch to insert its shared block into the allocator's large pool.
Here a public ``torch.cuda.MemPool`` does that, with an allocator of two functions. All workers
share one slice: only the worker that has the turn computes, and a captured graph uses the slice
only while it is replayed. A task's data in the slice is lost when the next task runs. So
module-mode programs (which may cache tensors) and training use ordinary memory.

Torch calls the two functions with its allocator's lock held, and without the interpreter lock. A
Python function could therefore deadlock with a thread that frees a tensor. To avoid that, one
thread makes torch reserve the whole slice at the start; torch then needs no more segments.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 2 << 20  # size of torch's small segments, and granularity of large ones
SMALL_TENSOR_BYTES: Final = 1 << 20  # the largest request that torch serves from a small segment
SMALL_SEGMENTS: Final = 32
TENSORS_PER_SMALL_SEGMENT: Final = 2

_kept: list[Any] = []
"""Callbacks and pools. They live as long as the process, because torch may still call them."""


class Segments:
    """Allocator of segments in the slice: a bump pointer, and a list of free segments. Pure."""

    def __init__(self, base: int, size_bytes: int) -> None:
        self.base = base
        self.size_bytes = size_bytes
        self.calls = 0
        self._next = 0
        self._free: dict[int, int] = {}  # address -> bytes

    def take(self, size_bytes: int) -> int:
        """Return a segment's address; 0 if the slice is full, which torch reports as OOM."""
        self.calls += 1
        size = -(-size_bytes // SEGMENT_BYTES) * SEGMENT_BYTES
        for address, segment_bytes in self._free.items():
            if segment_bytes == size:
                del self._free[address]
                return address
        if self._next + size > self.size_bytes:
            return 0
        address = self.base + self._next
        self._next += size
        return address

    def give_back(self, address: int, size_bytes: int) -> None:
        """Free a segment; ``take`` returns it for the next request of the same size."""
        self.calls += 1
        self._free[address] = -(-size_bytes // SEGMENT_BYTES) * SEGMENT_BYTES

    def holds(self, address: int) -> bool:
        """Return True if an address lies in the slice."""
        return self.base <= address < self.base + self.size_bytes


def make_pool(segments: Segments) -> torch.cuda.MemPool:
    """Return a pool of torch's allocator over the slice.

    ``torch._C._cuda_customAllocator`` is private, but torch makes its own managed-memory pool with
    it. The public class needs a compiled library instead of two functions.
    """
    import torch

    take = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(
        lambda size, device, stream: segments.take(size)
    )
    give_back = ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    )(lambda address, size, device, stream: segments.give_back(address, size))
    take_at, give_back_at = (ctypes.cast(f, ctypes.c_void_p).value for f in (take, give_back))
    assert take_at is not None
    assert give_back_at is not None
    allocator = torch._C._cuda_customAllocator(take_at, give_back_at)
    pool = torch.cuda.MemPool(allocator)
    _kept.extend((take, give_back, allocator, pool))
    return pool


def reserve(pool: torch.cuda.MemPool, segments: Segments, stream: torch.cuda.Stream) -> None:
    """Make torch take the whole slice; call this once, before any other thread frees tensors.

    Torch's free blocks belong to a stream, so ``stream`` must be the one that will compute.

    Raises:
        torch.OutOfMemoryError, RuntimeError: the slice is too small, or torch did not use it.
    """
    import torch

    small = SMALL_SEGMENTS * TENSORS_PER_SMALL_SEGMENT
    rest = segments.size_bytes - SMALL_SEGMENTS * SEGMENT_BYTES
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
        blocks = [
            torch.empty(SMALL_TENSOR_BYTES, dtype=torch.uint8, device="cuda") for _ in range(small)
        ]
        blocks.append(torch.empty(rest, dtype=torch.uint8, device="cuda"))
        is_inside = all(segments.holds(tensor.data_ptr()) for tensor in blocks)
        del blocks
    if not is_inside:
        raise RuntimeError("torch did not take the slice: its tensors lie elsewhere")
    log.info("slice=reserved bytes=%d calls=%d", segments.size_bytes, segments.calls)
