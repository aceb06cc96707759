"""Orders of requests: by arrival, deadline, predicted time or model; and alternating ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .policy import Order, View, Waiting, reuse_of

MAX_WAITS = 10  # requests without a deadline get this many times ``max_wait_ms``
WINDOW = 8  # number of models that ``Alternating`` arranges at a time


class AgingOrder(Order):
    """Order in which requests older than ``max_wait_ms`` go first, the oldest before the others.
    While such a request waits for its model's memory, no other one goes ahead of it."""

    def __init__(self, *, max_wait_ms: float) -> None:
        self.aging_ms = max_wait_ms

    def rank(self, head: Waiting, view: View) -> tuple[float, ...]:
        if view.now_ms - head.arrived_at_ms >= self.aging_ms:
            return (0.0, head.arrived_at_ms)
        return (1.0, *self.rank_in_time(head, view), head.arrived_at_ms)

    def rank_in_time(self, head: Waiting, view: View) -> tuple[float, ...]:
        """Return the rank of a request that has not waited too long."""
        raise NotImplementedError

    def may_backfill(self, request: Waiting, blocked: Waiting, view: View) -> bool:
        return view.now_ms - blocked.arrived_at_ms < self.aging_ms


class FirstCome(Order):
    """First come, first served."""

    sorts_by = "arrival"
    ranks_runs = False


class EarliestDeadline(Order):
    """Earliest deadline first. A request without a deadline counts as due after ten times
    ``max_wait_ms``, so no request waits for ever."""

    sorts_by = "deadline"
    ranks_runs = False

    def __init__(self, *, max_wait_ms: float) -> None:
        self._max_wait_ms = max_wait_ms

    def key(self, request: Waiting) -> tuple[float, ...]:
        due_at_ms = request.deadline_at_ms
        if due_at_ms is None:
            due_at_ms = request.arrived_at_ms + MAX_WAITS * self._max_wait_ms
        return (due_at_ms, request.arrived_at_ms)

    def rank(self, head: Waiting, view: View) -> tuple[float, ...]:
        return self.key(head)

    def may_backfill(self, request: Waiting, blocked: Waiting, view: View) -> bool:
        return view.now_ms - blocked.arrived_at_ms < self._max_wait_ms


class ShortestFirst(AgingOrder):
    """Least predicted time first: the computation, plus the model's copy if it is absent."""

    def key(self, request: Waiting) -> tuple[float, ...]:
        return (request.batch, request.arrived_at_ms)

    def rank_in_time(self, head: Waiting, view: View) -> tuple[float, ...]:
        predicted = view.predict(head.model, head.batch)
        return (predicted.compute_ms + (0.0 if head.is_resident else predicted.load_ms),)


class Collate(AgingOrder):
    """Requests grouped by model (A A A B B), with as few switches as ``max_wait_ms`` allows.
    The computing model comes first, then models on the device, then the model whose first request
    waited longest."""

    def rank_in_time(self, head: Waiting, view: View) -> tuple[float, ...]:
        return (reuse_of(head),)


class WindowJob(NamedTuple):
    """Job in a window: one request, or all requests of one client's turn."""

    load_ms: float  # time to copy the model over the link; 0: it is resident
    compute_ms: float


def alternating(jobs: Sequence[WindowJob]) -> tuple[int, ...]:
    """Return the jobs' order by weight: the largest, the smallest, the second largest, and so on.

    A job's weight is its compute time (the reward) divided by its load time (the penalty). It is
    infinite if the job's model is resident. The thesis also divides by the window's length, which
    changes no order. Among equal weights, the job with the shorter load ranks higher. A job with a
    large weight computes for a long time, which hides the long load of the next job.
    """

    def weight(i: int) -> tuple[float, float]:
        load_ms = jobs[i].load_ms
        return (jobs[i].compute_ms / load_ms if load_ms else math.inf, -load_ms)

    ranked = sorted(range(len(jobs)), key=weight, reverse=True)
    half = (len(ranked) + 1) // 2
    strong, weak = ranked[:half], ranked[half:][::-1]
    return (*(i for pair in zip(strong, weak, strict=False) for i in pair), *strong[len(weak) :])


class Alternating(Order):
    """Order of the thesis (docs/papers.md): models with long and with short loads in turn."""

    window = WINDOW
    ranks_runs = False

    def may_backfill(self, request: Waiting, blocked: Waiting, view: View) -> bool:
        return True  # every window ends, so no request waits for ever

    def arrange(self, heads: Sequence[Waiting], counts: Sequence[int], view: View) -> Sequence[int]:
        jobs = []
        for head, count in zip(heads, counts, strict=True):
            predicted = view.predict(head.model, head.batch)
            load_ms = 0.0 if head.is_resident else predicted.load_ms
            jobs.append(WindowJob(load_ms, count * predicted.compute_ms))
        return alternating(jobs)
