"""What a kind of device is: three protocols, which each folder here implements.

``DeviceKind`` is the server's side, ``DeviceMemory`` the memory daemon's, ``PoolView`` a worker's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from ..errors import PipeSwitchError
from ..ipc.board import Board
from ..ipc.messages import (
    ByteRange,
    DaemonSettings,
    Epoch,
    MoveTask,
    TransmitEnded,
    TransmitModel,
    WorkerSettings,
)

if TYPE_CHECKING:
    import torch

    from ..config import DeviceConfig
    from ..programs.executor import BoundProgram
    from ..programs.layout import TensorSpec


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
    """One for each folder (``kinds.py`` has them all). The controller and the CLI ask; the methods
    that open something run in its processes, after the fork."""

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

    def held(self, device: ChosenDevice) -> AbstractContextManager[None]:
        """It belongs to this server, as long as this lasts.

        Raises:
            PipeSwitchError: another server has it.
        """
        ...

    def open_memory(
        self, settings: DaemonSettings, store: int, bells: Sequence[int]
    ) -> DeviceMemory:
        """Take the device's memory; the descriptors stay the caller's.

        Raises:
            CudaError, OSError: the memory cannot be had.
        """
        ...

    def open_view(
        self, settings: WorkerSettings, arena: Sequence[int], *, board: int, bells: Sequence[int],
        on_wake: Callable[[], None] | None = None,
    ) -> PoolView:  # fmt: skip
        """Map the device's memory in a worker.

        Args:
            arena: the descriptors of the daemon's ``DaemonReady``; where tenants are separate one
                tenant's models to read, and *work* for a worker that runs code.

        Raises:
            CudaError, OSError: it cannot be mapped here.
        """
        ...


class DeviceMemory(Protocol):
    """The arena the memory daemon owns on one device. Sizes and offsets are bytes.

    All calls return at once; what takes time is reported through ``on_end`` callbacks, which run
    on the implementation's own thread.
    """

    arena_bytes: int
    store_bytes: int

    def export_descriptors(self) -> list[int]:
        """What a worker needs to map the same memory, in the order PoolView expects."""
        ...

    def export_handle(self) -> bytes:
        """What it needs beside descriptors: an IPC handle, or nothing."""
        ...

    def store_view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """A writable view of the host store, to load a model into."""
        ...

    def open_tenant(self, tenant: str, descriptor: int) -> None:
        """Where tenants are separate: the file for this one's models; it stays the caller's."""
        ...

    def transmit(self, order: TransmitModel, on_end: Callable[[TransmitEnded], None]) -> None:
        """Copy groups in order; after each, its arrival word becomes the epoch, then bells ring."""
        ...

    def cancel(self, epoch: Epoch) -> None:
        """Stop that transmission after the group in flight; its on_end still comes."""
        ...

    def read_slice(self, offset_bytes: int, ranges: Sequence[ByteRange], into: memoryview) -> None:
        """Device to host: concatenate pieces of a training slice into ``into`` (blocks)."""
        ...

    def scrub(self, offset_bytes: int, size_bytes: int) -> None:
        """Make a released range of a training slice read as zeros (blocks)."""
        ...

    def close(self) -> None: ...


class PoolView(Protocol):
    """The same memory, mapped by one worker. Used by its main thread, but for ``settle``."""

    @property
    def device(self) -> str:
        """Where tensors live, in torch's words: ``cpu`` or ``cuda:0``."""
        ...

    @property
    def board(self) -> Board: ...

    def prefault(self, offset_bytes: int, size_bytes: int) -> None:
        """Take a region's page faults now."""
        ...

    def enter(self, offset_bytes: int, size_bytes: int, last_word: int, epoch: Epoch) -> None:
        """A task on this region begins: no kernel can reach another's any more (cpu).

        Of the region itself it can reach what ``show`` says, all when ``last_word`` has risen. A
        task for the same region and epoch finds it as the last one left it.
        """
        ...

    def show(self, arrived_bytes: int) -> None:
        """The region's first bytes have arrived: kernels may read them."""
        ...

    def leave(self) -> None:
        """No kernel can reach a region any more, until the next ``enter`` (cpu)."""
        ...

    def tensor(self, spec: TensorSpec, region_offset_bytes: int) -> torch.Tensor:
        """A read-only tensor over a model's region; bounds are checked."""
        ...

    def slice_bytes(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """A writable uint8 tensor over a training slice."""
        ...

    def move(self, order: MoveTask, descriptors: Sequence[int]) -> int:
        """Copy the last slice to another device; the same addresses lead to it there (ADR 33).

        Turns are passed on over there from now on, and nothing of the old device stays mapped.

        Args:
            descriptors: as ``MoveTask`` says; this object's from now on.

        Returns:
            Bytes that were copied.

        Raises:
            OSError, RemoteProtocolError: it cannot; half of it may be done.
        """
        ...

    def program(self, bound: BoundProgram) -> BoundProgram:
        """The program as this device runs it; takes inputs that lie in host memory."""
        ...

    def can_improve(self, program: BoundProgram) -> bool:
        """Whether ``improve`` would do something."""
        ...

    def improve(self, program: BoundProgram) -> None:
        """An idle moment: make the next run of what ran last faster."""
        ...

    def drop(self, program: BoundProgram) -> None:
        """The program will not run again."""
        ...

    def computing(self, program: BoundProgram | None) -> AbstractContextManager[None]:
        """Around everything that a task enqueues, its copies in and out included."""
        ...

    def pin(self, pointer: int, size_bytes: int) -> None:
        """The request pool is mapped here: on cuda, make copies from and to it asynchronous; on
        cpu, put it out of reach but for what is lent."""
        ...

    def lend(self, offset_bytes: int, size_bytes: int, *, writable: bool) -> None:
        """Let kernels reach this slab of the pool, and no other (cpu)."""
        ...

    def take_back(self) -> None:
        """No kernel can reach a slab (cpu)."""
        ...

    def wait_group(self, word: int, epoch: Epoch) -> float:
        """Return when the word carries ``epoch``, or the device waits for it by itself.

        Milliseconds this thread was blocked.
        """
        ...

    def wait_turn(self, turn: int) -> float:
        """Return when the board's turn word is ``turn``; milliseconds blocked."""
        ...

    def raise_turn(self, turn: int, slot: int) -> None:
        """Hand the device to the worker in ``slot`` (called by the one who parks)."""
        ...

    def quiesce(self) -> None:
        """Return when everything this worker's main thread enqueued has run."""
        ...

    def settle(self) -> None:
        """Return when nothing that this process enqueued anywhere runs any more. Any thread."""
        ...

    def pacer(self) -> Callable[[], None] | None:
        """What a training script calls at every gate point, if it could run ahead of the device."""
        ...

    def is_lost(self, error: BaseException) -> bool:
        """Whether this process cannot use the device any more and must be replaced."""
        ...

    def fault(self) -> PipeSwitchError | None:
        """After a loss: what the task itself did, if it would do the same to the next worker."""
        ...

    def close(self) -> None: ...
