"""Dimensions that a request chooses, and extents computed from them. Pure, no torch.

A program names its open dimensions, each with a range. An extent of a shape is a number, the name
of a dimension, or an expression over numbers and names. An expression is data, a small tree that is
computed here and never evaluated as code. An input's extents are only numbers and names, so a
request's shapes determine the value of each name. An output's extents are computed from the values.

Expressions come from clients' bundles, so their size and all intermediate numbers are limited.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from ...base.errors import RegistrationRefused

BATCH: Final = "batch"
"""Name of dimension 0 of all inputs, if they share it."""

MAX_NAMED: Final = 6  # dimensions of one program: all combinations of their ends are checked
MAX_EXTENT: Final = 1 << 24  # a minute of sound has 2**22 samples
MAX_EXPR_NODES: Final = 64  # forty convolutions in a row need fewer
MAX_EXPR_DEPTH: Final = 24
MAX_NUMBER: Final = 1 << 62  # absolute value of any intermediate number
MAX_ELEMENTS: Final = 1 << 40  # maximum elements of one tensor
MAX_PARTS: Final = 1024  # nodes of all inputs' and outputs' extents: each request computes them
TYPICAL_EXTENT: Final = 128  # extent of random inputs, if the range admits it

Values = Mapping[str, int]
"""Size of each open dimension in one request."""

MAX_NAME_CHARS: Final = 32


class Dim(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A dimension that requests choose: from ``low`` to ``high``, both included."""

    name: str
    low: int
    high: int


