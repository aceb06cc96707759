"""A device's part of ``ping --deep``: a question to its memory daemon and workers, which is timed.

Workers answer on their termination thread, which no task keeps busy; nothing is scheduled for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from ...ipc.messages import Epoch, Ping, Slot
from ..state.device_state import DeviceState
from ..state.records import Worker
from ..state.states import WORKER_SERVES

SILENT_AFTER_MS: Final = 1000.0  # a process silent until then is as good as dead to the asker


@dataclass
class Probe:
    """One round of questions on one device. ``None``: asked, not answered yet."""

    epoch: Epoch
    asked_at_ms: float
    daemon_ms: float | None = None
    workers: dict[Slot, tuple[int, float | None]] = field(default_factory=dict)  # generation, ms


class Health:
    """One device's part of a round."""

    def __init__(self, device: DeviceState) -> None:
        self._core = device.core
        self._device = device
        self.label = device.label
        self._probe: Probe | None = None

    def daemon_answered(self, epoch: Epoch) -> None:
        if self._probe is not None and self._probe.epoch == epoch:
            self._probe.daemon_ms = self._core.now_ms - self._probe.asked_at_ms

    def worker_answered(self, worker: Worker, epoch: Epoch) -> None:
        probe = self._probe
        if probe is not None and probe.epoch == epoch and worker.slot in probe.workers:
            took_ms = self._core.now_ms - probe.asked_at_ms
            probe.workers[worker.slot] = (worker.generation, took_ms)

    def ask(self) -> None:
        """Begin a round."""
        core, device = self._core, self._device
        self._probe = probe = Probe(core.next_epoch(), core.now_ms)
        question = Ping(epoch=probe.epoch)
        device.tell_daemon(question)
        for worker in device.workers.values():
            if worker.state.state in WORKER_SERVES:
                probe.workers[worker.slot] = (worker.generation, None)
                device.signal(worker.slot, question)

    @property
    def is_complete(self) -> bool:
        """No answer is awaited any more: none will come from a process that has died meanwhile."""
        probe = self._probe
        assert probe is not None
        for slot, (generation, _) in list(probe.workers.items()):
            worker = self._device.workers[slot]
            if worker.generation != generation or not worker.is_alive:
                del probe.workers[slot]
        if not self._device.is_daemon_ready:
            probe.daemon_ms = None
            return True  # dead: nothing else matters
        took = [ms for _, ms in probe.workers.values()]
        return probe.daemon_ms is not None and None not in took

    def report(self) -> dict[str, Any]:
        """What ``Client.ping(deep=True)`` returns of this device; the round is over."""
        probe, device = self._probe, self._device
        assert probe is not None
        self._probe = None
        silent = [slot for slot, (_, ms) in probe.workers.items() if ms is None]
        why = ""
        if not device.is_daemon_ready:
            why = "the memory daemon is not there"
        elif probe.daemon_ms is None:
            why = f"the memory daemon was silent for {SILENT_AFTER_MS:.0f} ms"
        elif len(silent) == len(probe.workers):
            why = f"of {len(device.workers)} workers none answered"
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
