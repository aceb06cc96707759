"""The planner: from what a model's layers cost to the groups it travels in. Pure.

No thread, clock, socket, file or torch. ``grouping.py`` has what needs no profile.
"""

from __future__ import annotations

from .capacity import CapacityReport, ModelDemand, ModelReport, capacity_report
from .costs import LayerCosts, LinkCost
from .exact import Groupings, best_groupings, plan_groups
from .order import OrderScore, ordering_efficiency, score_order
from .prediction import GroupTimes, Prediction, bound, makespan
from .prefix import Prefix, least_prefix, prefix_of
from .pruned import PrunedSearch, pipeswitch_plan
from .robust import robust_plan

__all__ = [
    "CapacityReport",
    "GroupTimes",
    "Groupings",
    "LayerCosts",
    "LinkCost",
    "ModelDemand",
    "ModelReport",
    "OrderScore",
    "Prediction",
    "Prefix",
    "PrunedSearch",
    "best_groupings",
    "bound",
    "capacity_report",
    "least_prefix",
    "makespan",
    "ordering_efficiency",
    "pipeswitch_plan",
    "plan_groups",
    "prefix_of",
    "robust_plan",
    "score_order",
]
