"""Predicted times of plans, their lower bounds, and TicTac's orders of transfers."""

from __future__ import annotations

import pytest

from pipeswitch.extras.lab.costs import LayerCosts, LinkCost, bound, makespan, pass_ms
from pipeswitch.planning.streaming import StagingLayout, land

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


def by_hand(layout: StagingLayout, copy_ms: float, compute_ms: float) -> float:
    """Return the time in ms of a pass (one run of the model), simulated tick by tick."""
    count = len(layout.offsets)
    order = [index for index in range(count) if index not in layout.resident]
    arrived, computed, sent, clock_ms, link_ms, device_ms = {*layout.resident}, 0, 0, 0.0, 0.0, 0.0
    while computed < count:
        link_ms += sent < len(order) and computed >= layout.waits[order[sent]]
        device_ms += computed in arrived
        clock_ms += 1.0
        if link_ms == copy_ms:
            arrived.add(order[sent])
            sent, link_ms = sent + 1, 0.0
        if device_ms == compute_ms:
            computed, device_ms = computed + 1, 0.0
    return clock_ms


@pytest.mark.parametrize(("copy_ms", "compute_ms"), [(2.0, 4.0), (3.0, 3.0), (4.0, 2.0)])
def test_a_pass_takes_the_longer_of_link_and_compute_and_a_bubble(
    copy_ms: float, compute_ms: float
) -> None:
    costs = LayerCosts((4,) * 24, (compute_ms,) * 24, LinkCost(0.0, copy_ms / 4))
    layout = land([4] * 24, range(24), 4 * 8, 4)
    assert layout is not None
    took_ms = pass_ms(tuple(range(24)), costs, layout.waits, layout.resident)
    link_ms = copy_ms * (24 - len(layout.resident))
    assert max(link_ms, 24 * compute_ms) <= took_ms <= 1.15 * max(link_ms, 24 * compute_ms)
    assert took_ms == by_hand(layout, copy_ms, compute_ms)
