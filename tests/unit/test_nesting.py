"""Nested inputs and outputs (trees of tensors): round trips, and refusals of malicious trees."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.base.errors import InvalidInput, RegistrationRefused, RemoteProtocolError
from pipeswitch.base.model_options import RegisterRequest
from pipeswitch.client.calls import FinalReply
from pipeswitch.client.model_sources import declared
from pipeswitch.client.tensors import Result, from_reply, to_frames
from pipeswitch.frontend.intake.validation import check_infer
from pipeswitch.frontend.registration import check
from pipeswitch.frontend.transport.replies import reply_frames
from pipeswitch.ipc.messages.base import ModelName
from pipeswitch.programs.compiler.naming import Flat, named_inputs
from pipeswitch.programs.graphs import bundle
from pipeswitch.programs.interface.pytree import (
    MAX_DEPTH,
    MAX_KEY_CHARS,
    MAX_PARTS,
    check_tree,
    flatten,
    unflatten,
)
from pipeswitch.programs.running.values import nested_outputs
from pipeswitch.programs.spec import load_manifest, save_manifest
from pipeswitch.scheduler.state.events import ModelAvailable
from pipeswitch.wire.frames import MAX_TENSORS, RequestHeader, WireTensor, decode_reply
from pipeswitch.wire.request_timing import RequestTiming
from tests.unit.manifests import plain_manifest


class Leaf:
    """Stand-in for a tensor."""


def is_leaf(value: Any) -> bool:
    return isinstance(value, Leaf)


keys = st.text("abc", min_size=1, max_size=3) | st.integers(-2, 99)
values = st.recursive(
    st.none() | st.builds(Leaf),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(values)
def test_what_was_flattened_is_whole_again_also_after_a_journey(value: Any) -> None:
    tree, named = flatten(value, "output", is_leaf)
    for travelled in (
        msgspec.json.decode(msgspec.json.encode(tree)),
        msgspec.msgpack.decode(msgspec.msgpack.encode(tree)),
    ):
        check_tree(travelled, "output", named)
        assert unflatten(travelled, named) == value


def test_names_say_where_a_tensor_is() -> None:
    one = Leaf()
    assert list(flatten({"cache": [{"key": one}, None, (one,)]}, "output", is_leaf)[1]) == [
        "cache.0.key",
        "cache.2.0",
    ]
    assert list(flatten((one, {"a": one}), "output", is_leaf)[1]) == ["y0", "y1.a"]
    assert list(flatten(one, "output", is_leaf)[1]) == ["y"]


def deep(levels: int) -> Any:
    tree: Any = "a"
    for _ in range(levels):
        tree = {"list": [tree]}
    return tree


@pytest.mark.parametrize(
    "tree",
    [
        {"list": ["a", "a"]},
        {"list": ["a", "b"]},
        {"list": []},
        None,
        7,
        True,
        ["a"],
        {},
        {"set": ["a"]},
        {"list": "a"},
        {"list": ["a"], "tuple": []},
        {"dict": ["ab"]},
        {"dict": [["k", "a", None]]},
        {"dict": [["k", "a"], ["k", None]]},
        {"dict": [[None, "a"]]},
        {"dict": [[True, "a"]]},
        {"dict": [[["k"], "a"]]},
        {"dict": [["\x1b[2J", "a"]]},
        {"dict": [["k" * 257, "a"]]},
        {"dict": [[1 << 63, "a"]]},
        {"dict": {"k": "a"}},
        deep(MAX_DEPTH + 1),
        {"list": ["a", *[None] * MAX_PARTS]},
        {"dict": [["k", "a"], *[[n, None] for n in range(MAX_PARTS)]]},
        {"dict": [["k" * (MAX_KEY_CHARS + 1), "a"]]},
    ],
)
def test_a_tree_that_is_none_is_refused_wherever_it_comes_from(tree: Any, tmp_path: Path) -> None:
    with pytest.raises(RegistrationRefused):
        check_tree(tree, "output", ["a"])
    if tree is None:
        return  # the rest does not apply, because a signature without a tree is valid
    graph = {
        "version": 2,
        "inputs": [spec("x")],
        "weights": [],
        "nodes": [],
        "results": [0],
        "outputs": [spec("a")],
    }
    for place in ("takes", "returns"):
        with pytest.raises(RegistrationRefused):
            bundle.decode_graph(msgspec.json.encode({**graph, place: tree}).decode())
    save_manifest(tmp_path, msgspec.structs.replace(MANIFEST, returns=tree))
    with pytest.raises(RegistrationRefused):
        load_manifest(tmp_path)
    with pytest.raises(RegistrationRefused):
        check(RegisterRequest(source="s", inputs={"x": ((1,), "uint8")}, takes=tree))
    wire = WireTensor(name="a", dtype="uint8", shape=(1,), frame=0)
    reply = FinalReply(request_id="1", body={"returns": tree}, outputs=(wire,), frames=[b"1"])
    with pytest.raises(RemoteProtocolError):
        from_reply("m", False, reply)


def test_a_tree_of_thousands_of_levels_is_refused_like_any_other() -> None:
    text = '{"list": [' * 5000 + "]}" * 5000
    with pytest.raises(RegistrationRefused):
        bundle.decode_graph(bundle.encode_graph(GRAPH)[:-1] + f',"returns":{text}}}')


def spec(name: str) -> dict[str, Any]:
    return {"name": name, "dtype": "float32", "shape": [2]}


def value(name: str) -> bundle.ValueSpec:
    return bundle.ValueSpec(name=name, dtype="float32", shape=(2,))


GRAPH = bundle.Graph(
    version=2, inputs=(value("x"),), weights=(), nodes=(), results=(0,), outputs=(value("y"),)
)
MANIFEST = plain_manifest(
    inputs=(value("x"), value("state.h"), value("state.c")),
    outputs=(value("a"),),
    takes={"dict": [["x", "x"], ["state", {"dict": [["h", "state.h"], ["c", "state.c"]]}]]},
)


def test_a_bundle_without_trees_is_as_it_was() -> None:
    assert "takes" not in bundle.encode_graph(GRAPH)
    assert bundle.decode_graph(bundle.encode_graph(GRAPH)) == GRAPH
    arrays = {"y": np.zeros(2)}
    assert Result("m", "1", arrays, RequestTiming()).value is arrays["y"]
    both = Result("m", "1", {"a": 1, "b": 2}, RequestTiming())
    assert both.value == dict(both) == {"a": 1, "b": 2}
    assert [*both] == ["a", "b"]


def admitted(nested: Any) -> dict[str, float]:
    """Return the first number of each input, as the model gets it."""
    tensors, frames, _ = to_frames(nested)
    header = RequestHeader(v=1, op="infer", id="1", model="m", inputs=tensors)
    announced = ModelAvailable(model=ModelName("m"), manifest=MANIFEST, priority=0)
    request = check_infer(header, [len(frame) for frame in frames], announced, 1 << 20)
    return {one.name: np.frombuffer(frames[one.frame], "float32")[0] for one in request.inputs}


X, H, C = (np.full(2, n, "float32") for n in range(3))


@dataclasses.dataclass(frozen=True)
class State:
    h: Any
    c: Any


def test_an_answer_with_the_largest_tree_is_a_header_that_its_client_reads() -> None:
    half, first = MAX_KEY_CHARS // 2, 0x1F600
    keys = [chr(first + n // 64) * half + chr(first + n % 64) * half for n in range(MAX_PARTS - 1)]
    names = [chr(first + n) * bundle.MAX_NAME_CHARS for n in range(MAX_TENSORS)]
    leaves = [*names, *[None] * (len(keys) - len(names))]
    tree = {"dict": [[key, leaf] for key, leaf in zip(keys, leaves, strict=True)]}
    check_tree(tree, "output", names)
    outputs = tuple(
        WireTensor(name=name, dtype="float32", shape=(1,), frame=n) for n, name in enumerate(names)
    )
    magic, header = reply_frames("1", body={"returns": tree}, outputs=outputs)
    frames = [magic, header, *[bytes(4)] * len(names)]
    assert decode_reply(frames).body["returns"] == tree


def test_a_list_that_is_in_itself_is_no_input() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for endless_one in (endless, {"x": endless}, {"x": {"y": endless}, "z": X}):
        with pytest.raises(InvalidInput):
            to_frames(endless_one)


def test_of_a_dict_of_too_many_few_are_looked_at() -> None:
    parts = []

    class Key(str):
        def __len__(self) -> int:
            parts.append(self)
            return 1

    with pytest.raises(RegistrationRefused):
        check_tree({"dict": [[Key(n), None] for n in range(9 * MAX_PARTS)]}, "output", [])
    assert len(parts) < 2 * MAX_PARTS


@pytest.mark.parametrize(
    "nested",
    [
        {"x": X, "state": {"c": C, "h": H}},
        {"state": State(H, C), "x": X},
        (X, {"c": C, "h": H}),
        (X, State(H, C), None),
        {"x": X, "state.h": H, "state.c": C},
        [X, H, C],
    ],
)
def test_inputs_reach_the_model_in_its_order_however_they_were_nested(nested: Any) -> None:
    assert admitted(nested) == {"x": 0, "state.h": 1, "state.c": 2}


@pytest.mark.parametrize(
    ("nested", "says"),
    [
        ((X, {"h": H}), "takes 3 inputs"),
        ((X, {"h": H, "d": C}), 'no input "state.d"; did you mean'),
        ({"x": X, "state": [H, C]}, 'no input "state.0"'),
        ((X, {"h": H, "c": C}, X), "takes 3 inputs"),
        ({"x": X, "state": {"h": H, "c": C}, "state.h": H}, "two have the name 'state.h'"),
    ],
)
def test_inputs_that_nest_otherwise_are_refused(nested: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        admitted(nested)


def test_lists_of_numbers_stay_arrays() -> None:
    for one, shape in (([[1.0, 2.0]], (1, 2)), ([np.float32(1), np.float32(2)], (2,)), ([], (0,))):
        assert [t.shape for t in to_frames({"x": one})[0]] == [shape]
    assert [(t.name, t.shape) for t in to_frames([[1, 2], [3, 4]])[0]] == [("", (2, 2))]


def test_declared_inputs_nest_too() -> None:
    pair = ((2, (1, 512)), "int64")
    assert declared({"x": pair}) == (None, {"x": [[2, [1, 512]], "int64"]})
    takes, flat = declared({"x": pair, "cache": [{"key": pair}, None]})
    assert list(flat) == ["x", "cache.0.key"]
    assert unflatten(takes, dict.fromkeys(flat, 1)) == {"x": 1, "cache": [{"key": 1}, None]}
    with pytest.raises(InvalidInput):
        declared({"x": {"key": 3}})


class Echo(torch.nn.Module):
    def forward(self, x: torch.Tensor, state: Any) -> Any:
        return {"seen": (x, type(state).__name__), "state": state}


def test_a_module_is_called_with_the_classes_of_its_example() -> None:
    """In a call, a numpy array of the example is a tensor; a frozen dataclass keeps its class."""
    example = named_inputs(Echo(), (torch.zeros(2), State(np.ones(2), None)), None)
    assert example.names == ["x", "state.h"]
    answer = Flat(Echo(), example).nested([torch.ones(2), torch.full((2,), 5.0)])
    assert answer["seen"][1] == "State"
    assert answer["state"].h.tolist() == [5, 5]
    assert answer["state"].c is None
    tree, named = nested_outputs({"state": answer["state"]})
    assert unflatten(tree, named) == {"state": {"h": answer["state"].h, "c": None}}


@pytest.mark.parametrize(
    ("example", "names", "says"),
    [
        (
            (torch.zeros(2), {"a.b": torch.zeros(2), "a": {"b": torch.zeros(2)}}),
            None,
            "two have the name",
        ),
        ((torch.zeros(2), {"n": 3}), None, "only tensors and None are supported"),
        ((torch.zeros(2), torch.zeros(2)), ["x", "x"], "names x, x"),
    ],
)
def test_an_example_that_cannot_be_named_is_refused(example: Any, names: Any, says: str) -> None:
    with pytest.raises(RegistrationRefused, match=says):
        named_inputs(Echo(), example, names)


@pytest.mark.parametrize("other", [np.zeros(2), [np.zeros(2), np.zeros(3)]])
def test_a_name_and_a_place_that_are_one_lose_no_argument(other: Any) -> None:
    with pytest.raises(InvalidInput):
        to_frames({1: np.zeros(2), "1": other})
