"""Sequences' bookkeeping in the request pool, over random lives with a clock of their own."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeswitch.errors import InvalidInput, SequenceNotFound
from pipeswitch.frontend.admission import Body
from pipeswitch.frontend.request_pool import RequestPool, Room
from pipeswitch.frontend.sequences import IDLE_MS, Asked, Held, Sequences, asked_of
from pipeswitch.ipc.board import sealed_memfd
from pipeswitch.ipc.messages import SlabTensor
from pipeswitch.programs.layout import ValueSpec
from pipeswitch.scheduler.events import Answer, Token
from pipeswitch.wire.frames import RequestHeader, WireTensor

BYTES = 16  # of the state, whose last answer is always the number of steps
MANIFEST: Any = SimpleNamespace(
    extra={"state": {"h": "h_out"}},
    inputs=[
        ValueSpec(name="x", dtype="uint8", shape=("batch", 4)),
        ValueSpec(name="h", dtype="uint8", shape=("batch", BYTES)),
    ],
)
MODEL: Any = SimpleNamespace(base="m", model="m", version=1, manifest=MANIFEST)


class Rig:
    def __init__(self) -> None:
        descriptor = sealed_memfd("pool", 1 << 20)
        self.pool, self.now_ms = RequestPool(descriptor), 0.0
        os.close(descriptor)
        self.sequences = Sequences(self.pool, lambda: self.now_ms)
        self.under_way: dict[tuple[str, str], tuple[Held, Room, int]] = {}

    def ask(self, caller: str, name: str, client: Any, **flags: bool) -> bool:
        """Whether it was taken; ``under_way`` has it then, with what its state was."""
        flags = {"starts": False, "ends": False} | flags
        asked = Asked(id=name, **flags)
        try:
            held = self.sequences.of(asked, client, caller, MODEL)
        except (InvalidInput, SequenceNotFound):
            return False
        x = WireTensor(name="", dtype="uint8", shape=(1, 4), frame=0)
        header = RequestHeader(v=1, op="infer", id="r", model="m", inputs=(x,))
        header, frames = self.sequences.given(held, header, [b"1234"])
        assert [(one.name, one.shape) for one in header.inputs] == [
            ("x", (1, 4)),
            ("h", (1, BYTES)),
        ]
        state = bytes(frames[header.inputs[1].frame])
        assert len(set(state)) == 1
        room = self.pool.reserve(caller, 32, BYTES)
        self.sequences.begin(held, asked)
        self.under_way[held.key] = (held, room, state[0])
        return True

    def answer(self, key: tuple[str, str], error: Any = None, *, is_sent: bool = True) -> int:
        held, room, count = self.under_way.pop(key)
        at = room.reply_offset_bytes
        self.pool.memory[at : at + BYTES] = bytes([count + 1]) * BYTES
        state = SlabTensor(name="h_out", dtype="uint8", shape=(1, BYTES), offset_bytes=at,
                           size_bytes=BYTES)  # fmt: skip
        answer = Answer(token=Token(1), outputs=() if error else (state,), error=error)
        self.pool.release_inputs(room)
        assert held.answered(answer).outputs == ()
        self.sequences.ended(held, room, is_ok=error is None, is_sent=is_sent)
        return count


@pytest.mark.parametrize("seed", range(20))
def test_random_lives_keep_every_state_and_give_every_byte_back(seed: int) -> None:
    rig, chance = Rig(), random.Random(seed)
    clients: list[Any] = [SimpleNamespace(name=n) for n in range(2)]
    steps: dict[tuple[str, str], int] = {}  # what each one's state must be
    for _ in range(400):
        key = (chance.choice(["a", "b"]), chance.choice(["one", "two"]))
        move = chance.random()
        if move < 0.5 and key not in rig.under_way:
            starts = chance.random() < 0.2
            was_there = key in rig.sequences.held
            taken = rig.ask(*key, clients[key[0] == "a"], starts=starts,
                            ends=chance.random() < 0.1)  # fmt: skip
            assert taken == (starts or was_there)
            if taken:
                assert rig.under_way[key][2] == (0 if starts else steps[key])
        elif move < 0.9 and key in rig.under_way:
            error = ValueError() if chance.random() < 0.2 else None
            count = rig.answer(key, error, is_sent=chance.random() < 0.9)
            steps[key] = count if error else count + 1
        elif move < 0.93:
            rig.sequences.forget(clients[0])
        elif move < 0.95 and key in rig.sequences.held and key not in rig.under_way:
            rig.sequences.end(key[1], key[0])
        elif move < 0.97:
            rig.now_ms += IDLE_MS / 3
        rig.pool.check()
    for key in list(rig.under_way):
        rig.answer(key)
    rig.now_ms += IDLE_MS
    assert rig.sequences.rows(None) == []
    assert rig.pool.is_empty
    rig.pool.close()


def test_one_request_at_a_time_and_no_flag_without_a_name() -> None:
    rig, client = Rig(), cast(Any, None)
    assert rig.ask("a", "one", client, starts=True)
    assert not rig.ask("a", "one", client)  # it has a request under way
    assert not rig.ask("a", "one", client, starts=True)
    with pytest.raises(InvalidInput, match="under way"):
        rig.sequences.end("one", "a")
    rig.answer(("a", "one"))
    assert rig.ask("a", "one", client, ends=True)
    rig.answer(("a", "one"))
    assert not rig.sequences.held
    assert rig.pool.is_empty
    assert asked_of(Body("infer", {})) is None
    for wrong in ({"start": True}, {"sequence": "x" * 65}, {"sequence": "a\nb"}):
        with pytest.raises(InvalidInput):
            asked_of(Body("infer", wrong))
    rig.pool.close()
