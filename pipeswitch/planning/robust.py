"""Groups for a machine that is not always as fast as it was measured. Pure.

The optimum for one set of costs has no slack: each group is as large as the computation before it
allows, to the last microsecond, and a copy that is a little late stalls the device. Planning for a
slower link is no cure: where the link is the bottleneck it costs up to a fifth. So the plan is
chosen by *regret*: how much longer than the best plan it takes, at worst, over a few scenarios.
"""

from __future__ import annotations

from typing import Final

from .costs import LayerCosts
from .exact import plan_groups
from .grouping import Plan, per_layer
from .prediction import makespan

SCENARIOS: Final = ((1.0, 1.0), (1.2, 1.0), (1.0, 1.2))
"""Factors of copies and of computation: as measured, a late link, a late device."""


def robust_plan(costs: LayerCosts) -> Plan:
    """The plan of least regret among the optima of all scenarios and the finest one."""
    worlds = [costs.scaled(*factors) for factors in SCENARIOS]
    optima = [plan_groups(world) for world in worlds]
    best_ms = [makespan(plan, world) for plan, world in zip(optima, worlds, strict=True)]

    def regret(plan: Plan) -> float:
        return max(
            makespan(plan, world) / least if least else 1.0
            for world, least in zip(worlds, best_ms, strict=True)
        )

    return min((*optima, per_layer(costs.layer_count)), key=regret)
