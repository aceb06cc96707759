"""Tokens that sequences of a language model have in common: each row is that of its own tokens."""

from __future__ import annotations

import os
import random
import zlib
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeswitch.errors import QueueFull, TaskFailed
from pipeswitch.frontend.admission import Admitted
from pipeswitch.frontend.held import Asked, Held
from pipeswitch.frontend.request_pool import RequestPool, Room
from pipeswitch.frontend.sequences import IDLE_MS, ROWS_STEP, Sequences
from pipeswitch.ipc.board import sealed_memfd
from pipeswitch.ipc.messages import Choosing, SlabTensor
from pipeswitch.programs.dims import Dim
from pipeswitch.programs.generation import PADS
from pipeswitch.programs.layout import ValueSpec
from pipeswitch.scheduler.events import Answer, Token
from pipeswitch.wire.frames import RequestHeader, WireTensor

MOST, ROW = 400, 4
MANIFEST: Any = SimpleNamespace(
    extra={"state": {"cache": ("cache_new", 1)}, "generation": {"context": MOST}},
    pads=PADS,
    mode="graph",
    digest="d",
    dims=[Dim("batch", 1, 4), Dim("length", 1, 40), Dim("past", 1, MOST)],
    inputs=[
        ValueSpec(name="ids", dtype="int64", shape=("batch", "length")),
        ValueSpec(name="count", dtype="int64", shape=("batch",)),
        ValueSpec(name="used", dtype="int64", shape=("batch",)),
        ValueSpec(name="cache", dtype="uint8", shape=("batch", "past", ROW)),
    ],
    outputs=[ValueSpec(name="cache_new", dtype="uint8", shape=("batch", "length", ROW))],
)
MODEL: Any = SimpleNamespace(base="m", model="m", version=1, manifest=MANIFEST, tenant="")


def rows_of(tokens: list[int], caller: str) -> bytes:
    """A row depends on all tokens until there, and on who asks: nobody gets another's."""
    found, last = [], zlib.crc32(caller.encode())
    for token in tokens:
        last = zlib.crc32(token.to_bytes(8, "little"), last)
        found.append(last.to_bytes(ROW, "little"))
    return b"".join(found)


class Rig:
    """A copy may be late, as on a thread of its own, and these are carried out in their order."""

    def __init__(self, pool_bytes: int) -> None:
        descriptor = sealed_memfd("pool", pool_bytes)
        self.pool, self.now_ms = RequestPool(descriptor), 0.0
        os.close(descriptor)
        self.sequences = Sequences(self.pool, lambda: self.now_ms)
        self.told: dict[tuple[str, str], list[int]] = {}  # what each has the rows of
        self.lane: deque[tuple[Held, list[int], Any, Any]] = deque()
        self.under_way: dict[tuple[str, str], tuple[Held, Room, list[int], int]] = {}
        self.spared = 0

    def ask(self, key: tuple[str, str], client: Any, piece: list[int], *, starts: bool, ends: bool,
            is_late: bool, steps: int) -> None:  # fmt: skip
        caller, name = key
        before = [] if starts else self.told[key]
        choosing = Choosing(steps=steps) if steps else None
        asked = Asked(id=name, starts=starts, ends=ends, choosing=choosing)
        held = self.sequences.of(asked, client, caller, MODEL)
        numbers = {"ids": [piece], "count": [len(piece)], "used": [len(before)]}
        frames = [np.array(one, np.int64).tobytes() for one in numbers.values()]
        shapes = ((1, len(piece)), (1,), (1,))
        inputs = [
            WireTensor(name=name, dtype="int64", shape=shape, frame=at)
            for at, (name, shape) in enumerate(zip(numbers, shapes, strict=True))
        ]
        header = RequestHeader(v=1, op="infer", id="r", model="m", inputs=tuple(inputs))
        try:
            header, given = self.sequences.given(held, asked, header, frames)
            admitted = Admitted(inputs=(), input_bytes=0, reply_bytes=ROW * len(piece))
            room = self.pool.reserve(caller, 64, held.apart(admitted).reply_bytes)
        except QueueFull:
            self.sequences.refused(held)
            return
        by_name = {one.name: np.frombuffer(given[one.frame], np.int64).tolist()
                   for one in header.inputs[:3]}  # fmt: skip
        (used,), left = by_name["used"], by_name["ids"]
        assert ([*before, *piece][used:], [len(left)]) == (left, by_name["count"])
        self.spared += len(piece) - len(left)
        self.sequences.begin(held, asked)
        self.under_way[key] = held, room, [*before, *piece], used
        cache = header.inputs[3]
        assert cache.shape[1] == max(used, 1) or cache.shape[1] % ROWS_STEP in (0, MOST % ROWS_STEP)
        self.lane.append((held, [*before, *piece][:used], given[cache.frame], caller))
        if held.copy_bytes < 600 and not is_late:  # it overtakes what waits
            self.carry(self.lane.pop())

    def carry(self, one: tuple[Held, list[int], Any, Any]) -> None:
        held, tokens, cache, caller = one
        self.sequences.copy(held)
        self.sequences.copied(held)
        own = rows_of(tokens, caller)
        assert bytes(cache) == own + bytes(len(cache) - len(own))  # nobody's behind them

    def answer(
        self, key: tuple[str, str], *, is_ok: bool, is_sent: bool, chosen: list[int]
    ) -> None:
        while any(held is self.under_way[key][0] for held, *_ in self.lane):
            self.carry(self.lane.popleft())
        held, room, tokens, used = self.under_way.pop(key)
        at, outputs = room.reply_offset_bytes, ()
        if held.choosing is not None:  # the worker has gone on with all but the last
            chosen = chosen[: held.choosing.steps]
            tokens = tokens + chosen[:-1]
            self.pool.memory[at : at + 8 * len(chosen)] = np.array(chosen, np.int64).tobytes()
            outputs = (SlabTensor(name="tokens", dtype="int64", shape=(1, len(chosen)),
                                  offset_bytes=at, size_bytes=8 * len(chosen)),)  # fmt: skip
            at += 512
        data = rows_of(tokens, key[0])[ROW * used :]
        self.pool.memory[at : at + len(data)] = data
        rows = SlabTensor(name="cache_new", dtype="uint8", shape=(1, len(tokens) - used, ROW),
                          offset_bytes=at, size_bytes=len(data))  # fmt: skip
        error = None if is_ok else ValueError()
        answer = Answer(token=Token(1), outputs=(*outputs, rows) if is_ok else (), error=error)  # type: ignore[arg-type]
        self.pool.release_inputs(room)
        assert held.answered(answer).error is error
        self.sequences.ended(held, room, is_ok=is_ok, is_sent=is_sent)
        if is_ok and is_sent:
            self.told[key] = tokens


