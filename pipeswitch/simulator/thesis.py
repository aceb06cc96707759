"""The thesis' worked example, and how far its orders and their rivals are from the best. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from ..planning.windows import RULES, Job, Memory, Order, exhaustive, makespan_ms

EXAMPLE: Final = (
    Job(model="A", load_ms=120.0, compute_ms=500.0),
    Job(model="B", load_ms=125.0, compute_ms=400.0),
    Job(model="C", load_ms=125.0, compute_ms=560.0),
    Job(model="D", load_ms=62.5, compute_ms=482.5),
)
"""Four clients; the thesis' figures are pictures, these numbers give its three totals."""
CASES: Final = ("unlimited", "tight", "clients")
"""7 jobs with room for all; with room for 1.5 times the mean of the two largest; 4 clients with
2 windows each, as tight."""
RATIOS: Final = (0.3, 1.0, 3.0)
"""Of the mean load to the mean computing time."""
SPREAD: Final = 0.6  # sigma of the logarithms of sizes and computing times
BYTES: Final = 1_000_000  # a model's in the middle
BY_WINDOW: Final = ("fifo", "alternating", "johnson")
"""Rules that look at one window at a time; the others see all of a client's windows."""


@dataclass(frozen=True, kw_only=True)
class Total:
    """One way through the worked example."""

    way: str
    order: str
    total_ms: float


def example() -> list[Total]:
    """Serial, with prefetch, and with prefetch in each rule's order."""
    given: Order = tuple(range(len(EXAMPLE)))
    serial = makespan_ms(EXAMPLE, given, Memory(is_prefetching=False))
    orders = {f"prefetch, {name}": rule(EXAMPLE, Memory()) for name, rule in RULES.items()}
    orders["prefetch, all orders tried"] = exhaustive(EXAMPLE)
    return [
        Total(way="serial", order=_named(given), total_ms=serial),
        *(Total(way=way, order=_named(order), total_ms=makespan_ms(EXAMPLE, order))
          for way, order in orders.items()),
    ]  # fmt: skip


def _named(order: Order) -> str:
    return ", ".join(EXAMPLE[i].model for i in order)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Of one rule in one cell: by how much its makespan exceeds the best order's, in percent."""

    case: str
    ratio: float
    rule: str
    mean: float
    worst: float


def gaps(instances: int, watch: Callable[[float], None] | None = None) -> Iterator[Gap]:
    """Each case, ratio and rule over random instances; the same ones at each call."""
    cells = [(case, ratio) for case in CASES for ratio in RATIOS]
    for number, (case, ratio) in enumerate(cells):
        found: dict[str, list[float]] = {name: [] for name in RULES}
        for seed in range(instances):
            if watch is not None:
                watch((number + seed / instances) / len(cells))
            jobs, memory = instance(Random(seed), case, ratio)
            best_ms = makespan_ms(jobs, exhaustive(jobs, memory), memory)
            for name in RULES:
                took_ms = makespan_ms(jobs, order_by(name, jobs, memory), memory)
                found[name].append(100.0 * (took_ms / best_ms - 1.0))
        for name, over in found.items():
            yield Gap(case=case, ratio=ratio, rule=name, mean=sum(over) / len(over),
                      worst=max(over))  # fmt: skip


def instance(chance: Random, case: str, ratio: float) -> tuple[list[Job], Memory]:
    """One of a cell's. In ``clients`` the second window's jobs follow the first one's."""
    windows = 2 if case == "clients" else 1
    count = 4 if windows == 2 else 7
    sizes = [math.exp(chance.gauss(0.0, SPREAD)) for _ in range(count)]
    compute_ms = [100.0 * math.exp(chance.gauss(0.0, SPREAD)) for _ in range(count)]
    jobs = [
        Job(model=f"m{i}", load_ms=100.0 * ratio * sizes[i], compute_ms=compute_ms[i],
            size_bytes=int(BYTES * sizes[i]), client=f"c{i}" if windows > 1 else "")
        for _ in range(windows) for i in range(count)
    ]  # fmt: skip
    if case == "unlimited":
        return jobs, Memory()
    ordered = sorted(job.size_bytes for job in jobs[:count])
    return jobs, Memory(capacity_bytes=max(ordered[-1], 0.75 * sum(ordered[-2:])))


def order_by(name: str, jobs: Sequence[Job], memory: Memory) -> Order:
    """A rule's order; window after window where it sees no more than one."""
    clients = {job.client for job in jobs}
    size = len(jobs) if name not in BY_WINDOW or clients == {""} else len(clients)
    order: list[int] = []
    for begin in range(0, len(jobs), size):
        order += [begin + i for i in RULES[name](jobs[begin : begin + size], memory)]
    return tuple(order)
