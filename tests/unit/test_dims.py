"""Computed extents of tensors: expressions are bounded, and so are their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.base.errors import InvalidInput, RegistrationRefused
from pipeswitch.base.model_options import RegisterRequest, parse_input
from pipeswitch.frontend.intake.validation import Body, check_infer
from pipeswitch.frontend.registration import check
from pipeswitch.programs.graphs.bundle import ValueSpec, check_signature, decode_graph
from pipeswitch.programs.interface.dims import (
    MAX_EXPR_NODES,
    MAX_EXTENT,
    MAX_NUMBER,
    OPERATORS,
    Dim,
    Expr,
    Extent,
    NoExtent,
    at_batch,
    batch_range,
    check_dims,
    check_extent,
    corners,
    evaluate,
    extent_text,
    shape_at,
    values_of,
)
from pipeswitch.programs.interface.layout import Manifest
from pipeswitch.programs.spec import load_manifest, save_manifest
from pipeswitch.scheduler.state.events import ModelAvailable
from pipeswitch.wire.frames import RequestHeader, WireTensor
from tests.unit.manifests import plain_manifest

NAMES = ("batch", "length")
LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.integers(-100, 1 << 40), st.sampled_from(NAMES), st.text(max_size=3)
)
TREES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda op, args: Expr(op, tuple(args)),
        st.sampled_from([*sorted(OPERATORS), "**", ""]),
        st.lists(inner, max_size=4),
    ),
    max_leaves=40,
)


def is_accepted(extent: Any) -> bool:
    try:
        check_extent("output 'y'", extent, NAMES)
    except RegistrationRefused:
        return False
    return True


@given(TREES, st.integers(1, MAX_EXTENT), st.integers(1, MAX_EXTENT))
def test_an_accepted_extent_is_a_bounded_number_or_none_and_survives_the_bundle(
    extent: Any, batch: int, length: int
) -> None:
    if not is_accepted(extent):
        return
    values = {"batch": batch, "length": length}
    try:
        value = evaluate(extent, values)
    except NoExtent:
        return
    assert abs(value) <= MAX_NUMBER
    text = extent_text(extent).replace("min(", "min_(").replace("max(", "max_(")
    same = eval(text, {"min_": min, "max_": max, **values})  # the value of the text that users see
    assert same == value
    spec = ValueSpec(name="y", dtype="float32", shape=(extent,))
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ValueSpec) == spec


def chain(levels: int) -> Extent:
    extent: Extent = "length"
    for _ in range(levels):
        extent = Expr("max", (extent, 1))
    return extent


@pytest.mark.parametrize(
    "extent",
    [
        chain(40),
        Expr("+", (1,) * MAX_EXPR_NODES),
        Expr("//", (4, "length")),
        Expr("%", (4, 0)),
        Expr("//", (4, 2, 2)),
        Expr("+", (1,)),
        Expr("eval", (1, 2)),
        "width",
        1 << 63,
        None,
        True,
    ],
)
def test_what_is_no_bounded_expression_over_the_programs_dimensions_is_refused(extent: Any) -> None:
    assert not is_accepted(extent)


def test_a_tree_that_nests_beyond_any_stack_is_refused_when_it_is_read() -> None:
    deep = '["+",[' * 200_000 + "1,1" + "]]" * 200_000
    text = '{"version":2,"inputs":[],"weights":[],"nodes":[],"results":[0],"outputs":[{"name":"y",'
    with pytest.raises(RegistrationRefused):
        decode_graph(f'{text}"dtype":"float32","shape":[{deep}]}}]}}')


def test_numbers_on_the_way_do_not_grow_and_sizes_are_not_negative() -> None:
    with pytest.raises(NoExtent):
        evaluate(Expr("*", ("batch",) * 4), {"batch": 1 << 20})
    with pytest.raises(NoExtent):
        shape_at((Expr("+", ("batch", -3)),), {"batch": 2})
    with pytest.raises(NoExtent):
        evaluate("length", {"batch": 2})


HUGE: Any = Expr("*", (Expr("%", ("length", 128)), 1 << 55))  # 0 at lengths 128 and 131072


def test_a_shape_has_no_more_elements_than_a_tensor_wherever_in_its_range() -> None:
    with pytest.raises(NoExtent):
        shape_at((HUGE, HUGE), {"length": 129})
    with pytest.raises(NoExtent):
        shape_at((HUGE, 0), {"length": 129})
    with pytest.raises(NoExtent):
        shape_at((1 << 21, 1 << 20), {})
    assert shape_at((1 << 20, 1 << 20), {}) == (1 << 20, 1 << 20)


def test_a_program_has_a_bounded_number_of_extents_parts() -> None:
    """Refuse a program with too many: the server's loop computes all of them for each request."""
    sixty: Any = Expr("min", (1,) + ("length",) * 59)
    x = ValueSpec(name="x", dtype="float32", shape=("length",))

    def check(extents: int) -> None:
        outputs = [ValueSpec(name=f"y{n}", dtype="float32", shape=(sixty,)) for n in range(extents)]
        check_signature((x,), outputs, (Dim("length", 1, 8),))

    check(16)
    with pytest.raises(RegistrationRefused):
        check(17)


