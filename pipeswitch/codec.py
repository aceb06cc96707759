"""Encoding that raises MemoryError where msgspec 0.22 ends the process:
its ``encode`` frees a null pointer if the result cannot grow; its ``encode_into`` checks that."""

from functools import partial
from typing import Any, Final

import msgspec


def encoded(encoder: msgspec.json.Encoder | msgspec.msgpack.Encoder, value: Any) -> bytes:
    """Return what ``encoder.encode`` would."""
    encoder.encode_into(value, data := bytearray())
    return bytes(data)


json_encoder: Final = msgspec.json.Encoder()
encode_json: Final = partial(encoded, json_encoder)
encode_msgpack: Final = partial(encoded, msgspec.msgpack.Encoder())
