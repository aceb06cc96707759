"""A training job's commit image: self-describing bytes, and its form on disk. No torch.

An image is what a worker commits and what a resumed job starts from (DESIGN 5). To the memory
daemon it is opaque; whoever must look inside (the CLI, the writer to disk) does it here.

    [header, 64 bytes][blobs: attachments of the tagged JSON][JSON] … [bulk: tensors] [past images]

The JSON holds ``tensors`` (name -> dtype, shape, stride, offset and size in the image), ``blobs``
(name -> offset and size) and ``meta`` (the session's tagged state). On disk: ``commit.json``, and
beside it one safetensors file, which it names. Renaming ``commit.json`` is the flip: a crash at
any moment leaves the old pair or the new one.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from .errors import InvalidInput

MAGIC: Final = b"PSCOMMIT"
VERSION: Final = 1
HEADER: Final = struct.Struct("<8sIIQQQ")  # magic, version, crc32, json offset, json size, image
HEADER_BYTES: Final = 64
COMMIT_FILE: Final = "commit.json"

SAFETENSORS_DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1),
    "bool": ("BOOL", 1), "complex64": ("C64", 8),
}  # fmt: skip
"""torch's dtype name -> (safetensors' name, item size in bytes)."""


def pack_header(document: bytes, json_offset: int, image_bytes: int) -> bytes:
    """The first ``HEADER_BYTES`` of an image whose JSON is ``document``."""
    checksum = zlib.crc32(document)
    packed = HEADER.pack(MAGIC, VERSION, checksum, json_offset, len(document), image_bytes)
    return packed.ljust(HEADER_BYTES, b"\0")


def parse_image(image: memoryview) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """The JSON of an image, and where each tensor and blob lies: name -> (offset, size in bytes).

    Raises:
        InvalidInput: not an image, torn, or a range outside it.
    """
    image = image.cast("B")
    if len(image) < HEADER_BYTES or bytes(image[:8]) != MAGIC:
        raise InvalidInput("not a commit image")
    _, version, checksum, offset, size, image_bytes = HEADER.unpack(image[: HEADER.size])
    if version != VERSION:
        raise InvalidInput(f"commit image of version {version}; this program reads {VERSION}")
    document = bytes(image[offset : offset + size])
    if image_bytes > len(image) or len(document) != size or zlib.crc32(document) != checksum:
        raise InvalidInput("the commit image is torn: its header does not fit its content")
    try:
        content: dict[str, Any] = json.loads(document)
        ranges = {
            name: (int(entry["offset"]), int(entry["size"]))
            for name, entry in {**content["tensors"], **content["blobs"]}.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"the commit image's JSON does not describe it: {error}") from error
    for name, (start, length) in ranges.items():
        if start < HEADER_BYTES or length < 0 or start + length > image_bytes:
            raise InvalidInput(f"the commit image places {name!r} outside itself")
    return content, ranges


def image_to_files(image: memoryview, directory: Path) -> Path:
    """Write an image as ``commit.json`` and one safetensors file; durable when this returns.

    Returns:
        the path of ``commit.json``. The pair that was there before stays whole until the flip.

    Raises:
        InvalidInput: not an image.
        OSError: disk full or failing; the old pair is untouched.
    """
    image = image.cast("B")
    content, ranges = parse_image(image)
    directory.mkdir(parents=True, exist_ok=True)
    _, _, checksum, *_ = HEADER.unpack(image[: HEADER.size])
    data_name = f"commit-{content['meta'].get('step', 0)}-{checksum:08x}.safetensors"
    data_crc = _write_durably(directory / data_name, _safetensors(image, content, ranges))
    document = {
        "format": "pipeswitch-commit",
        "version": VERSION,
        "data": data_name,
        "data_crc32": data_crc,
        "image_bytes": HEADER.unpack(image[: HEADER.size])[5],
        "json_offset": HEADER.unpack(image[: HEADER.size])[3],
        "content": content,
    }
    _write_durably(directory / COMMIT_FILE, iter([json.dumps(document).encode()]))
    for other in directory.glob("commit-*.safetensors*"):
        if other.name != data_name:
            other.unlink(missing_ok=True)
    return directory / COMMIT_FILE


def files_to_image(directory: Path) -> bytes:
    """Rebuild an image from ``image_to_files``'s pair; equal to the original but for padding.

    Raises:
        InvalidInput: damaged or of another version.
        FileNotFoundError: nothing was written there.
    """
    try:
        document = json.loads((directory / COMMIT_FILE).read_bytes())
        content, data_name = document["content"], document["data"]
        image_bytes, json_offset = int(document["image_bytes"]), int(document["json_offset"])
        if document["version"] != VERSION or Path(data_name).name != data_name:
            raise InvalidInput(f"{directory}: version {document['version']}, file {data_name!r}")
        raw = (directory / data_name).read_bytes()
        if zlib.crc32(raw) != document["data_crc32"]:
            raise InvalidInput(f"{directory / data_name} is damaged: its checksum differs")
        image = np.zeros(image_bytes, np.uint8)
        encoded = dump_json(content)
        image[:HEADER_BYTES] = np.frombuffer(
            pack_header(encoded, json_offset, image_bytes), np.uint8
        )
        image[json_offset : json_offset + len(encoded)] = np.frombuffer(encoded, np.uint8)
        (header_bytes,) = struct.unpack("<Q", raw[:8])
        for name, entry in json.loads(raw[8 : 8 + header_bytes]).items():
            begin, end = entry["data_offsets"]
            _place(image, content, name, raw[8 + header_bytes + begin : 8 + header_bytes + end])
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise InvalidInput(f"{directory}: not a commit: {error}") from error
    result = image.tobytes()
    parse_image(memoryview(result))
    return result


def compact_image(image: memoryview, without: str) -> bytes:
    """A copy of an image packed tightly, without the blobs whose name starts with ``without``."""
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
    document = dump_json({"tensors": tensors, "blobs": blobs, "meta": content["meta"]})
    json_offset = len(packed)
    packed += document
    packed[:HEADER_BYTES] = pack_header(document, json_offset, len(packed))
    return bytes(packed)


def dump_json(content: Mapping[str, Any]) -> bytes:
    """The JSON of an image as bytes, in the one form that is used everywhere."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


