"""The thesis' worked example, and how far its order and its rivals are from the best.

Sources of the rivals: the thesis' genetic search (``ga``); Johnson 1954 (``johnson``); Nawaz,
Enscore and Ham 1983 (``neh``). A server decides by ``alternating`` alone.

    python -m benchmarks.thesis [--windows 40]

Prints the example; with ``--windows`` the orders of so many random windows instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from rich.table import Table

from pipeswitch.cli import views
from pipeswitch.planning.windows import (
    UNLIMITED,
    Job,
    Memory,
    Order,
    alternating,
    makespan_ms,
)


def fifo(jobs: Sequence[Job]) -> Order:
    """As they came."""
    return tuple(sorted(range(len(jobs)), key=lambda i: jobs[i].arrived_at_ms))


def johnson(jobs: Sequence[Job]) -> Order:
    """Johnson's rule: jobs that load shorter than they compute first, the shortest load first;
    then the others, the longest compute first. The optimum where all models fit."""

    def rule(i: int) -> tuple[bool, float]:
        job = jobs[i]
        is_late = job.load_ms >= job.compute_ms
        return (is_late, -job.compute_ms if is_late else job.load_ms)

    return tuple(sorted(range(len(jobs)), key=rule))


def neh(jobs: Sequence[Job], memory: Memory = UNLIMITED) -> Order:
    """Insertion: the longest job first, each next one where the makespan is least.

    n (n + 1) / 2 simulations for n jobs.
    """
    order: Order = ()
    longest = sorted(range(len(jobs)), key=lambda i: -(jobs[i].load_ms + jobs[i].compute_ms))
    for index in longest:
        candidates = [(*order[:at], index, *order[at:]) for at in range(len(order) + 1)]
        order = min(candidates, key=lambda candidate: makespan_ms(jobs, candidate, memory))
    return order


@dataclass(frozen=True, kw_only=True)
class Search:
    """How ``ga`` searches: 24 + 20 x 16 = 344 simulations as it stands."""

    population: int = 24
    survivors: int = 8
    generations: int = 20
    mutation: float = 0.3  # probability, for each child
    seed: int = 0


def ga(jobs: Sequence[Job], memory: Memory = UNLIMITED, search: Search = Search()) -> Order:
    """The thesis' genetic search. The best survive unchanged, so no generation is worse than the
    one before; the same seed gives the same order."""
    if len(jobs) < 2:
        return tuple(range(len(jobs)))
    chance = Random(search.seed)
    cost: dict[Order, float] = {}

    def measured(order: Order) -> tuple[float, Order]:
        if order not in cost:
            cost[order] = makespan_ms(jobs, order, memory)
        return cost[order], order

    start = tuple(range(len(jobs)))
    shuffled = [tuple(chance.sample(start, len(start))) for _ in range(search.population - 1)]
    people = [fifo(jobs), *shuffled]
    for _ in range(search.generations):
        best = sorted(set(people), key=measured)[: search.survivors]
        people = best + [
            mutated(
                crossed(chance.choice(best), chance.choice(best), chance), search.mutation, chance
            )
            for _ in range(search.population - search.survivors)
        ]
    return min(people, key=measured)


def crossed(first: Order, second: Order, chance: Random) -> Order:
    """Order crossover: the second's head, then the rest as the first has it."""
    head = second[: chance.randint(1, len(second))]
    taken = set(head)
    return (*head, *(i for i in first if i not in taken))


def mutated(order: Order, probability: float, chance: Random) -> Order:
    """One job moved to another place."""
    if chance.random() >= probability:
        return order
    index = order[chance.randrange(len(order))]
    rest = tuple(i for i in order if i != index)
    at = chance.randint(0, len(rest))
    return (*rest[:at], index, *rest[at:])


def sjf(jobs: Sequence[Job]) -> Order:
    """The shortest next, where a model that the order has loaded costs no load."""
    left, order, loaded = list(range(len(jobs))), [], set[str]()
    while left:
        ready = [i for i in left if _is_ready(jobs, i, left)]

        def needs_ms(i: int) -> float:
            return jobs[i].compute_ms + (0.0 if jobs[i].model in loaded else jobs[i].load_ms)

        index = min(ready, key=needs_ms)
        left.remove(index)
        order.append(index)
        loaded.add(jobs[index].model)
    return tuple(order)


def exhaustive(jobs: Sequence[Job], memory: Memory = UNLIMITED) -> Order:
    """The best of all orders; for ten jobs at most, by the factorial."""
    best: tuple[float, Order] = (math.inf, ())

    def extend(order: Order, left: tuple[int, ...]) -> None:
        nonlocal best
        if not left:
            best = min(best, (makespan_ms(jobs, order, memory), order))
        for index in left:
            if _is_ready(jobs, index, left):
                extend((*order, index), tuple(i for i in left if i != index))

    extend((), tuple(range(len(jobs))))
    return best[1]


def _is_ready(jobs: Sequence[Job], index: int, left: Sequence[int]) -> bool:
    """Whether no earlier job of its client, which are those of its model, is left."""
    return not any(i < index and jobs[i].model == jobs[index].model for i in left)


RULES: Final[dict[str, Callable[[Sequence[Job], Memory], Order]]] = {
    "fifo": lambda jobs, memory: fifo(jobs),
    "sjf": lambda jobs, memory: sjf(jobs),
    "alternating": lambda jobs, memory: alternating(jobs),
    "johnson": lambda jobs, memory: johnson(jobs),
    "neh": neh,
    "ga": ga,
}
"""Every way to order a window, by its name."""

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


def gaps(instances: int) -> Iterator[Gap]:
    """Each case, ratio and rule over random instances; the same ones at each call."""
    cells = [(case, ratio) for case in CASES for ratio in RATIOS]
    for case, ratio in cells:
        found: dict[str, list[float]] = {name: [] for name in RULES}
        for seed in range(instances):
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
            size_bytes=int(BYTES * sizes[i]))
        for _ in range(windows) for i in range(count)
    ]  # fmt: skip
    if case == "unlimited":
        return jobs, Memory()
    ordered = sorted(job.size_bytes for job in jobs[:count])
    return jobs, Memory(capacity_bytes=max(ordered[-1], 0.75 * sum(ordered[-2:])))


def order_by(name: str, jobs: Sequence[Job], memory: Memory) -> Order:
    """A rule's order; window after window where it sees no more than one."""
    size = len({job.model for job in jobs}) if name in BY_WINDOW else len(jobs)
    order: list[int] = []
    for begin in range(0, len(jobs), size):
        order += [begin + i for i in RULES[name](jobs[begin : begin + size], memory)]
    return tuple(order)


def _example_table() -> Table:
    rows = [dataclasses.asdict(total) for total in example()]
    return views.table(rows, ("way", "order", "total_ms"))


def _gaps_table(instances: int) -> Table:
    cells: dict[tuple[str, float], dict[str, str]] = {}
    for gap in gaps(instances):
        row = cells.setdefault((gap.case, gap.ratio), {"case": gap.case, "ratio": f"{gap.ratio:g}"})
        row[gap.rule] = f"{gap.mean:.1f} / {gap.worst:.0f}"
    views.echo(f"makespan over the best order's, mean / worst of {instances} windows, percent\n")
    return views.table(list(cells.values()), ("case", "ratio", *RULES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=0)
    windows = parser.parse_args().windows
    views.console().print(_gaps_table(windows) if windows else _example_table())


if __name__ == "__main__":
    main()
