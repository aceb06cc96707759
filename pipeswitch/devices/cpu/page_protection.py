"""Windows that open and close shared memory to a worker's kernels.

All of the memory stays mapped, with its page faults taken: mapping a model anew for each switch
costs 70 ms a GiB. Two mechanisms close it, for two sizes (ADR 19):

- ``Guarded`` changes the access of pages, 25 us a MiB: for the slabs of a request.
- ``ProtectedMapping`` moves page tables, 2 MiB in one step, 0.2 us a MiB: for a model's weights.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
import secrets
import threading
from typing import Any, Final

import numpy as np

from ...programs.interface.layout import REGION_ALIGN_BYTES, aligned
from ..order_checks import check_range

log = logging.getLogger(__name__)

UNIT_BYTES: Final = REGION_ALIGN_BYTES  # what one page table holds, so it moves in one step
LOWEST, HIGHEST = (
    1 << 44,
    1 << 46,
)  # addresses that neither programs nor the kernel's own choice use
PLACEMENT_TRIES: Final = 16
PROT_NONE: Final = 0
MAP_FIXED_NOREPLACE: Final = 0x10_0000
MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP = 1, 2, 4  # the last one of a memfd: Linux 5.13
MADV_POPULATE_READ: Final = 22  # Linux 5.14; Python 3.11's mmap does not name it
_FAILED: Final = ctypes.c_void_p(-1).value


class Guarded:
    """A writable mapping of which nothing can be touched but the pages that were opened."""

    def __init__(self, address: int, size_bytes: int) -> None:
        """Close all of it; the mapping stays the caller's. ``address`` begins a page."""
        self._address = address
        self._size_bytes = size_bytes
        self._open: list[tuple[int, int]] = []
        _kernel("mprotect", address, size_bytes, PROT_NONE)

    def open(self, offset_bytes: int, size_bytes: int, *, writable: bool) -> None:
        """Open the pages of a range.

        Raises:
            RemoteProtocolError: outside of the mapping.
        """
        check_range("window", offset_bytes, size_bytes, self._size_bytes)
        if size_bytes:
            start, end = whole_pages(offset_bytes, size_bytes)
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            _kernel("mprotect", self._address + start, end - start, access)
            self._open.append((start, end))

    def close(self) -> None:
        """Close what is open, and what lies between: in one call, which passes over the closed."""
        if self._open:
            start = min(start for start, _ in self._open)
            end = max(end for _, end in self._open)
            _kernel("mprotect", self._address + start, end - start, PROT_NONE)
            self._open.clear()


class ProtectedMapping:
    """A read-only mapping of a memfd that lies hidden, but for the window: mostly one range, of a
    model that streams several.

    A page is always mapped once: in the window at its place behind ``address``, else at the same
    place of a mapping far from everything, at an address drawn by chance. To open and to close is
    to move page tables between the two. Around the window nothing can be touched, for as far as
    the memfd is long and at least a unit beyond.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Map the memfd, all of it hidden; the descriptor stays the caller's.

        Raises:
            OSError: the kernel cannot move page tables of shared memory (before Linux 5.13).
        """
        self.size_bytes = size_bytes
        self.reserve = mmap.mmap(
            -1,
            size_bytes + 3 * UNIT_BYTES,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            prot=mmap.PROT_READ,
        )
        start = address_of(self.reserve)
        _kernel("mprotect", start, len(self.reserve), PROT_NONE)
        self.address = aligned(start + UNIT_BYTES, UNIT_BYTES)
        self.reserve_offset_bytes = self.address - start
        self._hidden = map_by_chance(descriptor, size_bytes, mmap.PROT_READ)
        self._open: list[tuple[int, int]] = []
        self._lock = threading.Lock()  # between the moves and the thread that populates
        self.open(0, mmap.PAGESIZE)  # an error comes now, not in the first request
        self.close()

    def populate(self, offset_bytes: int, size_bytes: int) -> None:
        """Take the page faults of a hidden range now; one that is partly open takes its own."""
        start, end = whole_pages(offset_bytes, size_bytes)
        with self._lock:
            if any(start < high and low < end for low, high in self._open):
                return
            try:
                _kernel("madvise", self._hidden + start, end - start, MADV_POPULATE_READ)
            except OSError as error:  # an older kernel: the faults come later, nothing is lost
                log.debug("prefault=skipped cause=%s", error)

    def open(self, start: int, end: int) -> None:
        """Open a range of whole pages, none of which is open."""
        with self._lock:
            self._move(self._hidden, self.address, start, end)
            if self._open and self._open[-1][1] == start:
                start, _ = self._open.pop()
            self._open.append((start, end))

    def close(self) -> None:
        """Hide what is open."""
        with self._lock:
            for start, end in self._open:
                self._move(self.address, self._hidden, start, end)
                # What the move leaves would map the pages again when it is touched.
                _kernel("mprotect", self.address + start, end - start, PROT_NONE)
            self._open.clear()

    def unmap(self) -> None:
        """Let the hidden part go; tensors that still live keep ``reserve``."""
        _kernel("munmap", self._hidden, self.size_bytes)

    @staticmethod
    def _move(source: int, target: int, start: int, end: int) -> None:
        """Move page tables over the old mapping, without a gap that another thread could map."""
        flags, size = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, end - start
        _kernel("mremap", source + start, size, size, flags, target + start)


def whole_pages(offset_bytes: int, size_bytes: int) -> tuple[int, int]:
    """Start and end of the pages that a range touches."""
    start = offset_bytes // mmap.PAGESIZE * mmap.PAGESIZE
    return start, aligned(offset_bytes + size_bytes, mmap.PAGESIZE)


def address_of(mapping: mmap.mmap) -> int:
    """Return a mapping's address in this process."""
    return int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)


def unmap(mapping: mmap.mmap) -> None:
    """Let it go, now or with the last of its views."""
    try:
        mapping.close()
    except BufferError:  # a view is still held
        log.debug("unmap=later bytes=%d", len(mapping))


def map_by_chance(descriptor: int, size_bytes: int, access: int) -> int:
    """Map a memfd at an address that no kernel could guess, one of 25 million; for good."""
    for _ in range(PLACEMENT_TRIES):
        address = LOWEST + secrets.randbelow((HIGHEST - LOWEST) // UNIT_BYTES) * UNIT_BYTES
        flags = mmap.MAP_SHARED | MAP_FIXED_NOREPLACE
        try:
            _kernel("mmap", address, size_bytes, access, flags, descriptor, 0)
        except OSError as error:
            if error.errno != errno.EEXIST:
                raise
        else:
            return address
    raise OSError(errno.ENOMEM, f"no address range for {size_bytes} bytes of shared memory")


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = libc.mremap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.mremap.argtypes = [pointer, size, size, number, pointer]
    libc.munmap.argtypes = [pointer, size]
    libc.mprotect.argtypes = libc.madvise.argtypes = [pointer, size, number]
    return libc


def _kernel(name: str, *arguments: int) -> None:
    """Make one system call on memory; other threads continue meanwhile."""
    if getattr(_libc(), name)(*arguments) in (-1, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
