"""The plan that the server uses: it is near the optimum, even if the machine becomes slower."""

from __future__ import annotations

import random

import pytest

from pipeswitch.extras.lab.costs import LayerCosts, LinkCost, makespan
from pipeswitch.extras.lab.planner import plan_groups, robust_plan
from pipeswitch.planning.grouping import check_plan

MIB = 1 << 20


def regret(plan: tuple[int, ...], costs: LayerCosts) -> float:
    return makespan(plan, costs) / makespan(plan_groups(costs), costs)


@pytest.mark.parametrize("ratio", [0.5, 0.8, 1.0, 1.1, 1.25, 2.0])
@pytest.mark.parametrize("layer_count", [12, 96])
@pytest.mark.parametrize("sigma_ms", [0.0, 0.02])
def test_it_gives_up_little_and_is_not_thrown_by_a_late_copy(
    ratio: float, layer_count: int, sigma_ms: float
) -> None:
    compute_ms = 192.0 / layer_count
    link = LinkCost(0.05, ratio * compute_ms / (8 * MIB))
    costs = LayerCosts((8 * MIB,) * layer_count, (compute_ms,) * layer_count, link, sigma_ms)
    late = costs.scaled(1.2, 1.0)
    robust, exact = robust_plan(costs), plan_groups(costs)
    check_plan(robust, layer_count)
    assert regret(robust, costs) < 1.03
    assert regret(robust, late) < 1.03
    worlds = (costs, late, costs.scaled(1.0, 1.2))
    assert max(regret(robust, w) for w in worlds) <= max(regret(exact, w) for w in worlds)


def test_random_costs() -> None:
    chosen = random.Random(4)
    for _ in range(60):
        count = chosen.randrange(1, 30)
        sizes = tuple(chosen.randrange(4 * MIB) for _ in range(count))
        times = tuple(chosen.random() * 3 for _ in range(count))
        costs = LayerCosts(sizes, times, LinkCost(0.02, 1e-6), chosen.choice((0.0, 0.05)))
        plan = robust_plan(costs)
        check_plan(plan, count)
        worst = max(
            regret(plan, world) for world in (costs, costs.scaled(1.2, 1.0), costs.scaled(1.0, 1.2))
        )
        assert worst < 1.1
        assert makespan(plan, costs) <= 1.0001 * makespan((0,), costs)


def test_no_layers_no_groups() -> None:
    assert robust_plan(LayerCosts((), (), LinkCost(0.0, 0.0))) == ()
