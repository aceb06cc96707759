"""Byte strings as a tensor: any bytes survive a round trip, and other values are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.base.bytes_tensors import pack, packed, unpack, unpacked
from pipeswitch.base.errors import InvalidInput


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_elements_come_back_as_they_were(elements: list[bytes]) -> None:
    data = pack(elements)
    assert unpack(data, len(elements)) == elements
    for cut in range(len(data)):
        with pytest.raises(InvalidInput):
            unpack(data[:cut], len(elements))
    for count in (len(elements) - 1, len(elements) + 1):
        with pytest.raises(InvalidInput):
            unpack(data, count)


def test_what_is_text_is_packed_and_nothing_else() -> None:
    assert packed("ä") == ((1,), b"\2\0\0\0\xc3\xa4")
    assert packed([b"a\0", "b"]) == ((2,), b"\2\0\0\0a\0\1\0\0\0b")
    assert packed(np.array([["a"], ["bc"]])) == ((2, 1), b"\1\0\0\0a\2\0\0\0bc")
    for other in ([], [1.0], ["a", 1], np.zeros(2), np.array([None, b"a"], dtype=object), None):
        assert packed(other) is None
    shape, data = packed(np.array([[b"a", b""]], dtype=object)) or ((), b"")
    assert unpacked(data, shape).tolist() == [[b"a", b""]]
