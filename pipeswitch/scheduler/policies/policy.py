"""What a policy is shown, and what it decides: the order of requests, and what may be evicted."""

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
    """Of one request, in milliseconds, from what was measured; 0: nothing was yet."""

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
    """Which of a caller's requests goes next; callers take turns. Derive from it; what is given
    here is first come, first served.

    Its requests of one model and one priority stand in a *line*, and only the head of each line is
    ranked: a decision looks at the lines whose head or model has changed, never at the queue.

    Order alone decides which request gets memory: one is looked at only after every head that
    ranks before it, so a model that is evicted for it is wanted by later ones at most. That is
    what keeps two models that do not fit together from blocking each other, and a low priority
    from blocking a high one.

    Attributes:
        patience_ms: who waited longer goes first in its line, the oldest before all.
        window: 0, or so many lines that ``arrange`` puts in order at a time. A line in a window
            runs as many requests as waited in it when the window was made, back to back, and no
            later request runs before the window is done.
        sorts_by: what all requests go by, whatever their models and priorities, if that is so: then
            admission knows who goes before whom.
        ranks_runs: whether ``rank`` looks at ``is_current`` or predictions. If not, lines are not
            ranked again when a run of their model begins or ends.
    """

    patience_ms: float = math.inf
    window: int = 0
    sorts_by: SortsBy = ""
    ranks_runs: bool = True

    def key(self, request: Waiting) -> tuple[float, ...]:
        """Its place in its line, the smallest first. It is asked once: whether the model is on the
        device is not known, nor the time."""
        return (request.arrived_at_ms,)

    def rank(self, head: Waiting, view: View) -> tuple[float, ...]:
        """Of all heads, the smallest runs first. Asked again when its line, its model's place or
        its prediction has changed."""
        return (head.arrived_at_ms,)

    def stays_until_ms(self, head: Waiting, view: View) -> float:
        """When time alone changes its rank; infinite when it never does."""
        return math.inf

    def may_overtake(self, request: Waiting, blocked: Waiting, view: View) -> bool:
        """Whether ``request`` may run while ``blocked``, which ranks before it, has no memory.

        A policy must say no to every request at some time, or a large model starves behind small
        ones that keep its place in use.
        """
        return False

    def arrange(self, heads: Sequence[Waiting], counts: Sequence[int], view: View) -> Sequence[int]:
        """Indices of the heads in the order in which their lines run; ``counts``: how many
        requests wait in each."""
        return range(len(heads))


class Eviction:
    """What losing a resident costs. Derive from it; given here: the least recently used goes."""

    def cost(self, resident: Resident, view: View) -> tuple[float, ...]:
        """In any unit, at least 0; the cheapest goes. Costs of models that would leave together
        are added place by place, and the first place that differs decides."""
        # Waiting requests do not protect a model; they only make it the last choice.
        idle_ms = max(0.0, view.now_ms - resident.last_used_at_ms)
        return (1.0 if resident.waiting_count else 0.0, 1.0 / (1.0 + idle_ms))


@dataclass(frozen=True)
class Policy:
    """A name for ``stats``, and the two halves."""

    name: str
    order: Order
    eviction: Eviction


Maker = Callable[..., Any]
"""Called with ``max_wait_ms``, returns a ``Policy``: what ``[scheduler] policy`` may name."""


def deadline_of(request: Waiting) -> float:
    """Infinite when it has none."""
    return math.inf if request.deadline_at_ms is None else request.deadline_at_ms


def reuse_of(head: Waiting) -> float:
    """0: its model computes now. 1: it is on the device. 2: it must be sent."""
    return 0.0 if head.is_current else 1.0 if head.is_resident else 2.0
