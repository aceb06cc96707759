"""Virtual time: scheduled entries, and the next steps of processes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

Act = Callable[[], None]


class Move(NamedTuple):
    """Next step of one thread of a process.
    The clock executes it ``cost_ms`` after it became possible, unless another one replaces it."""

    thread: str
    what: str
    cost_ms: float
    act: Act


class ProcessPlans(dict[str, tuple[str, int]]):
    """Plans of a process on ``device``: thread -> (next step, number of the step's clock entry)."""

    device = 0


class Clock:
    """Clock: the current instant, and entries by due time; equal ones in the order of creation."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._entries: list[tuple[float, int, ProcessPlans | None, str, Act]] = []
        self._count = 0

    def at(self, due_ms: float, act: Act) -> None:
        """Schedule an act at the instant ``due_ms``."""
        self._push(due_ms, None, "", act)

    def plan(self, plans: ProcessPlans, moves: Sequence[Move]) -> None:
        """Replace a process's entries by its moves; an entry for an unchanged step stays."""
        if plans:
            next_by_thread = {move.thread: move.what for move in moves}
            for thread, (what, _) in list(plans.items()):
                if next_by_thread.get(thread) != what:
                    del plans[thread]
        for thread, what, cost_ms, act in moves:
            if thread not in plans:
                plans[thread] = (what, self._push(self.now_ms + cost_ms, plans, thread, act))

    def next_ms(self) -> float | None:
        """Return the instant of the next entry; None if there is none."""
        entries = self._entries
        while entries and not self._is_planned(*entries[0][1:4]):
            heapq.heappop(entries)
        return entries[0][0] if entries else None

    def take(self) -> tuple[Act, ProcessPlans | None]:
        """Advance to the next entry; return its act and plans. Call ``next_ms`` first."""
        due_ms, _, plans, thread, act = heapq.heappop(self._entries)
        self.now_ms = max(self.now_ms, due_ms)
        if plans is not None:
            del plans[thread]
        return act, plans

    def _push(self, due_ms: float, plans: ProcessPlans | None, thread: str, act: Act) -> int:
        self._count += 1
        heapq.heappush(self._entries, (due_ms, self._count, plans, thread, act))
        return self._count

    @staticmethod
    def _is_planned(number: int, plans: ProcessPlans | None, thread: str) -> bool:
        return plans is None or plans.get(thread, ("", 0))[1] == number
