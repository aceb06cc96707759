"""``ping --deep``: a question that goes through the scheduler and all devices, and is timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import ServerUnavailable
from ..core import PINGS, WORKERS, Core, takes
from ..events import PingAsked, Token
from .health import SILENT_AFTER_MS, Health


class Pings:
    """The rounds over all devices, one at a time: clients that ask meanwhile share the next, so a
    flood is no flood."""

    def __init__(self, core: Core, devices: Sequence[Health]) -> None:
        self._core = core
        self._devices = devices
        self._asked_at_ms = 0.0
        self._answering: list[Token] = []  # of the round that is under way
        self._waiting: list[Token] = []

    @takes(PingAsked)
    def asked(self, event: PingAsked) -> None:
        self._waiting.append(event.token)

    def pump(self) -> int:
        """Answer a round that is complete or has waited long enough; begin the next."""
        self._conclude()
        if not self._answering and self._waiting:
            self._answering, self._waiting = self._waiting, []
            self._asked_at_ms = self._core.now_ms
            for device in self._devices:
                device.ask()
            self._conclude()  # no process may be there to be asked
        return PINGS | WORKERS if self._answering else PINGS  # one that has left is not waited for

    def _conclude(self) -> None:
        core = self._core
        if not self._answering:
            return
        silent_at_ms = self._asked_at_ms + SILENT_AFTER_MS
        is_complete = all(device.is_complete for device in self._devices)
        if not is_complete and core.now_ms < silent_at_ms:
            core.look_again(silent_at_ms, PINGS)
            return
        core.answer_all(self._answering, **self._report())

    def _report(self) -> dict[str, Any]:
        """Less the client's own part of the way. Ready is a server of which a device is."""
        reports = [device.report() for device in self._devices]
        daemons_ms = [one["daemon_ms"] for one in reports]
        return {
            "ready": any(one["ready"] for one in reports),
            "why": "; ".join(
                f"{device.label} {one['why']}".lstrip()
                for device, one in zip(self._devices, reports, strict=True)
                if one["why"]
            ),
            "engine_ms": self._core.now_ms - self._asked_at_ms,
            "daemon_ms": None if None in daemons_ms else max(daemons_ms),
            "workers": [row for one in reports for row in one["workers"]],
        }

    def refuse_all(self, error: ServerUnavailable) -> None:
        """The server leaves."""
        self._core.refuse_all(error, self._answering, self._waiting)
