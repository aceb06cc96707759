"""A training job's commit image: self-describing bytes. This module does not need torch.

A worker commits an image, and a resumed job starts from it (ADR 8). The memory daemon reads its
content only when it writes the image to disk, with the functions of this module.

    [header, 64 bytes][blobs: attachments of the tagged JSON][JSON] … [bulk: tensors] [past images]

The JSON has ``tensors`` (name -> dtype, shape, stride, offset and size in the image), ``blobs``
(name -> offset and size) and ``meta`` (the session's tagged state). On disk the same bytes are
the data of a safetensors file (``commit_files.py``).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Final

from ..base.errors import InvalidInput

MAGIC: Final = b"PSCOMMIT"
VERSION: Final = 1
HEADER: Final = struct.Struct("<8sIIQQQ")  # magic, version, crc32, json offset, json size, image
HEADER_BYTES: Final = 64
LENGTH: Final = struct.Struct("<Q")  # length of a safetensors header, which follows it
BYTES_AT: Final = "__bytes_at__"  # before an offset: the name of the bytes between two tensors

SAFETENSORS_DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex64": ("C64", 8),
}
"""torch's dtype name -> (safetensors' name, item size in bytes)."""


def pack_header(document: bytes, json_offset: int, image_bytes: int) -> bytes:
    """Return the first ``HEADER_BYTES`` of an image whose JSON is ``document``."""
    checksum = zlib.crc32(document)
    packed = HEADER.pack(MAGIC, VERSION, checksum, json_offset, len(document), image_bytes)
    return packed.ljust(HEADER_BYTES, b"\0")


def parse_image(image: memoryview) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """Return the JSON of an image, and the range of each tensor and blob: (offset, size in bytes).

    Raises:
        InvalidInput: the bytes are not an image, are damaged, or a range is outside of them.
    """
    image = image.cast("B")
    if len(image) < HEADER_BYTES or bytes(image[:8]) != MAGIC:
        raise InvalidInput("not a commit image")
    _, version, checksum, offset, size, image_bytes = HEADER.unpack(image[: HEADER.size])
    if version != VERSION:
        raise InvalidInput(f"commit image of version {version}; this program reads {VERSION}")
    document = bytes(image[offset : offset + size])
    if image_bytes > len(image) or len(document) != size or zlib.crc32(document) != checksum:
        raise InvalidInput("the commit image is damaged: its header does not match its content")
    try:
        content: dict[str, Any] = json.loads(document)
        entries: dict[str, dict[str, Any]] = {**content["tensors"], **content["blobs"]}
        ranges = {name: (entry["offset"], entry["size"]) for name, entry in entries.items()}
        if len(entries) != len(content["tensors"]) + len(content["blobs"]) or "meta" not in content:
            raise ValueError("a name comes twice, or there is no meta")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"the commit image's JSON does not describe it: {error}") from error
    for name, (start, length) in ranges.items():
        if type(start) is not int or type(length) is not int or type(entries[name]) is not dict:
            raise InvalidInput(f"the commit image does not place {name!r} in bytes")
        if start < HEADER_BYTES or length < 0 or start + length > image_bytes:
            raise InvalidInput(f"the commit image places {name!r} outside itself")
    return content, ranges


def images_in(commit: memoryview) -> list[memoryview]:
    """Return the images of a commit: its own, and then earlier ones that it keeps, newest first.

    Raises:
        InvalidInput: the bytes are not images.
    """
    rest, images = commit.cast("B"), list[memoryview]()
    while len(rest):
        if bytes(rest[:8]) != MAGIC or len(rest) < HEADER_BYTES:
            raise InvalidInput("not a commit image" if not images else "the commit is damaged")
        size_bytes = max(HEADER_BYTES, HEADER.unpack(rest[: HEADER.size])[-1])
        images.append(rest[:size_bytes])
        rest = rest[size_bytes:]
    return images


def safetensors_head(image: memoryview) -> bytes:
    """Return the head of a safetensors file whose data is an image's bytes, unchanged.

    Each tensor has its dtype and shape; a tensor that is not row-major is shown as a flat row (its
    shape and strides are in the image's JSON). Bytes between tensors are shown as a U8 tensor,
    because the format does not allow holes. If the bytes are not an image, they are one U8 tensor.
    Never raises, because the image may change meanwhile.
    """
    image = image.cast("B")
    header: dict[str, Any] = {"__metadata__": {"format": "pipeswitch-commit"}}
    position = 0
    for start, size, name, dtype, shape in sorted(_tensors_of(image)):
        if start < position or name.startswith("__"):
            continue  # in our images no tensors overlap, so this image is damaged
        if start > position:
            header[f"{BYTES_AT}{position}"] = _span("U8", [start - position], position, start)
        position = start + size
        header[name] = _span(dtype, shape, start, position)
    if position < len(image):
        header[f"{BYTES_AT}{position}"] = _span("U8", [len(image) - position], position, len(image))
    return packed_head(header)


def packed_head(header: Mapping[str, Any]) -> bytes:
    """Return the head of a safetensors file, padded so that the data after it is aligned."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH.size + len(text)) % HEADER_BYTES)
    return LENGTH.pack(len(text)) + text


def _tensors_of(image: memoryview) -> Iterator[tuple[int, int, str, str, list[int]]]:
    """Yield each tensor's offset, size, name, safetensors dtype and shape; none if damaged."""
    try:
        content, ranges = parse_image(image)
    except InvalidInput:
        return
    for name, entry in content["tensors"].items():
        start, size = ranges[name]
        dtype, shape = _as_it_lies(entry, size)
        yield start, size, name, dtype, shape


def _as_it_lies(entry: Mapping[str, Any], size_bytes: int) -> tuple[str, list[int]]:
    """Return a tensor's dtype and shape for readers of safetensors, which use row-major order."""
    dtype, item_bytes = SAFETENSORS_DTYPES.get(str(entry.get("dtype")), ("U8", 1))
    shape, expected = entry.get("shape"), 1
    if size_bytes % item_bytes:
        return "U8", [size_bytes]
    if dtype != "U8" and isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape):
        row_major = []
        for extent in reversed(shape):
            row_major.append(expected)
            expected *= max(extent, 1)
        is_whole = prod(shape) * item_bytes == size_bytes
        if is_whole and entry.get("stride") == row_major[::-1]:
            return dtype, shape
    return dtype, [size_bytes // item_bytes]


def _span(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def compact_image(image: memoryview, without: str) -> bytes:
    """Return a copy of an image without gaps, and without blobs whose name begins with ``without``.

    Raises:
        InvalidInput: the bytes are not an image that PipeSwitch has written.
    """
    image = image.cast("B")
    content, ranges = parse_image(image)
    blobs = {k: dict(v) for k, v in content["blobs"].items() if not k.startswith(without)}
    tensors = {k: dict(v) for k, v in content["tensors"].items()}
    packed = bytearray(HEADER_BYTES)
    for name, entry in {**blobs, **tensors}.items():
        start, size = ranges[name]
        packed += bytes(-len(packed) % 64)
        entry["offset"] = len(packed)
        packed += image[start : start + size]
    try:
        document = dump_json({"tensors": tensors, "blobs": blobs, "meta": content["meta"]})
    except (ValueError, RecursionError) as error:  # 1e999 is valid JSON, but infinite
        raise InvalidInput(f"the commit image's JSON cannot be written again: {error}") from error
    json_offset = len(packed)
    packed += document
    packed[:HEADER_BYTES] = pack_header(document, json_offset, len(packed))
    return bytes(packed)


def dump_json(content: Mapping[str, Any]) -> bytes:
    """Return the JSON of an image as bytes, without spaces; raise ValueError for NaN."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
