"""``ping --deep``: a question that goes through scheduler, memory daemon and workers, and is timed.

Workers answer on their termination thread, which no task keeps busy; nothing is scheduled for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from ..errors import ServerUnavailable
from ..ipc.messages import Epoch, Ping, Slot
from .device_state import DeviceState
from .events import Token, ToWorker
from .records import Worker
from .states import WORKER_SERVES

SILENT_AFTER_MS: Final = 1000.0  # a process silent until then is as good as dead to the asker


@dataclass
class Probe:
    """One round of questions. ``None``: asked, not answered yet."""

    epoch: Epoch
    asked_at_ms: float
    tokens: list[Token]
    daemon_ms: float | None = None
    workers: dict[Slot, tuple[int, float | None]] = field(default_factory=dict)  # generation, ms


class Health:
    """One round at a time: clients that ask meanwhile share the next, so a flood is no flood."""

    def __init__(self, device: DeviceState) -> None:
        self._core = device.core
        self._device = device
        self._probe: Probe | None = None
        self._waiting: list[Token] = []

    def asked(self, token: Token) -> None:
        self._waiting.append(token)

    def daemon_answered(self, epoch: Epoch) -> None:
        if self._probe is not None and self._probe.epoch == epoch:
            self._probe.daemon_ms = self._core.now_ms - self._probe.asked_at_ms

    def worker_answered(self, worker: Worker, epoch: Epoch) -> None:
        probe = self._probe
        if probe is not None and probe.epoch == epoch and worker.slot in probe.workers:
            took_ms = self._core.now_ms - probe.asked_at_ms
            probe.workers[worker.slot] = (worker.generation, took_ms)

    def pump(self) -> None:
        """Answer a round that is complete or has waited long enough; begin the next."""
        self._conclude()
        if self._probe is None and self._waiting:
            self._ask()
            self._conclude()  # no process may be there to be asked

    def _conclude(self) -> None:
        core, probe = self._core, self._probe
        if probe is None:
            return
        self._drop_dead(probe)
        silent_at_ms = probe.asked_at_ms + SILENT_AFTER_MS
        if not self._is_complete(probe) and core.now_ms < silent_at_ms:
            core.look_again(silent_at_ms)
            return
        self._probe = None
        for token in probe.tokens:
            core.answer(token, **self._report(probe))

    def refuse_all(self, error: ServerUnavailable) -> None:
        """The server leaves."""
        tokens = [*(self._probe.tokens if self._probe is not None else ()), *self._waiting]
        self._probe = None
        self._waiting.clear()
        for token in tokens:
            self._core.refuse(token, error)

    def _ask(self) -> None:
        core, device = self._core, self._device
        probe = Probe(core.next_epoch(), core.now_ms, self._waiting)
        self._probe, self._waiting = probe, []
        question = Ping(epoch=probe.epoch)
        device.tell_daemon(question)
        for worker in device.workers.values():
            if worker.state.state in WORKER_SERVES:
                probe.workers[worker.slot] = (worker.generation, None)
                self._device.emit(ToWorker(slot=worker.slot, message=question, channel="signal"))

    def _drop_dead(self, probe: Probe) -> None:
        """No answer will come from a process that has died meanwhile."""
        for slot, (generation, _) in list(probe.workers.items()):
            worker = self._device.workers[slot]
            if worker.generation != generation or not worker.is_alive:
                del probe.workers[slot]

    def _is_complete(self, probe: Probe) -> bool:
        if not self._device.is_daemon_ready:
            probe.daemon_ms = None
            return True  # dead: nothing else matters
        took = [ms for _, ms in probe.workers.values()]
        return probe.daemon_ms is not None and None not in took

    def _report(self, probe: Probe) -> dict[str, Any]:
        """What ``Client.ping(deep=True)`` returns, less the client's own part of the way."""
        core, device = self._core, self._device
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
            "engine_ms": core.now_ms - probe.asked_at_ms,
            "daemon_ms": probe.daemon_ms,
            "workers": [
                {"worker": slot, "state": device.workers[slot].state.state.value, "ms": ms}
                for slot, (_, ms) in probe.workers.items()
            ],
        }
