"""Key-value caches of generations: ``CacheWorld`` makes a kind's moves and checks invariants.

The bytes of a cache's row depend on the caller and on all tokens so far, so a check finds any wrong
row. After each move, memory outside of all slabs is overwritten.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from pipeswitch.base.errors import QueueFull
from pipeswitch.extras.text.caches import Cache, Caches
from pipeswitch.frontend.sequences.manager import IDLE_MS
from pipeswitch.ipc.messages.base import OpId, SlabTensor
from pipeswitch.scheduler.memory import blocks as blocks_module
from pipeswitch.scheduler.memory.blocks import tokens_of
from pipeswitch.scheduler.state.events import Token
from tests.unit.sequence_world import MODEL, MOST, ROW, World, check, gathered

Key = tuple[str, str]
Move = tuple[Any, ...]


class Request(msgspec.Struct):
    """State of a generation between two of its runs."""

    held: Cache
    ids: list[int]
    cache: SlabTensor
    used: int  # rows that the next run reads


def rows_of(caller: str, tokens: list[int]) -> bytes:
    rows, last = [], zlib.crc32(caller.encode())
    for token in tokens:
        last = zlib.crc32(token.to_bytes(8, "little"), last)
        rows.append(last.to_bytes(ROW, "little"))
    return b"".join(rows)


class CacheWorld(World):
    def __init__(self, pool_bytes: int, steps: int = 1) -> None:
        self.steps = steps  # the maximum number of steps of a run
        self.tokens = 0
        super().__init__(pool_bytes)
        self.caches = Caches(self.sequences.blocks, self.sequences.held)
        self.sequences.others.append(self.caches)
        self.live: dict[Key, Request] = {}
        self.numbers = 0

    def move(self, move: Move) -> None:
        match move:
            case "begin", key, ids, how:
                self.begin(key, list(ids), how)
            case "run", key, chosen, how:
                self.run(key, list(chosen), how)
            case "end", key:
                self.end(key)
            case ("evict",):
                assert self.sequences.blocks.evict()
            case ("idle",):
                self.now_ms += IDLE_MS
                self.sequences.expire()
        self.check()

    def begin(self, key: Key, ids: list[int], how: str) -> None:
        """Begin a generation. If ``how`` is "refused", the pool has no room for its run."""
        self.numbers += 1
        cache = self.caches.open(key[0], MODEL, Token(self.numbers))
        try:
            if (copy := self.caches.reuse(cache, tokens_of(ids))) is not None:
                (to, source, size), memory = copy, self.pool.memory
                memory[to : to + size] = memory[source : source + size]
            assert cache.table.used < len(ids)
            self.caches.fit(cache, len(ids))
            value = self.caches.fit(cache, len(ids) + self.steps - 1, self.steps)
            if how == "refused":
                raise QueueFull("behind its cache")
        except QueueFull:
            self.caches.close(cache)
            return
        self.live[key] = Request(cache, ids, value, cache.table.used)

    def run(self, key: Key, chosen: list[int], how: str) -> None:
        """End a run whose worker has appended rows to the cache. If ``how`` is "wrong", the worker
        died during the run; if it is "full", the pool has no room for the next run."""
        request = self.live[key]
        cache, ids = request.held, request.ids
        fed = [*ids[request.used :], *chosen[:-1]]
        rows = rows_of(key[0], [*ids, *chosen[:-1]])[ROW * request.used :]
        if how == "wrong":
            rows = b"\x66" * len(rows)
        lent = request.cache
        self.pool.copy_rows("", lent.places(lent.size_bytes, len(rows)), memoryview(rows))
        if how != "wrong":
            self.caches.append(cache, tokens_of(fed), OpId(1), len(chosen))
            ids.extend(chosen)
            self.tokens += len(chosen)
        try:
            value = self.caches.fit(cache, len(ids) + self.steps - 1, self.steps)
            if how == "full":
                raise QueueFull("it waits")
        except QueueFull:  # the youngest generation gives up its cache
            self.end(key)
            return
        request.cache, request.used = value, cache.table.used

    def end(self, key: Key) -> None:
        """End a generation that is finished or whose client is gone."""
        self.caches.close(self.live.pop(key).held)

    def check(self) -> None:
        self.pool.check()
        blocks, memory = self.sequences.blocks, self.pool.memory
        tables = [one.held.table for one in self.live.values()]
        check(blocks, tables)
        for key, one in self.live.items():
            table = one.held.table
            assert gathered(self.pool, one.cache) == rows_of(key[0], one.ids[: one.used]), key
            rows, step = one.cache.shape[1], blocks_module.ROWS_STEP
            assert rows == max(one.used, 1) or rows % step in (0, MOST % step)
            size, most = table.space.rows, len(one.ids) + self.steps - 1
            assert len(table.blocks) == max(-(-most // size), -(-one.used // size), 1)
        offsets = {offset for one in tables for offset in one.pieces}
        offsets |= {one.offset_bytes for one in blocks.unlocked}
        assert len(offsets) == self.pool._slabs.slab_count, "memory nobody holds"
        for start, size in self.pool._slabs._holes:
            memory[start : start + size] = b"\xee" * size

    def wind_down(self) -> None:
        """End all generations, let idle blocks expire, and check that the pool is empty."""
        for key in list(self.live):
            self.run(key, [1], "ok")
            if key in self.live:
                self.end(key)
        self.move(("idle",))
        assert self.pool.is_empty, "memory is lost"
        assert not self.sequences.blocks.models, "tokens of nobody are known"
        counts = self.sequences.by_model().get("m", {"tokens": 0})
        assert {key: value for key, value in counts.items() if value} in (
            {},
            {"tokens": self.tokens},
        )


def done(key: Key, ids: Sequence[int], *runs: Sequence[int]) -> tuple[Move, ...]:
    """Return the moves of a generation that has made these runs and has not ended."""
    return ("begin", key, tuple(ids), "ok"), *[("run", key, tuple(one), "ok") for one in runs]
