"""Performs the scheduler's commands about stages: processes, and the memory they return in."""

from __future__ import annotations

import mmap
import os
from typing import Final

from ..ipc.board import sealed_memfd
from ..ipc.messages import Epoch, Message, Slot, StageSettings
from ..scheduler.events import FromStage, KillStage, SpawnStage, StageExited, TakeResult, ToStage
from .device import Ground
from .processes import Child

_GONE: Final = -9  # the status of a process that there was no memory for


class StageEffects:
    """One method per command. Results of a slot lie in one file, whichever process it has."""

    def __init__(self, ground: Ground, result_bytes: int) -> None:
        self._ground = ground
        self._result_bytes = result_bytes
        self._children: dict[Slot, Child] = {}
        self._results: dict[Slot, tuple[int, mmap.mmap]] = {}

    def perform(self, command: SpawnStage | ToStage | KillStage | TakeResult) -> None:
        match command:
            case SpawnStage(slot=slot, generation=generation):
                self._spawn(slot, generation)
            case ToStage():
                self._send(command)
            case KillStage(slot=slot):
                if slot in self._children:  # else it was never forked
                    self._ground.processes.kill(self._children[slot])
            case TakeResult(slot=slot):
                self._ground.frontend.inference.take_result(
                    command, memoryview(self._results[slot][1])
                )

    def _spawn(self, slot: Slot, generation: Epoch) -> None:
        take = self._ground.take

        def on_message(message: Message, _: list[int]) -> None:
            take(FromStage(slot=slot, generation=generation, message=message))

        def on_exit(status: int) -> None:
            take(StageExited(slot=slot, generation=generation, status=status))

        try:
            if slot not in self._results:
                made = sealed_memfd("pipeswitch-stage", self._result_bytes)
                self._results[slot] = made, mmap.mmap(made, self._result_bytes)
        except OSError:  # as where it cannot be forked: it is tried again
            on_exit(_GONE)
            return
        self._children[slot] = self._ground.processes.fork(
            "stage", f"pipeswitch-stg-{slot}", StageSettings(result_bytes=self._result_bytes), 1,
            [self._results[slot][0], self._ground.memory.environment], on_message, on_exit,
        )  # fmt: skip

    def _send(self, command: ToStage) -> None:
        memory, child = self._ground.memory, self._children[command.slot]
        try:
            pool = memory.pool_of(command.tenant) if command.tenant else memory.pool
        except OSError:  # no descriptor is left: as if the process had died
            self._ground.processes.kill(child)
        else:
            self._ground.processes.send(child, 0, command.message, [pool])

    def close(self) -> None:
        """No process is left."""
        for descriptor, _ in self._results.values():
            os.close(descriptor)
