"""``pipeswitch doctor``: check if this machine can serve, and say what to do. Without torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ..base.config import Config, DeviceConfig
from ..base.errors import PipeSwitchError
from ..base.machine import available_bytes, cpu_count, processor_features
from ..base.units import short_bytes
from ..devices.cuda import examine as selftest
from ..devices.cuda import ladder as cuda_ladder
from ..devices.cuda.bindings import PACKAGE, REAL_PACKAGE
from ..devices.cuda.kind import index_of
from ..ipc import control_page
from ..sandbox.confine import missing
from ..wire.addresses import default_address, parse_listen

COPY_BYTES: Final = 128 << 20  # larger than any cache of a processor
COPY_ROUNDS: Final = 5
LOW_MEMORY_BYTES: Final = 4 << 30
LOW_FILES: Final = 1024
OLD_TORCH: Final = (2, 11)


@dataclass(frozen=True)
class Finding:
    """Result of one check, with advice if it is not good."""

    name: str
    status: Literal["ok", "warn", "fail"]
    text: str
    advice: str = ""

    def row(self) -> dict[str, Any]:
        return asdict(self)


def examine(config: Config) -> list[Finding]:
    """Run every check; a check that fails to run becomes a finding, too."""
    checks: list[Callable[[], list[Finding]]] = [
        _software,
        _gpu,
        lambda: _cuda(config),
        _memory,
        _kernel,
        _sandbox,
        lambda: _ports(config),
        _copy_speed,
        _precision,
        _limits,
    ]
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except (OSError, ValueError, PipeSwitchError) as error:
            findings.append(Finding("check", "fail", f"could not look: {error}"))
    return findings


def _software() -> list[Finding]:
    findings = [Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")]
    for package in ("torch", "torchvision", "numpy", "pyzmq"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(package, "fail", "not installed", f"pip install {package}"))
            continue
        is_old = package == "torch" and tuple(map(int, version.split(".")[:2])) < OLD_TORCH
        advice = "pip install -U torch torchvision (2.11 or newer)" if is_old else ""
        findings.append(Finding(package, "fail" if is_old else "ok", version, advice))
    return findings


def _gpu() -> list[Finding]:
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    version = Path("/proc/driver/nvidia/version")
    if not version.is_file():
        nodes = sorted(Path("/dev").glob("nvidia[0-9]*"))
        if nodes:
            text = f"{len(nodes)} device nodes, but no driver is loaded"
            return [Finding("gpu", "warn", text, "load the nvidia kernel module")]
        return [Finding("gpu", "ok", "no NVIDIA device: the cpu device is used")]
    findings = [Finding("driver", "ok", version.read_text().splitlines()[0])]
    for card in cards:
        facts = dict(line.split(":", 1) for line in card.read_text().splitlines() if ":" in line)
        findings.append(Finding("gpu", "ok", facts.get("Model", "unknown").strip()))
    return findings


def _cuda(config: Config) -> list[Finding]:
    """Return the results of the CUDA self-test; it takes seconds and needs a driver."""
    device = config.device
    gpus = [name for name in device.names if not name.startswith("cpu")]
    if not gpus:
        return []
    if PACKAGE == REAL_PACKAGE and not selftest.has_driver_library():
        return [Finding("cuda", "ok", "no driver library (libcuda.so.1): the cpu device is used")]
    return [finding for name in gpus for finding in _cuda_device(device, name)]


def _cuda_device(config: DeviceConfig, name: str) -> list[Finding]:
    title = name if len(config.names) > 1 else "cuda"
    index = index_of(name)
    try:
        outcomes = selftest.examine(PACKAGE, index, tests=cuda_ladder.TESTS)
    except PipeSwitchError as error:
        return [
            Finding(title, "fail" if name.startswith("cuda") else "warn", error.message, error.hint)
        ]
    device = outcomes.pop("device")
    versions = f"driver for CUDA {device['driver'] // 1000}, runtime {device['runtime'] // 1000}"
    size = f"{short_bytes(device['free_bytes'])} of {short_bytes(device['device_bytes'])} free"
    findings = [Finding(title, "ok", f"{device['name']}, {size}, {versions}")]
    if device["free_bytes"] < 0.8 * device["device_bytes"]:
        advice = "nvidia-smi says who; a smaller --arena leaves them room"
        findings.append(Finding(f"{title} neighbours", "warn", "others use this GPU too", advice))
    for test in cuda_ladder.TESTS:
        outcome = outcomes[test]
        is_needed = test in cuda_ladder.REQUIRED
        bad: Literal["warn", "fail"] = "fail" if is_needed else "warn"
        advice = "" if outcome["is_ok"] else _cuda_advice(test)
        status = "ok" if outcome["is_ok"] else bad
        findings.append(Finding(f"{title} {test}", status, outcome["text"], advice))
    return findings


def _cuda_advice(test: str) -> str:
    """Return the advice for a failed test. Often the server can use a simpler method."""
    if test == "ipc":
        return "daemon and workers need one IPC and PID namespace: in a container --ipc=host"
    if test == "memory":
        return "nvidia-smi: is the GPU in exclusive mode, in MIG mode, or full?"
    if test in cuda_ladder.REQUIRED:
        return "is this torch built for this GPU and driver? serve --device cpu works meanwhile"
    return "the server uses what works instead; [device] in the config can name it"


def _memory() -> list[Finding]:
    available = available_bytes()
    text = f"{short_bytes(available)} available, within the control group's limit"
    advice = "serve few models: set small --arena and --host-store" * (available < LOW_MEMORY_BYTES)
    return [Finding("memory", "warn" if advice else "ok", text, advice)]


def _kernel() -> list[Finding]:
    """Check the kernel features that shared memory needs: memfd, seals, windows, eventfd, pidfd."""
    from ..devices.cpu.page_protection import ProtectedMapping

    def sealed() -> int:
        descriptor = control_page.sealed_memfd("doctor", 1 << 20)
        control_page.seal_against_writers(descriptor)
        return descriptor

    def window() -> int:
        ProtectedMapping(descriptor := sealed(), 1 << 20).unmap()
        return descriptor

    makers: list[tuple[str, str, Callable[[], int]]] = [
        ("memfd seals", "5.1", sealed),
        ("windows", "5.13", window),
        ("eventfd", "5.3", lambda: os.eventfd(0)),
        ("pidfd", "5.3", lambda: os.pidfd_open(os.getpid())),
    ]
    findings = []
    for name, version, make in makers:
        try:
            os.close(make())
            findings.append(Finding(name, "ok", "works"))
        except (OSError, AttributeError) as error:
            advice = f"Linux {version} or newer is needed"
            findings.append(Finding(name, "fail", str(error), advice))
    return findings


def _sandbox() -> list[Finding]:
    lacks = missing()
    if not lacks:
        return [Finding("sandbox", "ok", "seccomp and Landlock work")]
    text = f"this kernel lacks {' and '.join(lacks)}: clients' programs run with less of a sandbox"
    return [Finding("sandbox", "warn", text, "Linux 5.13 or newer, with both in its configuration")]


def serving(config: Config) -> Finding:
    """Start a server, build a tiny model in its sandbox, and compare its answer with torch's."""
    import torch

    from ..testing import server

    module, x = torch.nn.Linear(3, 2), torch.ones(1, 3)
    mode = {"PIPESWITCH_SECURITY__SANDBOX": config.security.sandbox}
    try:
        with (
            server(arena="64MiB", host_store="64MiB", environment=mode) as running,
            running.client() as client,
        ):
            client.register("doctor", module, example_inputs=(x,))
            [answer] = client.infer("doctor", x).outputs.values()
    except (PipeSwitchError, RuntimeError, OSError) as error:
        text = " ".join(str(error).split())
        advice = "PIPESWITCH_SECURITY__SANDBOX=off pipeswitch doctor: is it the sandbox?"
        return Finding("serving", "fail", f"a tiny model is not served: {text[:500]}", advice)
    if not torch.equal(torch.as_tensor(answer), module(x).detach()):
        return Finding("serving", "fail", "a tiny model's answer differs from torch's")
    return Finding("serving", "ok", "a tiny model was built in the sandbox, and answered")


