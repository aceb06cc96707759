"""Global random generators: after any calls, the captured states equal the real states."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.workers.training.randomness import RandomState, Unchanged, own_random

ONCE = np.random.RandomState(5)
HALF_A_PAIR, A_PAIR = [(ONCE.standard_normal(), ONCE.get_state())[1] for _ in range(2)]
STEPS: list[Callable[[], Any]] = [
    lambda: None,
    np.random.standard_normal,
    lambda: np.random.binomial(10, 0.3),
    lambda: np.random.seed(7),
    lambda: np.random.set_bit_generator(np.random.PCG64(3)),
    lambda: np.random.set_bit_generator(np.random.MT19937(4)),
    lambda: random.gauss(0.0, 1.0),
    lambda: random.seed(7),
    lambda: torch.rand(1),
]


def numpy_state() -> tuple[str, str]:
    """Return the captured state and numpy's own state, as texts."""
    state = RandomState("cpu")._numpy, np.random.get_state()
    with np.printoptions(threshold=10_000):
        return repr(state[0]), repr(state[1])


@pytest.mark.filterwarnings("ignore:get_state and legacy")
@given(st.lists(st.sampled_from(STEPS), max_size=12))
def test_a_state_is_what_the_generators_say(steps: list[Callable[[], Any]]) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937(1))
    try:
        for step in steps:
            step()
            actual, expected = numpy_state()
            assert actual == expected
            assert RandomState("cpu")._python == random.getstate()
    finally:
        np.random.set_bit_generator(before)


def test_a_number_that_numpy_keeps_is_part_of_the_state() -> None:
    with own_random():
        for state in (HALF_A_PAIR, A_PAIR, HALF_A_PAIR):  # different states with the same words
            np.random.set_state(state)
            actual, expected = numpy_state()
            assert actual == expected


@pytest.mark.parametrize(
    ("looks", "states"),
    [([1] * 3, [0, 0]), ([1, 1, 2, 2], [0, 1]), ([None] * 4, [0, 1]), ([1, 2, 3, 4], [0, 1])],
)
def test_a_state_is_fetched_unless_its_memory_is_the_same(looks: Any, states: list[int]) -> None:
    generator = Unchanged(iter(range(9)).__next__, iter(looks).__next__)
    assert [generator.state(), generator.state()] == states
