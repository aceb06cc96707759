"""Execution of commands for stage processes, and processes of kinds of requests."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from itertools import count
from typing import Final

from ..ipc.control_page import sealed_memfd
from ..ipc.messages.base import Message, Slot
from ..ipc.messages.stage import StageSettings
from ..scheduler.state.events import Address, Exited, Send, Spawn, TakeResult
from .device_effects import ServerContext

_NO_SLOT: Final = Slot(-1)
_GONE: Final = -9  # exit status that is reported if there was no memory for the process


class StageEffects:
    """Executor of the commands for stages. A slot keeps its result file when its process dies."""

    def __init__(self, context: ServerContext, result_bytes: int) -> None:
        self._context = context
        self._result_bytes = result_bytes
        self._children = context.children
        self._numbers = count(1)
        context.frontend.kinds.context.fork = self._fork
        self._results: dict[Slot, tuple[int, mmap.mmap]] = {}

    def perform(self, command: Spawn | Send | TakeResult) -> None:
        match command:
            case Spawn(target):
                self._spawn(target)
            case Send():
                self._send(command)
            case TakeResult(slot=slot):
                self._context.frontend.inference.take_result(
                    command, memoryview(self._results[slot][1])
                )

    def _spawn(self, target: Address) -> None:
        slot = target.slot
        try:
            if slot not in self._results:
                fd = sealed_memfd("pipeswitch-stage", self._result_bytes)
                self._results[slot] = fd, mmap.mmap(fd, self._result_bytes)
        except OSError:  # reported as an exit, like a failed fork; the scheduler tries again
            self._context.take(Exited(target, _GONE))
            return
        settings = StageSettings(result_bytes=self._result_bytes)
        descriptors = [self._results[slot][0], self._context.memory.environment]
        self._children.fork(target, f"pipeswitch-stg-{slot}", settings, descriptors)

    def _send(self, command: Send) -> None:
        memory, child = self._context.memory, self._children.by_address.get(command.target)
        if child is None:
            return
        try:
            pool = memory.pool_of(command.tenant) if command.tenant else memory.pool
        except OSError:  # no descriptor is left; the exit makes the scheduler try again
            self._children.kill(command.target)
        else:
            self._children.processes.send(child, 0, command.message, [pool])

    def _fork(
        self, name: str, settings: Message, on_end: Callable[[Message | None, int], None]
    ) -> None:
        """Start a process for a kind (``KindContext.fork``)."""
        messages: list[Message | None] = []

        def on_message(message: Message, _: list[int]) -> None:
            messages.append(message)

        def on_exit(status: int) -> None:
            on_end(messages[0] if messages else None, status)

        address = Address("stage", slot=_NO_SLOT, incarnation=next(self._numbers))
        self._children.fork(address, f"pipeswitch-{name}", settings, [], on_message, on_exit)

    def close(self) -> None:
        """Close the result files; call this after all processes have ended."""
        for descriptor, _ in self._results.values():
            os.close(descriptor)
