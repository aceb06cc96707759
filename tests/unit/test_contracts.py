"""Contracts of the allowed operators: they refuse calls that torch accepts, but kernels do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeswitch.base.errors import InvalidInput, RegistrationRefused
from pipeswitch.programs.graphs import contracts
from pipeswitch.programs.graphs.bundle import Graph, Node, check_graph
from pipeswitch.programs.graphs.graph import check_on_meta, check_shapes, resolve
from pipeswitch.programs.graphs.operators import BY_CONTRACT, CHECKED_BY_META, OVERLOADS
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.layout import GroupSpec, ValueSpec
from pipeswitch.programs.running.executor import GraphProgram
from tests.unit.manifests import plain_manifest, plain_tensor

TARGETS = [
    f"aten.{name}.{suffix}" for name in sorted(OVERLOADS) for suffix in sorted(OVERLOADS[name])
]


def test_every_operator_is_checked_by_meta_or_has_a_contract_and_none_is_both() -> None:
    assert set(OVERLOADS) == CHECKED_BY_META | BY_CONTRACT
    assert not CHECKED_BY_META & BY_CONTRACT
    assert set(contracts.CONTRACTS) == BY_CONTRACT


@pytest.mark.parametrize("target", TARGETS)
def test_an_overload_on_the_list_computes_tensors_and_writes_nothing_but_its_own(
    target: str,
) -> None:
    schema = resolve(target)._schema
    name = target.split(".")[1]
    written = [
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    assert written == ([schema.arguments[0].name] if name.endswith("_") and name[0] != "_" else [])
    assert all("Tensor" in str(value.type) or name.startswith("sym_") for value in schema.returns)
    assert not [a for a in schema.arguments if str(a.type) in ("Any", "Generator")]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


LSTM = ([meta(1, 2, 3), meta(1, 2, 3)], [meta(12, 4), meta(12, 3)], False, 1, 0.0, False, False)
SOUND: dict[str, tuple[str, tuple[Any, ...], list[int]]] = {
    "batch_norm": (
        "batch_norm.default",
        (meta(2, 3, 4), meta(3), meta(3), meta(3), meta(3), False, 0.1, 1e-5, False),
        [2, 3, 4],
    ),
    "weight_norm": ("_weight_norm.default", (meta(5, 4), meta(5, 1), 0), [5, 4]),
    "sampler": (
        "grid_sampler_3d.default",
        (meta(1, 1, 2, 2, 2), meta(1, 4, 4, 4, 3), 1, 0, False),
        [1, 1, 4, 4, 4],
    ),
    "lstm": ("lstm.input", (meta(5, 2, 4), *LSTM, False), [5, 2, 3]),
    "attention": (
        "scaled_dot_product_attention.default",
        (meta(2, 4, 5, 8), meta(2, 4, 6, 8), meta(2, 4, 6, 7), meta(1, 1, 5, 6)),
        [2, 4, 5, 7],
    ),
    "conv2d": (
        "conv2d.default",
        (meta(2, 6, 8, 8), meta(4, 3, 3, 3), meta(4), [2, 1], [1, 1], [1, 1], 2),
        [2, 4, 4, 8],
    ),
    "conv_transpose2d": (
        "conv_transpose2d.input",
        (meta(2, 4, 5, 5), meta(4, 3, 3, 3), None, [2], [1, 1], [1], 1, [1, 1]),
        [2, 3, 10, 10],
    ),
    "linear": ("linear.default", (meta(2, 5, 4), meta(3, 4), meta(3)), [2, 5, 3]),
    "softmax of another dtype": ("softmax.int", (meta(2, 3), 1, torch.float64), [2, 3]),
    "a norm's weights of another dtype": (
        "rms_norm.default",
        (meta(2, 3, dtype=torch.float16), [3], meta(3)),
        [2, 3],
    ),
    "a padding that cuts": ("pad.default", (meta(1, 1, 5), [2, -1], "constant"), [1, 1, 6]),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", SOUND)
def test_what_torchs_own_modules_ask_for_is_accepted(name: str) -> None:
    target, args, extents = SOUND[name]
    result = contracts.guarded(resolve(f"aten.{target}"))(*args)
    result = result[0] if isinstance(result, tuple) else result
    expected = resolve(f"aten.{target}")(*args)
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert list(result.shape) == list(expected.shape) == extents
    assert result.dtype == expected.dtype


BROKEN: dict[str, tuple[Any, ...]] = {
    "a weight of one element": (
        "batch_norm.default",
        (meta(2, 3, 4), meta(1), None, meta(3), meta(3), False, 0.1, 1e-5, False),
    ),
    "bytes as bool": ("view.dtype", (meta(4, dtype=torch.uint8), torch.bool)),
    "a norm of one row": ("_weight_norm.default", (meta(60000, 4), meta(1, 1), 0)),
    "a mode that is not": (
        "grid_sampler_3d.default",
        (meta(1, 1, 2, 2, 2), meta(1, 4, 4, 4, 3), 7, 0, False),
    ),
    "a state of another batch": ("lstm.input", (meta(5, 3, 4), *LSTM, False)),
    "parameters that are missing": (
        "lstm.input",
        (meta(5, 2, 4), LSTM[0], LSTM[1][:1], *LSTM[2:], False),
    ),
    "a mask that is too small": (
        "scaled_dot_product_attention.default",
        (meta(2, 4, 5, 8), meta(2, 4, 6, 8), meta(2, 4, 6, 8), meta(1, 1, 2, 6)),
    ),
    "a bias that is broadcast": ("linear.default", (meta(2, 4), meta(3, 4), meta(1))),
    "a scale next to nothing": ("upsample_nearest1d.default", (meta(1, 1, 4), [8], 1e-300)),
    "training": ("dropout.default", (meta(4), 0.5, True)),
    "a scale that is not the sizes'": (
        "_upsample_bilinear2d_aa.default",
        (meta(2, 4, 3, 8), [4, 4], False, 0.3, 0.3),
    ),
    "the least integer by -1": (
        "div.Scalar_mode",
        (meta(4, dtype=torch.int64), -1),
        {"rounding_mode": "trunc"},
    ),
    "integers by what is not known": (
        "div_.Tensor_mode",
        (meta(4, dtype=torch.int32), meta(4, dtype=torch.int32)),
        {"rounding_mode": "trunc"},
    ),
    "a median of what a stride repeats": ("median.dim", (meta(1, 4).expand(3, 4), 1)),
    "a circle with a gap": ("pad.default", (meta(1, 1, 5), [5, -5], "circular")),
    "a stride of nothing": ("avg_pool2d.default", (meta(1, 1, 4, 4), [2, 2], [0, 0])),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_contract_is_refused_whatever_torch_would_say(name: str) -> None:
    target, args, *named = BROKEN[name]
    with pytest.raises(contracts.BrokenContract):
        contracts.guarded(resolve(f"aten.{target}"))(*args, **(named[0] if named else {}))


def test_results_that_are_for_a_backward_pass_cannot_be_reached() -> None:
    """Such results have wrong extents on meta tensors: an empty one would pass for a weight."""
    norm = contracts.guarded(resolve("aten.native_layer_norm.default"))
    [result] = norm(meta(2, 3), [3], None, None, 1e-5)
    assert list(result.shape) == [2, 3]
    assert "_native_batch_norm_legit_no_training" not in OVERLOADS


def narrowing(batch_max: int) -> Graph:
    """Return a graph that returns at most two rows of x [B, 4], which is right only for B <= 2."""
    graph = Graph(
        version=2,
        inputs=(ValueSpec(name="x", dtype="float32", shape=("batch", 4)),),
        weights=(),
        nodes=(Node("aten.slice.Tensor", ({"v": 0}, 0, 0, 2), {}),),
        results=(1,),
        outputs=(ValueSpec(name="y", dtype="float32", shape=("batch", 4)),),
        dims=(Dim("batch", 1, batch_max),),
    )
    check_graph(graph)
    return graph


def test_every_batch_of_the_range_is_looked_at() -> None:
    check_shapes(narrowing(2), [])
    check_on_meta(narrowing(5), [], [{"batch": 1}, {"batch": 2}])
    with pytest.raises(RegistrationRefused, match="output"):
        check_shapes(narrowing(5), [])


def test_of_more_shapes_than_a_registration_waits_for_the_ends_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeswitch.programs.graphs.graph.MAX_CHECKS", 2)
    assert check_shapes(narrowing(2), []).is_whole
    with pytest.raises(RegistrationRefused, match="at batch=3 declared"):
        check_shapes(narrowing(3), [])


def a_program(nodes: tuple[Node, ...], y: Any, *, is_whole: bool) -> Any:
    """Return a program with an input x [batch, 4] and a weight [3, 4], in one group."""
    graph = Graph(
        version=2,
        inputs=(ValueSpec(name="x", dtype="float32", shape=("batch", 4)),),
        weights=("w",),
        nodes=nodes,
        results=(1 + len(nodes),),
        outputs=(ValueSpec(name="y", dtype="float32", shape=y),),
        dims=(Dim("batch", 1, 64),),
    )
    check_graph(graph)
    group = GroupSpec(
        offset_bytes=0, size_bytes=48, tensors=(0,), first_node=0, end_node=len(nodes), label=""
    )
    manifest = plain_manifest(
        total_bytes=48,
        tensors=(plain_tensor("w", (3, 4)),),
        groups=(group,),
        inputs=graph.inputs,
        outputs=graph.outputs,
        dims=graph.dims,
        extra={"is_whole": is_whole},
    )
    bound = GraphProgram(manifest, graph, "cpu").bind(lambda _: torch.ones(3, 4))
    return lambda batch: bound.run([torch.ones(batch, 4)], lambda index: None)[0]


WIDER = (
    Node("aten.sym_size.int", ({"v": 0}, 0)),
    Node("aten.slice.Tensor", ({"v": 1}, 1, 0, {"v": 2})),  # the first ``batch`` columns of w
    Node("aten.linear.default", ({"v": 0}, {"v": 3})),
)


def test_at_a_shape_that_was_not_tried_each_call_asks_its_contract(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut the weight to ``batch`` columns. Batches from 4 were tried; smaller ones keep too few."""
    run = a_program(WIDER, ("batch", 3), is_whole=False)
    assert run(4).shape == (4, 3)
    with pytest.raises(InvalidInput, match="not as wide as the weight"):
        run(3)
    arguments: list[Any] = []
    linear = contracts.CONTRACTS["linear"]
    monkeypatch.setitem(
        contracts.CONTRACTS, "linear", lambda g: (arguments.append(g), linear(g))[0]
    )  # type: ignore[index]
    run = a_program(WIDER, ("batch", 3), is_whole=False)
    for batch in (5, 6, 5, 6, 5):
        run(batch)
    assert len(arguments) == 2, "once for each shape"
    a_program(WIDER, ("batch", 3), is_whole=True)(5)
    assert len(arguments) == 2, "all were tried"


