"""Device kinds: one folder for each, with three classes.

The server uses ``DeviceKind``, the memory daemon ``DeviceMemory``, and a worker ``WorkerDevice``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from ..ipc.messages.daemon import DaemonSettings
from ..ipc.messages.worker import WorkerSettings
from .memory import DeviceMemory
from .worker_device import WorkerDevice

if TYPE_CHECKING:
    from ..base.config import DeviceConfig

ASKED_FOR: Final = "asked for"  # ``ChosenDevice.why`` of a device that the user named


@dataclass(frozen=True, kw_only=True)
class ChosenDevice:
    """One device of a running server."""

    kind: DeviceKind
    name: str  # name that the user sees: cpu, cpu:1 or cuda:0
    why: str = ASKED_FOR
    arena_bytes: int = 0
    options: bytes = b""  # options of the kind, encoded for the device's processes
    # GPUs only: product name, UUID, mechanisms in use, and why other mechanisms are not used.
    title: str = ""
    uuid: str = ""
    rungs: str = ""
    reasons: tuple[str, ...] = ()


class DeviceKind(Protocol):
    """Kind of device, one for each folder (``registry.py`` lists all).

    The controller and the CLI call ``choose`` and ``reserve``. The device's processes call the
    ``open_*`` methods after the fork.
    """

    opened: str  # the name that processes open and profiles contain: ``cpu`` or ``cuda:0``
    is_host: bool  # it computes on the machine's cores, in the machine's memory
    can_confine: bool  # the sandbox works, and tenants can be separate

    def choose(
        self, config: DeviceConfig, name: str, *, workers: int, available_bytes: int
    ) -> ChosenDevice:
        """Examine a device; return it with its mechanisms and the size of its arena.

        Args:
            workers: number of processes that use the device, without the daemon.
            available_bytes: available memory of the machine.

        Raises:
            ConfigError: the device cannot be used; the error says why and what to do.
        """
        ...

    def reserve(self, device: ChosenDevice) -> AbstractContextManager[None]:
        """Reserve the device for this server while the context is open.

        Raises:
            PipeSwitchError: another server has reserved it.
        """
        ...

    def open_memory(
        self, settings: DaemonSettings, store: int, control_page: int, doorbells: Sequence[int]
    ) -> DeviceMemory:
        """Allocate the device's memory in the daemon. The caller keeps the descriptors.

        Args:
            doorbells: the workers' doorbells by slot, then the memory daemon's.

        Raises:
            CudaError, OSError: the memory cannot be allocated.
        """
        ...

    def open_view(
        self,
        settings: WorkerSettings,
        arena: Sequence[int],
        *,
        control_page: int,
        doorbells: Sequence[int],
    ) -> WorkerDevice:
        """Map the device's memory in a worker.

        Args:
            arena: the descriptors of the daemon's ``DaemonReady``. With separate tenants: one
                tenant's models (read-only), and the training slices if the worker runs code.

        Raises:
            CudaError, OSError: this process cannot map the memory.
        """
        ...
