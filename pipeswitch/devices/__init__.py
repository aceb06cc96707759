"""Device kinds: one folder for each, with three classes.

``DeviceKind`` is the server's side, ``DeviceMemory`` the memory daemon's, ``WorkerDevice`` a
worker's.
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

ASKED_FOR: Final = "asked for"  # why there is no more to say about a device


@dataclass(frozen=True, kw_only=True)
class ChosenDevice:
    """One device of a running server."""

    kind: DeviceKind
    name: str  # cpu, cpu:1 or cuda:0, as the user knows it
    why: str = ASKED_FOR
    arena_bytes: int = 0
    options: bytes = b""  # for its processes: the kind's own
    # Empty where there is nothing to choose: the device's own name and id, which of the
    # mechanisms serve, and why not others.
    title: str = ""
    uuid: str = ""
    rungs: str = ""
    reasons: tuple[str, ...] = ()


class DeviceKind(Protocol):
    """Kind of devices, one for each folder (``kinds.py`` has them all).

    The controller and the CLI call it; the methods that open something run in its processes, after
    the fork.
    """

    opened: str  # what its processes open, and what a profile is of: ``cpu``, ``cuda:0``
    is_host: bool  # it computes on the machine's cores, in the machine's memory
    can_confine: bool  # programs can run in the sandbox, and tenants apart

    def choose(
        self, config: DeviceConfig, name: str, *, workers: int, available_bytes: int
    ) -> ChosenDevice:
        """Find out what works there, and how large its arena is.

        Args:
            workers: processes beside the daemon.
            available_bytes: of the machine's memory.

        Raises:
            ConfigError: it cannot be had: says why and what to do.
        """
        ...

    def reserve(self, device: ChosenDevice) -> AbstractContextManager[None]:
        """Hold the device for this server while the context is open.

        Raises:
            PipeSwitchError: another server holds it.
        """
        ...

    def open_memory(
        self, settings: DaemonSettings, store: int, control_page: int, doorbells: Sequence[int]
    ) -> DeviceMemory:
        """Take the device's memory; the descriptors stay the caller's.

        Args:
            doorbells: of the workers, by slot, and behind them the memory daemon's own.

        Raises:
            CudaError, OSError: the memory cannot be had.
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
            arena: the descriptors of the daemon's ``DaemonReady``; where tenants are separate one
                tenant's models to read, and *work* for a worker that runs code.

        Raises:
            CudaError, OSError: it cannot be mapped here.
        """
        ...
