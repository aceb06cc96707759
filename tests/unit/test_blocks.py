"""Blocks of a KV cache: their bytes, how sequences share them, and each of four operations."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeswitch.base.errors import QueueFull
from pipeswitch.scheduler.memory.blocks import (
    BLOCK_ROWS,
    BlockPool,
    BlockTable,
    rows_of_block,
    tokens_of,
)
from tests.unit.sequence_world import check

PAGE = 4096
ROW = PAGE // BLOCK_ROWS  # bytes per row, so that a block is a page


class Memory:
    """Pool of ``capacity_bytes`` bytes, which evicts blocks when it is full."""

    def __init__(self, capacity_bytes: int) -> None:
        self.free_bytes, self.taken, self.number = capacity_bytes, dict[int, int](), 0
        self.blocks = BlockPool(cast(Any, self), lambda: float(self.number))

    def take_block(self, holder: str, size_bytes: int, beside_bytes: int, tenant: str) -> int:
        while size_bytes > self.free_bytes:
            if not self.blocks.evict():
                raise QueueFull("full")
        self.number += 1
        self.free_bytes -= size_bytes
        self.taken[self.number] = size_bytes
        return self.number

    def free_block(self, holder: str, offset_bytes: int, beside_bytes: int, tenant: str) -> None:
        self.free_bytes += self.taken.pop(offset_bytes)

    def begin(self, caller: str, ids: list[int], row_bytes: int = ROW) -> BlockTable:
        """Begin a sequence and add the rows of its whole prompt; return its table of blocks."""
        table = self.blocks.open(caller, "m", "", row_bytes, "digest")
        try:
            self.blocks.reuse(table, tokens_of(ids[:-1]))
            self.blocks.resize(table, len(ids))
        except QueueFull:
            self.blocks.close(table)
            raise
        self.blocks.extend(table, len(ids) - table.used, tokens_of(ids[table.used :]))
        return table


def prompt(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1000) for _ in range(count)]


moves = st.tuples(
    st.sampled_from("bbgggcfexr"), st.integers(0, 3), st.integers(0, 40), st.sampled_from("aab")
)


@settings(max_examples=400, deadline=None)
@given(st.lists(moves, max_size=60), st.sampled_from([6, 20, 1000]))
def test_random_lives_hold_the_rows_that_live_and_leave_every_byte_free(
    steps: list[tuple[str, int, int, str]], pages: int
) -> None:
    """Make up to 60 random moves; then every sequence has its rows, and all bytes become free."""
    memory = Memory(pages * PAGE)
    blocks, live = memory.blocks, list[tuple[str, BlockTable, list[int]]]()
    for move, which, number, caller in steps:
        one = live[which % len(live)] if live else None
        try:
            if move == "b":  # begin a sequence, whose prompt shares a prefix with other prompts
                ids = [*prompt(which, 20 + 8 * which), *prompt(which + number % 2, number + 1)]
                live.append((caller, memory.begin(caller, ids), ids))
            elif move == "g" and one is not None:
                table, ids = one[1:]
                blocks.resize(table, table.used + number)
                more = prompt(number, number)
                blocks.extend(table, len(more), tokens_of(more))
                ids.extend(more)
            elif move in "cf" and one is not None:  # cancel or finish a sequence
                live.remove(one)
                blocks.close(one[1])
            elif move == "e":
                blocks.evict()
            elif move == "x":
                blocks.expire(float(number))
            elif move == "r" and number < 3:
                blocks.remove("m")
        except QueueFull:
            pass
        check(blocks, [table for _, table, _ in live])
        owners: dict[int, tuple[str, tuple[int, ...]]] = {}
        for caller, table, ids in live:
            assert table.used == len(ids)
            assert table.capacity - table.used < BLOCK_ROWS
            for at, block in enumerate(table.blocks):
                content = caller, tuple(ids[: (at + 1) * BLOCK_ROWS])
                assert owners.setdefault(block.offset_bytes, content) == content
        assert memory.free_bytes + sum(memory.taken.values()) == pages * PAGE
        assert len(memory.taken) - len(blocks.unlocked) == len(owners)
    for _, table, _ in live:
        blocks.close(table)
    while blocks.evict():
        pass
    assert not memory.taken
    assert not blocks.models


def test_ten_thousand_lives_in_one_pool_leave_every_byte_free() -> None:
    memory, chance = Memory(200 * PAGE), random.Random(0)
    live: list[BlockTable] = []
    for _ in range(10_000):
        ids = [*prompt(chance.randrange(9), 50), *prompt(chance.randrange(50), 30)]
        try:
            live.append(memory.begin(chance.choice("ab"), ids[: chance.randrange(1, 81)]))
        except QueueFull:
            memory.blocks.close(live.pop(chance.randrange(len(live))))
        if len(live) > 30 or chance.random() < 0.4:
            memory.blocks.close(live.pop(chance.randrange(len(live))))
    check(memory.blocks, live)
    for table in live:
        memory.blocks.close(table)
    while memory.blocks.evict():
        pass
    assert not memory.taken


@pytest.mark.parametrize("together", [False, True])
def test_a_prefix_of_1000_tokens_is_one_copy_for_64_streams(together: bool) -> None:
    """If ``together``, all streams begin before the first stream's rows exist."""
    memory, prefix = Memory(1 << 30), prompt(0, 1000)
    blocks, tables = memory.blocks, list[BlockTable]()
    for number in range(64):
        ids = [*prefix, 2000 + number]
        if not together:
            tables.append(memory.begin("a", ids))
            continue
        tables.append(blocks.open("a", "m", "", ROW, "digest"))
        blocks.resize(tables[-1], len(ids))
    for number, table in enumerate(tables if together else []):
        blocks.extend(table, 1001, tokens_of([*prefix, 2000 + number]))
    whole = 1000 // BLOCK_ROWS
    assert len(memory.taken) == whole + 64  # shared blocks, and one last block for each stream
    assert {table.pieces[:whole] for table in tables} == {tables[0].pieces[:whole]}
    check(blocks, tables)


