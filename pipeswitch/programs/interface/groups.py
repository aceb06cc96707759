"""Division of a program's layers into groups. Pure.

Tensors are stored in order of first use, without padding between groups. So every plan uses the
same image in the host store, the same file and the same digest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from ...base.errors import LocalProtocolError
from ...planning.grouping import Plan, spans
from .layout import GroupSpec, LayerSpec, Manifest, TensorSpec

MIN_TABLE_BYTES: Final = 4 << 20  # the copy of a smaller table delays a run by less than 1 ms


class TableByRows(NamedTuple):
    """Group of one table, whose nodes read only the rows that an input names."""

    size_bytes: int
    group: int
    index_input: int  # index of that input
    rows: int
    before: int  # the next group that reads the table, or the group count


def layer_bytes(manifest: Manifest) -> tuple[int, ...]:
    """Return the bytes of weights that each layer is the first to use."""
    starts = _starts(manifest.layers, manifest.tensors, manifest.total_bytes)
    return tuple(end - start for start, end in pairwise(starts))


def cut(
    layers: Sequence[LayerSpec], tensors: Sequence[TensorSpec], total_bytes: int, plan: Plan
) -> tuple[GroupSpec, ...]:
    """Return the groups of ``plan``, which cover the model's region without gaps."""
    starts = _starts(layers, tensors, total_bytes)
    groups: list[GroupSpec] = []
    position = 0
    for first, end in spans(plan, len(layers)):
        count = sum(layer.tensor_count for layer in layers[first:end])
        indices = tuple(range(position, position + count))
        position += count
        groups.append(
            GroupSpec(
                offset_bytes=starts[first],
                size_bytes=starts[end] - starts[first],
                tensors=indices,
                first_node=layers[first].first_node,
                end_node=layers[end - 1].end_node,
                label=_label([tensors[index].name for index in indices]),
            )
        )
    return tuple(groups)


def regrouped(manifest: Manifest, plan: Plan) -> Manifest:
    """Return the manifest with the groups of ``plan``; an empty plan leaves it unchanged.

    Raises:
        LocalProtocolError: ``plan`` is not a plan for this program.
    """
    if not plan:
        return manifest
    try:
        groups = cut(manifest.layers, manifest.tensors, manifest.total_bytes, plan)
    except ValueError as error:
        raise LocalProtocolError(f"program {manifest.digest[:12]}: {error}") from None
    if manifest.mode == "graph":
        return msgspec.structs.replace(manifest, groups=groups)
    names = tuple(manifest.extra["needs"])  # the submodule that opens each layer, in order
    return msgspec.structs.replace(
        manifest,
        groups=groups,
        triggers=tuple(names[group.first_node] for group in groups),
        extra={**manifest.extra, "needs": needs(names, groups)},
    )


def plan_in_force(manifest: Manifest) -> Plan:
    """Return the plan of the manifest's groups: the first layer of each group."""
    starts = {layer.first_node: i for i, layer in reversed(list(enumerate(manifest.layers)))}
    return tuple(starts[group.first_node] for group in manifest.groups)


def last_groups(manifest: Manifest) -> tuple[int, ...]:
    """Return, for each group of a graph, the last group that reads its weights."""
    readers = manifest.extra["last_readers"]
    ends = [group.end_node for group in manifest.groups]
    last = len(ends) - 1
    return tuple(
        max([index, *(min(last, bisect_right(ends, readers[t])) for t in group.tensors)])
        for index, group in enumerate(manifest.groups)
    )


def table_by_rows(manifest: Manifest) -> TableByRows | None:
    """Return the largest table that may be copied after the group that reads its rows."""
    ends, tables = [group.end_node for group in manifest.groups], list[TableByRows]()
    groups = {group.tensors: index for index, group in enumerate(manifest.groups)}
    for one in manifest.lookups:
        size, shape = manifest.tensors[one.table].size_bytes, manifest.tensors[one.table].shape
        index, before = groups.get((one.table,), len(ends)), bisect_right(ends, one.next_reader)
        if index < before and len(shape) > 1 and size >= MIN_TABLE_BYTES:
            tables.append(TableByRows(size, index, one.index_input, shape[0], before))
    return max(tables, default=None)


def landed_tensors(manifest: Manifest, staging: Sequence[int]) -> dict[str, TensorSpec]:
    """Return the tensors of a model larger than the arena, with offsets in its staging slots.
    ``staging`` has the offset of each group's slot, and is empty for other models."""
    return {
        (spec := manifest.tensors[index]).name: msgspec.structs.replace(
            spec, offset_bytes=landing + spec.offset_bytes - group.offset_bytes
        )
        for group, landing in zip(manifest.groups, staging, strict=False)
        for index in group.tensors
    }


def needs(triggers: Sequence[str], groups: Sequence[GroupSpec]) -> dict[str, int]:
    """Return, for module mode, the group that must be on the device when each submodule runs."""
    return {
        triggers[layer]: index
        for index, group in enumerate(groups)
        for layer in range(group.first_node, group.end_node)
    }


def _starts(
    layers: Sequence[LayerSpec], tensors: Sequence[TensorSpec], total_bytes: int
) -> list[int]:
    """Return the offset of each layer in the region, then the region's end."""
    starts: list[int] = []
    position = 0
    for layer in layers:
        is_inside = position < len(tensors)
        starts.append(tensors[position].offset_bytes if is_inside else total_bytes)
        position += layer.tensor_count
    return [*starts, total_bytes]


def _label(names: Sequence[str]) -> str:
    owners = [name.rpartition(".")[0] or name for name in names]
    if not owners:
        return "no weights"
    return owners[0] if owners[0] == owners[-1] else f"{owners[0]} … {owners[-1]}"