class Expr(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A computed extent: one of ``OPERATORS`` applied to its arguments."""

    op: str
    args: tuple[int | str | Expr, ...]


Extent = int | str | Expr
Shape = tuple[Extent, ...]

OPERATORS: Final = {"+", "*", "//", "%", "min", "max"}


class NoExtent(ValueError):
    """An extent cannot be computed: a name has no value, or the number is negative or too large."""


def evaluate(extent: Extent, values: Values) -> int:
    """Return the value of an extent.

    Raises:
        NoExtent: an intermediate number is too large, or a name has no value.
    """
    if isinstance(extent, str):
        if extent not in values:
            raise NoExtent(f"{extent[:40]!r} has no value")
        return values[extent]
    if not isinstance(extent, Expr):
        return extent
    numbers = [evaluate(argument, values) for argument in extent.args]
    match extent.op:
        case "+":
            number = sum(numbers)
        case "*":
            number = math.prod(numbers)
        case "//":
            number = numbers[0] // numbers[1]
        case "%":
            number = numbers[0] % numbers[1]
        case "min":
            number = min(numbers)
        case _:
            number = max(numbers)
    if not -MAX_NUMBER <= number <= MAX_NUMBER:
        raise NoExtent(f"{extent_text(extent)[:80]} does not fit 62 bits")
    return number


def names_in(extent: Extent) -> set[str]:
    """Return the dimensions from which an extent is computed."""
    if isinstance(extent, Expr):
        return set().union(*map(names_in, extent.args))
    return {extent} if isinstance(extent, str) else set()


def shape_at(shape: Sequence[Extent], values: Values) -> tuple[int, ...]:
    """Return the sizes of a shape's extents.

    Raises:
        NoExtent: an extent is negative or has no value, or the shape has more than
            ``MAX_ELEMENTS`` elements.
    """
    sizes = tuple(evaluate(extent, values) for extent in shape)
    if any(not 0 <= extent <= MAX_ELEMENTS for extent in sizes) or math.prod(sizes) > MAX_ELEMENTS:
        raise NoExtent(f"{shape_text(shape)[:200]} would be {list(sizes)}, which is not a size")
    return sizes


def check_extent(part: str, extent: Any, names: Iterable[str]) -> int:
    """Refuse an extent that is not a number, one of ``names`` or a small expression over them.

    Returns:
        The number of its nodes.
    """
    budget = [MAX_EXPR_NODES]
    _check_extent(part, extent, frozenset(names), MAX_EXPR_DEPTH, budget)
    return MAX_EXPR_NODES - budget[0]


def _check_extent(
    part: str, extent: Any, names: frozenset[str], depth: int, budget: list[int]
) -> None:
    budget[0] -= 1
    if depth == 0 or budget[0] < 0:
        raise RegistrationRefused(
            part, f"an extent is deeper than {MAX_EXPR_DEPTH} or has over {MAX_EXPR_NODES} parts"
        )
    if isinstance(extent, str):
        if extent not in names:
            raise RegistrationRefused(part, f"{extent[:40]!r} is not a dimension of this program")
    elif isinstance(extent, Expr):
        if extent.op not in OPERATORS or not 2 <= len(extent.args) <= MAX_EXPR_NODES:
            raise RegistrationRefused(part, f"{extent.op[:20]!r} is not an operator on extents")
        if extent.op in ("//", "%"):
            divisor = extent.args[1]
            if len(extent.args) != 2 or type(divisor) is not int or divisor < 1:
                raise RegistrationRefused(part, "an extent must be divided by a number")
        for argument in extent.args:
            _check_extent(part, argument, names, depth - 1, budget)
    elif type(extent) is not int or abs(extent) > MAX_NUMBER:
        raise RegistrationRefused(part, f"extent {str(extent)[:40]} is not a size")


def check_dims(dims: Sequence[Dim]) -> None:
    """Refuse too many dimensions, an invalid or repeated name, and an invalid range."""
    if len(dims) > MAX_NAMED or len({dim.name for dim in dims}) != len(dims):
        raise RegistrationRefused("dimensions", f"more than {MAX_NAMED}, or two of one name")
    for dim in dims:
        is_word = dim.name.isascii() and dim.name.isidentifier() and dim.name.islower()
        if not is_word or len(dim.name) > MAX_NAME_CHARS:
            raise RegistrationRefused(
                "dimensions",
                f"{dim.name[:40]!r} is no name of one: a-z, 0-9 and _, at most {MAX_NAME_CHARS}",
            )
        if not 1 <= dim.low <= dim.high <= MAX_EXTENT:
            raise RegistrationRefused(
                f"dimension {dim.name!r}",
                f"{dim.low}..{dim.high} is not a range of sizes from 1 to {MAX_EXTENT}",
            )


def match(shape: Sequence[Extent], numbers: Sequence[int], values: dict[str, int]) -> bool:
    """Return True if ``numbers`` matches an input's shape; add its names' sizes to ``values``.

    This does not check whether the sizes are in their ranges.
    """
    if len(shape) != len(numbers):
        return False
    for extent, number in zip(shape, numbers, strict=True):
        known = values.setdefault(extent, number) if isinstance(extent, str) else extent
        if known != number:
            return False
    return True


def values_of(
    shapes: Iterable[Sequence[Extent]], sizes: Iterable[Sequence[int]]
) -> dict[str, int] | None:
    """Return each name's size in a request's shapes, or None if these do not match the inputs."""
    values: dict[str, int] = {}
    fits = [match(shape, numbers, values) for shape, numbers in zip(shapes, sizes, strict=True)]
    return values if all(fits) else None


def typical(dim: Dim) -> int:
    """Return an extent for random inputs: ``TYPICAL_EXTENT`` (batch: 1), or the nearest allowed."""
    return min(dim.high, max(dim.low, 1 if dim.name == BATCH else TYPICAL_EXTENT))


def at_batch(dims: Iterable[Dim], batch: int) -> dict[str, int]:
    """Return typical values, with the batch dimension, if there is one, set to ``batch``."""
    return {dim.name: batch if dim.name == BATCH else typical(dim) for dim in dims}


def largest(dims: Iterable[Dim]) -> dict[str, int]:
    """Return the largest value of each dimension."""
    return {dim.name: dim.high for dim in dims}


def batch_range(dims: Iterable[Dim]) -> tuple[int, int]:
    """Return the smallest and the largest batch, or (1, 1) without a batch dimension."""
    return next(((dim.low, dim.high) for dim in dims if dim.name == BATCH), (1, 1))


def shape_count(dims: Iterable[Dim]) -> int:
    """Return the number of combinations that a request may choose."""
    return math.prod(dim.high - dim.low + 1 for dim in dims)


def all_values(dims: Sequence[Dim]) -> Iterator[dict[str, int]]:
    """Yield every combination that a request may choose."""
    return _combinations(dims, [range(dim.low, dim.high + 1) for dim in dims])


def corners(dims: Sequence[Dim]) -> Iterator[dict[str, int]]:
    """Yield every combination of the ranges' ends, the typical values first."""
    yield {dim.name: typical(dim) for dim in dims}
    yield from _combinations(dims, [sorted({dim.low, dim.high}) for dim in dims])


def _combinations(
    dims: Sequence[Dim], choices: Sequence[Iterable[int]]
) -> Iterator[dict[str, int]]:
    names = [dim.name for dim in dims]
    for numbers in itertools.product(*choices):
        yield dict(zip(names, numbers, strict=True))


def extent_text(extent: Extent) -> str:
    """Return an extent as text for people, such as ``length`` or ``(length+1)//2``."""
    if not isinstance(extent, Expr):
        return str(extent)
    texts = [extent_text(argument) for argument in extent.args]
    if extent.op in ("min", "max"):
        return f"{extent.op}({','.join(texts)})"
    is_whole = [not isinstance(a, Expr) or a.op in ("min", "max") for a in extent.args]
    texts = [t if w else f"({t})" for t, w in zip(texts, is_whole, strict=True)]
    return extent.op.join(texts).replace("+-", "-")


def shape_text(shape: Iterable[Extent]) -> str:
    """Return a shape as text for people, such as ``[batch,3]``."""
    return f"[{','.join(map(extent_text, shape))}]"


def values_text(values: Values) -> str:
    """Return values as text for errors, such as ``batch=2 length=7``."""
    return " ".join(f"{name}={number}" for name, number in values.items()) or "its only shape"
