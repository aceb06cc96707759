"""Windows that open and close shared memory to a worker's kernels.

All of the memory stays mapped and populated, because mapping a model again at each switch costs
70 ms per GiB. Two mechanisms open and close it (ADR 19):

- ``Guarded`` changes the access of pages, 25 us per MiB: for the slabs of a request.
- ``ProtectedMapping`` moves page tables, 2 MiB at a time, 0.2 us per MiB: for a model's weights.
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

UNIT_BYTES: Final = REGION_ALIGN_BYTES  # memory that one page table maps; it moves in one step
LOWEST, HIGHEST = 1 << 44, 1 << 46  # addresses that neither programs nor the kernel choose
PLACEMENT_TRIES: Final = 16
PROT_NONE: Final = 0
MAP_FIXED, MAP_NORESERVE, MAP_POPULATE = 0x10, 0x4000, 0x8000
MAP_FIXED_NOREPLACE: Final = 0x10_0000
MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP = 1, 2, 4  # DONTUNMAP of a memfd: Linux 5.13
MADV_POPULATE_READ = 22  # Linux 5.14; mmap does not name it
_FAILED: Final = ctypes.c_void_p(-1).value


class Guarded:
    """Writable mapping in which only opened pages can be accessed."""

    def __init__(self, address: int, size_bytes: int) -> None:
        """Close all pages; the caller keeps the mapping. ``address`` is aligned to a page."""
        self._address = address
        self._size_bytes = size_bytes
        self._open: list[tuple[int, int]] = []
        _kernel("mprotect", address, size_bytes, PROT_NONE)

    def open(self, offset_bytes: int, size_bytes: int, *, writable: bool) -> None:
        """Open the pages of a range.

        Raises:
            RemoteProtocolError: the range is outside of the mapping.
        """
        check_range("window", offset_bytes, size_bytes, self._size_bytes)
        if size_bytes:
            start, end = whole_pages(offset_bytes, size_bytes)
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            _kernel("mprotect", self._address + start, end - start, access)
            self._open.append((start, end))

    def close(self) -> None:
        """Close all open pages, in one call from the first to the last of them."""
        if self._open:
            start = min(start for start, _ in self._open)
            end = max(end for _, end in self._open)
            _kernel("mprotect", self._address + start, end - start, PROT_NONE)
            self._open.clear()

    def hide(self) -> None:
        """Replace the open pages by inaccessible ones that belong to no file."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE
        for start, end in self._open:
            _kernel("mmap", self._address + start, end - start, PROT_NONE, flags, -1, 0)
        self._open.clear()

    def show(
        self,
        offset_bytes: int,
        size_bytes: int,
        descriptor: int,
        at_bytes: int,
        kind: int = mmap.MAP_SHARED | MAP_POPULATE,
    ) -> None:
        """Map and open the pages of a range, with the bytes of a file from ``at_bytes`` on.

        Raises:
            RemoteProtocolError: the range is outside of the mapping.
        """
        check_range("window", offset_bytes, size_bytes, self._size_bytes)
        if not size_bytes:
            return
        start, end = whole_pages(offset_bytes, size_bytes)
        at_bytes -= offset_bytes - start
        access = mmap.PROT_READ | mmap.PROT_WRITE
        flags = kind | MAP_FIXED
        _kernel("mmap", self._address + start, end - start, access, flags, descriptor, at_bytes)
        self._open.append((start, end))


class ProtectedMapping:
    """Hidden read-only mapping of a memfd, with one open range, or several of a streamed model.

    Each page is mapped once. An open page is at its offset from ``address``. A closed page is at
    the same offset of a hidden mapping, whose address is random. Opening and closing move page
    tables between both. All addresses from one unit before ``address`` to at least one unit after
    the memfd's length are reserved, and inaccessible unless they are open.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Map the memfd, all of it hidden; the caller keeps the descriptor.

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
        self._lock = threading.Lock()  # the thread that populates must not run during a move
        self.open(0, mmap.PAGESIZE)  # on an old kernel, raise here, not in the first request
        self.close()

    def hidden_bytes(self) -> ctypes.Array[ctypes.c_char]:
        """Return the hidden mapping, for our own code: never pass it to models."""
        return (ctypes.c_char * self.size_bytes).from_address(self._hidden)

    def populate(self, offset_bytes: int, size_bytes: int) -> None:
        """Take a hidden range's page faults now; do nothing if a part of the range is open."""
        start, end = whole_pages(offset_bytes, size_bytes)
        with self._lock:
            if any(start < high and low < end for low, high in self._open):
                return
            try:
                _kernel("madvise", self._hidden + start, end - start, MADV_POPULATE_READ)
            except OSError as error:  # an older kernel: the faults are taken later
                log.debug("prefault=skipped cause=%s", error)

    def open(self, start: int, end: int) -> None:
        """Open a range of whole pages that are all closed."""
        with self._lock:
            self._move(self._hidden, self.address, start, end)
            if self._open and self._open[-1][1] == start:
                start, _ = self._open.pop()
            self._open.append((start, end))

    def close(self) -> None:
        """Close all open ranges."""
        with self._lock:
            for start, end in self._open:
                self._move(self.address, self._hidden, start, end)
                # The old mapping remains after the move, and an access would map the pages again.
                _kernel("mprotect", self.address + start, end - start, PROT_NONE)
            self._open.clear()

    def unmap(self) -> None:
        """Unmap the hidden mapping; tensors that still live keep ``reserve``."""
        _kernel("munmap", self._hidden, self.size_bytes)

    @staticmethod
    def _move(source: int, target: int, start: int, end: int) -> None:
        """Move page tables onto ``target`` in one step, so that no other thread can map there."""
        flags, size = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, end - start
        _kernel("mremap", source + start, size, size, flags, target + start)


def whole_pages(offset_bytes: int, size_bytes: int) -> tuple[int, int]:
    """Return the start and the end of the pages that a range touches."""
    start = offset_bytes // mmap.PAGESIZE * mmap.PAGESIZE
    return start, aligned(offset_bytes + size_bytes, mmap.PAGESIZE)


def address_of(mapping: mmap.mmap) -> int:
    """Return a mapping's address in this process."""
    return int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)


def unmap(mapping: mmap.mmap) -> None:
    """Close a mapping now, or when its last view is freed."""
    try:
        mapping.close()
    except BufferError:  # a view is still held
        log.debug("unmap=later bytes=%d", len(mapping))


def map_by_chance(descriptor: int, size_bytes: int, access: int) -> int:
    """Map a memfd at a random address, one of 25 million, so that no kernel can guess it."""
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
    """Make one system call on memory, without the interpreter lock; raise OSError if it fails."""
    if getattr(_libc(), name)(*arguments) in (-1, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
