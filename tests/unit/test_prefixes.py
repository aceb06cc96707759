"""Tokens that sequences of a language model have in common: each row is that of its own tokens."""

from __future__ import annotations

import random

import pytest

from pipeswitch.frontend.sequences.manager import IDLE_MS
from tests.unit.sequence_world import MOST, World


@pytest.mark.parametrize("pool_bytes", [1 << 20, 28 << 12, 44 << 12])
@pytest.mark.parametrize("seed", range(8))
def test_random_lives_have_their_own_rows_and_give_every_byte_back(
    seed: int, pool_bytes: int
) -> None:
    world, chance = World(pool_bytes, steps=32), random.Random(seed)
    stems = [[chance.randrange(9) for _ in range(length)] for length in (90, 150, 60, 130)]
    stems[2:] = [stems[0][:17] + stems[2], stems[1][:50] + stems[3]]
    for _ in range(1500):
        key = (chance.choice("aab"), chance.choice("1234"))
        move, request = chance.random(), world.live.get(key)
        if request is None and move < 0.5:
            stem = chance.choice(stems)
            if chance.random() < 0.3:
                stem = [*stem[: chance.randrange(40)], *chance.choices(range(9), k=9)]
            world.move(("begin", key, stem, chance.choice(["ok", "ok", "ok", "refused"])))
        elif request is not None and move < 0.8:
            chosen = chance.choices(range(9), k=chance.choice([1, 2, 32]))
            how = chance.choice(["ok"] * 8 + ["wrong", "full"])
            is_full = len(request.ids) + len(chosen) + 33 > MOST
            world.move(("end", key) if is_full else ("run", key, chosen, how))
        elif request is not None and move > 0.96:
            world.move(("end", key))
        elif move > 0.95:
            world.now_ms += IDLE_MS / 3
            world.sequences.expire()
    assert world.spared > 100
    world.wind_down()
