"""First come, first served: the reference every other policy is compared with."""

from __future__ import annotations

from .policy import Resident, Waiting


class Fifo:
    """Requests run in the order they came; the least recently used model is evicted."""

    name = "fifo"

    def rank(self, request: Waiting, now_ms: float) -> tuple[float, ...]:
        return (request.arrived_at_ms,)

    def may_overtake(self, request: Waiting, blocked: Waiting, now_ms: float) -> bool:
        return False  # strict order

    def eviction_cost(self, resident: Resident, now_ms: float) -> float:
        # Waiting requests do not protect a model; they only make it the last choice.
        protect = 1e12 if resident.waiting_count else 0.0
        return protect + 1e6 / (1.0 + max(0.0, now_ms - resident.last_used_at_ms))
