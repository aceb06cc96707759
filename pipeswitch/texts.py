"""Tensors of byte strings: ``bytes`` here, ``BYTES`` in Triton's protocol, which packs them so.

Each element is its length, four bytes with the least significant first, and its bytes. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final

from .errors import InvalidInput

BYTES: Final = "bytes"  # the dtype
LENGTH_BYTES: Final = 4
_LENGTH: Final = struct.Struct("<I")


def pack(elements: Iterable[bytes]) -> bytes:
    """Elements in row-major order, one after the other."""
    return b"".join(part for one in elements for part in (_LENGTH.pack(len(one)), one))


def unpack(data: Any, count: int) -> list[bytes]:
    """The elements of a buffer.

    Raises:
        InvalidInput: it holds other than ``count`` of them.
    """
    found: list[bytes] = []
    view, at = memoryview(data), 0
    while at < len(view):
        begin = at + LENGTH_BYTES
        if len(found) == count or begin > len(view):
            break
        at = begin + _LENGTH.unpack_from(view, at)[0]
        if at > len(view):
            break
        found.append(bytes(view[begin:at]))
    if len(found) != count or at != len(view):
        raise InvalidInput(
            f"{len(view)} bytes are not {count} byte strings, each after its length in four bytes"
        )
    return found


def encoded(value: str | bytes) -> bytes:
    """A text as UTF-8, bytes as they are."""
    return value.encode() if isinstance(value, str) else bytes(value)