def _ports(config: Config) -> list[Finding]:
    host, port = parse_listen(config.server.listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            advice = "a server runs there already, or choose --listen"
            finding = Finding(f"port {port}", "warn", f"{error.strerror}", advice)
        else:
            finding = Finding(f"port {port}", "ok", "free")
    return [finding, Finding("client address", "ok", default_address(os.environ))]


def _copy_speed() -> list[Finding]:
    """Measure how fast one thread copies (the best of a few times), which limits the cpu device."""
    import numpy as np

    source = np.ones(COPY_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    best_s = float("inf")
    for _ in range(COPY_ROUNDS):
        begin_s = time.perf_counter()
        np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - begin_s)
    text = f"{COPY_BYTES / best_s / 1e9:.1f} GB/s, one thread, {COPY_BYTES >> 20} MiB"
    return [Finding("memory copy", "ok", text)]


def _precision() -> list[Finding]:
    """Say in which precision this processor computes fastest."""
    features = {word for line in processor_features() for word in line.split()}
    text = "bf16 saves bytes, not time: no instructions for bfloat16"
    if features & {"avx512_bf16", "amx_bf16", "bf16"}:
        text = "bf16 (--precision) takes about half of fast's time"
    return [Finding("precision", "ok", text)]


def _limits() -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    cores, is_low = cpu_count(), soft < LOW_FILES
    advice = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}" if is_low else ""
    one = "copy and compute share one core" if cores == 1 else ""
    return [
        Finding("cores", "warn" if one else "ok", str(cores), one),
        Finding("open files", "warn" if is_low else "ok", str(soft), advice),
    ]
