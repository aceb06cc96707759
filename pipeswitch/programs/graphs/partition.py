"""Division of a program into layers, and the offsets of its tensors in a region. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...planning.grouping import DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES, Plan, bucket
from ..interface.groups import cut
from ..interface.layout import TENSOR_ALIGN_BYTES, GroupSpec, LayerSpec, TensorSpec, aligned
from .bundle import Graph, weights_of_node


@dataclass(frozen=True)
class Layer:
    """Consecutive nodes (or one submodule), and the weights that no earlier layer uses."""

    first_node: int
    end_node: int
    weights: tuple[int, ...]


@dataclass(frozen=True)
class UnplacedWeight:
    """A weight before it has an offset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def layers_of_graph(graph: Graph) -> list[Layer]:
    """Return the layers: each begins at a node that is the first to use a weight.

    The first layer also has the nodes before its first use of a weight. The last layer also has the
    weights that no node uses.
    """
    layered: set[int] = set()
    starts: list[int] = []
    weights: list[list[int]] = []
    for position, node in enumerate(graph.nodes):
        new = [w for w in dict.fromkeys(weights_of_node(graph, node)) if w not in layered]
        if new or not starts:
            if starts and not layered:  # no earlier node uses a weight: this is still layer 0
                weights[-1] = new
            else:
                starts.append(position)
                weights.append(new)
        layered.update(new)
    unused = [weight for weight in range(len(graph.weights)) if weight not in layered]
    if not starts:
        return [Layer(0, 0, tuple(unused))]
    weights[-1] += unused
    ends = [*starts[1:], len(graph.nodes)]
    return [
        Layer(first, end, tuple(used))
        for first, end, used in zip(starts, ends, weights, strict=True)
    ]


def default_plan(
    layers: Sequence[Layer], weights: Sequence[UnplacedWeight], bucket_bytes: int
) -> Plan:
    """Return the plan without a profile; ``bucket_bytes`` 0 means the default size."""
    sizes = [sum(weights[index].size_bytes for index in layer.weights) for layer in layers]
    size = bucket_bytes or DEFAULT_BUCKET_BYTES
    return bucket(sizes, size, min(FIRST_BUCKET_BYTES, size))


def place(
    layers: Sequence[Layer],
    weights: Sequence[UnplacedWeight],
    plan: Plan,
    file_offsets: Sequence[int],
) -> tuple[tuple[TensorSpec, ...], tuple[LayerSpec, ...], tuple[GroupSpec, ...], int]:
    """Return tensors in order of first use, layers, groups, and the region's size in bytes."""
    tensors: list[TensorSpec] = []
    position_bytes = 0
    for index in (weight for layer in layers for weight in layer.weights):
        weight = weights[index]
        tensors.append(
            TensorSpec(
                name=weight.name,
                dtype=weight.dtype,
                shape=weight.shape,
                offset_bytes=position_bytes,
                size_bytes=weight.size_bytes,
                file_offset_bytes=file_offsets[index],
            )
        )
        position_bytes += aligned(weight.size_bytes, TENSOR_ALIGN_BYTES)
    specs = tuple(LayerSpec(one.first_node, one.end_node, len(one.weights)) for one in layers)
    groups = cut(specs, tensors, position_bytes, plan)
    return tuple(tensors), specs, groups, position_bytes
