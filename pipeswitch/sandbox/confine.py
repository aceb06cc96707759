"""Entry into the sandbox, for workers and builders before they use a client's program."""

from __future__ import annotations

import resource
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from . import landlock, seccomp
from .system_calls import FILES, OWN, THREADS

WORST: Final = "1000"  # highest oom_score_adj: the kernel kills these processes first
MAX_LOG_BYTES: Final = 64 << 20  # limit on the size of files that a worker writes, such as its log
MAX_WRITTEN_BYTES: Final = 1 << 40  # a builder's files may be as large as its model
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
    """Forbid new files, sockets, processes and threads to all threads of this process, permanently.

    The process keeps its memory and its descriptors, and can receive further descriptors. Start the
    threads that its computations need before this call.

    Args:
        memory_bytes: limit on private memory that is allocated after this; 0: no limit.
    """
    _be_first_to_go()
    _limit(resource.RLIMIT_FSIZE, MAX_LOG_BYTES)
    if memory_bytes:
        _limit(resource.RLIMIT_DATA, _own_bytes() + memory_bytes)
    seccomp.restrict_calls(OWN)


def confine_builder(readable: Iterable[Path], writable: Path) -> None:
    """Allow this process only to read libraries and ``readable``, and to write one folder. Forbid
    network and new processes.

    Call this while the process has one thread: Landlock confines only the calling thread, and
    threads that it starts later.
    """
    _be_first_to_go()
    _limit(resource.RLIMIT_FSIZE, MAX_WRITTEN_BYTES)
    if landlock.version():
        landlock.restrict_files([*libraries(), *readable], [writable])
    seccomp.restrict_calls(OWN | THREADS | FILES)


def libraries() -> list[Path]:
    """Return the files that Python and torch need for imports and for queries of the processor."""
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
    _limit(resource.RLIMIT_CORE, 0)  # a core file would contain other clients' data
    _limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _own_bytes() -> int:
    """Return the size of this process's private writable memory, as RLIMIT_DATA counts it."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