@pytest.mark.parametrize("pool_bytes", [1 << 20, 28 << 12, 44 << 12])
@pytest.mark.parametrize("seed", range(8))
def test_random_lives_have_their_own_rows_and_give_every_byte_back(
    seed: int, pool_bytes: int
) -> None:
    rig, chance = Rig(pool_bytes), random.Random(seed)
    clients: list[Any] = [SimpleNamespace(name=n) for n in range(2)]
    stems = [[chance.randrange(9) for _ in range(length)] for length in (90, 150, 60, 130)]
    stems[2:] = [stems[0][:17] + stems[2], stems[1][:50] + stems[3]]
    for _ in range(1500):
        key = (chance.choice("aab"), chance.choice("1234"))
        move, held = chance.random(), rig.sequences.held.get(key)
        if move < 0.5 and key not in rig.under_way:
            starts = held is None or chance.random() < 0.3
            told = [] if starts else rig.told[key]
            stem = chance.choice(stems)
            follows = stem[len(told) :] if stem[: len(told)] == told else []
            if chance.random() < 0.3:  # begins as the stem
                follows = follows[: chance.randrange(40)]
            piece = (follows or [chance.randrange(9) for _ in range(chance.choice([1, 1, 17]))])[
                :40
            ]
            if len(told) + len(piece) + 31 <= MOST:
                rig.ask(key, clients[key[0] == "a"], piece, starts=starts,
                        ends=chance.random() < 0.1, is_late=chance.random() < 0.5,
                        steps=chance.choice((0, 0, 1, 2, 32)))  # fmt: skip
        elif move < 0.75 and key in rig.under_way:
            chosen = [chance.randrange(9) for _ in range(chance.choice([1, 2, 32]))]
            rig.answer(key, is_ok=chance.random() < 0.9, is_sent=chance.random() < 0.95,
                       chosen=chosen)  # fmt: skip
        elif move < 0.77 and rig.lane:
            rig.carry(rig.lane.popleft())
        elif move < 0.78:
            rig.sequences.forget(clients[chance.random() < 0.5])
        elif move < 0.98 and held is not None and key not in rig.under_way:
            rig.sequences.end(key[1], key[0])
        elif move > 0.99:
            rig.now_ms += IDLE_MS / 3
            rig.sequences.expire()
        rig.pool.check()
    for key in list(rig.under_way):
        rig.answer(key, is_ok=True, is_sent=True, chosen=[1])
    assert rig.spared > 100
    rig.now_ms += IDLE_MS
    assert rig.sequences.rows(None) == []
    assert not rig.sequences.spare
    assert rig.pool.is_empty
    rig.pool.close()


@pytest.mark.parametrize(("count", "rows"), [(0, 4), (3, 5), (2, 4), (1, 5)])
def test_tokens_that_a_worker_claims_wrongly_change_nothing(count: int, rows: int) -> None:
    """Of a prompt of four tokens and two steps."""
    rig, client = Rig(1 << 20), SimpleNamespace(name=0)
    rig.ask(("a", "1"), client, [1, 2, 3, 4], starts=True, ends=False, is_late=False, steps=2)
    held, room, _, _ = rig.under_way.pop(("a", "1"))
    at = room.reply_offset_bytes
    tokens = SlabTensor(name="tokens", dtype="int64", shape=(1, count), offset_bytes=at,
                        size_bytes=8 * count)  # fmt: skip
    cache = SlabTensor(name="cache_new", dtype="uint8", shape=(1, rows, ROW),
                       offset_bytes=at + 512, size_bytes=ROW * rows)  # fmt: skip
    for outputs in ((tokens, cache), (cache,), (cache, tokens)):
        answer = held.answered(Answer(token=Token(1), outputs=outputs))
        assert isinstance(answer.error, TaskFailed)
    rig.pool.release_inputs(room)
    rig.sequences.ended(held, room, is_ok=False, is_sent=True)
    assert rig.pool.is_empty
    rig.pool.close()
