"""Stages: functions of the owner's around a model, from requests to its inputs, from its outputs to
answers. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .dims import Dim
from .layout import Manifest, ValueSpec

Raw = Mapping[str, tuple[Sequence[int | Sequence[int]], str]]
"""Declared inputs: shape and dtype by name; a range in a shape is what requests choose from."""


class Processor(msgspec.Struct, frozen=True, kw_only=True):
    """Functions that run on the CPU before a model and after it (ADR 34)."""

    function: str = ""  # package.module:function, of what clients send; empty: they send inputs
    inputs: tuple[ValueSpec, ...] = ()  # what clients send then
    dims: tuple[Dim, ...] = ()  # the extents of those that a request chooses
    after: str = ""  # package.module:function, of the model's outputs; empty: they are the answer
    outputs: tuple[ValueSpec, ...] = ()  # what it returns
    output_dims: tuple[Dim, ...] = ()

    def raw(self, manifest: Manifest) -> Manifest:
        """Return the manifest of the raw inputs that a client sends; it has no outputs yet."""
        return msgspec.structs.replace(
            manifest, inputs=self.inputs, dims=self.dims, takes=None, outputs=()
        )

    def answer(self, manifest: Manifest) -> Manifest:
        """Return the manifest of a postprocessing result, with outputs as a model's inputs."""
        return msgspec.structs.replace(
            manifest, inputs=self.outputs, dims=self.output_dims, takes=None, outputs=()
        )

    def public(self, manifest: Manifest) -> Manifest:
        """Return the manifest that a model's clients see."""
        if self.function:
            outputs, dims = manifest.outputs, (*self.dims, *manifest.dims)
            manifest = msgspec.structs.replace(self.raw(manifest), outputs=outputs, dims=dims)
        if not self.after:
            return manifest
        dims = (*manifest.dims, *self.output_dims)
        return msgspec.structs.replace(manifest, outputs=self.outputs, dims=dims, returns=None)


def processor(
    function: str, raw: Raw, after: str = "", returns: Raw | None = None
) -> Processor | None:
    """Return the stage, or None if clients send and get what the model takes and returns."""
    if not function and not after:
        return None
    inputs, dims = _declared(raw)
    outputs, output_dims = _declared(returns or {})
    return Processor(
        function=function,
        inputs=inputs,
        dims=dims,
        after=after,
        outputs=outputs,
        output_dims=output_dims,
    )


def _declared(declared: Raw) -> tuple[tuple[ValueSpec, ...], tuple[Dim, ...]]:
    """Return the declared values; each range is a dimension named after its value: ``image.0``."""
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
    return tuple(inputs), tuple(dims)
