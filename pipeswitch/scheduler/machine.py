"""What the devices of one machine share: models, the host store, the jobs' names; and placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ipc.messages import ModelName
from ..planning.profile import Profile
from ..programs.chains import Chain
from .core import Core, SchedulerSettings
from .device import Device
from .device_state import DeviceState
from .limits import kinds_of, limit
from .memory.ledgers import Store
from .policies import Prediction
from .policies.placement import PLACEMENTS, Place, best
from .profiling.plans import stream_of
from .records import Job, Model, Replica, Request, Served
from .states import TASK_FINAL
from .training.jobs import Jobs


class Placing:
    """A request is placed when it comes, and anew when it waits while a device has nothing to do; a
    job when it comes and whenever it has left its device.

    A device whose memory daemon is not there takes nothing while another one can, and one whose
    pinned models leave no place neither.
    """

    def __init__(self, devices: Sequence[Device], placement: str) -> None:
        self._devices = devices
        self._rank = PLACEMENTS[placement]

    def request(self, model: Model, request: Request) -> tuple[Device, str]:
        """The device, and why: empty where there is but one. It does not wait for itself."""
        if len(self._devices) == 1:
            return self._devices[0], ""
        for device in self._devices:
            if device.state.measuring == model.name:
                return device, "it is measured there"
        living = self._living(model.devices)
        able = [
            device for device in living
            if device.arena.may_take(device.state.replicas[model.name], request.size_bytes)
        ]  # fmt: skip
        places = [self._place(device, model, request) for device in _ready(able or living)]
        found = best(places, self._rank)
        return self._devices[found.device], found.reason

    def job(self, job: Job, home: int | None, counts: Sequence[int]) -> int:
        """Where the fewest other jobs are; it stays at ``home`` rather than go to an equal one.

        Args:
            counts: of each device, the jobs there that are not over.
        """
        is_counted = home is not None and job.state.state not in TASK_FINAL

        def order(state: DeviceState) -> tuple[int, bool, int]:
            others = counts[state.index] - (is_counted and state.index == home)
            return others, state.index != home, state.index

        places = [one.state for one in _ready(self._living(job.allowed))]
        if all(state.is_given_up for state in places):  # those of its kind can go on with it
            names = [one.state.settings.device for one in self._devices]
            alike = limit(kinds_of(job.allowed), names)
            places = [one.state for one in _ready(self._living(alike))]
        return min(places, key=order).index

    def _living(self, names: tuple[str, ...]) -> list[Device]:
        allowed = [one for one in self._devices if not names or one.state.settings.device in names]
        return [one for one in allowed if not one.state.is_given_up] or allowed

    def _place(self, device: Device, model: Model, request: Request) -> Place:
        state, replica = device.state, device.state.replicas[model.name]
        waiting, switch_ms = len(state.queue) + len(state.early), 0.0
        if not replica.is_on_device:
            switch_ms = self._predict(state, model.name, request.batch).load_ms
        return Place(
            device=state.index,
            is_resident=replica.is_on_device,
            is_busy=state.is_busy,
            waiting=len(state.tasks) + waiting - (request.token in state.queue),
            queue_ms=self._queue_ms(state, request),
            switch_ms=switch_ms,
            free_bytes=device.arena.regions.largest_free_bytes,
            size_bytes=request.size_bytes,
        )

    def _queue_ms(self, state: DeviceState, request: Request) -> float:
        """Until what computes and waits there is done, itself apart."""
        now_ms, total_ms = state.core.now_ms, 0.0
        for task in state.tasks:
            compute_ms = self._of_last(state, state.replicas[task.model].model).compute_ms
            spent_ms = now_ms - task.began_at_ms if task is state.current else 0.0
            total_ms += max(0.0, compute_ms - spent_ms)
        own = request.model if request.token in state.queue else None
        for name in state.queue.models():
            replica, count = state.replicas[name], state.queue.count(name) - (name == own)
            one = self._of_last(state, replica.model)
            total_ms += count * one.compute_ms
            total_ms += 0.0 if replica.is_on_device or not count else one.load_ms
        return total_ms

    def _of_last(self, state: DeviceState, model: Model) -> Prediction:
        return self._predict(state, model.name, max(1, model.last_batch))

    def _predict(self, state: DeviceState, name: str, batch: int) -> Prediction:
        """As measured there, else as on any other device: nothing is fast for being unknown."""
        own = state.predictions.predict(name, batch)
        if own.compute_ms and own.load_ms:
            return own
        others = [one.state.predictions.predict(name, batch) for one in self._devices]
        return Prediction(
            own.load_ms or max(one.load_ms for one in others),
            own.compute_ms or max(one.compute_ms for one in others),
            own.p95_ms or max(one.p95_ms for one in others),
        )


def _ready(devices: list[Device]) -> list[Device]:
    return [one for one in devices if one.state.is_daemon_ready] or devices


class Machine:
    """One host and its devices. What is the same on all of them lies here."""

    def __init__(self, core: Core, devices: Sequence[SchedulerSettings] = ()) -> None:
        """``devices``: the settings of each; none: one device, as ``core.settings`` say."""
        self._core = core
        self.models: dict[ModelName, Model] = {}
        self.served: dict[ModelName, Served] = {}  # by the name that requests use
        self.chains: dict[ModelName, tuple[Chain, str]] = {}  # with whose they are
        self.store = Store(core)
        self.jobs = Jobs(core)
        devices = devices or (core.settings,)
        self.devices = [
            Device(core, one, self.store, self.jobs, one.device if len(devices) > 1 else "")
            for one in devices
        ]
        self.placing = Placing(self.devices, core.settings.placement)
        self.jobs.place = self.placing.job

    @property
    def names(self) -> list[str]:
        """The devices'."""
        return self.jobs.names

    def stream_of(self, model: Model) -> dict[str, Any] | None:
        """What a pass costs where a model is larger than the arena of a device that may serve it;
        None: nowhere."""
        states = [one.state for one in self.devices if one.state.may_serve(model)]
        found = (stream_of(state, state.replicas[model.name]) for state in states)
        return next((one for one in found if one is not None), None)

    def prefetch(self, name: ModelName) -> None:
        """Requests for it are on their way: it is sent where nothing is disturbed, once."""
        if not any(name in d.state.replicas and d.state.replicas[name].is_on_device
                   for d in self.devices):  # fmt: skip
            for device in self.devices:
                if device.residents.prefetch(name):
                    return

    def measures(self, name: ModelName) -> Device:
        """Return the device that measures the model."""
        model = self.models.get(name)
        allowed = [d for d in self.devices if model is not None and d.state.may_serve(model)]
        return next((d for d in allowed if d.state.is_daemon_ready), (allowed or self.devices)[0])

    def use_profile(self, name: ModelName, profile: Profile) -> None:
        """Plan groups from the profile on each device with the identity of the measured one."""
        for device in self.devices:
            replica = device.state.replicas.get(name)
            if replica is not None and device.state.settings.identity == profile.identity:
                device.plans.use(replica, profile)

    def shown(self, model: Model) -> Replica:
        """Its replica where it is, or is about to be; else that of the first device."""
        replicas = [device.state.replicas[model.name] for device in self.devices]
        return next((one for one in replicas if one.is_on_device), replicas[0])
