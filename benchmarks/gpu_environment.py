"""Stage: what the machine is, and what the self-test chooses; the rungs of all later stages."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from .gpu_common import is_fake, now_ms, package, put, require_gpu

TORCH = """
import time
began_s = time.monotonic()
import torch
imported_s = time.monotonic()
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "sees": torch.cuda.is_available()}
found["import_s"] = round(imported_s - began_s, 1)
if found["sees"]:
    square = torch.ones(64, 64, device="cuda")
    found["product"] = float((square @ square).sum())
    found["context_s"] = round(time.monotonic() - imported_s, 1)
    found["archs"] = torch.cuda.get_arch_list()
print(found)
"""


def main() -> int:
    put(
        python=platform.python_version(),
        kernel=platform.release(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        dev_shm_mib=shutil.disk_usage("/dev/shm").total >> 20,
        packages={
            name: _version(name)
            for name in (
                "torch", "torchvision", "cuda-bindings", "pyzmq", "msgspec", "transformers",
                "numpy",
            )
        },
    )  # fmt: skip
    _put_surroundings()
    device = require_gpu()
    put(device=device)
    _put_torch()
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
    return _selftest()


def _put_surroundings() -> None:
    """What decides whether memory can be shared and pinned, before anything is tried."""
    namespaces = {}
    for name in ("ipc", "pid", "user"):
        namespaces[name] = os.readlink(f"/proc/self/ns/{name}")
    words = ("CUDA", "NVIDIA", "PYTORCH", "TORCH", "NCCL")
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    put(
        devices=sorted(str(path) for path in Path("/dev").glob("nvidia*")),
        namespaces=namespaces,
        user_id=os.getuid(),
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK),
        available=next((line for line in meminfo if line.startswith("MemAvailable")), ""),
        environment={k: v for k, v in os.environ.items() if k.startswith(words)},
    )


def _put_torch() -> None:
    """Torch by itself, so that its own troubles are told from ours; and its files are in the page
    cache when the self-test, which has little patience, imports them."""
    if is_fake():
        return
    began_ms = now_ms()
    try:
        done = subprocess.run(
            [sys.executable, "-c", TORCH], capture_output=True, text=True, timeout=100
        )
        text = done.stdout.strip() or f"status {done.returncode}: {done.stderr.strip()[-1500:]}"
    except subprocess.TimeoutExpired:
        text = "not imported within 100 s"
    put(plain_torch=text, plain_torch_s=round((now_ms() - began_ms) / 1000, 1))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _selftest() -> int:
    """Status 1 where no cuda device can be had: what follows cannot serve either."""
    from pipeswitch.devices.cuda.examine import examine
    from pipeswitch.devices.cuda.ladder import TESTS, Outcome, Wishes, choose
    from pipeswitch.errors import ConfigError

    found = examine(package(), 0, with_tests=True)
    for name in TESTS:
        test = found.get(name)
        how = "did not run"
        if test is not None:
            how = f"{'ok' if test['is_ok'] else 'FAILED'} after {test['seconds']} s: {test['text']}"
        put(**{f"selftest {name}": how})
    if "complaints" in found:
        put(selftest_stderr=found["complaints"]["text"])
    outcomes: dict[str, Outcome] = {
        n: Outcome(found[n]["is_ok"], found[n]["text"]) for n in TESTS if n in found
    }
    try:
        ladder = choose(Wishes(), outcomes)
    except ConfigError as error:
        put(ladder_refused=error.message)
        return 1
    rungs = {key: getattr(ladder, key) for key in ("waits", "words", "activations", "graphs")}
    put(rungs=rungs, reasons=ladder.reasons)
    return 0


if __name__ == "__main__":
    sys.exit(main())