@pytest.mark.parametrize(
    "dims",
    [
        [Dim("a", 0, 2)],
        [Dim("a", 3, 2)],
        [Dim("a", 1, MAX_EXTENT + 1)],
        [Dim("A b", 1, 2)],
        [Dim("a", 1, 2)] * 2,
        [Dim(f"d{n}", 1, 2) for n in range(7)],
    ],
)
def test_dimensions_that_are_none_are_refused(dims: list[Dim]) -> None:
    with pytest.raises(RegistrationRefused):
        check_dims(dims)


def test_a_requests_shapes_say_what_the_names_are_or_contradict_each_other() -> None:
    shapes = [("batch", "length"), ("batch", 3)]
    assert values_of(shapes, [(2, 7), (2, 3)]) == {"batch": 2, "length": 7}
    assert values_of(shapes, [(2, 7), (1, 3)]) is None
    assert values_of(shapes, [(2, 7), (2, 4)]) is None
    assert values_of(shapes, [(2, 7, 1), (2, 3)]) is None
    dims = (Dim("batch", 2, 9), Dim("length", 4, 64))
    assert (batch_range(dims), batch_range(dims[1:])) == ((2, 9), (1, 1))
    assert at_batch(dims, 5) == {"batch": 5, "length": 64}
    assert next(iter(corners(dims))) == {"batch": 2, "length": 64}
    assert len(list(corners(dims))) == 1 + 4


# ---- what a request may be -----------------------------------------------------------------------

HALF = Expr("//", (Expr("+", ("length", 1)), 2))


def manifest() -> Manifest:
    return plain_manifest(
        digest="d" * 64,
        inputs=(
            ValueSpec(name="ids", dtype="int64", shape=("batch", "length")),
            ValueSpec(name="mask", dtype="int64", shape=("batch", "length")),
        ),
        outputs=(
            ValueSpec(name="y", dtype="float32", shape=("batch", HALF, 256)),
            ValueSpec(name="z", dtype="float32", shape=(Expr("+", ("length", -1)),)),
        ),
        dims=(Dim("batch", 1, 8), Dim("length", 1, 512)),
    )


def ask(*shapes: tuple[int, ...]) -> Any:
    tensors = [
        WireTensor(name="", dtype="int64", shape=shape, frame=n) for n, shape in enumerate(shapes)
    ]
    header = RequestHeader(v=1, op="infer", id="1", model="m", inputs=tuple(tensors))
    sizes = [8 * shape[0] * shape[1] for shape in shapes]
    announced = ModelAvailable(model="m", manifest=manifest(), priority=1)  # type: ignore[arg-type]
    return check_infer(header, sizes, announced, 1 << 30)


