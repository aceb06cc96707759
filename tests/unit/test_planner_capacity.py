"""Sharing prefix bytes among models, and the report behind ``pipeswitch plan``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.planning import (
    CapacityReport,
    LayerCosts,
    LinkCost,
    ModelDemand,
    allocate,
    allocation,
    capacity_report,
    makespan,
    plan_groups,
)
from pipeswitch.planning.allocation import CELLS, Option

# --- the knapsack ----------------------------------------------------------------------------


def best_value(models: Sequence[Sequence[Option]], budget_bytes: int) -> float:
    """The exact optimum: all (bytes, value) pairs that no other beats, model by model."""
    pairs: list[tuple[int, float]] = [(0, 0.0)]
    for options in models:
        made = [
            (used + size, -(value + gain))
            for used, value in pairs
            for size, gain in options
            if used + size <= budget_bytes
        ]
        pairs = []
        for used, negative in sorted(made):
            if not pairs or -negative > pairs[-1][1]:
                pairs.append((used, -negative))
    return pairs[-1][1]


def options_of(steps: Sequence[tuple[int, float]]) -> list[Option]:
    options: list[Option] = [(0, 0.0)]
    for size, gain in steps:
        options.append((options[-1][0] + size, options[-1][1] + gain))
    return options


STEPS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30).map(float)), max_size=4)
MODELS = st.lists(STEPS.map(options_of), max_size=4)


@given(MODELS, st.integers(0, 120))
def test_no_allocation_within_the_budget_is_worth_more(
    models: list[list[Option]], budget_bytes: int
) -> None:
    found = allocate(models, budget_bytes)
    chosen = [options[index] for options, index in zip(models, found.choices, strict=True)]
    assert found.used_bytes == sum(size for size, _ in chosen) <= budget_bytes
    assert found.value == sum(value for _, value in chosen)
    most = max(
        sum(value for _, value in choice)
        for choice in product(*models)
        if sum(size for size, _ in choice) <= budget_bytes
    )
    assert found.value == best_value(models, budget_bytes) == most
    assert most <= found.most_value + 1e-9


def test_most_value_per_byte_first_would_miss_the_best_allocation() -> None:
    # 6 bytes for 7 are the densest, yet 5 + 5 bytes for 5 + 5 fill the budget.
    found = allocate([[(0, 0.0), (6, 7.0)], [(0, 0.0), (5, 5.0)], [(0, 0.0), (5, 5.0)]], 10)
    assert (found.choices, found.value) == ((0, 1, 1), 10.0)
    assert found.most_value == 11.0


def test_a_large_budget_is_used_as_well_as_one_smaller_by_a_cell_per_model() -> None:
    rng = random.Random(7)
    for _ in range(10):
        models = [
            options_of([(rng.randint(1, 4000), rng.random()) for _ in range(12)]) for _ in range(5)
        ]
        budget_bytes = rng.randint(5000, 80_000)
        cell_bytes = -(-budget_bytes // CELLS)
        found = allocate(models, budget_bytes)
        assert found.used_bytes <= budget_bytes
        assert found.value >= best_value(models, budget_bytes - len(models) * cell_bytes)
        assert found.value <= best_value(models, budget_bytes) <= found.most_value + 1e-9
        assert found.value >= 0.99 * best_value(models, budget_bytes)


def test_options_smaller_than_a_cell_stay_within_the_budget_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allocation, "CELLS", 8)
    models: list[list[Option]] = [[(0, 0.0), (9, 1.0)] for _ in range(20)]
    found = allocate(models, budget_bytes=80)
    assert (sum(found.choices), found.used_bytes) == (8, 72)


@pytest.mark.parametrize(
    "options", [[], [(1, 0.0)], [(0, 0.0), (5, 2.0), (4, 3.0)], [(0, 0.0), (1, -1.0)]]
)
def test_options_that_do_not_rise_from_nothing_are_refused(options: list[Option]) -> None:
    with pytest.raises(ValueError, match="options"):
        allocate([options], 10)


# --- the report ------------------------------------------------------------------------------

LINK = LinkCost(0.0, 0.1)  # ms a byte
COMPUTING = LayerCosts((10,) * 10, (2.0,) * 10, LINK)  # copy 10 ms, computation 20 ms
COPYING = LayerCosts((10,) * 10, (0.5,) * 10, LINK)  # copy 10 ms, computation 5 ms


def demand(
    name: str, costs: LayerCosts, rate: float = 1.0, deadline_ms: float | None = None
) -> ModelDemand:
    return ModelDemand(name, costs, costs.total_bytes, rate, deadline_ms)


def test_a_model_is_reported_cold_resident_and_with_its_prefix() -> None:
    report = capacity_report([demand("a", COMPUTING, deadline_ms=20.5)], arena_bytes=100)
    (line,) = report.models
    cold = makespan(plan_groups(COMPUTING), COMPUTING)
    assert (line.cold_ms, line.overhead_ms) == (cold.total_ms, cold.overhead_ms) == (21.0, 1.0)
    assert (line.resident_ms, line.bound_ms) == (20.0, 21.0)
    assert (line.group_count, line.groups) == (len(plan_groups(COMPUTING)), plan_groups(COMPUTING))
    assert (line.zero_prefix_bytes, line.zero_prefix_ms) == (10, 20.0)
    assert (line.holds_cold, line.holds_with_zero_prefix) == (False, True)
    # The arena is its landing zone: nothing can be kept.
    assert (report.prefix_budget_bytes, line.kept_bytes, line.kept_ms) == (0, 0, 21.0)
    assert line.holds_with_kept is False


def test_prefix_bytes_go_where_requests_and_time_saved_are_most() -> None:
    models = [demand("rare", COPYING, rate=0.1), demand("hot", COPYING, rate=10.0)]
    report = capacity_report(models, arena_bytes=150)
    rare, hot = report.models
    assert (rare.kept_bytes, hot.kept_bytes) == (0, 50)
    assert hot.kept_ms < hot.cold_ms == rare.kept_ms
    saved = 10.0 * (hot.cold_ms - hot.kept_ms)
    assert report.stall_saved_ms_per_s == pytest.approx(saved)
    assert report.stall_saved_most_ms_per_s >= report.stall_saved_ms_per_s


def test_how_many_models_fit_is_told_by_the_smallest() -> None:
    small = LayerCosts((10,), (1.0,), LINK)
    models = [demand("large", COPYING), *(demand(f"small-{i}", small) for i in range(4))]
    assert capacity_report(models, arena_bytes=110).fit_count == 4
    report = capacity_report(models, arena_bytes=140)
    assert (report.fit_count, report.fits_all, report.total_bytes) == (5, True, 140)


def test_a_model_larger_than_the_arena_holds_no_deadline_and_keeps_nothing() -> None:
    models = [
        demand("large", COPYING, deadline_ms=1e6),
        demand("ok", LayerCosts((10,), (1.0,), LINK)),
    ]
    report = capacity_report(models, arena_bytes=50)
    large, ok = report.models
    assert (large.fits, large.holds_cold, large.kept_bytes) == (False, False, 0)
    assert (ok.fits, ok.holds_cold, ok.kept_bytes) == (True, None, 10)
    assert (report.landing_bytes, report.fit_count) == (10, 1)


def test_a_whole_model_that_is_kept_takes_its_region_with_the_alignment() -> None:
    padded = ModelDemand(
        "padded", LayerCosts((10,), (1.0,), LINK), total_bytes=16, requests_per_s=1.0
    )
    assert capacity_report([padded], arena_bytes=31).kept_bytes == 0
    assert capacity_report([padded], arena_bytes=32).kept_bytes == 16


def test_no_models_and_a_model_without_layers_are_reported_too() -> None:
    assert capacity_report([], arena_bytes=10).models == ()
    (line,) = capacity_report([demand("empty", LayerCosts((), (), LINK))], arena_bytes=10).models
    assert (line.cold_ms, line.group_count, line.kept_bytes) == (0.0, 0, 0)


def test_a_report_survives_json() -> None:
    report = capacity_report([demand("a", COMPUTING, deadline_ms=21.0)], arena_bytes=200)
    assert msgspec.json.decode(msgspec.json.encode(report), type=CapacityReport) == report


def test_a_demand_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="smaller than its layers"):
        ModelDemand("a", COPYING, total_bytes=1)
    with pytest.raises(ValueError, match="negative rate"):
        ModelDemand("a", COPYING, total_bytes=100, requests_per_s=-1.0)
