"""Which device a server uses, and how: asked once, when it starts, in a process of its own.

The controller makes no CUDA context and imports no bindings. Where there is no driver library at
all this module knows at once; everything else the self-test program says (``cuda/selftest.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from ..config import DeviceConfig
from ..errors import ConfigError, PipeSwitchError
from ..ipc.messages import CudaOptions
from ..units import Amount
from .cuda.ladder import TESTS, Ladder, Outcome, Wishes, choose

REAL_PACKAGE: Final = "cuda.bindings"
SELFTEST_S: Final = 90.0  # in all; a test that hangs is cut short by the program itself
GIB: Final = 1 << 30
CONTEXT_BYTES: Final = 768 << 20  # of one process: context, libraries, workspaces
SPARE_BYTES: Final = 2 * GIB  # for activations of training, graphs, and other processes
MAX_ARENA_SHARE: Final = 0.9
MAX_SLICE_BYTES: Final = 8 * GIB
SLICE_SHARE: Final = 8  # of the arena: one part in so many
UNIT_BYTES: Final = 2 << 20


@dataclass(frozen=True)
class ChosenDevice:
    """The answer. ``options`` is None on cpu; sizes are then the machine's business."""

    name: str  # cpu, cpu:1 or cuda:0, as the user knows it
    why: str
    free_bytes: int = 0
    uuid: str = ""
    title: str = ""  # the GPU's own name
    ladder: Ladder = field(default_factory=Ladder)
    options: CudaOptions | None = None

    @property
    def opened(self) -> str:
        """What its processes open, and the kind that a profile is of: each GPU is its processes'
        number 0."""
        return "cpu" if self.options is None else "cuda:0"


def choose_devices(config: DeviceConfig, *, workers: int) -> tuple[ChosenDevice, ...]:
    """Each device that was asked for, examined one after the other.

    Raises:
        ConfigError: as ``choose_device``.
    """
    return tuple(
        choose_device(replace(config, name=name), workers=workers) for name in config.names
    )


def index_of(name: str) -> int:
    """Of the GPU, as this process sees them."""
    return int(name.partition(":")[2] or 0)


def choose_device(config: DeviceConfig, *, workers: int) -> ChosenDevice:
    """Decide between cpu and cuda, and find out what works.

    Args:
        workers: processes with a context beside the daemon.

    Raises:
        ConfigError: cuda was asked for by name and cannot be had: says why and what to do.
    """
    if config.name.startswith("cpu"):
        return ChosenDevice(config.name, "asked for")
    try:
        return _cuda(config, index_of(config.name), workers)
    except ConfigError as error:
        if config.name != "auto":
            raise
        return ChosenDevice("cpu", error.message)


def _cuda(config: DeviceConfig, index: int, workers: int) -> ChosenDevice:
    wishes = Wishes(config.waits, config.words, config.activations, config.graphs)
    found = examine(config.bindings, index, with_tests=wishes.needs_test)
    device = found["device"]
    results: dict[str, Outcome] | None = None
    if wishes.needs_test:
        results = {
            name: Outcome(found[name]["is_ok"], found[name]["text"])
            for name in TESTS
            if name in found
        }
    ladder = choose(wishes, results)
    slice_bytes = slice_size(config, ladder, int(device["free_bytes"]))
    contexts = CONTEXT_BYTES * (workers + 1)
    options = CudaOptions(
        package=config.bindings,
        visible=str(device["uuid"]) if int(device["count"]) > 1 else "",
        waits=ladder.waits,
        words=ladder.words,
        slice_bytes=slice_bytes,
        use_graphs=ladder.graphs == "on",
        graph_bytes=config.graph_budget_bytes,
    )
    return ChosenDevice(
        name=f"cuda:{index}",
        why=f"{device['name']}, {ladder}",
        free_bytes=max(0, int(device["free_bytes"]) - contexts - slice_bytes),
        uuid=str(device["uuid"]),
        title=str(device["name"]),
        ladder=ladder,
        options=options,
    )


