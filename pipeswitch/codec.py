"""Encoding that raises MemoryError where msgspec 0.22 ends the process:
its ``encode`` frees a null pointer if the result cannot grow; its ``encode_into`` checks that."""

from collections.abc import Callable
from typing import Any, Final

import msgspec


def encoder_with(encoder: msgspec.json.Encoder | msgspec.msgpack.Encoder) -> Callable[[Any], bytes]:
    """Return a safe replacement for ``encoder.encode``."""

    def encode(value: Any) -> bytes:
        encoder.encode_into(value, data := bytearray())
        return bytes(data)

    return encode


json_encoder: Final = msgspec.json.Encoder()
encode_json: Final = encoder_with(json_encoder)
encode_msgpack: Final = encoder_with(msgspec.msgpack.Encoder())
