"""Wanted number of a cluster's nodes, which changes seldom and stays within its limits."""

from __future__ import annotations

import random

import pytest

from pipeswitch.extras.cluster.choice import FEWER_ROUNDS, LONG_MS, MORE_ROUNDS, SHORT_MS, Scale

BEHIND = LONG_MS + 1.0


def test_more_when_all_are_behind_and_fewer_when_the_others_are_enough() -> None:
    scale = Scale(1, 3, 1)
    burst = [[BEHIND]] * (MORE_ROUNDS - 1) + [[LONG_MS]]
    assert {scale.look(queues_ms, 0) for queues_ms in burst * 10} == {1}
    assert [scale.look([BEHIND], 0) for _ in range(MORE_ROUNDS)] == [1] * (MORE_ROUNDS - 1) + [2]
    for queues_ms in ([BEHIND], [BEHIND, 0.0]):  # the new node still starts, then is idle
        assert {scale.look(queues_ms, 0) for _ in range(3 * MORE_ROUNDS)} == {2}
    for queues_ms, jobs in (([SHORT_MS, 1.0], 0), ([0.0] * 2, 2)):  # a node with a job stays
        assert {scale.look(queues_ms, jobs) for _ in range(3 * FEWER_ROUNDS)} == {2}
    targets = [scale.look([SHORT_MS, 0.0], 1) for _ in range(FEWER_ROUNDS)]
    assert targets == [2] * (FEWER_ROUNDS - 1) + [1]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_wanted_changes_by_one_within_its_limits_and_seldom(seed: int) -> None:
    """Machines that were requested may arrive late or never."""
    rng = random.Random(seed)
    least = rng.randrange(3)
    most = least + rng.randrange(1, 4)
    scale = Scale(least, most, rng.randrange(6))
    before, changed_at, count = scale.wanted, -MORE_ROUNDS, scale.wanted
    for number in range(2000):
        count += (scale.wanted > count) - (scale.wanted < count) if rng.random() < 0.1 else 0
        load = BEHIND if (number // 200 % 2) ^ (rng.random() < 0.02) else 0.0
        target = scale.look([load] * count, rng.choice([0, 0, 1]))
        assert least <= target <= most
        assert abs(target - before) <= 1
        if target != before:
            assert number - changed_at >= (MORE_ROUNDS if target > before else FEWER_ROUNDS)
            before, changed_at = target, number
