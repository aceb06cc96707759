"""The best grouping, exactly, in polynomial time (the default planner). Pure.

PipeSwitch searches groupings and prunes (``pruned.py``); no search is needed. A run ends with the
group whose arrival plus all computation (and signalling) from it on is latest, so what the layers
from *i* on need, with the link free and *m* groups to send them in, is

    rest[m][i] = min over j of  transfer(i, j) + max(compute(i..) + m sigma, rest[m-1][j])

and the whole ends at ``max(ready + compute(0..) + m sigma, rest[m][0])``. That takes
O(groups x layers^2) for any link. For ``alpha + beta bytes`` two cuts per layer suffice, so it
takes O(groups x layers): what the link has spent on the layers before j is the same whatever j
is, hence

* among the j where the first group's own deadline decides, the nearest is best (fewest bytes);
* among the j where the rest decides, the farthest is best: a plan for the layers from j on, cut
  off at a later j', ends no later (its groups carry no more, and none computes earlier).

``rest[m]`` is kept as "at most m groups". A row yields the best plan for *every* resident prefix
at once, since a prefix only moves the device's start.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from .costs import LayerCosts, LinkCost
from .grouping import Plan

SAME: Final = 1e-12
"""Relative difference below which two totals are the same: rounding of a sum of 500 terms."""

Chain: TypeAlias = "tuple[int, Chain] | None"  # where the next group starts, and how it goes on


@dataclass(frozen=True)
class Groupings:
    """The best grouping for each number of resident layers, 0 .. layer_count.

    Attributes:
        costs: that were planned for.
        total_ms: the predicted total with that many resident layers; never rises.
    """

    costs: LayerCosts
    total_ms: tuple[float, ...]
    _chains: tuple[Chain, ...]

    def plan(self, prefix_layers: int = 0) -> Plan:
        """The groups; with a prefix the first one is the prefix, and resident.

        Of plans with equal totals it is one with few groups; on a ``LinkCost``, with the fewest.
        """
        starts: list[int] = []
        start, chain = prefix_layers, self._chains[prefix_layers]
        while chain is not None:
            starts.append(start)
            start, chain = chain
        if self.costs.sigma_ms == 0:
            starts = self._merged(starts, prefix_layers)
        return (0, *starts) if prefix_layers else tuple(starts)

    def _merged(self, starts: list[int], prefix_layers: int) -> list[int]:
        """Without signalling many plans tie: join groups as long as none is late for the total.

        Two groups are joined only where one copy takes no longer than two, so all that follows
        arrives no later. On a ``LinkCost`` any cut will do, since the longest group in time
        dominates: the link is as far whatever the groups were, and the next deadline is later.
        """
        costs = self.costs
        if isinstance(costs.link, LinkCost):
            starts = list(range(prefix_layers, costs.layer_count))
        ends = [*starts, costs.layer_count][1:]
        latest_ms = self.total_ms[prefix_layers] * (1 + SAME)
        merged: list[int] = []
        link_ms = own_ms = 0.0  # until the open group, and its own copy
        for start, end in zip(starts, ends, strict=True):
            next_ms = costs.transfer_ms(start, end)
            if merged:
                joined_ms = costs.transfer_ms(merged[-1], end)
                deadline_ms = latest_ms - costs.remaining_ms[merged[-1]]
                is_no_dearer = joined_ms <= (own_ms + next_ms) * (1 + SAME)
                if is_no_dearer and link_ms + joined_ms <= deadline_ms:
                    own_ms = joined_ms
                    continue
            link_ms, own_ms = link_ms + own_ms, next_ms
            merged.append(start)
        return merged


def plan_groups(costs: LayerCosts) -> Plan:
    """The grouping with the least predicted total."""
    return best_groupings(costs).plan()


def best_groupings(costs: LayerCosts) -> Groupings:
    """Solve for every resident prefix at once."""
    link = costs.link
    table = _AffineTable(costs, link) if isinstance(link, LinkCost) else _CurveTable(costs)
    if costs.sigma_ms == 0:
        table.fill_unlimited()
    else:
        table.fill_by_groups()
    return Groupings(costs, tuple(table.best_ms), tuple(table.best_chains))


class _Table(ABC):
    """One row of the recursion, and the best totals seen so far."""

    def __init__(self, costs: LayerCosts) -> None:
        count = costs.layer_count
        self.costs = costs
        self.rest_ms = [math.inf] * count + [-math.inf]  # of the current row
        self.chains: list[Chain] = [None] * (count + 1)
        self.best_ms = [math.inf] * count + [costs.resident_ms]
        self.best_chains: list[Chain] = [None] * (count + 1)

    @abstractmethod
    def fill_unlimited(self) -> None:
        """The one row of any number of groups, where groups cost nothing."""

    @abstractmethod
    def next_row(self, signal_ms: float, end: int) -> list[tuple[int, float, int]]:
        """(i, ms, j) for the layers before ``end`` that one more group makes faster.

        By more than rounding: else ties would add groups that gain nothing.
        """

    def fill_by_groups(self) -> None:
        """Row after row, until one more group can help nobody."""
        end = self.costs.layer_count
        for groups in range(1, self.costs.layer_count + 1):
            floor_ms = self.costs.resident_ms + groups * self.costs.sigma_ms
            if floor_ms >= max(self.best_ms):
                return
            faster = self.next_row(groups * self.costs.sigma_ms, end)
            if not faster:
                return
            # All chains are made from the old row before any of it is replaced.
            made = [(i, ms, (j, self.chains[j])) for i, ms, j in faster]
            for i, ms, chain in made:
                self.rest_ms[i], self.chains[i] = ms, chain
                self._offer(i, max(floor_ms, ms))
            end = max(i for i, _, _ in faster)  # only a layer before a faster one can gain

    def _offer(self, i: int, total_ms: float) -> None:
        if total_ms < self.best_ms[i]:
            self.best_ms[i], self.best_chains[i] = total_ms, self.chains[i]

    def _settle(self, i: int, ms: float, j: int) -> None:
        """Layer i's entry of the only row: without signalling, groups are not counted."""
        self.rest_ms[i], self.chains[i] = ms, (j, self.chains[j])
        self._offer(i, max(self.costs.resident_ms, ms))