def test_a_reply_has_the_room_that_the_requests_own_shape_asks_for() -> None:
    assert ask((2, 7), (2, 7)).reply_bytes == 2 * 4 * 256 * 4 + 512
    assert ask((8, 512), (8, 512)).reply_bytes == 8 * 256 * 256 * 4 + 2048
    assert ask((1, 1), (1, 1)).reply_bytes == 1024  # one of the outputs has 0 bytes


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([(9, 7), (9, 7)], '"ids" expects int64[1..8,1..512], got int64[9,7]'),
        ([(1, 513), (1, 513)], '"ids" expects int64[1..8,1..512], got int64[1,513]'),
        ([(2, 7), (2, 8)], '"mask" expects int64[batch=2,length=7], got int64[2,8]'),
        ([(0, 7), (0, 7)], "got int64[0,7]"),
    ],
)
def test_a_wrong_extent_is_told_with_the_range_or_with_what_another_input_has(
    shapes: list[tuple[int, ...]], words: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        ask(*shapes)
    assert words in refused.value.message


def test_a_reply_that_no_memory_could_hold_is_refused_before_room_is_asked_for() -> None:
    huge = ValueSpec(name="y", dtype="float32", shape=(HUGE, HUGE))
    x = ValueSpec(name="x", dtype="float32", shape=("length",))
    dims = (Dim("length", 128, 128 << 10),)
    signed = msgspec.structs.replace(manifest(), inputs=(x,), outputs=(huge,), dims=dims)
    check_signature(signed.inputs, signed.outputs, signed.dims)  # checks only ends of the range
    announced = ModelAvailable(model="m", manifest=signed, priority=1)  # type: ignore[arg-type]
    tensor = WireTensor(name="", dtype="float32", shape=(129,), frame=0)
    header = RequestHeader(v=1, op="infer", id="1", model="m", inputs=(tensor,))
    with pytest.raises(InvalidInput, match="cannot compute length=129"):
        check_infer(header, [4 * 129], announced, 1 << 30)


@pytest.mark.parametrize(
    "changed",
    [
        {"total_bytes": 1 << 64},
        {"outputs": (ValueSpec(name="y", dtype="float32", shape=(Expr("//", (4, 0)),)),)},
        {"outputs": (ValueSpec(name="y", dtype="float32", shape=(1 << 70,)),)},
        {"outputs": (ValueSpec(name="y", dtype="int1", shape=(1,)),)},
        {"dims": (Dim("batch", 1, 1 << 60), Dim("length", 1, 2))},
    ],
)
def test_a_manifest_whose_numbers_are_not_bounded_is_none(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    """The builder of a client's program writes the manifest, and the server calculates with it."""
    save_manifest(tmp_path, manifest())
    assert load_manifest(tmp_path) == manifest()
    save_manifest(tmp_path, msgspec.structs.replace(manifest(), **changed))
    with pytest.raises(RegistrationRefused):
        load_manifest(tmp_path)


def read(inputs: Any) -> Any:
    """Return the inputs of a registration as the server reads them."""
    request = Body("register", {"source": "s", "inputs": inputs}).rest(RegisterRequest)
    check(request)
    return request.inputs


def test_an_input_is_written_with_ranges_and_travels() -> None:
    name, spec = parse_input("ids=1..8x1..512:int64")
    assert (name, spec) == ("ids", (((1, 8), (1, 512)), "int64"))
    assert read({name: spec}) == {"ids": (((1, 8), (1, 512)), "int64")}
    for wrong in ("1..x3", "..8", "1..2..3", "8..", "-1..4"):
        with pytest.raises(ValueError, match="is not of the form"):
            parse_input(wrong)
    for extent in ([8, 1], [0, 4], [1], [1, 2, 3], [1, True], "1..8"):
        with pytest.raises(InvalidInput):
            read({"x": [[extent], "int64"]})
