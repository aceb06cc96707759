"""The codec that replaces pickle: it is exact for a list of types, and refuses all other types."""

from __future__ import annotations

import contextlib
import json
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeswitch.base import state_codec
from pipeswitch.base.errors import InvalidInput

Pair = namedtuple("Pair", "a b")


def round_trip(value: Any) -> Any:
    data, attachments = state_codec.encode(value)
    text = json.dumps(data, allow_nan=False)
    return state_codec.decode(json.loads(text), [a.read() for a in attachments])


def same(a: Any, b: Any) -> bool:
    """Return True if both values are equal in types and bits, at every level."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if getattr(a, "default_factory", None) is not getattr(b, "default_factory", None):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.requires_grad is b.requires_grad
            and a.dtype == b.dtype
            and a.shape == b.shape
            and bytes_of(a) == bytes_of(b)
        )
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b)


def bytes_of(tensor: torch.Tensor) -> bytes:
    dense = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return dense.view(torch.uint8).numpy().tobytes()


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.floats(width=32).map(np.float32)
    | st.integers(0, 255).map(np.uint8)
)
keys = st.integers() | st.text() | st.booleans() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.sets(st.integers() | st.text(), max_size=4)
        | st.frozensets(st.integers(), max_size=4)
        | st.dictionaries(st.text(), st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=12,
)


@given(values)
def test_decode_is_the_inverse_of_encode(value: Any) -> None:
    assert same(round_trip(value), value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(sorted(state_codec._DECODERS)) | st.text(), inner, max_size=2
            )
        ),
        max_leaves=8,
    )
)
def test_decoding_anything_raises_nothing_but_invalid_input(data: Any) -> None:
    with contextlib.suppress(InvalidInput):
        state_codec.decode(data, [b"\0" * 8])


@pytest.mark.parametrize(
    "value",
    [
        10**5000,
        -(2**53),
        -0.0,
        float("inf"),
        struct.unpack(">d", bytes.fromhex("fff8dead0000beef"))[0],
        {1: "int", "1": "str", (1, 2): "tuple", None: 0.1},
        {"tensor": "looks like a tag"},
        torch.Size([2, 3]),
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(6.0).reshape(3, 2)[:1, 1],  # dense, although its stride is 2
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        np.arange(6.0).reshape(2, 3).T,
        np.array(["ab", "c"]),
        np.str_(""),
        np.bytes_(b""),
        np.datetime64("2020-01-01T00:00:00", "25s"),
        np.float64("nan"),
        np.random.RandomState(3).get_state(),
        Pair(1, (2, Pair(3, torch.zeros(1)))),
        pathlib.Path("a/b"),
        defaultdict(int, a=1),
        defaultdict(list, {1: [2]}),
        defaultdict(None, a=1),
        nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_awkward_values_come_back_bit_for_bit(value: Any) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize("name", ["<,", "i4,f4", "(2,)f4", "O", "|V8", "<f4\n", "float32", 4, None])
def test_a_dtype_is_one_of_numpys_own_names_and_never_parsed(name: Any) -> None:
    for data in ({"array": [name, [1], 0]}, {"scalar": [name, "00000000"]}):
        with pytest.raises(InvalidInput):
            state_codec.decode(data, [bytes(4)])


def test_what_comes_back_is_a_copy_that_may_be_written() -> None:
    tensor, array = round_trip((torch.zeros(3), np.zeros(3)))
    tensor.add_(1)
    array += 1


class Thing:
    pass


class Flag(int):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Thing(),
        Thing,
        lambda: 0,
        namedtuple("Unnamed", "a")(1),
        pathlib.PurePosixPath("a"),
        Flag(1),
        np.array([Thing()]),
        1j,
        range(3),
        torch.eye(2).to_sparse(),
    ],
    ids=lambda v: type(v).__name__,
)
def test_other_types_are_refused_with_the_path_to_them(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"\$\['outer'\]\[1\]: a "):
        state_codec.encode({"outer": [0, value]})


def test_a_cycle_is_refused_and_not_followed_for_ever() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidInput):
        state_codec.encode(loop)


@pytest.mark.parametrize(
    "data",
    [
        {"x": 1},
        {},
        {"tuple": [1], "set": []},
        {"array": ["|O", [1], 0]},
        {"tensor": ["load", [1], 0]},
        {"tensor": ["float32", [3], 0]},
        {"tensor": ["float32", [1], 9]},
        {"dict": [[1, 2, 3]]},
        {"dict": [[[1], 2]]},
        {"bytes": "*"},
        {"int": "os.system"},
        {"defaultdict": ["eval", []]},
        {"path": 1},
        {"parameter": ["int64", [1], 0, True]},
    ],
    ids=str,
)
def test_malformed_data_is_refused(data: Any) -> None:
    with pytest.raises(InvalidInput):
        state_codec.decode(data, [b"\0" * 8])


def test_a_named_tuple_is_found_without_running_code_and_else_is_a_tuple() -> None:
    for module, name in (("os", "system"), ("torch", "Tensor"), (__name__, "Thing"), ("no", "x")):
        assert same(state_codec.decode({"namedtuple": [module, name, [1]]}, []), (1,))
    assert same(state_codec.decode({"namedtuple": [__name__, "Pair", [1]]}, []), (1,))
