"""How far a training script may run ahead of the device (ADR 14)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .bindings import Cuda

LOOKS_PER_GROUP: Final = 8  # gate points: a few layers, some thirty groups in a step of ResNet-50
GROUPS_AHEAD: Final = 2


class RunAhead:
    """Called at every gate point of a script; at most two groups are queued behind the running one.

    So a request waits for no more than that after a stop. Used by the script's thread alone.
    """

    def __init__(self, cuda: Cuda, current_stream: Callable[[], int | None]) -> None:
        """``current_stream``: the handle of the stream that the script computes on now; None while
        it captures a graph there: nothing is queued then, and asking would spoil the capture."""
        self._cuda = cuda
        self._current_stream = current_stream
        self._looks = 0
        self._groups = 0
        self._events = [cuda.event() for _ in range(GROUPS_AHEAD + 1)]

    def look(self) -> None:
        """Put an event behind a finished group, and wait for the one of two groups before."""
        self._looks += 1
        if self._looks % LOOKS_PER_GROUP:
            return
        stream = self._current_stream()
        if stream is None:
            return
        newest = self._groups % len(self._events)
        self._cuda.record(self._events[newest], stream)
        self._groups += 1
        oldest = self._events[self._groups % len(self._events)]  # unrecorded ones are done
        if not self._cuda.is_done(oldest):
            self._cuda.wait(oldest)
