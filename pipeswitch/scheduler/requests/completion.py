"""End of a dispatched task: outputs and timing, an error of the model, a death, or a shutdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from ...base import errors
from ...ipc.messages.base import SlabTensor
from ...ipc.messages.run import Run
from ...ipc.messages.worker import InferenceDone, InferenceFailed
from ...programs.interface.dims import BATCH
from ...programs.interface.layout import Manifest
from ...wire.request_timing import RequestTiming, of_runs
from ..memory.residency import Residents
from ..state.core import DUE, MEASURED, QUEUE, TURN
from ..state.device_state import DeviceState
from ..state.events import Reply, Span, Spans, TakeBack
from ..state.records import (
    DeviceModel,
    MeasuredRun,
    Model,
    Request,
    RunHistory,
    RunningTask,
    Worker,
)
from ..state.states import ModelEvent, ModelState, TaskEvent, WorkerEvent
from ..state.versions import split_name
from . import forecast
from .batching import failed, measure, take_led

MAX_MS: Final = 1e18  # no clock and no run reaches this


class TaskCompletion:
    """Ends of dispatched tasks; each task ends once."""

    def __init__(self, device: DeviceState, residents: Residents) -> None:
        self._core = device.core
        self._device = device
        self._residents = residents
        self._ended: list[tuple[RunningTask, list[Request], InferenceDone]] = []  # not traced yet
        self._progress: list[Reply] = []  # new tokens that their clients have not got yet

    def done(self, worker: Worker, message: InferenceDone) -> None:
        """Answer the requests of a run with their timing; their outputs are in the request pool."""
        core, device = self._core, self._device
        task = self._device.owner.task_of(worker.slot, message.op_id)
        if task is None:
            return
        counts = len(message.outputs), len(message.chances) or len(task.tokens)
        ms = message.turn_at_ms, message.first_group_at_ms, message.ended_at_ms, message.stall_ms
        is_whole = set(counts) == {len(task.tokens)} and sum(map(abs, ms)) < MAX_MS
        if not is_whole or (task.chooses and not self._has_chosen(task, message.tokens)):
            # The worker may write outputs until it is reaped: only then are the requests retried.
            device.kill(worker, "its answer does not fit its run")
            return
        steps = max([1, *map(len, message.tokens)])  # one for each new token
        activation, requests, replica = self._end(worker, task, steps)
        replica.model.deaths = worker.deaths = 0
        worker.warm[replica.name] = replica.version  # the worker has just run this version
        self._ended.append((activation, requests, message))
        device.spend("switch", message.stall_ms)
        device.spend("infer", message.ended_at_ms - message.turn_at_ms - message.stall_ms)
        if device.trial.model == replica.name:
            device.trial.runs.append(MeasuredRun(activation, message))
            core.dirty |= MEASURED
        if len(requests) > 1:
            replica.model.failed_batches = 0
        if not (activation.streamed or replica.transfer.by_rows):  # else a table may be missing
            replica.computed_op_id = activation.residency_id
        self._note_run(activation, replica, message, steps)
        core.counts["inferences"] += len(requests)
        core.counts["runs"] += 1
        device.served += len(requests)
        returns = replica.model.built.returns
        more: list[Request] = []
        for number, (request, outputs) in enumerate(zip(requests, message.outputs, strict=True)):
            if request.forecast.predicted_end_ms is not None:
                late_ms = core.now_ms - request.forecast.predicted_end_ms
                device.predictions.ended(late_ms, core.now_ms)
            total = _timing(device, activation, request, replica, message, core.now_ms)
            body: dict[str, Any] = {} if returns is None else {"returns": returns}
            answer = Reply(token=request.token, body=body, outputs=outputs, timing=total)
            if request.history is not None:
                answer = replace(answer, body=_chosen(message, number))
                last = self._run_ended(request, request.history, answer)
                if last is None:
                    more += [request] if request.token in device.requests else []
                    continue
                answer = last
            request.state.apply(TaskEvent.FINISHED, "outputs written")
            if request.steps.follows:
                core.going_on.add(request.token)
            device.requests.pop(request.token)
            core.emit(answer)
        replica.use_count -= len(more)  # a request counts once, with its last run
        for request in more + self._led(task) if task.chooses else ():
            queue_next(device, request, core.kind.prepare(request))

    def _run_ended(self, request: Request, history: RunHistory, answer: Reply) -> Reply | None:
        """Record one of several runs. Return the answer; None: more follow, or it is refused."""
        core, device, params = self._core, self._device, request.run.sampling_params
        total = answer.timing
        assert params is not None
        assert total is not None
        total = history.timing = total if history.timing is None else of_runs(history.timing, total)
        more = not params.ends_with(answer.body["tokens"])
        if more and history.is_cancelled:
            request.state.apply(TaskEvent.MORE, "its run has ended")
            device.refuse(request, TaskEvent.CANCEL, errors.Cancelled("cancelled by the caller"))
            return None
        answer = core.kind.ended(request, replace(answer, timing=total, more=more))
        if answer.error is not None:
            device.refuse(request, TaskEvent.ERROR, answer.error)
            return None
        if not answer.more:
            return answer
        self._progress.append(answer)
        request.state.apply(TaskEvent.MORE, "its run has ended")
        due_ms = None if history.allowed_ms is None else core.now_ms + history.allowed_ms
        request.origin = replace(request.origin, arrived_at_ms=core.now_ms, deadline_at_ms=due_ms)
        request.forecast.predicted_end_ms = None
        request.batching.deaths, request.batching.never_batch = 0, False
        return None

    def _led(self, task: RunningTask) -> list[Request]:
        """Dequeue the requests whose prompts this run has partly computed."""
        led = take_led(self._device, task.model, task.tokens)
        for request in led:
            self._core.kind.renew(request)
        return led

    def _has_chosen(self, task: RunningTask, tokens: Sequence[Sequence[int]]) -> bool:
        """Return True if the number of chosen tokens is valid for each request."""
        requests = self._requests(task)
        return len(tokens) == len(requests) and all(
            one.run.sampling_params is None or one.run.sampling_params.allows(chosen)
            for one, chosen in zip(requests, tokens, strict=True)
        )

    def _note_run(
        self, activation: RunningTask, replica: DeviceModel, message: InferenceDone, steps: int
    ) -> None:
        """Record a run: its time for predictions, its batch as the usual one, and the use."""
        replica.use_count += len(activation.tokens)
        replica.model.last_batch = activation.batch
        # Time from the turn to the answer, by the controller's clock: the next task waits for it.
        now_ms = self._core.now_ms
        took_ms = max(0.0, now_ms - activation.began_at_ms - message.stall_ms)
        step_ms = took_ms / steps  # the next task waits for one step
        self._device.predictions.computed(replica.name, activation.batch, step_ms, now_ms)
        if self._core.judge.ranks_runs:
            self._device.queue.changed(replica.name)

    def trace_ended(self) -> None:
        """Emit new tokens and the timeline of answered tasks.
        Call this after the answers and the device's next task, which must not wait for them."""
        for answer in self._progress:
            if answer.token in self._device.requests:
                self._core.emit(answer)
        self._progress.clear()
        for activation, requests, message in self._ended:
            self._core.emit(_trace(self._device, activation, requests, message))
        self._ended.clear()

    def failed(self, worker: Worker, message: InferenceFailed) -> None:
        """Handle an error of the model's code, or an invalid output; the worker continues."""
        task = self._device.owner.task_of(worker.slot, message.op_id)
        if task is None:
            return
        ended = self._end(worker, task)
        worker.deaths = 0
        error: errors.PipeSwitchError = errors.from_wire(
            message.error, message.message, "", message.data
        )
        if type(error) is errors.PipeSwitchError:
            error = errors.from_wire(errors.TaskFailed.__name__, message.message, "", message.data)
        self._run_failed(*ended, error)

    def _run_failed(
        self,
        activation: RunningTask,
        requests: list[Request],
        replica: DeviceModel,
        error: errors.PipeSwitchError,
    ) -> None:
        """Refuse a single request; run each of a batch again alone, because one may be at fault."""
        if not activation.is_batched:
            self._device.refuse(requests[0], TaskEvent.ERROR, error)
            return
        failed(self._device, replica, requests)
        for request in requests:
            request.state.apply(TaskEvent.SEPARATED, type(error).__name__)
            self._device.queue.add(request)

    def _end(
        self, worker: Worker, activation: RunningTask, steps: int = 1
    ) -> tuple[RunningTask, list[Request], DeviceModel]:
        """Take the task off the device.

        The task may be pending: a parked worker has written its turn, but that worker's message has
        not arrived; or the task failed before it had the turn.
        """
        device, cause = self._device, f"operation {activation.op_id}"
        self._reconcile_cost(activation, steps)
        device.owner.drop(activation, cause)
        worker.state.apply(WorkerEvent.TASK_ENDED, cause)
        replica = device.replicas[activation.model]
        self._residents.unused(replica)
        return activation, self._requests(activation), replica

    def _reconcile_cost(self, activation: RunningTask, steps: int = 1) -> None:
        """Charge the callers by the controller's clock: workers' times are not trusted."""
        core, charge = self._core, activation.charge
        if charge is not None:
            ran_until_ms = activation.yielded_at_ms or core.now_ms
            took_ms = ran_until_ms - activation.began_at_ms if activation.began_at_ms else 0.0
            throttled_until_ms = self._device.accounts.reconcile_cost(
                charge, took_ms, core.now_ms, steps
            )
            if throttled_until_ms > core.now_ms:
                core.wake_at(throttled_until_ms, DUE)

    def _requests(self, activation: RunningTask) -> list[Request]:
        return [self._device.requests[token] for token in activation.tokens]

    def worker_died(self, worker: Worker, status: int, begun_op_id: int | None) -> None:
        """Queue a reaped worker's requests again, or refuse them.

        A death counts against request and model only if the task had begun: a worker that was
        waiting, or already dead when the task was sent, has run no model code. No request of a
        joined batch is blamed: each runs again alone.
        """
        device = self._device
        activation = next((task for task in device.owner.tasks if task.slot == worker.slot), None)
        if activation is None:
            return
        had_turn = activation is device.owner.running and worker.is_blamed
        device.owner.drop(activation, f"status {status}")
        replica, requests = device.replicas[activation.model], self._requests(activation)
        request = requests[0]
        self._residents.unused(replica)
        self._reconcile_cost(activation)
        is_blamed = had_turn and begun_op_id in (None, activation.op_id)
        replica.model.deaths += is_blamed
        if is_blamed and activation.charge is not None and not activation.is_batched:
            penalty_until_ms = device.accounts.died(activation.charge, self._core.now_ms)
            if penalty_until_ms > self._core.now_ms:
                self._core.wake_at(penalty_until_ms, DUE)
        if not activation.is_batched:
            request.batching.deaths += is_blamed
        elif is_blamed:
            failed(device, replica, requests)
        self._queue_again(requests, f"status {status}")
        if activation.hung_why and not activation.is_batched:  # a hung request is not retried
            self._device.refuse(request, TaskEvent.EXPIRE, _hung(replica, activation))
        self._judge(requests, replica, status)

    def take_back(self, task: RunningTask, cause: str) -> None:
        """Take a task back that has no turn yet: its worker drops it, its requests wait again."""
        device, worker = self._device, self._device.workers[task.slot]
        replica = device.replicas[task.model]
        if task.charge is not None:
            device.accounts.refund(task.charge, self._core.now_ms)
        device.owner.drop(task, cause)
        worker.state.apply(WorkerEvent.TASK_ENDED, cause)
        self._residents.unused(replica)
        self._core.counts["taken_back"] += 1
        self._core.dirty |= QUEUE | TURN
        self._core.emit(TakeBack(device.address(task.slot), task.op_id))
        self._queue_again(self._requests(task), cause, TaskEvent.TAKEN_BACK)

    def _queue_again(
        self, requests: list[Request], cause: str, event: TaskEvent = TaskEvent.WORKER_DIED
    ) -> None:
        for request in requests:
            request.state.apply(event, cause)
            self._device.queue.add(request, is_back=True)
            if request.history is not None and request.history.is_cancelled:
                error = errors.Cancelled("cancelled by the caller")
                self._device.refuse(request, TaskEvent.CANCEL, error)

    def _judge(self, requests: list[Request], replica: DeviceModel, status: int) -> None:
        device, limit = self._device, self._core.settings.max_deaths
        if replica.model.deaths >= limit and replica.model.state.allows(ModelEvent.POISONED):
            replica.model.state.apply(
                ModelEvent.POISONED, f"{replica.model.deaths} workers in a row died"
            )
            replica.model.reason = (
                f"{replica.model.deaths} workers in a row died while computing it"
            )
            device.publish("model.quarantined", model=replica.name, reason=replica.model.reason)
            own = {request.token for request in requests}
            for other in device.queue.of(replica.name):
                if other.token not in own:
                    self._device.refuse(other, TaskEvent.ERROR, quarantined(replica.model))
        for request in requests:
            if request.token not in device.requests:
                continue
            if (
                limit <= max(request.batching.deaths, replica.model.deaths)
                or replica.model.state.state is ModelState.QUARANTINED
            ):
                # No request of a batch is blamed: then the deaths count against the model.
                deaths = max(request.batching.deaths, replica.model.deaths)
                error = _worker_lost(replica, deaths, status)
                self._device.refuse(request, TaskEvent.ERROR, error)

    def daemon_died(self) -> None:
        """Queue every dispatched request again: the daemon's death is not their fault."""
        device = self._device
        for activation in device.owner.tasks:
            self._reconcile_cost(activation)
            self._queue_again(self._requests(activation), "memory daemon exited")
        device.owner.lose_tasks("memory daemon exited")

    def refuse_all(self, error: errors.PipeSwitchError) -> None:
        """Refuse every waiting client: the server stops."""
        for request in list(self._device.requests.values()):
            self._device.refuse(request, TaskEvent.ERROR, error)
        self._device.owner.lose_tasks("the server leaves")


