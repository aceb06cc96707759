"""Orders of requests: by arrival, deadline, predicted time or model; and alternating ones."""

from __future__ import annotations

from collections.abc import Sequence

from ...planning.windows import WindowJob, alternating
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
            compute_ms = count * predicted.compute_ms
            jobs.append(WindowJob(model=head.model, load_ms=load_ms, compute_ms=compute_ms))
        return alternating(jobs)
