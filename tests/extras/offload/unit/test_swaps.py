"""Planner of which saved tensors leave the device, compared with every possible choice."""

from __future__ import annotations

import random
from itertools import chain, combinations

import pytest

from pipeswitch.extras.offload import swaps
from pipeswitch.extras.offload.swaps import Event, Forecast, LinkQueue, Step, forecast, plan

PAGE = 4096


class Watched(swaps._ForecastState):
    """Forecast that also counts the bytes on the device from scratch at every tick."""

    def _watch(self) -> None:
        held_bytes = sum(
            size
            for size, place in zip(self._step.sizes_bytes, self._place, strict=True)
            if place in ("device", "leaving", "coming")
        )
        assert held_bytes <= self._held <= self._budget

    def _carry(self, until_ms: float) -> None:
        self._watch()
        super()._carry(until_ms)
        self._watch()

    def _ask_back(self, storage: int) -> None:
        super()._ask_back(storage)
        self._watch()


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swaps, "_ForecastState", Watched)


def random_step(dice: random.Random, count: int) -> Step:
    """Return a step that saves storages, uses them in nearly reverse order, then releases them."""
    events = [Event("save", storage, dice.uniform(0.2, 2)) for storage in range(count)]
    order = sorted(range(count), key=lambda storage: -storage + dice.choice([0, 0, 1.5, 3]))
    late: list[int] = []
    for storage in order:
        events.append(Event("use", storage, dice.uniform(0.2, 2)))
        late.append(storage)
        while late and dice.random() < 0.7:
            events.append(Event("release", late.pop(), dice.random()))
    events += [Event("release", storage, 0.1) for storage in late]
    sizes = [PAGE * dice.choice([1, 2, 4, 10, 16]) for _ in range(count)]
    return Step(sizes_bytes=sizes, events=events)


def random_lanes(dice: random.Random) -> swaps.Links:
    out, back = (
        LinkQueue(bytes_per_ms=dice.choice([5e3, 2e4, 1e5]), call_ms=dice.choice([0, 0.1]))
        for _ in "ab"
    )
    return out, back


def equal_step(count: int, size_bytes: int, compute_ms: float) -> Step:
    saves = [Event("save", storage, compute_ms) for storage in range(count)]
    uses = [
        [Event("use", storage, compute_ms), Event("release", storage, compute_ms)]
        for storage in reversed(range(count))
    ]
    return Step(sizes_bytes=[size_bytes] * count, events=[*saves, *chain(*uses)])


def both(rate: float) -> swaps.Links:
    return LinkQueue(bytes_per_ms=rate), LinkQueue(bytes_per_ms=rate)


def best_of_all(step: Step, budget_bytes: int, links: swaps.Links) -> Forecast | None:
    every = range(len(step.sizes_bytes))
    choices = (choice for count in range(len(every) + 1) for choice in combinations(every, count))
    forecasts = [forecast(step, choice, budget_bytes, links) for choice in choices]
    return min((one for one in forecasts if one), key=lambda one: one.wait_ms, default=None)


def test_a_plan_waits_little_longer_than_the_best_of_all_choices() -> None:
    planned, waits_ms, least_ms = 0, 0.0, 0.0
    for seed in range(120):
        dice = random.Random(seed)
        step, links = random_step(dice, dice.randint(2, 7)), random_lanes(dice)
        budget_bytes = int(sum(step.sizes_bytes) * dice.uniform(0.4, 1))
        forecast_of, best = plan(step, budget_bytes, links), best_of_all(step, budget_bytes, links)
        assert (forecast_of is None) == (best is None), seed
        if forecast_of is None or best is None:
            continue
        planned += 1
        assert forecast_of.peak_bytes <= budget_bytes
        assert forecast_of.wait_ms >= best.wait_ms - 1e-9
        waits_ms, least_ms = waits_ms + forecast_of.wait_ms, least_ms + best.wait_ms
    assert planned > 60
    assert 0.0 < least_ms <= waits_ms < 1.5 * least_ms


def test_what_fits_stays() -> None:
    step = equal_step(6, PAGE, 1.0)
    forecast_of = plan(step, 6 * PAGE, both(PAGE))
    assert forecast_of == Forecast(
        leaving=frozenset(), wait_ms=0.0, peak_bytes=6 * PAGE, moved_bytes=0
    )


def test_those_go_first_that_hide_best_and_no_more_than_need_be() -> None:
    forecast_of = plan(equal_step(8, PAGE, 1.0), 6 * PAGE, both(PAGE))
    assert forecast_of is not None
    assert forecast_of.wait_ms == 0.0
    assert forecast_of.leaving == {0, 1}  # the storages that are saved first and used last
    assert forecast_of.moved_bytes == 2 * PAGE


def test_bytes_come_back_in_the_order_of_use_and_before_it() -> None:
    step = equal_step(8, PAGE, 1.0)
    forecast_of = plan(step, 4 * PAGE, both(2 * PAGE))
    assert forecast_of is not None
    assert [storage for storage, _ in forecast_of.fetches] == sorted(
        forecast_of.leaving, reverse=True
    )
    used_at = {
        event.storage: number for number, event in enumerate(step.events) if event.what == "use"
    }
    assert all(asked_at < used_at[storage] for storage, asked_at in forecast_of.fetches)


def test_one_lane_carries_out_while_the_other_brings_back() -> None:
    events = [
        Event("save", 0, 0.0),
        Event("save", 1, 2.0),  # storage 0 has left the device, and 1 begins to leave
        Event("use", 0, 0.0),
        Event("release", 0, 1.0),
        Event("use", 1, 9.0),
    ]
    step = Step(sizes_bytes=[PAGE, 4 * PAGE], events=events)
    forecast_of = forecast(step, {0, 1}, 5 * PAGE, both(PAGE))
    assert forecast_of is not None
    assert forecast_of.wait_ms == 1.0  # for storage 0's copy back, not for storage 1's copy out


def test_a_slow_lane_is_waited_for() -> None:
    step = equal_step(8, PAGE, 1.0)
    waits = [
        forecast_of.wait_ms
        for rate in (4.0, 1.0, 0.25)
        if (forecast_of := plan(step, 3 * PAGE, both(rate * PAGE)))
    ]
    assert waits == sorted(waits)
    assert waits[0] == 0.0
    assert waits[-1] > 8.0


def test_small_ones_stay() -> None:
    assert plan(equal_step(8, PAGE - 1, 1.0), 4 * PAGE, both(PAGE)) is None


@pytest.mark.parametrize("budget_bytes", [PAGE - 1, PAGE])
def test_a_budget_below_the_largest_is_kept_by_no_plan(budget_bytes: int) -> None:
    forecast_of = plan(equal_step(3, PAGE, 1.0), budget_bytes, both(PAGE))
    assert (forecast_of is None) == (budget_bytes < PAGE)
