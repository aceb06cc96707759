"""Inference requests: admission, dispatch, the switch, the end (PipeSwitch 3, 4.2)."""

from __future__ import annotations

import math

from ..errors import (
    Cancelled,
    DeadlineExceeded,
    ModelNotFound,
    ModelQuarantined,
    OutOfDeviceMemory,
    PipeSwitchError,
    QueueFull,
    ServerUnavailable,
    TaskFailed,
    WorkerLost,
    from_wire,
)
from ..ipc.messages import (
    Epoch,
    InferenceDone,
    InferenceFailed,
    JobName,
    ModelName,
    RunInference,
    SlabTensor,
    Turn,
)
from ..programs.layout import REGION_ALIGN_BYTES, Manifest, aligned
from .arena import WHOLE, Arena
from .core import Core
from .events import Answer, CancelAsked, InferArrived, PrefetchHint, RaiseTurn, ToWorker
from .policies import Waiting
from .records import Activation, ColdSwitch, EndedTrial, Model, Request, Worker
from .residency import Residents
from .states import (
    MODEL_AWAITED,
    ModelEvent,
    ModelState,
    Residency,
    TaskEvent,
    WorkerEvent,
    WorkerState,
)
from .training import Training


class Inference:
    """The queue and the one or two inference tasks on the device."""

    def __init__(self, core: Core, arena: Arena, residents: Residents, training: Training) -> None:
        self._core = core
        self._arena = arena
        self._residents = residents
        self._training = training
        self._ended: list[tuple[Activation, Request, InferenceDone]] = []  # not traced yet

    # -- arrival ------------------------------------------------------------------------------

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
        self._finish(request, TaskEvent.CANCEL, Cancelled("cancelled by the caller"))
        return True

    def prefetch(self, event: PrefetchHint) -> None:
        """Send a model ahead of its request, if that disturbs no request (no answer is owed)."""
        core = self._core
        model = core.models.get(event.model)
        if model is None or model.state.state is not ModelState.READY or model.is_on_device:
            return
        if core.queue or core.upcoming is not None or not core.is_daemon_ready or core.is_draining:
            return
        if model.residency.state is Residency.ABANDONED:
            return
        window = self._arena.find_place(model, for_request=False)
        if window is not None and not self._arena.obstacles(window):
            self._residents.transmit(model, window, "prefetch hint")
            model.is_prefetch = True

    def stored(self, model: Model) -> None:
        """Its bytes are in the host store: requests that came before are dispatched in order."""
        core = self._core
        for request in core.early.of(model.name):
            core.early.discard(request)
            core.queue.add(request)

    def not_stored(self, model: Model, error: PipeSwitchError) -> None:
        """Its bytes cannot be had: requests that came before that read the reason."""
        for request in self._core.early.of(model.name):
            self._finish(request, TaskEvent.ERROR, error)

    def expire(self) -> None:
        """Answer queued requests whose deadline has passed; catch tasks that hang."""
        core = self._core
        for request in (*core.queue.expired(core.now_ms), *core.early.expired(core.now_ms)):
            waited = core.now_ms - request.arrived_at_ms
            self._finish(
                request,
                TaskEvent.EXPIRE,
                DeadlineExceeded(
                    f"the deadline passed after {waited:.0f} ms in the queue",
                    hint="raise the deadline or the priority",
                    waited_ms=waited,
                ),
            )

    def hung(self) -> Activation | None:
        """The task that computes for too long, if there is one; its ``hung_why`` says what is.

        1. It still computes long after its deadline.
        2. It has had the turn for ``max_compute_ms`` more than its model's longest run: taken for
           an endless loop, which would hold the device for ever.
        """
        core = self._core
        activation = core.current
        if activation is None or activation.hung_why:
            return activation
        settings, longest_ms = core.settings, core.models[activation.model].longest_ms
        deadline_at_ms = core.requests[activation.token].deadline_at_ms
        late_at_ms = endless_at_ms = math.inf
        if deadline_at_ms is not None:
            late_at_ms = deadline_at_ms + settings.deadline_grace_ms
        if settings.max_compute_ms:
            endless_at_ms = activation.began_at_ms + longest_ms + settings.max_compute_ms
        at_ms = min(late_at_ms, endless_at_ms)
        if core.now_ms < at_ms:
            # A look that comes before finds it again: many short tasks leave one, not one each.
            if at_ms < core.wakeups.next_ms:
                core.look_again(at_ms)
            return None
        activation.hung_why = (
            "its task did not end after the deadline"
            if late_at_ms <= endless_at_ms
            else f"its task computed {settings.max_compute_ms:.0f} ms longer than its longest run, "
            f"{longest_ms:.0f} ms"
        )
        return activation

    # -- dispatch -----------------------------------------------------------------------------

    def pump(self) -> None:
        """Dispatch what can be dispatched. Outcomes:

        1. A task waits for its turn already, or nothing is queued: nothing to do.
        2. The best request's model is on the device, or a place for it is free or can be freed:
           transmit and activate in the same breath; training is told to stop.
        3. Its place is taken by a training slice: that job is evicted; the request waits. So it
           does for a range that is being zeroed, or a copy that was cancelled.
        4. Its place is taken by models that must stay: it waits.
        5. While one waits for memory, the next best is tried if the policy lets it overtake: a
           lower priority never runs in front of a higher one, and no request is overtaken
           for ever.
        """
        core = self._core
        if not core.is_daemon_ready:
            return
        self._refuse_the_impossible()
        while core.queue and core.upcoming is None:
            if not self._dispatch_best():
                return

    def _refuse_the_impossible(self) -> None:
        """Requests whose model does not fit beside what is pinned: waiting would not help."""
        core = self._core
        if not core.queue:
            return
        largest = self._arena.largest_for_all_bytes
        if largest == self._arena.leasable_bytes:
            return  # nothing is pinned, and the store took none that is larger
        for name in core.queue.models():
            model = core.models[name]
            assert model.manifest is not None
            size = model.manifest.total_bytes
            if model.residency.state in WHOLE or aligned(size, REGION_ALIGN_BYTES) <= largest:
                continue
            pinned = [m.name for m in core.models.values() if m.residency.state is Residency.PINNED]
            for request in core.queue.of(name):
                error = OutOfDeviceMemory(
                    f'"{name}" needs {size} bytes, but pinned models ({", ".join(pinned)}) leave '
                    f"{largest} in one piece",
                    hint=f"pipeswitch unload {pinned[0]}",
                    requested_bytes=size,
                    largest_free_bytes=largest,
                )
                self._finish(request, TaskEvent.ERROR, error)

    def _dispatch_best(self) -> bool:
        core = self._core
        if not self._has_worker():
            return False  # one will be clean, reaped, prepared or respawned: that pumps again
        views = [(self._view(request), request) for request in core.queue]
        views.sort(key=lambda pair: core.policy.rank(pair[0], core.now_ms))
        blocked: list[Waiting] = []
        for view, request in views:
            if any(view.model == other.model for other in blocked):
                continue
            if not all(core.policy.may_overtake(view, other, core.now_ms) for other in blocked):
                return False  # 5.
            if self._dispatch(request):
                return True
            blocked.append(view)
        return False

    def _has_worker(self) -> bool:
        """A worker could begin. One that loads a program cannot, perhaps for seconds: it is given
        a task only where no task's end makes another one free before."""
        free = [worker for worker in self._core.workers.values() if worker.is_free]
        return any(worker.preparing is None for worker in free) or (
            bool(free) and self._core.current is None
        )

    def _dispatch(self, request: Request) -> bool:
        """Dispatch a request if its model is on the device or can be sent now."""
        core, arena = self._core, self._arena
        model = core.models[request.model]
        if model.is_on_device:
            self.activate(request, model, is_sent=False)
            return True
        if model.residency.state is Residency.ABANDONED:
            return False  # its region is in the way of itself until the copy has ended
        window = arena.find_place(model, for_request=True)
        if window is None:
            self._residents.cancel_prefetches()
            return False  # 4.
        obstacles = arena.obstacles(window)
        for region in obstacles:
            if region.owner.kind == "slice":
                self._training.evict(JobName(region.owner.name), f"memory for {model.name}")  # 3.
        if obstacles:
            return False
        self._residents.cancel_prefetches()
        self._residents.transmit(model, window, f"request {request.request_id}")
        self.activate(request, model, is_sent=True)
        return True

    def _view(self, request: Request) -> Waiting:
        core = self._core
        model = core.models[request.model]
        return Waiting(
            token=request.token,
            model=request.model,
            priority=request.priority,
            deadline_at_ms=request.deadline_at_ms,
            arrived_at_ms=request.arrived_at_ms,
            is_resident=model.is_on_device,
            is_current=core.current is not None and core.current.model == request.model,
        )

    def _pick_worker(self, model: Model) -> Worker:
        """A free worker: one that knows the model, then one that is just learning it, then one
        that must; last, one that is busy with another model's program."""
        version = model.version

        def rank(worker: Worker) -> int:
            is_warm = worker.warm.get(model.name) == version
            if worker.preparing is None:
                return 0 if is_warm else 2
            return 1 if worker.preparing == model.name and not is_warm else 3

        def order(worker: Worker) -> tuple[int, bool, int]:
            return rank(worker), worker.state.state is WorkerState.CLEANING, worker.slot

        return min((w for w in self._core.workers.values() if w.is_free), key=order)

    def activate(self, request: Request, model: Model, *, is_sent: bool) -> Activation:
        """Give the request to a worker; ``is_sent``: its model was sent for it just now."""
        core, manifest = self._core, model.manifest
        assert manifest is not None
        worker = self._pick_worker(model)
        epoch = core.next_epoch()
        core.queue.discard(request)
        request.state.apply(TaskEvent.DISPATCHED, f"worker {worker.slot}")
        worker.state.apply(WorkerEvent.ACTIVATED, f"request {request.request_id}")
        worker.task_epoch = epoch
        model.users += 1
        model.is_prefetch = False
        activation = Activation(
            epoch=epoch,
            slot=worker.slot,
            token=request.token,
            model=model.name,
            dispatched_at_ms=core.now_ms,
            was_resident=model.residency.state in (Residency.RESIDENT, Residency.PINNED),
            residency_epoch=model.residency_epoch,
            is_trial=request.trial_batch > 0,
            kept_bytes=model.kept_bytes if is_sent else 0,
        )
        core.upcoming = activation
        self.turn_is_free()  # before the order: the worker must not find an old turn
        core.emit(
            ToWorker(
                slot=worker.slot,
                message=RunInference(
                    epoch=epoch,
                    request_id=request.request_id,
                    model=model.name,
                    digest=manifest.digest,
                    directory=core.settings.program_dir(manifest.digest),
                    arena_offset_bytes=model.home_bytes,
                    first_word=model.first_word,
                    residency_epoch=model.residency_epoch,
                    inputs=request.inputs,
                    reply_offset_bytes=request.reply_offset_bytes,
                    reply_bytes=request.reply_bytes,
                    plan=model.plan,
                    trial_batch=request.trial_batch,
                ),
            )
        )
        if core.training is not None:
            activation.preempted = core.training
            activation.stop_asked_at_ms = core.now_ms
            self._training.stop(core.training, activation.turn, activation.slot)
        if is_sent and not activation.is_trial:
            core.counts["switches"] += 1
            core.publish(
                "switch.started",
                model=model.name,
                request=request.request_id,
                worker=worker.slot,
                preempts=activation.preempted,
            )
        return activation

    def turn_is_free(self) -> None:
        """If no task computes any more, the dispatched one does, if there is one.

        A worker that was told to raise another turn may still write it, as long as it lives and
        has not parked: 1. it was told to raise turn 7, 2. its script ends, 3. task 7 runs and
        ends, 4. its termination thread sees the stop and writes 7 over turn 9. So 9 waits.
        """
        core = self._core
        activation = core.upcoming
        if activation is None or core.current is not None or core.training is not None:
            return
        if any(w.may_raise not in (0, activation.turn) for w in core.workers.values()):
            return
        self._starts(activation, "has the turn")
        core.emit(RaiseTurn(turn=activation.turn, slot=activation.slot))

    def turn_passed(self, turn: Turn) -> None:
        """The parked worker has raised the turn itself."""
        core = self._core
        if core.upcoming is not None and core.upcoming.turn == turn and core.current is None:
            self._starts(core.upcoming, "turn passed on")

    def _starts(self, activation: Activation, cause: str) -> None:
        core = self._core
        core.current, core.upcoming = activation, None
        activation.began_at_ms = core.now_ms
        core.requests[activation.token].state.apply(TaskEvent.STARTED, cause)

    # -- end ----------------------------------------------------------------------------------

    def done(self, worker: Worker, message: InferenceDone) -> None:
        """Outputs lie in the reply slab: answer with the bill."""
        ended = self._end(worker, message.epoch)
        if ended is None:
            return
        activation, request, model = ended
        core = self._core
        model.deaths = 0
        model.longest_ms = max(model.longest_ms, core.now_ms - activation.began_at_ms)
        worker.deaths = 0
        worker.warm[model.name] = model.version  # it has just run it
        self._ended.append((activation, request, message))
        if activation.is_trial:
            request.state.apply(TaskEvent.FINISHED, "measured")
            core.requests.pop(request.token)
            core.ended_trial = EndedTrial(activation, message)
            return
        self._note_switch(activation, request, model, message)
        model.use_count += 1
        core.counts["inferences"] += 1
        request.state.apply(TaskEvent.FINISHED, "outputs written")
        core.requests.pop(request.token)
        core.emit(
            Answer(
                token=request.token,
                outputs=message.outputs,
                timing=self._bill(activation, request, model, message),
            )
        )

    def _note_switch(
        self, activation: Activation, request: Request, model: Model, message: InferenceDone
    ) -> None:
        """Its batch is what a profile should be of; a cold one is compared with its prediction."""
        assert model.manifest is not None
        model.last_batch = batch_of(model.manifest, request.inputs)
        if not activation.was_resident and not model.kept_bytes:
            self._core.cold_switches.append(
                ColdSwitch(
                    model=model.name,
                    residency_epoch=activation.residency_epoch,
                    batch=model.last_batch,
                    turn_at_ms=message.turn_at_ms,
                    ended_at_ms=message.ended_at_ms,
                )
            )

    def trace_ended(self) -> None:
        """The timeline of what was answered: after its answer, which must not wait for it."""
        for activation, request, message in self._ended:
            self._trace(activation, request, message)
        self._ended.clear()

    def failed(self, worker: Worker, message: InferenceFailed) -> None:
        """The model's own code raised, or its output does not fit: the worker is fine."""
        ended = self._end(worker, message.epoch)
        if ended is None:
            return
        activation, request, _ = ended
        worker.deaths = 0
        error: PipeSwitchError = from_wire(message.error, message.message, "", message.data)
        if type(error) is PipeSwitchError:
            error = from_wire(TaskFailed.__name__, message.message, "", message.data)
        self._give_up(activation, request, error)

    def _end(self, worker: Worker, epoch: Epoch) -> tuple[Activation, Request, Model] | None:
        """Take the activation of that epoch off the device; None for a late message."""
        core = self._core
        # Its turn was raised by the parked worker, whose own message is still on its way; or it
        # failed before it had the turn. Either way it computes no more.
        if core.current is not None and (core.current.epoch, core.current.slot) == (
            epoch,
            worker.slot,
        ):
            activation, core.current = core.current, None
        elif core.upcoming is not None and (core.upcoming.epoch, core.upcoming.slot) == (
            epoch,
            worker.slot,
        ):
            activation, core.upcoming = core.upcoming, None
        else:
            return None
        worker.state.apply(WorkerEvent.TASK_ENDED, f"epoch {epoch}")
        model = core.models[activation.model]
        self._residents.unused(model)
        return activation, core.requests[activation.token], model

    def _give_up(
        self, activation: Activation, request: Request, error: PipeSwitchError | None
    ) -> None:
        """No outputs will come of it; of a trial no client expects any."""
        core = self._core
        if not activation.is_trial:
            assert error is not None
            self._finish(request, TaskEvent.ERROR, error)
            return
        request.state.apply(TaskEvent.ERROR, type(error).__name__)
        core.requests.pop(request.token)
        core.ended_trial = EndedTrial(activation, error=error)

    def _finish(self, request: Request, event: TaskEvent, error: PipeSwitchError) -> None:
        core = self._core
        request.state.apply(event, type(error).__name__)
        core.queue.discard(request)
        core.early.discard(request)
        core.requests.pop(request.token)
        error.request_id = request.request_id
        core.refuse(request.token, error)

    def _bill(
        self, activation: Activation, request: Request, model: Model, message: InferenceDone
    ) -> dict[str, object]:
        """Where the time went; all in milliseconds."""
        copy_ms = 0.0
        if not activation.was_resident:
            ended = model.transmit_ended_at_ms or message.ended_at_ms
            copy_ms = max(0.0, ended - model.transmit_started_at_ms)
        compute_ms = message.ended_at_ms - message.turn_at_ms - message.stall_ms
        return {
            "queue_ms": activation.dispatched_at_ms - request.arrived_at_ms,
            "switch_ms": max(0.0, message.first_group_at_ms - activation.dispatched_at_ms),
            "copy_ms": copy_ms,
            "stall_ms": message.stall_ms,
            "compute_ms": max(0.0, compute_ms),
            "total_ms": self._core.now_ms - request.arrived_at_ms,
            "resident": activation.was_resident,
            "preempted": activation.preempted,
            "worker": activation.slot,
            "epoch": activation.epoch,
            **({"kept_bytes": activation.kept_bytes} if activation.kept_bytes else {}),
        }

    def _trace(self, activation: Activation, request: Request, message: InferenceDone) -> None:
        core = self._core
        track = f"worker {activation.slot}"
        flow = activation.epoch
        name = f"{request.request_id} {activation.model}"
        core.span("scheduler", f"queue {name}", request.arrived_at_ms, activation.dispatched_at_ms)
        core.span(
            "scheduler",
            f"switch {name}",
            activation.dispatched_at_ms,
            message.first_group_at_ms,
            flow=flow,
            preempted=activation.preempted,
            resident=activation.was_resident,
        )
        core.span(track, name, message.turn_at_ms, message.ended_at_ms, flow=flow)
        pairs = zip(message.group_begins_at_ms, message.group_ends_at_ms, strict=False)
        for index, (begin, end) in enumerate(pairs):
            core.span(track, f"group {index}", begin, end)

    # -- faults -------------------------------------------------------------------------------

    def worker_died(self, worker: Worker, status: int, begun_epoch: int | None) -> None:
        """Its process is reaped: dispatch the request again, or give up on it.

        A death counts against request and model only when the task had begun: a worker that
        waits, or was dead already when the task was sent to it, has run no model code.
        """
        core = self._core
        if core.current is not None and core.current.slot == worker.slot:
            activation, had_turn = core.current, worker.is_blamed
            core.current = None
        elif core.upcoming is not None and core.upcoming.slot == worker.slot:
            activation, had_turn = core.upcoming, False
            core.upcoming = None
        else:
            return
        model, request = core.models[activation.model], core.requests[activation.token]
        self._residents.unused(model)
        is_blamed = had_turn and begun_epoch in (None, activation.epoch)
        request.deaths += is_blamed
        model.deaths += is_blamed
        if activation.is_trial:
            error = _worker_lost(model, 1, status) if is_blamed else None
            self._give_up(activation, request, error)
        else:
            request.state.apply(TaskEvent.WORKER_DIED, f"status {status}")
            core.queue.add(request)
        if activation.hung_why and not activation.is_trial:  # it is not tried once more
            self._finish(request, TaskEvent.EXPIRE, _hung(model, activation))
        self._judge(request, model, status)

    def _judge(self, request: Request, model: Model, status: int) -> None:
        core, limit = self._core, self._core.settings.max_deaths
        if model.deaths >= limit and model.state.allows(ModelEvent.POISONED):
            model.state.apply(ModelEvent.POISONED, f"{model.deaths} workers died in a row")
            model.reason = f"{model.deaths} workers died in a row while computing it"
            core.publish("model.quarantined", model=model.name, reason=model.reason)
            for other in core.queue.of(model.name):
                if other is not request:
                    self._finish(other, TaskEvent.ERROR, quarantined(model))
        if request.token not in core.requests or request.trial_batch:
            return
        if (
            limit <= max(request.deaths, model.deaths)
            or model.state.state is ModelState.QUARANTINED
        ):
            error = _worker_lost(model, request.deaths, status)
            self._finish(request, TaskEvent.ERROR, error)

    def daemon_died(self) -> None:
        """Everything in flight goes back to the queue: not the requests' fault."""
        core = self._core
        for activation in (core.current, core.upcoming):
            if activation is None:
                continue
            request = core.requests[activation.token]
            if activation.is_trial:
                self._give_up(activation, request, None)
                continue
            request.state.apply(TaskEvent.WORKER_DIED, "memory daemon exited")
            core.queue.add(request)
        core.current = core.upcoming = None

    def refuse_all(self, error: PipeSwitchError) -> None:
        """The server cannot go on: every client that waits is answered."""
        for activation in (self._core.current, self._core.upcoming):
            if activation is not None and activation.is_trial:
                self._give_up(activation, self._core.requests[activation.token], error)
        for request in list(self._core.requests.values()):
            self._finish(request, TaskEvent.ERROR, error)
        self._core.current = self._core.upcoming = None


