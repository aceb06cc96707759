"""Dtypes, and tensors of byte strings: dtype ``bytes`` here, ``BYTES`` in Triton's protocol. Pure.

The format is Triton's. Each element is its length as a little-endian uint32, then its bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

from .errors import InvalidInput

ITEM_BYTES: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""The dtypes that may cross the wire or lie in a bundle, with their item size in bytes."""

BYTES: Final = "bytes"  # the dtype
LENGTH_BYTES: Final = 4
_LENGTH: Final = struct.Struct("<I")


def pack(elements: Iterable[bytes]) -> bytes:
    """Return elements, given in row-major order, packed one after the other."""
    return b"".join(part for one in elements for part in (_LENGTH.pack(len(one)), one))


def unpack(data: Any, count: int) -> list[bytes]:
    """Return the elements of a packed buffer.

    Raises:
        InvalidInput: the buffer does not hold exactly ``count`` elements.
    """
    items: list[bytes] = []
    view, at = memoryview(data), 0
    while at < len(view):
        begin = at + LENGTH_BYTES
        if len(items) == count or begin > len(view):
            break
        at = begin + _LENGTH.unpack_from(view, at)[0]
        if at > len(view):
            break
        items.append(bytes(view[begin:at]))
    if len(items) != count or at != len(view):
        raise InvalidInput(
            f"{len(view)} bytes are not {count} byte strings, each after its length in four bytes"
        )
    return items


def packed(value: Any) -> tuple[tuple[int, ...], bytes] | None:
    """Return shape and packed bytes of a text (UTF-8), a byte string, or a list or array of them.

    Return None for any other value. Raise InvalidInput if UTF-8 cannot encode a text.
    """
    import numpy as np

    if isinstance(value, str | bytes):
        value = [value]
    if isinstance(value, list | tuple):
        if not value or not all(isinstance(one, str | bytes) for one in value):
            return None
        shape, elements = (len(value),), list(value)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "OSU":
        shape, elements = value.shape, value.reshape(-1).tolist()
        if not all(isinstance(one, str | bytes) for one in elements):
            return None
    else:
        return None
    try:
        return shape, pack(one.encode() if isinstance(one, str) else one for one in elements)
    except UnicodeEncodeError as error:
        raise InvalidInput(f"a text is not valid Unicode: {error}") from None


def unpacked(data: Any, shape: Sequence[int]) -> Any:
    """Return the numpy array of ``bytes`` objects in a packed buffer, as a copy.

    Raises:
        InvalidInput: the buffer does not hold exactly the elements of ``shape``.
    """
    import numpy as np

    items = unpack(data, math.prod(shape))
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array.reshape(tuple(shape))
