"""Server side of a cpu device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from ...base.config import DeviceConfig
from ...ipc.messages.daemon import DaemonSettings
from .. import ChosenDevice, DeviceKind
from .memory import CpuDeviceMemory
from .worker_device import CpuWorkerDevice

ARENA_SHARE: Final = 10  # the default arena is this fraction of the available memory: 1/10


class CpuKind:
    """See ``DeviceKind``."""

    opened = "cpu"
    is_host = True
    can_confine = True

    def choose(
        self, config: DeviceConfig, name: str, *, workers: int, available_bytes: int
    ) -> ChosenDevice:
        """Choose the cpu, which is always available."""
        arena = config.arena.resolve(available_bytes, available_bytes // ARENA_SHARE)
        return ChosenDevice(kind=self, name=name, arena_bytes=arena)

    def reserve(self, device: ChosenDevice) -> AbstractContextManager[None]:
        """Reserve nothing: any number of servers may share a cpu."""
        return nullcontext()

    def open_memory(
        self, settings: DaemonSettings, store: int, control_page: int, doorbells: Sequence[int]
    ) -> CpuDeviceMemory:
        *workers, own = doorbells
        return CpuDeviceMemory(
            settings, store=store, control_page=control_page, doorbells=workers, doorbell=own
        )

    open_view = staticmethod(CpuWorkerDevice)


KIND: Final[DeviceKind] = CpuKind()
