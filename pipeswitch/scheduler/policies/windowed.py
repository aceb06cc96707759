"""Orders of a window: the models of what came first, arranged as if nothing else would come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...planning.windows import Job, Memory, Search, alternating, ga, johnson, neh
from .policy import Order, View, Waiting

WINDOW = 8  # models: insertion simulates 36 orders of eight, some milliseconds
SHORT_SEARCH = Search(population=12, survivors=4, generations=6)  # 60 of them: it is for comparison

Arrange = Callable[[Sequence[Job], Memory], Sequence[int]]


class Windowed(Order):
    """The oldest heads, in the order that ``arrange`` finds for their models' loads and work."""

    window = WINDOW
    ranks_runs = False

    def __init__(self, arrange: Arrange) -> None:
        self._arrange = arrange

    def may_overtake(self, request: Waiting, blocked: Waiting, view: View) -> bool:
        return True  # inside a window, which ends

    def arrange(self, heads: Sequence[Waiting], counts: Sequence[int], view: View) -> Sequence[int]:
        jobs = []
        for head, count in zip(heads, counts, strict=True):
            predicted = view.predict(head.model, head.batch)
            jobs.append(
                Job(
                    model=head.model,
                    load_ms=0.0 if head.is_resident else predicted.load_ms,
                    compute_ms=count * predicted.compute_ms,
                    size_bytes=head.size_bytes,
                )
            )
        largest = max(job.size_bytes for job in jobs)
        memory = Memory(capacity_bytes=max(view.capacity_bytes, largest), resident=view.residents())
        return self._arrange(jobs, memory)


ARRANGEMENTS: dict[str, Arrange] = {
    "alternating": lambda jobs, memory: alternating(jobs),
    "johnson": lambda jobs, memory: johnson(jobs),
    "neh": neh,
    "ga": partial(ga, search=SHORT_SEARCH),
}
