"""The memory-saving codec gives the same results as msgspec."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pipeswitch
from pipeswitch.base import codec


@pytest.mark.parametrize("value", [None, "", "\u00e9" * 50, {"b": [1.5], "a": {}}, ["x" * 99] * 99])
def test_the_bytes_are_those_of_msgspec(value: Any) -> None:
    assert codec.encode_json(value) == msgspec.json.encode(value)
    assert codec.encode_msgpack(value) == msgspec.msgpack.encode(value)


def test_what_outsiders_send_is_never_encoded_by_msgspec_alone() -> None:
    top = Path(pipeswitch.__file__).parent
    for path in (one for room in ("gateway", "wire", "ipc") for one in (top / room).rglob("*.py")):
        assert not re.search(r"msgspec\.\w+\.encode\b|encoder\.encode\(", path.read_text("utf-8"))