def test_bytes_held_are_those_of_the_rows_that_live_but_for_the_last_blocks() -> None:
    for row_bytes in (1, 3, 100, 256, 512, 1000, 8192, 73_728, 131_072):
        memory, live = Memory(64 << 30), 0
        for number in range(40):
            table = memory.begin("a", [number, *prompt(number, 20 + 37 * number)], row_bytes)
            live += row_bytes * table.used
        block_bytes = table.space.block_bytes
        assert sum(memory.taken.values()) - 40 * block_bytes <= 1.05 * live
        assert block_bytes <= 1.05 * row_bytes * rows_of_block(row_bytes)


def test_nothing_is_shared_between_callers_programs_or_row_sizes() -> None:
    memory, ids = Memory(1 << 30), tokens_of(prompt(0, 100))
    blocks = memory.blocks
    sequence = memory.begin("a", ids.tolist())
    for key in (("b", ROW, "digest"), ("a", 2 * ROW, "digest"), ("a", ROW, "other")):
        caller, row_bytes, program = key
        table = blocks.open(caller, "m", "", row_bytes, program)
        assert blocks.reuse(table, ids) is None
        assert not table.used
    table = blocks.open("a", "m", "", ROW, "digest")
    assert blocks.match(table.space, ids)[1] == 100 // BLOCK_ROWS * BLOCK_ROWS
    blocks.close(sequence)  # then its last block matches, too, although it is not full
    assert blocks.match(table.space, ids)[1] == 100


def test_a_sequence_that_differs_within_a_block_copies_its_first_rows() -> None:
    memory, ids = Memory(1 << 30), prompt(0, 40)
    blocks, first = memory.blocks, memory.begin("a", ids)
    table = blocks.open("a", "m", "", ROW, "digest")
    copy = blocks.reuse(table, tokens_of([*ids[:21], 5000]))
    assert copy == (table.pieces[1], first.pieces[1], 5 * ROW)
    assert table.pieces[0] == first.pieces[0]
    assert (table.used, table.capacity) == (21, 32)
    assert blocks.open("a", "m", "", ROW, "digest").space is table.space


def test_what_nobody_uses_is_evicted_from_the_end_and_the_oldest_first() -> None:
    memory = Memory(1 << 30)
    blocks, both = memory.blocks, prompt(0, 32)
    old, new = (memory.begin("a", [*both, *prompt(n, 16)]) for n in (1, 2))
    pieces: Any = [old.pieces, new.pieces]
    for table in (old, new):
        blocks.close(table)
    again = memory.begin("a", [*both, 7])
    order = []
    while (before := set(memory.taken)) and blocks.evict():
        order += before - set(memory.taken)
    assert order == [pieces[0][2], pieces[1][2]]  # the sequences' earlier blocks are in use
    blocks.close(again)
    assert blocks.expire(0.0) is None
    assert not memory.taken
