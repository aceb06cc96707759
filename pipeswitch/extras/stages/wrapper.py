"""Stages: functions of a model's owner that make its inputs and its answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from ...programs.interface.dims import Dim
from ...programs.interface.layout import Manifest, ValueSpec
from ...programs.spec import BuildSpec

Raw = Mapping[str, tuple[Sequence[int | Sequence[int]], str]]
"""Declared values: name -> (shape, dtype); requests choose an extent that is given as a range."""


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    """Functions that run on the CPU before a model and after it (ADR 34)."""

    kind: ClassVar[str] = "stage"
    before: str = ""  # package.module:function before the model; empty: clients send its inputs
    inputs: tuple[ValueSpec, ...] = ()  # arguments of ``before``, which clients send
    dims: tuple[Dim, ...] = ()  # dimensions of ``inputs`` that a request chooses
    after: str = ""  # package.module:function after the model; empty: its outputs are the answer
    outputs: tuple[ValueSpec, ...] = ()  # results of ``after``
    output_dims: tuple[Dim, ...] = ()  # dimensions of ``outputs``

    def row(self) -> dict[str, str]:
        named = {"preprocess": self.before, "postprocess": self.after}
        return {what: function for what, function in named.items() if function}

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
        if self.before:
            outputs, dims = manifest.outputs, (*self.dims, *manifest.dims)
            manifest = msgspec.structs.replace(self.raw(manifest), outputs=outputs, dims=dims)
        if not self.after:
            return manifest
        dims = (*manifest.dims, *self.output_dims)
        return msgspec.structs.replace(manifest, outputs=self.outputs, dims=dims, returns=None)


class CheckSettings(msgspec.Struct, frozen=True, array_like=True):
    """Settings of a process that imports a registration's functions, sends HelperReady or
    HelperFailed, and exits. Descriptor: the server's environment."""

    functions: tuple[str, ...]  # package.module:function
    inputs: tuple[str, ...]  # input names that the first function will get; empty: not known yet
    timeout_s: float  # 0: no limit


def stages_of(spec: BuildSpec) -> Stages:
    """Return the stages of a spec's model."""
    inputs, dims = _declared(spec.raw)
    outputs, output_dims = _declared(spec.returns)
    return Stages(
        before=spec.preprocess,
        inputs=inputs,
        dims=dims,
        after=spec.postprocess,
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
