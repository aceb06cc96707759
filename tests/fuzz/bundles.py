"""Fuzz target: reading of bundle files, and of weights files, which are bundles without a graph.

The file is a memfd, which is rewritten for each input. An input has two frames: the header's JSON
and the tensors' bytes. If there is a third frame, this frame alone is the whole file.
"""

from __future__ import annotations

import functools
import json
import os
import struct
from typing import Any

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.programs.graphs import bundle

from .target import Codec, Target, join_frames, split_frames


class _File:
    """An anonymous file, and the path by which readers open it."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("fuzz-bundle", os.MFD_CLOEXEC)
        self.path = f"/proc/self/fd/{self._descriptor}"

    def fill(self, data: bytes) -> None:
        os.ftruncate(self._descriptor, len(data))
        os.pwrite(self._descriptor, data, 0)


@functools.cache
def _file() -> _File:
    return _File()


def file_of(frames: list[bytes]) -> bytes:
    """Return the bytes of the file that an input describes."""
    if len(frames) > 2:
        return frames[2]
    header = frames[0] if frames else b""
    return struct.pack("<Q", len(header)) + header + b"".join(frames[1:2])


def run(data: bytes) -> None:
    file = _file()
    raw = file_of(split_frames(data))
    file.fill(raw)
    try:
        tensors, *_ = bundle.read_safetensors_header(file.path)
        for tensor in tensors:
            end = tensor.file_offset_bytes + tensor.size_bytes
            if not 8 <= tensor.file_offset_bytes <= end <= len(raw):
                raise AssertionError(f"{tensor.name!r} lies outside of its file")
        graph = bundle.read_bundle(file.path).graph
    except RegistrationRefused:
        return
    if bundle.decode_graph(bundle.encode_graph(graph)) != graph:
        raise AssertionError("a graph is another one when it is read again")
    for position, node in enumerate(graph.nodes):
        if any(
            not 0 <= v < graph.first_node_value + position for v in bundle.node_references(node)
        ):
            raise AssertionError("a node reads a value that is not there yet")
        bundle.weights_of_node(graph, node)


def program() -> dict[str, Any]:
    """Return a graph for relu(x @ w.T + b), extended so that each kind of argument occurs once."""
    return {
        "version": 2,
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 4]}],
        "weights": ["w", "b"],
        "nodes": [
            ["aten.linear.default", [{"v": 0}, {"v": 1}, {"v": 2}], {}],
            ["aten.relu.default", [{"v": 3}], {}],
            ["aten.sym_size.int", [{"v": 4}, 0], {}],
            ["_operator.mul", [{"v": 5}, 2], {}],
            ["aten.view.default", [{"v": 4}, [{"v": 5}, 3]], {}],
            ["aten.to.dtype", [{"v": 7}, {"dtype": "float32"}], {"copy": True}],
            ["aten.clamp.default", [{"v": 8}, 0, {"float": "inf"}], {}],
            ["aten.split.Tensor", [{"v": 9}, 2, 1], {}],
            ["_operator.getitem", [{"v": 10}, 0], {}],
        ],
        "results": [9],
        "outputs": [
            {"name": "y", "dtype": "float32", "shape": [["//", [["*", ["batch", 2]], 2]], 3]}
        ],
        "dims": [["batch", 1, 8]],
    }


def header_of(graph: dict[str, Any]) -> dict[str, Any]:
    """Return a bundle's header with the graph as a dictionary, not yet as JSON text."""
    return {
        "__metadata__": {bundle.METADATA_KEY: graph},
        "w": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
        "b": {"dtype": "F32", "shape": [3], "data_offsets": [48, 60]},
    }


def _decode(frame: bytes) -> Any:
    """Decode a header and its graph, so that the mutator can change the graph, too."""
    header = json.loads(frame)
    if "__metadata__" in header:
        header["__metadata__"][bundle.METADATA_KEY] = json.loads(
            header["__metadata__"][bundle.METADATA_KEY]
        )
    return header


def _encode(header: Any) -> bytes:
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if isinstance(metadata, dict) and bundle.METADATA_KEY in metadata:
        metadata = {**metadata, bundle.METADATA_KEY: json.dumps(metadata[bundle.METADATA_KEY])}
        header = {**header, "__metadata__": metadata}
    return json.dumps(header).encode()


def seeds() -> list[bytes]:
    header = _encode(header_of(program()))
    bare = header_of({})
    del bare["__metadata__"]
    whole = struct.pack("<Q", len(header)) + header + bytes(60)
    return [
        join_frames([header, bytes(60)]),
        join_frames([json.dumps(bare).encode(), bytes(60)]),
        join_frames([b"", b"", whole]),
    ]


TARGET = Target(
    name="bundle",
    run=run,
    seeds=seeds,
    codec=Codec(split=split_frames, join=join_frames, decode=_decode, encode=_encode),
    words=(
        "v",
        "dtype",
        "device",
        "target",
        "float",
        "inf",
        "F32",
        "BF16",
        "data_offsets",
        "shape",
        "aten.add.Tensor",
        "_operator.getitem",
        "aten.as_strided.default",
        "__metadata__",
        bundle.METADATA_KEY,
    ),
)
