"""Checks of requests in sequences, before any byte is read; a refused request changes nothing."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from pipeswitch.base.errors import InvalidInput
from pipeswitch.frontend.sequences.sequence_state import SequenceOptions
from pipeswitch.scheduler.memory.blocks import TOKEN_BYTES, beside_bytes, tokens_of
from pipeswitch.scheduler.state.events import Reply, Token
from pipeswitch.wire.frames import RequestHeader, WireTensor
from tests.unit.sequence_world import MODEL, MOST, ROW, World, gathered, made

KEY = ("a", "1")


class Unread:
    """Frame whose bytes must not be read."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __buffer__(self, _: int) -> memoryview:
        raise AssertionError("it was read")

    __bytes__ = __getitem__ = __buffer__


def offer(
    world: World,
    starts: bool,
    frames: dict[str, Any],
    model: Any = MODEL,
    *,
    keep: bool = False,
    **shapes: Any,
) -> Any:
    """Offer a request with these inputs; unless ``keep``, refuse it then, like the frontend."""
    options = SequenceOptions(id=KEY[1], starts=starts, ends=False)
    sequence = world.sequences.of(options, world, KEY[0], model)  # type: ignore[arg-type]
    inputs, data = [], []
    for name, one in frames.items():
        is_array = isinstance(one, np.ndarray)
        shape, dtype = shapes.get(name, one.shape if is_array else ()), "int64"
        if name == "cache":
            dtype = "uint8"
        elif is_array:
            dtype = str(one.dtype)
        inputs.append(WireTensor(name=name, dtype=dtype, shape=shape, frame=len(data)))
        data.append(one.tobytes() if is_array else one)
    header = RequestHeader(v=1, op="infer", id="r", model="m", inputs=tuple(inputs))
    try:
        header, _ = world.sequences.with_state(sequence, options, header, data)
    except InvalidInput:
        world.sequences.refused(sequence)
        raise
    assert keep
    world.sequences.begin(sequence, options)
    sequence.copy(world.pool)
    return sequence, header


def numbers(ids: Any, count: int, used: int) -> dict[str, Any]:
    return {"ids": np.array(ids, np.int64), "count": np.array([count]), "used": np.array([used])}


GOOD = numbers([[1, 2]], 2, 20)
WRONG: dict[str, dict[str, Any]] = {
    "two rows": numbers([[1], [2]], 1, 20)
    | {"count": np.ones(2, np.int64), "used": np.full(2, 20)},
    "another batch": GOOD | {"count": np.array([2, 2])},
    "no ids": numbers([[]], 0, 20),
    "flat ids": numbers([1, 2], 2, 20),
    "int32 ids": GOOD | {"ids": np.array([[1, 2]], np.int32)},
    "float used": GOOD | {"used": np.array([20.0])},
    "a scalar": GOOD | {"count": np.array(2)},
    "too long": numbers([[1] * 41], 41, 20),
    "its state": GOOD | {"cache": np.zeros((1, 20, ROW), np.uint8)},
}


def step(world: World, starts: bool, count: int) -> None:
    """Offer a request of ``count`` ids, and answer it."""
    sequence, _ = offer(world, starts, numbers([[1] * count], count, 0), keep=True)
    allocation = world.pool.reserve(KEY[0], 1, ROW * count)
    rows = made(world.pool, allocation, bytes([1]) * ROW * count)
    assert sequence.answered(Reply(token=Token(1), outputs=(rows,))).error is None
    world.pool.release_inputs(allocation)
    world.sequences.ended(sequence, allocation, is_ok=True, is_sent=True)


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_shape_is_refused_and_the_next_step_is_as_before(what: str) -> None:
    world = World(1 << 20)
    step(world, True, 20)
    before = (world.pool.as_dict(), world.sequences.as_dict())
    with pytest.raises(InvalidInput):
        offer(world, False, WRONG[what])
    assert (world.pool.as_dict(), world.sequences.as_dict()) == before
    step(world, False, 2)
    assert world.sequences.held[KEY].grown["cache"].used == 22
    world.sequences.end(KEY[1], KEY[0])
    assert world.pool.is_empty


def test_rows_over_the_context_are_refused_and_the_last_one_is_not() -> None:
    world = World(1 << 20)
    for number in range(0, MOST, 40):
        step(world, not number, 40)
    with pytest.raises(InvalidInput):
        offer(world, False, numbers([[1]], 1, MOST))


@pytest.mark.parametrize("used", [0, 20])
@pytest.mark.parametrize(
    ("frames", "shapes"),
    [
        ({"ids": Unread(48 << 20), "count": Unread(8), "used": Unread(8)}, {"ids": (1, 6 << 20)}),
        ({"ids": Unread(16), "count": Unread(48 << 20), "used": Unread(8)}, {"ids": (1, 2)}),
        ({"ids": Unread(16), "count": Unread(8), "used": Unread(9)}, {"ids": (1, 2)}),
        ({"ids": Unread(48 << 20), "count": Unread(8), "used": Unread(8)}, {"ids": (1, 2)}),
    ],
)
def test_no_byte_is_read_before_all_shapes_are_right(
    used: int, frames: dict[str, Any], shapes: dict[str, Any]
) -> None:
    world = World(1 << 20)
    if used:
        step(world, True, used)
    shapes = {"count": (1,), "used": (1,)} | shapes
    with pytest.raises(InvalidInput):
        offer(world, not used, frames, **shapes)


def test_a_cache_takes_the_memory_beside_the_pool_that_is_counted_for_it() -> None:
    world, rows = World(64 << 20), 16 * 1000
    table = world.sequences.blocks.open("a", "m", "", ROW, "d")
    tokens = tokens_of(np.random.default_rng(0).integers(0, 1 << 21, rows))
    tracemalloc.start()
    world.sequences.blocks.resize(table, rows)
    for at in range(0, rows, 999):
        world.sequences.blocks.extend(table, len(tokens[at : at + 999]), tokens[at : at + 999])
    real, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    counted = world.pool._shares.held - table.size_bytes
    assert counted == 1000 * beside_bytes(16)
    assert real + TOKEN_BYTES * rows < counted
    world.sequences.blocks.close(table)


def test_the_request_that_starts_a_sequence_may_bring_its_rows() -> None:
    """Rows that a request brings must be stored as if the sequence had computed them."""
    world, rows = World(1 << 20), np.arange(33 * ROW, dtype=np.uint8).reshape(1, 33, ROW)
    for no_rows in (rows[:, :0], np.zeros((1, MOST + 1, ROW), np.uint8), rows[:, :, :1]):
        with pytest.raises(InvalidInput):
            offer(world, True, numbers([[1, 2]], 2, no_rows.shape[1]) | {"cache": no_rows})
    assert world.pool.is_empty
    sequence, header = offer(world, True, numbers([[1, 2]], 2, 33) | {"cache": rows}, keep=True)
    assert gathered(world.pool, sequence.values["cache"]) == rows.tobytes()
    assert [one.name for one in header.inputs] == ["ids", "count", "used", "cache"]
    assert sequence.grown["cache"].used == 33
    world.sequences.ended(sequence, None, is_ok=False, is_sent=True)
    assert world.pool.is_empty
