"""Order of a window: the models of the oldest requests, arranged as if no others would come."""

from __future__ import annotations

from collections.abc import Sequence

from ...planning.windows import Job, alternating
from .policy import Order, View, Waiting

WINDOW = 8  # models


class Alternating(Order):
    """The thesis' order of the oldest heads, by their models' loads and work."""

    window = WINDOW
    ranks_runs = False

    def may_overtake(self, request: Waiting, blocked: Waiting, view: View) -> bool:
        return True  # inside a window, which ends

    def arrange(self, heads: Sequence[Waiting], counts: Sequence[int], view: View) -> Sequence[int]:
        jobs = []
        for head, count in zip(heads, counts, strict=True):
            predicted = view.predict(head.model, head.batch)
            load_ms = 0.0 if head.is_resident else predicted.load_ms
            compute_ms = count * predicted.compute_ms
            jobs.append(Job(model=head.model, load_ms=load_ms, compute_ms=compute_ms))
        return alternating(jobs)
