"""Decoding of clients' JSON when memory is short.

msgspec 0.22 writes to address 0 if it cannot allocate a text of JSON, so there must be memory for
all of them. Its msgpack decoder, ``convert``, and Python's own parser check every allocation.
"""

from __future__ import annotations

import json
from mmap import MAP_PRIVATE, mmap
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")
MEMORY_OF_A_BYTE: Final = 40  # of JSON, at most
RESERVE_BYTES: Final = 32 << 20  # for what other libraries' threads take meanwhile


def check_memory(json_bytes: int) -> None:
    """Raise OSError (ENOMEM) unless memory is free for what so much JSON becomes.

    The answer stays true while JSON is decoded, because a decoder lets no other Python thread run.
    """
    mmap(-1, RESERVE_BYTES + MEMORY_OF_A_BYTE * json_bytes, MAP_PRIVATE).close()


def decode_json(data: Any, kind: type[T]) -> T:
    """Decode JSON, by Python's slower parser if memory is short.

    Raises:
        MemoryError: there is not even memory for that.
    """
    try:
        check_memory(len(data))
    except OSError:
        try:
            return msgspec.convert(json.loads(str(data, "utf-8")), kind)
        except json.JSONDecodeError as error:
            raise msgspec.DecodeError(str(error)) from None
    return msgspec.json.decode(data, type=kind)
