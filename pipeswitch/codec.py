"""Encoding that raises MemoryError where msgspec 0.22 ends the process.

Its ``encode`` frees a null pointer if the result cannot grow; its ``encode_into`` checks that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec


def encoder_with(encoder: msgspec.json.Encoder | msgspec.msgpack.Encoder) -> Callable[[Any], bytes]:
    """Return a safe replacement for ``encoder.encode``."""
    encode_into = encoder.encode_into

    def encode(value: Any) -> bytes:
        encode_into(value, data := bytearray())
        return bytes(data)

    return encode


json_encoder: Final = msgspec.json.Encoder()  # for ``encode_into`` alone, as each of these
encode_json: Final = encoder_with(json_encoder)
encode_sorted: Final = encoder_with(msgspec.json.Encoder(order="deterministic"))
encode_msgpack: Final = encoder_with(msgspec.msgpack.Encoder())


def msgpack_encoder(plain: Callable[[Any], Any]) -> msgspec.msgpack.Encoder:
    """Return an encoder that asks ``plain`` about values it does not know; see ``encoder_with``."""
    return msgspec.msgpack.Encoder(enc_hook=plain)
