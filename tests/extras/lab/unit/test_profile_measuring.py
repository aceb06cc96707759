"""Trials that measure a model, and the profile that is made from the trials' times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.extras.lab.costs import MIB
from pipeswitch.extras.lab.measuring import (
    MAX_REPEATS,
    MIN_REPEATS,
    MeasuredProgram,
    Measurement,
    RunInstants,
    Trial,
)
from pipeswitch.extras.lab.planner import plan_of
from pipeswitch.extras.lab.profile import Profile, decode, encode
from pipeswitch.planning.planned_groups import UNKNOWN_DEVICE

ALPHA_MS, MS_PER_MIB, WAKE_MS, GAP_MS, CALL_MS = 0.2, 2.0, 0.05, 0.01, 0.1


def program(sizes_mib: list[int], built: tuple[int, ...] = (0,)) -> MeasuredProgram:
    return MeasuredProgram(
        model="net",
        digest="ab" * 32,
        layer_bytes=tuple(size * MIB for size in sizes_mib),
        labels=tuple(f"l{i}" for i in range(len(sizes_mib))),
        built_plan=built,
    )


def ideal(
    trial: Trial, what: MeasuredProgram, layer_ms: list[float], at_ms: float = 1000.0
) -> RunInstants:
    """Return the instants of a run on a device that follows the planner's model exactly."""
    ends = (*trial.plan[1:], len(layer_ms))
    copies: list[float] = []
    begins: list[float] = []
    done: list[float] = []
    link = clock = at_ms
    for first, end in zip(trial.plan, ends, strict=True):
        size_mib = sum(what.layer_bytes[first:end]) / MIB
        link += ALPHA_MS + MS_PER_MIB * size_mib
        copies.append(link)
        begin = clock + (GAP_MS if begins else 0.0)
        if trial.is_cold and link > clock:
            begin = link + WAKE_MS
        begins.append(begin)
        clock = begin + CALL_MS + sum(layer_ms[first:end]) * trial.batch
        done.append(clock)
    return RunInstants(at_ms, tuple(copies) if trial.is_cold else (), tuple(begins), tuple(done))


def measure(
    what: MeasuredProgram, layer_ms: list[float], batches: tuple[int, ...] = (1,)
) -> Profile:
    measurement = Measurement(what, batches, UNKNOWN_DEVICE)
    last = -1.0
    while (trial := measurement.next) is not None:
        assert measurement.fraction >= last or last == 0.0
        last = measurement.fraction
        assert measurement.take(ideal(trial, what, layer_ms))
    assert measurement.fraction == 1.0
    return measurement.profile("2026-01-01T00:00:00+00:00")


def test_an_ideal_device_is_measured_exactly() -> None:
    what = program([1, 4, 16, 2, 8], built=(0, 2, 4))
    profile_made = measure(what, [3.0, 9.0, 30.0, 2.0, 20.0])
    assert profile_made.link.alpha_ms == pytest.approx(ALPHA_MS, abs=1e-3)
    assert profile_made.link.beta_ms_per_mib == pytest.approx(MS_PER_MIB, rel=1e-3)
    assert profile_made.link.residual_p90 < 1e-3
    assert profile_made.overheads.sigma_ms == pytest.approx(GAP_MS)
    assert profile_made.overheads.launch_ms == pytest.approx(CALL_MS)
    assert profile_made.overheads.wake_ms == pytest.approx(WAKE_MS)
    times = [3.1, 9.1, 30.1, 2.1, 20.1]
    assert profile_made.batches[0].switch_ms == pytest.approx(times)
    assert profile_made.batches[0].resident_ms == pytest.approx(times)
    assert [layer.size_bytes for layer in profile_made.layers] == list(what.layer_bytes)


