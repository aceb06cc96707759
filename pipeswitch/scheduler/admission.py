"""Requests from their arrival until they are dispatched, refused, taken back or too late."""

from __future__ import annotations

from ..errors import (
    Cancelled,
    DeadlineExceeded,
    ModelNotFound,
    ModelQuarantined,
    PipeSwitchError,
    QueueFull,
    ServerUnavailable,
)
from ..ipc.messages import ModelName
from .core import Core
from .events import CancelAsked, InferArrived
from .records import Model, Request
from .states import MODEL_AWAITED, ModelState, TaskEvent


class Admission:
    """Who may wait, and for how long."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def arrived(self, event: InferArrived) -> None:
        """Admit a request or answer it at once."""
        core = self._core
        refusal = self._refusal(event)
        if refusal is not None:
            core.refuse(event.token, refusal)
            return
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
        )
        core.requests[request.token] = request
        is_early = core.models[request.model].state.state in MODEL_AWAITED
        (core.early if is_early else core.queue).add(request)
        if request.deadline_at_ms is not None:
            core.look_again(request.deadline_at_ms)

    def _refusal(self, event: InferArrived) -> PipeSwitchError | None:
        core = self._core
        model = core.models.get(event.model)
        if core.is_draining or core.has_left:
            return ServerUnavailable("the server is draining", hint="try again when it is back")
        if model is None or model.state.state is ModelState.LEAVING:
            return ModelNotFound(f'no model "{event.model}"', hint="pipeswitch models")
        if model.state.state is ModelState.QUARANTINED:
            return quarantined(model)
        if model.manifest is None or model.manifest.digest != event.digest:
            return changed_on_the_way(event.model)
        waiting = len(core.queue) + len(core.early)
        if waiting >= core.settings.max_queue:
            return QueueFull(
                f"{waiting} requests are waiting, the limit is {core.settings.max_queue}",
                hint="try again later, or raise [scheduler] max_queue",
                waiting=waiting,
            )
        waiting = core.queue.count(event.model) + core.early.count(event.model)
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
        core = self._core
        request = core.queue.get(event.token) or core.early.get(event.token)
        if request is None:
            return False
        self.refuse(request, TaskEvent.CANCEL, Cancelled("cancelled by the caller"))
        return True

    def stored(self, model: Model) -> None:
        """Its bytes are in the host store: requests that came before are dispatched in order."""
        core = self._core
        for request in core.early.of(model.name):
            core.early.discard(request)
            core.queue.add(request)

    def not_stored(self, model: Model, error: PipeSwitchError) -> None:
        """Its bytes cannot be had: requests that came before that read the reason."""
        for request in self._core.early.of(model.name):
            self.refuse(request, TaskEvent.ERROR, error)

    def expire(self) -> None:
        """Answer queued requests whose deadline has passed."""
        core = self._core
        for request in (*core.queue.expired(core.now_ms), *core.early.expired(core.now_ms)):
            waited = core.now_ms - request.arrived_at_ms
            self.refuse(
                request,
                TaskEvent.EXPIRE,
                DeadlineExceeded(
                    f"the deadline passed after {waited:.0f} ms in the queue",
                    hint="raise the deadline or the priority",
                    waited_ms=waited,
                ),
            )

    def refuse(self, request: Request, event: TaskEvent, error: PipeSwitchError) -> None:
        """Its bad end: it waits no more and reads why."""
        core = self._core
        request.state.apply(event, type(error).__name__)
        core.queue.discard(request)
        core.early.discard(request)
        core.requests.pop(request.token)
        error.request_id = request.request_id
        core.refuse(request.token, error)


def changed_on_the_way(name: ModelName) -> ModelNotFound:
    return ModelNotFound(f'model "{name}" changed while the request was on its way')


def quarantined(model: Model) -> ModelQuarantined:
    """What a caller of a quarantined model reads."""
    return ModelQuarantined(
        f'"{model.name}" is quarantined: {model.reason}',
        hint=f"pipeswitch load {model.name} gives it another chance",
    )
