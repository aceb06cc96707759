"""Costs, when a plan ends, its bound, and TicTac's orders of transfers."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeswitch.planning
from pipeswitch.planning.costs import LayerCosts, LinkCost, bound, makespan
from pipeswitch.planning.grouping import bucket, per_layer

# Three layers of 10, 20 and 10 bytes; one copy takes 1 ms and 0.1 ms a byte.
SMALL = LayerCosts((10, 20, 10), (4.0, 1.0, 2.0), LinkCost(1.0, 0.1), sigma_ms=0.5)


def test_a_group_starts_when_it_has_arrived_and_the_one_before_has_computed() -> None:
    # 30 bytes arrive at 4 and compute until 4 + 0.5 + 5; the last 10 bytes, at 6, wait for that.
    assert makespan((0, 2), SMALL) == 9.5 + 0.5 + 2.0


def test_resident_groups_need_neither_copy_nor_signal() -> None:
    assert makespan((0, 1), SMALL, resident_groups=1) == SMALL.resident_ms + SMALL.sigma_ms
    assert makespan((0, 1, 2), SMALL, resident_groups=3) == SMALL.resident_ms


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0, 9)), max_size=12),
    st.floats(0, 2),
    st.integers(1, 99),
)
def test_no_plan_ends_before_the_bound(
    layers: list[tuple[int, float]], sigma_ms: float, bucket_bytes: int
) -> None:
    sizes, times_ms = tuple(size for size, _ in layers), tuple(ms for _, ms in layers)
    costs = LayerCosts(sizes, times_ms, LinkCost(0.3, 0.1), sigma_ms)
    total_ms = makespan(bucket(sizes, bucket_bytes, bucket_bytes), costs)
    assert bound(costs) <= total_ms * (1 + 1e-12)


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


def sent_in_ms(order: Sequence[int], costs: LayerCosts) -> float:
    """The layers one by one in this order (TicTac, MLSys '19), computed in layer order."""
    arrived_ms = [0.0] * costs.layer_count
    link_ms = device_ms = 0.0
    for layer in order:
        link_ms += costs.link(costs.layer_bytes[layer])
        arrived_ms[layer] = link_ms
    for arrival_ms, compute_ms in zip(arrived_ms, costs.compute_ms, strict=True):
        device_ms = max(device_ms, arrival_ms) + costs.sigma_ms + compute_ms
    return device_ms


def test_sending_what_is_needed_first_last_leaves_nothing_to_overlap() -> None:
    costs = LayerCosts((10, 10, 10), (1.0, 1.0, 1.0), LinkCost(0.0, 0.1))
    assert sent_in_ms((2, 1, 0), costs) == 3.0 + costs.resident_ms
    assert makespan(per_layer(3), costs) == 4.0


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0, 9)), max_size=5),
    st.floats(0, 2),
)
def test_no_order_of_transfers_beats_the_order_of_first_use(
    layers: list[tuple[int, float]], alpha_ms: float
) -> None:
    sizes, times_ms = tuple(size for size, _ in layers), tuple(ms for _, ms in layers)
    costs = LayerCosts(sizes, times_ms, LinkCost(alpha_ms, 0.1), 0.2)
    first_use_ms = makespan(per_layer(len(layers)), costs)
    for order in permutations(range(len(layers))):
        assert sent_in_ms(order, costs) >= first_use_ms * (1 - 1e-9)


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
