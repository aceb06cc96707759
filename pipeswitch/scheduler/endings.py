"""How a dispatched task ends: outputs, an error of its model, a death, the end of the server."""

from __future__ import annotations

from ..errors import DeadlineExceeded, PipeSwitchError, TaskFailed, WorkerLost, from_wire
from ..ipc.messages import Epoch, InferenceDone, InferenceFailed, SlabTensor
from ..programs.layout import Manifest
from .admission import Admission, quarantined
from .bill import bill, trace
from .core import Core
from .events import Answer
from .records import Activation, ColdSwitch, EndedTrial, Model, Request, Worker
from .residency import Residents
from .states import ModelEvent, ModelState, TaskEvent, WorkerEvent


class Endings:
    """Each dispatched task ends here, once."""

    def __init__(self, core: Core, residents: Residents, admission: Admission) -> None:
        self._core = core
        self._residents = residents
        self._admission = admission
        self._ended: list[tuple[Activation, Request, InferenceDone]] = []  # not traced yet

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
                timing=bill(activation, request, model, message, core.now_ms),
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
            trace(self._core, activation, request, message)
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
            self._admission.refuse(request, TaskEvent.ERROR, error)
            return
        request.state.apply(TaskEvent.ERROR, type(error).__name__)
        core.requests.pop(request.token)
        core.ended_trial = EndedTrial(activation, error=error)

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
            self._admission.refuse(request, TaskEvent.EXPIRE, _hung(model, activation))
        self._judge(request, model, status)

    def _judge(self, request: Request, model: Model, status: int) -> None:
        core, limit = self._core, self._core.settings.max_deaths
        if model.deaths >= limit and model.state.allows(ModelEvent.POISONED):
            model.state.apply(ModelEvent.POISONED, f"{model.deaths} workers died in a row")
            model.reason = f"{model.deaths} workers died in a row while computing it"
            core.publish("model.quarantined", model=model.name, reason=model.reason)
            for other in core.queue.of(model.name):
                if other is not request:
                    self._admission.refuse(other, TaskEvent.ERROR, quarantined(model))
        if request.token not in core.requests or request.trial_batch:
            return
        if (
            limit <= max(request.deaths, model.deaths)
            or model.state.state is ModelState.QUARANTINED
        ):
            error = _worker_lost(model, request.deaths, status)
            self._admission.refuse(request, TaskEvent.ERROR, error)

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
            self._admission.refuse(request, TaskEvent.ERROR, error)
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
