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
    size_bytes: int = 0  # size of its model
    is_resident: bool = False  # the model is on the device or is being copied
    is_current: bool = False  # the model computes now


class Resident(NamedTuple):
    """A model that could be evicted: idle, not pinned."""

    model: str
    size_bytes: int
    priority: int
    last_used_at_ms: float
    use_count: int
    waiting_count: int  # number of queued requests for it


class Prediction(NamedTuple):
    """Predicted times of one request in milliseconds, from measurements; 0: not measured yet."""

    load_ms: float  # copy of its model to the device
    compute_ms: float  # computation, without the copy
    p95_ms: float  # 95th percentile of the computations


@dataclass(frozen=True, slots=True)
class View:
    """State of a device at one instant, as a policy sees it.

    Attributes:
        predict: returns the predicted times for a model's name and a batch.
        capacity_bytes: memory of the device for models and jobs.
        residents: names and sizes of the models on the device.
    """

    now_ms: float
    predict: Callable[[str, int], Prediction] = lambda model, batch: Prediction(0.0, 0.0, 0.0)
    capacity_bytes: float = math.inf
    residents: Callable[[], tuple[tuple[str, int], ...]] = tuple


SortsBy = Literal["", "arrival", "deadline"]


class Order:
    """Order of one caller's requests; callers take turns.

    Derive your order from this class, which serves first come, first served. A caller's requests of
    one model and one priority form a *line*. Only the head of each line is ranked: a decision reads
    the lines whose head or model has changed, never the whole queue.

    Only the order decides which request gets memory: a request is considered after all heads that
    rank before it. So only later requests can need a model that is evicted for it. Two models that
    do not fit together never block each other, and a low priority never blocks a high one.

    Attributes:
        aging_ms: requests that waited longer than this go first in their line, the oldest first.
        window: number of lines that ``arrange`` orders together (a window); 0: no windows. Each
            line of a window runs, back to back, the number of requests that it had when the
            window was made. Later requests run after the window.
        sorts_by: name of the key, if a single key sorts all requests of any model and priority.
            Then admission knows which requests go before a new one.
        ranks_runs: True if ``rank`` reads ``is_current`` or predictions. If False, lines are not
            ranked again when a run of their model begins or ends.
    """

    aging_ms: float = math.inf
    window: int = 0
    sorts_by: SortsBy = ""
    ranks_runs: bool = True

    def key(self, request: Waiting) -> tuple[float, ...]:
        """Return the request's place in its line; the smallest goes first. Called once per request:
        the place depends neither on the time nor on the model's residency."""
        return (request.arrived_at_ms,)

    def rank(self, head: Waiting, view: View) -> tuple[float, ...]:
        """Return the rank of a head; the smallest one runs first.
        It is called again when the head's line, or its model's residency or prediction, changes."""
        return (head.arrived_at_ms,)

    def stays_until_ms(self, head: Waiting, view: View) -> float:
        """Return the instant at which time alone changes the head's rank; infinity: never."""
        return math.inf

    def may_backfill(self, request: Waiting, blocked: Waiting, view: View) -> bool:
        """Return True if ``request`` may run while ``blocked``, which ranks first, has no memory.

        When ``blocked`` has waited for some time, a policy must return False for all requests.
        Otherwise small models, which keep the memory in use, could make a large one wait for ever.
        """
        return False

    def arrange(self, heads: Sequence[Waiting], counts: Sequence[int], view: View) -> Sequence[int]:
        """Return the indices of the heads in the order in which their lines run.
        ``counts``: number of requests that wait in each line."""
        return range(len(heads))


class Eviction:
    """Base class for the cost of an eviction; it evicts the least recently used model."""

    def cost(self, resident: Resident, view: View) -> tuple[float, ...]:
        """Return a cost of at least 0, in any unit; the cheapest model is evicted.
        Costs of several victims are added element by element; the sums are compared as tuples."""
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
"""Function of ``max_wait_ms`` that returns a ``Policy``; ``[scheduler] policy`` may name one."""


def deadline_of(request: Waiting) -> float:
    """Return the request's deadline; infinity if it has none."""
    return math.inf if request.deadline_at_ms is None else request.deadline_at_ms


def reuse_of(head: Waiting) -> float:
    """Return 0 if the head's model computes now, 1 if it is on the device, 2 if it must be sent."""
    return 0.0 if head.is_current else 1.0 if head.is_resident else 2.0
