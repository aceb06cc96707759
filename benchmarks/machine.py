"""Facts of the machine on which a benchmark ran, and whether it was quiet."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sysconfig
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import psutil

from pipeswitch.base.machine import cpu_count, processor_name

QUIET_LOAD: Final = 0.5  # limit of the load average of the minute before the benchmark starts
QUIET_SHARE: Final = 0.05  # limit of other programs' share of all cores' time during the run


def machine_facts() -> dict[str, Any]:
    """Return facts of the machine and the software: device, cores, versions, commit."""
    commit, is_dirty = _commit()
    return {
        "device": "cpu",
        "cpu": processor_name(),
        "cores": cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),  # load by other programs, before the run
        "kernel": platform.release(),
        "python": f"{platform.python_version()}, {python_build()}",
        "torch": metadata.version("torch"),
        "commit": commit,
        "dirty": is_dirty,
    }


def python_build() -> str:
    """Return this Python build's optimizations, which change a server's step time by up to 14 %."""
    args = sysconfig.get_config_var("CONFIG_ARGS") or ""
    flags = {"PGO": "--enable-optimizations", "LTO": "--with-lto"}
    return " and ".join(name for name, flag in flags.items() if flag in args) or "no PGO, no LTO"


@dataclass
class Others:
    """CPU time of other programs since this object was created.

    A child of this process counts as another program until it ends.
    """

    began_s: float = field(default_factory=time.monotonic)
    busy_s: float = field(default_factory=lambda: busy_s())
    own_s: float = field(default_factory=lambda: own_s())

    def share(self) -> float:
        """Return other programs' share of all cores' time since this object was created."""
        others_s = busy_s() - self.busy_s - (own_s() - self.own_s)
        elapsed_s = max(time.monotonic() - self.began_s, 1e-3)
        return max(0.0, others_s / (elapsed_s * (os.cpu_count() or 1)))


def warnings_of(load_1m: float, others_share: float) -> list[str]:
    """Return warnings for a machine that was not quiet; empty for a quiet machine."""
    warnings = []
    if load_1m > QUIET_LOAD:
        warnings.append(f"the machine was not quiet when this began: load average {load_1m:g}")
    if others_share > QUIET_SHARE:
        warnings.append(f"other programs took {others_share:.0%} of all cores' time meanwhile")
    return warnings


def own_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def busy_s() -> float:
    """Return the CPU seconds of all programs since the machine started."""
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - times.iowait)


def _commit() -> tuple[str, bool]:
    """Return the checkout's commit, and True if files differ from it; without git, the version."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(here), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD"), bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return f"v{metadata.version('pipeswitch')}", False
