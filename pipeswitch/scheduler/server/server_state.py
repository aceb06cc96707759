"""State that the devices of one machine share: models, host store, jobs and placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ipc.messages.base import ModelName
from ..memory.allocators import HostStoreAllocator
from ..memory.device_placement import DevicePlacement
from ..memory.plans import stream_of
from ..state.core import Core, SchedulerSettings
from ..state.records import Composites, DeviceModel, Model, Served
from ..training.jobs import Jobs
from .device import Device


class ServerState:
    """One host and its devices, with the state that the devices share."""

    def __init__(self, core: Core, devices: Sequence[SchedulerSettings] = ()) -> None:
        """``devices``: the settings of each device; if empty, one with ``core.settings``."""
        self.models: dict[ModelName, Model] = {}
        self.served: dict[ModelName, Served] = {}  # name in requests -> its versions
        self.composites: dict[ModelName, Composites] = {}  # other names in requests
        self.store = HostStoreAllocator(core)
        self.jobs = Jobs(core)
        devices = devices or (core.settings,)
        self.devices = [
            Device(core, one, self.store, self.jobs, one.device if len(devices) > 1 else "")
            for one in devices
        ]
        self.placement = DevicePlacement(
            [one.state for one in self.devices],
            [one.arena for one in self.devices],
            core.settings.placement,
        )
        self.jobs.place = self.placement.job

    def stream_of(self, model: Model) -> dict[str, Any] | None:
        """Return the cost of a pass on the first device with too small an arena, or None."""
        states = [one.state for one in self.devices if one.state.may_serve(model)]
        streams = (stream_of(state, state.replicas[model.name]) for state in states)
        return next((one for one in streams if one is not None), None)

    def prefetch(self, name: ModelName) -> None:
        """Send a model ahead of its requests to one device, if the copy disturbs no request."""
        if not any(
            name in d.state.replicas and d.state.replicas[name].is_on_device for d in self.devices
        ):
            for device in self.devices:
                if device.residents.prefetch(name):
                    return

    def measures(self, name: ModelName) -> Device:
        """Return the device that measures the model."""
        model = self.models.get(name)
        allowed = [d for d in self.devices if model is not None and d.state.may_serve(model)]
        return next((d for d in allowed if d.state.daemon.is_ready), (allowed or self.devices)[0])

    def shown(self, model: Model) -> DeviceModel:
        """Return the model's replica on a device that has or receives it, else the first one."""
        replicas = [device.state.replicas[model.name] for device in self.devices]
        return next((one for one in replicas if one.is_on_device), replicas[0])