def batch_of(manifest: Manifest, inputs: tuple[SlabTensor, ...]) -> int:
    """Return a request's batch; 1 if the program has no batch dimension."""
    for value, tensor in zip(manifest.inputs, inputs, strict=False):
        if BATCH in value.shape:
            return tensor.shape[value.shape.index(BATCH)]
    return 1


def _chosen(message: InferenceDone, number: int) -> dict[str, Any]:
    chances = {"logprobs": message.chances[number]} if message.chances else {}
    return {"tokens": list(message.tokens[number]), **chances}


def _timing(
    device: DeviceState,
    activation: RunningTask,
    request: Request,
    replica: DeviceModel,
    message: InferenceDone,
    now_ms: float,
) -> RequestTiming:
    is_early = request.origin.arrived_at_ms < activation.copied_at_ms
    copy_ms, is_resident = 0.0, activation.was_resident and not is_early
    if not is_resident:
        ended = replica.transfer.ended_at_ms or message.ended_at_ms
        copy_ms = max(0.0, ended - replica.transfer.started_at_ms)
    # The switch ends with the first group: the wait for it must not count as a stall, too.
    # Waiting for another task is queueing, also between two groups of a streamed model.
    waited_ms = max(0.0, message.first_group_at_ms - message.turn_at_ms)
    stall_ms = max(0.0, message.stall_ms - waited_ms - activation.yielded_ms)
    compute_ms = message.ended_at_ms - message.first_group_at_ms - stall_ms
    made_ms, runs = request.steps.preprocess_ms or 0.0, request.history
    form = None if replica.manifest is None else replica.manifest.precision
    return RequestTiming(
        queue_ms=activation.queued_until_ms
        - request.origin.arrived_at_ms
        - made_ms
        + activation.yielded_ms,
        preprocess_ms=made_ms,
        switch_ms=max(0.0, message.first_group_at_ms - activation.queued_until_ms),
        copy_ms=copy_ms,
        stall_ms=stall_ms,
        compute_ms=max(0.0, compute_ms),
        total_ms=now_ms - (request.origin.arrived_at_ms if runs is None else runs.born_at_ms),
        resident=is_resident,
        preempted=activation.preempted,
        worker=activation.slot,
        op_id=activation.op_id,
        version=replica.model.version,
        batch=activation.batch,
        batched=len(activation.tokens),
        resident_bytes=activation.resident_bytes,
        streamed=activation.streamed,
        device=device.label,
        placed=request.forecast.placed if device.label else "",
        precision="" if form is None else form.name,
    )


