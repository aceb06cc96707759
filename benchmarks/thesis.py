"""The thesis' worked example: how its order compares with all others.

    python -m benchmarks.thesis

A server decides by ``alternating``; ``johnson`` (Johnson 1954) and ``exhaustive`` are the best
orders, by a closed form where all models fit and by trying all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from pipeswitch.cli import views
from pipeswitch.planning import windows


def johnson(jobs: Sequence[windows.Job]) -> windows.Order:
    """Johnson's rule: jobs that load shorter than they compute first, the shortest load first;
    then the others, the longest compute first. The optimum where all models fit."""

    def rule(i: int) -> tuple[bool, float]:
        job = jobs[i]
        is_late = job.load_ms >= job.compute_ms
        return (is_late, -job.compute_ms if is_late else job.load_ms)

    return tuple(sorted(range(len(jobs)), key=rule))


def exhaustive(
    jobs: Sequence[windows.Job], memory: windows.Memory = windows.UNLIMITED
) -> windows.Order:
    """Return the best of all orders; at most for ten jobs, since the time is factorial."""
    best: tuple[float, windows.Order] = (math.inf, ())

    def extend(order: windows.Order, left: tuple[int, ...]) -> None:
        nonlocal best
        if not left:
            best = min(best, (windows.makespan_ms(jobs, order, memory), order))
        for index in left:
            if _is_ready(jobs, index, left):
                extend((*order, index), tuple(i for i in left if i != index))

    extend((), tuple(range(len(jobs))))
    return best[1]


def _is_ready(jobs: Sequence[windows.Job], index: int, left: Sequence[int]) -> bool:
    """Return True if no earlier job of the same model is left."""
    return not any(i < index and jobs[i].model == jobs[index].model for i in left)


EXAMPLE: Final = (
    windows.Job(model="A", load_ms=120.0, compute_ms=500.0),
    windows.Job(model="B", load_ms=125.0, compute_ms=400.0),
    windows.Job(model="C", load_ms=125.0, compute_ms=560.0),
    windows.Job(model="D", load_ms=62.5, compute_ms=482.5),
)
"""Four clients; the thesis' figures are pictures, these numbers give its three totals."""


def example() -> list[dict[str, Any]]:
    """Return the totals: serial, with prefetch, and with prefetch in the order of each rule."""
    given: windows.Order = tuple(range(len(EXAMPLE)))
    ways: dict[str, tuple[windows.Order, windows.Memory]] = {
        "serial": (given, windows.Memory(is_prefetching=False)),
        "prefetch, fifo": (given, windows.UNLIMITED),
        "prefetch, alternating": (windows.alternating(EXAMPLE), windows.UNLIMITED),
        "prefetch, johnson": (johnson(EXAMPLE), windows.UNLIMITED),
        "prefetch, all orders tried": (exhaustive(EXAMPLE), windows.UNLIMITED),
    }
    return [
        {
            "way": way,
            "order": ", ".join(EXAMPLE[i].model for i in order),
            "total_ms": windows.makespan_ms(EXAMPLE, order, memory),
        }
        for way, (order, memory) in ways.items()
    ]


if __name__ == "__main__":
    views.console().print(views.Listing(example(), ("way", "order", "total_ms")))
