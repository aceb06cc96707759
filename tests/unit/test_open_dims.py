"""Open dimensions, whose extents each request chooses, and the values that callers may choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.programs.compiler.dynamic import asked_axes, working_end
from pipeswitch.programs.interface.dims import Dim, Values

NAMES = ["x", "cache.0.k", "cache.1.k", "cache.1.v"]
SHAPES = [(1, 4), (1, 8, 7, 16), (1, 8, 7, 16), (1, 8, 7, 16)]


def test_a_pattern_names_each_layers_cache() -> None:
    axes = asked_axes(NAMES, SHAPES, {"cache.*.[kv]": {2: (1, 512)}})
    assert axes == {(number, 2): Dim("dim2", 1, 512) for number in (1, 2, 3)}
    with pytest.raises(RegistrationRefused):
        asked_axes(NAMES, SHAPES, {"cache.*.q": {2: (1, 512)}})


@pytest.mark.parametrize(
    ("shape", "name"),
    [((1, 3, 32, 32), "height"), ((2, 1, 28, 28), "height"), ((1, 8, 7, 16), "dim2")],
)
def test_only_a_pictures_side_is_a_height(shape: tuple[int, ...], name: str) -> None:
    assert asked_axes(["x"], [shape], {"x": {2: (1, 64)}})[0, 2].name == name


LENGTH = torch.export.Dim("length", min=1, max=64)


@pytest.mark.parametrize(
    "dims",
    [
        {"x": {1: LENGTH}, "y": None},
        {"x": (None, LENGTH), "y": {}},
        ({1: LENGTH}, None),
        [(None, ("length", 1, 64))],
    ],
)
def test_torchs_dynamic_shapes_will_do(dims: Any) -> None:
    assert asked_axes(["x", "y"], [(1, 9), (1, 3)], dims) == {(0, 1): Dim("length", 1, 64)}


def test_torchs_dimensions_without_ends_have_ours() -> None:
    for torch_dim in (torch.export.Dim("length"), torch.export.Dim.AUTO):
        [dim] = asked_axes(["x"], [(1, 9)], {"x": {1: torch_dim}}).values()
        assert dim == Dim("length", 1, 512)


@pytest.mark.parametrize(
    ("broken", "works", "end"),
    [
        (1, lambda n: n >= 2, (2, None)),
        (1, lambda n: n >= 5, (21, None)),
        (1, lambda n: n == 40, (40, None)),
        (512, lambda n: n <= 128, (None, 99)),
        (512, lambda n: n < 512, (None, 511)),
        (41, lambda n: n <= 40, (None, 40)),
    ],
)
def test_a_range_ends_where_it_is_proved(broken: int, works: Any, end: Any) -> None:
    lengths: list[int] = []

    def is_same(values: Values) -> bool:
        lengths.append(values["length"])
        return bool(works(values["length"]))

    values = {"batch": 1, "length": 40}
    assert working_end({"batch": 1, "length": broken}, values, is_same) == {"length": end}
    assert len(lengths) <= 9, "the distance is halved"
    assert working_end({"batch": 2, "length": 40}, values, is_same) == {}
