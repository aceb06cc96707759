"""The best grouping, exactly, in polynomial time (the default planner). Pure.

PipeSwitch searches groupings and prunes; no search is needed. A run ends with the
group whose arrival plus all computation (and signalling) from it on is latest, so what the layers
from *i* on need, with the link free and *m* groups to send them in, is

    rest[m][i] = min over j of  transfer(i, j) + max(compute(i..) + m sigma, rest[m-1][j])

and the whole ends at ``max(compute(0..) + m sigma, rest[m][0])``. That takes
O(groups x layers^2) for any link. Ours takes ``alpha + beta bytes``, so two cuts per layer suffice,
in O(groups x layers): what the link has spent on the layers before j is the same whatever j
is, hence

* among the j where the first group's own deadline decides, the nearest is best (fewest bytes);
* among the j where the rest decides, the farthest is best: a plan for the layers from j on, cut
  off at a later j', ends no later (its groups carry no more, and none computes earlier).

``rest[m]`` is kept as "at most m groups".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, TypeAlias

from .costs import LayerCosts
from .grouping import Plan

SAME: Final = 1e-12
"""Relative difference below which two totals are the same: rounding of a sum of 500 terms."""

Chain: TypeAlias = "tuple[int, Chain] | None"  # where the next group starts, and how it goes on


def plan_groups(costs: LayerCosts) -> Plan:
    """Return the grouping with the least predicted total; among equals, the fewest groups."""
    table = _Table(costs)
    if costs.sigma_ms == 0:
        table.fill_unlimited()
        return _merged(costs, table.best_ms)
    table.fill_by_groups()
    starts, start, chain = [], 0, table.best_chain
    while chain is not None:
        starts.append(start)
        start, chain = chain
    return tuple(starts)


def _merged(costs: LayerCosts, total_ms: float) -> Plan:
    """Return the fewest groups that reach this total: without signalling costs many plans tie.

    The longest group in time dominates: the link is as far whatever the groups were, and the
    next deadline is later.
    """
    latest_ms = total_ms * (1 + SAME)
    merged: list[int] = []
    link_ms = own_ms = 0.0  # until the open group, and its own copy
    for layer in range(costs.layer_count):
        if merged:
            joined_ms = costs.transfer_ms(merged[-1], layer + 1)
            if link_ms + joined_ms <= latest_ms - costs.remaining_ms[merged[-1]]:
                own_ms = joined_ms
                continue
        link_ms, own_ms = link_ms + own_ms, costs.transfer_ms(layer, layer + 1)
        merged.append(layer)
    return tuple(merged)


class _Table:
    """One row of the recursion, and the best total so far."""

    def __init__(self, costs: LayerCosts) -> None:
        count = costs.layer_count
        self.costs = costs
        self.rest_ms = [math.inf] * count + [-math.inf]  # of the current row
        self.chains: list[Chain] = [None] * (count + 1)
        self.best_ms = math.inf if count else costs.resident_ms
        self.best_chain: Chain = None

    def fill_unlimited(self) -> None:
        """Fill the one row of any number of groups, where groups cost nothing."""
        # Each layer's cut is looked for when those after it have been settled.
        for i, ms, j in self._faster_cuts(0.0, self.costs.layer_count):
            self.rest_ms[i], self.chains[i] = ms, (j, self.chains[j])
        self._offer(self.costs.resident_ms)

    def fill_by_groups(self) -> None:
        """Row after row, until one more group ends no row earlier."""
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
            end = max(i for i, _, _ in faster)  # only a layer before a faster one can gain

    def _offer(self, floor_ms: float) -> None:
        total_ms = max(floor_ms, self.rest_ms[0])
        if total_ms < self.best_ms:
            self.best_ms, self.best_chain = total_ms, self.chains[0]

    def _faster_cuts(self, signal_ms: float, end: int) -> Iterator[tuple[int, float, int]]:
        """(i, ms, j) for the layers before ``end`` that one more group makes faster.

        By more than rounding: else ties would add groups that gain nothing. There are two
        candidates per layer, found by a pointer that only falls.
        """
        rest_ms, remaining_ms = self.rest_ms, self.costs.remaining_ms
        offsets_bytes = self.costs.offsets_bytes
        link = self.costs.link
        alpha_ms, beta_ms = link.alpha_ms, link.beta_ms_per_byte
        cut = self.costs.layer_count  # the nearest j where the group's own deadline decides
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
