"""Chains: models that run one after the other in one request. Pure (docs/adr/0042-chains.md).

A source is the name of an input of the request (``ids``) or of an output of an earlier step
(``encoder.y``). A step's input without a source gets the request's input of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Final

import msgspec

from ...base.errors import InvalidInput
from ...programs.interface.dims import MAX_EXTENT, Dim, Expr, Extent
from ...programs.interface.layout import Manifest, ValueSpec, signature_text

MAX_STEPS: Final = 16
MAX_VALUES: Final = 64  # limit for inputs, and for outputs: maximum tensors of a message
HINT: Final = "pipeswitch chain NAME encoder head:x=encoder.y --output label=head.label"

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Sources = Annotated[dict[_Name, _Name], msgspec.Meta(max_length=MAX_VALUES)]


class ChainStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model of a chain."""

    model: _Name
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""  # empty: the model's name
    inputs: Sources = {}  # input -> source


Steps = Annotated[tuple[ChainStep, ...], msgspec.Meta(min_length=1, max_length=MAX_STEPS)]


class Chain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checked chain: each step has a name, and each input and output has a source."""

    kind: ClassVar[str] = "chain"
    steps: tuple[ChainStep, ...]
    returns: dict[str, str]  # output of the answer -> source
    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    dims: tuple[Dim, ...] = ()

    @property
    def first(self) -> str:
        """Model of the first step."""
        return self.steps[0].model

    def needed(self, number: int) -> set[str]:
        """Return the sources that are read by the answer or by a step from ``number`` on."""
        later = (step.inputs.values() for step in self.steps[number:])
        return set(self.returns.values()).union(*later)

    @property
    def manifest(self) -> Manifest:
        """Manifest for admission: it has only the inputs of a request."""
        return Manifest(
            digest="",
            mode="graph",
            mode_reason="",
            source="chain",
            total_bytes=0,
            tensors=(),
            groups=(),
            inputs=self.inputs,
            outputs=(),
            dims=self.dims,
        )


def chain_of(
    name: str,
    steps: Sequence[ChainStep],
    returns: Mapping[str, str],
    models: Mapping[str, Manifest],
) -> Chain:
    """Check a declared chain and return it with all names and sources.

    Args:
        returns: output of the answer -> source; empty: all outputs of the last step.
        models: public manifests of all models by name.

    Raises:
        InvalidInput: a name is unknown, a value does not match, or nothing reads a step's results.
    """
    return _Resolver(name, models).chain(steps, returns)


class _Resolver:
    """Check of one chain: the values known so far, with shapes in the chain's dimensions."""

    def __init__(self, name: str, models: Mapping[str, Manifest]) -> None:
        self._name, self._models = name, models
        self._values: dict[str, ValueSpec] = {}
        self._sent: list[str] = []  # inputs of the request
        self._dims: dict[str, Dim] = {}

    def chain(self, declared: Sequence[ChainStep], returns: Mapping[str, str]) -> Chain:
        steps: list[ChainStep] = []
        for step in declared:
            name = step.name or step.model
            if any(one.name == name for one in steps):
                raise self._wrong(f'two steps have the name "{name}": again={name} is another name')
            steps.append(self._step(msgspec.structs.replace(step, name=name)))
        last = steps[-1]
        returns = dict(returns) or {
            one.name: f"{last.name}.{one.name}" for one in self._models[last.model].outputs
        }
        for source in returns.values():
            self._known(source, "an output of the answer")
        outputs = [
            msgspec.structs.replace(self._values[source], name=name)
            for name, source in returns.items()
        ]
        chain = Chain(
            steps=tuple(steps),
            returns=returns,
            dims=tuple(self._dims.values()),
            inputs=tuple(self._values[name] for name in self._sent),
            outputs=tuple(outputs),
        )
        for number, step in enumerate(steps):
            step_outputs = {f"{step.name}.{one.name}" for one in self._models[step.model].outputs}
            if step_outputs.isdisjoint(chain.needed(number + 1)):
                raise self._wrong(f'nothing reads what step "{step.name}" returns')
        if max(len(returns), len(self._sent)) > MAX_VALUES:
            raise self._wrong(f"it has over {MAX_VALUES} inputs or outputs")
        return chain

    def _step(self, step: ChainStep) -> ChainStep:
        manifest = self._models.get(step.model)
        if manifest is None:
            there = f"there are {', '.join(self._models) or 'none'}"[:200]
            raise self._wrong(f'step "{step.name}": no model "{step.model}"; {there}')
        takes = [one.name for one in manifest.inputs]
        if unknown := [name for name in step.inputs if name not in takes]:
            raise self._wrong(
                f'step "{step.name}" has no input "{unknown[0]}"; it has {", ".join(takes)}'
            )
        bound: dict[str, Extent] = {}  # the model's dimension -> extent in the chain's dimensions
        ranges = {dim.name: dim for dim in manifest.dims}
        inputs = {name: step.inputs.get(name, name) for name in takes}
        for spec in manifest.inputs:
            source = inputs[spec.name]
            if "." in source and source != spec.name:
                self._known(source, f'input "{spec.name}" of step "{step.name}"')
            source_spec = self._values.get(source)
            if source_spec is None:
                self._sent.append(source)
                shape = [self._extent(one, bound, ranges, step, True) for one in spec.shape]
                self._values[source] = ValueSpec(name=source, dtype=spec.dtype, shape=tuple(shape))
            elif not self._fits(source_spec, spec, bound, ranges):
                raise self._wrong(
                    f'step "{step.name}" input "{spec.name}" expects {_text(spec, ranges)}, '
                    f"{source} is {_text(source_spec, self._dims)}"
                )
        for one in manifest.outputs:
            name = f"{step.name}.{one.name}"
            if name in self._values:
                raise self._wrong(f'two values have the name "{name}"')
            shape = [self._extent(extent, bound, ranges, step) for extent in one.shape]
            self._values[name] = msgspec.structs.replace(one, shape=tuple(shape))
        return msgspec.structs.replace(step, inputs=inputs)

    def _extent(
        self,
        extent: Extent,
        bound: dict[str, Extent],
        ranges: Mapping[str, Dim],
        step: ChainStep,
        is_input: bool = False,
    ) -> Extent:
        """Return a model's extent in the chain's dimensions.

        A dimension becomes a new dimension of the chain if it is unbound, or if it is bound to a
        computed extent and a request sends the input.
        """
        if isinstance(extent, Expr):
            parts = [self._extent(one, bound, ranges, step) for one in extent.args]
            return Expr(extent.op, tuple(parts))
        if not isinstance(extent, str):
            return extent
        if extent not in bound or (is_input and isinstance(bound[extent], Expr)):
            name = extent if extent not in self._dims else f"{step.name}.{extent}"
            self._dims[name] = Dim(name, ranges[extent].low, ranges[extent].high)
            bound[extent] = name
        return bound[extent]

    def _fits(
        self,
        source_spec: ValueSpec,
        spec: ValueSpec,
        bound: dict[str, Extent],
        ranges: Mapping[str, Dim],
    ) -> bool:
        """Return True if the two specs can match; narrow the ranges of the chain's dimensions."""
        if source_spec.dtype != spec.dtype or len(source_spec.shape) != len(spec.shape):
            return False
        for have, want in zip(source_spec.shape, spec.shape, strict=True):
            if isinstance(want, str):
                bound.setdefault(want, have)
            (low, high), (least, most) = _ends(want, ranges), _ends(have, self._dims)
            if max(low, least) > min(high, most):
                return False
            if isinstance(have, str):
                self._dims[have] = Dim(have, max(low, least), min(high, most))
        return True

    def _known(self, source: str, what: str) -> None:
        if source not in self._values:
            there = ", ".join(name for name in self._values if name not in self._sent)
            raise self._wrong(
                f'{what} is to be "{source}", which no earlier step returns; '
                f"there are {there or 'none yet'}"
            )

    def _wrong(self, why: str) -> InvalidInput:
        return InvalidInput(f'chain "{self._name}": {why}', hint=HINT)


def _ends(extent: Extent, ranges: Mapping[str, Dim]) -> tuple[int, int]:
    """Return the range of an extent; that of a computed extent is 0 to ``MAX_EXTENT``."""
    if isinstance(extent, int):
        return extent, extent
    dim = ranges.get(extent) if isinstance(extent, str) else None
    return (0, MAX_EXTENT) if dim is None else (dim.low, dim.high)


def _text(spec: ValueSpec, ranges: Mapping[str, Dim]) -> str:
    ends = [_ends(extent, ranges) for extent in spec.shape]
    return signature_text(spec.dtype, [f"{a}..{b}" if a < b else a for a, b in ends])
