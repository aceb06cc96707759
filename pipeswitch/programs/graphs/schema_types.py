"""Kinds of a graph's values and arguments, checked against the operators' schemas.

Python's callables accept a number for a dtype, a layout or a memory format: it is the code of one.
Numbers may be computed, so one that is harmless at the rehearsed shapes could name another dtype
between them. Here such kinds are constants of their own tag (``bundle.TAGS``), and kinds that the
table lacks are refused.
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
"""Kinds that are constants of their own tag alone."""

_CONSTANTS: Final[Mapping[str, tuple[type, ...]]] = {
    "int": (int,),
    "bool": (bool,),
    "str": (str,),
    "float": (float, int),
    "number": (float, int, bool),
    "Tensor": (float, int, bool),  # a number in the place of a tensor is one
}
_FROM_EXTENTS: Final = frozenset({"int", "float", "number", "Tensor"})
_SEVERAL: Final = "List[Tensor]"


def returned(schema: Any) -> str:
    """Return the kind of a call's value, by its operator's schema."""
    kinds = [str(result.real_type) for result in schema.returns]
    return kinds[0] if len(kinds) == 1 else _SEVERAL


def element(kind: str) -> str:
    """Return the kind that ``getitem`` takes out of a value; ``nothing`` fits no argument."""
    return "Tensor" if kind == _SEVERAL else "nothing"


def fits(kind: str, argument: Any, kinds: list[str]) -> bool:
    """Return True if a node's argument is of the kind that the schema requires.

    Args:
        kind: the schema's kind, such as ``Optional[List[int]]``.
        argument: as a bundle has it: a constant, a tagged one, a reference, or a list of those.
        kinds: the kinds of earlier values, by number.
    """
    if kind.startswith("Optional["):
        return argument is None or fits(kind[9:-1], argument, kinds)
    if kind.startswith("List[") and not _is_reference(argument, kind, kinds):
        inner = kind[5:-1]
        if isinstance(argument, list | tuple):
            return all(fits(inner, item, kinds) for item in argument)
        return inner != "Tensor" and fits(inner, argument, kinds)  # one stands for all
    if isinstance(argument, dict):
        return _is_reference(argument, kind, kinds) or _is_tagged(argument, kind)
    return type(argument) in _CONSTANTS.get(kind, ())  # a bool is no integer here


def _is_reference(argument: Any, kind_name: str, kinds: list[str]) -> bool:
    if not isinstance(argument, dict) or "v" not in argument:
        return False
    kind = kinds[argument["v"]]
    return kind == kind_name or (kind == "int" and kind_name in _FROM_EXTENTS)


def _is_tagged(argument: Mapping[str, Any], kind: str) -> bool:
    if "float" in argument:
        return kind in ("float", "number", "Tensor")
    return kind in _TAGS and _TAGS[kind] in argument
