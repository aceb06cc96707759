"""Files that hold little of what they could: shared memory of tenants (ADR 23), and logs.

All tenants' files of a kind have the same size, and one ledger says whose each byte is. A byte's
page exists in its owner's file alone, so together they hold no more than one file would.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
from collections.abc import Iterable
from typing import Any, Final

KEEP_SIZE, PUNCH_HOLE = 1, 2  # of fallocate(2)
BLOCK_BYTES: Final = 512  # of st_blocks, on every file system
GRAIN_BYTES: Final = 1 << 16  # a multiple of what file systems call a block: no part is zeroed
PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")


def read_only(descriptor: int) -> int:
    """Another descriptor of the same memory, which the kernel maps for reading alone.

    Who holds it can make no writable one of it without opening a file; a seal against writers
    (``F_SEAL_FUTURE_WRITE``) would forbid ``give_back`` too.
    """
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def held_bytes(descriptor: int) -> int:
    """Return the number of bytes that a file's pages take."""
    return os.fstat(descriptor).st_blocks * BLOCK_BYTES


def give_back(descriptor: int, start: int, end: int) -> None:
    """Let a range read as zeros for all who map it; its whole pages are free."""
    if start < end and _libc().fallocate(descriptor, PUNCH_HOLE | KEEP_SIZE, start, end - start):
        number = ctypes.get_errno()
        raise OSError(number, f"fallocate: {os.strerror(number)}")


def keep_newest(path: str, size_bytes: int) -> None:
    """Give the disk what lies before a file's last ``size_bytes``, or a little more.

    Positions in the file stay what they are, for those who write at its end and for those who
    read on from where they were; what is gone is a hole (``kept_from``).

    Raises:
        OSError: there is no such file, or its file system has no holes.
    """
    facts = os.stat(path)
    if facts.st_blocks * BLOCK_BYTES <= size_bytes + size_bytes // 4:
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        give_back(descriptor, 0, (facts.st_size - size_bytes) // GRAIN_BYTES * GRAIN_BYTES)
    finally:
        os.close(descriptor)


def open_plain(path: str, _: int) -> int:
    """Open a plain file that a script may have replaced, where a pipe would block the opener.

    Raises:
        OSError: there is no such file, or it is no plain one.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no plain file", path)
    return descriptor


def kept_from(descriptor: int, position: int) -> int:
    """Return the first position, this one or later, that is not in a hole."""
    try:
        return os.lseek(descriptor, position, os.SEEK_DATA)
    except OSError:  # it is at the end, or its file system knows none
        return position


def keep_only(descriptor: int, ranges: Iterable[tuple[int, int]], size_bytes: int) -> None:
    """Give back what lies outside of these ranges (start, end), if there are pages of it.

    A process that maps the file makes pages by touching them, wherever it likes.
    """
    ranges_kept = sorted(ranges)
    if held_bytes(descriptor) <= sum(_pages_end(end) - start for start, end in ranges_kept):
        return
    position = 0
    for start, end in [*ranges_kept, (size_bytes, size_bytes)]:
        give_back(descriptor, position, start)
        position = end


def _pages_end(end: int) -> int:
    return -(-end // PAGE_BYTES) * PAGE_BYTES


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    return libc
