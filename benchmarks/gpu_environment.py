"""Stage: what the machine is, and what the self-test chooses; the rungs of all later stages."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from gpu_common import package, put, require_gpu


def main() -> None:
    put(
        python=platform.python_version(),
        kernel=platform.release(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        dev_shm_mib=shutil.disk_usage("/dev/shm").total >> 20,
        packages={
            name: _version(name)
            for name in ("torch", "torchvision", "cuda-bindings", "pyzmq", "transformers")
        },
    )
    device = require_gpu()
    put(device=device)
    if shutil.which("nvidia-smi"):
        query = "name,driver_version,pcie.link.gen.current,pcie.link.width.current,memory.total"
        found = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True, text=True,
        )  # fmt: skip
        put(nvidia_smi=found.stdout.strip() or found.stderr.strip())
    for name in ("shmem_enabled", "enabled"):
        path = Path("/sys/kernel/mm/transparent_hugepage", name)
        if path.is_file():
            put(**{f"hugepage_{name}": path.read_text().strip()})
    _selftest()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _selftest() -> None:
    from pipeswitch.devices.choosing import examine
    from pipeswitch.devices.cuda_ladder import TESTS, Outcome, Wishes, choose
    from pipeswitch.errors import ConfigError

    found = examine(package(), 0, with_tests=True)
    put(selftest={name: found.get(name, "it did not run") for name in TESTS})
    outcomes = {n: Outcome(found[n]["is_ok"], found[n]["text"]) for n in TESTS if n in found}
    try:
        ladder = choose(Wishes(), outcomes)
    except ConfigError as error:
        put(ladder_refused=error.message)
        return
    rungs = {key: getattr(ladder, key) for key in ("waits", "words", "activations", "graphs")}
    put(rungs=rungs, reasons=ladder.reasons)


if __name__ == "__main__":
    main()
