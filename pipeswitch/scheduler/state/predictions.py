"""Predicted times of a request, from its model's earlier runs. Pure."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from ..policies import Prediction

KEPT: Final = 64  # number of measurements of each kind; older ones say little about the present
KEPT_BATCHES: Final = 64  # limit of batch sizes for each model, since clients choose them
LEAST_SHARE: Final = 1 / 16
OLD_MS: Final = 5000.0  # one measurement is valid for this time, two for twice as long


class Rolling:
    """Latest measurements of one quantity, in milliseconds."""

    __slots__ = ("_ordered", "_values", "fresh_at_ms", "high", "p50", "p95")

    def __init__(self) -> None:
        self._values: deque[float] = deque()
        self._ordered: list[float] = []
        self.high = self.p50 = self.p95 = self.fresh_at_ms = 0.0

    def add(self, value: float, now_ms: float) -> None:
        """Add a measurement; the oldest may be dropped."""
        self.fresh_at_ms = now_ms
        ordered = self._ordered
        if len(ordered) == KEPT:
            del ordered[bisect.bisect_left(ordered, self._values.popleft())]
        self._values.append(value)
        bisect.insort(ordered, value)
        self.high = ordered[int(0.95 * (len(ordered) - 1))]  # ignores one slow value among few
        self.p50 = ordered[(len(ordered) - 1) // 2]
        self.p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]

    def mean(self) -> float:
        """Return the mean, capped at ``high``, since a few slow values are not trusted."""
        return min(self.high, sum(self._ordered) / len(self._ordered))

    def is_old(self, now_ms: float) -> bool:
        """Return True if it is time to measure again.
        A single high value may come from a slow moment; more values stay valid for longer."""
        return now_ms - self.fresh_at_ms >= OLD_MS * len(self._ordered)


class ByBatch:
    """Computation times of a model by batch; beyond a limit the oldest batch is dropped."""

    __slots__ = ("_batches", "_of")

    def __init__(self) -> None:
        self._of: dict[int, Rolling] = {}  # batch -> its times, the last measured at the end
        self._batches: list[int] = []  # sorted

    def add(self, batch: int, value: float, now_ms: float) -> None:
        """Add a measurement of that batch."""
        times = self._of.pop(batch, None)
        if times is None:
            if len(self._of) == KEPT_BATCHES:
                oldest = next(iter(self._of))
                del self._of[oldest]
                self._batches.remove(oldest)
            times = Rolling()
            bisect.insort(self._batches, batch)
        self._of[batch] = times
        times.add(value, now_ms)

    def nearest(self, batch: int) -> Rolling | None:
        """Return the measurements of that batch, else of the nearest smaller one."""
        index = bisect.bisect_right(self._batches, batch)
        return self._of[self._batches[index - 1]] if index else None

    def at_most_ms(self, batch: int) -> float:
        """Return the 95th percentile of the nearest smaller batch, scaled up, or a larger one's."""
        index = bisect.bisect_right(self._batches, batch)
        known = self._batches[max(0, index - 1)]
        return self._of[known].p95 * max(1.0, batch / known)


class Safe(NamedTuple):
    """Robust 95th percentiles in milliseconds, and a mean; 0: nothing is measured yet."""

    load_ms: float
    compute_ms: float
    mean_ms: float  # mean computation, to predict the total of many


class Predictions:
    """Measured times of each model: its copies, and its computations by batch."""

    def __init__(self) -> None:
        self._loads: dict[str, Rolling] = {}
        self._computations: dict[str, ByBatch] = {}
        # Part of its bytes that the next copy of a model with variants will bring.
        self.shares: dict[str, Callable[[], float]] = {}
        self._slices = Rolling()  # ms per byte of the copies of slices out of the device
        self._errors = Rolling()  # actual minus predicted end

    @property
    def margin_ms(self) -> float:
        """Robust 95th percentile of the requests' delay beyond their predicted end; at least 0."""
        return max(0.0, self._errors.high)

    def ended(self, late_ms: float, now_ms: float) -> None:
        """Record how much later than predicted an accepted request was answered."""
        self._errors.add(late_ms, now_ms)

    def sent(self, model: str, took_ms: float, now_ms: float) -> None:
        """Record the time of a copy to the device, scaled to that of all the model's bytes. A small
        part is not recorded, because its time says little about the rest."""
        if (share := self.shares[model]() if model in self.shares else 1.0) >= LEAST_SHARE:
            self._loads.setdefault(model, Rolling()).add(took_ms / share, now_ms)

    def swapped_out(self, size_bytes: int, took_ms: float, now_ms: float) -> None:
        """Record the time in which a job's slice was copied out."""
        self._slices.add(took_ms / size_bytes, now_ms)

    def swap_out_ms(self, size_bytes: int) -> float:
        """Return a high percentile of the time to copy a slice out; 0: nothing is measured yet."""
        return self._slices.high * size_bytes

    def computed(self, model: str, batch: int, took_ms: float, now_ms: float) -> None:
        """Record a computation's time, without waits for its groups."""
        self._computations.setdefault(model, ByBatch()).add(batch, took_ms, now_ms)

    def remove(self, model: str) -> None:
        """Drop the times of an unregistered model: another model may get its name."""
        self._loads.pop(model, None)
        self.shares.pop(model, None)
        self._computations.pop(model, None)

    def predict(self, model: str, batch: int) -> Prediction:
        """Return the times of that batch, else of the nearest smaller one, else zeros."""
        loads, known = self._known(model, batch)
        share = self.shares[model]() if model in self.shares else 1.0
        return Prediction(
            loads.p50 * share if loads is not None else 0.0,
            known.p50 if known is not None else 0.0,
            known.p95 if known is not None else 0.0,
        )

    def safe(self, model: str, batch: int) -> Safe:
        """Return high percentiles of the same measurements: few requests exceed them."""
        loads, known = self._known(model, batch)
        share = self.shares[model]() if model in self.shares else 1.0
        return Safe(
            loads.high * share if loads is not None else 0.0,
            known.high if known is not None else 0.0,
            known.mean() if known is not None else 0.0,
        )

    def at_most_ms(self, model: str, batch: int) -> float:
        """Return a time that 95 % of the batch's runs should not exceed; 0 if nothing is measured.
        A larger batch is assumed to cost at most as much as its rows in smaller batches."""
        known = self._computations.get(model)
        return known.at_most_ms(batch) if known is not None else 0.0

    def is_due(self, model: str, batch: int, *, is_sent: bool, now_ms: float) -> bool:
        """Return True if the batch's times are old, and no dispatched request will renew them.
        ``is_sent``: whether the model has to be copied."""
        return any(one.is_old(now_ms) for one in self._counted(model, batch, is_sent=is_sent))

    def on_dispatched(self, model: str, batch: int, *, is_sent: bool, now_ms: float) -> None:
        """Record that a request will be measured: old times stay valid for one more period."""
        for one in self._counted(model, batch, is_sent=is_sent):
            if one.is_old(now_ms):
                one.fresh_at_ms = now_ms

    def _counted(self, model: str, batch: int, *, is_sent: bool) -> list[Rolling]:
        loads, known = self._known(model, batch)
        return [one for one in (known, loads if is_sent else None) if one is not None]

    def _known(self, model: str, batch: int) -> tuple[Rolling | None, Rolling | None]:
        batches = self._computations.get(model)
        return self._loads.get(model), batches.nearest(batch) if batches is not None else None
