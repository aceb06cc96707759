"""Decoding of clients' JSON, after a check of free memory. Only msgspec's JSON decoder needs it:
version 0.22 writes to address 0 if it cannot allocate a string; msgpack and ``json`` do not."""

from mmap import MAP_PRIVATE, mmap
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")
MEMORY_OF_A_BYTE: Final = 40  # maximum memory that a byte of JSON takes once decoded
RESERVE_BYTES: Final = 128 << 20  # kept for C++ libraries, which abort if they find no memory


def check_memory(count: int, each_bytes: int = MEMORY_OF_A_BYTE) -> None:
    """Raise OSError (ENOMEM) unless ``count * each_bytes`` and the reserve are free."""
    mmap(-1, RESERVE_BYTES + count * each_bytes, MAP_PRIVATE).close()


def decode_json(data: Any, kind: type[T]) -> T:
    """Decode JSON if there is memory for the result."""
    check_memory(len(data))
    return msgspec.json.decode(data, type=kind)
