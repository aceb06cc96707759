"""What a policy is shown, and what it decides."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol


class Waiting(NamedTuple):
    """A queued inference request."""

    token: int
    model: str
    priority: int  # 0 is the most urgent
    deadline_at_ms: float | None
    arrived_at_ms: float
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


class Policy(Protocol):
    """What a scheduling policy decides.

    Requests of one model and one priority stand in a *line*, and only the head of each line is
    ranked: a decision looks at the lines whose head or model has changed, never at the queue.

    Order alone decides which request gets memory: one is looked at only after every head that
    ranks before it, so a model that is evicted for it is wanted by later ones at most. That is
    what keeps two models that do not fit together from blocking each other, and a low priority
    from blocking a high one.
    """

    name: str
    patience_ms: float  # who waited longer goes first in its line, the oldest before all

    def key(self, request: Waiting) -> tuple[float, ...]:
        """Its place in its line, the smallest first. The same for as long as it waits: whether its
        model is on the device is not known here, nor the time."""
        ...

    def rank(self, head: Waiting, now_ms: float) -> tuple[float, ...]:
        """Of all heads, the smallest runs first."""
        ...

    def stays_until_ms(self, head: Waiting, now_ms: float) -> float:
        """When time alone changes its rank; infinite when it never does."""
        ...

    def may_overtake(self, request: Waiting, blocked: Waiting, now_ms: float) -> bool:
        """Whether ``request`` may run while ``blocked``, which ranks before it, has no memory.

        A policy must say no to every request at some time, or a large model starves behind small
        ones that keep its place in use.
        """
        ...

    def eviction_cost(self, resident: Resident, now_ms: float) -> tuple[float, ...]:
        """What losing this resident costs, in any unit; the cheapest goes. Costs of models that
        leave together are added place by place, and the first place that differs decides."""
        ...


def deadline_of(request: Waiting) -> float:
    """Infinite when it has none."""
    return math.inf if request.deadline_at_ms is None else request.deadline_at_ms
