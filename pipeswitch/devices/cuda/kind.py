"""Choice and reservation of a cuda device by the server, and how its processes open it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ...base.config import DeviceConfig
from ...base.errors import ConfigError, PipeSwitchError
from ...base.units import SizeSpec
from ...ipc.messages.daemon import DaemonSettings
from ...ipc.messages.worker import WorkerSettings
from .. import ChosenDevice, DeviceKind
from ..memory import DeviceMemory
from ..worker_device import WorkerDevice
from .bindings import PACKAGE
from .examine import examine
from .ladder import TESTS, CudaOptions, Ladder, LadderOutcome, choose, needs_test

GIB: Final = 1 << 30
CONTEXT_BYTES: Final = 768 << 20  # device memory of one process: context, libraries, workspaces
SPARE_BYTES: Final = 2 * GIB  # for activations of training, graphs, and other processes
MAX_ARENA_SHARE: Final = 0.9
MAX_SLICE_BYTES: Final = 8 * GIB
SLICE_SHARE: Final = 8  # the default slice is this fraction of the free memory: 1/8
UNIT_BYTES: Final = 2 << 20
STATUS_LOST: Final = 71
"""Exit status of a daemon whose CUDA context is broken; it and its workers are started again."""


class CudaKind:
    """See ``DeviceKind``."""

    opened = "cuda:0"  # each GPU is number 0 in its processes
    is_host = False
    can_confine = False  # a process that maps the arena can read all of it

    def choose(
        self, config: DeviceConfig, name: str, *, workers: int, available_bytes: int
    ) -> ChosenDevice:
        """Implement ``DeviceKind.choose``; takes seconds."""
        index = index_of(name)
        tests = TESTS if needs_test(config) else ()
        outcomes = examine(PACKAGE, index, tests=tests)
        device = outcomes["device"]
        results = {
            name: LadderOutcome(outcomes[name]["is_ok"], outcomes[name]["text"]) for name in tests
        }
        ladder = choose(config, results or None)
        slice_bytes = slice_size(config, ladder, device["free_bytes"])
        free_bytes = max(0, device["free_bytes"] - CONTEXT_BYTES * (workers + 1) - slice_bytes)
        arena_bytes = arena_size(config.arena, free_bytes)
        options = CudaOptions(
            package=PACKAGE,
            visible=device["uuid"] if device["count"] > 1 else "",
            waits=ladder.waits,
            words=ladder.words,
            slice_bytes=slice_bytes,
            holds=ladder.holds,
            use_graphs=ladder.graphs == "on",
            graph_bytes=config.graph_budget_bytes,
            private_bytes=private_size(free_bytes, arena_bytes),
        )
        return ChosenDevice(
            kind=self,
            name=f"cuda:{index}",
            why=f"{device['name']}, {ladder}",
            arena_bytes=arena_bytes,
            options=msgspec.msgpack.encode(options),
            title=device["name"],
            uuid=device["uuid"],
            rungs=str(ladder),
            reasons=ladder.reasons,
        )

    @contextlib.contextmanager
    def reserve(self, device: ChosenDevice, folder: Path | None = None) -> Iterator[None]:
        """Implement ``DeviceKind.reserve``; two servers on one GPU would run out of memory.

        The lock is on a file named by the GPU's UUID, and ends with the process.
        """
        folder = Path(tempfile.gettempdir()) if folder is None else folder
        descriptor = _open_lock(folder / f"pipeswitch-{device.uuid}.lock")
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PipeSwitchError(
                    f"another pipeswitch server holds {device.name} "
                    f"({device.title}, {device.uuid})",
                    hint="pipeswitch stop, or serve on another device",
                ) from None
            yield
        finally:
            os.close(descriptor)

    def open_memory(
        self, settings: DaemonSettings, store: int, control_page: int, doorbells: Sequence[int]
    ) -> DeviceMemory:
        from .bindings import Cuda
        from .memory import CudaDeviceMemory

        options = CudaOptions.shown(settings.limits.options)
        return CudaDeviceMemory(
            Cuda.load(options.package),
            settings,
            store=store,
            control_page=control_page,
            doorbells=doorbells[:-1],
            doorbell=doorbells[-1],
            extra_bytes=options.slice_bytes,
            fence_writer=options.words,
            on_lost=_leave,
        )

    def open_view(
        self,
        settings: WorkerSettings,
        arena: Sequence[int],
        *,
        control_page: int,
        doorbells: Sequence[int],
    ) -> WorkerDevice:
        """Implement ``DeviceKind.open_view``; creates this process's CUDA context."""
        from .bindings import Cuda
        from .torch import torch_side
        from .worker_device import CudaWorkerDevice

        (words,) = arena
        options = CudaOptions.shown(settings.limits.options)
        side = torch_side(options.package, 0)
        cuda = Cuda.load(options.package)
        view = CudaWorkerDevice(
            cuda,
            side,
            settings,
            options,
            fences_descriptor=words,
            control_page=control_page,
            doorbells=doorbells,
        )
        side.warm_up()  # before the slice is taken: cached workspaces must not be in it
        if options.slice_bytes:
            view.take_slice(options.slice_bytes)
        side.cap_private(options.private_bytes)
        return view


def index_of(name: str) -> int:
    """Return the number in a device's name: 1 for ``cuda:1``, 0 for ``cuda``."""
    return int(name.partition(":")[2] or 0)


def slice_size(config: DeviceConfig, ladder: Ladder, free_bytes: int) -> int:
    """Return the size of the activation slice; 0 if activations use ordinary memory."""
    if ladder.activations != "slice":
        return 0
    auto_bytes = min(MAX_SLICE_BYTES, free_bytes // SLICE_SHARE)
    size_bytes = config.slice.resolve(free_bytes, auto_bytes)
    return size_bytes // UNIT_BYTES * UNIT_BYTES


def arena_size(wish: SizeSpec, free_bytes: int) -> int:
    """Return the size of the arena. ``free_bytes`` excludes contexts and the activation slice."""
    auto_bytes = min(int(free_bytes * MAX_ARENA_SHARE), max(0, free_bytes - SPARE_BYTES))
    return wish.resolve(free_bytes, auto_bytes) // UNIT_BYTES * UNIT_BYTES


def private_size(free_bytes: int, arena_bytes: int) -> int:
    """Return the bytes that one worker may allocate outside of the arena and the slice.

    Each worker may use all of them: only the computing worker and a suspended job need many.
    """
    return max(GIB // 2, free_bytes - arena_bytes) // UNIT_BYTES * UNIT_BYTES


def _open_lock(path: Path) -> int:
    """Open the lock file; use O_CREAT only if it is missing.

    In a sticky folder O_CREAT fails for another user's file.
    """
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


def _leave() -> None:
    """Exit without waiting for other threads, which may hang in the broken context."""
    logging.shutdown()
    os._exit(STATUS_LOST)


KIND: Final[DeviceKind] = CudaKind()
