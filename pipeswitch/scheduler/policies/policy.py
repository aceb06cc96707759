"""What a policy is shown, and what it decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued inference request."""

    token: int
    model: str
    priority: int  # 0 is the most urgent
    deadline_at_ms: float | None
    arrived_at_ms: float
    is_resident: bool  # its model lies on the device or is on its way
    is_current: bool  # its model is the one computing now


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that could be evicted: idle, not pinned."""

    model: str
    size_bytes: int
    priority: int
    last_used_at_ms: float
    use_count: int
    waiting_count: int  # queued requests for it


class Policy(Protocol):
    """What a scheduling policy decides.

    Order alone decides which request gets memory: one is looked at only after every request that
    ranks before it, so a model that is evicted for it is wanted by later ones at most. That is
    what keeps two models that do not fit together from blocking each other, and a low priority
    from blocking a high one.
    """

    name: str

    def rank(self, request: Waiting, now_ms: float) -> tuple[float, ...]:
        """Smaller runs first."""
        ...

    def may_overtake(self, request: Waiting, blocked: Waiting, now_ms: float) -> bool:
        """Whether ``request`` may run while ``blocked``, which ranks before it, has no memory.

        A policy must say no to every request at some time, or a large model starves behind small
        ones that keep its place in use.
        """
        ...

    def eviction_cost(self, resident: Resident, now_ms: float) -> float:
        """What losing this resident costs, in any unit; the cheapest goes."""
        ...
