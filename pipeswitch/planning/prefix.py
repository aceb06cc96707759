"""The resident prefix: how many first layers a model needs on the device for a cheap switch.

Their computation hides the copy of the other layers. The functions here choose the smallest
prefix for which a switch costs no more than a given time (ADR 15). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from .costs import LayerCosts
from .exact import SAME, Groupings, best_groupings
from .grouping import Plan


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first layers of a model, to be kept resident.

    Attributes:
        layer_count: that stay; 0 for none.
        size_bytes: of them.
        plan: the groups to run with it: with a prefix the first one is the prefix itself.
        total_ms: predicted with it.
    """

    layer_count: int
    size_bytes: int
    plan: Plan
    total_ms: float

    @property
    def resident_groups(self) -> int:
        """How many of ``plan``'s groups are on the device, as ``makespan`` takes it."""
        return 1 if self.layer_count else 0


def least_prefix(
    costs: LayerCosts,
    overhead_ms: float = 0.0,
    overhead_share: float = 0.0,
    groupings: Groupings | None = None,
) -> Prefix:
    """The smallest prefix whose best plan ends at most so much after the model run resident.

    Signalling for as many groups as the model has when it comes whole is not counted: a resident
    model run in these groups would pay it too. So 0 means that the link is never waited for,
    or that fewer signals make up for the wait.

    Args:
        costs: of the model.
        overhead_ms: that a switch may add.
        overhead_share: the same as a share of the model's computation; both are added.
        groupings: of ``costs``, where they are known already.
    """
    if overhead_ms < 0 or overhead_share < 0:
        raise ValueError(f"an overhead is not negative, got {overhead_ms} ms, {overhead_share}")
    groupings = groupings or best_groupings(costs)
    signal_ms = costs.sigma_ms * len(groupings.plan())
    allowed_ms = costs.resident_ms + signal_ms + overhead_ms
    allowed_ms += overhead_share * costs.total_compute_ms
    within_ms = allowed_ms * (1 + SAME)
    # The last total is the resident run's, so there is always one.
    layers = next(i for i, total_ms in enumerate(groupings.total_ms) if total_ms <= within_ms)
    return prefix_of(costs, groupings, layers)


def prefix_of(costs: LayerCosts, groupings: Groupings, layer_count: int) -> Prefix:
    """The best plan with so many resident layers."""
    return Prefix(
        layer_count=layer_count,
        size_bytes=costs.offsets_bytes[layer_count],
        plan=groupings.plan(layer_count),
        total_ms=groupings.total_ms[layer_count],
    )
