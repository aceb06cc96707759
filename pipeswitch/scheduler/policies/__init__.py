"""Scheduling policies: pure objects that rank what waits and price what could be evicted.

One object drives the live server, the simulator and the model checker (SCHEDULING 0, finding 9).
A policy sees an immutable view and returns numbers; the scheduler keeps the invariants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from .fifo import Fifo
from .priority import Priority

PRIORITIES: Mapping[str, int] = {"high": 0, "normal": 1, "low": 2}


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

    Order alone decides who gets memory: a request is looked at only after every request that
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

        A policy must say no to everybody at some time, or a large model starves behind small
        ones that keep its place in use.
        """
        ...

    def eviction_cost(self, resident: Resident, now_ms: float) -> float:
        """What losing this resident costs, in any unit below 1e14; the cheapest goes."""
        ...


def make_policy(name: str, *, max_wait_ms: float) -> Policy:
    """The policy of that name.

    Raises:
        KeyError: there is none; the message lists them.
    """
    if name == "fifo":
        return Fifo()
    if name == "priority":
        return Priority(max_wait_ms=max_wait_ms)
    raise KeyError(f"no policy {name!r}; there are: fifo, priority")


__all__ = ["PRIORITIES", "Fifo", "Policy", "Priority", "Resident", "Waiting", "make_policy"]
