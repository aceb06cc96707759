"""Entering the sandbox: what workers and builders do before they touch a client's program."""

from __future__ import annotations

import resource
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from . import landlock, seccomp
from .system_calls import FILES, OWN, THREADS

WORST: Final = "1000"  # of oom_score_adj: when memory is short the kernel takes these first
MAX_LOG_BYTES: Final = 64 << 20  # a file that a worker writes to grows no further; its log is one
MAX_WRITTEN_BYTES: Final = 1 << 40  # a builder's files are as large as its model
MAX_OPEN_FILES: Final = 1024


def missing() -> tuple[str, ...]:
    """Return the kernel features that the sandbox needs and this kernel lacks."""
    lacks = []
    if not seccomp.is_available():
        lacks.append("seccomp")
    if not landlock.version():
        lacks.append("Landlock")
    return tuple(lacks)


def confine_worker(memory_bytes: int) -> None:
    """No new files, sockets, processes or threads for this process, from here on, for good.

    It has what it has: its memory, its descriptors, and those it is sent. All of its threads are
    confined. Threads that its computations need must be there already.

    Args:
        memory_bytes: of its own, beyond what it has now; 0: no limit.
    """
    _be_first_to_go()
    _limit(resource.RLIMIT_FSIZE, MAX_LOG_BYTES)
    if memory_bytes:
        _limit(resource.RLIMIT_DATA, _own_bytes() + memory_bytes)
    seccomp.restrict_calls(OWN)


def confine_builder(readable: Iterable[Path], writable: Path) -> None:
    """Only the libraries and ``readable`` to read, one folder to write; no network, no processes.

    Call it while this process has one thread: Landlock holds for this one and those it starts.
    """
    _be_first_to_go()
    _limit(resource.RLIMIT_FSIZE, MAX_WRITTEN_BYTES)
    if landlock.version():
        landlock.restrict_files([*libraries(), *readable], [writable])
    seccomp.restrict_calls(OWN | THREADS | FILES)


def libraries() -> list[Path]:
    """Return the files that Python and torch read to import more, or to query the processor."""
    paths = {Path(path) for path in sysconfig.get_paths().values()}
    paths |= {Path(sys.prefix), Path(sys.base_prefix), *map(Path, filter(None, sys.path))}
    system = (
        "/usr/lib",
        "/usr/lib64",
        "/lib",
        "/lib64",
        "/usr/share/zoneinfo",
        "/etc/ld.so.cache",
        "/etc/localtime",
        "/dev/null",
        "/dev/urandom",
        "/dev/zero",
        "/proc/self",
        "/proc/cpuinfo",
        "/proc/meminfo",
        "/proc/stat",
        "/proc/sys/vm",
        "/proc/sys/kernel",
        "/sys/devices/system",
        "/sys/fs/cgroup",
        "/sys/kernel/mm",
    )
    return [*sorted(paths), *map(Path, system)]


def _be_first_to_go() -> None:
    Path("/proc/self/oom_score_adj").write_text(WORST)
    _limit(resource.RLIMIT_CORE, 0)  # a core file would hold what others have sent
    _limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _own_bytes() -> int:
    """Private memory that can be written, as RLIMIT_DATA counts it."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
