"""Execution of the scheduler's commands for one device: memory daemon, workers, control page."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from ..commits.commit_files import remove_unnamed
from ..frontend.frontend import Frontend
from ..ipc.control_page import ring
from ..ipc.messages import worker as worker_msg
from ..ipc.messages.base import Message, ModelName, OpId, ResourceLimits
from ..ipc.messages.daemon import (
    CommitPersisted,
    DaemonFault,
    DaemonReady,
    DaemonSettings,
    GroupCopy,
    PersistCommit,
    TransmitModel,
)
from ..programs.interface.layout import Wrapper
from ..scheduler.state import events as ev
from .children import Children
from .folders import StateDir
from .server_memory import DeviceShare, ServerMemory, close_soon

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerContext:
    """Parts of the server that all devices share."""

    sizes: ResourceLimits  # device 0's; only fields that are equal on all devices are read
    places: StateDir
    memory: ServerMemory
    shares: Sequence[DeviceShare]  # by device index
    children: Children
    frontend: Frontend
    take: Callable[[ev.Event], None]  # adds an event, which is handled after the current one
    # Failed registrations by the server: arguments of ``Names.mark_refused``.
    refused_models: list[tuple[ModelName, str, str]] = field(default_factory=list)


class HelperEffects(Protocol):
    """Executor of the commands for one kind of helper processes (seam ``EFFECTS``)."""

    def perform(self, command: ev.Spawn | ev.Send | ev.TakeResult) -> None: ...
    def check(
        self, address: ev.Address, wrapper: Wrapper, then: Callable[[str, str, int], None]
    ) -> None:
        """Check a wrapper before its model is built; then call ``then`` with the refused option,
        the reason, and the exit status of the process that checked."""

    def close(self) -> None: ...


def with_rows(group: GroupCopy, memory: memoryview) -> GroupCopy:
    """Return the order to copy rows, with their numbers from the pool."""
    rows = {0}  # padding looks up row 0
    for slab in group.indices:
        numbers = memory[slab.offset_bytes :][: slab.size_bytes]
        rows.update(np.frombuffer(numbers, slab.dtype).tolist())
    most = group.size_bytes // group.row_bytes
    return replace(group, indices=(), rows=tuple(sorted([row for row in rows if 0 <= row < most])))


class DeviceEffects:
    """Executor of the commands for one device; one method for each command.

    Args:
        index: the device's index in the server.
        sizes: sizes for this device.
        device: name of the device that the processes open: ``cpu`` or ``cuda:0``.
    """

    def __init__(
        self, context: ServerContext, index: int, sizes: ResourceLimits, device: str
    ) -> None:
        self._context = context
        self._share = context.shares[index]
        self._index = index
        self._device = device
        self._sizes, self._memory = sizes, context.memory
        self._children, self._take = context.children, context.take
        self._daemon_has: set[str] = set()  # tenants whose arena file the daemon has
        self._bound: dict[ev.Address, str] = {}  # worker -> the tenant that it serves
        self._handed: dict[ev.Address, dict[ModelName, str]] = {}  # worker -> digests it was sent
        # Files of the program that was sent last; at first /dev/null, to reserve two descriptors.
        self._opened = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(2)]

    def perform(
        self, command: ev.Send | ev.Spawn | ev.RaiseTurn | ev.Interrupt | ev.TakeBack
    ) -> None:
        match command:
            case ev.Send(ev.Address("worker")):
                self._to_worker(command)
            case ev.RaiseTurn(target, turn):
                self._share.control_page.write_turn(turn)
                ring(self._share.doorbells[target.slot])
            case ev.Send():
                self._to_daemon(command)
            case ev.Spawn(ev.Address("worker") as target):
                self._spawn_worker(target)
            case ev.Spawn(target):
                self._spawn_daemon(target)
            case ev.Interrupt(target, op_id, turn):
                self._share.control_page.write_stop(target.slot, op_id)
                if turn in (0, self._share.control_page.turn):
                    self._share.control_page.write_run(target.slot, True)
            case ev.TakeBack(target, op_id):
                self._share.control_page.write_taken_back(target.slot, op_id)
                ring(self._share.doorbells[target.slot])

    @property
    def _suffix(self) -> str:
        return f"-{self._index}" if self._index else ""

    # -- messages ------------------------------------------------------------------------------

    def _to_worker(self, command: ev.Send) -> None:
        target = command.target
        child = self._children.by_address.get(target)
        if child is None:
            return
        try:
            descriptors = self._commits_of(command)
            files = self._files_for(target, command.message)
            match command.message:
                case worker_msg.BindTenant(tenant=tenant):
                    self._bound[target] = tenant
                    descriptors += self._memory_for(command.message)
                case worker_msg.RunJob(spec=spec) if spec.group:
                    reader = self._index, target.slot, target.incarnation
                    descriptors += [one.of(spec.group, reader) for one in self._memory.groups]
        except OSError as error:  # the scheduler replaces a killed worker and tries again
            log.error("worker=%d not bound: %s", target.slot, error)
            self._children.kill(target)
            return
        index = 0 if command.channel == "task" else 1
        if isinstance(command.message, worker_msg.OPENING):
            self._share.control_page.write_run(target.slot, True)
        files = [*descriptors, *files]
        self._children.processes.send(child, index, command.message, files)

    def _commits_of(self, command: ev.Send) -> list[int]:
        """Return the commit area that a command needs, or []; raise OSError if it is missing."""
        if command.commits_of is None:
            return []
        if command.commits_of not in self._memory.commits:
            raise OSError(errno.ENOENT, f"job {command.commits_of} has no memory for its commits")
        return [self._memory.commits[command.commits_of]]

    def _image_of(self, command: ev.Send) -> list[int]:
        """Return the image that a command needs, or []; raise OSError if it is missing."""
        if command.image_of is None:
            return []
        if command.image_of not in self._memory.images:
            raise OSError(errno.ENOENT, f"job {command.image_of} has no memory for its image")
        return [self._memory.images[command.image_of]]

    def _memory_for(self, message: worker_msg.BindTenant) -> list[int]:
        """Return the files that a tenant's worker maps; if it runs code, also training slices."""
        pool, arena = self._memory.pool_of(message.tenant), self._share.arena_of(message.tenant)[1]
        return [pool, arena, *(self._share.arena if message.is_code else ())]

    def _files_for(self, target: ev.Address, message: Message) -> list[int]:
        """Return the descriptors for a message: the environment for code; program files for a
        sandboxed worker, which cannot open them. Each program's descriptors are sent once."""
        handed = self._handed[target]
        match message:
            case worker_msg.RunJob():
                return [self._memory.environment]
            case worker_msg.ForgetModel(model=model):
                handed.pop(model, None)
            case worker_msg.PrepareModel() | worker_msg.RunInference():
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
        """Open a program's files after closing the previous program's, to reuse the descriptors."""
        removed = [one for one in self._opened if not os.fstat(one).st_nlink]
        for descriptor in set(self._opened) - set(removed):
            os.close(descriptor)
        close_soon(removed)
        self._opened = self._context.places.open_program(digest)
        return self._opened

    def _to_daemon(self, command: ev.Send) -> None:
        child = self._children.by_address.get(command.target)
        if child is None or self._has_no_disk(command):
            return
        try:
            descriptors = self._commits_of(command) + self._image_of(command)
            if self._sizes.separates_tenants and isinstance(command.message, TransmitModel):
                descriptors += self._arena_for(command.message.tenant)
        except OSError as error:  # the scheduler repeats a command that ended in a fault
            op_id = getattr(command.message, "op_id", OpId(0))
            self._take(ev.Received(command.target, DaemonFault(op_id=op_id, reason=str(error))))
            return
        message = command.message
        if isinstance(message, TransmitModel) and message.groups and message.groups[0].indices:
            memory = self._context.frontend.pool.memory_of_tenant(message.tenant)
            rows, *groups = message.groups
            message = replace(message, groups=(with_rows(rows, memory), *groups))
        self._children.processes.send(child, 0, message, descriptors)

    def _arena_for(self, tenant: str) -> list[int]:
        """Return the file for a tenant's models, or [] if the daemon has it already."""
        if tenant in self._daemon_has:
            return []
        arena, _ = self._share.arena_of(tenant)
        self._daemon_has.add(tenant)
        return [arena]

    def _has_no_disk(self, command: ev.Send) -> bool:
        """Return True and report a failed commit if the disk budget has no space for it."""
        message = command.message
        if not isinstance(message, PersistCommit):
            return False
        size_bytes = self._memory.slot_bytes(message.job)
        disk, what = self._context.frontend.disk, f'a commit of "{message.job}"'
        if refusal := disk.refusal("", size_bytes, what):  # remove the previous commit
            remove_unnamed(Path(message.directory), keeps_older=False)
            refusal = disk.refusal("", size_bytes, what)
        if refusal is None:
            return False
        failed = CommitPersisted(job=message.job, op_id=message.op_id, step=-1, error=str(refusal))
        self._take(ev.Received(command.target, failed))
        return True

    # -- processes -----------------------------------------------------------------------------

    def _spawn_daemon(self, target: ev.Address) -> None:
        def on_message(message: Message, descriptors: list[int]) -> None:
            if isinstance(message, DaemonReady):
                self._share.take_arena(descriptors, message.handle)
            self._take(ev.Received(target, message))

        settings = DaemonSettings(
            device=self._device,
            limits=self._sizes,
            log_path=str(self._context.places.logs / f"memory-daemon{self._suffix}.log"),
        )
        descriptors = [
            self._memory.store,
            self._share.control_page_descriptor,
            *self._share.doorbells,
        ]
        self._share.drop_arenas()
        self._daemon_has.clear()
        self._children.fork(target, "pipeswitch-mem", settings, descriptors, on_message)

    def _spawn_worker(self, target: ev.Address) -> None:
        slot = target.slot

        def on_exit(status: int) -> None:
            begun = self._share.control_page.begun(slot)
            self._share.control_page.write_tiles(slot, 0, 0)
            del self._handed[target]
            self._context.frontend.pool.tidy(self._bound.pop(target, ""))
            for group in self._memory.groups:
                group.leave((self._index, slot, target.incarnation))
            self._take(ev.Exited(target, status, begun))

        self._children.kill(replace(target, incarnation=target.incarnation - 1))
        self._handed[target] = {}
        self._share.control_page.write_begun(slot, 0)
        settings = worker_msg.WorkerSettings(
            slot=slot, device=self._device, limits=self._sizes, handle=self._share.arena_handle
        )
        descriptors = [self._share.control_page_descriptor, *self._share.doorbells]
        if not self._sizes.separates_tenants:  # otherwise BindTenant brings these files
            descriptors += [self._memory.pool, *self._share.arena]
        name = f"pipeswitch-w{slot}{self._suffix}"
        self._children.fork(target, name, settings, descriptors, on_exit=on_exit)
