"""First come, first served: the reference every other policy is compared with."""

from __future__ import annotations

import math

from .policy import Resident, Waiting


class Fifo:
    """Requests run in the order they came; the least recently used model is evicted."""

    name = "fifo"
    patience_ms = math.inf

    def key(self, request: Waiting) -> tuple[float, ...]:
        return (request.arrived_at_ms,)

    def rank(self, head: Waiting, now_ms: float) -> tuple[float, ...]:
        return (head.arrived_at_ms,)

    def stays_until_ms(self, head: Waiting, now_ms: float) -> float:
        return math.inf

    def may_overtake(self, request: Waiting, blocked: Waiting, now_ms: float) -> bool:
        return False  # strict order

    def eviction_cost(self, resident: Resident, now_ms: float) -> tuple[float, ...]:
        # Waiting requests do not protect a model; they only make it the last choice.
        idle_ms = max(0.0, now_ms - resident.last_used_at_ms)
        return (1.0 if resident.waiting_count else 0.0, 1.0 / (1.0 + idle_ms))
