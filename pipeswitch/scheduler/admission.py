"""Requests at the door of the machine: admitted to a device's queue, refused, taken back."""

from __future__ import annotations

from dataclasses import replace

from ..errors import (
    Cancelled,
    ModelNotFound,
    PipeSwitchError,
    QueueFull,
    ServerUnavailable,
)
from ..ipc.messages import ModelName
from .core import Core
from .endings import batch_of, quarantined
from .events import CancelAsked, InferArrived
from .forecast import hopeless_at_ms, is_hopeless, is_worth_a_probe, too_late, will_be_measured
from .machine import Machine
from .records import Model, Request
from .states import MODEL_AWAITED, ModelState, TaskEvent
from .versions import Versions, split_name


class Admission:
    """Which requests may wait."""

    def __init__(self, core: Core, machine: Machine, versions: Versions) -> None:
        self._core = core
        self._versions = versions
        self._machine = machine

    def arrived(self, event: InferArrived) -> None:
        """Admit a request or answer it at once."""
        core = self._core
        event = self._of_a_version_that_is_there(event)
        refusal = self._refusal(event)
        if refusal is not None:
            core.refuse(event.token, refusal)
            return
        manifest = self._machine.models[event.model].built
        request = Request(
            token=event.token,
            request_id=event.request_id,
            model=event.model,
            priority=event.priority,
            deadline_at_ms=event.deadline_at_ms,
            inputs=event.inputs,
            reply_offset_bytes=event.reply_offset_bytes,
            reply_bytes=event.reply_bytes,
            arrived_at_ms=core.now_ms,
            batch=batch_of(manifest, event.inputs),
            size_bytes=manifest.total_bytes,
        )
        device = self._machine.device.state
        is_early = self._machine.models[request.model].state.state in MODEL_AWAITED
        if not is_early and is_hopeless(device, request):
            request.is_probe = is_worth_a_probe(device, request)
            if not request.is_probe:
                core.refuse(event.token, too_late(device, request))
                return
        if not is_early:
            will_be_measured(device, request)
        request.hopeless_at_ms = hopeless_at_ms(device, request)
        device.requests[request.token] = request
        (device.early if is_early else device.queue).add(request)
        for at_ms in (request.hopeless_at_ms, request.deadline_at_ms):
            if at_ms is not None:
                core.look_again(at_ms)
                break

    def _of_a_version_that_is_there(self, event: InferArrived) -> InferArrived:
        """One that asked for no version goes to the current one if its own has left meanwhile."""
        model = self._machine.models.get(event.model)
        if model is not None and model.state.state is not ModelState.LEAVING:
            return event
        name = split_name(event.model)[0]
        served, current = self._versions.served(name), self._versions.current(name)
        if served is None or served.born != event.lineage or not (current and current.manifest):
            return event
        return replace(event, model=current.name, digest=current.manifest.digest)

    def _refusal(self, event: InferArrived) -> PipeSwitchError | None:
        core, device = self._core, self._machine.device.state
        model = self._machine.models.get(event.model)
        if core.is_draining or core.has_left:
            return ServerUnavailable("the server is draining", hint="try again when it is back")
        if model is None or model.state.state is ModelState.LEAVING:
            return ModelNotFound(f'no model "{event.model}"', hint="pipeswitch models")
        if model.state.state is ModelState.QUARANTINED:
            return quarantined(model)
        is_same = model.manifest is not None and model.manifest.digest == event.digest
        if not is_same or device.tenant_of(model) != event.tenant:
            return changed_on_the_way(event.model)
        waiting = len(device.queue) + len(device.early)
        if waiting >= core.settings.max_queue:
            return QueueFull(
                f"{waiting} requests are waiting, the limit is {core.settings.max_queue}",
                hint="try again later, or raise [scheduler] max_queue",
                waiting=waiting,
            )
        waiting = device.queue.count(event.model) + device.early.count(event.model)
        if waiting >= core.settings.max_queue_per_model:
            return QueueFull(
                f"{waiting} requests for {event.model} are waiting, "
                f"the limit is {core.settings.max_queue_per_model}",
                hint="try again later, or raise [scheduler] max_queue_per_model",
                waiting=waiting,
            )
        return None

    def cancel(self, event: CancelAsked) -> bool:
        """Take a queued request back; a dispatched one runs to its end (it is nearly there)."""
        device = self._machine.device.state
        request = device.queue.get(event.token) or device.early.get(event.token)
        if request is None:
            return False
        device.refuse(request, TaskEvent.CANCEL, Cancelled("cancelled by the caller"))
        return True

    def stored(self, model: Model) -> None:
        """Its bytes are in the host store: requests that came before are dispatched in order."""
        device = self._machine.device.state
        for request in device.early.of(model.name):
            device.early.discard(request)
            device.queue.add(request)

    def not_stored(self, model: Model, error: PipeSwitchError) -> None:
        """Its bytes cannot be had: requests that came before that read the reason."""
        device = self._machine.device.state
        for request in device.early.of(model.name):
            device.refuse(request, TaskEvent.ERROR, error)


def changed_on_the_way(name: ModelName) -> ModelNotFound:
    return ModelNotFound(f'model "{name}" changed while the request was on its way')
