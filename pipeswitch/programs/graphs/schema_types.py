"""Kinds of a graph's values and arguments, checked against the operators' schemas.

Python's callables accept a number as the code of a dtype, a layout or a memory format. A graph may
compute numbers from extents, so a number that is harmless at the checked shapes could mean another
dtype at other shapes. So a dtype, layout or memory format must be a constant with the tag of its
kind (``bundle.TAGS``). Kinds that are not in the table are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_TAGS: Final[Mapping[str, str]] = {
    "ScalarType": "dtype",
    "Layout": "layout",
    "MemoryFormat": "memory_format",
    "Device": "device",
}
"""Kinds whose values must be constants with this tag."""

_CONSTANTS: Final[Mapping[str, tuple[type, ...]]] = {
    "int": (int,),
    "bool": (bool,),
    "str": (str,),
    "float": (float, int),
    "number": (float, int, bool),
    "Tensor": (float, int, bool),  # torch makes a tensor of a number
}
_FROM_EXTENTS: Final = frozenset({"int", "float", "number", "Tensor"})
_SEVERAL: Final = "List[Tensor]"


def returned(schema: Any) -> str:
    """Return the kind of an operator's result, from its schema."""
    kinds = [str(result.real_type) for result in schema.returns]
    return kinds[0] if len(kinds) == 1 else _SEVERAL


def element(kind: str) -> str:
    """Return the kind of a value's items: ``nothing``, which fits no argument, if not a list."""
    return "Tensor" if kind == _SEVERAL else "nothing"


def fits(kind: str, argument: Any, kinds: list[str]) -> bool:
    """Return True if a node's argument is of the kind that the schema requires.

    Args:
        kind: the schema's kind, such as ``Optional[List[int]]``.
        argument: a constant, a tagged constant, a reference, or a list, as in the bundle.
        kinds: the kinds of earlier values, by number.
    """
    if kind.startswith("Optional["):
        return argument is None or fits(kind[9:-1], argument, kinds)
    if kind.startswith("List[") and not _is_reference(argument, kind, kinds):
        inner = kind[5:-1]
        if isinstance(argument, list | tuple):
            return all(fits(inner, item, kinds) for item in argument)
        return inner != "Tensor" and fits(inner, argument, kinds)  # one item, for all axes
    if isinstance(argument, dict):
        return _is_reference(argument, kind, kinds) or _is_tagged(argument, kind)
    return type(argument) in _CONSTANTS.get(kind, ())  # a bool does not count as an integer


def _is_reference(argument: Any, kind_name: str, kinds: list[str]) -> bool:
    if not isinstance(argument, dict) or "v" not in argument:
        return False
    kind = kinds[argument["v"]]
    return kind == kind_name or (kind == "int" and kind_name in _FROM_EXTENTS)


def _is_tagged(argument: Mapping[str, Any], kind: str) -> bool:
    if "float" in argument:
        return kind in ("float", "number", "Tensor")
    return kind in _TAGS and _TAGS[kind] in argument
