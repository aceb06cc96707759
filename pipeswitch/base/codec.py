"""Encoding and decoding that raise an error when memory is short; msgspec 0.22 ends the process.

``encode`` frees a null pointer if its result cannot grow; ``encode_into`` checks the allocation.
The JSON decoder writes to address 0 if it cannot allocate a string; msgpack and ``json`` do not.
"""

from functools import partial
from mmap import MAP_PRIVATE, mmap
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")
MEMORY_OF_A_BYTE: Final = 40  # maximum memory that a byte of JSON takes once decoded
UNREADABLE: Final = (msgspec.DecodeError, UnicodeError, RecursionError)
"""Errors of msgspec for data that it cannot decode. Up to 0.22, wrong UTF-8 is a UnicodeError."""
RESERVE_BYTES: Final = 128 << 20  # kept for C++ libraries, which abort if they find no memory


def encoded(encoder: msgspec.json.Encoder | msgspec.msgpack.Encoder, value: Any) -> bytes:
    """Return the same bytes as ``encoder.encode``."""
    encoder.encode_into(value, data := bytearray())
    return bytes(data)


json_encoder: Final = msgspec.json.Encoder()
encode_json: Final = partial(encoded, json_encoder)
encode_msgpack: Final = partial(encoded, msgspec.msgpack.Encoder())


def plain(value: Any) -> Any:
    """Return the plain number or text of a numpy scalar."""
    plain = value.item() if hasattr(value, "item") else value
    if type(plain) in (bool, int, float, str):
        return plain
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def check_memory(count: int, each_bytes: int = MEMORY_OF_A_BYTE) -> None:
    """Raise OSError (ENOMEM) unless ``count * each_bytes`` and the reserve are free."""
    mmap(-1, RESERVE_BYTES + count * each_bytes, MAP_PRIVATE).close()


def decode_json(data: Any, kind: type[T]) -> T:
    """Decode a client's JSON if there is memory for the result."""
    check_memory(len(data))
    return msgspec.json.decode(data, type=kind)
