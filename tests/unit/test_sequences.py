"""Bookkeeping of sequences in the request pool, during random requests on a virtual clock."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from pipeswitch.base.errors import InvalidInput, SequenceNotFound, TaskFailed
from pipeswitch.frontend.intake.request_pool import PoolAllocation, RequestPool
from pipeswitch.frontend.intake.validation import Body
from pipeswitch.frontend.sequences.manager import IDLE_MS, Sequences
from pipeswitch.frontend.sequences.sequence_state import (
    SequenceOptions,
    SequenceState,
    sequence_options,
)
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.ipc.messages.base import SlabTensor
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.layout import ValueSpec
from pipeswitch.scheduler.memory.blocks import ROWS_STEP
from pipeswitch.scheduler.state.events import Reply, Token
from pipeswitch.wire.frames import RequestHeader, WireTensor
from tests.unit.sequence_world import gathered

MOST = 500  # the maximum number of rows of the cache
BYTES = 16  # size of a sequence's state; each of its bytes is the number of steps
MANIFEST: Any = SimpleNamespace(
    pads={},
    digest="d",
    extra={"state": {"h": ("h_out", -1), "cache": ("rows", 1)}},
    mode="graph",
    dims=[Dim("batch", 1, 4), Dim("length", 1, 8), Dim("past", 1, MOST)],
    inputs=[
        ValueSpec(name="x", dtype="uint8", shape=("batch", "length")),
        ValueSpec(name="h", dtype="uint8", shape=("batch", BYTES)),
        ValueSpec(name="cache", dtype="uint8", shape=("batch", "past", 3)),
    ],
    outputs=[
        ValueSpec(name="h_out", dtype="uint8", shape=("batch", BYTES)),
        ValueSpec(name="rows", dtype="uint8", shape=("batch", "length", 3)),
    ],
)
MODEL: Any = SimpleNamespace(base="m", model="m", version=1, manifest=MANIFEST, tenant="")


class Rig:
    def __init__(self, *, is_padded: bool = False) -> None:
        manifest = SimpleNamespace(**vars(MANIFEST) | {"pads": {"past": "x"} if is_padded else {}})
        self.model: Any = SimpleNamespace(**vars(MODEL) | {"manifest": manifest})
        descriptor = sealed_memfd("pool", 1 << 20)
        self.pool, self.now_ms = RequestPool(descriptor), 0.0
        os.close(descriptor)
        self.sequences = Sequences(self.pool, lambda: self.now_ms)
        self.rows: dict[int, bytes] = {}  # ``id()`` of a sequence -> rows that it has got
        self.ever: list[SequenceState] = []
        self.refuses = False  # True: refuse the next request, but only after its sequence took it
        self.under_way: dict[tuple[str, str], tuple[SequenceState, PoolAllocation, int]] = {}

    def ask(self, caller: str, name: str, client: Any, length: int = 1, **flags: bool) -> bool:
        """Send a request; return True if it is accepted. ``under_way`` then has its sequence."""
        flags = {"starts": False, "ends": False} | flags
        options = SequenceOptions(id=name, **flags)
        try:
            sequence = self.sequences.of(options, client, caller, self.model)
        except (InvalidInput, SequenceNotFound):
            return False
        x = WireTensor(name="x", dtype="uint8", shape=(1, length), frame=0)
        header = RequestHeader(v=1, op="infer", id="r", model="m", inputs=(x,))
        brought = [bytes(length)]
        if sequence.key not in self.sequences.held or flags["starts"]:
            if not self.model.manifest.pads:  # then the client sends the cache's first rows
                count = 1 + length % 3
                brought.append(bytes(range(1, 3 * count + 1)))
                first = WireTensor(name="cache", dtype="uint8", shape=(1, count, 3), frame=1)
                header = msgspec.structs.replace(header, inputs=(x, first))
            self.rows[id(sequence)] = b"".join(brought[1:])
        try:
            header, frames = self.sequences.with_state(sequence, options, header, brought)
        except InvalidInput:
            self.sequences.refused(sequence)
            return False
        if self.refuses:
            self.sequences.refused(sequence)
            return True
        allocation = self.pool.reserve(caller, 32, BYTES + 3 * length)
        self.sequences.begin(sequence, options)
        sequence.copy(self.pool)
        _, h, cache = header.inputs
        state, rows = bytes(frames[h.frame]), gathered(self.pool, sequence.values["cache"])
        rows += bytes(len(frames[cache.frame]) - len(rows))  # padding that the worker adds
        assert len(set(state)) == 1
        known = self.rows[id(sequence)] or bytes(3)
        padding = len(rows) - len(known)
        assert rows == known + bytes(padding)
        assert cache.shape == (1, len(rows) // 3, 3)
        is_stepped = bool(self.model.manifest.pads and self.rows[id(sequence)])
        assert 0 <= padding < (3 * ROWS_STEP if is_stepped else 1)
        assert not is_stepped or len(rows) // 3 % ROWS_STEP in (0, MOST % ROWS_STEP)
        self.under_way[sequence.key] = (sequence, allocation, state[0])
        return True

    def answer(self, key: tuple[str, str], error: Any = None, *, is_sent: bool = True) -> int:
        sequence, allocation, count = self.under_way.pop(key)
        at, size = allocation.reply_offset_bytes, allocation.reply_bytes
        self.pool.memory[at : at + size] = bytes([(count + 1) % 251]) * size
        state = SlabTensor(
            name="h_out", dtype="uint8", shape=(1, BYTES), offset_bytes=at, size_bytes=BYTES
        )
        rows = SlabTensor(
            name="rows",
            dtype="uint8",
            shape=(1, (size - BYTES) // 3, 3),
            offset_bytes=at + BYTES,
            size_bytes=size - BYTES,
        )
        answer = Reply(token=Token(1), outputs=() if error else (state, rows), error=error)
        if error is None:
            new_rows = bytes(self.pool.memory[at + BYTES : at + size])
            self.rows[id(sequence)] += new_rows
        self.ever.append(sequence)
        self.pool.release_inputs(allocation)
        assert sequence.answered(answer).outputs == ()
        self.sequences.ended(sequence, allocation, is_ok=error is None, is_sent=is_sent)
        return count


@pytest.mark.parametrize("seed", range(20))
def test_random_lives_keep_every_state_and_give_every_byte_back(seed: int) -> None:
    rig, chance = Rig(is_padded=seed % 2 > 0), random.Random(seed)
    clients: list[Any] = [object(), object()]
    steps: dict[tuple[str, str], int] = {}  # the expected state of each sequence
    ended: set[tuple[str, str]] = set()
    for _ in range(1500):
        key = (chance.choice(["a", "b"]), chance.choice(["one", "two"]))
        move = chance.random()
        if move < 0.5 and key not in rig.under_way:
            starts = chance.random() < 0.2
            rig.sequences.expire()
            was_there = key in rig.sequences.held
            rig.refuses = chance.random() < 0.1
            sequence, length = rig.sequences.held.get(key), chance.choice([1, 1, 8])
            is_accepted = rig.ask(
                *key, clients[key[0] == "a"], length, starts=starts, ends=chance.random() < 0.05
            )
            is_full = len(rig.rows.get(id(sequence), b"")) // 3 + length > MOST
            assert is_accepted == (starts or (was_there and not is_full))
            if is_accepted and not rig.refuses:
                assert rig.under_way[key][2] == (0 if starts else steps[key] % 251)
        elif move < 0.9 and key in rig.under_way:
            error = ValueError() if chance.random() < 0.2 else None
            count = rig.answer(key, error, is_sent=chance.random() < 0.9)
            assert key not in ended or key not in rig.sequences.held
            ended.discard(key)
            steps[key] = count if error else count + 1
        elif move < 0.93:
            rig.sequences.remove_client(clients[0])
        elif move < 0.95 and key in rig.sequences.held:
            rig.sequences.end(key[1], key[0])
            ended |= {key} & rig.under_way.keys()  # the sequence ends when its request has ended
        elif move < 0.97:
            rig.now_ms += IDLE_MS / 3
        rig.pool.check()
    for key in list(rig.under_way):
        rig.answer(key)
    rig.now_ms += IDLE_MS
    assert [*rig.sequences.rows(None)] == []
    assert rig.pool.is_empty
    rig.pool.close()


@pytest.mark.parametrize("claim", ["no rows", "no state", "too many rows", "half a row"])
def test_what_a_worker_claims_wrongly_changes_nothing(claim: str) -> None:
    rig, client = Rig(), cast(Any, None)
    for step in range(3):
        assert rig.ask("a", "one", client, starts=step == 0)
        if step < 2:
            rig.answer(("a", "one"))
    sequence, allocation, _ = rig.under_way.pop(("a", "one"))
    before, at = (
        (dict(sequence.values), sequence.allocation, sequence.steps),
        allocation.reply_offset_bytes,
    )
    sizes = {"no rows": 0, "too many rows": 3 * 1400, "half a row": 2}
    state = SlabTensor(
        name="h_out", dtype="uint8", shape=(1, BYTES), offset_bytes=at, size_bytes=BYTES
    )
    size = sizes.get(claim, 3)
    rows = SlabTensor(name="rows", dtype="uint8", shape=(size,), offset_bytes=at, size_bytes=size)
    outputs = {"no rows": (state,), "no state": (rows,)}.get(claim, (state, rows))
    answer = sequence.answered(Reply(token=Token(1), outputs=outputs))
    assert isinstance(answer.error, TaskFailed)
    rig.pool.release_inputs(allocation)
    rig.sequences.ended(sequence, allocation, is_ok=False, is_sent=True)
    assert (sequence.values, sequence.allocation, sequence.steps) == before
    rig.sequences.end("one", "a")
    assert rig.pool.is_empty
    rig.pool.close()


def test_one_request_at_a_time_and_no_flag_without_a_name() -> None:
    rig, client = Rig(), cast(Any, None)
    assert rig.ask("a", "one", client, starts=True)
    assert not rig.ask("a", "one", client)  # the sequence already has a running request
    assert not rig.ask("a", "one", client, starts=True)
    rig.answer(("a", "one"))
    assert rig.ask("a", "one", client, ends=True)
    rig.answer(("a", "one"))
    assert not rig.sequences.held
    assert rig.pool.is_empty
    assert sequence_options(Body("infer", {})) is None
    wrong = [{"start": True}, {"sequence": "x" * 65}, {"sequence": "a\nb"}]
    for body in wrong:
        with pytest.raises(InvalidInput):
            sequence_options(Body("infer", body))
    rig.pool.close()
