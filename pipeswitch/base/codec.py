"""Encoding that raises MemoryError when memory is short. msgspec 0.22 would end the process:
``encode`` frees a null pointer if its result cannot grow; ``encode_into`` checks the allocation."""

from functools import partial
from typing import Any, Final

import msgspec


def encoded(encoder: msgspec.json.Encoder | msgspec.msgpack.Encoder, value: Any) -> bytes:
    """Return the same bytes as ``encoder.encode``."""
    encoder.encode_into(value, data := bytearray())
    return bytes(data)


json_encoder: Final = msgspec.json.Encoder()
encode_json: Final = partial(encoded, json_encoder)
encode_msgpack: Final = partial(encoded, msgspec.msgpack.Encoder())
