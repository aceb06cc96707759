"""Tokens that sequences of a language model have in common: each row is that of its own tokens."""

from __future__ import annotations

import random

import pytest

from pipeswitch.base.errors import TaskFailed
from pipeswitch.frontend.sequences.manager import IDLE_MS
from pipeswitch.ipc.messages.base import SlabTensor
from pipeswitch.scheduler.events import Answer, Token
from tests.unit.sequence_world import MOST, ROW, World


@pytest.mark.parametrize("pool_bytes", [1 << 20, 28 << 12, 44 << 12])
@pytest.mark.parametrize("seed", range(8))
def test_random_lives_have_their_own_rows_and_give_every_byte_back(
    seed: int, pool_bytes: int
) -> None:
    world, chance = World(pool_bytes), random.Random(seed)
    stems = [[chance.randrange(9) for _ in range(length)] for length in (90, 150, 60, 130)]
    stems[2:] = [stems[0][:17] + stems[2], stems[1][:50] + stems[3]]
    for _ in range(1500):
        key = (chance.choice("aab"), chance.choice("1234"))
        move, held = chance.random(), world.sequences.held.get(key)
        if move < 0.5 and key not in world.under_way:
            starts = held is None or chance.random() < 0.3
            told = [] if starts else world.told[key]
            stem = chance.choice(stems)
            follows = stem[len(told) :] if stem[: len(told)] == told else []
            if chance.random() < 0.3:  # begins as the stem
                follows = follows[: chance.randrange(40)]
            piece = follows or [chance.randrange(9) for _ in range(chance.choice([1, 1, 17]))]
            if len(told) + len(piece[:40]) + 31 <= MOST:
                how = chance.choice(["at once", "at once", "late", "late", "late", "last"])
                steps = chance.choice((0, 0, 1, 2, 32))
                world.move(("ask", key, starts, piece[:40], how, steps))
        elif move < 0.75 and key in world.under_way:
            while world.under_way[key].is_copying:
                world.move(("carry",))
            chosen = [chance.randrange(9) for _ in range(chance.choice([1, 2, 32]))]
            how = "ok" if chance.random() < 0.87 else chance.choice(["error", "error", "lost"])
            world.move(("answer", key, how, chosen))
        elif move < 0.77 and world.lane:
            world.move(("carry",))
        elif move < 0.78:
            world.sequences.forget(world)  # type: ignore[arg-type]
        elif move < 0.98 and held is not None and key not in world.under_way:
            world.move(("end", key))
        elif move > 0.99:
            world.now_ms += IDLE_MS / 3
            world.sequences.expire()
    assert world.spared > 100
    world.wind_down()


@pytest.mark.parametrize(("count", "rows"), [(0, 4), (3, 5), (2, 4), (1, 5)])
def test_tokens_that_a_worker_claims_wrongly_change_nothing(count: int, rows: int) -> None:
    """Of a prompt of four tokens and two steps."""
    world = World(1 << 20)
    world.move(("ask", ("a", "1"), True, [1, 2, 3, 4], "at once", 2))
    request = world.under_way.pop(("a", "1"))
    at = request.room.reply_offset_bytes
    tokens = SlabTensor(name="tokens", dtype="int64", shape=(1, count), offset_bytes=at,
                        size_bytes=8 * count)  # fmt: skip
    cache = SlabTensor(name="cache_new", dtype="uint8", shape=(1, rows, ROW),
                       offset_bytes=at + 512, size_bytes=ROW * rows)  # fmt: skip
    for outputs in ((tokens, cache), (cache,), (cache, tokens)):
        answer = request.held.answered(Answer(token=Token(1), outputs=outputs))
        assert isinstance(answer.error, TaskFailed)
    world.pool.release_inputs(request.room)
    world.sequences.ended(request.held, request.room, is_ok=False, is_sent=True)
    assert world.pool.is_empty
