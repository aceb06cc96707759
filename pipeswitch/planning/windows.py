"""A window of jobs in an order, and orders for it: the thesis' simulator and its rivals. Pure.

One link and one compute unit, each serial in the order given; a job's load may run while an
earlier job computes. What each function orders are indices into the jobs of one window.

Sources: the thesis' scheduler (``alternating``), genetic search (``ga``) and execution-time
simulator (``run``); Johnson 1954 (``johnson``); Nawaz, Enscore and Ham 1983 (``neh``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

Order = tuple[int, ...]
"""Indices of jobs, each once, in the order in which they are issued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request, or one client's turn."""

    model: str
    load_ms: float  # of its model over the link, when that is not resident
    compute_ms: float
    size_bytes: int = 0  # of its model in the device's memory
    arrived_at_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What one job did; ``load_begins_at_ms`` is None where its model was resident."""

    job: int
    load_begins_at_ms: float | None
    load_ends_at_ms: float
    begins_at_ms: float
    ends_at_ms: float


@dataclass(slots=True)
class _Held:
    """A model in memory."""

    size_bytes: int
    loaded_at_ms: float
    pinned_until_ms: float  # the end of its last issued job
    last_used_at: int  # the place in the order


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The device's memory as a window finds it.

    Attributes:
        capacity_bytes: room for models.
        resident: models that lie there already, with their sizes in bytes.
        is_prefetching: whether a load may begin before the previous job has ended.
        is_belady: the victim is the model used again last (the order is known); else the one
            used least recently.
    """

    capacity_bytes: float = math.inf
    resident: tuple[tuple[str, int], ...] = ()
    is_prefetching: bool = True
    is_belady: bool = True


UNLIMITED: Final = Memory()


def run(jobs: Sequence[Job], order: Sequence[int], memory: Memory = UNLIMITED) -> list[Turn]:
    """When each job of an order loads and computes, in milliseconds from the window's begin.

    A load begins when the link is free, the job has arrived and its model fits beside those that
    are pinned; a model is pinned from its load to the end of its last issued job.

    Raises:
        ValueError: a model is larger than the memory.
    """
    held = {name: _Held(size, 0.0, 0.0, -1) for name, size in memory.resident}
    link_free_ms = compute_free_ms = 0.0
    turns: list[Turn] = []
    for place, index in enumerate(order):
        job = jobs[index]
        begins_ms: float | None = None
        model = held.get(job.model)
        if model is None:
            if job.size_bytes > memory.capacity_bytes:
                raise ValueError(
                    f'"{job.model}" has {job.size_bytes} bytes, the device '
                    f"{memory.capacity_bytes:.0f}"
                )
            begins_ms = max(link_free_ms, job.arrived_at_ms)
            if not memory.is_prefetching:
                begins_ms = max(begins_ms, compute_free_ms)
            upcoming = [jobs[i].model for i in order[place:]] if memory.is_belady else []
            begins_ms = _make_room(held, job.size_bytes, begins_ms, memory, upcoming)
            link_free_ms = begins_ms + job.load_ms
            model = held[job.model] = _Held(job.size_bytes, link_free_ms, 0.0, place)
        starts_ms = max(compute_free_ms, model.loaded_at_ms, job.arrived_at_ms)
        compute_free_ms = starts_ms + job.compute_ms
        model.pinned_until_ms, model.last_used_at = compute_free_ms, place
        turns.append(Turn(index, begins_ms, model.loaded_at_ms, starts_ms, compute_free_ms))
    return turns


def _make_room(
    held: dict[str, _Held], size_bytes: int, at_ms: float, memory: Memory, upcoming: Sequence[str]
) -> float:
    """Evict until a model fits; when that is, not before ``at_ms``."""
    used_bytes = sum(model.size_bytes for model in held.values())
    while used_bytes + size_bytes > memory.capacity_bytes:
        idle = [name for name, model in held.items() if model.pinned_until_ms <= at_ms]
        if not idle:
            at_ms = min(model.pinned_until_ms for model in held.values())
            continue

        def last_wanted(name: str) -> tuple[float, int]:
            again = upcoming.index(name) if name in upcoming else math.inf
            return (again if memory.is_belady else 0.0, -held[name].last_used_at)

        victim = max(idle, key=last_wanted)
        used_bytes -= held.pop(victim).size_bytes
    return at_ms


def makespan_ms(jobs: Sequence[Job], order: Sequence[int], memory: Memory = UNLIMITED) -> float:
    """When the last job of an order ends."""
    return max((turn.ends_at_ms for turn in run(jobs, order, memory)), default=0.0)


# -- orders by a rule --------------------------------------------------------------------------


def fifo(jobs: Sequence[Job]) -> Order:
    """As they came."""
    return tuple(sorted(range(len(jobs)), key=lambda i: jobs[i].arrived_at_ms))


def alternating(jobs: Sequence[Job]) -> Order:
    """The thesis' scheduler: the largest weight, the smallest, the second largest, and so on.

    A job's weight is its reward over its penalty: the share of the window that it computes, over
    the time its model takes on the link (resident: infinite). The window is the same for all, so
    its length cancels. Of equal weights the one with the smaller penalty counts as the larger.
    A strong client's long compute hides the weak one's long load that follows.
    """

    def weight(i: int) -> tuple[float, float]:
        load_ms = jobs[i].load_ms
        return (jobs[i].compute_ms / load_ms if load_ms else math.inf, -load_ms)

    ranked = sorted(range(len(jobs)), key=weight, reverse=True)
    half = (len(ranked) + 1) // 2
    strong, weak = ranked[:half], ranked[half:][::-1]
    return (*(i for pair in zip(strong, weak, strict=False) for i in pair), *strong[len(weak) :])


def johnson(jobs: Sequence[Job]) -> Order:
    """Johnson's rule: jobs that load shorter than they compute first, the shortest load first;
    then the others, the longest compute first. The optimum where all models fit."""

    def rule(i: int) -> tuple[bool, float]:
        job = jobs[i]
        is_late = job.load_ms >= job.compute_ms
        return (is_late, -job.compute_ms if is_late else job.load_ms)

    return tuple(sorted(range(len(jobs)), key=rule))


# -- orders by search --------------------------------------------------------------------------


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
