"""Default policy: priorities, aging, models that are on the device first, deadlines."""

from __future__ import annotations

import math

from .policy import Eviction, Order, Resident, View, Waiting, deadline_of

WEIGHTS = {0: 16.0, 1: 4.0}  # priority -> weight of its models; 1 for other priorities
MAX_USES = 8  # further uses of a model do not raise its cost
WANTED_WEIGHT = 64.0  # a model that a request waits for is the last choice among equals


class Priority(Order):
    """Default order of requests, by these criteria.

    1. priority class, raised by one for every ``max_wait_ms`` waited, so nothing starves;
    2. inside a class, requests that waited longer than ``max_wait_ms`` go first, even before models
       on the device; the one that waited longest is the first of them;
    3. models already on the device: saving a copy is worth more than the order. The running model
       is not preferred, since a change between resident models costs nothing;
    4. the earlier deadline;
    5. the earlier arrival.
    """

    ranks_runs = False

    def __init__(self, *, max_wait_ms: float) -> None:
        self.aging_ms = max_wait_ms

    def key(self, request: Waiting) -> tuple[float, ...]:
        return (deadline_of(request), request.arrived_at_ms)

    def rank(self, head: Waiting, view: View) -> tuple[float, ...]:
        if view.now_ms - head.arrived_at_ms >= self.aging_ms:
            return (self._class(head, view.now_ms), 0.0, 0.0, 0.0, head.arrived_at_ms)
        is_sent = 0.0 if head.is_resident else 1.0
        return (head.priority, 1.0, is_sent, deadline_of(head), head.arrived_at_ms)

    def stays_until_ms(self, head: Waiting, view: View) -> float:
        if self.aging_ms <= 0:
            return math.inf
        return head.arrived_at_ms + (self._waits(head, view.now_ms) + 1) * self.aging_ms

    def may_backfill(self, request: Waiting, blocked: Waiting, view: View) -> bool:
        # Inside a class the device does not stay idle for a request that cannot run yet. A lower
        # class never runs before a higher one, and no request waits for ever.
        same_class = self._class(request, view.now_ms) <= self._class(blocked, view.now_ms)
        return same_class and view.now_ms - blocked.arrived_at_ms < self.aging_ms

    def _class(self, request: Waiting, now_ms: float) -> int:
        return request.priority - self._waits(request, now_ms)

    def _waits(self, request: Waiting, now_ms: float) -> int:
        """Return how many times ``max_wait_ms`` the request has waited."""
        if self.aging_ms <= 0:
            return 0
        return math.floor((now_ms - request.arrived_at_ms) / self.aging_ms)


class CostAwareEviction(Eviction):
    """Eviction with the cost: bytes to send again, times weights, divided by the model's idle time.
    The weights are for priority, use and waiting requests."""

    def cost(self, resident: Resident, view: View) -> tuple[float, ...]:
        _, size_bytes, priority, last_used_at_ms, use_count, waiting_count = resident
        idle_ms = view.now_ms - last_used_at_ms
        weight = WEIGHTS.get(priority, 1.0) * (WANTED_WEIGHT if waiting_count else 1.0)
        uses = 1 + (use_count if use_count < MAX_USES else MAX_USES)
        return (weight * size_bytes * uses / (1.0 + (idle_ms if idle_ms > 0.0 else 0.0)),)
