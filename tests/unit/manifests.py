"""Manifests of programs and their tensors, from the fields that matter to a test."""

from __future__ import annotations

import math
from typing import Any

from pipeswitch.programs.interface.layout import ITEM_BYTES, Manifest, TensorSpec


def plain_manifest(**fields: Any) -> Manifest:
    """Return the manifest of a graph; without ``fields`` it has no tensors, inputs or outputs."""
    text = {"digest": "d", "mode": "graph", "mode_reason": "", "source": "bundle"}
    empty = dict.fromkeys(("tensors", "groups", "inputs", "outputs"), ())
    return Manifest(**{**text, "total_bytes": 0, **empty, **fields})


def plain_tensor(
    name: str,
    shape: tuple[int, ...],
    at_bytes: int = 0,
    *,
    dtype: str = "float32",
    file_bytes: int = 0,
) -> TensorSpec:
    """Return a tensor that begins at these bytes of its region and of the file."""
    size_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    places = {"offset_bytes": at_bytes, "size_bytes": size_bytes, "file_offset_bytes": file_bytes}
    return TensorSpec(name=name, dtype=dtype, shape=shape, **places)
