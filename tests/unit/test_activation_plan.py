"""The planner of activations, beside every choice there is."""

from __future__ import annotations

import random
from itertools import chain, combinations

import pytest

from pipeswitch.planning.activations import Event, Forecast, Lane, Step, forecast, plan

PAGE = 4096


def random_step(dice: random.Random, count: int) -> Step:
    """Saved in order, used in reverse, as layers are; each let go of after its use."""
    saves = [Event("save", storage, dice.uniform(0.2, 2)) for storage in range(count)]
    uses = [
        [Event("use", storage, dice.uniform(0.2, 2)), Event("release", storage, dice.random())]
        for storage in reversed(range(count))
    ]
    sizes = [PAGE * dice.choice([1, 2, 4, 10, 16]) for _ in range(count)]
    return Step(sizes_bytes=sizes, events=[*saves, *chain(*uses)])


def equal_step(count: int, size_bytes: int, compute_ms: float) -> Step:
    saves = [Event("save", storage, compute_ms) for storage in range(count)]
    uses = [[Event("use", storage, compute_ms), Event("release", storage, compute_ms)]
            for storage in reversed(range(count))]  # fmt: skip
    return Step(sizes_bytes=[size_bytes] * count, events=[*saves, *chain(*uses)])


def best_of_all(step: Step, budget_bytes: int, lane: Lane) -> Forecast | None:
    every = range(len(step.sizes_bytes))
    choices = (choice for count in range(len(every) + 1) for choice in combinations(every, count))
    found = [forecast(step, choice, budget_bytes, lane) for choice in choices]
    return min((one for one in found if one), key=lambda one: one.wait_ms, default=None)


def test_it_keeps_the_budget_wherever_a_choice_does_and_waits_hardly_longer() -> None:
    excess, planned = 0.0, 0
    for seed in range(150):
        dice = random.Random(seed)
        step = random_step(dice, dice.randint(2, 7))
        budget_bytes = int(sum(step.sizes_bytes) * dice.uniform(0.2, 1))
        lane = Lane(bytes_per_ms=dice.choice([5e3, 2e4, 1e5]), call_ms=dice.choice([0, 0.1]))
        found, best = plan(step, budget_bytes, lane), best_of_all(step, budget_bytes, lane)
        assert (found is None) == (best is None)
        if found is None or best is None:
            continue
        planned += 1
        assert found.peak_bytes <= budget_bytes
        compute_ms = sum(event.compute_ms for event in step.events)
        longer = (found.wait_ms - best.wait_ms) / (compute_ms + best.wait_ms)
        assert longer < 0.15  # of the step
        excess += longer
    assert planned > 80
    assert excess / planned < 0.005


def test_what_fits_stays() -> None:
    step = equal_step(6, PAGE, 1.0)
    found = plan(step, 6 * PAGE, Lane(bytes_per_ms=PAGE))
    assert found == Forecast(leaving=frozenset(), wait_ms=0.0, peak_bytes=6 * PAGE, moved_bytes=0)


def test_those_go_first_that_hide_best_and_no_more_than_need_be() -> None:
    found = plan(equal_step(8, PAGE, 1.0), 6 * PAGE, Lane(bytes_per_ms=PAGE))
    assert found is not None
    assert found.wait_ms == 0.0
    assert found.leaving == {0, 1}  # saved first, used last
    assert found.moved_bytes == 2 * PAGE


def test_bytes_come_back_in_the_order_of_use_and_before_it() -> None:
    step = equal_step(8, PAGE, 1.0)
    found = plan(step, 4 * PAGE, Lane(bytes_per_ms=2 * PAGE))
    assert found is not None
    assert [storage for storage, _ in found.fetches] == sorted(found.leaving, reverse=True)
    used_at = {event.storage: number for number, event in enumerate(step.events)
               if event.what == "use"}  # fmt: skip
    assert all(asked_at < used_at[storage] for storage, asked_at in found.fetches)


def test_a_slow_lane_is_waited_for() -> None:
    step = equal_step(8, PAGE, 1.0)
    waits = [found.wait_ms for rate in (4.0, 1.0, 0.25)
             if (found := plan(step, 3 * PAGE, Lane(bytes_per_ms=rate * PAGE)))]  # fmt: skip
    assert waits == sorted(waits)
    assert waits[0] == 0.0
    assert waits[-1] > 8.0


def test_small_ones_stay() -> None:
    assert plan(equal_step(8, PAGE - 1, 1.0), 4 * PAGE, Lane(bytes_per_ms=PAGE)) is None


@pytest.mark.parametrize("budget_bytes", [PAGE - 1, PAGE])
def test_a_budget_below_the_largest_is_kept_by_no_plan(budget_bytes: int) -> None:
    found = plan(equal_step(3, PAGE, 1.0), budget_bytes, Lane(bytes_per_ms=PAGE))
    assert (found is None) == (budget_bytes < PAGE)