def test_what_is_returned_is_what_the_signature_says_or_an_error() -> None:
    cut = (Node("aten.slice.Tensor", ({"v": 0}, 0, 0, 2)),)
    run = a_program(cut, ("batch", 4), is_whole=False)
    assert run(2).shape == (2, 4)
    for _ in range(2):
        text = r"is float32\[2, 4\] at batch=3, its signature says float32\[3, 4\]"
        with pytest.raises(InvalidInput, match=text):
            run(3)


def test_what_is_returned_has_the_dtype_that_the_signature_says() -> None:
    """A float32 tensor plus a float64 tensor is float32 only if the latter has no dimensions."""
    widened = (
        Node("aten.sym_size.int", ({"v": 0}, 0)),
        Node("aten.new_zeros.default", ({"v": 0}, [{"v": 2}]), {"dtype": {"dtype": "float64"}}),
        Node("aten.squeeze.default", ({"v": 3},)),
        Node("aten.add.Tensor", ({"v": 0}, {"v": 4})),
    )
    run = a_program(widened, ("batch", 4), is_whole=False)
    assert run(1).dtype is torch.float32
    with pytest.raises(InvalidInput, match=r"float64\[4, 4\] at batch=4, .* float32\[4, 4\]"):
        run(4)


def test_of_a_shape_that_was_tried_no_more_is_kept_than_what_its_dimensions_are() -> None:
    """For a tried shape, keep only the values of dimensions: 500 extents may use one dimension."""
    spec = ValueSpec(name="x", dtype="float32", shape=("batch", "length", "batch", 1))
    graph = Graph(
        version=2,
        inputs=(spec,),
        weights=(),
        nodes=(),
        results=(0,),
        outputs=(spec,),
        dims=(Dim("batch", 1, 64), Dim("length", 1, 64)),
    )
    manifest = plain_manifest(inputs=(spec,), outputs=(spec,), dims=graph.dims)
    program = GraphProgram(manifest, graph, "cpu")
    value = torch.ones(2, 3, 2, 1)
    program.returned([value], [value])
    assert program._tried == {(2, 3)}
    assert program.is_tried((value.shape,))
    assert not program.is_tried(((3, 2, 3, 1),))
    with pytest.raises(InvalidInput):
        program.is_tried(((2, 3, 4, 1),))


@pytest.mark.parametrize("is_batch_first", [True, False])
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_what_a_recurrent_layer_returns_is_known_without_its_steps(
    kind: Any, is_batch_first: bool
) -> None:
    layer = kind(4, 6, num_layers=2, batch_first=is_batch_first, bidirectional=True).eval()
    value = torch.randn(3, 5, 4)
    with torch.no_grad():
        output, state = layer(value)
    states = list(state) if isinstance(state, tuple) else [state]
    hx = states if len(states) > 1 else states[0]
    results = contracts.recurrent_results(value, hx, True, is_batch_first)
    for ours, theirs in zip(results, [output, *states], strict=True):
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
