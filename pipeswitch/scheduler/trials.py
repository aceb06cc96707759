"""Trials: timed runs of a model with other layer groups, and groups to use from now on.

A client that plans groups (``pipeswitch profile``) tries some of them, one run after the other:

1. It sends a ``RegroupRequest`` with a plan. When the device is at rest, the model gets these
   groups, and is evicted if the run must be cold. The client gets a first reply.
2. It sends a request to the model. This is served like any other, except that its worker waits for
   the device after each group (``RunInference.is_timed``). The client gets the run's times.
3. Its next ``RegroupRequest`` replaces this one, which is answered. The last one has the planned
   groups, which are kept for the next server.

Only that client uses the device. If another request or a job comes, the trial ends with
``DeviceBusy``. When it ends, the model gets its former groups back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ..base import errors
from ..ipc.messages.base import ModelName
from ..planning.grouping import Plan, check_plan, per_layer
from ..planning.planned_groups import PlannedError, decode, file_name
from ..programs.interface.groups import cut, layer_bytes, plan_in_force
from ..programs.interface.layout import Manifest
from .server.device import Device
from .server.server_state import ServerState
from .state.core import ALL, MEASURED, Core, handles
from .state.device_state import DeviceState
from .state.events import RegroupRequest, Reply, SavePlanned, Token
from .state.records import DeviceModel, MeasuredRun
from .state.states import TASK_LIVE, ModelState, Residency, TaskState, WorkerState
from .state.versions import Versions


@dataclass
class Trial:
    """Groups that a client tries."""

    token: Token  # the client's request
    device: Device
    replica: DeviceModel
    plan: Plan
    is_cold: bool
    is_first: bool
    served_count: int | None = None  # ``served`` before the run; None: the groups are not set yet
    is_over: bool = False  # the client has the run's times


class Trials:
    """Trials of layer groups; at most one client has some at a time."""

    def __init__(self, core: Core, machine: ServerState, versions: Versions) -> None:
        self._core = core
        self._machine = machine
        self._versions = versions
        self._trial: Trial | None = None

    @handles(RegroupRequest)
    def on_request(self, event: RegroupRequest) -> None:
        """Begin a trial, or end all trials and use the planned groups."""
        name = self._versions.resolve(event.model)
        former = self._trial
        if former is None or former.token != event.trial:
            device = self._machine.measures(name)
            replica = self._regroupable(device, name)
            if former is not None:
                raise errors.DeviceBusy(
                    f'"{former.replica.name}" is being measured', hint="measure one model at a time"
                )
            _check_idle(device.state)
        else:
            device, replica = former.device, former.replica
        if event.planned:
            self._use(event, device, replica)
            return
        count = len(replica.built.layers)
        plan = event.plan or per_layer(count)
        _check_plan(plan, count)
        self._trial = Trial(event.token, device, replica, plan, event.is_cold, not event.plan)
        device.state.trial.model = replica.name
        self._core.dirty |= MEASURED
        if former is not None:
            self._core.answer(former.token)

    def _regroupable(self, device: Device, name: ModelName) -> DeviceModel:
        """Return the model's replica on the device, if it can have other groups.
        Raises ServerUnavailable, ModelNotFound, InvalidInput, OutOfDeviceMemory."""
        replica = device.state.replicas.get(name)
        if self._core.is_draining:
            raise errors.draining()
        if replica is None or replica.model.state.state is ModelState.LEAVING:
            raise errors.ModelNotFound(f'no model "{name}"', hint="pipeswitch models")
        if replica.model.manifest is None or replica.model.state.state is not ModelState.READY:
            raise errors.InvalidInput(
                f'"{replica.name}" is {replica.model.state.state.value}, it must be ready'
            )
        if replica.staging is not None:
            raise errors.OutOfDeviceMemory(
                f'"{replica.name}" is larger than the arena, so it cannot be measured',
                hint="measure it on a server with a larger --arena, and copy the profile",
                requested_bytes=replica.model.manifest.total_bytes,
                largest_free_bytes=replica.region_bytes,
            )
        return replica

    def _use(self, event: RegroupRequest, device: Device, replica: DeviceModel) -> None:
        """End the client's trials; keep the planned groups and use them on all devices they fit.
        Raises InvalidInput: they are unreadable, or of another program or device."""
        try:
            groups = decode(event.planned)
        except PlannedError as error:
            raise errors.InvalidInput(f"the planned groups are unreadable: {error}") from None
        if problem := device.plans.why_unusable(replica, groups):
            raise errors.InvalidInput(f"the planned groups cannot be used: {problem}")
        name = file_name(replica.name, groups.digest, groups.identity.device)
        self._core.emit(SavePlanned(file_name=name, document=event.planned))
        if self._trial is not None:
            self._core.answer(self._trial.token)
            self._end(self._trial)
        for one in self._machine.devices:
            other = one.state.replicas.get(replica.name)
            if other is not None and not one.plans.why_unusable(other, groups):
                one.plans.use(other, groups)
        device.state.publish("model.profiled", model=replica.name, digest=groups.digest)
        self._core.answer(event.token)

    def cancel(self, token: Token) -> None:
        """End the trial: the client cancelled it or disconnected."""
        if self._trial is not None and self._trial.token == token:
            self._fail(self._trial, errors.Cancelled("cancelled by the caller"))

    def refuse_all(self, error: errors.PipeSwitchError) -> None:
        """Refuse the client that tries groups: the server stops."""
        if self._trial is not None:
            self._fail(self._trial, error)

    def pump(self) -> int:
        """Set the trial's groups, or report the times of its run, if possible."""
        trial = self._trial
        if trial is None:
            return MEASURED
        try:
            _check(trial)
            if trial.served_count is None:
                self._set(trial)
            else:
                self._report(trial, trial.served_count)
        except (
            errors.DeviceBusy,
            errors.ModelNotFound,
            errors.OutOfDeviceMemory,
            errors.ServerUnavailable,
        ) as error:
            self._fail(trial, error)
        return ALL if self._trial is not None else MEASURED

    def _set(self, trial: Trial) -> None:
        """Set the groups when the device is at rest, and reply.
        Raises DeviceBusy: another request or a job uses the device; OutOfDeviceMemory: there are
        too few fences."""
        state, replica = trial.device.state, trial.replica
        _check_idle(state)
        if not _is_at_rest(state) or replica.is_being_sent:
            return
        _place(trial)
        state.trial.runs.clear()
        trial.served_count = state.served
        body: dict[str, Any] = {"trial": trial.token, "version": replica.model.version}
        if trial.is_first:
            assert replica.model.manifest is not None
            body["identity"] = msgspec.to_builtins(state.settings.identity)
            body["program"] = _program(replica.name, replica.model.manifest)
            body["batch"] = replica.model.last_batch or replica.model.manifest.batch[0]
            state.publish("model.profiling", model=replica.name)
        self._core.emit(Reply(token=trial.token, more=True, body=body))

    def _report(self, trial: Trial, served_count: int) -> None:
        """Report the run once its request is answered and its copy has ended.
        Raises DeviceBusy: another client's request was answered as well."""
        state = trial.device.state
        if state.served == served_count + trial.is_over:
            if trial.is_over:
                _check_idle(state)
            return
        runs = state.trial.runs
        if trial.is_over or state.served != served_count + 1 or len(runs) != 1 or state.requests:
            raise _busy("another client's requests use")
        if not _is_copied_still(trial.replica, runs[0]):
            trial.is_over = True
            body = _times(trial.replica, runs[0])
            self._core.emit(Reply(token=trial.token, more=True, body=body))

    def _fail(self, trial: Trial, error: errors.PipeSwitchError) -> None:
        self._end(trial)
        self._core.refuse(trial.token, error)

    def _end(self, trial: Trial) -> None:
        """End the client's trials: the model gets its former groups back."""
        state, grouping = trial.device.state, trial.replica.grouping
        self._trial = state.trial.model = None
        state.trial.runs.clear()
        self._core.dirty |= MEASURED
        if grouping.next is None:
            plan = () if grouping.planned is None else grouping.planned.plan
            trial.device.plans.want(trial.replica, plan, grouping.source, grouping.why)


