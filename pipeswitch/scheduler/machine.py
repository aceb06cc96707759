"""What the devices of one machine share: models, the host store, the jobs' names; and placement."""

from __future__ import annotations

from collections.abc import Sequence

from ..ipc.messages import ModelName
from .core import MEASURED, Core, SchedulerSettings
from .device import Device
from .jobs import Jobs
from .placing import Placing
from .records import Model, Replica, Served
from .store import Store


class Machine:
    """One host and its devices. What is the same on all of them lies here."""

    def __init__(self, core: Core, devices: Sequence[SchedulerSettings] = ()) -> None:
        """``devices``: the settings of each; none: one device, as ``core.settings`` say."""
        self._core = core
        self.models: dict[ModelName, Model] = {}
        self.served: dict[ModelName, Served] = {}  # by the name that requests use
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

    def prefetch(self, name: ModelName) -> None:
        """Requests for it are on their way: it is sent where nothing is disturbed, once."""
        if not any(name in d.state.replicas and d.state.replicas[name].is_on_device
                   for d in self.devices):  # fmt: skip
            for device in self.devices:
                if device.residents.prefetch(name):
                    return

    def measuring(self, name: ModelName) -> Device:
        """Where a model is measured."""
        model = self.models.get(name)
        allowed = [d for d in self.devices if model is not None and d.state.may_serve(model)]
        return next((d for d in allowed if d.state.is_daemon_ready), (allowed or self.devices)[0])

    def share_profiles(self) -> int:
        """What was measured on a device holds for all of its kind."""
        for device in self.devices:
            found, device.state.measured[:] = list(device.state.measured), []
            for name, profile in found:
                for other in self.devices:
                    identity = device.state.settings.identity
                    is_same = other.state.settings.identity == identity
                    if other is not device and is_same and name in other.state.replicas:
                        other.plans.use(other.state.replicas[name], profile)
                        self._core.touched |= MEASURED
        return MEASURED

    def shown(self, model: Model) -> Replica:
        """Its replica where it is, or is about to be; else that of the first device."""
        replicas = [device.state.replicas[model.name] for device in self.devices]
        return next((one for one in replicas if one.is_on_device), replicas[0])
