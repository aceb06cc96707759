"""A language model's sequences, as the frontend drives them: each move, and what must hold then.

A row depends on its caller and on all tokens until there, so a wrong one is seen, and what no slab
holds is overwritten after each move. A copy is made at once, or as late as it may be, when the loop
hears of it: then in the order asked.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import msgspec
import numpy as np

from pipeswitch.base.errors import QueueFull
from pipeswitch.frontend import request_pool
from pipeswitch.frontend.admission import Admitted
from pipeswitch.frontend.request_pool import RequestPool, Room
from pipeswitch.frontend.sequences import held as held_module
from pipeswitch.frontend.sequences import manager as sequences
from pipeswitch.frontend.sequences.held import Asked, Held
from pipeswitch.frontend.sequences.manager import IDLE_MS, Sequences
from pipeswitch.ipc.messages.base import SlabTensor
from pipeswitch.ipc.messages.worker import Choosing
from pipeswitch.programs.decoding.generation import PADS
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.layout import ValueSpec, aligned
from pipeswitch.scheduler.events import Answer, Token
from pipeswitch.wire.frames import RequestHeader, WireTensor

Key = tuple[str, str]
Move = tuple[Any, ...]
MOST: Final = 400  # rows
ROW: Final = 4  # bytes


class Model:
    """As it was announced."""

    model = base = "m"
    version, tenant = 1, ""
    manifest: Any = SimpleNamespace(
        extra={"state": {"cache": ("cache_new", 1)},
               "generation": {"context": MOST, "vocabulary": 10}},
        pads=PADS, mode="graph", digest="d",
        dims=[Dim("batch", 1, 4), Dim("length", 1, 40), Dim("past", 1, MOST)],
        inputs=[
            ValueSpec(name="ids", dtype="int64", shape=("batch", "length")),
            ValueSpec(name="count", dtype="int64", shape=("batch",)),
            ValueSpec(name="used", dtype="int64", shape=("batch",)),
            ValueSpec(name="cache", dtype="uint8", shape=("batch", "past", ROW)),
        ],
        outputs=[ValueSpec(name="cache_new", dtype="uint8", shape=("batch", "length", ROW))],
    )  # fmt: skip

    def __reduce__(self) -> str:
        return "MODEL"  # the same one in each copy of a world


MODEL: Any = Model()


class File:
    """In place of a mapping: it is copied with its world."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)

    @property
    def memory(self) -> memoryview:
        return memoryview(self.data)


class Request(msgspec.Struct):
    held: Held
    room: Room
    tokens: list[int]  # with those that it brings
    used: int  # of these, before what it computes
    cache: SlabTensor
    is_copying: bool = True


def rows_of(caller: str, tokens: list[int]) -> bytes:
    found, last = [], zlib.crc32(caller.encode())
    for token in tokens:
        last = zlib.crc32(token.to_bytes(8, "little"), last)
        found.append(last.to_bytes(ROW, "little"))
    return b"".join(found)


