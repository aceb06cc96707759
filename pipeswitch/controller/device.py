"""Performs the scheduler's commands about one device: its memory daemon, its workers, its board."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..commits.files import remove_unnamed
from ..frontend.frontend import Frontend
from ..ipc import messages as msg
from ..ipc.board import ring
from ..scheduler import events as ev
from .folders import Places
from .processes import Child, Processes
from .shared_memory import DeviceShare, Memory, Sizes, close_soon

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What all devices of the server stand on."""

    sizes: Sizes  # of what is the machine's
    places: Places
    memory: Memory
    shares: Sequence[DeviceShare]  # by the device's place
    processes: Processes
    frontend: Frontend
    take: Callable[[ev.Event], None]  # an event, to be handled after the running one


class DeviceEffects:
    """One method per command.

    Args:
        index: its place among the server's devices.
        sizes: its own.
        device: what its processes open: ``cpu``, or ``cuda:0``.
    """

    def __init__(self, ground: Ground, index: int, sizes: Sizes, device: str) -> None:
        self._ground = ground
        self._share = ground.shares[index]
        self._index = index
        self._device = device
        self._sizes, self._memory = sizes, ground.memory
        self._processes, self._take = ground.processes, ground.take
        self._daemon: Child | None = None
        self._daemon_generation = 0
        self._daemon_has: set[str] = set()  # tenants' files of the arena
        self._workers: dict[msg.Slot, tuple[int, Child]] = {}
        self._bound: dict[tuple[msg.Slot, int], str] = {}  # by slot and generation: whose it is
        self._handed: dict[msg.Slot, dict[msg.ModelName, str]] = {}  # digests, by the model's name
        # The files of the program that was handed over last; before that, as many of nothing.
        self._opened = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(2)]

    def perform(self, command: ev.OfDevice) -> None:
        match command:
            case ev.ToWorker():
                self._to_worker(command)
            case ev.RaiseTurn(turn=turn, slot=slot):
                self._share.board.write_turn(turn)
                ring(self._share.bells[slot])
            case ev.ToDaemon():
                self._to_daemon(command)
            case ev.SpawnWorker(slot=slot, generation=generation):
                self._spawn_worker(slot, generation)
            case ev.SpawnDaemon(generation=generation):
                self._spawn_daemon(generation)
            case ev.KillWorker(slot=slot, generation=generation, reason=reason):
                self._kill_worker(slot, generation, reason)
            case ev.Interrupt(slot=slot, epoch=epoch):
                self._share.board.write_stop(slot, epoch)

    @property
    def _suffix(self) -> str:
        """Of what processes and logs of the devices after the first are called."""
        return f"-{self._index}" if self._index else ""

    # -- messages ------------------------------------------------------------------------------

    def _to_worker(self, command: ev.ToWorker) -> None:
        known = self._workers.get(command.slot)
        if known is None:
            return
        try:
            descriptors = self._commits_of(command)
            files = self._files_for(command.slot, command.message)
            match command.message:
                case msg.BindTenant(tenant=tenant):
                    self._bound[command.slot, known[0]] = tenant
                    descriptors += self._memory_for(command.message)
                case msg.RunJob(share=group) if group:
                    reader = self._index, command.slot, known[0]
                    descriptors.append(self._memory.ring_of(group, reader))
        except OSError as error:  # as where it cannot be forked: it is tried again
            log.error("worker=%d not bound: %s", command.slot, error)
            self._processes.kill(known[1])
            return
        index = 0 if command.channel == "task" else 1
        self._processes.send(known[1], index, command.message, [*descriptors, *files])

    def _commits_of(self, command: ev.ToWorker | ev.ToDaemon) -> list[int]:
        """
        Raises:
            OSError: the files could not be created; the job is being cancelled.
        """
        if command.commits_of is None:
            return []
        if command.commits_of not in self._memory.commits:
            raise OSError(errno.ENOENT, f"job {command.commits_of} has no memory for its commits")
        return [self._memory.commits[command.commits_of]]

    def _memory_for(self, message: msg.BindTenant) -> list[int]:
        """What one tenant's worker maps; training slices where it may run scripts."""
        pool, arena = self._memory.pool_of(message.tenant), self._share.arena_of(message.tenant)[1]
        return [pool, arena, *(self._share.arena if message.is_code else ())]

    def _files_for(self, slot: msg.Slot, message: msg.Message) -> list[int]:
        """What comes last with a message, and once for each program: for code the environment; for
        a worker in the sandbox, which opens none, the program's files."""
        handed = self._handed[slot]
        match message:
            case msg.RunJob():
                return [self._memory.environment]
            case msg.ForgetModel(model=model):
                handed.pop(model, None)
            case msg.PrepareModel() | msg.RunInference():
                if handed.get(message.model) == message.digest:
                    return []
                handed[message.model] = message.digest
                if message.is_code:
                    return [self._memory.environment]
                if self._sizes.is_sandboxed:
                    return self._open_program(message.digest)
            case _:
                pass
        return []

    def _open_program(self, digest: str) -> list[int]:
        """Those of the last one make room for it: a server that is out of descriptors still can."""
        removed = [one for one in self._opened if not os.fstat(one).st_nlink]
        for descriptor in set(self._opened) - set(removed):
            os.close(descriptor)
        close_soon(removed)
        self._opened = self._ground.places.open_program(digest)
        return self._opened

    def _to_daemon(self, command: ev.ToDaemon) -> None:
        if self._daemon is None or self._has_no_disk(command.message):
            return
        try:
            descriptors = self._commits_of(command)
            if self._sizes.separates_tenants and isinstance(command.message, msg.TransmitModel):
                descriptors += self._arena_for(command.message.tenant)
        except OSError as error:  # it is tried again
            epoch = getattr(command.message, "epoch", msg.Epoch(0))
            fault = msg.DaemonFault(epoch=epoch, reason=str(error))
            self._take(self._from_daemon(self._daemon_generation, fault))
            return
        self._processes.send(self._daemon, 0, command.message, descriptors)

    def _arena_for(self, tenant: str) -> list[int]:
        """The file that the daemon copies this tenant's models into, once for each."""
        if tenant in self._daemon_has:
            return []
        arena, _ = self._share.arena_of(tenant)
        self._daemon_has.add(tenant)
        return [arena]

    def _from_daemon(self, generation: int, message: msg.Message) -> ev.FromDaemon:
        return ev.FromDaemon(generation=generation, message=message, device=self._index)

    def _has_no_disk(self, message: msg.Message) -> bool:
        """A commit that the disk's budget has no room for: the older one on disk stays."""
        if not isinstance(message, msg.PersistCommit):
            return False
        size_bytes = self._memory.slot_bytes(message.job)
        disk, what = self._ground.frontend.disk, f'a commit of "{message.job}"'
        if refusal := disk.refusal("", size_bytes, what):  # the previous commit is removed
            remove_unnamed(Path(message.directory), keeps_older=False)
            refusal = disk.refusal("", size_bytes, what)
        if refusal is None:
            return False
        failed = msg.CommitPersisted(
            job=message.job, epoch=message.epoch, step=-1, error=str(refusal)
        )
        self._take(self._from_daemon(self._daemon_generation, failed))
        return True

    # -- processes -----------------------------------------------------------------------------

    def _spawn_daemon(self, generation: int) -> None:
        def on_message(message: msg.Message, descriptors: list[int]) -> None:
            if isinstance(message, msg.DaemonReady):
                self._share.take_arena(descriptors, message.handle)
            self._take(self._from_daemon(generation, message))

        def on_exit(status: int) -> None:
            self._take(ev.DaemonExited(generation=generation, status=status, device=self._index))

        settings = msg.DaemonSettings(
            device=self._device,
            arena_bytes=self._sizes.arena_bytes,
            store_bytes=self._sizes.store_bytes,
            words=self._sizes.words,
            link_bytes_per_s=self._sizes.link_bytes_per_s,
            separates_tenants=self._sizes.separates_tenants,
            options=self._sizes.options,
            log_path=str(self._ground.places.logs / f"memory-daemon{self._suffix}.log"),
            log_bytes=self._sizes.log_bytes,
        )
        descriptors = [self._memory.store, self._share.board_descriptor, *self._share.bells]
        self._share.drop_arenas()
        self._daemon_has.clear()
        self._daemon_generation = generation
        self._daemon = self._processes.fork(
            "daemon", "pipeswitch-mem", settings, 1, descriptors, on_message, on_exit
        )

    def _hearing(
        self, slot: msg.Slot, generation: int
    ) -> tuple[Callable[[msg.Message, list[int]], None], Callable[[int], None]]:
        """What is done with a worker's messages, and with its exit."""

        def on_message(message: msg.Message, _: list[int]) -> None:
            self._take(
                ev.FromWorker(slot=slot, generation=generation, message=message, device=self._index)
            )

        def on_exit(status: int) -> None:
            begun = self._share.board.begun(slot)
            self._share.board.write_tiles(slot, 0, 0)
            self._ground.frontend.pool.tidy(self._bound.pop((slot, generation), ""))
            self._memory.leave_ring((self._index, slot, generation))
            self._take(
                ev.WorkerExited(
                    slot=slot,
                    generation=generation,
                    status=status,
                    begun_epoch=begun,
                    device=self._index,
                )
            )

        return on_message, on_exit

    def _spawn_worker(self, slot: msg.Slot, generation: int) -> None:
        known = self._workers.get(slot)
        if known is not None:
            self._processes.kill(known[1])  # replaced; one that has left is not there any more
        self._handed[slot] = {}
        self._share.board.write_begun(slot, 0)
        settings = msg.WorkerSettings(
            slot=slot,
            device=self._device,
            arena_bytes=self._sizes.arena_bytes,
            words=self._sizes.words,
            pool_bytes=self._sizes.pool_bytes,
            threads=self._sizes.threads,
            bell_count=len(self._share.bells),
            handle=self._share.arena_handle,
            is_sandboxed=self._sizes.is_sandboxed,
            task_memory_bytes=self._sizes.task_memory_bytes,
            separates_tenants=self._sizes.separates_tenants,
            link_bytes_per_s=self._sizes.link_bytes_per_s,
            options=self._sizes.options,
        )
        descriptors = [self._share.board_descriptor, *self._share.bells]
        if not self._sizes.separates_tenants:  # else with BindTenant
            descriptors += [self._memory.pool, *self._share.arena]
        child = self._processes.fork(
            "worker",
            f"pipeswitch-w{slot}{self._suffix}",
            settings,
            2,
            descriptors,
            *self._hearing(slot, generation),
        )
        self._workers[slot] = (generation, child)

    def _kill_worker(self, slot: msg.Slot, generation: int, reason: str) -> None:
        known = self._workers.get(slot)
        if known is not None and known[0] == generation:
            log.warning("worker=%d killed: %s", slot, reason)
            self._processes.kill(known[1])