def batch_of(manifest: Manifest, inputs: tuple[SlabTensor, ...]) -> int:
    """A request's batch; 1 when the program has no dynamic one."""
    for value, tensor in zip(manifest.inputs, inputs, strict=False):
        for extent, size in zip(value.shape, tensor.shape, strict=False):
            if extent is None:
                return size
    return 1


def _worker_lost(model: Model, deaths: int, status: int) -> WorkerLost:
    return WorkerLost(
        f'the worker died {deaths} times while computing "{model.name}" (last status {status})',
        hint=f"pipeswitch show {model.name}",
        deaths=deaths,
    )


def _hung(model: Model, activation: Activation) -> DeadlineExceeded:
    return DeadlineExceeded(
        f'"{model.name}" was killed: {activation.hung_why}',
        hint="set a deadline, or raise [scheduler] max_compute",
        longest_ms=model.longest_ms,
    )


def changed_on_the_way(name: ModelName) -> ModelNotFound:
    return ModelNotFound(f'model "{name}" changed while the request was on its way')


def quarantined(model: Model) -> ModelQuarantined:
    """What a caller of a quarantined model reads."""
    return ModelQuarantined(
        f'"{model.name}" is quarantined: {model.reason}',
        hint=f"pipeswitch load {model.name} gives it another chance",
    )
