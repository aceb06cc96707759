"""The report behind ``pipeswitch plan``."""

from __future__ import annotations

from pipeswitch.extras.lab.costs import LayerCosts, LinkCost, makespan
from pipeswitch.extras.lab.planner import plan_groups
from pipeswitch.extras.lab.profile_report import ModelDemand, capacity_report

LINK = LinkCost(0.0, 0.1)  # 0.1 ms per byte
COMPUTING = LayerCosts((10,) * 10, (2.0,) * 10, LINK)  # 10 ms to copy, 20 ms to compute
COPYING = LayerCosts((10,) * 10, (0.5,) * 10, LINK)  # 10 ms to copy, 5 ms to compute


def demand(name: str, costs: LayerCosts, deadline_ms: float | None = None) -> ModelDemand:
    return ModelDemand(name, costs, costs.total_bytes, deadline_ms)


def test_a_model_is_reported_cold_and_resident() -> None:
    report = capacity_report([demand("a", COMPUTING, deadline_ms=20.5)], arena_bytes=100)
    (line,) = report["models"]
    assert line["cold_ms"] == makespan(plan_groups(COMPUTING), COMPUTING) == 21.0
    assert line["overhead_ms"] == 1.0
    assert (line["resident_ms"], line["bound_ms"]) == (20.0, 21.0)
    assert (line["group_count"], line["groups"]) == (
        len(plan_groups(COMPUTING)),
        plan_groups(COMPUTING),
    )
    assert line["holds_cold"] is False


def test_a_variant_is_also_predicted_where_another_one_lies() -> None:
    tuned = ModelDemand("tuned", COPYING, 100, shared_bytes=75)
    (line,) = capacity_report([tuned], arena_bytes=100)["models"]
    assert line["variant_ms"] == makespan(plan_groups(COPYING), COPYING.scaled(0.25, 1.0))
    assert line["variant_ms"] < line["cold_ms"] == makespan(plan_groups(COPYING), COPYING)


def test_how_many_models_fit_is_told_by_the_smallest() -> None:
    small = LayerCosts((10,), (1.0,), LINK)
    models = [demand("large", COPYING), *(demand(f"small-{i}", small) for i in range(4))]
    assert capacity_report(models, arena_bytes=110)["fit_count"] == 4
    report = capacity_report(models, arena_bytes=140)
    assert (report["fit_count"], report["fits_all"], report["total_bytes"]) == (5, True, 140)


def test_a_model_larger_than_the_arena_holds_no_deadline() -> None:
    models = [
        demand("large", COPYING, deadline_ms=1e6),
        demand("ok", LayerCosts((10,), (1.0,), LINK)),
    ]
    report = capacity_report(models, arena_bytes=50)
    large, ok = report["models"]
    assert (large["fits"], large["holds_cold"]) == (False, False)
    assert (ok["fits"], ok["holds_cold"], report["fit_count"]) == (True, None, 1)


def test_no_models_and_a_model_without_layers_are_reported_too() -> None:
    assert capacity_report([], arena_bytes=10)["models"] == []
    (line,) = capacity_report([demand("empty", LayerCosts((), (), LINK))], arena_bytes=10)["models"]
    assert (line["cold_ms"], line["group_count"]) == (0.0, 0)