def _check_plan(plan: Plan, layer_count: int) -> None:
    """Raise InvalidInput unless it is a plan for this number of layers."""
    try:
        check_plan(plan, layer_count)
    except ValueError as error:
        raise errors.InvalidInput(str(error)) from None


def _check(trial: Trial) -> None:
    """Check that the trial can still go on. Raises ModelNotFound, ServerUnavailable, DeviceBusy."""
    replica, state = trial.replica, trial.replica.model.state.state
    is_there = trial.device.state.replicas.get(replica.name) is replica
    if not is_there or state is ModelState.LEAVING:
        raise errors.ModelNotFound(
            f'model "{replica.name}" was unregistered', hint="pipeswitch models"
        )
    if state is not ModelState.READY:
        raise errors.ServerUnavailable(f'"{replica.name}": {replica.model.reason}')
    if trial.device.state.daemon.is_given_up:
        raise errors.ServerUnavailable("the device is lost", hint="restart the server")
    _check_no_job(trial.device.state)


def _check_idle(state: DeviceState) -> None:
    _check_no_job(state)
    if state.requests:
        raise _busy("requests use")


def _check_no_job(state: DeviceState) -> None:
    for job in state.jobs.values():
        if job.state.state in TASK_LIVE and job.state.state is not TaskState.PAUSED:
            name = job.spec.name
            raise _busy(f'job "{name}" uses', hint=f"pipeswitch jobs pause {name}")


