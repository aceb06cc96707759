"""Commit images on disk, which every reader of safetensors can open, whatever they contain."""

from __future__ import annotations

import random
from typing import Any

import pytest
from safetensors import deserialize

from pipeswitch.commits.image import HEADER_BYTES, dump_json, pack_header, safetensors_head


def entry(dtype: str, shape: list[int], stride: list[int], offset: int, size: int) -> Any:
    return {"dtype": dtype, "shape": shape, "stride": stride, "offset": offset, "size": size}


def image_of(tensors: dict[str, Any], size_bytes: int = 4096) -> bytes:
    """Return an image of random bytes, with these tensors' JSON in its last KiB."""
    image = bytearray(random.Random(1).randbytes(size_bytes))
    document = dump_json({"tensors": tensors, "blobs": {}, "meta": {}})
    at = size_bytes - 1024
    image[at : at + len(document)] = document
    image[:HEADER_BYTES] = pack_header(document, at, size_bytes)
    return bytes(image)


def read(image: bytes) -> dict[str, dict[str, Any]]:
    """Return the tensors that safetensors, which refuses gaps and overlaps, reads from an image."""
    file = safetensors_head(memoryview(image)) + image
    return dict(deserialize(file))  # type: ignore[no-untyped-call]


TENSORS = {
    "weight": entry("float32", [4, 8], [8, 1], 128, 128),
    "half": entry("bfloat16", [3], [1], 256, 6),
    "empty": entry("float32", [0, 3], [3, 1], 320, 0),
    "channels_last": entry("float32", [2, 3, 2, 2], [12, 1, 6, 3], 384, 96),
    "exotic": entry("complex128", [2], [1], 512, 32),
}


def test_row_major_tensors_keep_dtype_and_shape_and_all_bytes_stay_where_they_lie() -> None:
    image = image_of(TENSORS)
    tensors = read(image)
    shown = {name: (tensors[name]["dtype"], tensors[name]["shape"]) for name in TENSORS}
    assert shown == {
        "weight": ("F32", [4, 8]),
        "half": ("BF16", [3]),
        "empty": ("F32", [0, 3]),
        "channels_last": ("F32", [24]),
        "exotic": ("U8", [32]),
    }
    for name, tensor in TENSORS.items():
        assert bytes(tensors[name]["data"]) == image[tensor["offset"] :][: tensor["size"]]
    assert sum(len(part["data"]) for part in tensors.values()) == len(image)


def test_tensors_are_aligned_in_the_file() -> None:
    head = safetensors_head(memoryview(image_of(TENSORS)))
    assert len(head) % HEADER_BYTES == 0


@pytest.mark.parametrize(
    "image",
    [
        b"",
        b"no image at all",
        image_of(TENSORS)[:-1024] + bytes(1024),
        image_of({"a": entry("float32", [2], [1], 128, 8), "b": entry("int8", [8], [1], 132, 8)}),
        image_of({"__metadata__": entry("float32", [2], [1], 128, 8)}),
        image_of({"a": entry("float32", [-1, -2], [2, 1], 128, 8)}),
        image_of({"a": {"offset": 128, "size": 7, "dtype": "float32", "shape": None}}),
    ],
    ids=["empty", "opaque", "torn", "overlapping", "reserved", "negative", "senseless"],
)
def test_what_is_no_image_of_ours_is_still_a_readable_file(image: bytes) -> None:
    tensors = read(image)
    assert sum(len(part["data"]) for part in tensors.values()) == len(image)