def test_predictions_of_an_ideal_device_come_true() -> None:
    profile_made = measure(program([1, 4, 16, 2, 8], built=(0, 2, 4)), [3.0, 9.0, 30.0, 2.0, 20.0])
    assert {check.plan for check in profile_made.checks} >= {(0, 1, 2, 3, 4), (0, 2, 4), (0,)}
    assert profile_made.checks[-1].plan == plan_of(profile_made)
    for check in profile_made.checks:
        assert check.predicted_ms == pytest.approx(check.measured_ms, rel=0.02)


def test_the_planned_groups_are_tried_last_and_beat_what_was_there() -> None:
    profile_made = measure(program([8] * 12, built=(0, 6)), [16.0] * 12)
    planned = profile_made.checks[-1]
    assert planned.plan == plan_of(profile_made)
    # The plan allows for a 20 % slower link, so another plan may be slightly better on this link.
    assert all(planned.measured_ms <= 1.01 * other.measured_ms for other in profile_made.checks)


def test_each_batch_has_its_own_times() -> None:
    profile_made = measure(program([1, 1]), [10.0, 20.0], batches=(4, 1, 4))
    assert [batch.batch for batch in profile_made.batches] == [4, 1]
    assert profile_made.batch(4).switch_ms == pytest.approx((40.1, 80.1))  # type: ignore[union-attr]
    assert profile_made.batch(1).switch_ms == pytest.approx((10.1, 20.1))  # type: ignore[union-attr]
    assert profile_made.batch(2) is None


def test_a_program_of_one_layer_can_be_measured() -> None:
    profile_made = measure(program([4]), [5.0])
    assert [check.plan for check in profile_made.checks] == [(0,)]
    assert profile_made.overheads.launch_ms == 0.0


@given(
    sizes=st.lists(st.integers(0, 64), min_size=1, max_size=12),
    times=st.lists(st.floats(0.0, 200.0), min_size=12, max_size=12),
    cuts=st.sets(st.integers(1, 11)),
)
def test_whatever_was_measured_makes_a_profile_that_can_be_kept_and_planned(
    sizes: list[int], times: list[float], cuts: set[int]
) -> None:
    built = (0, *sorted(cut for cut in cuts if cut < len(sizes)))
    profile_made = measure(program(sizes, built), times[: len(sizes)])
    assert decode(encode(profile_made)) == profile_made
    assert plan_of(profile_made)[0] == 0


def test_the_first_trial_under_each_plan_is_not_counted() -> None:
    what = program([1, 2], built=(0,))
    measurement = Measurement(what, (1,), UNKNOWN_DEVICE)
    plans: set[tuple[int, ...]] = set()
    while (trial := measurement.next) is not None:
        assert trial.is_counted == (trial.plan in plans)
        assert trial.is_cold or trial.plan in plans
        plans.add(trial.plan)
        slow = [1000.0, 1000.0] if not trial.is_counted else [10.0, 10.0]
        measurement.take(ideal(trial, what, slow))
    profile_made = measurement.profile("")
    assert profile_made.batches[0].switch_ms == pytest.approx((10.1, 10.1))


@pytest.mark.parametrize(("layer_ms", "repeats"), [(0.1, MAX_REPEATS), (5000.0, MIN_REPEATS)])
def test_a_short_run_is_repeated_more_often(layer_ms: float, repeats: int) -> None:
    profile_made = measure(program([1, 1]), [layer_ms, layer_ms])
    assert profile_made.batches[0].trials == repeats


def test_a_run_that_means_nothing_is_made_again() -> None:
    what = program([1, 2], built=(0,))
    measurement = Measurement(what, (1,), UNKNOWN_DEVICE)
    trial = measurement.next
    assert trial is not None
    good = ideal(trial, what, [1.0, 1.0])
    assert not measurement.take(None)
    assert not measurement.take(RunInstants(0.0, (), good.begins_ms, good.ends_ms))
    assert not measurement.take(
        RunInstants(0.0, good.copy_ends_ms, good.begins_ms[:1], good.ends_ms[:1])
    )
    assert measurement.next is trial
    assert measurement.take(good)
    assert measurement.fraction > 0
