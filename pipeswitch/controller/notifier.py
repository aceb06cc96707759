"""Tells systemd what there is to tell (``Type=notify``, ``WatchdogSec``).

Its watchdog also covers a call that never gives the interpreter lock back, which a thread of ours
(``watchdog.py``) cannot see.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Mapping
from typing import Final

log = logging.getLogger(__name__)

TELL_WAIT_S: Final = 1.0


class Notifier:
    """systemd's end, sd_notify(3); does nothing when no manager listens."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        self._socket: socket.socket | None = None
        self._beat_every_s = 0.0
        self._beat_at_s = 0.0
        self._is_watched = False
        if not self._address:
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        if environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
            with contextlib.suppress(ValueError):  # a third: two may be lost
                self._beat_every_s = int(environ.get("WATCHDOG_USEC", "0")) / 3e6

    def tell(self, **fields: object) -> None:
        """``tell(READY=1, STATUS="…")``. Never fails; waits for a manager that does not read."""
        self._is_watched = self._is_watched or "READY" in fields
        self._send(fields, TELL_WAIT_S)

    def _send(self, fields: Mapping[str, object], timeout_s: float) -> None:
        if self._socket is None:
            return
        self._socket.settimeout(timeout_s)
        text = "\n".join(f"{key}={str(value).replace(chr(10), ' ')}" for key, value in
                         fields.items())  # fmt: skip
        try:
            self._socket.sendto(text.encode(), self._address)
        except OSError as error:
            log.debug("systemd not told: %s", error)

    def beat(self, now_s: float) -> None:
        """Once a turn of the loop; tells the manager as often as it wants to hear it.

        It watches from READY on. What is told before would only fill its queue, of ten messages.
        """
        if self._is_watched and self._beat_every_s and now_s >= self._beat_at_s:
            self._beat_at_s = now_s + self._beat_every_s
            self._send({"WATCHDOG": 1}, 0.0)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
