"""How many nodes are wanted: seldom changed, never beyond what was allowed."""

from __future__ import annotations

import random

import pytest

from pipeswitch.cluster.scaling import FEWER_ROUNDS, LONG_MS, MORE_ROUNDS, SHORT_MS, Scale

BEHIND = LONG_MS + 1.0


def test_one_more_when_all_are_behind_and_it_has_come_before_another() -> None:
    scale = Scale(1, 3, 1)
    assert [scale.look([BEHIND], 0) for _ in range(MORE_ROUNDS)] == [1] * (MORE_ROUNDS - 1) + [2]
    assert {scale.look([BEHIND], 0) for _ in range(3 * MORE_ROUNDS)} == {2}  # it is on its way
    assert {scale.look([BEHIND, 0.0], 0) for _ in range(3 * MORE_ROUNDS)} == {2}
    for count in (2, 3, 4):
        for _ in range(3 * MORE_ROUNDS):
            scale.look([BEHIND] * count, 0)
    assert scale.wanted == 3


def test_a_burst_asks_for_nothing() -> None:
    scale = Scale(1, 3, 1)
    burst = [[BEHIND]] * (MORE_ROUNDS - 1) + [[LONG_MS]]
    assert {scale.look(queues, 0) for queues in burst * 10} == {1}


def test_one_fewer_when_the_others_are_enough_and_each_job_keeps_a_node() -> None:
    scale = Scale(1, 8, 3)
    for queues, jobs in (([SHORT_MS * 2, 1.0, 0.0], 0), ([0.0] * 3, 3)):
        assert {scale.look(queues, jobs) for _ in range(3 * FEWER_ROUNDS)} == {3}
    found = [scale.look([SHORT_MS, SHORT_MS, 0.0], 2) for _ in range(FEWER_ROUNDS)]
    assert found == [3] * (FEWER_ROUNDS - 1) + [2]
    scale = Scale(1, 8, 1)
    for _ in range(MORE_ROUNDS):
        scale.look([BEHIND], 0)
    assert [scale.look([0.0], 0) for _ in range(FEWER_ROUNDS)][-1] == 1  # it never came: unasked


@pytest.mark.parametrize("seed", range(20))
def test_what_is_wanted_changes_by_one_within_its_limits_and_seldom(seed: int) -> None:
    rng = random.Random(seed)
    least = rng.randrange(3)
    most = least + rng.randrange(1, 4)
    scale = Scale(least, most, rng.randrange(6))
    before, changed_at, count = scale.wanted, -MORE_ROUNDS, scale.wanted
    for number in range(2000):
        count += (scale.wanted > count) - (scale.wanted < count) if rng.random() < 0.1 else 0
        load = rng.choice([0.0, LONG_MS, BEHIND]) if rng.random() < 0.05 else None
        queues = [load if load is not None else (BEHIND if number // 200 % 2 else 0.0)] * count
        wanted = scale.look(queues, rng.choice([0, 0, 1]))
        assert least <= wanted <= most
        assert abs(wanted - before) <= 1
        if wanted != before:
            assert number - changed_at >= (MORE_ROUNDS if wanted > before else FEWER_ROUNDS)
            before, changed_at = wanted, number
