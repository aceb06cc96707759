"""Scheduling policies: pure objects that rank what waits and price what could be evicted.

One object drives the live server, the simulator and the model checker.
A policy sees an immutable view and returns numbers; the scheduler keeps the invariants.
"""

from __future__ import annotations

from .fifo import Fifo
from .policy import Policy, Resident, Waiting
from .priority import Priority


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


__all__ = ["Fifo", "Policy", "Priority", "Resident", "Waiting", "make_policy"]
