"""Inputs that a program uses as indices: how they are found, and errors if out of range."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda.host_torch import TapeRecorder

from pipeswitch.base.errors import InvalidInput
from pipeswitch.devices.cuda.graphs import DeviceProgram, GraphBudget
from pipeswitch.programs.graphs.bundle import Graph, Node
from pipeswitch.programs.graphs.indices import check_indices, index_limits
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.layout import GroupSpec, ValueSpec
from pipeswitch.programs.running.executor import GraphProgram
from tests.unit.manifests import plain_manifest, plain_tensor

IDS = ValueSpec(name="ids", dtype="int64", shape=("batch", 3))
TABLE = plain_tensor("table", (10, 4))
LOOKUP = "aten.embedding.default"


def graph(*nodes: tuple[str, tuple[Any, ...]], inputs: tuple[ValueSpec, ...] = (IDS,)) -> Graph:
    """Return a graph of one input (value 0), one table (value 1), and the nodes."""
    return Graph(
        version=2,
        inputs=inputs,
        weights=("table",),
        nodes=tuple(Node(target=target, args=args) for target, args in nodes),
        outputs=(ValueSpec(name="y", dtype="float32", shape=("batch", 3, 4)),),
        results=(len(nodes) + 1,),
    )


def v(value: int) -> dict[str, int]:
    return {"v": value}


def test_an_input_that_is_looked_up_is_limited_by_its_table() -> None:
    assert index_limits(graph((LOOKUP, (v(1), v(0)))), (TABLE,)) == {0: 10}


def test_views_and_casts_of_an_input_are_followed() -> None:
    nodes = (
        ("aten.view.default", (v(0), [-1])),
        ("aten._to_copy.default", (v(2),)),
        (LOOKUP, (v(1), v(3))),
    )
    assert index_limits(graph(*nodes), (TABLE,)) == {0: 10}


@pytest.mark.parametrize(
    "between",
    [("aten.slice.Tensor", (v(0), 1, 0, 2)), ("aten.remainder.Scalar", (v(0), 10))],
    ids=["a slice", "arithmetic"],
)
def test_what_is_not_all_of_the_input_limits_nothing(between: tuple[str, tuple[Any, ...]]) -> None:
    assert index_limits(graph(between, (LOOKUP, (v(1), v(2)))), (TABLE,)) == {}


def test_a_table_that_is_computed_and_other_dimensions_limit_nothing() -> None:
    computed = graph(("aten.relu.default", (v(1),)), (LOOKUP, (v(2), v(0))))
    assert index_limits(computed, (TABLE,)) == {}
    columns = graph(("aten.index_select.default", (v(1), 1, v(0))))
    assert index_limits(columns, (TABLE,)) == {}
    rows = graph(("aten.index_select.default", (v(1), 0, v(0))))
    assert index_limits(rows, (TABLE,)) == {0: 10}


@pytest.mark.parametrize(("values", "wrong"), [([0, 9, 10], 10), ([-1, 0, 9], -1)])
def test_an_index_out_of_range_is_refused_with_its_value(values: list[int], wrong: int) -> None:
    with pytest.raises(InvalidInput, match=rf'"ids" has the index {wrong}, .* has 10 rows'):
        check_indices({0: 10}, (IDS,), [torch.tensor([values])])
    check_indices({0: 10}, (IDS,), [torch.tensor([[0, 9, 5]])])
    check_indices({0: 10}, (IDS,), [torch.zeros(0, 3, dtype=torch.int64)])


def test_a_refused_request_touches_nothing_and_the_next_one_is_served() -> None:
    lookup = graph((LOOKUP, (v(1), v(0))))
    manifest = plain_manifest(
        total_bytes=512,
        tensors=(TABLE,),
        groups=(
            GroupSpec(
                offset_bytes=0, size_bytes=160, tensors=(0,), first_node=0, end_node=1, label="0"
            ),
        ),
        inputs=lookup.inputs,
        outputs=lookup.outputs,
        dims=(Dim("batch", 1, 8),),
    )
    table = torch.randn(10, 4)
    bound = GraphProgram(manifest, lookup, "cpu").bind(lambda _: table)
    program = DeviceProgram(bound, "cpu", TapeRecorder(), GraphBudget(1 << 30))
    groups: list[int] = []
    for _ in range(2):  # the first run is eager, the second one replays a graph
        with pytest.raises(InvalidInput):
            program.run([torch.tensor([[1, 2, 99]])], groups.append)
        assert groups == []
        good = torch.tensor([[1, 2, 9]])
        assert torch.equal(program.run([good], groups.append)[0], table[good])
        program.improve()
        groups.clear()
