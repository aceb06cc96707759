"""Integer inputs that are indices: the tables whose rows they name, and a check of their values.

On the cpu device an index out of range raises an exception. On a GPU an assertion fails in a
kernel, which breaks the context and ends the worker. If a graph looks up rows of a table with a
request's own input (token ids, positions), the host checks the input before the device uses it, and
only that request fails. Indices that a model computes and inputs of module-mode programs are not
checked: a bad index there ends the worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

from ...base.errors import InvalidInput
from ..interface.layout import LookupSpec, TensorSpec, ValueSpec
from .bundle import Graph, weights_of_node
from .operators import FRESH

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
    limits: dict[int, int] = {}
    for _, table, index in _look_ups(graph, is_exact=False):
        if shape := tensors[table].shape:
            limits[index] = min(shape[0], limits.get(index, shape[0]))
    return limits


def lookups(graph: Graph) -> tuple[LookupSpec, ...]:
    """Return the tables whose first reader takes only the rows that an input names."""
    readers: dict[int, list[int]] = {}
    for position, node in enumerate(graph.nodes):
        for weight in {*weights_of_node(graph, node)}:
            readers.setdefault(weight, []).append(position)
    for value in graph.results:
        readers.setdefault(value - len(graph.inputs), []).insert(0, -1)  # all of it is an output
    return tuple(
        LookupSpec(table, index, [*readers[table], len(graph.nodes)][1])
        for position, table, index in _look_ups(graph, is_exact=True)
        if readers[table][0] == position
    )


def _look_ups(graph: Graph, *, is_exact: bool) -> Iterator[tuple[int, int, int]]:
    """Yield each look-up of rows by an input: position of its node, table, and input.

    ``is_exact``: leave out casts, which may change a value, and copies, which the graph may change.
    """
    input_count, first_node_value = len(graph.inputs), graph.first_node_value
    source = {  # number of a value -> number of the input that has the same values
        index: index
        for index, spec in enumerate(graph.inputs)
        if spec.dtype.startswith(("int", "uint"))
    }
    for position, node in enumerate(graph.nodes):
        if node.target in KEEPS_VALUES and node.args:
            index = source.get(_value(node.args[0]))
            is_view = (name := node.target.split(".")[1]) not in FRESH and name != "to"
            if index is not None and (is_view or not is_exact):
                source[first_node_value + position] = index
            continue
        places = LOOKUPS.get(node.target)
        if places is None or len(node.args) <= max(places):
            continue
        if node.target == "aten.index_select.default" and node.args[1] != 0:
            continue
        table, indices = (_value(node.args[place]) for place in places)
        index = source.get(indices)
        if index is not None and input_count <= table < first_node_value:
            yield position, table - input_count, index


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
