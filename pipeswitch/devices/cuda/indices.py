"""Checks of integer inputs that are indices, made on the host before the device uses them.

On the cpu device an index out of range raises an exception. On a GPU an assertion fails in a
kernel, which breaks the context and ends the worker. If a graph looks up rows of a table with a
request's own input (token ids, positions), the input is checked here, and only that request fails.
Indices that a model computes and inputs of module-mode programs are not checked: a bad index there
ends the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from ...base.errors import InvalidInput
from ...programs.graphs.bundle import Graph
from ...programs.interface.layout import TensorSpec, ValueSpec

LOOKUPS: Final[Mapping[str, tuple[int, int]]] = {
    "aten.embedding.default": (0, 1),
    "aten.index_select.default": (0, 2),
}
"""Operators that take rows of a table, with the argument positions of the table and the indices."""

KEEPS_VALUES: Final = frozenset(
    f"aten.{name}"
    for name in (
        "view.default",
        "reshape.default",
        "_unsafe_view.default",
        "flatten.using_ints",
        "unsqueeze.default",
        "squeeze.default",
        "squeeze.dim",
        "squeeze.dims",
        "expand.default",
        "permute.default",
        "transpose.int",
        "t.default",
        "alias.default",
        "detach.default",
        "clone.default",
        "contiguous.default",
        "lift_fresh_copy.default",
        "to.dtype",
        "to.device",
        "to.dtype_layout",
        "_to_copy.default",
    )
)
"""Operators whose result has exactly the values of their first argument. Slicing is not included:
a value that it leaves out is never looked up, so that value need not be in range."""


def index_limits(graph: Graph, tensors: Sequence[TensorSpec]) -> dict[int, int]:
    """Return, for each input that is an index, the row count of the smallest table it indexes."""
    input_count, first_node_value = len(graph.inputs), graph.first_node_value
    source = {  # number of a value -> number of the input that has the same values
        index: index
        for index, spec in enumerate(graph.inputs)
        if spec.dtype.startswith(("int", "uint"))
    }
    limits: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        if node.target in KEEPS_VALUES and node.args:
            limit = source.get(_value(node.args[0]))
            if limit is not None:
                source[first_node_value + position] = limit
            continue
        places = LOOKUPS.get(node.target)
        if places is None or len(node.args) <= max(places):
            continue
        if node.target == "aten.index_select.default" and node.args[1] != 0:
            continue
        table, indices = (_value(node.args[place]) for place in places)
        looked_up = source.get(indices)
        if looked_up is None or not input_count <= table < first_node_value:
            continue
        shape = tensors[table - input_count].shape
        if shape:
            limits[looked_up] = min(shape[0], limits.get(looked_up, shape[0]))
    return limits


def _value(argument: object) -> int:
    """Return the number of the value that an argument names; -1 for a constant."""
    return int(argument["v"]) if isinstance(argument, dict) and "v" in argument else -1


def check_indices(
    limits: Mapping[int, int], specs: Sequence[ValueSpec], inputs: Sequence[torch.Tensor]
) -> None:
    """Check that each index is within its table.

    Args:
        inputs: tensors in host memory.

    Raises:
        InvalidInput: an index is out of range; the text has the input, the index and the range.
    """
    for number, rows in limits.items():
        value = inputs[number]
        if not value.numel():
            continue
        lowest, highest = (int(bound) for bound in torch.aminmax(value))
        if lowest < 0 or highest >= rows:
            wrong = lowest if lowest < 0 else highest
            raise InvalidInput(
                f'input "{specs[number].name}" has the index {wrong}, its table has {rows} rows',
                hint=f"0 to {rows - 1} are valid",
            )
