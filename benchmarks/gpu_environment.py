"""Stage that prints facts of the machine. It does not import PipeSwitch, which may be broken."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from .gpu_common import device_nodes, is_fake, now_ms, put

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
    image = torch.ones(1, 8, 16, 16, device="cuda")
    found["convolution"] = float(torch.conv2d(image, torch.ones(8, 8, 3, 3, device="cuda")).sum())
    found["context_s"] = round(time.monotonic() - imported_s, 1)
    found["archs"] = torch.cuda.get_arch_list()
print(found)
"""

BINDINGS = """
from cuda.bindings import driver, runtime
names = ("COMPUTE_MODE", "CAN_USE_STREAM_WAIT_VALUE_NOR", "CAN_USE_64_BIT_STREAM_MEM_OPS",
         "IPC_EVENT_SUPPORTED", "HOST_REGISTER_SUPPORTED", "ASYNC_ENGINE_COUNT",
         "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
calls = {
    "driver": runtime.cudaDriverGetVersion, "runtime": runtime.cudaRuntimeGetVersion,
    "init": lambda: driver.cuInit(0), "devices": lambda: driver.cuDeviceGetCount(),
    **{name: lambda name=name: driver.cuDeviceGetAttribute(
        getattr(driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_" + name), 0) for name in names},
}
for name, call in calls.items():
    try:
        error, *values = call()
        print(name, *values, "" if int(error) == 0 else error.name)
    except Exception as error:
        print(name, repr(error)[:200])
"""

NVIDIA_SMI = (
    (
        "--query-gpu=name,driver_version,memory.total,compute_mode,persistence_mode",
        "--format=csv,noheader",
    ),
    ("--query-gpu=pcie.link.gen.current,pcie.link.width.current", "--format=csv,noheader"),
    ("--query-gpu=mig.mode.current", "--format=csv,noheader"),
    ("conf-compute", "-f"),
    ("--query-compute-apps=pid,name,used_memory", "--format=csv,noheader"),
)


def main() -> int:
    for look in (_machine, _surroundings, _nvidia_smi, _bindings, _torch):
        try:
            look()
        except Exception as error:  # a failed query must not hide other facts
            put(could_not_look=look.__name__, why=repr(error)[:500])
    return 0


def _machine() -> None:
    names = ("torch", "torchvision", "cuda-bindings", "pyzmq", "msgspec", "transformers", "numpy")
    put(packages={name: _version(name) for name in names})
    put(
        python=platform.python_version(),
        kernel=platform.release(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        dev_shm_mib=shutil.disk_usage("/dev/shm").total >> 20,
    )
    for name in ("shmem_enabled", "enabled"):
        put(**{f"hugepage_{name}": _text(Path("/sys/kernel/mm/transparent_hugepage", name))})


def _surroundings() -> None:
    """Report the settings that decide if memory can be shared and pinned, before any test."""
    put(device_nodes=device_nodes(), kernel_module=_text(Path("/proc/driver/nvidia/version")))
    words = ("CUDA", "NVIDIA", "PYTORCH", "TORCH", "NCCL")
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    put(
        namespaces={name: os.readlink(f"/proc/self/ns/{name}") for name in ("ipc", "pid", "user")},
        user_id=os.getuid(),
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK),
        available=next((line for line in meminfo if line.startswith("MemAvailable")), ""),
        environment={k: v for k, v in os.environ.items() if k.startswith(words)},
    )


def _nvidia_smi() -> None:
    for words in NVIDIA_SMI if shutil.which("nvidia-smi") else ():
        put(nvidia_smi=words[0], says=_said(["nvidia-smi", *words], 10))


def _bindings() -> None:
    if not is_fake():
        put(bindings=_said([sys.executable, "-c", BINDINGS], 20).splitlines())


def _torch() -> None:
    """Test torch alone, to separate its failures from PipeSwitch's.

    The test also brings torch's files into the page cache, so that later stages import it faster.
    """
    if not is_fake():
        began_ms = now_ms()
        text = _said([sys.executable, "-c", TORCH], 100)
        put(plain_torch=text, plain_torch_s=round((now_ms() - began_ms) / 1000, 1))


def _said(command: list[str], limit_s: float) -> str:
    """Return a program's output or, if it failed, a text that says how it ended."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)[-300:]
    return done.stdout.strip() or f"status {done.returncode}: {done.stderr.strip()[-1500:]}"


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else "missing"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    sys.exit(main())
