"""Watchdogs that notice a loop or a policy that hangs, and the notifications for systemd.

If a loop hangs (an endless loop in a decision, a call that never returns), no process, channel or
descriptor reports it. So a thread checks the loop. With systemd (``Type=notify``, ``WatchdogSec``)
the service manager checks it, too, which also covers a call that never releases the interpreter
lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Final

from .policies import policy_call

log = logging.getLogger(__name__)

LOOKS: Final = 10  # a loop hangs if this many checks in a row find no new iteration
TELL_WAIT_S: Final = 1.0
EXIT_HUNG: Final = os.EX_SOFTWARE


class Notifier:
    """Client of systemd's sd_notify(3); it does nothing if no manager listens."""

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
            with contextlib.suppress(ValueError):  # a third of the limit: two beats may be lost
                self._beat_every_s = int(environ.get("WATCHDOG_USEC", "0")) / 3e6

    def notify(self, **fields: object) -> None:
        """Send ``notify(READY=1, STATUS="…")``. Never fails; waits up to 1 s for a slow manager."""
        self._is_watched = self._is_watched or "READY" in fields
        self._send(fields, TELL_WAIT_S)

    def _send(self, fields: Mapping[str, object], timeout_s: float) -> None:
        if self._socket is None:
            return
        self._socket.settimeout(timeout_s)
        text = "\n".join(
            f"{key}={str(value).replace(chr(10), ' ')}" for key, value in fields.items()
        )
        try:
            self._socket.sendto(text.encode(), self._address)
        except OSError as error:
            log.debug("systemd not told: %s", error)

    def beat(self, now_s: float) -> None:
        """Send a beat to the manager if one is due; call it in each iteration of the loop.

        The manager watches from READY on. Earlier beats would only fill its queue of ten
        messages.
        """
        if self._is_watched and self._beat_every_s and now_s >= self._beat_at_s:
            self._beat_at_s = now_s + self._beat_every_s
            self._send({"WATCHDOG": 1}, 0.0)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class TurnLooks:
    """Counter of checks in a row that found a loop at the same place.

    It counts checks instead of time: if the whole process was stopped (SIGSTOP), time has passed,
    but neither the loop nor the watchdog ran.
    """

    def __init__(self) -> None:
        self._seen: object = None
        self._count = 0

    def is_hung(self, place: object) -> bool:
        """Check once; return True if the last ``LOOKS`` checks in a row found the same place."""
        self._count = self._count + 1 if place == self._seen else 0
        self._seen = place
        return self._count >= LOOKS


class LoopWatchdog:
    """Watchdog that ends the process if the loop of the thread that calls ``start`` hangs.

    Args:
        limit_s: maximum time of an iteration; 0: no limit.
        streams: descriptors that get the stacks of all threads.
        end: called on the watchdog's thread to end the process; it must not return.
    """

    def __init__(
        self,
        limit_s: float,
        streams: Sequence[int],
        end: Callable[[], None] = lambda: os._exit(EXIT_HUNG),
    ) -> None:
        self._limit_s = limit_s
        self._streams = streams
        self._end = end
        self._turns = 0
        self._watched = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipeswitch-watch", daemon=True)

    def start(self) -> None:
        self._watched = threading.get_ident()
        if self._limit_s > 0:
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def turned(self) -> None:
        """Count an iteration of the loop; cheap."""
        self._turns += 1

    def _call(self) -> tuple[FrameType, str] | None:
        """Return the policy call that the watched thread has not finished, or None."""
        was_enabled = gc.isenabled()
        gc.disable()  # CPython 3.11: a collection within the next call may deadlock
        frames = sys._current_frames()
        if was_enabled:
            gc.enable()
        return policy_call(frames.get(self._watched))

    def _place(self) -> object:
        return self._turns

    def _what(self, call: str) -> str:
        at = time.strftime("%F %T")
        text = f"{at} CRITICAL scheduler=hung no turn for {self._limit_s:g} s, leaving"
        return f"{text}: {call}" if call else text

    def _run(self) -> None:
        looks = TurnLooks()
        while not self._stopped.wait(self._limit_s / LOOKS):
            if looks.is_hung(self._place()):
                self._give_up()
                return

    def _give_up(self) -> None:
        """Write the stacks and end, without logging: the hung thread may hold logging's locks."""
        call = self._call()
        text = f"{self._what(call[1] if call else '')}\n".encode()
        for stream in self._streams:
            with contextlib.suppress(OSError):
                os.write(stream, text)
                faulthandler.dump_traceback(stream, all_threads=True)
        self._end()


class PolicyWatchdog(LoopWatchdog):
    """Watchdog for policy calls alone: the thread's loop may take any time."""

    def _place(self) -> object:
        call = self._call()
        return object() if call is None else call[0]

    def _what(self, call: str) -> str:
        return f"Error: {call}, for {self._limit_s:g} s now"
