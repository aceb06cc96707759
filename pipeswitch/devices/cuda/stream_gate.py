"""Limits on how far a script runs ahead of the GPU, and how its stream is held (ADR 14).

With ``StreamGate`` the GPU stops by itself. At each *mark* the script's stream gets three
operations: write ``reached = k``; wait until ``run`` is 1; write ``passed = k``. The words are on
the control page. To hold the stream, a thread stores ``run = 0``: the GPU finishes the work before
the next mark and waits there, whatever is enqueued behind it. Neither ``hold`` nor ``release``
makes a CUDA call: if a held stream's launch queue is full (about 1,000 launches), any call may
block.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Final

from ...ipc.control_page import BOARD_BYTES, MARKS, RUN, Board
from ...ipc.gate import Where
from ..worker_device import Pacer, now_ms
from .bindings import Cuda, CudaError

LOOKS_PER_GROUP: Final = 4  # gate points of a group; a step of ResNet-50 has about 27 groups
WORD_BYTES: Final = 8
LOW_HALF: Final = (1 << 32) - 1
HOLD_LIMIT_S: Final = 0.002  # then the turn is given away all the same: a group may last longer
HOLD_POLL_S: Final = 20e-6  # longer than the GPU takes from the end of a wait to the next write


class RunAhead(Pacer):
    """Limit on the work that a script enqueues: at most two groups behind the running one.

    After a stop, a request waits only for these groups, so the stream need not be held.
    """

    ahead = 2

    def __init__(self, cuda: Cuda, current_stream: Callable[[], int | None]) -> None:
        """``current_stream``: returns the handle of the script's compute stream; None while the
        script captures a graph there, because then nothing runs, and a query spoils the capture."""
        self._cuda, self._current_stream = cuda, current_stream
        self._looks = self._groups = 0
        self._events = [cuda.event() for _ in range(self.ahead + 1)]

    def look(self) -> None:
        """Record an event every ``LOOKS_PER_GROUP`` calls; wait for the event two groups before."""
        self._looks += 1
        if self._looks % LOOKS_PER_GROUP == 0:
            self._on_group()

    def _on_group(self) -> None:
        if (stream := self._current_stream()) is not None:
            self._end_group(stream)

    def _end_group(self, stream: int) -> None:
        newest = self._groups % len(self._events)
        self._cuda.record(self._events[newest], stream)
        self._groups += 1
        oldest = self._events[self._groups % len(self._events)]  # done if never recorded
        if not self._cuda.is_done(oldest):
            began_at_ms = now_ms()
            self._cuda.wait(oldest)
            self.waits += 1
            self.waited_ms += now_ms() - began_at_ms


class StreamGate(RunAhead):
    """Marks in a script's stream, which may be one step ahead of the GPU.

    The first stream that gets a mark reports its progress; other streams only wait at their marks.
    """

    ahead = 1
    holds = True

    def __init__(
        self,
        cuda: Cuda,
        control_page: Board,
        slot: int,
        current_stream: Callable[[], int | None],
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Open the stream, and pin the control page for this process.

        Raises:
            CudaError: the page cannot be pinned.
        """
        super().__init__(cuda, current_stream)
        self._control_page, self._slot, self._pause = control_page, slot, pause
        control_page.open_stream(slot)
        cuda.register(control_page.address, BOARD_BYTES)
        page = cuda.device_pointer(control_page.address)
        self._run, self._reached = (page + WORD_BYTES * (word + slot) for word in (RUN, MARKS))
        self._stream: int | None = None  # the stream that reports its progress
        self._marked = 0
        self._is_away = True  # the script enqueues nothing behind the last mark
        self._is_over = False

    def enter(self) -> None:
        self._is_away = False

    def mark(self) -> None:
        """Mark the script's current stream, unless it captures."""
        stream = self._current_stream()
        if stream is None:
            return
        if self._stream is None:
            self._stream = stream
        if stream != self._stream:
            self._cuda.wait_value(stream, self._run, 1)
            return
        self._marked = mark = self._marked + 1 & LOW_HALF  # before the GPU can report it
        self._cuda.write_value(stream, self._reached, mark)
        self._cuda.wait_value(stream, self._run, 1)
        self._cuda.write_value(stream, self._reached + WORD_BYTES // 2, mark)

    _on_group = mark

    def leave(self, where: Where) -> None:
        """Mark the stream, so that a held queue ends with a wait; at the end of a step, wait until
        the step before has run."""
        with contextlib.suppress(CudaError):  # the script's own calls will raise it
            self.mark()
            self._is_away = True
            if where == "loader" and (stream := self._current_stream()) is not None:
                self._end_group(stream)

    def hold(self, limit_s: float = HOLD_LIMIT_S) -> bool:
        """Stop the stream at its next mark. Return False if it has not arrived within ``limit_s``;
        it stops there nevertheless."""
        self._control_page.write_run(self._slot, self._is_over)
        ends_at_s, before = time.monotonic() + limit_s, (0, 0)
        while not self._is_over:
            now = reached, passed = self._control_page.marks(self._slot)
            if self._is_away and passed == self._marked:
                return True
            if reached == passed + 1 & LOW_HALF and now == before:  # seen twice: the wait is real
                return True
            if time.monotonic() > ends_at_s:
                self._control_page.write_run(self._slot, False)  # the controller may have opened it
                if not self._is_over:
                    return False
            before = now
            self._pause(HOLD_POLL_S)
        self.release()
        return True

    def has_queue(self) -> bool:
        return self._control_page.marks(self._slot)[1] != self._marked

    def release(self, *, for_good: bool = False) -> None:
        """See ``Pacer``. ``for_good``: the process ends, and its exit waits for the stream."""
        self._is_over |= for_good
        self._control_page.write_run(self._slot, True)
