"""Notices that a loop or a policy stands still, and tells systemd what there is to tell.

A loop that never turns again (an endless loop in a decision, a call that never returns) is the
one death that no process, channel or descriptor reports. A thread looks at it; with systemd
(``Type=notify``, ``WatchdogSec``) the manager looks too, which also covers a call that never gives
the interpreter lock back.
"""

from __future__ import annotations

import contextlib
import faulthandler
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

LOOKS: Final = 10  # in a row without a turn
TELL_WAIT_S: Final = 1.0
EXIT_HUNG: Final = os.EX_SOFTWARE


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

    def notify(self, **fields: object) -> None:
        """``tell(READY=1, STATUS="…")``. Never fails; waits for a manager that does not read."""
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
        """Send a beat to the manager, once a turn of the loop, as often as the manager asks for
        it.

        It watches from READY on. What is told before would only fill its queue, of ten messages.
        """
        if self._is_watched and self._beat_every_s and now_s >= self._beat_at_s:
            self._beat_at_s = now_s + self._beat_every_s
            self._send({"WATCHDOG": 1}, 0.0)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class TurnLooks:
    """Counts looks at a loop that found it where it was.

    Looks are counted, not time: this process may have been stopped as a whole (SIGSTOP), and then
    much time has passed for the watchdog as well as for the loop.
    """

    def __init__(self) -> None:
        self._seen: object = None
        self._count = 0

    def is_hung(self, place: object) -> bool:
        """Look once; return True if the last ``LOOKS`` looks in a row found this place."""
        self._count = self._count + 1 if place == self._seen else 0
        self._seen = place
        return self._count >= LOOKS


class LoopWatchdog:
    """Ends the process when the loop of the thread that starts it has not turned for ``limit_s``.

    Args:
        limit_s: without a turn; 0: never.
        streams: descriptors for the stacks of all threads.
        end: called then, on the watchdog's thread; it must not return in a real process.
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
        """Count a turn of the loop, at no further cost."""
        self._turns += 1

    def _call(self) -> tuple[FrameType, str] | None:
        """Return the policy call that the thread is in, else None."""
        return policy_call(sys._current_frames().get(self._watched))

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
        """Give up without logging: its locks may be held by the thread that hangs."""
        call = self._call()
        text = f"{self._what(call[1] if call else '')}\n".encode()
        for stream in self._streams:
            with contextlib.suppress(OSError):
                os.write(stream, text)
                faulthandler.dump_traceback(stream, all_threads=True)
        self._end()


class PolicyWatchdog(LoopWatchdog):
    """Watchdog of a thread whose loop may take any time, unlike a policy call inside it."""

    def _place(self) -> object:
        call = self._call()
        return object() if call is None else call[0]

    def _what(self, call: str) -> str:
        return f"Error: {call}, for {self._limit_s:g} s now"
