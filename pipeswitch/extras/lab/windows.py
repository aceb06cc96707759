"""Simulation of a window: jobs that wait together. Pure.

There is one link and one compute unit. Each serves one job at a time, in the order given, and a
job's load may run while an earlier job computes. ``docs/papers.md`` introduces the thesis, and
``benchmarks/thesis.py`` computes the best orders for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...scheduler.policies.orders import WindowJob

Order = tuple[int, ...]
"""Indices of jobs, each once, in the order in which they are issued."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Instants of one job; ``load_begins_at_ms`` is None if its model was resident."""

    job: int  # index in the window
    load_begins_at_ms: float | None
    load_ends_at_ms: float
    begins_at_ms: float
    ends_at_ms: float


@dataclass(slots=True)
class _Held:
    """Model in the device's memory."""

    size_bytes: int
    loaded_at_ms: float
    pinned_until_ms: float  # end of the last issued job with this model
    last_used_at: int  # position of that job in the order


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The device's memory when a window begins.

    Attributes:
        capacity_bytes: size of the memory for models.
        resident: models that are already there, with their sizes in bytes.
        is_prefetching: whether a load may begin before the previous job has ended.
        is_belady: True: evict the model whose next use in the order is farthest away; False:
            evict the least recently used one.
    """

    capacity_bytes: float = math.inf
    resident: tuple[tuple[str, int], ...] = ()
    is_prefetching: bool = True
    is_belady: bool = True


UNLIMITED: Final = Memory()


def run(jobs: Sequence[WindowJob], order: Sequence[int], memory: Memory = UNLIMITED) -> list[Turn]:
    """Return when each job loads and computes, in ms from the window's beginning.

    A load begins when the link is free, the job has arrived, and its model fits into the memory
    that pinned models leave. A model is pinned from its load to the end of its last issued job.

    Raises:
        ValueError: a model is larger than the memory.
    """
    models = {name: _Held(size, 0.0, 0.0, -1) for name, size in memory.resident}
    link_free_ms = compute_free_ms = 0.0
    turns: list[Turn] = []
    for place, index in enumerate(order):
        job = jobs[index]
        begins_ms: float | None = None
        model = models.get(job.model)
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
            begins_ms = _make_room(models, job.size_bytes, begins_ms, memory, upcoming)
            link_free_ms = begins_ms + job.load_ms
            model = models[job.model] = _Held(job.size_bytes, link_free_ms, 0.0, place)
        starts_ms = max(compute_free_ms, model.loaded_at_ms, job.arrived_at_ms)
        compute_free_ms = starts_ms + job.compute_ms
        model.pinned_until_ms, model.last_used_at = compute_free_ms, place
        turns.append(Turn(index, begins_ms, model.loaded_at_ms, starts_ms, compute_free_ms))
    return turns


def _make_room(
    models: dict[str, _Held], size_bytes: int, at_ms: float, memory: Memory, upcoming: Sequence[str]
) -> float:
    """Evict models until ``size_bytes`` fit; return when they fit: at ``at_ms`` or later."""
    used_bytes = sum(model.size_bytes for model in models.values())
    while used_bytes + size_bytes > memory.capacity_bytes:
        idle = [name for name, model in models.items() if model.pinned_until_ms <= at_ms]
        if not idle:
            at_ms = min(model.pinned_until_ms for model in models.values())
            continue

        def last_wanted(name: str) -> tuple[float, int]:
            again = upcoming.index(name) if name in upcoming else math.inf
            return (again if memory.is_belady else 0.0, -models[name].last_used_at)

        victim = max(idle, key=last_wanted)
        used_bytes -= models.pop(victim).size_bytes
    return at_ms


def makespan_ms(
    jobs: Sequence[WindowJob], order: Sequence[int], memory: Memory = UNLIMITED
) -> float:
    """Return when the last job of an order ends, in ms from the window's beginning."""
    return max((turn.ends_at_ms for turn in run(jobs, order, memory)), default=0.0)
