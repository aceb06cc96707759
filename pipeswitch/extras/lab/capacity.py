"""Predictions of ``pipeswitch plan``: switch times, groups, and the models that fit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

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


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report on one model. Times are predictions, from the start of the switch."""

    name: str
    total_bytes: int
    fits: bool  # whether the arena can hold the model without other models
    layer_count: int
    group_count: int  # number of groups in the best plan for a cold model
    groups: tuple[int, ...]  # index of the first layer of each group in this plan
    bound_ms: float  # M*, a lower limit of the cold time of every plan
    resident_ms: float  # time if the whole model is already on the device
    cold_ms: float  # time if no part of the model is on the device
    overhead_ms: float  # ``cold_ms - resident_ms``
    deadline_ms: float | None
    holds_cold: bool | None  # whether a cold run meets the deadline; None: no deadline
    shared_bytes: int


class CapacityReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report on all models that share one arena."""

    arena_bytes: int
    total_bytes: int  # sum over all models
    fits_all: bool
    fit_count: int  # maximum number of models that fit together (the smallest ones)
    models: tuple[ModelReport, ...]


def capacity_report(models: Sequence[ModelDemand], arena_bytes: int) -> CapacityReport:
    """Return the predicted times of the models, and how many of them fit in the arena."""
    total_bytes = sum(model.total_bytes for model in models)
    return CapacityReport(
        arena_bytes=arena_bytes,
        total_bytes=total_bytes,
        fits_all=total_bytes <= arena_bytes,
        fit_count=_fit_count(models, arena_bytes),
        models=tuple(_model_report(model, arena_bytes) for model in models),
    )


def _fit_count(models: Sequence[ModelDemand], arena_bytes: int) -> int:
    used_bytes = accumulate(sorted(model.total_bytes for model in models))
    return sum(one <= arena_bytes for one in used_bytes)


def _model_report(model: ModelDemand, arena_bytes: int) -> ModelReport:
    costs = model.costs
    plan = plan_groups(costs)
    cold_ms = model.pass_ms or makespan(plan, costs)
    fits = model.total_bytes <= arena_bytes

    holds: bool | None = None
    if model.deadline_ms is not None:
        holds = (fits or model.pass_ms > 0) and cold_ms <= model.deadline_ms
    return ModelReport(
        name=model.name,
        total_bytes=model.total_bytes,
        fits=fits,
        layer_count=costs.layer_count,
        group_count=len(plan),
        groups=plan,
        bound_ms=bound(costs),
        resident_ms=costs.resident_ms,
        cold_ms=cold_ms,
        overhead_ms=cold_ms - costs.resident_ms,
        deadline_ms=model.deadline_ms,
        holds_cold=holds,
        shared_bytes=model.shared_bytes,
    )
