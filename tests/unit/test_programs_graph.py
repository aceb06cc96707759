"""Graphs that are well-formed, but must be refused; and tensors over an arena's bytes."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from pipeswitch.base.errors import LocalProtocolError, RegistrationRefused
from pipeswitch.programs.compiler.checking import same_bits
from pipeswitch.programs.graphs import graph as graphs
from pipeswitch.programs.graphs.bundle import Graph, Node, check_graph
from pipeswitch.programs.graphs.operators import OVERLOADS
from pipeswitch.programs.graphs.partition import layers_of_graph
from pipeswitch.programs.graphs.schema_types import fits
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.layout import TensorSpec, ValueSpec
from pipeswitch.programs.running.tensor_views import bytes_over, tensor_over
from pipeswitch.programs.running.values import tensor_bytes
from tests.unit.test_gateway_oip import traced

X = {"v": 0}
W = {"v": 1}
FIRST = 2  # number of the value that the first node computes
NOT_FRESH = "aten.expand_as.default"


def graph(*nodes: tuple[Any, ...], result: int | None = None, shape: Any = ("batch", 4)) -> Graph:
    """Return a graph with input x and weight w [4]; its output is ``result``, or the last node."""
    graph_made = Graph(
        version=2,
        inputs=(ValueSpec(name="x", dtype="float32", shape=("batch", 4)),),
        weights=("w",),
        nodes=tuple(
            Node(target, tuple(args), kwargs[0] if kwargs else {})
            for target, args, *kwargs in nodes
        ),
        results=(FIRST + len(nodes) - 1 if result is None else result,),
        outputs=(ValueSpec(name="y", dtype="float32", shape=shape),),
        dims=(Dim("batch", 1, 8),),
    )
    check_graph(graph_made)
    return graph_made


def peak_bytes(graph: Graph, weights: list[torch.Tensor]) -> int:
    return graphs.check_shapes(graph, weights).run_memory.peak_bytes


def value(index: int) -> dict[str, int]:
    return {"v": FIRST + index}


ADD = ("aten.add_.Tensor", [value(0), value(0)])
MUTATING: dict[str, list[tuple[Any, ...]]] = {
    "straight": [("aten.add_.Tensor", [W, 1.0])],
    "through a view": [("aten.view.default", [W, [2, 2]]), ADD],
    "through a permutation": [("aten.permute.default", [W, [0]]), ADD],
    "through a list": [
        ("aten.chunk.default", [W, 2]),
        ("_operator.getitem", [value(0), 0]),
        ("aten.zero_.default", [value(1)]),
    ],
    "through dropout, whose schema does not say so": [
        ("aten.dropout.default", [W, 0.5, False]),
        ADD,
    ],
    "through a conversion to its own type": [("aten.to.dtype", [W, {"dtype": "float32"}]), ADD],
    "through another write": [("aten.detach.default", [W]), ("aten.mul_.Tensor", [value(0), 2.0])],
    "as batch statistics": [
        ("aten.batch_norm.default", [X, None, None, W, W, True, 0.1, 1e-5, False])
    ],
    "as batch statistics by keyword": [
        (
            "aten.batch_norm.default",
            [X, None, None, W, W],
            {"training": True, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False},
        )
    ],
}


@pytest.mark.parametrize("name", MUTATING)
def test_a_write_that_reaches_a_weight_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(RegistrationRefused) as caught:
        graphs.check_no_mutation(graph(*MUTATING[name]))
    assert caught.value.data["part"] == "w"


def test_a_write_to_a_bundles_input_is_refused() -> None:
    with pytest.raises(RegistrationRefused):
        graphs.check_no_mutation(graph(("aten.relu_.default", [X])))


def test_a_write_to_new_memory_is_fine() -> None:
    graphs.check_no_mutation(graph(("aten.add.Tensor", [X, W]), ("aten.relu_.default", [value(0)])))


NONSENSE: dict[str, Graph] = {
    "too many arguments": graph(("aten.relu.default", [X, X, X])),
    "too few arguments": graph(("aten.add.Tensor", [X])),
    "an unknown keyword": graph(("aten.relu.default", [X], {"beta": 1})),
    "an argument twice": graph(("aten.add.Tensor", [X, X], {"other": X})),
    "an argument of another kind": graph(("aten.relu.default", ["x"])),
    "shapes that do not fit": graph(("aten.mm.default", [X, X])),
    "an output of another shape": graph(("aten.relu.default", [X]), shape=("batch", 5)),
    "an output that is a number": graph(("aten.sym_size.int", [X, 0])),
    "an output that is a list": graph(("aten.chunk.default", [X, 2])),
    "getitem on a tensor": graph(("_operator.getitem", [X, 0])),
    "getitem beyond the end": graph(
        ("aten.chunk.default", [X, 2]), ("_operator.getitem", [value(0), 7])
    ),
    "arithmetic on tensors": graph(("_operator.mul", [X, X])),
    "arithmetic on texts": graph(("_operator.mul", ["a", 3])),
    "an integer that grows without end": graph(
        ("_operator.mul", [1 << 40, 1 << 40]), ("aten.relu.default", [X])
    ),
    "division by nothing": graph(("_operator.floordiv", [1, 0]), ("aten.relu.default", [X])),
    "more memory than there is": graph(("aten.zeros.default", [[1 << 36, 4]])),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_before_it_runs_on_data(name: str) -> None:
    def check() -> None:
        graphs.check_no_mutation(NONSENSE[name])
        graphs.check_on_meta(NONSENSE[name], [torch.zeros(4)], [{"batch": 2}])

    with pytest.raises(RegistrationRefused):
        check()


def test_a_value_is_dropped_after_its_last_use_and_kept_for_a_later_group() -> None:
    graph_made = graph(
        ("aten.relu.default", [X]),
        ("aten.add.Tensor", [value(0), W]),
        ("aten.mul.Tensor", [value(1), value(0)]),
    )
    compiled = graphs.CompiledGraph(graph_made, [(0, 1), (1, 2), (2, 3)], "cpu")
    environment = compiled.start([torch.ones(2, 4)])
    alive = []
    for call, weights in zip(compiled.calls, compiled.group_weights, strict=True):
        call(environment, [torch.ones(4)] * len(weights))
        alive.append(sorted(environment))
    assert alive == [[2], [2, 3], [4]]
    assert compiled.group_weights == [(), (0,), ()]
    assert torch.equal(compiled.finish(environment, [])[0], torch.full((2, 4), 2.0))


def test_a_kernel_that_writes_nothing_answers_zeros_and_not_what_was_freed_before() -> None:
    """If a kernel leaves bytes unwritten, they could be values of another request."""

    def writes_nothing(x: torch.Tensor, *rest: object) -> torch.Tensor:
        return torch.cat([torch.empty(1 << 10) for _ in range(64)])

    answers = {}
    for target in ("aten.grid_sampler_3d.default", "aten.relu.default"):
        arguments = [X, X, 0, 0, False] if "grid" in target else [X]
        graph_made = graph((target, arguments))
        compiled = graphs.CompiledGraph(graph_made, [(0, 1)], "cpu", lambda _: writes_nothing)
        freed = [torch.full((1 << 10,), 7.0) for _ in range(64)]
        del freed  # so that the next allocations get this memory
        environment = compiled.start([torch.ones(1, 4)])
        compiled.calls[0](environment, [])
        answers[target] = compiled.finish(environment, [])[0]
    assert not answers["aten.grid_sampler_3d.default"].any()
    assert (answers["aten.relu.default"] == 7.0).any(), "all was clean: this test shows nothing"


def test_a_view_that_fits_only_the_cpus_layout_is_a_copy_on_a_gpu() -> None:
    """A GPU's attention returns another layout than the CPU's, for which the graph was exported."""
    other_layout = torch.arange(8.0).reshape(4, 2).t()
    for write, may_copy in (("aten.relu.default", True), ("aten.relu_.default", False)):
        view = ("aten.view.default", [X, [8]])
        graph_made = graph(view, (write, [value(0)]), ("aten.add.Tensor", [value(0), value(1)]))
        compiled = graphs.CompiledGraph(graph_made, [(0, 3)], "cuda:0")
        environment = compiled.start([other_layout])
        if not may_copy:  # the write must reach the input, as on the CPU
            with pytest.raises(RuntimeError, match="view size"):
                compiled.calls[0](environment, [])
            continue
        compiled.calls[0](environment, [])
        assert torch.equal(compiled.finish(environment, [])[0], 2 * other_layout.reshape(8))


def test_groups_that_leave_out_a_node_are_refused() -> None:
    with pytest.raises(RegistrationRefused):
        graphs.CompiledGraph(graph(("aten.relu.default", [X])), [], "cpu")


def test_a_layer_runs_from_one_first_use_to_the_next() -> None:
    graph_made = graph(
        ("aten.relu.default", [X]),
        ("aten.add.Tensor", [value(0), W]),
        ("aten.add.Tensor", [value(1), W]),
    )
    [layer] = layers_of_graph(graph_made)
    assert (layer.first_node, layer.end_node, layer.weights) == (0, 3, (0,))


def spec(**changes: Any) -> TensorSpec:
    fields: dict[str, Any] = {
        "name": "w",
        "dtype": "float32",
        "shape": (2, 4),
        "offset_bytes": 512,
        "size_bytes": 32,
        "file_offset_bytes": 0,
    }
    return TensorSpec(**(fields | changes))


def test_a_tensor_over_an_arena_sees_its_bytes_and_has_its_own_version() -> None:
    arena = torch.zeros(4096, dtype=torch.uint8)
    storage = arena.untyped_storage()
    first = tensor_over(storage, spec(), 1024)
    second = tensor_over(storage, spec(offset_bytes=1024), 1024)
    before = second._version
    first.fill_(1.5)
    assert arena[1536:1568].view(torch.float32).tolist() == [1.5] * 8
    assert second._version == before
    assert first._version == before + 1


@pytest.mark.parametrize(
    ("changes", "region"),
    [
        ({}, 4096),
        ({}, 3568),
        ({}, -512),
        ({"size_bytes": 36}, 0),
        ({"offset_bytes": 514}, 0),
        ({"offset_bytes": -512}, 1024),
        ({"shape": (1 << 40, 4)}, 0),
        ({"shape": (-2, -4)}, 0),
    ],
)
def test_a_tensor_outside_the_arena_is_never_made(changes: dict[str, Any], region: int) -> None:
    storage = torch.zeros(4096, dtype=torch.uint8).untyped_storage()
    with pytest.raises(LocalProtocolError):
        tensor_over(storage, spec(**changes), region)


def test_a_read_only_mapping_makes_tensors_without_a_warning() -> None:
    mapping = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
    tensor = tensor_over(bytes_over(mapping), spec(), 0)
    assert tensor.sum().item() == 0.0


def test_what_a_run_holds_at_once_is_told_from_extents() -> None:
    row = 8 * 4 * 4  # bytes of x at the largest batch
    weights = [torch.zeros(4)]
    relu = ("aten.relu.default", [X])
    assert peak_bytes(graph(relu), weights) == row
    chain = [relu, *(("aten.relu.default", [value(i)]) for i in range(5))]
    assert peak_bytes(graph(*chain), weights) == 2 * row  # a node reads one value and writes one
    nodes = [
        relu,
        relu,
        relu,
        ("aten.add.Tensor", [value(0), value(1)]),
        ("aten.add.Tensor", [value(3), value(2)]),
    ]
    assert peak_bytes(graph(*nodes), weights) == 4 * row
    views = [
        relu,
        ("aten.view.default", [value(0), [-1, 2, 2]]),
        ("aten.view.default", [value(1), [-1, 4]]),
    ]
    assert peak_bytes(graph(*views), weights) == row


def test_what_may_change_is_found_without_a_set_for_each_node() -> None:
    """Node n of 2,000 aliases n weights: a set per node would need two million members in sum."""
    count = 2000
    gathered = Graph(
        version=2,
        inputs=(ValueSpec(name="x", dtype="float32", shape=(4,)),),
        weights=tuple(f"w{number}" for number in range(count)),
        nodes=tuple(
            Node(NOT_FRESH, ({"v": 1 + number}, {"v": 1 + count + number - 1 if number else 0}), {})
            for number in range(count)
        ),
        results=(2 * count,),
        outputs=(ValueSpec(name="y", dtype="float32", shape=(4,)),),
    )
    with traced() as memory:
        assert graphs.mutations(gathered) == []
    assert memory.peak_bytes < 4 << 20


def test_one_row_of_a_column_is_dense_whatever_its_stride() -> None:
    """An answer of one token may have an odd stride: ``x[:, :, 0]`` of one row and one token."""
    one = torch.tensor([[1.5, 2.5]])[:, 1]
    assert (one.shape, one.stride()) == ((1,), (2,))
    assert bytes(tensor_bytes(one)) == one.numpy().tobytes()
    assert same_bits(one, torch.tensor([2.5]))
    assert not same_bits(one, torch.tensor([1.5]))


# --- kinds of arguments --------------------------------------------------------------------------

CONSTANTS = {
    "an integer": 11,
    "a fraction": 0.5,
    "a flag": True,
    "a text": "mean",
    "nothing": None,
    "integers": [1],
    "fractions": [0.5],
    "a tensor": X,
    "tensors": [X],
    "an extent": {"v": 1},
    "a dtype": {"dtype": "float32"},
    "a layout": {"layout": "strided"},
    "a format": {"memory_format": "contiguous_format"},
    "a device": {"device": "target"},
    "infinity": {"float": "inf"},
}
FITS = {
    "int": {"an integer", "an extent"},
    "bool": {"a flag"},
    "str": {"a text"},
    "float": {"a fraction", "an integer", "an extent", "infinity"},
    "number": {"an integer", "a fraction", "a flag", "an extent", "infinity"},
    "Tensor": {"a tensor", "an integer", "a fraction", "a flag", "an extent", "infinity"},
    "List[int]": {"integers", "an integer", "an extent"},
    "List[float]": {"integers", "fractions", "a fraction", "an integer", "an extent", "infinity"},
    "List[Tensor]": {"tensors", "integers", "fractions"},
    "ScalarType": {"a dtype"},
    "Layout": {"a layout"},
    "MemoryFormat": {"a format"},
    "Device": {"a device"},
    "Generator": set(),  # an example of a kind that our code does not know
}


@pytest.mark.parametrize("kind", FITS)
def test_an_argument_is_of_the_kind_that_its_schema_has(kind: str) -> None:
    kinds = ["Tensor", "int"]
    fitting = {name for name, value in CONSTANTS.items() if fits(kind, value, kinds)}
    assert fitting == FITS[kind]
    if kind != "Generator":
        optional = {n for n, value in CONSTANTS.items() if fits(f"Optional[{kind}]", value, kinds)}
        assert optional == fitting | {"nothing"}


@pytest.mark.parametrize("name", sorted(OVERLOADS))
def test_what_names_a_dtype_a_layout_or_a_device_is_never_a_number(name: str) -> None:
    """Pass numbers, constant and computed, for each operator's arguments of these kinds."""
    tried = 0
    for overload in OVERLOADS[name]:
        schema: Any = graphs.resolve(f"aten.{name}.{overload}")._schema  # type: ignore[attr-defined]
        for index, entry in enumerate(schema.arguments):
            kind = str(entry.real_type).removeprefix("Optional[").removesuffix("]")
            if kind not in ("ScalarType", "Layout", "MemoryFormat", "Device"):
                continue
            for value in (11, {"v": 2}, [11], "float32", True):
                args = [{"v": 0}] * index if not entry.kwarg_only else [{"v": 0}]
                node = (f"aten.{name}.{overload}", args, {entry.name: value})
                with pytest.raises(RegistrationRefused):
                    graphs.check_kinds(graph(("aten.sym_size.int", [X, 0]), node))
                tried += 1
    assert tried % 5 == 0


def test_a_number_that_depends_on_an_extent_is_no_dtype() -> None:
    """Between the ends of an extent's range, a computed number could name an untried dtype."""
    graph_made = graph(
        ("aten.sym_size.int", [X, 0]),
        ("_operator.mod", [{"v": 2}, 2]),
        ("aten.view.dtype", [X, {"v": 3}]),
    )
    with pytest.raises(RegistrationRefused, match="argument 'dtype' is ScalarType"):
        graphs.CompiledGraph(graph_made, [(0, 3)], "cpu")
