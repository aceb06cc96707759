"""Costs, the timeline of a plan, its bound, and TicTac's efficiency of an order of transfers."""

from __future__ import annotations

import ast
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeswitch.planning
from pipeswitch.planning import (
    GroupTimes,
    LayerCosts,
    LinkCost,
    bound,
    makespan,
    ordering_efficiency,
    score_order,
)
from pipeswitch.planning.grouping import bucket, one_shot, per_layer

# Three layers of 10, 20 and 10 bytes; one copy takes 1 ms and 0.1 ms a byte.
SMALL = LayerCosts((10, 20, 10), (4.0, 1.0, 2.0), LinkCost(1.0, 0.1), sigma_ms=0.5)


def test_a_timeline_has_each_groups_arrival_start_and_end() -> None:
    run = makespan((0, 2), SMALL)
    assert run.groups == (
        GroupTimes(0, 2, 30, False, arrived_ms=4.0, started_ms=4.0, finished_ms=9.5),
        GroupTimes(2, 3, 10, False, arrived_ms=6.0, started_ms=9.5, finished_ms=12.0),
    )
    assert (run.total_ms, run.stall_ms, run.signal_ms) == (12.0, 4.0, 1.0)
    assert run.overhead_ms == 5.0


def test_resident_groups_need_neither_copy_nor_signal() -> None:
    run = makespan((0, 1), SMALL, resident_groups=1)
    assert run.groups[0] == GroupTimes(0, 1, 10, True, 0.0, 0.0, finished_ms=4.0)
    assert run.groups[1] == GroupTimes(1, 3, 30, False, 4.0, 4.0, finished_ms=7.5)
    assert run.total_ms == SMALL.resident_ms + SMALL.sigma_ms
    assert makespan((0, 1, 2), SMALL, resident_groups=3).total_ms == SMALL.resident_ms


def test_the_copy_runs_while_the_device_is_not_ready_yet() -> None:
    late = LayerCosts(SMALL.layer_bytes, SMALL.compute_ms, SMALL.link, sigma_ms=0.5, ready_ms=5.0)
    run = makespan(one_shot(3), late)
    assert (run.groups[0].started_ms, run.stall_ms, run.total_ms) == (5.0, 0.0, 12.5)
    assert bound(late) == 12.5


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0, 9)), max_size=12),
    st.floats(0, 2),
    st.floats(0, 9),
    st.integers(1, 99),
)
def test_a_total_is_waiting_for_the_device_computing_signalling_and_stalling(
    layers: list[tuple[int, float]], sigma_ms: float, ready_ms: float, bucket_bytes: int
) -> None:
    sizes, times_ms = tuple(size for size, _ in layers), tuple(ms for _, ms in layers)
    costs = LayerCosts(sizes, times_ms, LinkCost(0.3, 0.1), sigma_ms, ready_ms)
    run = makespan(bucket(sizes, bucket_bytes, bucket_bytes), costs)
    parts_ms = run.ready_ms + run.compute_ms + run.signal_ms + run.stall_ms
    assert run.total_ms == pytest.approx(parts_ms)
    assert run.overhead_ms == pytest.approx(run.total_ms - costs.resident_ms)
    assert bound(costs) <= run.total_ms * (1 + 1e-12)


def test_the_bound_is_the_layer_whose_arrival_and_remaining_computation_are_latest() -> None:
    # The last layer arrives after 1 + 4 ms at the earliest, the first after 1 + 1 ms.
    assert bound(SMALL) == 0.5 + max(7.0, 2.0 + 7.0, 4.0 + 3.0, 5.0 + 2.0)


@pytest.mark.parametrize(
    ("sizes", "times_ms", "sigma_ms"),
    [
        ((1,), (), 0.0),
        ((-1,), (1.0,), 0.0),
        ((1,), (-1.0,), 0.0),
        ((1,), (float("nan"),), 0.0),
        ((1,), (1.0,), float("inf")),
    ],
)
def test_costs_that_make_no_sense_are_refused(
    sizes: tuple[int, ...], times_ms: tuple[float, ...], sigma_ms: float
) -> None:
    with pytest.raises(ValueError, match=r"layers have bytes|negative"):
        LayerCosts(sizes, times_ms, LinkCost(0.0, 0.0), sigma_ms)


def test_a_copy_costs_a_fixed_part_and_its_bytes_and_nonsense_is_refused() -> None:
    assert LinkCost(0.5, 1e-7)(20_000_000) == pytest.approx(2.5)
    with pytest.raises(ValueError, match="not negative"):
        LinkCost(-1.0, 1.0)


def test_efficiency_is_1_when_the_busier_resource_never_waits_and_0_when_nothing_overlaps() -> None:
    assert ordering_efficiency(10.0, link_ms=10.0, device_ms=6.0) == 1.0
    assert ordering_efficiency(16.0, link_ms=10.0, device_ms=6.0) == 0.0
    assert ordering_efficiency(13.0, link_ms=10.0, device_ms=6.0) == 0.5
    assert ordering_efficiency(6.0, link_ms=0.0, device_ms=6.0) == 1.0


def test_sending_what_is_needed_first_last_leaves_nothing_to_overlap() -> None:
    costs = LayerCosts((10, 10, 10), (1.0, 1.0, 1.0), LinkCost(0.0, 0.1))
    score = score_order((2, 1, 0), costs)
    assert (score.total_ms, score.first_use_ms) == (6.0, 4.0)
    assert score.efficiency == 0.0
    assert score.first_use_efficiency == pytest.approx(2 / 3)
    assert score.speedup_potential == 1.0


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0, 9)), max_size=5),
    st.floats(0, 2),
    st.floats(0, 9),
)
def test_no_order_of_transfers_beats_the_order_of_first_use(
    layers: list[tuple[int, float]], alpha_ms: float, ready_ms: float
) -> None:
    sizes, times_ms = tuple(size for size, _ in layers), tuple(ms for _, ms in layers)
    costs = LayerCosts(sizes, times_ms, LinkCost(alpha_ms, 0.1), 0.2, ready_ms)
    first_use_ms = makespan(per_layer(len(layers)), costs).total_ms
    for order in permutations(range(len(layers))):
        score = score_order(order, costs)
        assert score.first_use_ms == pytest.approx(first_use_ms)
        assert score.total_ms >= first_use_ms * (1 - 1e-9)
        assert score.efficiency <= score.first_use_efficiency + 1e-9
        assert score.first_use_efficiency <= 1 + 1e-9


def test_an_order_that_forgets_a_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="each of 3 layers once"):
        score_order((0, 1, 1), SMALL)


def test_the_planner_imports_arithmetic_and_nothing_that_acts() -> None:
    arithmetic = {"abc", "bisect", "collections", "dataclasses", "functools", "itertools", "math"}
    arithmetic |= {"random", "statistics"}  # random numbers come from a seed
    allowed = arithmetic | {"__future__", "typing", "numpy", "msgspec", "grouping"}
    folder = Path(pipeswitch.planning.__file__).parent
    modules = {file.stem for file in folder.glob("*.py")} | {"None"}
    for file in set(folder.glob("*.py")) - {folder / "files.py"}:  # profiles on disk
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert str(node.module).split(".")[0] in allowed | modules, file.name
            elif isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, file.name
