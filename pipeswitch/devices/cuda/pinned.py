"""Pinned host memory for the copy engines: the store's mapping, and small buffers."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import time
from typing import Final

import numpy as np

from ..cpu.arenas import Bytes
from .bindings import Cuda, CudaError

log = logging.getLogger(__name__)

PIN_BYTES: Final = 64 << 20
"""Size of a piece, which is pinned by one call. It is small enough that no driver refuses it, and
large enough that the calls' time does not matter. No copy crosses a boundary of pieces."""
RETRY_S: Final = 30.0  # memory may be short for a moment; a call that is never permitted is cheap


class PinnedMapping:
    """Mapping of a memfd, pinned piece by piece when a range is used first.

    If the driver refuses to pin (no memory, no support, or no permission in a container), copies go
    through the driver's own staging buffers: slower, but correct. It is tried again after RETRY_S.
    """

    def __init__(self, cuda: Cuda, descriptor: int, size_bytes: int) -> None:
        self._cuda = cuda
        self._descriptor = descriptor
        self._size_bytes = size_bytes
        self._map = mmap.mmap(descriptor, size_bytes)
        self.array: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self.array.ctypes.data)
        self._retry_at_s, self.refusal = 0.0, ""  # the last refusal, if any
        self._pinned: set[int] = set()  # indices of pieces
        self._pinning = threading.Lock()

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return a writable view of a range; the caller has checked the bounds."""
        return memoryview(self._map)[offset_bytes : offset_bytes + size_bytes]

    def pin(self, offset_bytes: int, size_bytes: int) -> None:
        """Allocate the pages of a range and pin its pieces (blocks: about 0.3 s per GiB).

        Another process may pin the same pages too: each process registers its own mapping with its
        own context. Any thread may call this.

        Raises:
            OSError: the machine has no memory for these pages.
            CudaError: the context is broken.
        """
        if not size_bytes:
            return
        os.posix_fallocate(self._descriptor, offset_bytes, size_bytes)
        with self._pinning:
            for piece in self._unpinned(offset_bytes, size_bytes):
                if time.monotonic() >= self._retry_at_s:
                    self._pin_piece(piece)

    def needs_pin(self, offset_bytes: int, size_bytes: int) -> bool:
        """Return True if ``pin`` would pin a part of that range."""
        may_pin = size_bytes and time.monotonic() >= self._retry_at_s
        return bool(may_pin and self._unpinned(offset_bytes, size_bytes))

    def _unpinned(self, offset_bytes: int, size_bytes: int) -> list[int]:
        last = (offset_bytes + size_bytes - 1) // PIN_BYTES
        return [n for n in range(offset_bytes // PIN_BYTES, last + 1) if n not in self._pinned]

    def _pin_piece(self, piece: int) -> None:
        start = piece * PIN_BYTES
        size = min(PIN_BYTES, self._size_bytes - start)
        # Pinning touches every page. Allocate the pages first: OSError if memory is short.
        os.posix_fallocate(self._descriptor, start, size)
        try:
            self._cuda.register(self.address + start, size)
        except CudaError as error:
            if not self._cuda.still_works():
                raise
            self._retry_at_s, self.refusal = time.monotonic() + RETRY_S, str(error)
            log.warning("pinning=refused offset=%d cause=%s: copies are staged", start, error)
            return
        self._pinned.add(piece)

    def close(self) -> None:
        """Unpin all pieces, then unmap the memory."""
        for piece in sorted(self._pinned):
            self._cuda.unregister(self.address + piece * PIN_BYTES)
        self._pinned.clear()
        del self.array
        try:
            self._map.close()
        except BufferError:  # the mapping is closed when its last view is freed
            log.debug("unmap=later bytes=%d", self._size_bytes)


class PinnedBuffer:
    """Pinned memory that the driver allocates, for staging and for the sources of fence copies."""

    def __init__(self, cuda: Cuda, size_bytes: int) -> None:
        self._cuda = cuda
        self.address = cuda.allocate_pinned(size_bytes)
        raw = (ctypes.c_uint8 * size_bytes).from_address(self.address)
        self.array: Bytes = np.ctypeslib.as_array(raw)

    def close(self) -> None:
        """Free the buffer; no reference to ``array`` may remain."""
        del self.array
        self._cuda.free_pinned(self.address)


def next_boundary(offset_bytes: int) -> int:
    """Return the end of the piece that contains ``offset_bytes``."""
    return (offset_bytes // PIN_BYTES + 1) * PIN_BYTES
