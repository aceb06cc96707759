"""Interface of a policy: it orders requests and chooses what to evict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Waiting(NamedTuple):
    """A queued inference request."""

    token: int
    model: str
    priority: int  # 0 is the most urgent
    deadline_at_ms: float | None
    arrived_at_ms: float
    batch: int = 1
    size_bytes: int = 0  # of its model
    is_resident: bool = False  # its model lies on the device or is on its way
    is_current: bool = False  # its model is the one computing now


class Resident(NamedTuple):
    """A model that could be evicted: idle, not pinned."""

    model: str
    size_bytes: int
    priority: int
    last_used_at_ms: float
    use_count: int
    waiting_count: int  # queued requests for it


class Prediction(NamedTuple):
    """Predicted times of one request in milliseconds, from measurements; 0: not measured yet."""

    load_ms: float  # its model's copy to the device
    compute_ms: float  # on the device, its model being there
    p95_ms: float  # what 95 of 100 computations did not exceed


@dataclass(frozen=True, slots=True)
class View:
    """One instant, as a policy sees it.

    Attributes:
        predict: of a request for a model, by its name and the request's batch.
        capacity_bytes: of the device, for models and jobs.
        residents: names and sizes of the models on the device.
    """

    now_ms: float
    predict: Callable[[str, int], Prediction] = lambda model, batch: Prediction(0.0, 0.0, 0.0)
    capacity_bytes: float = math.inf
    residents: Callable[[], tuple[tuple[str, int], ...]] = tuple


SortsBy = Literal["", "arrival", "deadline"]


class Order:
    """Order of one caller's requests; callers take turns. Derive from it: the base class serves
    first come, first served.

    A caller's requests of one model and one priority form a *line*, and only the head of each line
    is ranked: a decision reads the lines whose head or model has changed, never the whole queue.

    Order alone decides which request gets memory: a request is considered only after every head
    that ranks before it, so only later requests can want a model that is evicted for it. Therefore
    two models that do not fit together never block each other, nor a low priority a high one.

    Attributes:
        aging_ms: a request that waited longer goes first in its line, the oldest before all.
        window: number of lines that ``arrange`` orders at a time, or 0. A line in a window
            runs as many requests as waited in it when the window was made, back to back, and no
            later request runs before the window is done.
        sorts_by: the single key that sorts all requests whatever their models and priorities, if
            there is one: then admission knows the requests that go before a new one.
        ranks_runs: True if ``rank`` reads ``is_current`` or predictions. If False, lines are not
            ranked again when a run of their model begins or ends.
    """

    aging_ms: float = math.inf
    window: int = 0
    sorts_by: SortsBy = ""
    ranks_runs: bool = True

    def key(self, request: Waiting) -> tuple[float, ...]:
        """Return the request's place in its line, the smallest first. Called once per request,
        without the time and whether the model is on the device."""
        return (request.arrived_at_ms,)

    def rank(self, head: Waiting, view: View) -> tuple[float, ...]:
        """Return the rank of a head: the smallest of all runs first. Called again when its line,
        its model's residency or its prediction has changed."""
        return (head.arrived_at_ms,)

    def stays_until_ms(self, head: Waiting, view: View) -> float:
        """Return when time alone changes the head's rank; infinity if it never does."""
        return math.inf

    def may_backfill(self, request: Waiting, blocked: Waiting, view: View) -> bool:
        """Return True if ``request`` may run while ``blocked``, which ranks before it, has no
        memory.

        A policy must refuse every request at some time, or a large model starves behind small ones
        that keep its place in use.
        """
        return False

    def arrange(self, heads: Sequence[Waiting], counts: Sequence[int], view: View) -> Sequence[int]:
        """Return the indices of the heads in the order in which their lines run. ``counts``:
        number of requests that wait in each line."""
        return range(len(heads))


class Eviction:
    """Cost of an eviction. Derive from it: the base class evicts the least recently used model."""

    def cost(self, resident: Resident, view: View) -> tuple[float, ...]:
        """Return a cost of at least 0, in any unit; the cheapest model is evicted. Costs of
        models that would leave together are added place by place, and the first place that
        differs decides."""
        # Waiting requests do not protect a model; they only make it the last choice.
        idle_ms = max(0.0, view.now_ms - resident.last_used_at_ms)
        return (1.0 if resident.waiting_count else 0.0, 1.0 / (1.0 + idle_ms))


@dataclass(frozen=True)
class Policy:
    """Policy: a name for ``stats``, an order and an eviction."""

    name: str
    order: Order
    eviction: Eviction


Maker = Callable[..., Any]
"""Called with ``max_wait_ms``, returns a ``Policy``: what ``[scheduler] policy`` may name."""


def deadline_of(request: Waiting) -> float:
    """Return the request's deadline; infinity if it has none."""
    return math.inf if request.deadline_at_ms is None else request.deadline_at_ms


def reuse_of(head: Waiting) -> float:
    """Return 0 if the head's model computes now, 1 if it is on the device, 2 if it must be sent."""
    return 0.0 if head.is_current else 1.0 if head.is_resident else 2.0
