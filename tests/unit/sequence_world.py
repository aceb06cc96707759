"""A model with a state that grows, a pool with sequences, and checks of the pool's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from pipeswitch.frontend.intake import request_pool
from pipeswitch.frontend.intake.request_pool import PoolAllocation, RequestPool
from pipeswitch.frontend.sequences.manager import Sequences
from pipeswitch.ipc.messages.base import SlabTensor
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.layout import PADS, ValueSpec
from pipeswitch.scheduler.memory.blocks import Block, BlockPool, BlockTable

MOST: Final = 400  # the maximum number of rows of a cache
ROW: Final = 256  # bytes per row; a page has 16 rows


class Model:
    """The model, as the scheduler announces it to the frontend."""

    model = base = "m"
    version, tenant = 1, ""
    manifest: Any = SimpleNamespace(
        extra={
            "state": {"cache": ("cache_new", 1)},
            "generation": {"context": MOST, "vocabulary": 10},
        },
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

    def __reduce__(self) -> str:
        return "MODEL"  # all copies of a world share the model


MODEL: Any = Model()


class File:
    """Stand-in for the pool's mapped file; a copy of the world has its own copy of it."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)

    @property
    def memory(self) -> memoryview:
        return memoryview(self.data)


class World:
    """A pool with sequences, and a clock."""

    def __init__(self, pool_bytes: int) -> None:
        self.now_ms = 0.0
        with patch.object(request_pool, "_File", File):
            self.pool = RequestPool(pool_bytes)
        self.sequences = Sequences(self.pool, self.now)

    def now(self) -> float:
        return self.now_ms


def check(blocks: BlockPool, tables: Sequence[BlockTable]) -> None:
    """Assert the invariants of the pool's blocks, given all open tables."""
    locks: dict[Block, int] = {}
    for table in tables:
        assert table.used <= table.capacity
        for block in table.blocks:
            locks[block] = locks.get(block, 0) + 1
    order = {block: place for place, block in enumerate(blocks.unlocked)}
    spaces = [space for one in blocks.models.values() for space in one.spaces.values()]
    trees, todo = set[Block](), [one.children for one in spaces]
    while todo:
        for block in (children := todo.pop()).values():
            assert children[block.tokens] is block
            trees.add(block)
            todo.append(block.children)
    assert all(block.locks == count for block, count in locks.items())
    assert trees - locks.keys() <= order.keys()
    for block, place in order.items():
        assert block in trees
        assert not block.locks
        assert all(order[child] < place for child in block.children.values())
    for model in blocks.models.values():
        assert model.cached.keys() == {one for one in order if one.space.of is model}
        assert model.cached_bytes == sum(one.space.block_bytes for one in model.cached)
        used = [one for one in {*order, *locks} if one.space.of is model]
        assert model.size_bytes == sum(one.space.block_bytes for one in used)
    assert blocks.cached_bytes == sum(one.space.block_bytes for one in order)
    for space in spaces:
        assert space.blocks == sum(one.space is space for one in {*order, *locks})


def gathered(pool: RequestPool, lent: SlabTensor) -> bytes:
    """Return the rows of a cache as its worker reads them."""
    parts = [bytes(pool.memory[at : at + lent.piece_bytes]) for at in lent.pieces]
    return b"".join(parts)[: lent.size_bytes]


def made(pool: RequestPool, allocation: PoolAllocation, rows: bytes) -> SlabTensor:
    """Write rows into the reply's range, as a worker does; return their tensor."""
    at, data = allocation.reply_offset_bytes, np.frombuffer(rows, np.uint8)
    pool.memory[at : at + data.nbytes] = rows
    return SlabTensor(
        name="cache_new",
        dtype="uint8",
        shape=(1, len(rows) // ROW, ROW),
        offset_bytes=at,
        size_bytes=data.nbytes,
    )
