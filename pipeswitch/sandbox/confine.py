"""Entry into the sandbox, for workers and builders before they use a client's program."""

from __future__ import annotations

import os
import resource
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from . import landlock, seccomp
from .system_calls import FILES, OWN, THREADS

WORST: Final = "1000"  # highest oom_score_adj: the kernel kills these processes first
MAX_LOG_BYTES: Final = 64 << 20  # limit on the size of files that a worker writes, such as its log
MAX_WRITTEN_BYTES: Final = 1 << 40  # a builder's files may be as large as its model
MAX_OPEN_FILES: Final = 1024
PACKAGES: Final = ("site-packages", "dist-packages")  # names of folders of packages
CODE: Final = (".py", ".so", ".zip", ".egg")  # suffixes of modules


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
        own_pages = int(Path("/proc/self/statm").read_text().split()[5])  # private and writable
        _limit(resource.RLIMIT_DATA, own_pages * resource.getpagesize() + memory_bytes)
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
    """Return the files that Python and torch need for imports and for queries of the processor.

    An environment may consist of links to a cache or a store (uv, Nix, Bazel). The sandbox allows
    a file only by its real path.
    """
    modules = [*filter(None, sys.path), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))]
    own = [*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix]
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable___"):  # its packages are in no folder of sys.path
            modules += getattr(module, "MAPPING", {}).values()
    own += modules
    roots = {os.path.abspath(path) for path in own}
    folders = {path for path in map(os.path.abspath, modules) if os.path.isdir(path)}
    paths = {Path(path) for path in roots | set(map(os.path.realpath, roots))}
    paths |= {Path(target) for folder in folders for target in _targets(folder)}
    system = (
        "/nix/store",
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


def _targets(folder: str) -> Iterator[str]:
    """Yield the targets of links to modules in a folder of ``sys.path`` and in its packages."""
    are_packages = os.path.basename(folder) in PACKAGES
    for entry in os.scandir(folder):
        if entry.is_symlink():
            target = os.path.realpath(entry.path)
            if are_packages or _is_code(target):
                yield target
            if not os.path.isdir(target):
                continue
        elif not entry.is_dir() or entry.name in PACKAGES or not _has_links(entry.path):
            continue
        yield from _targets_within(folder, entry.path)


def _targets_within(folder: str, package: str) -> Iterator[str]:
    """Yield the targets of links in a package. If the whole package is elsewhere, yield that."""
    top = os.path.basename(package)
    known: set[str] = set()
    for place, folders, files in os.walk(package):
        for name in (*folders, *files):
            path = os.path.join(place, name)
            if not os.path.islink(path):
                continue
            target, inside = os.path.realpath(path), os.path.relpath(path, folder)
            if target.endswith(os.sep + inside):
                target = os.path.join(target.removesuffix(inside), top)
            if target not in known:
                known.add(target)
                yield target


def _has_links(package: str) -> bool:
    """Return True if links are among a package's files, or if it has only folders."""
    entries = [*os.scandir(package)]
    return any(one.is_symlink() for one in entries) or not any(one.is_file() for one in entries)


def _is_code(target: str) -> bool:
    """Return True for a module or a folder with modules, not for whatever is beside a script."""
    if os.path.isdir(target):
        return any(name.endswith(CODE) for name in os.listdir(target))
    return target.endswith(CODE)


def _be_first_to_go() -> None:
    Path("/proc/self/oom_score_adj").write_text(WORST)
    _limit(resource.RLIMIT_CORE, 0)  # a core file would contain other clients' data
    _limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))
