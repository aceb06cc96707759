"""Groups and predictions from a profile, with an exact planner. Pure.

The planner finds the best grouping of given costs in polynomial time.

The PipeSwitch paper searches the groupings and prunes; this planner needs no search. For each
group, add its arrival time and the compute and signal times (sigma) of itself and all later groups.
The run ends at the largest of these sums. If the link begins with layer *i* at time 0, sends the
layers from *i* on in *m* groups, and layer *j* begins the second group, then the earliest end is

    rest[m][i] = min over j of  transfer(i, j) + max(compute(i..) + m sigma, rest[m-1][j])

The run ends at ``max(compute(0..) + m sigma, rest[m][0])``. For a link with any cost function this
takes O(groups x layers^2). Our link's cost is ``alpha + beta bytes``. Then it takes only
O(groups x layers), because two values of j are enough for each i:

* Among the j at which ``compute(i..) + m sigma`` is the larger term, the nearest is best, because
  the first group then has the fewest bytes.
* Among the j at which ``rest[m-1][j]`` is the larger term, the farthest is best. It moves layers
  into the first group. The same bytes in m copies take the same total time, wherever the cuts are.
  So each later group still arrives at the same time, or earlier if fewer groups are left.

``rest[m]`` stores the minimum over plans of at most m groups.

A machine is not always as fast as during the measurement. The best plan for one set of costs has no
slack: each group is as large as the computation before it allows, so a copy that is a little late
stalls the device. Planning for a slower link does not solve this: if the link is the bottleneck,
such a plan takes up to 20 % longer. So the plan with the least *regret* is chosen: the largest
ratio, over a few scenarios, of its makespan to the makespan of the scenario's best plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, TypeAlias

from ...planning.grouping import Plan, per_layer
from .costs import MIB, LayerCosts, LinkCost, makespan
from .profile import Profile

SCENARIOS: Final = ((1.0, 1.0), (1.2, 1.0), (1.0, 1.2))
"""(Copy time factor, compute time factor): as measured, with a slower link, a slower device."""
SAME: Final = 1e-12
"""Relative difference below which totals count as equal: the rounding error of 500 terms."""

Chain: TypeAlias = "tuple[int, Chain] | None"  # (start of the next group, its chain)


def plan_groups(costs: LayerCosts) -> Plan:
    """Return the plan with the smallest makespan, and among equals one with the fewest groups."""
    table = _Table(costs)
    table.fill()
    starts, start, chain = [], 0, table.best_chain
    while chain is not None:
        starts.append(start)
        start, chain = chain
    return tuple(starts)


class _Table:
    """One row ``rest[m]`` of the recursion, and the best total time so far."""

    def __init__(self, costs: LayerCosts) -> None:
        count = costs.layer_count
        self.costs = costs
        self.rest_ms = [math.inf] * count + [-math.inf]  # the current row
        self.chains: list[Chain] = [None] * (count + 1)
        self.best_ms = math.inf if count else costs.resident_ms
        self.best_chain: Chain = None

    def fill(self) -> None:
        """Fill the rows for 1, 2, 3, ... groups, until one more group improves no plan."""
        end = self.costs.layer_count
        for groups in range(1, self.costs.layer_count + 1):
            floor_ms = self.costs.resident_ms + groups * self.costs.sigma_ms
            if floor_ms >= self.best_ms:
                return
            faster = list(self._faster_cuts(groups * self.costs.sigma_ms, end))
            if not faster:
                return
            # All chains are made from the old row before any of it is replaced.
            entries = [(i, ms, (j, self.chains[j])) for i, ms, j in faster]
            for i, ms, chain in entries:
                self.rest_ms[i], self.chains[i] = ms, chain
            self._offer(floor_ms)
            end = max(i for i, _, _ in faster)  # only layers before an improved one can improve

    def _offer(self, floor_ms: float) -> None:
        total_ms = max(floor_ms, self.rest_ms[0])
        if total_ms < self.best_ms:
            self.best_ms, self.best_chain = total_ms, self.chains[0]

    def _faster_cuts(self, signal_ms: float, end: int) -> Iterator[tuple[int, float, int]]:
        """Yield (i, new ``rest_ms[i]``, j) for each i < ``end`` that one more group makes faster.

        Gains within the rounding error are ignored, because they would add groups for nothing. For
        each i, two values of j are tried: ``cut`` and ``cut - 1``. The value of ``cut`` only falls.
        """
        rest_ms, remaining_ms = self.rest_ms, self.costs.remaining_ms
        offsets_bytes = self.costs.offsets_bytes
        link = self.costs.link
        alpha_ms, beta_ms = link.alpha_ms, link.beta_ms_per_byte
        cut = self.costs.layer_count  # the nearest j at which ``own_ms`` is the larger term
        for i in range(end - 1, -1, -1):
            own_ms = remaining_ms[i] + signal_ms
            while cut - 1 > i and rest_ms[cut - 1] <= own_ms:
                cut -= 1
            ms, j = alpha_ms + beta_ms * (offsets_bytes[cut] - offsets_bytes[i]) + own_ms, cut
            if cut - 1 > i:
                transfer_ms = alpha_ms + beta_ms * (offsets_bytes[cut - 1] - offsets_bytes[i])
                other_ms = transfer_ms + rest_ms[cut - 1]
                if other_ms < ms:
                    ms, j = other_ms, cut - 1
            if ms < rest_ms[i] * (1 - SAME):
                yield i, ms, j


def robust_plan(costs: LayerCosts) -> Plan:
    """Return the plan whose worst slowdown over all scenarios is smallest.

    Candidates are each scenario's best plan, and the plan with one group for each layer.
    """
    worlds = [costs.scaled(*factors) for factors in SCENARIOS]
    optima = [plan_groups(world) for world in worlds]
    best_ms = [makespan(plan, world) for plan, world in zip(optima, worlds, strict=True)]

    def regret(plan: Plan) -> float:
        return max(
            makespan(plan, world) / least if least else 1.0
            for world, least in zip(worlds, best_ms, strict=True)
        )

    return min((*optima, per_layer(costs.layer_count)), key=regret)


def costs_of(profile: Profile, batch: int | None = None) -> LayerCosts:
    """Return the planner's input; ``batch`` defaults to the first measured batch size.

    Each layer was measured as a group of its own, so its time includes one call of a subgraph. A
    plan has only one such call for each group, so the call's time becomes part of sigma. Sigma does
    not include the wake-up of a waiting worker: the link keeps copying, so it delays a run once.

    On the cpu device, copies take memory bandwidth and cores from the computation, so the compute
    times during switches are used. A GPU's copy engine takes nothing from the computation, and its
    times during switches include waits for groups, so the times of resident runs are used.

    Raises:
        ValueError: ``batch`` was not measured.
    """
    times = profile.batches[0] if batch is None else profile.batch(batch)
    if times is None:
        raise ValueError(f"batch {batch} was not measured")
    layer_ms = times.switch_ms if profile.identity.device == "cpu" else times.resident_ms
    launch_ms = profile.overheads.launch_ms
    return LayerCosts(
        layer_bytes=tuple(layer.size_bytes for layer in profile.layers),
        compute_ms=tuple(max(0.0, ms - launch_ms) for ms in layer_ms),
        link=LinkCost(profile.link.alpha_ms, profile.link.beta_ms_per_mib / MIB),
        sigma_ms=profile.overheads.sigma_ms + launch_ms,
    )


def plan_of(profile: Profile) -> Plan:
    """Return the plan with the least regret (``robust_plan``) at the profile's first batch size."""
    return robust_plan(costs_of(profile))


def predict(profile: Profile, plan: Plan, batch: int) -> float:
    """Return the predicted time from the first copy's start to the last group's end, in ms."""
    return makespan(plan, costs_of(profile, batch)) + profile.overheads.wake_ms
