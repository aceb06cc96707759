"""Requests of sequences are checked before a byte is read, and a refusal changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeswitch.base.errors import InvalidInput, SequenceNotFound
from pipeswitch.frontend.sequences.held import MAX_STEP_TOKENS, Asked
from pipeswitch.frontend.sequences.prefixes import TOKEN_BYTES, History, Prefixes, tokens_of
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.wire.frames import RequestHeader, WireTensor
from tests.unit.sequence_world import MODEL, MOST, ROW, World

KEY = ("a", "1")
WORDS = [1 + n % 9 for n in range(20)]


class Unread:
    """A frame whose bytes nobody may read."""

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
    """Offer a request with these inputs, and refuse it as the frontend does, or keep it."""
    asked = Asked(id=KEY[1], starts=starts, ends=False)
    held = world.sequences.of(asked, world, KEY[0], model)  # type: ignore[arg-type]
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
        header, _ = world.sequences.given(held, asked, header, data)
    except InvalidInput:
        world.sequences.refused(held)
        raise
    assert keep
    world.sequences.begin(held, asked)
    held.copy(world.pool)
    world.sequences.copied(held)
    return held, header


def numbers(ids: Any, count: int, used: int) -> dict[str, Any]:
    return {"ids": np.array(ids, np.int64), "count": np.array([count]), "used": np.array([used])}


def without(name: str) -> dict[str, Any]:
    return {key: one for key, one in numbers([[1]], 1, 20).items() if key != name}


GOOD = numbers([[1, 2]], 2, 20)
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"used {n}": (numbers([[1, 2]], 2, n), {"used": 20}) for n in (1 << 62, -1, 0, 19, 1000)},
    **{f"count {n}": (numbers([[1, 2]], n, 20), {"count": 2}) for n in (0, -1, 1, 3, 1 << 40)},
    **{f"id {n}": (numbers([[1, n]], 2, 20), {}) for n in (-1, 10, 1 << 31, 1 << 40, -(1 << 63))},
    "two rows": (
        numbers([[1], [2]], 1, 20) | {"count": np.ones(2, np.int64), "used": np.full(2, 20)},
        {},
    ),
    "another batch": (GOOD | {"count": np.array([2, 2])}, {}),
    "no ids": (numbers([[]], 0, 20), {}),
    "flat ids": (numbers([1, 2], 2, 20), {}),
    "int32 ids": (GOOD | {"ids": np.array([[1, 2]], np.int32)}, {}),
    "float used": (GOOD | {"used": np.array([20.0])}, {}),
    "a scalar": (GOOD | {"count": np.array(2)}, {}),
    "too long": (numbers([[1] * 41], 41, 20), {}),
    "no used": (without("used"), {}),
    "no ids at all": (without("ids"), {}),
    "its state": (GOOD | {"cache": np.zeros((1, 20, ROW), np.uint8)}, {}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_number_is_refused_with_the_right_one_and_the_next_step_is_as_before(
    what: str,
) -> None:
    world, (frames, data) = World(1 << 20), WRONG[what]
    world.move(("ask", KEY, True, WORDS, "done"))
    before = (world.pool.as_dict(), world.sequences.as_dict())
    with pytest.raises(InvalidInput) as refused:
        offer(world, False, frames)
    assert refused.value.data.items() >= data.items()
    assert (world.pool.as_dict(), world.sequences.as_dict()) == before
    if "its state" not in what and "used" not in what:
        with pytest.raises(InvalidInput):
            offer(world, True, frames | {"used": np.zeros_like(frames.get("used", [0]))})
    world.move(("ask", KEY, False, [3, 4], "done"))
    world.wind_down()


def test_rows_over_the_context_are_refused_and_the_last_one_is_not() -> None:
    world = World(1 << 20)
    for step in range(0, MOST, 40):
        world.move(("ask", KEY, not step, [1] * 40, "done"))
    with pytest.raises(InvalidInput, match="would have 401 rows"):
        offer(world, False, numbers([[1]], 1, MOST))
    world.wind_down()


@pytest.mark.parametrize("used", [0, 20])
@pytest.mark.parametrize(
    ("frames", "shapes"),
    [
        ({"ids": Unread(48 << 20), "count": Unread(8), "used": Unread(8)}, {"ids": (1, 6 << 20)}),
        ({"ids": Unread(16), "count": Unread(48 << 20), "used": Unread(8)}, {"ids": (1, 2)}),
        ({"ids": Unread(16), "count": Unread(8), "used": Unread(9)}, {"ids": (1, 2)}),
        ({"ids": Unread(48 << 20), "count": Unread(8), "used": Unread(8)}, {"ids": (1, 2)}),
        ({"ids": Unread(16), "count": Unread(8)}, {"ids": (1, 2)}),
    ],
)
def test_no_byte_is_read_before_all_shapes_are_right(
    used: int, frames: dict[str, Any], shapes: dict[str, Any]
) -> None:
    world = World(1 << 20)
    if used:
        world.move(("ask", KEY, True, WORDS, "done"))
    shapes = {"count": (1,), "used": (1,)} | shapes
    with pytest.raises(InvalidInput):
        offer(world, not used, frames, **shapes)
    world.wind_down()


def test_a_step_has_a_most_of_tokens_whatever_its_model_takes() -> None:
    dims = [Dim("batch", 1, 4), Dim("length", 1, 1 << 24), Dim("past", 1, 1 << 24)]
    manifest = SimpleNamespace(**vars(MODEL.manifest) | {"dims": dims})
    model = SimpleNamespace(base="m", model="m", version=1, tenant="", manifest=manifest)
    world, size = World(1 << 20), MAX_STEP_TOKENS + 1
    frames = {"ids": Unread(8 * size), "count": Unread(8), "used": Unread(8)}
    with pytest.raises(InvalidInput, match="in pieces"):
        offer(world, True, frames, model, ids=(1, size), count=(1,), used=(1,))
    assert world.pool.is_empty


@pytest.mark.parametrize("count", [1000, 200_000])
def test_a_history_takes_the_memory_that_is_counted_for_it(count: int) -> None:
    prefixes, history = Prefixes(), History(("a", "m", "d"))
    chance = np.random.default_rng(0)
    tokens = tokens_of(chance.integers(0, 1 << 21, count))
    for at in range(0, count, 999):
        prefixes.extend(history, tokens[at : at + 999])
    assert history.tokens == tokens
    beside = sum(map(sys.getsizeof, (history.chain, *history.chain)))
    beside += sum(sys.getsizeof(one) + 100 for one in prefixes._with.values())
    assert sys.getsizeof(history.tokens) <= 1.2 * TOKEN_BYTES * count
    assert beside <= max(2 * TOKEN_BYTES * count, 200_000) if count < 5000 else beside <= 200_000
    for length in (16, 17, 900, count - 1, count):
        found = prefixes.find(History(("a", "m", "d")), tokens[:length])
        assert found == (history, length)
    assert prefixes.find(History(("b", "m", "d")), tokens) is None
    prefixes.remove(history)
    assert not prefixes._with
    assert not history.tokens


def test_tokens_count_to_the_share_of_who_asks() -> None:
    world = World(1 << 20)
    world.move(("ask", KEY, True, WORDS, "done"))
    (held,) = world.sequences.held.values()
    (grown,) = held.grown.values()
    assert grown.room.counted_bytes == 2 * 4096 + TOKEN_BYTES * grown.capacity
    for _ in range(5):
        world.move(("ask", KEY, False, [1] * 40, "done"))
    assert grown is not held.grown["cache"] or grown.capacity > 200
    (grown,) = held.grown.values()
    assert grown.room.counted_bytes == 2 * 4096 + TOKEN_BYTES * grown.capacity
    world.wind_down()


@pytest.mark.parametrize("when", ["idle", "spare", "computing", "copying", "ends anyhow"])
def test_a_model_that_is_gone_leaves_no_sequence_no_spare_and_no_tokens(when: str) -> None:
    world = World(1 << 20)
    world.move(("ask", ("a", "2"), True, [2, 3] * 10, "done"))
    world.move(("ask", KEY, True, WORDS, "done"))
    moves: dict[str, Callable[[], None]] = {
        "idle": lambda: None,
        "spare": lambda: world.move(("end", KEY)),
        "computing": lambda: world.move(("ask", KEY, False, [1], "at once")),
        "copying": lambda: world.move(("ask", KEY, False, [1], "late")),
        "ends anyhow": lambda: world.move(("ask", KEY, False, [1], "last")),
    }
    moves[when]()
    world.sequences.retract("other")
    assert len(world.sequences.held) + len(world.sequences.spare) == 2
    world.sequences.retract("m")
    while world.lane:
        world.move(("carry",))
    if KEY in world.under_way:
        world.answer(KEY, "ok")
    assert world.sequences.as_dict()["sequences_by_model"].get("m", {}).get("sequences", 0) == 0
    assert not world.sequences.held
    assert not world.sequences.spare
    assert world.pool.is_empty
    with pytest.raises(SequenceNotFound):
        offer(world, False, GOOD)


def test_the_request_that_starts_a_sequence_may_bring_its_rows() -> None:
    """They are where its own would be, and nobody takes them for known tokens."""
    world, rows = World(1 << 20), np.arange(33 * ROW, dtype=np.uint8).reshape(1, 33, ROW)
    with pytest.raises(InvalidInput) as refused:
        offer(world, True, numbers([[1, 2]], 2, 0) | {"cache": rows})
    assert refused.value.data["used"] == 33
    for no_rows in (rows[:, :0], np.zeros((1, MOST + 1, ROW), np.uint8), rows[:, :, :1]):
        with pytest.raises(InvalidInput, match='input "cache" expects'):
            offer(world, True, numbers([[1, 2]], 2, no_rows.shape[1]) | {"cache": no_rows})
    assert world.pool.is_empty
    held, header = offer(world, True, numbers([[1, 2]], 2, 33) | {"cache": rows}, keep=True)
    lent = held.values["cache"]
    memory = bytes(world.pool.memory[lent.offset_bytes :][: lent.size_bytes])
    assert memory == rows.tobytes() + bytes(lent.size_bytes - rows.nbytes)
    assert [one.name for one in header.inputs] == ["ids", "count", "used", "cache"]
    assert held.history is None
    assert held.grown["cache"].used == 33
    world.sequences.ended(held, None, is_ok=False, is_sent=True)
    assert world.pool.is_empty
