"""Stages: a function of the owner's that makes a model's inputs of what clients send. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .dims import Dim
from .layout import Manifest, ValueSpec

Raw = Mapping[str, tuple[Sequence[int | Sequence[int]], str]]
"""Declared inputs: shape and dtype by name; a range in a shape is what requests choose from."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """What runs on the CPU before a model computes (ADR 34)."""

    function: str  # package.module:function
    inputs: tuple[ValueSpec, ...]  # what clients send
    dims: tuple[Dim, ...]  # the extents of those that a request chooses

    def raw(self, manifest: Manifest) -> Manifest:
        """A model as its clients see it, before the function has run: there are no outputs yet."""
        return msgspec.structs.replace(
            manifest, inputs=self.inputs, dims=self.dims, takes=None, outputs=()
        )


def stage(function: str, declared: Raw) -> Stage:
    """Each range is a dimension of its own, called after its input: ``image.0``."""
    inputs: list[ValueSpec] = []
    dims: list[Dim] = []
    for name, (shape, dtype) in declared.items():
        extents: list[Any] = []
        for axis, extent in enumerate(shape):
            if isinstance(extent, int):
                extents.append(extent)
            else:
                dims.append(Dim(f"{name}.{axis}", *extent))
                extents.append(dims[-1].name)
        inputs.append(ValueSpec(name=name, dtype=dtype, shape=tuple(extents)))
    return Stage(function=function, inputs=tuple(inputs), dims=tuple(dims))
