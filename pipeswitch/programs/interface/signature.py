"""Signatures of models as text, and their parsers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...base.bytes_tensors import BYTES
from ...base.errors import InvalidInput
from .layout import ITEM_BYTES, Manifest


def is_same_signature(one: Manifest, other: Manifest) -> bool:
    """Return True if both manifests have the same inputs, outputs and dimensions."""
    return (one.inputs, one.outputs, one.dims) == (other.inputs, other.outputs, other.dims)


def signature_text(dtype: str, shape: Iterable[object]) -> str:
    """Return a dtype and shape as text: ``float32[8,3,224,224]``."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def parse_states(pairs: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Parse ``state``, such as ``("h=h_out", "cache=rows+1")``, to input -> (output, dimension).

    The output is appended along the dimension; with -1 it replaces the input.

    Raises:
        InvalidInput: a text is not of that form, or an input appears twice.
    """
    states: dict[str, tuple[str, int]] = {}
    for text in pairs:
        name, _, source = text.partition("=")
        output, _, axis = source.rpartition("+")
        if not (name and source) or name in states:
            raise InvalidInput(f"{text!r} is not of the form h=h_out, or appears twice")
        states[name] = (output, int(axis)) if axis.isdecimal() and output else (source, -1)
    return states


def parse_input(text: str, number: int = 0, *, texts: bool = False) -> tuple[str, list[Any]]:
    """Return ``(name, [shape, dtype])`` of a text such as ``x=8x3x224x224:float32``.

    An extent that requests choose is a range: ``ids=1..8x1..512:int64``.

    Args:
        text: may lack the name, and the dtype, which then is float32.
        number: position among the inputs; an input without a name is called x, x1, x2…
        texts: whether the dtype may be ``bytes``, as in values of a stage.

    Raises:
        InvalidInput: ``text`` is not of that form.
    """
    name, _, spec = text.rpartition("=")
    shape, _, dtype = spec.partition(":")
    parts = shape.split("x") if shape else []
    dtype = dtype or "float32"
    ends = [part.split("..") for part in parts]
    is_short = len(text) < 4096  # int() refuses longer numbers
    is_sound = is_short and all(len(one) <= 2 and all(map(str.isdecimal, one)) for one in ends)
    dtypes = (*ITEM_BYTES, BYTES) if texts else tuple(ITEM_BYTES)
    if not is_sound or dtype not in dtypes:
        raise InvalidInput(
            f"input {text!r} is not of the form [NAME=]8x3x224x224:float32, or 1..8x1..512:int64 "
            "for sizes that requests choose",
            hint=f"dtypes: {', '.join(dtypes)}",
        )
    extents = [int(one[0]) if len(one) == 1 else [int(end) for end in one] for one in ends]
    return name or (f"x{number}" if number else "x"), [extents, dtype]