def slice_size(config: DeviceConfig, ladder: Ladder, free_bytes: int) -> int:
    """Bytes of the activation slice; 0 where ordinary memory serves."""
    if ladder.activations != "slice":
        return 0
    auto_bytes = min(MAX_SLICE_BYTES, free_bytes // SLICE_SHARE)
    wanted = config.slice.resolve(free_bytes, auto_bytes)
    return wanted // UNIT_BYTES * UNIT_BYTES


def arena_size(wish: Amount, free_bytes: int) -> int:
    """Bytes of the arena on cuda; ``free_bytes`` is without contexts and slice."""
    auto_bytes = min(int(free_bytes * MAX_ARENA_SHARE), max(0, free_bytes - SPARE_BYTES))
    return wish.resolve(free_bytes, auto_bytes) // UNIT_BYTES * UNIT_BYTES


def private_size(free_bytes: int, arena_bytes: int) -> int:
    """What one worker may allocate for itself: what the arena leaves. Several hold little each,
    since only the one that computes holds activations, and a suspended job."""
    return max(GIB // 2, free_bytes - arena_bytes) // UNIT_BYTES * UNIT_BYTES


def examine(
    package: str, index: int, *, with_tests: bool, timeout_s: float = SELFTEST_S
) -> dict[str, dict[str, Any]]:
    """Run the self-test program; its findings by name. What is missing did not run.

    ``complaints`` holds the last of what it and its peer wrote to stderr.

    Raises:
        ConfigError: there is no such device; carries the program's own words.
    """
    if package == REAL_PACKAGE and not has_driver_library():
        raise ConfigError(
            "no NVIDIA driver on this machine (its library libcuda.so.1 is not found)",
            hint="install the driver, in a container give it the GPU (--gpus all); "
            "or serve --device cpu",
            kind="no driver",
        )
    order = {"package": package, "index": index, "tests": with_tests}
    program = ("-P", "-X", "faulthandler", "-m", "pipeswitch.devices.cuda.selftest")
    command = [sys.executable, *program, json.dumps(order)]
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints,
            start_new_session=True,
        )  # fmt: skip
        try:
            for line in _lines(process, timeout_s):
                with contextlib.suppress(ValueError, TypeError, KeyError):  # a library's own words
                    finding = json.loads(line)
                    found[finding["test"]] = finding
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # a peer that hangs in the driver
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        complaints.seek(0)
        last_words = complaints.read().decode(errors="replace").strip()[-3000:]
    device = found.get("device")
    if device is None:
        raise ConfigError(
            f"the GPU self-test ended with status {process.returncode} and said nothing"
            f"{': ' + last_words[-500:] if last_words else ''}",
            hint="pipeswitch doctor; or serve --device cpu",
        )
    if not device["is_ok"]:
        raise ConfigError(device["text"], hint=device.get("hint", ""), kind=device.get("kind", ""))
    if last_words:
        found["complaints"] = {"test": "complaints", "is_ok": True, "text": last_words}
    return found


def has_driver_library() -> bool:
    """Whether libcuda can be loaded; loading it starts nothing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _lines(process: subprocess.Popen[bytes], timeout_s: float) -> Iterator[bytes]:
    """Whole lines until the end of output, or until the time is over."""
    assert process.stdout is not None
    ends_at = time.monotonic() + timeout_s
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left_s := ends_at - time.monotonic()) > 0:
            if not selector.select(left_s):
                return
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                return
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines


@contextlib.contextmanager
def only_server_on(device: ChosenDevice, folder: Path | None = None) -> Iterator[None]:
    """Hold the GPU for this server: a second one would find no memory, late and in other words.

    The lock is on a file named by the GPU's UUID and dies with the process. On cpu nothing is held.

    Raises:
        PipeSwitchError: another server has it.
    """
    if device.options is None:
        yield
        return
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    descriptor = _open_lock(folder / f"pipeswitch-{device.uuid}.lock")
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PipeSwitchError(
                f"another pipeswitch server holds {device.name} ({device.title}, {device.uuid})",
                hint="pipeswitch stop, or serve on another device",
            ) from None
        yield
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    """Without O_CREAT where it exists: in a sticky folder another user's file cannot be created."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        pass
    try:
        return os.open(path, flags | os.O_CREAT, 0o644)
    except OSError as error:
        text = os.strerror(error.errno or errno.EIO)
        raise ConfigError(f"{path}: {text}", hint="set TMPDIR to a folder for locks") from None


def facts_of(devices: Sequence[ChosenDevice]) -> Mapping[str, Any]:
    """For ``stats`` and the ready line; what differs between several, in their order."""
    gpus = [device for device in devices if device.options is not None]
    facts = {
        "device": ",".join(device.name for device in devices),
        "device_reason": "; ".join(dict.fromkeys(device.why for device in devices)),
    }
    if not gpus:
        return facts
    return {
        **facts,
        "gpu": ", ".join(device.title for device in gpus),
        "gpu_uuid": ", ".join(device.uuid for device in gpus),
        "rungs": "; ".join(dict.fromkeys(str(device.ladder) for device in gpus)),
        "rung_reasons": list(
            dict.fromkeys(reason for device in gpus for reason in device.ladder.reasons)
        ),
    }
