"""What the devices of one machine share: the models that are served, and the host store."""

from __future__ import annotations

from ..ipc.messages import ModelName
from .core import Core
from .device import Device
from .records import Model, Served
from .store import Store


class Machine:
    """One host and its devices; today there is one of them."""

    def __init__(self, core: Core) -> None:
        self.models: dict[ModelName, Model] = {}
        self.served: dict[ModelName, Served] = {}  # by the name that requests use
        self.store = Store(core)
        self.devices = [Device(core, core.settings, self.store)]

    @property
    def device(self) -> Device:
        """Where a model, a request, a job or a process belongs; a second one needs a rule here."""
        (device,) = self.devices
        return device
