"""Chains: models that are asked one after the other, as one. Pure (docs/adr/0042-chains.md).

An input of a step is named after an input of the request (``ids``) or an output of an earlier step
(``encoder.y``); one that is not named is that of its own name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec

from ..errors import InvalidInput
from ..units import nearest, printable
from .dims import MAX_EXTENT, Dim, Expr, Extent, extent_text
from .layout import Manifest, ValueSpec
from .signature import signature_text

MAX_STEPS: Final = 16
MAX_VALUES: Final = 64  # of the request and of the answer: as many tensors as a message has
HINT: Final = "pipeswitch chain NAME encoder head:x=encoder.y --output label=head.label"

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Sources = Annotated[dict[_Name, _Name], msgspec.Meta(max_length=MAX_VALUES)]


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model of a chain."""

    model: _Name
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""  # empty: the model's
    inputs: Sources = {}  # of the model: which value each is


Steps = Annotated[tuple[Step, ...], msgspec.Meta(min_length=1, max_length=MAX_STEPS)]


class Chain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checked: each step has a name, each of its inputs a source, each output as well."""

    steps: tuple[Step, ...]
    returns: dict[str, str]  # the answer's outputs: which value each is
    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    dims: tuple[Dim, ...] = ()

    def needed(self, number: int) -> set[str]:
        """The values that are read from this step on."""
        later = (step.inputs.values() for step in self.steps[number:])
        return set(self.returns.values()).union(*later)

    @property
    def manifest(self) -> Manifest:
        """As admission sees it: what a request brings."""
        return Manifest(
            digest="", mode="graph", mode_reason="", source="chain", total_bytes=0, tensors=(),
            groups=(), inputs=self.inputs, outputs=(), dims=self.dims,
        )  # fmt: skip


def chain_of(
    name: str, steps: Sequence[Step], returns: Mapping[str, str], models: Mapping[str, Manifest]
) -> Chain:
    """The chain that was declared.

    Args:
        returns: the answer's outputs by name; none: all of the last step.
        models: those that there are, as their clients see them.

    Raises:
        InvalidInput: a name leads nowhere, a value does not fit, or a step is in vain.
    """
    return _Resolver(name, steps, returns, models).chain()


class _Resolver:
    """One declaration: the values so far, in the request's dimensions."""

    def __init__(
        self, name: str, steps: Sequence[Step], returns: Mapping[str, str],
        models: Mapping[str, Manifest],
    ) -> None:  # fmt: skip
        self._chain_name, self._models, self._returns = name, models, dict(returns)
        self._steps = [
            step if step.name else msgspec.structs.replace(step, name=step.model) for step in steps
        ]
        self._made: dict[str, ValueSpec] = {}  # by earlier steps: encoder.y
        self._sent: dict[str, ValueSpec] = {}  # by the request
        self._dims: dict[str, Dim] = {}
        self._last: dict[str, str] = {}  # the outputs of the last step, by their own names

    def chain(self) -> Chain:
        names = [step.name for step in self._steps]
        for name in names:
            if names.count(name) > 1:
                raise self._wrong(f'two steps are called "{name}"',
                                  f"again={name}:x={name}.y gives the second a name")  # fmt: skip
        steps = tuple(map(self._step, self._steps))
        returns = self._returns or self._last
        for source in returns.values():
            if source not in self._made:
                raise self._nowhere(source, "an output of the answer")
        chain = Chain(
            steps=steps, returns=returns, inputs=tuple(self._sent.values()),
            outputs=tuple(
                msgspec.structs.replace(self._made[source], name=printed_name(name))
                for name, source in returns.items()
            ),
            dims=tuple(self._dims.values()),
        )  # fmt: skip
        if len(returns) > MAX_VALUES or len(self._sent) > MAX_VALUES:
            raise self._wrong(f"it has over {MAX_VALUES} inputs or outputs")
        for number, step in enumerate(steps):
            if not any(f"{step.name}.{one.name}" in chain.needed(number + 1)
                       for one in self._models[step.model].outputs):  # fmt: skip
                raise self._wrong(f'nothing reads what step "{step.name}" returns', HINT)
        return chain

    def _step(self, step: Step) -> Step:
        manifest = self._models.get(step.model)
        if manifest is None:
            guess = nearest(step.model, self._models)
            raise self._wrong(f'step "{step.name}" needs model "{step.model}", which is not '
                              f"registered, or no model{guess}", "pipeswitch models")  # fmt: skip
        takes = [one.name for one in manifest.inputs]
        for name in step.inputs:
            if name not in takes:
                raise self._wrong(f'step "{step.name}" has no input "{name}"{nearest(name, takes)}',
                                  f"its inputs are {', '.join(takes)}")  # fmt: skip
        ranges = {dim.name: dim for dim in manifest.dims}
        bound: dict[str, Extent] = {}
        inputs = {}
        for wanted in manifest.inputs:
            source = step.inputs.get(wanted.name, wanted.name)
            if source not in self._made and source != wanted.name and "." in source:
                raise self._nowhere(source, f'input "{wanted.name}" of step "{step.name}"')
            inputs[wanted.name] = source
            given = self._made.get(source) or self._sent.get(source)
            if given is None:
                shape = tuple(self._public(n, bound, ranges, step) for n in wanted.shape)
                shape = tuple(
                    self._opened(n, ranges, step) if isinstance(n, str) and isinstance(one, Expr)
                    else one for n, one in zip(wanted.shape, shape, strict=True)
                )  # fmt: skip
                self._sent[source] = ValueSpec(
                    name=printed_name(source), dtype=wanted.dtype, shape=shape
                )
            elif not self._fits(given, wanted, bound, ranges):
                raise self._wrong(
                    f'step "{step.name}" input "{wanted.name}" expects {_text(wanted, ranges)}, '
                    f"{source} is {_text(given, self._dims)}", f"pipeswitch show {step.model}",
                )  # fmt: skip
        self._last = {one.name: f"{step.name}.{one.name}" for one in manifest.outputs}
        for one in manifest.outputs:
            shape = tuple(self._public(n, bound, ranges, step) for n in one.shape)
            made = msgspec.structs.replace(one, shape=shape)
            if self._made.setdefault(self._last[one.name], made) is not made:
                raise self._wrong(f'two outputs are called "{self._last[one.name]}"')
        return msgspec.structs.replace(step, inputs=inputs)

    def _public(
        self, extent: Extent, bound: dict[str, Extent], ranges: Mapping[str, Dim], step: Step
    ) -> Extent:
        """A model's extent in the chain's dimensions; one that nothing has bound is a new one."""
        if isinstance(extent, Expr):
            args = tuple(self._public(one, bound, ranges, step) for one in extent.args)
            return Expr(extent.op, args)
        if not isinstance(extent, str):
            return extent
        if extent not in bound:
            bound[extent] = self._opened(extent, ranges, step)
        return bound[extent]

    def _opened(self, extent: str, ranges: Mapping[str, Dim], step: Step) -> str:
        """A dimension of the chain's own, which computed inputs of a request have too."""
        name = extent if extent not in self._dims else f"{step.name}.{extent}"
        self._dims[name] = Dim(name, ranges[extent].low, ranges[extent].high)
        return name

    def _fits(
        self, given: ValueSpec, wanted: ValueSpec, bound: dict[str, Extent],
        ranges: Mapping[str, Dim],
    ) -> bool:  # fmt: skip
        """As far as can be told before a request chooses; what it may choose is narrowed."""
        if given.dtype != wanted.dtype or len(given.shape) != len(wanted.shape):
            return False
        for have, want in zip(given.shape, wanted.shape, strict=True):
            if isinstance(want, str):
                bound.setdefault(want, have)
            low, high = _ends(want, ranges)
            least, most = _ends(have, self._dims)
            if max(low, least) > min(high, most):
                return False
            if isinstance(have, str):
                self._dims[have] = Dim(have, max(low, least), min(high, most))
        return True

    def _nowhere(self, source: str, what: str) -> InvalidInput:
        later = [step.name for step in self._steps if source.startswith(f"{step.name}.")]
        why = "of a later step, or of none" if later else "of an earlier step"
        found = ", ".join(self._made) or "none yet"
        return self._wrong(f'{what} is to be "{source}", which is no output {why}'
                           f"{nearest(source, self._made)}", f"there are {found}")  # fmt: skip

    def _wrong(self, why: str, hint: str = "") -> InvalidInput:
        return InvalidInput(f'chain "{self._chain_name}": {why}', hint=hint)


def printed_name(name: str) -> str:
    """A name of the request or of the answer.

    Raises:
        InvalidInput: it has control characters.
    """
    if printable(name, keep="") != name:
        raise InvalidInput(f"name {name[:80]!r} has control characters")
    return name


def _ends(extent: Extent, ranges: Mapping[str, Dim]) -> tuple[int, int]:
    """What it may be; of what is computed that shows with a request."""
    if isinstance(extent, int):
        return extent, extent
    dim = ranges.get(extent) if isinstance(extent, str) else None
    return (0, MAX_EXTENT) if dim is None else (dim.low, dim.high)


def _text(spec: ValueSpec, ranges: Mapping[str, Dim]) -> str:
    def text(extent: Extent) -> str:
        dim = ranges.get(extent) if isinstance(extent, str) else None
        return extent_text(extent) if dim is None else f"{dim.low}..{dim.high}"

    return signature_text(spec.dtype, map(text, spec.shape))
