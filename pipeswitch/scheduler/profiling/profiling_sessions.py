"""Measurement of a model on an idle device, with requests of the client that profiles it.

1. Only that client uses the device. If another request or a job comes, the measurement ends with
   ``DeviceBusy``.
2. The model gets the groups of the next run, and is evicted if that run must be cold.
3. The client is asked for a request. The request is served like any other, except that its worker
   waits for the device after each group (``RunInference.is_timed``).
4. The times of that run are recorded. Steps 1 to 4 repeat until the profile is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from ...base import errors
from ...ipc.messages.base import ModelName
from ...planning.measuring import MeasuredProgram, Measurement, RunInstants, Trial
from ...planning.planned import plan_of, predict
from ...programs.interface.groups import cut, layer_bytes, plan_in_force
from ...programs.interface.layout import Manifest
from ..server.device import Device
from ..server.server_state import ServerState
from ..state.core import ALL, MEASURED, Core, handles
from ..state.device_state import DeviceState
from ..state.events import ProfileRequest, Reply, SaveProfile, Token
from ..state.records import DeviceModel, MeasuredRun
from ..state.states import TASK_LIVE, ModelState, Residency, TaskState, WorkerState
from ..state.versions import Versions

MAX_BATCHES: Final = 8
MAX_RETRIES: Final = 20  # consecutive retries of one run


@dataclass
class ProfilingSession:
    """One model being measured."""

    token: Token  # the client's request
    device: Device
    replica: DeviceModel
    measurement: Measurement
    served_count: int | None = None  # ``served`` before the expected request; None: no request due
    retries: int = 0


class Profiling:
    """Measurements of models, at most one at a time."""

    def __init__(self, core: Core, machine: ServerState, versions: Versions) -> None:
        self._core = core
        self._machine = machine
        self._versions = versions
        self._session: ProfilingSession | None = None

    @handles(ProfileRequest)
    def on_request(self, event: ProfileRequest) -> None:
        """Begin a measurement: the client sends requests on demand, then it gets the profile."""
        name = self._versions.resolve(event.model)
        device = self._machine.measures(name)
        replica = self._measurable(device, name, event.batches)
        if self._session is not None:
            raise errors.DeviceBusy(
                f'"{self._session.replica.name}" is being measured',
                hint="measure one model at a time",
            )
        _check_idle(device.state)
        assert replica.model.manifest is not None
        batches = event.batches or (usual_batch(replica),)
        measurement = Measurement(
            program_of(replica.name, replica.model.manifest),
            batches,
            device.state.settings.identity,
            plan_of,
            predict,
        )
        self._session = ProfilingSession(event.token, device, replica, measurement)
        device.state.measurement.model = replica.name
        self._core.dirty |= MEASURED
        device.state.publish("model.profiling", model=replica.name, batches=list(batches))

    def _measurable(self, device: Device, name: ModelName, batches: Sequence[int]) -> DeviceModel:
        """Return the model's replica on the device, if it can be measured.

        Raises:
            ServerUnavailable, ModelNotFound, InvalidInput, OutOfDeviceMemory.
        """
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
        low, high = replica.model.manifest.batch
        if len(batches) > MAX_BATCHES or not all(low <= b <= high for b in batches):
            raise errors.InvalidInput(
                f"{replica.name} takes batches from {low} to {high}, at most {MAX_BATCHES} of them"
            )
        return replica

    def cancel(self, token: Token) -> None:
        """End the measurement: the client cancelled it or disconnected."""
        if self._session is not None and self._session.token == token:
            self._fail(self._session, errors.Cancelled("cancelled by the caller"))

    def refuse_all(self, error: errors.PipeSwitchError) -> None:
        """Refuse the client that measures: the server stops."""
        if self._session is not None:
            self._fail(self._session, error)

    def pump(self) -> int:
        """Record the last run's times and ask for the next request, if possible."""
        session = self._session
        if session is None:
            return MEASURED
        try:
            self._check(session)
            if session.served_count is not None:
                self._take(session, session.served_count)
            if session.served_count is None and self._session is session:
                self._next(session)
        except (
            errors.DeviceBusy,
            errors.ModelNotFound,
            errors.OutOfDeviceMemory,
            errors.ServerUnavailable,
        ) as error:
            self._fail(session, error)
        return ALL if self._session is not None else MEASURED

    @staticmethod
    def _check(session: ProfilingSession) -> None:
        """Check that the model can still be measured.

        Raises:
            ModelNotFound, ServerUnavailable, DeviceBusy.
        """
        replica, state = session.replica, session.replica.model.state.state
        is_there = session.device.state.replicas.get(replica.name) is replica
        if not is_there or state is ModelState.LEAVING:
            raise errors.ModelNotFound(
                f'model "{replica.name}" was unregistered', hint="pipeswitch models"
            )
        if state is not ModelState.READY:
            raise errors.ServerUnavailable(f'"{replica.name}": {replica.model.reason}')
        if session.device.state.daemon.is_given_up:
            raise errors.ServerUnavailable("the device is lost", hint="restart the server")
        _check_no_job(session.device.state)

    def _take(self, session: ProfilingSession, served_count: int) -> None:
        """Hand the run to the measurement once its request is answered and its copy has ended.

        Raises:
            DeviceBusy: another client's request was answered as well.
            ServerUnavailable: several runs in a row were not as planned.
        """
        state = session.device.state
        if state.served == served_count:
            return
        if state.served != served_count + 1 or len(state.measurement.runs) != 1:
            raise _busy("another client's requests use")
        trial, measured = session.measurement.next, state.measurement.runs[0]
        assert trial is not None
        if _is_copied_still(session.replica, measured):
            return
        session.served_count = None
        if session.measurement.take(_run_of(session.replica, trial, measured)):
            session.retries = 0
            return
        session.retries += 1
        if session.retries > MAX_RETRIES:
            raise errors.ServerUnavailable(
                f'"{session.replica.name}" could not be measured: the runs were disturbed'
            )

    def _next(self, session: ProfilingSession) -> None:
        """Ask for the next request when the device is at rest, or finish after the last run.

        Raises:
            DeviceBusy: another request or a job uses the device.
            OutOfDeviceMemory: there are too few fences.
        """
        state, trial = session.device.state, session.measurement.next
        if trial is None:
            self._finish(session)
            return
        _check_idle(state)
        if not _is_at_rest(state) or session.replica.is_being_sent:
            return
        self._place(session, trial)
        state.measurement.runs.clear()
        session.served_count = state.served
        kind = "cold" if trial.is_cold else "resident"
        body = {
            "stage": f"batch {trial.batch}, {len(trial.plan)} groups, {kind}",
            "fraction": session.measurement.fraction,
            "batch": trial.batch,
            "version": session.replica.model.version,
        }
        self._core.emit(Reply(token=session.token, more=True, body=body))

    @staticmethod
    def _place(session: ProfilingSession, trial: Trial) -> None:
        """Set the model's groups, and evict it for a cold run."""
        replica, residents = session.replica, session.device.residents
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

    def _finish(self, session: ProfilingSession) -> None:
        core, replica = self._core, session.replica
        at = datetime.fromtimestamp((core.now_ms + core.settings.unix_offset_ms) / 1000.0, UTC)
        profile = session.measurement.profile(at.isoformat(timespec="seconds"))
        core.emit(SaveProfile(profile=profile))
        self._end(session)
        self._machine.use_profile(replica.name, profile)
        session.device.state.publish("model.profiled", model=replica.name, digest=profile.digest)
        core.answer(session.token, profile=msgspec.to_builtins(profile))

    def _fail(self, session: ProfilingSession, error: errors.PipeSwitchError) -> None:
        self._end(session)
        self._core.refuse(session.token, error)

    def _end(self, session: ProfilingSession) -> None:
        """End the measurement: the model gets its former groups back."""
        state, replica = session.device.state, session.replica
        self._session = state.measurement.model = None
        state.measurement.runs.clear()
        self._core.dirty |= MEASURED
        grouping = replica.grouping
        if grouping.next is None:
            session.device.plans.want(replica, grouping.planned, grouping.source, grouping.why)


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


