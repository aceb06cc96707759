"""Memory within the cgroup's limit, cores of this process, their features, and folders on disk."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import math
import os
import resource
from pathlib import Path
from typing import Final

SHORTAGES: Final = frozenset(
    {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC}
)
"""System errors that pass as soon as other processes release resources."""

CGROUPS: Final = Path("/sys/fs/cgroup")
MEMBERSHIP: Final = Path("/proc/self/cgroup")


M_ARENA_MAX: Final = -8  # parameter of glibc's mallopt
RETURN_BYTES: Final = 8 << 20  # growth of private memory since the start after which it is returned
RETURN_S: Final = 2.0
RETURN_MAX_S: Final = 30.0  # longest interval between attempts, if these gain little


@functools.cache
def processor_features() -> tuple[str, ...]:
    """Return the processor's names and features. Builders call this before they are confined: a
    sandbox may lose access to a file of procfs, whose inode the kernel can drop and make again.

    Raises:
        OSError: they cannot be read.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return tuple(
        sorted({one for one in lines if one.startswith(("flags", "model name", "Features"))})
    )


class FreedMemory:
    """Memory that this process has freed but its allocator still holds; ``give_back`` returns it.

    Python's collector seldom makes a full run, and the allocator keeps freed blocks. Only private
    pages count; pages of arenas, pools and stores are shared by all processes.

    Creating an object limits the process to one heap. By default glibc gives each thread a heap,
    and moves a thread to another heap when an allocation fails. ``malloc_trim`` leaves up to 64 MiB
    at the top of such a heap.
    """

    def __init__(self) -> None:
        # Opened now, because a process in the sandbox cannot open files later.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        libc = ctypes.CDLL(None)
        self._trim = getattr(libc, "malloc_trim", None)  # glibc only
        if hasattr(libc, "mallopt"):
            libc.mallopt(M_ARENA_MAX, 1)
        self._own_bytes = self._private_bytes()
        self._next_s, self._wait_s = 0.0, RETURN_S

    def give_back(self, now_s: float) -> None:
        """Return freed memory if it has grown. Call this regularly while the process is idle."""
        if now_s < self._next_s:
            return
        before_bytes = self._private_bytes()
        if before_bytes - self._own_bytes < RETURN_BYTES:
            self._next_s, self._wait_s = now_s + RETURN_S, RETURN_S
            return
        gc.collect()
        if self._trim is not None:
            self._trim(0)
        has_gained = before_bytes - self._private_bytes() >= RETURN_BYTES // 4
        self._wait_s = RETURN_S if has_gained else min(2 * self._wait_s, RETURN_MAX_S)
        self._next_s = now_s + self._wait_s

    def _private_bytes(self) -> int:
        _, resident, shared, *_ = os.pread(self._statm, 256, 0).split()
        return (int(resident) - int(shared)) * resource.getpagesize()

    def close(self) -> None:
        os.close(self._statm)


def available_bytes(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the available bytes of RAM, within the limits of this process's cgroups."""
    available = _numbers(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        if controllers:
            root, names = cgroups / "memory", ("limit_in_bytes", "usage_in_bytes", "total_")
        else:
            root, names = cgroups, ("max", "current", "")
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            available = int(min(available, _room(folder, *names)))
            if folder == root:
                break
    return available


def _room(folder: Path, limit_name: str, usage_name: str, prefix: str) -> float:
    """Return the free bytes within a cgroup's limit, or infinity; the file cache counts as free."""
    limit = _number(folder / f"memory.{limit_name}")
    if limit is None:
        return math.inf
    usage = _number(folder / f"memory.{usage_name}") or 0
    cached = _numbers(folder / "memory.stat").get(f"{prefix}inactive_file", 0)
    return max(0, limit - max(0, usage - cached))


def cpu_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def processor_name() -> str:
    """Return the processor's name, or its architecture if the kernel knows no name."""
    with contextlib.suppress(OSError):
        for line in processor_features():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine


def sync_directory(path: Path) -> None:
    """Sync a folder to the disk, so that its file names survive a crash; blocks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _numbers(path: Path) -> dict[str, int]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: int(value) for name, value, *_ in map(str.split, lines)}


def _number(path: Path) -> int | None:
    """Return the number in a file; None if the file is missing or says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
