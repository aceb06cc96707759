"""Admission of requests to a device's queue, refusal, and cancellation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ...base import errors
from ...base.quotas import left
from ...ipc.messages.base import ModelName
from ...wire.request_timing import RequestTiming
from ..memory.device_placement import DevicePlacement
from ..state.core import DUE, QUEUE, RESIDENCY, TURN, WORKERS, Core
from ..state.device_state import DeviceState
from ..state.events import CancelRequest, InferArrived, Prepared, Reply
from ..state.queue import Queue
from ..state.records import HelperQueue, Model, Request, Steps
from ..state.states import MODEL_AWAITED, ModelState, TaskEvent, TaskState, VersionState
from ..state.versions import Versions, split_name
from . import forecast
from .batching import measure
from .completion import batch_of, not_found, quarantined, queue_next
from .dispatch import Dispatch


class Admission:
    """Admission of requests to the queues."""

    def __init__(
        self,
        core: Core,
        versions: Versions,
        placement: DevicePlacement,
        dispatches: Sequence[Dispatch],
        helpers: Mapping[str, HelperQueue],
    ) -> None:
        self._core = core
        self._versions = versions
        self._models = versions.models
        self._placing = placement
        self._dispatches = dispatches
        self._states = placement.states
        self.helpers = helpers

    def arrived(self, event: InferArrived) -> None:
        """Admit a request or answer it at once."""
        core = self._core
        if event.is_computed:
            self._computed(event)
            return
        if event.continues:
            core.going_on.discard(event.token)
        event = self._of_a_version_that_is_there(event)
        refusal = self._refusal(event)
        if refusal is not None:
            core.refuse(event.token, refusal)
            return
        model = self._models[event.model]
        request = Request(
            token=event.token,
            model=event.model,
            run=event.run,
            origin=event.origin,
            size_bytes=model.built.total_bytes,
            steps=Steps(
                is_raw=model.wrapper is not None and bool(model.wrapper.before),
                follows=event.follows,
            ),
        )
        if model.wrapper is None or not model.wrapper.before:
            self._queue(request, model)
        else:
            served = self._versions.served(model.base)
            assert served is not None
            wrapper = model.wrapper
            self.helpers[wrapper.kind].take(request, wrapper, served.born, event.tenant)

    def _computed(self, event: InferArrived) -> None:
        """Pass a model's outputs in the request pool to its wrapper."""
        core, name = self._core, split_name(event.model)[0]
        core.going_on.discard(event.token)
        served, model = self._versions.served(name), self._versions.current(name)
        if served is None or model is None or model.wrapper is None or not model.wrapper.after:
            core.refuse(event.token, changed_on_the_way(event.model))
            return
        request = Request(
            token=event.token,
            model=event.model,
            run=event.run,
            origin=replace(event.origin, arrived_at_ms=core.now_ms),
            steps=Steps(is_raw=True, is_computed=True, follows=event.follows),
        )
        wrapper = model.wrapper
        self.helpers[wrapper.kind].take(request, wrapper, served.born, event.tenant)

    def prepared(self, event: Prepared) -> None:
        """Queue or answer a request whose function has ended, or report why it failed."""
        request = self.helpers[event.source.kind].prepared(event)
        if request is None:
            return
        if request.steps.is_computed:
            if request.steps.follows:
                self._core.going_on.add(request.token)
            timing = RequestTiming(postprocess_ms=self._core.now_ms - request.origin.arrived_at_ms)
            self._core.emit(Reply(token=request.token, outputs=request.run.inputs, timing=timing))
            return
        model = self._models.get(request.model)
        error: errors.PipeSwitchError | None = None
        if model is None or model.built.digest != event.digest:
            error = changed_on_the_way(request.model)
        elif model.state.state is ModelState.QUARANTINED:
            error = quarantined(model)
        else:
            error = self._lost(model)
        if error is not None:
            request.state.apply(TaskEvent.ERROR, type(error).__name__)
            self._core.refuse(request.token, error)
        elif model is not None:
            self._queue(request, model)

    def _queue(self, request: Request, model: Model) -> None:
        """Queue a request, dispatch it at once if possible, or refuse it if it would be late."""
        core, built = self._core, model.built
        request.batch = batch_of(built, request.run.inputs)
        if "pads" in built.extra:
            measure(request, built)
        is_early = model.state.state in MODEL_AWAITED
        device, request.forecast.placed = self._placing.request(model, request)
        if device.settings.admission == "off":
            if not is_early and self._dispatches[device.index].at_once(request):
                return
        elif not is_early:
            if forecast.is_refused(device, request):
                request.forecast.is_probe = forecast.is_worth_a_probe(device, request)
                if not request.forecast.is_probe:
                    core.refuse(request.token, forecast.deadline_error(device, request))
                    return
            forecast.will_be_measured(device, request)
        request.forecast.infeasible_after_ms = forecast.infeasible_after_ms(device, request)
        device.take(request, is_early=is_early)
        for at_ms in (request.forecast.infeasible_after_ms, request.origin.deadline_at_ms):
            if at_ms is not None:
                core.wake_at(at_ms, DUE)
                break

    def _of_a_version_that_is_there(self, event: InferArrived) -> InferArrived:
        """Return the request for a version that is there: the one it names, or one by the shares,
        or the current one, which the frontend may not know yet."""
        model = self._models.get(event.model)
        if model is not None and model.state.state is not ModelState.LEAVING:
            is_current = model.serving.state is VersionState.CURRENT
            if not event.registration_id or (is_current and model.split is None):
                return event
            if model.split is not None and event.registration_id == model.split.born:
                drawn = self._versions.drawn(model.split, model)
                return replace(event, model=drawn.name, digest=drawn.built.digest)
        name = split_name(event.model)[0]
        served, current = self._versions.served(name), self._versions.current(name)
        if (
            served is None
            or served.born != event.registration_id
            or not (current and current.manifest)
        ):
            return event
        return replace(event, model=current.name, digest=current.manifest.digest)

    def _refusal(self, event: InferArrived) -> errors.PipeSwitchError | None:
        core = self._core
        model = self._models.get(event.model)
        if (core.drain_at_ms is not None and not event.continues) or core.is_stopped:
            return errors.draining()
        if model is None or model.state.state is ModelState.LEAVING:
            return self._gone(event)
        if model.state.state is ModelState.QUARANTINED:
            return quarantined(model)
        is_same = model.manifest is not None and model.manifest.digest == event.digest
        if not is_same or core.tenant_of(model.tenant) != event.tenant:
            return changed_on_the_way(event.model)
        error = self._lost(model)
        if error is not None:
            return error
        for state in self._states:
            if state.queue.requests or state.awaiting_model.requests:
                return self._full(event, model)
        for helper in self.helpers.values():
            if helper.waits:
                return self._full(event, model)
        return None  # nothing waits, so no limit applies

    def _gone(self, event: InferArrived) -> errors.PipeSwitchError:
        """Return the error that the frontend gives once it knows that the version was removed."""
        name, version = split_name(event.model)
        if not event.registration_id and self._versions.present(name):
            return self._versions.missing(name, version)
        return not_found(split_name(event.model)[0])

    def _full(self, event: InferArrived, model: Model) -> errors.QueueFull | None:
        """Return the error if the queues have no room for the request, else None."""
        core, states = self._core, self._states
        queues: list[Queue | HelperQueue] = [*self.helpers.values()]
        queues += [queue for state in states for queue in (state.queue, state.awaiting_model)]
        caller, name = event.origin.caller, event.model
        waiting = sum(map(len, queues))
        own = sum([queue.held_by(caller) for queue in queues])
        if waiting and not left(core.settings.max_queue, waiting, own):
            return _full("requests", waiting, own, "max_queue", core.settings.max_queue)
        waiting = sum([queue.count(name) for queue in queues])
        own = sum([queue.held_by(caller, name) for queue in queues])
        limit = core.settings.max_queue_per_model
        if waiting and not left(limit, waiting, own):
            return _full(f"requests for {name}", waiting, own, "max_queue_per_model", limit)
        if waiting and core.settings.max_queue_time_ms:  # the shortest queue counts
            places = [one for one in states if one.may_serve(model) and not one.daemon.is_given_up]
            waiting, own = min(forecast.waiting_ms(state, name, caller) for state in places)
            limit = round(core.settings.max_queue_time_ms)
            if waiting and not left(limit, waiting, own):
                return _full(f"ms of requests for {name}", waiting, own, "max_queue_time", limit)
        return None

    def _lost(self, model: Model) -> errors.ServerUnavailable | None:
        """Return the error if every device that may serve the model is given up, else None."""
        for state in self._states:
            if not state.daemon.is_given_up and state.may_serve(model):
                return None
        return errors.ServerUnavailable(
            f'"{model.name}" is limited to {", ".join(model.devices)}, which this server has lost',
            hint="restart the server, or register the model without devices",
        )

    def cancel(self, event: CancelRequest) -> bool:
        """Cancel a queued request; a dispatched one completes its run, and has no other."""
        self._core.going_on.discard(event.token)
        for state in self._states:
            request = state.requests.get(event.token)
            if request is None:
                continue
            if request.state.state is TaskState.QUEUED:
                state.refuse(request, TaskEvent.CANCEL, errors.Cancelled("cancelled by the caller"))
            elif request.history is not None:
                request.history.is_cancelled = True
            return True
        return any(helper.cancel(event.token) for helper in self.helpers.values())

    def pool_freed(self) -> None:
        """Queue the requests that waited for memory and have it now."""
        waiting = {token: one for s in self._states for token, one in s.between.items()}
        for token, run in self._core.kind.poll(waiting):
            for state in self._states:
                if token in state.between:
                    queue_next(state, waiting[token], run)

    def stored(self, model: Model) -> None:
        """Queue the early requests in order for dispatch: the model is in the host store."""
        for state in self._states:
            for request in state.awaiting_model.of(model.name):
                self._place(state, request)

    def not_stored(self, model: Model, error: errors.PipeSwitchError) -> None:
        """Refuse the early requests with the reason why the model's bytes cannot be stored."""
        for state in self._states:
            for request in state.awaiting_model.of(model.name):
                state.refuse(request, TaskEvent.ERROR, error)

    def reassign(self) -> int:
        """Move requests from devices without a memory daemon to devices with one.

        A device's workers are reaped first: one of them may still write a request's outputs.
        If models were pinned and a request's model no longer fits, the request moves, too.
        """
        states = self._states
        for state in states if len(states) > 1 else ():
            self._avoid_pinned(state)
        ready = [state.daemon.is_ready for state in states]
        wants = QUEUE | RESIDENCY if len(states) > 1 else 0
        if all(ready) or not any(ready):
            return wants
        for state in states:
            if not state.daemon.is_ready and not state.has_processes:
                for request in (*state.queue, *state.awaiting_model):
                    error = self._lost(self._models[request.model])
                    if error is not None:
                        state.refuse(request, TaskEvent.ERROR, error)
                        continue
                    self._place(state, request)
        return wants

    def _avoid_pinned(self, state: DeviceState) -> None:
        for name in list(state.queue.unchecked) if state.pinned else ():
            requests = state.queue.of(name)
            if self._placing.has_place(state, name, requests[0].size_bytes):
                continue
            for request in requests:
                self._place(state, request)

    def rebalance(self) -> int:
        """Move the newest request to an idle device where it would compute sooner."""
        states = self._states
        if len(states) == 1:
            return 0
        wants = QUEUE | TURN | RESIDENCY | WORKERS
        if all(state.is_busy or not state.is_ready for state in states):
            return wants
        for state in states:
            request = state.last_waiting if state.owner.running is not None else None
            if request is not None:
                self._place(state, request)
        return wants

    def _place(self, state: DeviceState, request: Request) -> None:
        """Move a waiting request to its best device; if it is there already, it keeps its place."""
        model = self._models[request.model]
        place, placed = self._placing.request(model, request)
        is_early = model.state.state in MODEL_AWAITED
        if place is state and is_early == (request.token in state.awaiting_model):
            return
        request.forecast.placed = placed
        state.queue.discard(request)
        state.awaiting_model.discard(request)
        del state.requests[request.token]
        place.take(request, is_early=is_early)


def _full(what: str, waiting: int, own: int, setting: str, limit: int) -> errors.QueueFull:
    return errors.QueueFull(
        f"{waiting} {what} are waiting, {own} of them this client's; the limit is {limit}, and a "
        "client may use at most three times as many as remain free",
        hint=f"try again later, or raise [scheduler] {setting}",
        limit=setting,
        waiting=waiting,
    )


def changed_on_the_way(name: ModelName) -> errors.ModelNotFound:
    """Return the error for a model that changed before its request arrived."""
    base, _ = split_name(name)
    return errors.ModelNotFound(f'model "{base}" changed while the request was being sent')
