"""Search through every order of a few moves of a few sequences for wrong rows and lost memory.

The search is breadth-first and visits equal states once, so that the first violation is reached by
the fewest moves. Blocks, slabs and steps are small, so that few tokens reach every limit.
"""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import pytest

from pipeswitch.extras.text import caches
from pipeswitch.extras.text.caches import Cache
from pipeswitch.frontend.intake import request_pool
from pipeswitch.frontend.intake.request_pool import PoolAllocation
from pipeswitch.frontend.sequences.sequence_state import (
    SequenceOptions,
)
from pipeswitch.scheduler.memory import blocks
from pipeswitch.scheduler.memory.blocks import Block, BlockNamespace, BlockTable, ModelBlocks
from pipeswitch.scheduler.state.events import Token
from pipeswitch.wire import slabs
from tests.extras.text.unit.cache_world import CacheWorld, Key, Move, Request, done
from tests.unit.sequence_world import MODEL

PAGE = 512  # bytes of a block, which has two rows
STRUCTS = (
    Cache,
    Block,
    BlockTable,
    BlockNamespace,
    ModelBlocks,
    PoolAllocation,
    Request,
)
UNTOLD = ("number", "caller", "announced", "steps", "token")
WORDS = [1 + n % 9 for n in range(20)]
SIZES = (
    (blocks, "BLOCK_ROWS", 2),
    (blocks, "BLOCK_BYTES", 0),
    (blocks, "SLAB_ALIGN_BYTES", PAGE),
    (blocks, "ROWS_STEP", 2),
    (caches, "SLAB_ALIGN_BYTES", PAGE),
    (slabs, "SLAB_ALIGN_BYTES", PAGE),
    (request_pool, "SLAB_ALIGN_BYTES", PAGE),
)
ONE, TWO, OTHER = ("a", "1"), ("a", "2"), ("b", "1")
ONES, MIXED, LONG = (1, 1, 1), (1, 1, 2, 2, 2), (1, 1, 1, 1, 1, 1, 1)
PROMPTS, RUNS = (ONES, MIXED, LONG), ((1,), (2,), (1, 2, 1))


@dataclass(frozen=True, kw_only=True)
class Scope:
    keys: tuple[Key, ...] = (ONE, TWO)
    pages: int = 40
    depth: int
    story: tuple[Move, ...] = ()  # moves that are made before the search
    hows: tuple[str, ...] = ("ok", "refused")

    def moves(self, world: CacheWorld) -> Iterator[Move]:
        for key in self.keys if world.numbers else self.keys[:1]:  # at first, keys are equivalent
            request = world.live.get(key)
            if request is None:
                yield from (("begin", key, *one) for one in product(PROMPTS, self.hows))
            else:
                yield from (("run", key, *one) for one in product(RUNS, ("ok", "wrong", "full")))
                yield "end", key
        if world.sequences.blocks.unlocked:
            yield ("evict",)
        if not world.now_ms and world.numbers:
            yield ("idle",)


def _blank(kind: Any) -> Any:
    return kind(**dict.fromkeys(kind.__struct_fields__))


def _fields(one: Any) -> Any:
    """Return the parts that pickle a struct in a cycle: it is created before its fields are set."""
    fields = {name: getattr(one, name) for name in one.__struct_fields__}
    return _blank, (type(one),), (None, fields)


def thawed(data: bytes) -> CacheWorld:
    world: CacheWorld = pickle.loads(data)
    return world


def shape_of(world: CacheWorld) -> int:
    """Return a hash that is equal for states that behave equally."""
    numbers: dict[int, int] = {}

    def plain(one: Any) -> Any:
        if isinstance(one, STRUCTS):
            if id(one) in numbers:
                return numbers[id(one)]
            numbers[id(one)] = len(numbers)
            names = [name for name in one.__struct_fields__ if name not in UNTOLD]
            return [plain(getattr(one, name)) for name in names]
        if isinstance(one, dict):
            return [(plain(key), plain(value)) for key, value in one.items()]
        return [plain(item) for item in one] if isinstance(one, list | tuple) else one

    own, slabs = world.sequences, world.pool._slabs
    shape = (
        [*world.caches.held.values()],
        [*own.blocks.unlocked],
        world.live,
        [*own.blocks.models.values()],
        sorted(slabs._taken.items()),
        world.now_ms,
        own._look_at_ms,
    )
    return hash((repr(plain(shape)), bytes(world.pool.memory)))