# ----------------------------------------------------------------------------------- files


def _safetensors(
    image: memoryview, content: Mapping[str, Any], ranges: Mapping[str, tuple[int, int]]
) -> Iterator[bytes | memoryview]:
    """The chunks of a safetensors file (8-byte length, JSON, data), without a second copy."""
    header: dict[str, Any] = {}
    position = 0
    for name, (_, size) in ranges.items():
        entry = content["tensors"].get(name)
        dtype, shape = "U8", [size]
        if entry is not None and entry["dtype"] in SAFETENSORS_DTYPES:
            dtype, shape = SAFETENSORS_DTYPES[entry["dtype"]][0], entry["shape"]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format asks for alignment, and allows spaces
    yield struct.pack("<Q", len(text)) + text
    for name, (start, size) in ranges.items():
        chunk = image[start : start + size]
        entry = content["tensors"].get(name)
        yield chunk if entry is None else _row_major(chunk, entry)


def _is_strided(entry: Mapping[str, Any]) -> bool:
    """Stored in another order than row-major (channels last), and of a dtype we can reorder."""
    expected, stride = 1, []
    for extent in reversed(entry["shape"]):
        stride.append(expected)
        expected *= max(extent, 1)
    return entry["dtype"] in SAFETENSORS_DTYPES and entry["stride"] != stride[::-1]


def _strided_view(flat: np.ndarray[Any, Any], entry: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    reach = sum((n - 1) * s for n, s in zip(entry["shape"], entry["stride"], strict=True)) + 1
    if min(entry["stride"], default=0) < 0 or min(entry["shape"], default=1) < 1:
        raise InvalidInput("impossible strides")
    if reach > flat.size:
        raise InvalidInput("strides reach outside the tensor")
    return np.lib.stride_tricks.as_strided(
        flat, entry["shape"], [s * flat.itemsize for s in entry["stride"]]
    )


def _row_major(chunk: memoryview, entry: Mapping[str, Any]) -> bytes | memoryview:
    if not _is_strided(entry) or not len(chunk):
        return chunk
    width = SAFETENSORS_DTYPES[entry["dtype"]][1]
    return _strided_view(np.frombuffer(chunk, f"u{width}"), entry).tobytes()


def _place(image: np.ndarray[Any, Any], content: Mapping[str, Any], name: str, raw: bytes) -> None:
    entry = content["tensors"].get(name)
    place = entry if entry is not None else content["blobs"][name]
    target = image[place["offset"] : place["offset"] + place["size"]]
    if entry is not None and raw and _is_strided(entry):
        width = SAFETENSORS_DTYPES[entry["dtype"]][1]
        flat = np.empty(len(raw) // width, f"u{width}")
        _strided_view(flat, entry)[...] = np.frombuffer(raw, flat.dtype).reshape(entry["shape"])
        target[:] = flat.view(np.uint8)
    else:
        target[:] = np.frombuffer(raw, np.uint8)


def _write_durably(path: Path, chunks: Iterator[bytes | memoryview]) -> int:
    """Write temp, fsync, rename, fsync the directory; returns the content's crc32."""
    temporary = path.with_name(path.name + ".tmp")
    checksum = 0
    with temporary.open("wb") as file:
        for chunk in chunks:
            checksum = zlib.crc32(chunk, checksum)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return checksum
