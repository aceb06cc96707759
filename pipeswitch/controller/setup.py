"""Memory sizes and scheduler settings, computed from the configuration and the machine."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import logging
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from ..base import failpoints
from ..base.config import Config
from ..base.errors import ConfigError
from ..base.extras import PARTS, QUEUES
from ..base.machine import available_bytes, cpu_count, processor_name
from ..base.units import format_bytes
from ..base.version import release
from ..devices import ChosenDevice
from ..ipc.messages.base import ResourceLimits
from ..planning.planned_groups import Identity
from ..policies import find_policy
from ..sandbox.confine import missing
from ..scheduler.processes.worker_pool import max_workers
from ..scheduler.scheduler import Scheduler, SchedulerSettings
from .folders import StateDir

log = logging.getLogger(__name__)

FENCE_COUNT: Final = 16384  # the fences take 64 KiB of a 2 MiB region
MAX_BUILDS: Final = 2  # concurrent builds: an endless build does not block other clients


def sizes_of(config: Config, devices: Sequence[ChosenDevice]) -> list[ResourceLimits]:
    """Turn ``auto`` and fractions into bytes; return the sizes of each device.

    Raises:
        ConfigError: the machine has too little memory, or a device does not support a setting.
    """
    available = available_bytes()
    store = config.host.store.resolve(available, available // 4)
    cores, sharers = cpu_count(), sum(one.kind.is_host for one in devices) or len(devices)
    is_sandboxed = _is_sandboxed(config, devices)
    common = ResourceLimits(
        arena_bytes=0,
        store_bytes=max(store, 1 << 20) & -4096,
        pool_bytes=config.server.pool_bytes & -4096,
        fence_count=FENCE_COUNT,
        doorbell_count=max_workers(config.workers.standby) + 1,  # workers and memory daemon
        threads=config.workers.threads or max(1, (cores - 1) // sharers),
        build_timeout_s=config.workers.build_timeout_ms / 1000.0,
        build_memory_bytes=config.workers.build_memory.resolve(available, available * 3 // 4),
        task_memory_bytes=config.workers.task_memory.resolve(available, available // 2),
        is_sandboxed=is_sandboxed,
        separates_tenants=_separates_tenants(config, devices, is_sandboxed=is_sandboxed),
        packs_weights=all(one.kind.is_host for one in devices),
        link_bytes_per_s=config.device.link_gbps * 1e9,
        log_bytes=config.log.max_bytes,
    )
    sizes = [
        msgspec.structs.replace(
            common, arena_bytes=max(one.arena_bytes, 4 << 20) & -(2 << 20), options=one.options
        )
        for one in devices
    ]
    _check_room(sizes, devices, available)
    return sizes


def _check_room(
    sizes: Sequence[ResourceLimits], devices: Sequence[ChosenDevice], available_bytes: int
) -> None:
    """Check that the sizes fit; otherwise the kernel would kill processes later.
    Raises ConfigError: the machine, or this process's cgroup, has less than the server would
    take."""
    needs = {"host store": sizes[0].store_bytes, "request pool": sizes[0].pool_bytes}
    arenas = [
        one.arena_bytes for one, device in zip(sizes, devices, strict=True) if device.kind.is_host
    ]
    if arenas:
        needs["arena" if len(arenas) == 1 else "arenas"] = sum(arenas)
    if sum(needs.values()) > available_bytes:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in needs.items())
        raise ConfigError(
            f"the server needs {format_bytes(sum(needs.values()))} of memory ({parts}); "
            f"{format_bytes(available_bytes)} are available",
            hint="reduce --arena or --host-store, or raise the container's limit",
        )


def _is_sandboxed(config: Config, devices: Sequence[ChosenDevice]) -> bool:
    """Return True if clients' programs run in the sandbox on all devices; log missing parts.
    Raises ConfigError: the sandbox is required, and a part of it is missing on this machine."""
    mode = config.security.sandbox
    open_ones = [device.name for device in devices if not device.kind.can_confine]
    lacks = tuple(f"a sandbox on {name}" for name in open_ones) or missing()
    if mode == "off":
        log.warning("sandbox=off: clients' programs run without a sandbox")
    elif lacks:
        text = f"this machine lacks {' and '.join(lacks)}"
        if mode == "require":
            raise ConfigError(f"[security] sandbox is required, and {text}")
        log.warning("sandbox=incomplete: %s", text)
    elif failpoints.are_enabled():
        log.warning(
            "sandbox=off: failpoints are on, and a sandboxed process cannot open their files"
        )
    return mode != "off" and not open_ones and "seccomp" not in lacks


def _separates_tenants(
    config: Config, devices: Sequence[ChosenDevice], *, is_sandboxed: bool
) -> bool:
    """Return True if each process serves one tenant only.
    Raises ConfigError: separate tenants are required, but impossible on a device or this
    machine."""
    if config.security.tenants == "shared":
        return False
    lacks = ""
    if not is_sandboxed or missing():  # without Landlock a builder can read all programs
        lacks = "all of the sandbox: processes could open each other's memory and files"
    for device in devices:
        if not device.kind.can_confine:
            lacks = f"the cpu device: on {device.name} a process can read all of the arena"
    if lacks:
        raise ConfigError(
            f'[security] tenants = "separate" needs {lacks}',
            hint='tenants = "shared", or a server for each tenant',
        )
    return True


def identity_of(device: ChosenDevice, sizes: ResourceLimits) -> Identity:
    """Return the facts about the machine with which this server's profiles are valid."""
    return Identity(
        device=device.kind.opened,
        name=device.title or processor_name(),
        cores=cpu_count(),
        threads=sizes.threads,
        link_bytes_per_s=sizes.link_bytes_per_s,
        pipeswitch=release(),
        torch=importlib.metadata.version("torch"),  # the controller never imports torch
    )


