"""Example of the thesis: in which order four models load and compute, and how long that takes.

    python -m benchmarks.thesis

A server uses the order ``alternating``. If all models fit in memory, ``johnson`` (Johnson 1954)
sorts them into the best order; ``exhaustive`` finds the best order by trying all orders.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

from pipeswitch.cli import views
from pipeswitch.scheduler.policies.orders import WindowJob, alternating

EXAMPLE: Final = {
    "A": WindowJob(load_ms=120.0, compute_ms=500.0),
    "B": WindowJob(load_ms=125.0, compute_ms=400.0),
    "C": WindowJob(load_ms=125.0, compute_ms=560.0),
    "D": WindowJob(load_ms=62.5, compute_ms=482.5),
}
"""Jobs of the thesis' four clients. It has only pictures; these numbers give its totals."""


def total_ms(
    jobs: Sequence[WindowJob], order: Sequence[int], *, is_prefetching: bool = True
) -> float:
    """Return when the last job of an order ends, in ms.

    There is one link and one compute unit. Each serves one job at a time, in the order given. With
    ``is_prefetching``, a job's load may run while an earlier job computes.
    """
    loaded_ms = ended_ms = 0.0
    for index in order:
        load_ms, compute_ms = jobs[index]
        loaded_ms = (loaded_ms if is_prefetching else ended_ms) + load_ms
        ended_ms = max(loaded_ms, ended_ms) + compute_ms
    return ended_ms


def johnson(jobs: Sequence[WindowJob]) -> tuple[int, ...]:
    """Return the order of Johnson's rule, which is the best if all models fit: first jobs that load
    faster than they compute, shortest load first; then the rest, longest computation first."""

    def rule(i: int) -> tuple[bool, float]:
        job = jobs[i]
        is_late = job.load_ms >= job.compute_ms
        return (is_late, -job.compute_ms if is_late else job.load_ms)

    return tuple(sorted(range(len(jobs)), key=rule))


def exhaustive(jobs: Sequence[WindowJob]) -> tuple[int, ...]:
    """Return the best of all orders, in factorial time: use it for ten jobs at most."""
    orders = itertools.permutations(range(len(jobs)))
    return min(orders, key=lambda order: (total_ms(jobs, order), order))


def example() -> list[dict[str, Any]]:
    """Return total times without prefetch, and with prefetch in the order of each rule."""
    jobs = [*EXAMPLE.values()]
    order = tuple(range(len(jobs)))
    ways = {
        "serial": order,
        "prefetch, fifo": order,
        "prefetch, alternating": alternating(jobs),
        "prefetch, johnson": johnson(jobs),
        "prefetch, all orders tried": exhaustive(jobs),
    }
    return [
        {
            "way": way,
            "order": ", ".join([*EXAMPLE][i] for i in order),
            "total_ms": total_ms(jobs, order, is_prefetching=way != "serial"),
        }
        for way, order in ways.items()
    ]


if __name__ == "__main__":
    views.console().print(views.Listing(example(), ("way", "order", "total_ms")))
