"""Stages: functions of a model's owner that run before and after the model. Pure.

They make the model's inputs from requests, and answers from its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .dims import Dim
from .layout import Manifest, ValueSpec

Raw = Mapping[str, tuple[Sequence[int | Sequence[int]], str]]
"""Declared values: name -> (shape, dtype); requests choose an extent that is given as a range."""


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    """Functions that run on the CPU before a model and after it (ADR 34)."""

    function: str = ""  # package.module:function before the model; empty: clients send its inputs
    inputs: tuple[ValueSpec, ...] = ()  # arguments of ``function``, which clients send
    dims: tuple[Dim, ...] = ()  # dimensions of ``inputs`` that a request chooses
    after: str = ""  # package.module:function after the model; empty: its outputs are the answer
    outputs: tuple[ValueSpec, ...] = ()  # results of ``after``
    output_dims: tuple[Dim, ...] = ()  # dimensions of ``outputs``

    def raw(self, manifest: Manifest) -> Manifest:
        """Return the manifest of the raw inputs that a client sends; it has no outputs yet."""
        return msgspec.structs.replace(
            manifest, inputs=self.inputs, dims=self.dims, takes=None, outputs=()
        )

    def answer(self, manifest: Manifest) -> Manifest:
        """Return a manifest whose ``inputs`` are the results of ``after``."""
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


def stages_from(
    function: str, raw: Raw, after: str = "", returns: Raw | None = None
) -> Stages | None:
    """Return a model's stages, or None without ``function`` and ``after``."""
    if not function and not after:
        return None
    inputs, dims = _declared(raw)
    outputs, output_dims = _declared(returns or {})
    return Stages(
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
