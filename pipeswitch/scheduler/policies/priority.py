"""Inference before training, priorities, deadlines, residency reuse, aging (the default)."""

from __future__ import annotations

import math

from .policy import Resident, Waiting

WANTED_WEIGHT = 64.0  # a model that a request waits for is the last choice among equals


class Priority:
    """Ranks in this order:

    1. priority class, raised by one for every ``max_wait_ms`` waited, so nothing starves;
    2. inside a class, a request that waited longer than ``max_wait_ms`` goes before any reuse;
    3. the model that computes now (back to back, no switch), then models already on the device:
       reuse of residency is worth more than any order;
    4. the earlier deadline;
    5. the earlier arrival.
    """

    name = "priority"

    def __init__(self, *, max_wait_ms: float) -> None:
        self.max_wait_ms = max_wait_ms

    def rank(self, request: Waiting, now_ms: float) -> tuple[float, ...]:
        is_overdue = self._is_overdue(request, now_ms)
        reuse = 0 if request.is_current else 1 if request.is_resident else 2
        deadline = math.inf if request.deadline_at_ms is None else request.deadline_at_ms
        return (
            self._class(request, now_ms),
            0 if is_overdue else 1,
            0 if is_overdue else reuse,
            deadline,
            request.arrived_at_ms,
        )

    def may_overtake(self, request: Waiting, blocked: Waiting, now_ms: float) -> bool:
        # Inside a class the device is not left idle for one that cannot run yet; a lower class
        # never runs in front of a higher one; and no request waits for ever.
        same_class = self._class(request, now_ms) <= self._class(blocked, now_ms)
        return same_class and not self._is_overdue(blocked, now_ms)

    def eviction_cost(self, resident: Resident, now_ms: float) -> float:
        idle_ms = 1.0 + max(0.0, now_ms - resident.last_used_at_ms)
        weight = 4.0 ** (2 - min(max(resident.priority, 0), 2))
        if resident.waiting_count:
            weight *= WANTED_WEIGHT
        return weight * resident.size_bytes * (1 + min(resident.use_count, 8)) / idle_ms

    def _class(self, request: Waiting, now_ms: float) -> int:
        waited_ms = now_ms - request.arrived_at_ms
        raised = math.floor(waited_ms / self.max_wait_ms) if self.max_wait_ms > 0 else 0
        return request.priority - raised

    def _is_overdue(self, request: Waiting, now_ms: float) -> bool:
        return now_ms - request.arrived_at_ms >= self.max_wait_ms
