"""Opening a device, on either side: the one place where its name decides which code runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from ..errors import ConfigError
from ..ipc.messages import CudaOptions, DaemonSettings, WorkerSettings
from . import DeviceMemory, PoolView
from .cpu import CpuDeviceMemory, CpuPoolView

log = logging.getLogger(__name__)

STATUS_LOST = 71
"""A daemon leaves with it when its CUDA context is broken; it is started again, with workers."""


def open_memory(settings: DaemonSettings, descriptors: Sequence[int]) -> DeviceMemory:
    """Take the device's memory, as the settings say; in the memory daemon, after the fork.

    ``descriptors``: the store memfd, then ``bell_count`` eventfds. They stay the caller's.

    Raises:
        ConfigError: no such device, or not the descriptors that the settings announce.
        CudaError, OSError: the memory cannot be had.
    """
    if len(descriptors) != 1 + settings.bell_count:
        raise ConfigError(
            f"a daemon with {settings.bell_count} bells got {len(descriptors)} descriptors"
        )
    store, *bells = descriptors
    if settings.device == "cpu":
        return CpuDeviceMemory(
            store=store,
            bells=bells,
            arena_bytes=settings.arena_bytes,
            store_bytes=settings.store_bytes,
            words=settings.words,
            link_bytes_per_s=settings.link_bytes_per_s,
            separates_tenants=settings.separates_tenants,
        )
    if settings.cuda is None:
        raise ConfigError(f"no device {settings.device!r}")
    from .cuda.bindings import Cuda
    from .cuda.memory import CudaDeviceMemory

    _show_only(settings.cuda)
    return CudaDeviceMemory(
        Cuda.load(settings.cuda.package),
        index=0,
        store=store,
        bells=bells,
        arena_bytes=settings.arena_bytes,
        store_bytes=settings.store_bytes,
        words=settings.words,
        extra_bytes=settings.cuda.slice_bytes,
        word_writer=settings.cuda.words,
        on_lost=_leave,
    )


def open_view(
    settings: WorkerSettings,
    *,
    board: int,
    bells: Sequence[int],
    arena: Sequence[int],
    on_wake: Callable[[], None] | None = None,
) -> PoolView:
    """Map the device's memory in a worker, after the fork; on cuda this makes its context.

    ``arena``: the descriptors of the daemon's ``DaemonReady``; where tenants are separate one
    tenant's models to read, and *work* for a worker that runs code.

    Raises:
        ConfigError: not the descriptors of this device.
        CudaError, OSError: it cannot be mapped here.
    """
    bell = bells[settings.slot]
    options = settings.cuda
    if options is None:
        if len(arena) not in (1 if settings.separates_tenants else 2, 2):
            raise ConfigError(f"a cpu arena is two memfds, {len(arena)} came")
        models, work = arena[0], arena[1] if len(arena) == 2 else None
        return CpuPoolView(
            models=models,
            work=work,
            board=board,
            bell=bell,
            bells=bells,
            arena_bytes=settings.arena_bytes,
            words=settings.words,
            on_wake=on_wake,
            is_one_tenants=settings.separates_tenants,
        )
    if len(arena) != 1:
        raise ConfigError(f"a cuda arena comes with one memfd, {len(arena)} came")
    from .cuda.bindings import Cuda
    from .cuda.torch import torch_side
    from .cuda.view import CudaPoolView

    _show_only(options)
    side = torch_side(options.package, 0)
    view = CudaPoolView(
        Cuda.load(options.package),
        side,
        index=0,
        handle=settings.handle,
        words_descriptor=arena[0],
        board=board,
        bell=bell,
        bells=bells,
        arena_bytes=settings.arena_bytes,
        words=settings.words,
        waits=options.waits,
        use_graphs=options.use_graphs,
        graph_bytes=options.graph_bytes,
        on_wake=on_wake,
    )
    side.warm_up()  # before the slice: cached workspaces must not lie in it
    if options.slice_bytes:
        view.take_slice(options.slice_bytes)
    side.cap_private(options.private_bytes)
    return view


def _show_only(options: CudaOptions) -> None:
    """Each child sees one device, as number 0: a script's ``cuda:0`` is the right one."""
    if options.visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.visible


def _leave() -> None:
    """A broken context stays broken: other threads may hang in it, so this waits for none."""
    logging.shutdown()
    os._exit(STATUS_LOST)
