"""What is encoded and decoded with care for memory is what msgspec makes of it."""

from __future__ import annotations

import errno
from typing import Any

import msgspec
import pytest

from pipeswitch import codec
from pipeswitch.errors import InvalidInput
from pipeswitch.gateway import decoding, oip, rest
from pipeswitch.wire.register_request import RegisterRequest

VALUES = [
    None,
    7,
    "",
    "é" * 50,
    [],
    {"b": [1.5, True], "a": {"c": None}},
    ["x" * n for n in range(99)],
]
BODY = b'{"id": "a", "inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2.5]}]}'


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def mmap(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(decoding, "mmap", mmap)
    monkeypatch.setattr(oip, "mmap", mmap)


@pytest.mark.parametrize("value", VALUES)
def test_the_bytes_are_those_of_msgspec(value: Any) -> None:
    assert codec.encode_json(value) == msgspec.json.encode(value)
    assert codec.encode_msgpack(value) == msgspec.msgpack.encode(value)
    assert codec.encode_sorted(value) == msgspec.json.encode(value, order="deterministic")


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("text", ['{"source": "a:b", "weights": "é"}', '{"source": 3}', "{", "[]"])
def test_without_memory_the_slower_parser_reads_the_same(text: str) -> None:
    def read(decode: Any) -> Any:
        try:
            return decode(text.encode())
        except msgspec.DecodeError as error:
            return type(error)

    fast = read(lambda body: msgspec.json.decode(body, type=RegisterRequest))
    assert read(lambda body: decoding.decode_json(body, RegisterRequest)) == fast


@pytest.mark.usefixtures("no_memory")
def test_without_memory_a_small_request_is_read_and_a_wrong_one_refused() -> None:
    asked = oip.decode_request(BODY, None)
    assert (asked.id, bytes(asked.frames[0])) == ("a", b"\0\0\x80?\0\0 @")
    assert rest._object(b'{"a": [1]}') == {"a": [1]}
    with pytest.raises(InvalidInput):
        rest._object(b"[1]")
    with pytest.raises(OSError, match="no memory"):
        oip.decode_request(BODY[:-1], None)
