"""Sparse files: shared memory of tenants (ADR 23), and logs.

All tenants' files of a kind have the same size, and each offset is leased to one tenant. A page
exists only in the file of its tenant, so all files together take no more memory than one.
"""

from __future__ import annotations

import ctypes
import functools
import os
from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Any, Final

KEEP_SIZE, PUNCH_HOLE = 1, 2  # flags of fallocate(2)
BLOCK_BYTES: Final = 512  # unit of st_blocks, on every file system
GRAIN_BYTES: Final = 1 << 16  # a multiple of every block size: a partial block would be zeroed
PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")
GAPS: Final = 16  # gaps between ranges that are given back at once: 16 system calls


def read_only(descriptor: int) -> int:
    """Return another descriptor of the same memory, which can be mapped read-only.

    To write, a process would have to open the file again, which the sandbox forbids. A seal against
    writers (``F_SEAL_FUTURE_WRITE``) is not used, because it forbids ``give_back`` too.
    """
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def held_bytes(descriptor: int) -> int:
    """Return the size of a file's allocated pages in bytes."""
    return os.fstat(descriptor).st_blocks * BLOCK_BYTES


def give_back(descriptor: int, start: int, end: int) -> None:
    """Free a range's whole pages; the range reads as zeros in all mappings."""
    if start < end and _libc().fallocate(descriptor, PUNCH_HOLE | KEEP_SIZE, start, end - start):
        number = ctypes.get_errno()
        raise OSError(number, f"fallocate: {os.strerror(number)}")


def keep_newest(path: str, size_bytes: int) -> None:
    """Free the disk blocks of a file except those of its last ``size_bytes``, or a little more.

    The freed part becomes a hole (``kept_from``). Positions in the file do not change, so other
    processes can continue to append and to read.

    Raises:
        OSError: the file does not exist, or its file system does not support holes.
    """
    facts = os.stat(path)
    if facts.st_blocks * BLOCK_BYTES <= size_bytes + size_bytes // 4:
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        give_back(descriptor, 0, (facts.st_size - size_bytes) // GRAIN_BYTES * GRAIN_BYTES)
    finally:
        os.close(descriptor)


def kept_from(descriptor: int, position: int) -> int:
    """Return the first position, this one or later, that is not in a hole."""
    try:
        return os.lseek(descriptor, position, os.SEEK_DATA)
    except OSError:  # the position is at the end, or the file system has no holes
        return position


class UsedRanges:
    """Ranges of a sparse file that are in use, in whole pages. The pages outside are given back.

    A process that maps the file for writing can allocate pages anywhere by touching them. ``drop``
    finds these pages, too, but looks at a limited number of gaps, however many ranges there are.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._descriptor, self._size_bytes = descriptor, size_bytes
        self._sizes: dict[int, int] = {}  # start -> size
        self._starts: list[int] = []  # sorted
        self._kept_bytes = 0
        self._position = 0  # gaps before it were given back in this pass over the file

    def keep(self, start: int, size: int) -> None:
        """Add a range."""
        insort(self._starts, start)
        self._sizes[start] = size
        self._kept_bytes += size

    def drop(self, start: int) -> None:
        """Give a range back. If too many pages exist, give the next GAPS gaps back, too."""
        size = self._sizes.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        self._kept_bytes -= size
        give_back(self._descriptor, start, start + size)
        self._tidy(GAPS)

    def tidy(self) -> None:
        """Give all pages outside of the ranges back, if there are any."""
        self._position = 0
        self._tidy(len(self._starts) + 1)

    def _tidy(self, gap_count: int) -> None:
        if held_bytes(self._descriptor) <= self._kept_bytes:
            return
        index = bisect_left(self._starts, self._position)
        if index:  # a range that was added since may reach over the position
            before = self._starts[index - 1]
            self._position = max(self._position, before + self._sizes[before])
        for start in (*self._starts[index : index + gap_count], self._size_bytes)[:gap_count]:
            give_back(self._descriptor, self._position, start)
            self._position = start + self._sizes.get(start, 0)
        if self._position >= self._size_bytes:
            self._position = 0


def keep_only(descriptor: int, ranges: Iterable[tuple[int, int]], size_bytes: int) -> None:
    """Free all pages outside of these ranges (start, end), if there are any."""
    used = UsedRanges(descriptor, size_bytes)
    for start, end in ranges:
        used.keep(start, -(-(end - start) // PAGE_BYTES) * PAGE_BYTES)
    used.tidy()


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    return libc
