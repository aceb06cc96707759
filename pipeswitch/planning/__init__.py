"""The planner: from what a model's layers cost to the groups it travels in. Pure.

No thread, clock, socket, file or torch. ``grouping.py`` has what needs no profile.
"""

from __future__ import annotations

from .capacity import CapacityReport, ModelDemand, ModelReport, capacity_report
from .costs import LayerCosts, LinkCost
from .exact import Groupings, best_groupings, plan_groups
from .planned import robust_plan
from .prediction import bound, makespan

__all__ = [
    "CapacityReport",
    "Groupings",
    "LayerCosts",
    "LinkCost",
    "ModelDemand",
    "ModelReport",
    "best_groupings",
    "bound",
    "capacity_report",
    "makespan",
    "plan_groups",
    "robust_plan",
]
