"""When the scheduler wants to be called again though no event comes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable


class Wakeups:
    """Instants in milliseconds, each once."""

    def __init__(self, instants: Iterable[float] = ()) -> None:
        self._known = set(instants)
        self._heap = sorted(self._known)

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_ms: float) -> None:
        if at_ms not in self._known:
            self._known.add(at_ms)
            heapq.heappush(self._heap, at_ms)

    def forget_until(self, now_ms: float) -> None:
        """Those have come."""
        while self._heap and self._heap[0] <= now_ms:
            self._known.remove(heapq.heappop(self._heap))

    @property
    def next_ms(self) -> float:
        """Infinity when only events matter."""
        return self._heap[0] if self._heap else math.inf

    @property
    def all_ms(self) -> tuple[float, ...]:
        """In order."""
        return tuple(sorted(self._heap))
