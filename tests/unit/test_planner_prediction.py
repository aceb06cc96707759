"""Predicted times of plans, their lower bounds, and TicTac's orders of transfers."""

from __future__ import annotations

import pytest

from pipeswitch.planning.costs import LayerCosts, LinkCost, bound, makespan

# Three layers of 10, 20 and 10 bytes; a copy takes 1 ms plus 0.1 ms per byte.
SMALL = LayerCosts((10, 20, 10), (4.0, 1.0, 2.0), LinkCost(1.0, 0.1), sigma_ms=0.5)


def test_a_group_starts_when_it_has_arrived_and_the_one_before_has_computed() -> None:
    # 30 bytes arrive at 4 ms and compute until 4 + 0.5 + 5. The last 10 arrive at 6 ms and wait.
    assert makespan((0, 2), SMALL) == 9.5 + 0.5 + 2.0


def test_the_bound_is_the_layer_whose_arrival_and_remaining_computation_are_latest() -> None:
    # The first layer arrives at 1 + 1 ms at the earliest, the last layer at 1 + 4 ms.
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