def explore(scope: Scope) -> int:
    """Visit all states; return their number. A move's exception gets the moves so far as a note."""
    root = CacheWorld(scope.pages * PAGE, steps=max(map(len, RUNS)))
    for move in scope.story:
        root.move(move)
    shapes, frontier = {shape_of(root)}, [(pickle.dumps(root), scope.story)]
    for _ in range(scope.depth):
        following = []
        for data, story in frontier:
            for move in scope.moves(thawed(data)):
                world = thawed(data)
                try:
                    world.move(move)
                    shape = shape_of(world)
                    if shape not in shapes:
                        shapes.add(shape)
                        following.append((pickle.dumps(world), (*story, move)))
                        world.wind_down()
                except Exception as error:
                    error.add_note("\n".join(map(str, (*story, move))))
                    raise
        frontier = following
    return len(shapes)


TALK = done(ONE, ONES, (1,), (1, 1, 1))
OVER = (*done(ONE, MIXED, (2,), (2,)), ("end", ONE))
SCOPES = {
    "full": Scope(depth=3, pages=16, story=(*TALK, ("end", ONE), *done(TWO, (2,) * 6))),
    "spare": Scope(depth=3, story=OVER),
    "taken over": Scope(depth=2, story=(*OVER, *done(ONE, MIXED, (1,)), *done(TWO, MIXED, (1, 1)))),
    "two callers": Scope(depth=3, keys=(ONE, OTHER)),
    "tokens in common": Scope(depth=3, hows=("ok", "refused"), story=(*TALK, *done(TWO, ONES))),
    "tight": Scope(depth=4, pages=16),
    "wide": Scope(depth=4),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[pytest.mark.slow] * (SCOPES[one].depth > 3)) for one in SCOPES],
)
def test_no_order_of_moves_lends_rows_of_other_tokens_or_loses_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, what, value in SIZES:
        monkeypatch.setattr(module, what, value)
    for kind in STRUCTS:
        monkeypatch.setitem(copyreg.dispatch_table, kind, _fields)
    assert explore(SCOPES[name]) > 100


@pytest.mark.parametrize("when", ["between runs", "cached", "shared"])
def test_a_model_that_is_gone_leaves_no_cache_no_block_and_no_tokens(when: str) -> None:
    world = CacheWorld(1 << 20)
    for move in (*done(("a", "2"), [2, 3] * 10, [1]), ("end", ("a", "2")), *done(ONE, WORDS, [1])):
        world.move(move)
    if when == "cached":
        world.move(("end", ONE))
    elif when == "shared":
        world.move(("begin", ("a", "3"), (*WORDS, 1), "ok"))
    world.sequences.retract("other")
    assert world.sequences.blocks.unlocked
    world.sequences.retract("m")
    for key in list(world.live):  # end them, because the scheduler refuses their next runs
        world.move(("end", key))
    assert world.sequences.as_dict()["sequences_by_model"].get("m", {}).get("sequences", 0) == 0
    assert not world.sequences.held
    assert not world.sequences.blocks.unlocked
    assert world.pool.is_empty


def test_a_generation_does_not_take_the_name_of_its_callers_sequence() -> None:
    world, client = CacheWorld(1 << 20), cast(Any, None)
    own = [world.sequences._made(("a", f"generation-{n}"), client, MODEL) for n in (3, 4)]
    for sequence in own:
        options = SequenceOptions(id=sequence.key[1], starts=True, ends=False)
        world.sequences.begin(sequence, options)
    generations = [world.caches.open("a", MODEL, Token(n)) for n in range(3)]
    assert [one.number for one in generations] == [1, 2, 5]
    for one in generations:
        world.caches.close(one)
    for sequence in own:
        world.sequences.drop(sequence)
    assert world.pool.is_empty