def _busy(who: str, hint: str = "run it while no client sends requests") -> errors.DeviceBusy:
    return errors.DeviceBusy(f"{who} the device, and profiling needs it alone", hint=hint)


def _is_at_rest(state: DeviceState) -> bool:
    """Return True if a worker is free and no process starts, cleans up or loads a program."""
    rests = (WorkerState.STANDBY, WorkerState.DEAD)
    workers = state.workers.values()
    return (
        state.daemon.is_ready
        and any(worker.state.state is WorkerState.STANDBY for worker in workers)
        and all(one.state.state in rests and one.preparing is None for one in workers)
    )


def _place(trial: Trial) -> None:
    """Set the model's groups, and evict it for a cold run."""
    replica, residents = trial.replica, trial.device.residents
    has_other_groups = replica.grouping.plan != trial.plan
    is_there = replica.residency.state is not Residency.HOST
    if is_there and (trial.is_cold or has_other_groups):
        residents.evict(replica, "profile")
    if has_other_groups and not residents.cut_anew(replica, trial.plan):
        count = len(trial.plan)
        raise errors.OutOfDeviceMemory(
            f'"{replica.name}" needs {count} fences to be measured layer by layer',
            hint="unregister models that you do not need",
            requested_bytes=4 * count,
            largest_free_bytes=0,
        )


def _is_copied_still(replica: DeviceModel, run: MeasuredRun) -> bool:
    """Return True if the end of the run's copy is not reported yet."""
    is_cold = not run.activation.was_resident
    is_same = replica.residency_id == run.activation.residency_id
    return is_cold and is_same and replica.is_being_sent


def _times(replica: DeviceModel, run: MeasuredRun) -> dict[str, Any]:
    """Return the run's batch and the instants of its groups, in ms of the monotonic clock.
    ``copy_ends_ms`` is empty if the model was resident, or its copy is not known."""
    activation, done, sent = run.activation, run.message, replica.transfer.report
    is_known = sent is not None and sent.op_id == activation.residency_id
    is_cold = not activation.was_resident
    return {
        "batch": activation.batch,
        "is_cold": is_cold,
        "copy_started_ms": sent.started_at_ms if sent and is_cold else done.turn_at_ms,
        "copy_ends_ms": list(sent.group_ends_at_ms) if sent and is_known and is_cold else [],
        "begins_ms": list(done.group_begins_at_ms),
        "ends_ms": list(done.group_ends_at_ms),
    }


def _program(name: str, built: Manifest) -> dict[str, Any]:
    """Return the facts from a manifest that a client needs to plan its groups."""
    finest = cut(built.layers, built.tensors, built.total_bytes, per_layer(len(built.layers)))
    return {
        "model": name,
        "digest": built.digest,
        "layer_bytes": list(layer_bytes(built)),
        "labels": [group.label for group in finest],
        "built_plan": list(plan_in_force(built)),
    }
