"""Predictions of ``pipeswitch plan``: switch times, groups, and the models that fit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from .costs import LayerCosts, bound, makespan
from .planner import plan_groups


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """A model, its costs and its deadline.

    Attributes:
        name: the model's name.
        costs: costs of the model's layers, from its profile.
        total_bytes: size of the model's region in the arena: its layers, and padding for alignment.
        deadline_ms: maximum time from the start of a switch to its end; None: no deadline.
        pass_ms: time of a cold run of a model that is larger than the arena; 0 for other models.
        shared_bytes: bytes that it shares with a variant in the host store.
    """

    name: str
    costs: LayerCosts
    total_bytes: int
    deadline_ms: float | None = None
    pass_ms: float = 0.0
    shared_bytes: int = 0

    def __post_init__(self) -> None:
        if self.total_bytes < self.costs.total_bytes:
            raise ValueError(f"{self.name}: its region is smaller than its layers")


def capacity_report(models: Sequence[ModelDemand], arena_bytes: int) -> dict[str, Any]:
    """Return the predicted times of the models, and how many of them fit in the arena together."""
    used_bytes = [*accumulate(sorted(model.total_bytes for model in models))]
    total_bytes = used_bytes[-1] if used_bytes else 0
    return {
        "arena_bytes": arena_bytes,
        "total_bytes": total_bytes,
        "fits_all": total_bytes <= arena_bytes,
        "fit_count": sum(one <= arena_bytes for one in used_bytes),  # counted from the smallest
        "models": [_model_report(model, arena_bytes) for model in models],
    }


def _model_report(model: ModelDemand, arena_bytes: int) -> dict[str, Any]:
    """Return a model's row; times are predictions, from the start of the switch."""
    costs = model.costs
    plan = plan_groups(costs)
    cold_ms = model.pass_ms or makespan(plan, costs)
    fits = model.total_bytes <= arena_bytes
    copied = costs.scaled(1.0 - model.shared_bytes / max(1, model.total_bytes), 1.0)
    holds: bool | None = None
    if model.deadline_ms is not None:
        holds = (fits or model.pass_ms > 0) and cold_ms <= model.deadline_ms
    return {
        "name": model.name,
        "total_bytes": model.total_bytes,
        "fits": fits,  # the arena can hold it without other models
        "layer_count": costs.layer_count,
        "group_count": len(plan),
        "groups": plan,  # index of the first layer of each group in the best plan for a cold model
        "bound_ms": bound(costs),  # M*, a lower bound of the cold time of every plan
        "resident_ms": costs.resident_ms,
        "cold_ms": cold_ms,
        "variant_ms": makespan(plan, copied) if model.shared_bytes else 0.0,  # in another's place
        "overhead_ms": cold_ms - costs.resident_ms,
        "deadline_ms": model.deadline_ms,
        "holds_cold": holds,  # whether a cold run meets the deadline; None: there is none
        "shared_bytes": model.shared_bytes,
    }