def _trace(
    device: DeviceState, activation: RunningTask, requests: list[Request], message: InferenceDone
) -> Spans:
    """Return the task's timeline intervals; each joined request has its own queue interval."""
    scheduler, track = device.track("scheduler"), device.track(f"worker {activation.slot}")
    began_ms, flow = activation.queued_until_ms, activation.op_id
    more = f" and {len(requests) - 1} more" if len(requests) > 1 else ""
    name = f"{requests[0].run.request_id}{more} {activation.model}"
    pairs = zip(message.group_begins_at_ms, message.group_ends_at_ms, strict=False)
    is_early = requests[0].origin.arrived_at_ms < activation.copied_at_ms
    is_resident = activation.was_resident and not is_early
    return Spans(
        spans=[
            *[
                Span(
                    track=scheduler,
                    name=f"queue {one.run.request_id} {activation.model}",
                    begin_ms=one.origin.arrived_at_ms,
                    end_ms=max(one.origin.arrived_at_ms, began_ms),
                )
                for one in requests
            ],
            Span(
                track=scheduler,
                name=f"switch {name}",
                begin_ms=began_ms,
                flow=flow,
                end_ms=max(began_ms, message.first_group_at_ms),
                args={"preempted": activation.preempted, "resident": is_resident},
                event=activation.event,
            ),
            Span(
                track=track,
                name=name,
                begin_ms=message.turn_at_ms,
                flow=flow,
                end_ms=max(message.turn_at_ms, message.ended_at_ms),
                args={"stall_ms": message.stall_ms},
                event=activation.event,
            ),
            *[
                Span(track=track, name=f"group {index}", begin_ms=begin, end_ms=max(begin, end))
                for index, (begin, end) in enumerate(pairs)
            ],
        ]
    )


