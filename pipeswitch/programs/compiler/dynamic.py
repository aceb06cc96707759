"""Choice of a model's open dimensions, whose extents may differ from request to request.

Dimension 0 is the batch if all inputs share it. Other dimensions are open if the caller or the
source gives a range. ``choices`` lists the exports to try, the one with most open dimensions first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from ...base.errors import RegistrationRefused
from ...base.units import nearest
from ..interface.dims import BATCH, MAX_EXTENT, MAX_NAMED, Dim, Values

Range = tuple[int, int] | tuple[str, int, int]
Dynamic = Mapping[str, Mapping[int, Range]]
"""Input -> dimension -> (smallest, largest) or (name, smallest, largest)."""

Axes = dict[tuple[int, int], Dim]
"""(number of the input, dimension) -> its name and range."""

_USUAL_NAMES: Final[Mapping[tuple[int, int], str]] = {
    (2, 1): "length",
    (3, 1): "length",
    (4, 2): "height",
    (4, 3): "width",
}
"""(number of the input's dimensions, dimension) -> the dimension's usual name."""
_CHANNELS: Final = (1, 3, 4)  # channels of a picture; other inputs of four dimensions may be caches


ENDLESS: Final = 512  # largest extent of a dimension without an upper end

Works = Mapping[str, tuple[int | None, int | None]]
"""Dimension -> ends of a range that may work; None: that end need not change."""


class NotDynamic(Exception):
    """Failed export that might work with fewer open dimensions or narrower ranges."""

    def __init__(self, why: str, works: Works | None = None) -> None:
        super().__init__(why)
        self.works = works or {}


def narrowed(axes: Axes, shapes: Sequence[Sequence[int]], works: Works) -> Axes:
    """Return ``axes``, narrowed to the ranges of ``works`` that contain the example's extent."""
    own = {dim.name: shapes[number][axis] for (number, axis), dim in axes.items()}
    ranges = {}
    for place, dim in axes.items():
        low, high = works.get(dim.name, (None, None))
        low, high = max(dim.low, low or dim.low), min(dim.high, high or dim.high)
        is_range = low <= own[dim.name] <= high and low < high
        ranges[place] = Dim(dim.name, low, high) if is_range else dim
    return ranges


def working_end(
    values: Values, own: Values, is_same: Callable[[Values], bool]
) -> dict[str, tuple[int | None, int | None]]:
    """Return a working end for the only dimension in which ``values`` differs from ``own``.

    The search goes from the failing ``values`` to ``own``. The result is empty if several
    dimensions differ.
    """
    names = [name for name in own if name != BATCH and values[name] != own[name]]
    if len(names) != 1:
        return {}
    [name] = names
    broken, whole = values[name], own[name]
    sign = 1 if whole > broken else -1
    halves = [abs(whole - broken) >> n for n in range(1, MAX_EXTENT.bit_length())]
    tried = [broken + sign, *(whole - sign * distance for distance in halves if distance)]
    end = next((n for n in tried if n != whole and is_same({**values, name: n})), whole)
    return {name: (end, None) if sign > 0 else (None, end)}


def asked_axes(names: Sequence[str], shapes: Sequence[Sequence[int]], dynamic: Dynamic) -> Axes:
    """Return the requested dimensions; axes of equal usual name, range and extent share one.

    Raises:
        RegistrationRefused: an input or dimension does not exist, or a range is invalid.
    """
    axes: Axes = {}
    names_used: dict[str, tuple[Dim, int]] = {}
    for name, axis_ranges in _by_input(names, dynamic):
        number = names.index(name)
        shape = shapes[number]
        for axis, bounds in axis_ranges.items():
            part = f"dynamic {name!r}: {{{axis!r}: {bounds!r}}}"
            if type(axis) is not int or not 0 <= axis < len(shape):
                raise RegistrationRefused(part, f"it has dimensions 0 to {len(shape) - 1}")
            label, low, high = _range(part, bounds)
            if not low <= shape[axis] <= high:
                raise RegistrationRefused(
                    part, f"the example's extent {shape[axis]} is not within {low}..{high}"
                )
            if low == high:
                continue  # the dimension is fixed
            free = [label] if label else names_for(shape, axis)
            axes[number, axis] = _named(free, low, high, shape[axis], names_used)
    return axes


def _by_input(names: Sequence[str], dynamic: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield each input's name and ranges; ``dynamic`` has names or patterns (``cache.*.k``).

    As in torch's ``dynamic_shapes``, ranges may also be a list in the inputs' order, or None.
    """
    if isinstance(dynamic, list | tuple):
        dynamic = dict(zip(names, dynamic, strict=False))
    for pattern, axis_ranges in dynamic.items():
        matches = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not matches:
            raise RegistrationRefused(
                f"dynamic {pattern!r}",
                f"no input has that name{nearest(pattern, names)}",
                hint=f"the inputs are {', '.join(names)}",
            )
        ranges = dict(
            axis_ranges if isinstance(axis_ranges, Mapping) else enumerate(axis_ranges or ())
        )
        for name in matches:
            yield name, {axis: bounds for axis, bounds in ranges.items() if bounds is not None}


def names_for(shape: Sequence[Any], axis: int) -> Iterator[str]:
    """Yield candidate names for a dimension without a name, the best first."""
    is_picture = len(shape) != 4 or shape[1] in _CHANNELS
    usual = _USUAL_NAMES.get((len(shape), axis), "") if is_picture else ""
    usual = BATCH if axis == 0 else usual or f"dim{axis}"
    return (f"{usual}{number or ''}" for number in range(MAX_NAMED))


def _range(part: str, ends: Any) -> tuple[str, int, int]:
    if hasattr(ends, "min") and hasattr(ends, "max"):  # a torch.export.Dim
        ends = (getattr(ends, "__name__", ""), _end(ends.min, 1), _end(ends.max, ENDLESS))
    parts = tuple(ends) if isinstance(ends, list | tuple) else ()
    label, bounds = ("", parts) if len(parts) == 2 else (parts[0] if parts else "", parts[1:])
    is_range = len(bounds) == 2 and all(type(one) is int for one in bounds)
    if not is_range or not isinstance(label, str) or not 1 <= bounds[0] <= bounds[1] <= MAX_EXTENT:
        raise RegistrationRefused(
            part,
            f"a range is ([name,] smallest, largest), up to {MAX_EXTENT}; "
            'or torch.export.Dim("length", min=1, max=512)',
        )
    return label, bounds[0], bounds[1]


def _end(end: Any, default: int) -> int:
    """Return an end of torch's range as an int, or the default for None, 0 or infinity."""
    return int(end) or default if str(end).isdigit() else default


def _named(
    free: Iterable[str], low: int, high: int, extent: int, names_used: dict[str, tuple[Dim, int]]
) -> Dim:
    """Return a dimension with the first name that is unused, or used for the same range."""
    for name in free:
        dim, known = names_used.setdefault(name, (Dim(name, low, high), extent))
        if (dim.low, dim.high, known) == (low, high, extent):
            return dim
    raise RegistrationRefused(
        f"dimension {name!r}",
        f"one is {dim.low}..{dim.high} with {known} in the example, another {low}..{high} with "
        f"{extent}",
    )


def batch_axes(shapes: Sequence[Sequence[int]], max_batch: int, axes: Axes) -> tuple[Axes, str]:
    """Return dimension 0 of all inputs as their shared batch, or no axes and the reason.

    Inputs without dimensions are ignored. So are inputs of one number (a time step, a temperature)
    if the other inputs have several rows.
    """
    rows = {n: shape[0] for n, shape in enumerate(shapes) if shape}
    several = {n: extent for n, extent in rows.items() if math.prod(shapes[n]) > 1}
    if len({*rows.values()}) > 1:
        rows = several
    extents = {*rows.values()}
    if not rows:
        return {}, "no input has a dimension" if shapes else "there are no inputs"
    batch_dims = [dim for (_, axis), dim in axes.items() if axis == 0]
    if batch_dims and batch_dims[0].name != BATCH:
        return {}, f"dimension 0 is {batch_dims[0].name}"
    if len(extents) != 1 or 0 in extents:
        return {}, (
            "the inputs do not share dimension 0 (dynamic opens it: give equal ranges for all of "
            'the inputs that change together, {"a": {0: (1, 64)}, "b": {0: (1, 64)}})'
        )
    dim = batch_dims[0] if batch_dims else Dim(BATCH, 1, max(max_batch, *extents))
    if dim.high < 2:
        return {}, "max_batch is 1"
    return dict.fromkeys(((number, 0) for number in rows), dim), ""


def choices(batch: Axes, axes: Axes, *, is_wish: bool) -> list[Axes]:
    """Return the exports to try, in order; ``is_wish`` allows dropping requested dimensions."""
    tried = [{**batch, **axes}]
    if not any(axis == 0 for _, axis in axes):
        tried.append(axes)
    if is_wish or not axes:
        tried += [batch, {}]
    return [axes for index, axes in enumerate(tried) if axes not in tried[:index]]
