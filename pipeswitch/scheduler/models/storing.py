"""Orders to load built models into the host store. One daemon writes for all devices."""

from __future__ import annotations

from collections.abc import Mapping

from ...ipc.messages.base import ModelName
from ...ipc.messages.daemon import StoreModel
from ..core import Core
from ..machine import Machine
from ..state.records import Model, Registration
from ..state.states import ModelState


class Storing:
    """Choice of the daemon that stores a model, and of another one when that dies."""

    def __init__(
        self, core: Core, machine: Machine, registrations: Mapping[ModelName, Registration]
    ) -> None:
        self._core = core
        self._machine = machine
        self._registrations = registrations

    def order(self, model: Model) -> None:
        """Send the order to a daemon that is ready; without one it waits for ``daemon_ready``."""
        assert model.manifest is not None
        registration = self._registrations[model.name]
        ready = (d.state for d in self._machine.devices if d.state.daemon.is_ready)
        device = next(ready, None)
        registration.storing = None if device is None else device.index
        if device is None:
            return
        device.daemon.tell(
            StoreModel(
                model=model.name,
                epoch=registration.build_epoch,
                directory=self._core.settings.program_dir(model.manifest.digest),
                store_offset_bytes=model.store_offset_bytes,
                size_bytes=model.manifest.total_bytes,
            )
        )

    def daemon_ready(self) -> None:
        """Send a new daemon what no daemon stores."""
        for model in self._machine.models.values():
            is_storing = model.state.state is ModelState.STORING
            if is_storing and self._registrations[model.name].storing is None:
                self.order(model)

    def daemon_died(self, device: int) -> None:
        """Let another daemon, or the next one, store the models that the dead one was storing."""
        for model in self._machine.models.values():
            is_storing = model.state.state is ModelState.STORING
            if is_storing and self._registrations[model.name].storing == device:
                self.order(model)
