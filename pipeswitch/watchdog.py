"""Notices that a thread stands still, and ends the process.

A loop that never turns again (an endless loop in a decision, a call that never returns) is the
one death that no process, channel or descriptor reports. A thread looks at it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final

from .policies import policy_call

LOOKS: Final = 10  # in a row without a turn
EXIT_HUNG: Final = os.EX_SOFTWARE


class TurnLooks:
    """Counts looks at a loop that found it where it was.

    Looks are counted, not time: this process may have been stopped as a whole (SIGSTOP), and then
    much time has passed for the watchdog as well as for the loop.
    """

    def __init__(self) -> None:
        self._seen: object = None
        self._count = 0

    def is_hung(self, place: object) -> bool:
        """A look; whether it is the last of ``LOOKS`` in a row that found this place."""
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
        self, limit_s: float, streams: Sequence[int],
        end: Callable[[], None] = lambda: os._exit(EXIT_HUNG),
    ) -> None:  # fmt: skip
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
        """The loop has come round; all that a turn pays."""
        self._turns += 1

    def _call(self) -> tuple[FrameType, str] | None:
        """Of a policy, where the thread is in one."""
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
        """No logging: its locks may be held by the thread that hangs."""
        call = self._call()
        text = f"{self._what(call[1] if call else '')}\n".encode()
        for stream in self._streams:
            with contextlib.suppress(OSError):
                os.write(stream, text)
                faulthandler.dump_traceback(stream, all_threads=True)
        self._end()


class PolicyWatchdog(LoopWatchdog):
    """Of a thread whose loop may take as long as it likes, but none of a policy's calls."""

    def _place(self) -> object:
        call = self._call()
        return object() if call is None else call[0]

    def _what(self, call: str) -> str:
        return f"Error: {call}, for {self._limit_s:g} s now"
