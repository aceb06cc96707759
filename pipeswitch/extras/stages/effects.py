"""Controller's side of stage processes: commands, checks of functions, and of their results."""

from __future__ import annotations

import dataclasses
import mmap
import os
import signal
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from ...base.config import Config
from ...base.errors import InvalidInput, PipeSwitchError, TaskFailed
from ...controller.device_effects import ServerContext
from ...frontend.inference import Inference
from ...frontend.intake.validation import ValidatedRequest, check_infer
from ...ipc.control_page import sealed_memfd
from ...ipc.messages.base import Message, Slot
from ...ipc.messages.helper import HelperFailed, HelperReady, HelperSettings
from ...ipc.messages.run import Run
from ...scheduler.state import events as ev
from ...scheduler.state.versions import split_name
from ...wire.frames import RequestHeader
from .chain_requests import as_request
from .wrapper import CheckSettings, Stages

_GONE: Final = -9  # exit status that is reported if there was no memory for the process


class StageEffects:
    """Executor of the commands for stages. A slot keeps its result file when its process dies."""

    def __init__(self, context: ServerContext, config: Config) -> None:
        self._context = context
        self._result_bytes = config.server.max_message_bytes
        self._timeout_s = config.preprocess.max_time_ms / 1000.0
        self._children = context.children
        self._results: dict[Slot, tuple[int, mmap.mmap]] = {}

    def perform(self, command: ev.Spawn | ev.Send | ev.TakeResult) -> None:
        match command:
            case ev.Spawn(target):
                self._spawn(target)
            case ev.Send():
                self._send(command)
            case ev.TakeResult(target=target):
                memory = memoryview(self._results[target.slot][1])
                take_result(self._context.frontend.inference, command, memory)

    def _spawn(self, target: ev.Address) -> None:
        slot = target.slot
        try:
            if slot not in self._results:
                fd = sealed_memfd("pipeswitch-stage", self._result_bytes)
                self._results[slot] = fd, mmap.mmap(fd, self._result_bytes)
        except OSError:  # reported as an exit, like a failed fork; the scheduler tries again
            self._context.take(ev.Exited(target, _GONE))
            return
        settings = HelperSettings(kind="stage")
        descriptors = [self._context.memory.environment, self._results[slot][0]]
        self._children.fork(target, f"pipeswitch-stg-{slot}", settings, descriptors)

    def _send(self, command: ev.Send) -> None:
        memory, child = self._context.memory, self._children.by_address.get(command.target)
        if child is None:
            return
        try:
            pool = memory.pool_of(command.tenant) if command.tenant else memory.pool
        except OSError:  # no descriptor is left; the exit makes the scheduler try again
            self._children.kill(command.target)
        else:
            self._children.processes.send(child, 0, command.message, [pool])

    def check(
        self, address: ev.Address, stages: Stages, then: Callable[[str, str, int], None]
    ) -> None:
        """Import a registration's functions in a process, as ``HelperEffects`` says."""
        messages: list[Message] = []
        functions = tuple(one for one in (stages.before, stages.after) if one)

        def on_exit(status: int) -> None:
            match messages:
                case [HelperReady()] if status == 0:
                    then("", "", status)
                    return
                case [HelperFailed(reason=text)]:
                    reason = ""
                case _ if status == -signal.SIGALRM:
                    reason = "importing it took longer than [preprocess] max_time allows"
                case _:
                    reason = f"importing it ended the process with status {status}"
            if reason:
                text = f"{' and '.join(functions)}: {reason}"
            is_first = stages.before and text.startswith(stages.before)
            then("preprocess" if is_first else "postprocess", text, status)

        names = tuple(one.name for one in stages.inputs)
        values = msgspec.msgpack.encode(CheckSettings(functions, names, self._timeout_s))
        self._children.fork(
            address,
            "pipeswitch-chk",
            HelperSettings(kind="stage_check", values=values),
            [self._context.memory.environment],
            lambda message, _: messages.append(message),
            on_exit,
        )

    def close(self) -> None:
        """Close the result files; call this after all processes have ended."""
        for descriptor, _ in self._results.values():
            os.close(descriptor)


def take_result(inference: Inference, command: ev.TakeResult, memory: memoryview) -> None:
    """Replace the inputs in the pool by a function's result. Then send ``Prepared``,
    which has the error if the result is invalid.

    ``memory`` is shared with the function's process, which waits for ``Prepared``.
    """
    requests = inference.requests
    pending = requests.find(command.token)
    prepared = ev.Prepared(token=command.token, source=command.target)
    if pending is None:
        inference.take(prepared)
        return
    try:
        tensors = [memory[one.offset_bytes :][: one.size_bytes] for one in command.outputs]
        admit = _admit_answer if command.is_computed else _admit_result
        header = as_request(command.model, ((one.name, one) for one in command.outputs))
        admitted, announced = admit(inference, command, header, [len(one) for one in tensors])
        holder = pending.allocation.holder if pending.allocation is not None else ""
        requests.clear(pending)  # the inputs no longer count toward the share
        allocation = pending.allocation = requests.pool.reserve(
            holder, admitted.input_bytes, admitted.reply_bytes, announced.tenant
        )
    except PipeSwitchError as error:
        inference.take(replace(prepared, error=error))
        return
    run = Run(
        request_id=pending.request_id,
        inputs=allocation.place(admitted.inputs, in_reply=command.is_computed),
        reply_offset_bytes=allocation.reply_offset_bytes,
        reply_bytes=allocation.reply_bytes,
    )
    prepared = replace(prepared, run=run, digest=announced.manifest.digest)

    def on_copied(error: PipeSwitchError | None) -> None:
        inference.take(replace(prepared, error=error))

    payload = [tensors[item.frame] for item in admitted.inputs]
    inference.copy(run.inputs, payload, allocation.tenant, on_copied)


def _admit_result(
    inference: Inference, command: ev.TakeResult, header: RequestHeader, sizes: Sequence[int]
) -> tuple[ValidatedRequest, ev.ModelAvailable]:
    """Check that a model accepts the result of its preprocessing function.
    Raises TaskFailed: the model refuses it (the message has both signatures and the function);
    ModelNotFound: the model was removed in the meantime."""
    announced = inference.models.version(*split_name(command.model))
    announced = replace(announced, wrapper=None)
    try:
        return inference.models.admit(header, sizes, announced), announced
    except InvalidInput as error:
        raise TaskFailed(
            f"preprocess {command.function} returned invalid inputs for its model: {error.message}",
            hint=error.hint,
        ) from None


def _admit_answer(
    inference: Inference, command: ev.TakeResult, header: RequestHeader, sizes: Sequence[int]
) -> tuple[ValidatedRequest, ev.ModelAvailable]:
    """Check that a postprocessing function returned the values that it declared.
    Raises TaskFailed: the values differ, or the model was registered again without the function."""
    models, (name, version) = inference.models, split_name(command.model)
    announced = models.versions.get((name, version)) or models.current.get(name)
    stages = None if announced is None else announced.wrapper
    if announced is None or not isinstance(stages, Stages) or not stages.after:
        raise TaskFailed(f'"{name}" has changed in the meantime', hint="ask again")
    as_model = replace(announced, wrapper=None, manifest=stages.answer(announced.manifest))
    try:
        request = check_infer(header, sizes, as_model, models.max_bytes)
    except InvalidInput as error:
        raise TaskFailed(
            f"postprocess {command.function} did not return what --returns declares: "
            f"{error.message}"
        ) from None
    return dataclasses.replace(request, input_bytes=0, reply_bytes=request.input_bytes), announced