def queue_next(device: DeviceState, request: Request, run: Run | None) -> None:
    """Queue a request for its next run; without one, it waits for memory."""
    replica, core = device.replicas.get(request.model), device.core
    if replica is None or replica.model.state.state is ModelState.LEAVING:
        device.refuse(request, TaskEvent.ERROR, not_found(split_name(request.model)[0]))
        return
    if replica.model.state.state is ModelState.QUARANTINED:
        device.refuse(request, TaskEvent.ERROR, quarantined(replica.model))
        return
    if run is None:
        device.between[request.token] = request
    else:
        device.between.pop(request.token, None)
        request.run, params = run, run.sampling_params
        request.batching.never_batch = params is not None and params.never_batch
        measure(request, replica.built)
        request.forecast.infeasible_after_ms = forecast.infeasible_after_ms(device, request)
        device.take(request)
    if request.origin.deadline_at_ms is not None:
        core.wake_at(request.origin.deadline_at_ms, DUE)


def not_found(name: str, **data: str) -> errors.ModelNotFound:
    """Return the error for an unknown model; ``data`` names a model not in the request."""
    return errors.ModelNotFound(f'no model "{name}"', hint="pipeswitch models", **data)


def _worker_lost(replica: DeviceModel, deaths: int, status: int) -> errors.WorkerLost:
    return errors.WorkerLost(
        f'the worker died {deaths} times while computing "{replica.name}" (last status {status})',
        hint=f"pipeswitch show {replica.name}",
        deaths=deaths,
    )


def _hung(replica: DeviceModel, activation: RunningTask) -> errors.DeadlineExceeded:
    return errors.DeadlineExceeded(
        f'"{replica.name}" was killed: {activation.hung_why}',
        hint="set a deadline, or raise [scheduler] max_compute",
    )


def quarantined(model: Model) -> errors.ModelQuarantined:
    """Return the error for requests of a quarantined model."""
    return errors.ModelQuarantined(
        f'"{model.name}" is quarantined: {model.reason}',
        hint=f"pipeswitch load {model.name} ends the quarantine",
    )
