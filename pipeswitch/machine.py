"""This machine: memory within the cgroup's limit, cores this process may use, folders on disk."""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes() -> int:
    """Available RAM, never above what the cgroup leaves."""
    available = _meminfo("MemAvailable")
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        limit, usage = _number(limit_file), _number(usage_file)
        if limit is not None:
            available = min(available, max(0, limit - (usage or 0)))
    return available


def cpu_count() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def processor_name() -> str:
    """As the kernel calls it, or the architecture where it has no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return os.uname().machine


def sync_directory(path: Path) -> None:
    """The names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/meminfo has no {key}")


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