class _AffineTable(_Table):
    """``alpha + beta bytes``: two candidates per layer, found by a pointer that only falls."""

    def __init__(self, costs: LayerCosts, link: LinkCost) -> None:
        super().__init__(costs)
        self._link = link

    def fill_unlimited(self) -> None:
        # Each layer's cut is looked for when those after it have been settled.
        for i, ms, j in self._faster_cuts(0.0, self.costs.layer_count):
            self._settle(i, ms, j)

    def next_row(self, signal_ms: float, end: int) -> list[tuple[int, float, int]]:
        return list(self._faster_cuts(signal_ms, end))

    def _faster_cuts(self, signal_ms: float, end: int) -> Iterator[tuple[int, float, int]]:
        rest_ms, remaining_ms = self.rest_ms, self.costs.remaining_ms
        offsets_bytes = self.costs.offsets_bytes
        alpha_ms, beta_ms = self._link.alpha_ms, self._link.beta_ms_per_byte
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


class _CurveTable(_Table):
    """Any curve: all cuts are tried, a row at a time."""

    def __init__(self, costs: LayerCosts) -> None:
        super().__init__(costs)
        count, offsets_bytes = costs.layer_count, np.array(costs.offsets_bytes)
        # transfer[i, j]: layers i .. j-1 in one copy
        self._transfer_ms = np.full((count, count + 1), np.inf)
        for i in range(count):
            sizes_bytes = (offsets_bytes[i + 1 :] - offsets_bytes[i]).tolist()  # Python's ints
            self._transfer_ms[i, i + 1 :] = list(map(costs.link, sizes_bytes))

    def fill_unlimited(self) -> None:
        rest_ms = np.array(self.rest_ms)
        for i in range(self.costs.layer_count - 1, -1, -1):
            after_ms = np.maximum(rest_ms[i + 1 :], self.costs.remaining_ms[i])
            after_ms += self._transfer_ms[i, i + 1 :]
            j = int(after_ms.argmin())
            rest_ms[i] = after_ms[j]
            self._settle(i, float(after_ms[j]), i + 1 + j)

    def next_row(self, signal_ms: float, end: int) -> list[tuple[int, float, int]]:
        rest_ms = np.array(self.rest_ms)
        own_ms = np.array(self.costs.remaining_ms[:end]) + signal_ms
        totals_ms = np.maximum(rest_ms[np.newaxis, :], own_ms[:, np.newaxis])
        totals_ms += self._transfer_ms[:end]
        cuts = totals_ms.argmin(axis=1)
        least_ms = totals_ms[np.arange(end), cuts]
        faster = np.flatnonzero(least_ms < rest_ms[:end] * (1 - SAME))
        return [(int(i), float(least_ms[i]), int(cuts[i])) for i in faster]
