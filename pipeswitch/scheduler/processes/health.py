"""``ping --deep``: timed pings of each device's memory daemon and workers.

Workers answer on their termination thread, which no task keeps busy, so a ping needs no turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ...base.errors import DRAINING, ServerUnavailable
from ...ipc.messages.base import OpId, Ping, Slot
from ..state.core import PINGS, WORKERS, Core, handles
from ..state.device_state import DeviceState
from ..state.events import PingRequest, Token
from ..state.records import Worker
from ..state.states import WORKER_SERVES

SILENT_AFTER_MS: Final = 1000.0  # a process that needs longer counts as silent


@dataclass
class Probe:
    """One round of pings on one device. A time is None until the process has answered."""

    op_id: OpId
    asked_at_ms: float
    daemon_ms: float | None = None
    workers: dict[Slot, tuple[int, float | None]] = field(default_factory=dict)  # incarnation, ms


class Health:
    """One device's part of a round of pings."""

    def __init__(self, device: DeviceState) -> None:
        self._core = device.core
        self._device = device
        self.label = device.label
        self._probe: Probe | None = None

    def daemon_answered(self, op_id: OpId) -> None:
        if self._probe is not None and self._probe.op_id == op_id:
            self._probe.daemon_ms = self._core.now_ms - self._probe.asked_at_ms

    def worker_answered(self, worker: Worker, op_id: OpId) -> None:
        probe = self._probe
        if probe is not None and probe.op_id == op_id and worker.slot in probe.workers:
            took_ms = self._core.now_ms - probe.asked_at_ms
            probe.workers[worker.slot] = (worker.incarnation, took_ms)

    def ask(self) -> None:
        """Begin a round of pings."""
        core, device = self._core, self._device
        self._probe = probe = Probe(core.next_op_id(), core.now_ms)
        question = Ping(op_id=probe.op_id)
        device.daemon.send(question)
        for worker in device.workers.values():
            if worker.state.state in WORKER_SERVES:
                probe.workers[worker.slot] = (worker.incarnation, None)
                device.send(worker.slot, question, "signal")

    @property
    def is_complete(self) -> bool:
        """True if no answer is awaited any more; dead processes will not answer."""
        probe = self._probe
        assert probe is not None
        for slot, (incarnation, _) in list(probe.workers.items()):
            worker = self._device.workers[slot]
            if worker.incarnation != incarnation or not worker.is_alive:
                del probe.workers[slot]
        if not self._device.daemon.is_ready:
            probe.daemon_ms = None
            return True  # the device is not ready, whatever its workers answer
        took = [ms for _, ms in probe.workers.values()]
        return probe.daemon_ms is not None and None not in took

    def report(self) -> dict[str, Any]:
        """End the round, and return the device's part of ``Client.ping(deep=True)``."""
        probe, device = self._probe, self._device
        assert probe is not None
        self._probe = None
        silent = [slot for slot, (_, ms) in probe.workers.items() if ms is None]
        why = ""
        if not device.daemon.is_ready:
            why = "the memory daemon does not run"
        elif probe.daemon_ms is None:
            why = f"the memory daemon did not answer for {SILENT_AFTER_MS:.0f} ms"
        elif len(silent) == len(probe.workers):
            why = f"none of {len(device.workers)} workers answered"
        return {
            "ready": not why,
            "why": why,
            "daemon_ms": probe.daemon_ms,
            "workers": [
                {"worker": slot, "state": device.workers[slot].state.state.value, "ms": ms}
                | ({"device": device.label} if device.label else {})
                for slot, (_, ms) in probe.workers.items()
            ],
        }


class Pings:
    """Rounds of pings over all devices, one at a time.
    Clients that ping during a round share the next one, so a flood of pings has no effect."""

    def __init__(self, core: Core, devices: Sequence[Health]) -> None:
        self._core = core
        self._devices = devices
        self._asked_at_ms = 0.0
        self._answering: list[Token] = []  # clients of the current round
        self._waiting: list[Token] = []

    @handles(PingRequest)
    def on_request(self, event: PingRequest) -> None:
        self._waiting.append(event.token)

    def pump(self) -> int:
        """Answer a round that is complete or has waited long enough; begin the next round."""
        self._conclude()
        if not self._answering and self._waiting:
            self._answering, self._waiting = self._waiting, []
            self._asked_at_ms = self._core.now_ms
            for device in self._devices:
                device.ask()
            self._conclude()  # there may be no process
        return PINGS | WORKERS if self._answering else PINGS  # an exit may end a round

    def _conclude(self) -> None:
        core = self._core
        if not self._answering:
            return
        silent_at_ms = self._asked_at_ms + SILENT_AFTER_MS
        is_complete = all(device.is_complete for device in self._devices)
        if not is_complete and core.now_ms < silent_at_ms:
            core.wake_at(silent_at_ms, PINGS)
            return
        core.answer_all(self._answering, **self._report())

    def _report(self) -> dict[str, Any]:
        """Return the report without the client's latency. A server is ready if one device is."""
        reports = [device.report() for device in self._devices]
        daemons_ms = [one["daemon_ms"] for one in reports]
        whys = [
            f"{device.label} {one['why']}".lstrip()
            for device, one in zip(self._devices, reports, strict=True)
            if one["why"]
        ]
        is_draining = self._core.is_draining
        return {
            "ready": not is_draining and any(one["ready"] for one in reports),
            "why": "; ".join([DRAINING] * is_draining + whys),
            "engine_ms": self._core.now_ms - self._asked_at_ms,
            "daemon_ms": None if None in daemons_ms else max(daemons_ms),
            "workers": [row for one in reports for row in one["workers"]],
        }

    def refuse_all(self, error: ServerUnavailable) -> None:
        """Refuse every waiting client: the server stops."""
        self._core.refuse_all(error, self._answering, self._waiting)
