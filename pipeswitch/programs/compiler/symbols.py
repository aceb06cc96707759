"""Conversion of an export's symbolic extents, and search for shapes that break its assumptions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import sympy  # type: ignore[import-untyped]  # torch's shapes are expressions of sympy
from torch.utils._sympy import functions

from ..interface.dims import Dim, Expr, Extent, NoExtent, Values, all_values, evaluate, shape_count
from .dynamic import NotDynamic

MAX_CONDITION_CASES: Final = 1 << 18  # testing so many takes about a second
MAX_SUSPECTS: Final = 4  # shapes per condition; at all of them the module takes the same path
MAX_POWER: Final = 4

_FUNCTIONS: Final[Mapping[type, str]] = {
    sympy.Add: "+",
    sympy.Mul: "*",
    sympy.Max: "max",
    sympy.Min: "min",
    functions.Max: "max",
    functions.Min: "min",
    functions.FloorDiv: "//",
    functions.CleanDiv: "//",
    functions.Mod: "%",
    functions.PythonMod: "%",
}

_RELATIONS: Final[Mapping[type, Any]] = {
    sympy.Eq: int.__eq__,
    sympy.Ne: int.__ne__,
    sympy.Lt: int.__lt__,
    sympy.Le: int.__le__,
    sympy.Gt: int.__gt__,
    sympy.Ge: int.__ge__,
}


def extent_of(expression: Any, names: Mapping[Any, str], *, divides_by_any: bool = False) -> Extent:
    """Convert a symbolic expression over ``names`` to an extent.

    Args:
        expression: an expression of torch.
        names: symbol -> name of a dimension.
        divides_by_any: allow any divisor in conditions; in a bundle a divisor must be a number.

    Raises:
        NotDynamic: the expression cannot be an extent.
    """
    if isinstance(expression, int | sympy.Integer):
        return int(expression)
    if expression in names:
        return names[expression]
    op = _FUNCTIONS.get(type(expression), "")
    if isinstance(expression, sympy.Pow) and expression.exp in range(2, MAX_POWER + 1):
        return Expr("*", (extent_of(expression.base, names),) * int(expression.exp))
    operands = expression.args if op else ()
    args = tuple(extent_of(one, names, divides_by_any=divides_by_any) for one in operands)
    is_division = op in ("//", "%") and not divides_by_any
    if not op or (is_division and (type(args[1]) is not int or args[1] < 1)):
        raise NotDynamic(
            f"an extent is {expression}, which cannot be derived from a request's shapes"
        )
    return Expr(op, args)


def suspects(
    conditions: Iterable[Any], names: Mapping[Any, str], dims: Sequence[Dim]
) -> list[dict[str, int]]:
    """Return values that break a condition of the trace, at most ``MAX_SUSPECTS`` for each.

    With such values the module may take another path than the traced one, so the caller must
    compare the results bit by bit. The first and the last broken values are among them.

    Raises:
        NotDynamic: a condition cannot be computed here, or has too many cases.
    """
    values: list[dict[str, int]] = []
    for condition in conditions:
        if condition in (True, sympy.true):
            continue
        # sympy's own extremes are simplified, such as min(n, 4 * n) to n; torch 2.11's are not.
        condition = condition.replace(functions.Min, sympy.Min).replace(functions.Max, sympy.Max)
        if condition == sympy.true:
            continue
        compare = _RELATIONS.get(type(condition))
        if compare is None:
            raise NotDynamic(f"it depends on {condition}")
        left, right = (extent_of(side, names, divides_by_any=True) for side in condition.args)
        used = {names[symbol] for symbol in condition.free_symbols}
        own = [dim for dim in dims if dim.name in used]
        if shape_count(own) > MAX_CONDITION_CASES:
            raise NotDynamic(f"whether {_worded(condition, names)} has too many cases")
        broken = [one for one in all_values(own) if not _holds(compare, left, right, one)]
        step = max(1, (len(broken) - 1) // (MAX_SUSPECTS - 1))
        values += [
            one for one in [*broken[::step][: MAX_SUSPECTS - 1], *broken[-1:]] if one not in values
        ]
    return values


def _holds(compare: Any, left: Extent, right: Extent, values: Values) -> bool:
    try:
        return bool(compare(evaluate(left, values), evaluate(right, values)))
    except (NoExtent, ZeroDivisionError):
        return False


def _worded(condition: Any, names: Mapping[Any, str]) -> str:
    return str(condition.xreplace({s: sympy.Symbol(n) for s, n in names.items()}))
