"""The exact planner, compared with brute force and another exact method."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.extras.lab.costs import LayerCosts, LinkCost, bound, makespan
from pipeswitch.extras.lab.planner import plan_groups
from pipeswitch.planning.grouping import check_plan

CLOSE = 1e-9  # relative tolerance, because the methods add in different orders

# --- two other methods that find the optimum -------------------------------------------------


def brute_force_ms(costs: LayerCosts) -> float:
    """Return the shortest total time in ms, by trying all groupings."""
    count = costs.layer_count
    copy_ms = [
        [costs.transfer_ms(i, j) if j > i else 0.0 for j in range(count + 1)] for i in range(count)
    ]
    run_ms = [[sum(costs.compute_ms[i:j]) for j in range(count + 1)] for i in range(count)]

    def least(start: int, link_ms: float, device_ms: float) -> float:
        if start == count:
            return device_ms
        best_ms = math.inf
        for end in range(start + 1, count + 1):
            arrived_ms = link_ms + copy_ms[start][end]
            begin_ms = max(device_ms, arrived_ms)
            done_ms = begin_ms + costs.sigma_ms + run_ms[start][end]
            best_ms = min(best_ms, least(end, arrived_ms, done_ms))
        return best_ms

    return least(0, 0.0, 0.0)


def pareto_ms(costs: LayerCosts) -> float:
    """Return the shortest total time in ms, by a forward search over pairs of times at which link
    and device end; only Pareto-optimal pairs are kept."""
    pairs: list[list[tuple[float, float]]] = [[(0.0, 0.0)]]
    for end in range(1, costs.layer_count + 1):
        points = []
        for start in range(end):
            copy_ms = costs.transfer_ms(start, end)
            run_ms = costs.sigma_ms + costs.remaining_ms[start] - costs.remaining_ms[end]
            points += [
                (link + copy_ms, max(device, link + copy_ms) + run_ms)
                for link, device in pairs[start]
            ]
        best: list[tuple[float, float]] = []
        for pair in sorted(points):
            if not best or pair[1] < best[-1][1]:
                best.append(pair)
        pairs.append(best)
    return min(device for _, device in pairs[-1])


# --- instances -------------------------------------------------------------------------------


def any_costs(max_layers: int) -> st.SearchStrategy[LayerCosts]:
    few_ms = st.sampled_from([0.0, 0.25, 1.0]) | st.floats(0, 20)
    layer = st.tuples(st.just(0) | st.integers(0, 500), few_ms)
    return st.builds(
        lambda layers, alpha, beta, sigma: LayerCosts(
            tuple(size for size, _ in layers),
            tuple(ms for _, ms in layers),
            LinkCost(alpha, beta),
            sigma,
        ),
        st.lists(layer, max_size=max_layers),
        st.sampled_from([0.0, 0.01, 0.5]) | st.floats(0, 5),
        st.sampled_from([0.0, 0.01]) | st.floats(0, 1),
        st.sampled_from([0.0, 0.0, 0.1]) | st.floats(0, 5),
    )


def random_costs(rng: random.Random, count: int) -> LayerCosts:
    """Return layers with log-normal sizes and times; copying takes about as long as computing."""
    sizes = [0 if rng.random() < 0.1 else int(rng.lognormvariate(9, 1.2)) for _ in range(count)]
    times_ms = [rng.lognormvariate(-2, 0.8) for _ in range(count)]
    beta = rng.choice([0.3, 1.0, 3.0]) * sum(times_ms) / max(1, sum(sizes))
    alpha = rng.choice([0.0, 0.01, 0.1])
    sigma = rng.choice([0.0, 0.005, 0.05, 0.3])
    return LayerCosts(tuple(sizes), tuple(times_ms), LinkCost(alpha, beta), sigma)


def planned_ms(costs: LayerCosts) -> float:
    """Return a plan's time in ms, computed from its timeline instead of the planner's own sums."""
    plan = plan_groups(costs)
    check_plan(plan, costs.layer_count)
    return makespan(plan, costs)


# --- the planner's plan is the best ----------------------------------------------------------


@given(any_costs(max_layers=12))
def test_no_grouping_ends_before_the_planned_one(costs: LayerCosts) -> None:
    assert planned_ms(costs) == pytest.approx(brute_force_ms(costs), rel=CLOSE)


@pytest.mark.parametrize("count", [30, 100, 300])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_two_exact_methods_agree_on_a_link_with_a_bandwidth(count: int, seed: int) -> None:
    costs = random_costs(random.Random(seed), count)
    total_ms = planned_ms(costs)
    assert total_ms == pytest.approx(pareto_ms(costs), rel=CLOSE)


@given(any_costs(max_layers=40))
def test_no_plan_beats_the_bound(costs: LayerCosts) -> None:
    assert bound(costs) <= planned_ms(costs) * (1 + CLOSE)


@given(any_costs(40))
def test_the_bound_is_reached_where_copies_and_signals_are_free(costs: LayerCosts) -> None:
    link = costs.link
    ideal = replace(costs, link=replace(link, alpha_ms=0.0), sigma_ms=0.0)
    assert planned_ms(ideal) == pytest.approx(bound(ideal), rel=CLOSE)


@given(any_costs(40))
def test_no_two_neighbouring_groups_could_be_one_without_ending_later(costs: LayerCosts) -> None:
    plan = plan_groups(costs)
    total_ms = makespan(plan, costs)
    for cut in range(1, len(plan)):
        batched = plan[:cut] + plan[cut + 1 :]
        assert makespan(batched, costs) > total_ms


def test_a_model_without_layers_has_no_groups_and_takes_no_time() -> None:
    costs = LayerCosts((), (), LinkCost(1.0, 1.0), sigma_ms=1.0)
    assert plan_groups(costs) == ()
    assert planned_ms(costs) == bound(costs) == 0.0


def test_layers_without_bytes_on_a_free_link_are_one_group() -> None:
    assert plan_groups(LayerCosts((0, 0, 0), (1.0, 1.0, 1.0), LinkCost(0.0, 1.0))) == (0,)