def _is_copied_still(replica: DeviceModel, measured: MeasuredRun) -> bool:
    """Return True if the end of the run's copy is not reported yet."""
    is_cold = not measured.activation.was_resident
    is_same = replica.residency_id == measured.activation.residency_id
    return is_cold and is_same and replica.is_being_sent


def _run_of(replica: DeviceModel, trial: Trial, measured: MeasuredRun) -> RunInstants | None:
    """Return the run's times, or None if the run had another batch or residency than planned."""
    activation, done, sent = measured.activation, measured.message, replica.transfer.report
    if activation.batch != trial.batch or activation.was_resident == trial.is_cold:
        return None
    begins_ms, ends_ms = done.group_begins_at_ms, done.group_ends_at_ms
    if not trial.is_cold:
        return RunInstants(done.turn_at_ms, (), begins_ms, ends_ms)
    if sent is None or sent.op_id != activation.residency_id:
        return None
    return RunInstants(sent.started_at_ms, sent.group_ends_at_ms, begins_ms, ends_ms)


def usual_batch(replica: DeviceModel) -> int:
    """Return the last batch size of a model's requests; before the first request, the smallest."""
    assert replica.model.manifest is not None
    return replica.model.last_batch or replica.model.manifest.batch[0]


def program_of(name: str, built: Manifest) -> MeasuredProgram:
    """Return the facts from a manifest that a measurement needs."""
    layers, sizes = built.layers, layer_bytes(built)
    finest = cut(layers, built.tensors, built.total_bytes, tuple(range(len(layers))))
    return MeasuredProgram(
        model=name,
        digest=built.digest,
        layer_bytes=sizes,
        labels=tuple(group.label for group in finest),
        built_plan=plan_in_force(built),
    )
