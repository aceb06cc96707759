"""What the devices of one machine share: models, the host store, the jobs' names; and placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ipc.messages.base import ModelName
from ..planning.profile import Profile
from ..programs.interface.chains import Chain
from .core import Core, SchedulerSettings
from .device import Device
from .memory.ledgers import Store
from .memory.placing import Placing
from .memory.plans import stream_of
from .state.records import Model, Replica, Served
from .training.jobs import Jobs


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
        self.placing = Placing(
            [one.state for one in self.devices],
            [one.arena for one in self.devices],
            core.settings.placement,
        )
        self.jobs.place = self.placing.job

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
        return next((d for d in allowed if d.state.daemon.is_ready), (allowed or self.devices)[0])

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
