"""Is a profile still true? Measured against predicted switches, on line. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

WINDOW: Final = 20  # switches; one slow one, or nine, say nothing
LIMIT: Final = 0.15  # of the median; a plan made from times 15 % off costs about 0.2 % on average


class Drift:
    """The last switches of one model under one plan."""

    def __init__(self, window: int = WINDOW, limit: float = LIMIT) -> None:
        self._ratios: deque[float] = deque(maxlen=window)
        self._limit = limit

    def add(self, predicted_ms: float, measured_ms: float) -> str:
        """Take one switch; why the profile is not true any more, or empty.

        Nothing is said before the window is full, and once it was said the window starts anew.
        """
        if predicted_ms <= 0 or measured_ms <= 0:
            return ""
        self._ratios.append(measured_ms / predicted_ms)
        if len(self._ratios) < (self._ratios.maxlen or 0):
            return ""
        ratio = median(self._ratios)
        if abs(ratio - 1.0) <= self._limit:
            return ""
        count = self._ratios.maxlen
        self._ratios.clear()
        word = "longer" if ratio > 1 else "shorter"
        return f"{count} switches took {abs(ratio - 1.0):.0%} {word} than predicted (median)"

    @property
    def count(self) -> int:
        """Switches in the window."""
        return len(self._ratios)

    @property
    def ratio(self) -> float | None:
        """The median of measured over predicted; None before the first switch."""
        return median(self._ratios) if self._ratios else None
