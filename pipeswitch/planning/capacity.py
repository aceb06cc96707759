"""What ``pipeswitch plan`` says: switch times, groups, prefixes, and what an arena holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from .allocation import Option, allocate
from .costs import LayerCosts
from .exact import Groupings, best_groupings
from .prediction import bound, makespan
from .prefix import least_prefix


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """A model and what is asked of it.

    Attributes:
        name: of the model.
        costs: from its profile.
        total_bytes: its region in the arena: at least its layers' bytes, with the alignment.
        requests_per_s: expected; 0 leaves it out of the sharing of prefix bytes.
        deadline_ms: from the start of a switch to the end of the computation, or None.
    """

    name: str
    costs: LayerCosts
    total_bytes: int
    requests_per_s: float = 0.0
    deadline_ms: float | None = None

    def __post_init__(self) -> None:
        if self.total_bytes < self.costs.total_bytes:
            raise ValueError(f"{self.name}: its region is smaller than its layers")
        if self.requests_per_s < 0:
            raise ValueError(f"{self.name}: a negative rate of requests")


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One model's line. Times are predicted, from the start of the switch."""

    name: str
    total_bytes: int
    fits: bool  # in the arena, alone
    layer_count: int
    group_count: int  # of the best plan, cold
    groups: tuple[int, ...]  # the plan: the layers that open a group
    bound_ms: float  # M*: no plan is faster, cold
    resident_ms: float  # everything on the device already
    cold_ms: float  # nothing on the device
    overhead_ms: float  # cold over resident
    zero_prefix_bytes: int  # to keep so that a switch never waits for the link
    zero_prefix_ms: float  # with it
    kept_bytes: int  # its share of the arena's prefix budget
    kept_ms: float  # with it
    deadline_ms: float | None
    holds_cold: bool | None  # None: no deadline
    holds_with_zero_prefix: bool | None
    holds_with_kept: bool | None


class CapacityReport(msgspec.Struct, frozen=True, kw_only=True):
    """All models on one arena."""

    arena_bytes: int
    total_bytes: int  # of all models
    fits_all: bool
    fit_count: int  # the most models that are resident together: the smallest ones
    landing_bytes: int  # held free so that any model can come in whole
    prefix_budget_bytes: int  # the rest, shared by arrival rate x time saved
    kept_bytes: int
    stall_saved_ms_per_s: float  # by what is kept, of the device's time
    stall_saved_most_ms_per_s: float  # no sharing of that budget saves more
    models: tuple[ModelReport, ...]


def capacity_report(models: Sequence[ModelDemand], arena_bytes: int) -> CapacityReport:
    """What these models can expect from an arena.

    Prefixes share what the arena has beyond a landing zone for the largest model that fits, the
    ones with most requests x time saved per byte first; a prefix may be a whole model.
    """
    groupings = [best_groupings(model.costs) for model in models]
    fitting = [model.total_bytes for model in models if model.total_bytes <= arena_bytes]
    landing_bytes = max(fitting, default=0)
    budget_bytes = arena_bytes - landing_bytes
    shares = allocate(
        [
            _options(model, known, arena_bytes)
            for model, known in zip(models, groupings, strict=True)
        ],
        budget_bytes,
    )
    return CapacityReport(
        arena_bytes=arena_bytes,
        total_bytes=sum(model.total_bytes for model in models),
        fits_all=sum(model.total_bytes for model in models) <= arena_bytes,
        fit_count=_fit_count(models, arena_bytes),
        landing_bytes=landing_bytes,
        prefix_budget_bytes=budget_bytes,
        kept_bytes=shares.used_bytes,
        stall_saved_ms_per_s=shares.value,
        stall_saved_most_ms_per_s=shares.most_value,
        models=tuple(
            _model_report(model, known, kept_layers, arena_bytes)
            for model, known, kept_layers in zip(models, groupings, shares.choices, strict=True)
        ),
    )


def _options(model: ModelDemand, groupings: Groupings, arena_bytes: int) -> list[Option]:
    """(bytes, ms saved per second) of each prefix, from none to the whole model."""
    if model.total_bytes > arena_bytes or not model.costs.layer_count:
        return [(0, 0.0)]  # it never runs, or has nothing to keep
    sizes_bytes = (*model.costs.offsets_bytes[:-1], model.total_bytes)
    cold_ms = groupings.total_ms[0]
    saved = (model.requests_per_s * (cold_ms - total_ms) for total_ms in groupings.total_ms)
    return list(zip(sizes_bytes, accumulate(saved, max), strict=True))


def _fit_count(models: Sequence[ModelDemand], arena_bytes: int) -> int:
    count, used_bytes = 0, 0
    for size_bytes in sorted(model.total_bytes for model in models):
        used_bytes += size_bytes
        if used_bytes > arena_bytes:
            break
        count += 1
    return count


def _model_report(
    model: ModelDemand, groupings: Groupings, kept_layers: int, arena_bytes: int
) -> ModelReport:
    costs, plan = model.costs, groupings.plan()
    cold = makespan(plan, costs)
    zero = least_prefix(costs, groupings=groupings)
    kept_ms = groupings.total_ms[kept_layers]
    fits = model.total_bytes <= arena_bytes

    def holds(total_ms: float) -> bool | None:
        return None if model.deadline_ms is None else fits and total_ms <= model.deadline_ms

    return ModelReport(
        name=model.name,
        total_bytes=model.total_bytes,
        fits=fits,
        layer_count=costs.layer_count,
        group_count=len(plan),
        groups=plan,
        bound_ms=bound(costs),
        resident_ms=costs.resident_ms,
        cold_ms=cold.total_ms,
        overhead_ms=cold.overhead_ms,
        zero_prefix_bytes=zero.size_bytes,
        zero_prefix_ms=zero.total_ms,
        kept_bytes=costs.offsets_bytes[kept_layers],
        kept_ms=kept_ms,
        deadline_ms=model.deadline_ms,
        holds_cold=holds(cold.total_ms),
        holds_with_zero_prefix=holds(zero.total_ms),
        holds_with_kept=holds(kept_ms),
    )
