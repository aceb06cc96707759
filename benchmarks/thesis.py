"""Example of the thesis: in which order four models load and compute, and how long that takes.

    python -m benchmarks.thesis

A server uses the order ``alternating``. If all models fit in memory, ``johnson`` (Johnson 1954)
sorts them into the best order; ``exhaustive`` finds the best order by trying all orders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from pipeswitch.cli import views
from pipeswitch.extras.lab import windows
from pipeswitch.scheduler.policies.orders import WindowJob, alternating


def johnson(jobs: Sequence[WindowJob]) -> windows.Order:
    """Return the order of Johnson's rule, which is the best if all models fit: first jobs that load
    faster than they compute, shortest load first; then the rest, longest computation first."""

    def rule(i: int) -> tuple[bool, float]:
        job = jobs[i]
        is_late = job.load_ms >= job.compute_ms
        return (is_late, -job.compute_ms if is_late else job.load_ms)

    return tuple(sorted(range(len(jobs)), key=rule))


def exhaustive(
    jobs: Sequence[WindowJob], memory: windows.Memory = windows.UNLIMITED
) -> windows.Order:
    """Return the best of all orders, in factorial time: use it for ten jobs at most."""
    best: tuple[float, windows.Order] = (math.inf, ())

    def extend(order: windows.Order, remaining: tuple[int, ...]) -> None:
        nonlocal best
        if not remaining:
            best = min(best, (windows.makespan_ms(jobs, order, memory), order))
        for index in remaining:
            if _is_ready(jobs, index, remaining):
                extend((*order, index), tuple(i for i in remaining if i != index))

    extend((), tuple(range(len(jobs))))
    return best[1]


def _is_ready(jobs: Sequence[WindowJob], index: int, remaining: Sequence[int]) -> bool:
    return not any(i < index and jobs[i].model == jobs[index].model for i in remaining)


EXAMPLE: Final = (
    WindowJob(model="A", load_ms=120.0, compute_ms=500.0),
    WindowJob(model="B", load_ms=125.0, compute_ms=400.0),
    WindowJob(model="C", load_ms=125.0, compute_ms=560.0),
    WindowJob(model="D", load_ms=62.5, compute_ms=482.5),
)
"""Jobs of the thesis' four clients. It has only pictures; with these numbers its totals result."""


def example() -> list[dict[str, Any]]:
    """Return total times without prefetch, and with prefetch in the order of each rule."""
    order: windows.Order = tuple(range(len(EXAMPLE)))
    ways: dict[str, tuple[windows.Order, windows.Memory]] = {
        "serial": (order, windows.Memory(is_prefetching=False)),
        "prefetch, fifo": (order, windows.UNLIMITED),
        "prefetch, alternating": (alternating(EXAMPLE), windows.UNLIMITED),
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
