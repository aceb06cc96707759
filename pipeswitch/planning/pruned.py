"""PipeSwitch's own search: the recursion of OSDI '20, section 4.2, with its two prunings. Pure.

The faithful reference, for comparison; ``exact.py`` is what the server uses. In our words, from
the paper's description: F(B, i) is the best end of layers i.. when the groups B are formed, and
F({}, 0) = min over j of F({group(0, j)}, j + 1) and so on. B matters through its two clocks only:
when the link is free and when the device is.

* Pruning 1, a lower bound: after the candidate group nothing can end before the rest is perfectly
  hidden behind computation, or sent in one copy. A candidate that is no better than the best
  known is skipped; "the first group cannot be too large".
* Pruning 2, packing: what arrives while the device is busy costs nothing, so a group that is not
  the first is made at least as long as that.

Both keep the optimum for ``alpha + beta bytes``, where the link's time depends on the number of
copies alone and one copy is never dearer than two. The search is exponential in the worst case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .costs import LayerCosts
from .grouping import Plan

DEFAULT_VISIT_LIMIT = 200_000
"""Some seconds; link-bound models of 80 layers need far more."""


@dataclass(frozen=True, slots=True)
class PrunedSearch:
    """What the search found."""

    plan: Plan
    total_ms: float
    visited: int  # partial groupings looked at
    is_complete: bool  # False: the limit ended it, and ``plan`` is only the best so far


def pipeswitch_plan(costs: LayerCosts, visit_limit: int = DEFAULT_VISIT_LIMIT) -> PrunedSearch:
    """PipeSwitch 4.2's grouping, with both prunings."""
    search = _Search(costs, visit_limit)
    search.extend((), 0, 0.0, costs.ready_ms)
    return PrunedSearch(search.plan, search.best_ms, search.visited, search.is_complete)


class _Search:
    def __init__(self, costs: LayerCosts, visit_limit: int) -> None:
        self.costs = costs
        self.visit_limit = max(visit_limit, costs.layer_count + 1)  # one whole plan at least
        self.visited = 0
        self.plan: Plan = ()
        self.best_ms = math.inf

    @property
    def is_complete(self) -> bool:
        return self.visited <= self.visit_limit

    def extend(self, starts: Plan, start: int, link_ms: float, device_ms: float) -> None:
        """F(B, i): ``starts`` opened the groups so far, ``start`` is the next layer."""
        costs, count = self.costs, self.costs.layer_count
        self.visited += 1
        if start == count:
            if device_ms < self.best_ms:
                self.plan, self.best_ms = starts, device_ms
            return
        for end in range(self._shortest_end(start, link_ms, device_ms), count + 1):
            arrived_ms = link_ms + costs.transfer_ms(start, end)
            computed_ms = costs.remaining_ms[start] - costs.remaining_ms[end]
            done_ms = max(device_ms, arrived_ms) + costs.sigma_ms + computed_ms
            least_ms = done_ms + costs.remaining_ms[end]  # pruning 1
            if end < count:
                least_ms = max(least_ms, arrived_ms + costs.transfer_ms(end, count))
            if least_ms < self.best_ms and self.is_complete:
                self.extend((*starts, start), end, arrived_ms, done_ms)

    def _shortest_end(self, start: int, link_ms: float, device_ms: float) -> int:
        """Pruning 2: everything that arrives while the device is busy joins the group."""
        end = start + 1
        if start > 0:
            while (
                end < self.costs.layer_count
                and link_ms + self.costs.transfer_ms(start, end + 1) <= device_ms
            ):
                end += 1
        return end
