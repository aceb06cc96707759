"""How long a request will take, from what its model took before. Pure."""

from __future__ import annotations

import bisect
import math
from collections import deque
from typing import Final

from .policies import Prediction

KEPT: Final = 64  # measurements of each kind: an old one says little of today


class Rolling:
    """The last measurements of one thing, in milliseconds."""

    __slots__ = ("_ordered", "_values", "p50", "p95")

    def __init__(self) -> None:
        self._values: deque[float] = deque()
        self._ordered: list[float] = []
        self.p50 = self.p95 = 0.0

    def add(self, value: float) -> None:
        """One more; the oldest may go."""
        ordered = self._ordered
        if len(ordered) == KEPT:
            del ordered[bisect.bisect_left(ordered, self._values.popleft())]
        self._values.append(value)
        bisect.insort(ordered, value)
        self.p50 = ordered[(len(ordered) - 1) // 2]
        self.p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]


class Predictions:
    """Of each model: its copies, and its computations by batch."""

    def __init__(self) -> None:
        self._loads: dict[str, Rolling] = {}
        self._computations: dict[str, dict[int, Rolling]] = {}

    def sent(self, model: str, took_ms: float) -> None:
        """All groups of it were copied to the device."""
        self._loads.setdefault(model, Rolling()).add(took_ms)

    def computed(self, model: str, batch: int, took_ms: float) -> None:
        """A request of it has computed, waits for its groups apart."""
        self._computations.setdefault(model, {}).setdefault(batch, Rolling()).add(took_ms)

    def forget(self, model: str) -> None:
        """It is unregistered: another may get its name."""
        self._loads.pop(model, None)
        self._computations.pop(model, None)

    def predict(self, model: str, batch: int) -> Prediction:
        """Of a request of that batch: as measured, else as of the nearest smaller batch, which it
        is not faster than, else zero."""
        loads = self._loads.get(model)
        batches = self._computations.get(model, {})
        known = batches.get(batch)
        if known is None:
            smaller = max((one for one in batches if one < batch), default=None)
            known = batches[smaller] if smaller is not None else None
        return Prediction(
            loads.p50 if loads is not None else 0.0,
            known.p50 if known is not None else 0.0,
            known.p95 if known is not None else 0.0,
        )
