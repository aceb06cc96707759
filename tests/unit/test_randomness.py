"""States of the global random generators are what the generators say, whatever a script does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.inputs.randomness import RandomState, Unchanged, own_random

ONCE = np.random.RandomState(5)
ONCE.standard_normal()
HALF_A_PAIR = ONCE.get_state()
ONCE.standard_normal()
A_PAIR = ONCE.get_state()  # the same words: only the kept number is gone


def goes_back(state: Any) -> None:
    if type(np.random.get_bit_generator()) is np.random.MT19937:
        np.random.set_state(state)


STEPS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "numpy draws": lambda: np.random.random(3),
    "numpy draws half a pair": np.random.standard_normal,
    "numpy draws whole numbers": lambda: np.random.binomial(10, 0.3),
    "numpy is seeded": lambda: np.random.seed(7),
    "numpy goes back to half a pair": lambda: goes_back(HALF_A_PAIR),
    "numpy goes back to a pair": lambda: goes_back(A_PAIR),
    "numpy gets another generator": lambda: np.random.set_bit_generator(np.random.PCG64(3)),
    "numpy gets one of its own kind": lambda: np.random.set_bit_generator(np.random.MT19937(4)),
    "python draws": random.random,
    "python draws half a pair": lambda: random.gauss(0.0, 1.0),
    "python is seeded": lambda: random.seed(7),
    "torch draws": lambda: torch.rand(1),
    "torch is seeded": lambda: torch.manual_seed(7),
}


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    with own_random():
        yield


def as_bytes(state: Any) -> bytes:
    return repr([np.asarray(part).tobytes() if isinstance(part, np.ndarray) else part
                 for part in (state.values() if isinstance(state, dict) else state)]
                ).encode()  # fmt: skip


@pytest.mark.filterwarnings("ignore:get_state and legacy")
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=12))
def test_a_state_is_what_the_generators_say(names: list[str]) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937(1))
    try:
        for name in names:
            STEPS[name]()
            found = RandomState("cpu")
            assert as_bytes(found._numpy) == as_bytes(np.random.get_state())
            assert found._python == random.getstate()
            assert torch.equal(found._torch, torch.get_rng_state())
    finally:
        np.random.set_bit_generator(before)


def test_a_number_that_numpy_keeps_is_part_of_the_state() -> None:
    kept = []
    for state in (HALF_A_PAIR, A_PAIR, HALF_A_PAIR):
        goes_back(state)
        kept.append(as_bytes(RandomState("cpu")._numpy))
    assert kept == [as_bytes(HALF_A_PAIR), as_bytes(A_PAIR), as_bytes(HALF_A_PAIR)]
    assert kept[0] != kept[1]


def test_what_was_captured_comes_back_after_any_draws() -> None:
    np.random.set_state(HALF_A_PAIR)
    kept = [RandomState("cpu") for _ in range(2)][1]  # the second is not fetched anew
    expected = np.random.standard_normal(5), random.random()
    np.random.seed(1)
    kept.restore("cpu")
    assert (np.random.standard_normal(5) == expected[0]).all()
    assert random.random() == expected[1]


def test_a_state_is_fetched_once_until_the_memory_changes() -> None:
    memory, fetched = [(1,)], list[int]()

    def fetch() -> int:
        fetched.append(1)
        return len(fetched)

    generator = Unchanged(fetch, lambda: memory[-1])
    assert [generator.state(), generator.state()] == [1, 1]
    memory.append((2,))
    assert [generator.state(), generator.state()] == [2, 2]


@pytest.mark.parametrize("looks", [[None] * 4, [(1,), (2,), (3,), (4,)]])
def test_a_state_is_fetched_each_time_if_its_memory_is_unknown_or_moves(looks: list[Any]) -> None:
    seen, fetched = iter(looks), iter(range(9))
    generator = Unchanged(lambda: next(fetched), lambda: next(seen, None))
    assert [generator.state(), generator.state()] == [0, 1]