class World:
    def __init__(self, pool_bytes: int) -> None:
        self.now_ms, self.tokens, self.spared = 0.0, 0, 0
        with patch.object(request_pool, "_File", File):
            self.pool = RequestPool(pool_bytes)
        self.sequences = Sequences(self.pool, self.now)
        self.told: dict[Key, list[int]] = {}  # what each has the rows of
        self.under_way: dict[Key, Request] = {}
        self.lane: list[Key] = []  # whose copies are asked for

    def now(self) -> float:
        return self.now_ms

    def move(self, move: Move) -> None:
        match move:
            case "ask", key, starts, piece, how, *steps:
                self.ask(key, starts, list(piece), how, *steps)
            case "answer", key, how, *chosen:
                self.answer(key, how, *chosen)
            case "end", (caller, name):
                self.sequences.end(name, caller)
            case ("carry",):
                self.carry(self.under_way[self.lane.pop(0)])
            case ("give up",):
                assert self.pool.give_up()
            case ("idle",):
                self.now_ms += IDLE_MS
                self.sequences.expire()
        self.check()

    def ask(self, key: Key, starts: bool, piece: list[int], how: str, steps: int = 0) -> None:
        """``how``: "done" is at once, and answered; ``steps``: that the worker may go on."""
        choosing = Choosing(steps=steps) if steps else None
        asked = Asked(id=key[1], starts=starts, ends=how == "last", choosing=choosing)
        held = self.sequences.of(asked, self, key[0], MODEL)  # type: ignore[arg-type]
        before = [] if starts else self.told[key]
        numbers = {"ids": [piece], "count": [len(piece)], "used": [len(before)]}
        arrays = [np.array(one, np.int64) for one in numbers.values()]
        inputs = tuple(
            WireTensor(name=name, dtype="int64", shape=array.shape, frame=at)
            for at, (name, array) in enumerate(zip(numbers, arrays, strict=True))
        )
        header = RequestHeader(v=1, op="infer", id="r", model="m", inputs=inputs)
        try:
            frames = [array.tobytes() for array in arrays]
            header, given = self.sequences.given(held, asked, header, frames)
            if how == "refused":
                raise QueueFull("behind its sequence")
            admitted = Admitted(inputs=(), input_bytes=1, reply_bytes=ROW * len(piece))
            room = self.pool.reserve(key[0], 1, held.apart(admitted).reply_bytes)
        except QueueFull:
            self.sequences.refused(held)
            return
        left, count, (used,) = (np.frombuffer(one, np.int64).tolist() for one in given[:3])
        assert left and (left, count) == ([*before, *piece][used:], [len(left)])  # noqa: PT018
        self.spared += len(piece) - len(left)
        self.sequences.begin(held, asked)
        request = Request(held, room, [*before, *piece], used, held.values["cache"])
        rows, step = request.cache.shape[1], sequences.ROWS_STEP
        assert rows == max(used, 1) or rows % step in (0, MOST % step)
        self.under_way[key] = request
        if how == "late" or held.copy_bytes >= 1 << 62:
            self.lane.append(key)
            return
        self.carry(request)
        if how == "done":
            self.check()
            self.answer(key, "ok")

    def carry(self, request: Request) -> None:
        request.is_copying = False
        request.held.copy(self.pool)
        self.sequences.copied(request.held)

    def answer(self, key: Key, how: str, chosen: Sequence[int] = (1,)) -> None:
        request = self.under_way.pop(key)
        held, room, tokens, used = request.held, request.room, request.tokens, request.used
        at, outputs, error = room.reply_offset_bytes, [], ValueError() if how == "error" else None
        chosen = chosen[: held.choosing.steps if held.choosing is not None else 1]
        if held.choosing is not None:  # the worker has gone on with all but the last
            tokens = [*tokens, *chosen[:-1]]
            outputs.append(self.made("tokens", "int64", (1, len(chosen)), at, np.array(chosen)))
            at += aligned(8 * len(chosen), held_module.TENSOR_ALIGN_BYTES)
        rows = np.frombuffer(rows_of(key[0], tokens)[ROW * used :], np.uint8)
        outputs.append(self.made("cache_new", "uint8", (1, len(rows) // ROW, ROW), at, rows))
        answer = Answer(token=Token(1), outputs=() if error else tuple(outputs), error=error)  # type: ignore[arg-type]
        self.pool.release_inputs(room)
        assert held.answered(answer).error is error
        self.sequences.ended(held, room, is_ok=not error, is_sent=how != "lost")
        if how == "ok":
            self.told[key] = tokens
            self.tokens += len(chosen)
        assert how != "lost" or key not in self.sequences.held  # nobody knows which step it is at

    def made(self, name: str, dtype: str, shape: tuple[int, ...], at: int, data: Any) -> SlabTensor:
        """By the worker, in the reply's room."""
        self.pool.memory[at : at + data.nbytes] = data.tobytes()
        return SlabTensor(name=name, dtype=dtype, shape=shape, offset_bytes=at,
                          size_bytes=data.nbytes)  # fmt: skip

    def alive(self) -> list[Held]:
        """All that are there, those that are over and copied from included."""
        found = [*self.sequences.held.values(), *self.sequences.spare.values()]
        found += [one.held for one in self.under_way.values()]
        found += [donor for one in found for donor in one.donors]
        return list({id(one): one for one in found}.values())

    def check(self) -> None:
        self.pool.check()
        memory = self.pool.memory
        for key, one in self.under_way.items():  # also long after: a worker may read them again
            if not one.is_copying:
                at, size = one.cache.offset_bytes, one.cache.size_bytes
                own = rows_of(key[0], one.tokens[: one.used])
                lent = bytes(memory[at : at + size])
                assert lent == own + bytes(size - len(own)), f"{key} is lent rows of other tokens"
        for key, held in self.sequences.held.items():
            if key not in self.under_way and held.history is not None:
                assert held.history.tokens.tolist() == self.told[key]
                assert {grown.used for grown in held.grown.values()} == {len(self.told[key])}
        alive = self.alive()
        for held in alive:
            pins = sum(one is held for other in alive for one in other.donors)
            assert held.pins == pins, f"{held.key} is copied from {pins} times, not {held.pins}"
        rooms = {grown.room.input_offset_bytes for held in alive for grown in held.grown.values()}
        rooms |= {room.input_offset_bytes for held in alive for room in held.leaving}
        slabs = self.pool._slabs
        assert 2 * (len(rooms) + len(self.under_way)) == slabs.slab_count, "memory nobody holds"
        for start, size in slabs._holes:
            memory[start : start + size] = b"\xee" * size

    def wind_down(self) -> None:
        """All ends: the copies, the answers, and after a while what is kept."""
        while self.lane:
            self.move(("carry",))
        for key in list(self.under_way):
            self.answer(key, "ok")
        self.move(("idle",))
        assert self.pool.is_empty, "memory is lost"
        assert not self.sequences._prefixes._with, "tokens of nobody are known"
        told = self.sequences.by_model().get("m", {"tokens": 0})
        assert {key: value for key, value in told.items() if value} in ({}, {"tokens": self.tokens})
