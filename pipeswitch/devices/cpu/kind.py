"""Server side of a cpu device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from ...base.config import DeviceConfig
from ...ipc.messages.daemon import DaemonSettings
from ...ipc.messages.worker import WorkerSettings
from .. import ChosenDevice
from .memory import CpuDeviceMemory
from .view import CpuPoolView

ARENA_SHARE: Final = 10  # of what is available: one part in so many


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

    def held(self, device: ChosenDevice) -> AbstractContextManager[None]:
        """Hold nothing: any number of servers may share a cpu."""
        return nullcontext()

    def open_memory(
        self, settings: DaemonSettings, store: int, board: int, bells: Sequence[int]
    ) -> CpuDeviceMemory:
        """See ``DeviceKind``."""
        *workers, own = bells
        return CpuDeviceMemory(settings, store=store, board=board, bells=workers, bell=own)

    def open_view(
        self, settings: WorkerSettings, arena: Sequence[int], *, board: int, bells: Sequence[int]
    ) -> CpuPoolView:
        """See ``DeviceKind``."""
        return CpuPoolView(settings, arena, board=board, bells=bells)
