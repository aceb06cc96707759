"""The caches of generations, as the frontend drives them: each move, and what must hold then.

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
from pipeswitch.frontend.request_pool import RequestPool, Room
from pipeswitch.frontend.sequences import manager as sequences
from pipeswitch.frontend.sequences.caches import Caches
from pipeswitch.frontend.sequences.held import Held
from pipeswitch.frontend.sequences.manager import IDLE_MS
from pipeswitch.frontend.sequences.prefixes import tokens_of
from pipeswitch.ipc.messages.base import Epoch, SlabTensor
from pipeswitch.programs.decoding.generation import PADS
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.layout import ValueSpec
from pipeswitch.scheduler.events import Token

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
    """A generation, between the moves of its runs."""

    held: Held
    ids: list[int]
    cache: SlabTensor
    used: int  # rows that the next run reads
    is_copying: bool = True
    is_over: bool = False


def rows_of(caller: str, tokens: list[int]) -> bytes:
    found, last = [], zlib.crc32(caller.encode())
    for token in tokens:
        last = zlib.crc32(token.to_bytes(8, "little"), last)
        found.append(last.to_bytes(ROW, "little"))
    return b"".join(found)


class World:
    def __init__(self, pool_bytes: int, steps: int = 1) -> None:
        self.steps = steps  # of a run, at most
        self.now_ms, self.tokens, self.spared = 0.0, 0, 0
        with patch.object(request_pool, "_File", File):
            self.pool = RequestPool(pool_bytes)
        self.sequences = Caches(self.pool, self.now)
        self.live: dict[Key, Request] = {}
        self.lane: list[Key] = []  # whose copies are asked for
        self.numbers = 0

    def now(self) -> float:
        return self.now_ms

    def move(self, move: Move) -> None:
        match move:
            case "begin", key, ids, how:
                self.begin(key, list(ids), how)
            case "run", key, chosen, how:
                self.run(key, list(chosen), how)
            case "end", key:
                self.end(key)
            case ("carry",):
                self.carry(self.lane.pop(0))
            case ("give up",):
                assert self.pool.give_up()
            case ("idle",):
                self.now_ms += IDLE_MS
                self.sequences.expire()
        self.check()

    def begin(self, key: Key, ids: list[int], how: str) -> None:
        """``how``: "late" copies later, "refused" has no room for its run."""
        self.numbers += 1
        held = self.sequences.open(self, key[0], MODEL, Token(self.numbers))  # type: ignore[arg-type]
        try:
            reused = self.sequences.reuse(held, tokens_of(ids), len(ids))
            assert reused < len(ids)
            self.sequences.fit(held, len(ids) + self.steps - 1, self.steps)
            if how == "refused":
                raise QueueFull("behind its cache")
        except QueueFull:
            self.sequences.drop(held)
            return
        self.spared += reused
        self.live[key] = Request(held, ids, held.values["cache"], held.used)
        self._copies(key, how)

    def run(self, key: Key, chosen: list[int], how: str) -> None:
        """A run ends: its rows are appended, and room is made for so many tokens more. ``how``:
        "wrong" is a run that failed, "full" one after which there is no room."""
        request = self.live[key]
        held, ids = request.held, request.ids
        if how != "wrong":
            fed = [*ids[request.used :], *chosen[:-1]]
            rows = rows_of(key[0], [*ids, *chosen[:-1]])[ROW * request.used :]
            try:
                room = self.pool.reserve(key[0], 1, len(rows))
            except QueueFull:
                self.end(key)
                return
            self.sequences.append(held, made(self.pool, room, rows), tokens_of(fed), Epoch(1),
                                  len(chosen))  # fmt: skip
            self.pool.release_inputs(room)
            self.pool.release_reply(room)
            ids.extend(chosen)
            self.tokens += len(chosen)
        try:
            self.sequences.fit(held, len(ids) + self.steps - 1, self.steps)
            if how == "full":
                raise QueueFull("it waits")
        except QueueFull:  # the youngest gives up its cache
            self.end(key)
            return
        request.cache, request.used = held.values["cache"], held.used
        request.is_copying = True
        self._copies(key, how)

    def _copies(self, key: Key, how: str) -> None:
        request = self.live[key]
        if request.held.copies and (how == "late" or request.held.copy_bytes >= 1 << 62):
            self.lane.append(key)
        else:
            self.carry(key)

    def carry(self, key: Key) -> None:
        request = self.live[key]
        request.held.copy(self.pool)
        self.sequences.copied(request.held)
        request.is_copying = False
        if request.is_over:
            del self.live[key]
            self.sequences.drop(request.held)

    def end(self, key: Key) -> None:
        """It is over, or its client is gone; what is being copied ends first."""
        request = self.live[key]
        request.held.is_busy = False
        if key in self.lane:
            request.is_over = True
        else:
            del self.live[key]
            self.sequences.retire(request.held)

    def alive(self) -> list[Held]:
        """All that are there, those that are over and copied from included."""
        found = [*self.sequences.held.values(), *self.sequences.spare.values()]
        found += [one.held for one in self.live.values()]
        found += [donor for one in found for donor in one.donors]
        return list({id(one): one for one in found}.values())

    def check(self) -> None:
        self.pool.check()
        memory = self.pool.memory
        for key, one in self.live.items():
            if not one.is_copying:
                at, size = one.cache.offset_bytes, one.cache.size_bytes
                own = rows_of(key[0], one.ids[: one.used])
                lent = bytes(memory[at : at + size])
                assert lent == own + bytes(size - len(own)), f"{key} is lent rows of other tokens"
                rows, step = one.cache.shape[1], sequences.ROWS_STEP
                assert rows == max(one.used, 1) or rows % step in (0, MOST % step)
            history = one.held.history
            assert history is None or history.tokens.tolist() == one.ids[: one.used]
        alive = self.alive()
        for held in alive:
            pins = sum(one is held for other in alive for one in other.donors)
            assert held.pins == pins, f"{held.key} is copied from {pins} times, not {held.pins}"
        rooms = {grown.room.input_offset_bytes for held in alive for grown in held.grown.values()}
        rooms |= {room.input_offset_bytes for held in alive for room in held.leaving}
        slabs = self.pool._slabs
        assert 2 * len(rooms) == slabs.slab_count, "memory nobody holds"
        for start, size in slabs._holes:
            memory[start : start + size] = b"\xee" * size

    def wind_down(self) -> None:
        """All ends: the copies, the generations, and after a while what is kept."""
        while self.lane:
            self.move(("carry",))
        for key in list(self.live):
            self.run(key, [1], "ok")
            while self.lane:
                self.move(("carry",))
            if key in self.live:
                self.end(key)
        self.move(("idle",))
        assert self.pool.is_empty, "memory is lost"
        assert not self.sequences._prefixes._with, "tokens of nobody are known"
        told = self.sequences.by_model().get("m", {"tokens": 0})
        assert {key: value for key, value in told.items() if value} in ({}, {"tokens": self.tokens})


def made(pool: RequestPool, room: Room, rows: bytes) -> SlabTensor:
    """What a worker wrote into the reply's room."""
    at, data = room.reply_offset_bytes, np.frombuffer(rows, np.uint8)
    pool.memory[at : at + data.nbytes] = rows
    return SlabTensor(
        name="cache_new",
        dtype="uint8",
        shape=(1, len(rows) // ROW, ROW),
        offset_bytes=at,
        size_bytes=data.nbytes,
    )


def done(key: Key, ids: Sequence[int], *runs: Sequence[int]) -> tuple[Move, ...]:
    """A generation that has had these runs, and goes on."""
    return ("begin", key, tuple(ids), "ok"), *[("run", key, tuple(one), "ok") for one in runs]