def make_scheduler(
    config: Config,
    devices: Sequence[ChosenDevice],
    sizes: Sequence[ResourceLimits],
    places: StateDir,
) -> Scheduler:
    """Return a scheduler with the settings of the machine and of each device."""
    options, machine = config.scheduler, sizes[0]
    known = {field.name for field in dataclasses.fields(SchedulerSettings)}
    of_section = {
        name: getattr(options, name) for name in known.intersection(options.__struct_fields__)
    }
    settings = SchedulerSettings(
        **of_section,
        store_bytes=machine.store_bytes,
        fence_count=machine.fence_count,
        standby=config.workers.standby,
        max_builds=MAX_BUILDS,
        max_models_per_client=config.server.max_models_per_client,
        weights=config.tenants,
        restart_backoff_ms=config.workers.restart_backoff_ms,
        keep_versions=config.jobs.keep_versions,
        keep_jobs=config.jobs.keep.count,
        keep_jobs_ms=config.jobs.keep.time_ms,
        unix_offset_ms=(time.time() - time.monotonic()) * 1000.0,
        is_sandboxed=machine.is_sandboxed,
        separates_tenants=machine.separates_tenants,
        models_dir=str(places.models),
        logs_dir=str(places.logs),
        job_log_bytes=config.log.max_bytes,
        commits_dir=str(places.commits),
        published_dir=str(places.published),
    )
    policy = find_policy(options.policy, max_wait_ms=options.max_wait_ms)
    each = [
        dataclasses.replace(
            settings,
            device=device.name,
            arena_bytes=one.arena_bytes,
            max_swapped=options.max_swapped if device.kind.is_host else min(options.max_swapped, 1),
            slices_move=device.kind.is_host,
            identity=identity_of(device, one),
        )
        for device, one in zip(devices, sizes, strict=True)
    ]
    queues = {kind: functools.partial(QUEUES.load(kind), config) for kind in QUEUES.names()}
    parts = [PARTS.load(name) for name in PARTS.names()]
    return Scheduler(settings, policy, options.max_wait_ms, each, queues, parts)
