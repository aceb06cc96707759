"""Compilation of a graph that was accepted: mutation check, compiled source, run without data."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import torch

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.programs.graphs.bundle import Graph, decode_graph
from pipeswitch.programs.graphs.graph import CompiledGraph, check_no_mutation, check_on_meta
from pipeswitch.programs.interface.dims import corners

from .bundles import program
from .target import JSON_TEXT, Target

WEIGHT_SHAPES = ((3, 4), (3,), (2, 2, 2))
SOME_OPERATORS = (
    "aten.add.Tensor",
    "aten.add_.Tensor",
    "aten.relu_.default",
    "aten.cat.default",
    "aten.index.Tensor",
    "aten.permute.default",
    "aten.expand.default",
    "aten.select.int",
    "aten.slice.Tensor",
    "aten.conv2d.default",
    "aten.layer_norm.default",
    "aten.full.default",
    "aten.arange.start_step",
    "aten.repeat.default",
    "aten.einsum.default",
    "aten.topk.default",
    "aten.batch_norm.default",
    "aten.embedding.default",
    "aten.stack.default",
    "aten.pad.default",
    "aten.upsample_nearest2d.vec",
    "aten.matmul.default",
    "aten.unflatten.int",
)


def run(data: bytes) -> None:
    try:
        graph = decode_graph(data.decode("utf-8", "replace"))
        check_no_mutation(graph)
        CompiledGraph(graph, [(0, len(graph.nodes))], "meta")
        check_on_meta(graph, _weights(graph), [next(corners(graph.dims))])
    except RegistrationRefused:
        pass


def _weights(graph: Graph) -> Sequence[torch.Tensor]:
    known = _known_weights()
    return [known[index % len(known)] for index in range(len(graph.weights))]


@functools.cache
def _known_weights() -> list[torch.Tensor]:
    return [torch.empty(shape, device="meta") for shape in WEIGHT_SHAPES]


def seeds() -> list[bytes]:
    first = program()
    second = {
        **program(),
        "weights": ["w", "b", "c"],
        "nodes": [
            ["aten.linear.default", [{"v": 0}, {"v": 1}, {"v": 2}], {}],
            ["aten.cat.default", [[{"v": 4}, {"v": 4}], 1], {}],
            ["aten.layer_norm.default", [{"v": 5}, [6]], {}],
            ["aten.slice.Tensor", [{"v": 6}, 1, 0, 3], {}],
        ],
        "results": [7],
    }
    return [json.dumps(graph).encode() for graph in (first, second)]


TARGET = Target(
    name="graph",
    run=run,
    seeds=seeds,
    codec=JSON_TEXT,
    words=("v", "dtype", "device", "target", "float", "inf", "nan", *SOME_OPERATORS),
)
