"""Scheduling policies: pure objects that rank waiting requests and give evictions a cost.

The live server, the simulator and the model checker use the same objects.
A policy sees an immutable view and returns numbers; the scheduler keeps the invariants.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from .orders import Alternating, Collate, EarliestDeadline, FirstCome, ShortestFirst
from .policy import Eviction, Maker, Order, Policy, Prediction, Resident, View, Waiting
from .priority import CostAwareEviction, Priority


def _fifo(*, max_wait_ms: float) -> Policy:
    return Policy("fifo", FirstCome(), Eviction())


def _with(name: str, order: type[Order], *, max_wait_ms: float) -> Policy:
    return Policy(name, order(max_wait_ms=max_wait_ms), CostAwareEviction())  # type: ignore[call-arg]


def _alternating(*, max_wait_ms: float) -> Policy:
    return Policy("alternating", Alternating(), CostAwareEviction())


MAKERS: Final[dict[str, Maker]] = {
    "priority": partial(_with, "priority", Priority),
    "fifo": _fifo,
    "edf": partial(_with, "edf", EarliestDeadline),
    "sjf": partial(_with, "sjf", ShortestFirst),
    "collate": partial(_with, "collate", Collate),
    "alternating": _alternating,
}
"""Built-in policies by name; the first one is the default."""


def make_policy(name: str, *, max_wait_ms: float) -> Policy:
    """Return a new policy: the built-in one with this name.

    Raises:
        KeyError: no policy has that name; the message lists all names.
    """
    if name not in MAKERS:
        raise KeyError(f"no policy {name!r}; there are: {', '.join(MAKERS)}")
    policy: Policy = MAKERS[name](max_wait_ms=max_wait_ms)
    return policy


__all__ = [
    "MAKERS",
    "CostAwareEviction",
    "Eviction",
    "Maker",
    "Order",
    "Policy",
    "Prediction",
    "Priority",
    "Resident",
    "View",
    "Waiting",
    "make_policy",
]
