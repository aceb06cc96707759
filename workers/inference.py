"""One inference task: group by group, each as soon as it has arrived (PipeSwitch 4.2)."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeswitch.devices.cpu import CpuPoolView, now_ms
from pipeswitch.errors import PipeSwitchError, to_wire
from pipeswitch.messages import (
    InferenceDone,
    InferenceFailed,
    ModelName,
    PrepareModel,
    RunInference,
    SlabTensor,
)
from pipeswitch.programs.spec import load_manifest
from pipeswitch.wire import Channel

from .execute import BoundProgram, Program, load_program
from .pool import RequestPool


class Programs:
    """Structures this worker has loaded, and their parameters bound at home addresses."""

    def __init__(self, view: CpuPoolView) -> None:
        self._view = view
        self._programs: dict[ModelName, tuple[str, Program]] = {}
        self._bound: dict[ModelName, tuple[str, int, BoundProgram]] = {}

    def prepare(self, message: PrepareModel) -> None:
        """Load the structure; bind when the model has a home already."""
        self._program(message.model, message.digest, message.directory)
        if message.arena_offset_bytes >= 0:
            self.bound(message.model, message.digest, message.directory, message.arena_offset_bytes)

    def _program(self, model: ModelName, digest: str, directory: str) -> Program:
        known = self._programs.get(model)
        if known is not None and known[0] == digest:
            return known[1]
        program = load_program(directory, load_manifest(Path(directory)))
        self._programs[model] = (digest, program)
        self._bound.pop(model, None)
        return program

    def bound(self, model: ModelName, digest: str, directory: str, offset: int) -> BoundProgram:
        """The program with its parameters over the arena at ``offset``; cached: it seldom moves."""
        known = self._bound.get(model)
        if known is not None and known[:2] == (digest, offset):
            return known[2]
        program = self._program(model, digest, directory)
        bound = program.bind(lambda spec: self._view.tensor(spec, offset))
        self._bound[model] = (digest, offset, bound)
        return bound

    def forget(self, model: ModelName) -> None:
        self._programs.pop(model, None)
        self._bound.pop(model, None)

    def clear(self) -> None:
        self._programs.clear()
        self._bound.clear()


class _Groups:
    """Called before each group: waits for its arrival word, keeps the times for the bill."""

    def __init__(self, view: CpuPoolView, message: RunInference) -> None:
        self._view = view
        self._first_word = message.first_word
        self._epoch = message.residency_epoch
        self.begins_ms: list[float] = []
        self.ends_ms: list[float] = []
        self.stall_ms = 0.0

    def __call__(self, index: int) -> None:
        if self.begins_ms:
            self.ends_ms.append(now_ms())
        self.stall_ms += self._view.wait_group(self._first_word + index, self._epoch)
        self.begins_ms.append(now_ms())


def infer(
    message: RunInference,
    programs: Programs,
    pool: RequestPool,
    view: CpuPoolView,
    task: Channel,
    slot: int,
) -> None:
    """Run one request and report; the model's own failure leaves this worker in order."""
    received_at_ms = now_ms()
    try:
        bound = programs.bound(
            message.model, message.digest, message.directory, message.arena_offset_bytes
        )
        inputs = [pool.tensor(slab) for slab in message.inputs]
        view.wait_turn(message.epoch)
        turn_at_ms = now_ms()
        view.board.write_begun(slot, message.epoch)  # from here on a death may be the model's
        groups = _Groups(view, message)
        outputs = bound.run(inputs, groups)
        view.quiesce()
        slabs = _write(bound, outputs, message, pool)
        ended_at_ms = now_ms()
        groups.ends_ms.append(ended_at_ms)
    except Exception as error:  # the one place where a model's own code may fail
        view.wait_turn(message.epoch)  # an early failure still ends its turn in order
        task.send(_failure(message, error))
        return
    task.send(
        InferenceDone(
            epoch=message.epoch,
            outputs=slabs,
            received_at_ms=received_at_ms,
            turn_at_ms=turn_at_ms,
            first_group_at_ms=groups.begins_ms[0] if groups.begins_ms else turn_at_ms,
            ended_at_ms=ended_at_ms,
            stall_ms=groups.stall_ms,
            group_begins_at_ms=tuple(groups.begins_ms),
            group_ends_at_ms=tuple(groups.ends_ms),
        )
    )


def _write(
    bound: BoundProgram, outputs: list[torch.Tensor], message: RunInference, pool: RequestPool
) -> tuple[SlabTensor, ...]:
    names = [value.name for value in bound.manifest.outputs]
    return pool.write(names, outputs, message.reply_offset_bytes, message.reply_bytes)


def _failure(message: RunInference, error: Exception) -> InferenceFailed:
    if isinstance(error, PipeSwitchError):
        wire = to_wire(error)
        return InferenceFailed(
            epoch=message.epoch,
            error=wire["type"],
            message=wire["message"],
            data={key: str(value) for key, value in wire["data"].items()},
        )
    kind, text = type(error).__name__, str(error)[:2000]
    return InferenceFailed(
        epoch=message.epoch,
        error="TaskFailed",
        message=f'"{message.model}" raised {kind}: {text}',
        data={"type": kind, "text": text},
    )
