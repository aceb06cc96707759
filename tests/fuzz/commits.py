"""Fuzz target: reading of commits on disk (``commit.json``, an image's file) and of images.

An input begins with its kind. FROM_JSON builds an image from JSON and tensors' bytes, so that the
image of a mutated JSON has the right checksum. AS_IT_IS has the image in one frame.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from pipeswitch.base import state_codec
from pipeswitch.base.errors import InvalidInput, RemoteProtocolError
from pipeswitch.commits.area import CommitArea
from pipeswitch.commits.commit_files import RECORD_NAME, CommitRecord, load_commit
from pipeswitch.commits.image import (
    HEADER_BYTES,
    compact_image,
    dump_json,
    pack_header,
    parse_image,
    safetensors_head,
)

from .target import JSON_FRAMES, Target, join_frames, split_frames

FROM_JSON, AS_IT_IS, ON_DISK = b"j", b"i", b"d"
IMAGE_NAME = "commit-7-0.safetensors"


def run(data: bytes) -> None:
    frames = [*split_frames(data), b"", b"", b"", b""]
    if frames[0] == ON_DISK:
        _load(frames[1], frames[2], frames[3])
    elif frames[0] == AS_IT_IS:
        _read(frames[1])
    else:
        document, bulk = frames[1], frames[2]
        offset = HEADER_BYTES + len(bulk)
        _read(pack_header(document, offset, offset + len(document)) + bulk + document)


def _read(raw: bytes) -> None:
    """Read an image like a worker that resumes, and like the daemon that writes it to disk."""
    image = memoryview(raw)
    safetensors_head(image)
    try:
        content, ranges = parse_image(image)
        compact_image(image, without="data")
    except InvalidInput:
        return
    blobs = [image[start : start + size] for start, size in ranges.values()]
    with contextlib.suppress(InvalidInput):
        state_codec.decode(content["meta"], blobs)


@functools.cache
def _folder() -> Path:
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    name = tempfile.mkdtemp(prefix="pipeswitch-fuzz-", dir=memory)
    atexit.register(shutil.rmtree, name)
    return Path(name)


def _load(record: bytes, head: bytes, image: bytes) -> None:
    """Load a job's folder like a server that starts."""
    folder = _folder()
    (folder / RECORD_NAME).write_bytes(record)
    (folder / IMAGE_NAME).write_bytes(head + image)
    try:
        loaded = load_commit(folder)
    except (RemoteProtocolError, OSError):
        return
    if loaded is None:
        return
    descriptor, slot_bytes, _ = loaded
    try:
        area = CommitArea(descriptor, slot_bytes)
        area.newest()
        area.close()
    finally:
        os.close(descriptor)


def _content() -> dict[str, Any]:
    state, _ = state_codec.encode(
        {
            "lr": 0.1,
            "step": 7,
            "big": 1 << 60,
            "inf": float("inf"),
            "names": ("a", b"b"),
            "seen": {1, 2},
        }
    )
    entry = {"dtype": "float32", "shape": [2, 2], "stride": [2, 1], "offset": 64, "size": 16}
    meta = {"list": [state, {"tensor": ["float32", [2, 2], 0]}, {"array": ["<f4", [4], 0]}]}
    return {
        "tensors": {"w": entry, "b": {**entry, "shape": [4], "stride": [1], "offset": 80}},
        "blobs": {"state": {"offset": 96, "size": 4}, "data": {"offset": 100, "size": 4}},
        "meta": meta["list"],
    }


def seeds() -> list[bytes]:
    document, bulk = dump_json(_content()), bytes(range(48))
    offset = HEADER_BYTES + len(bulk)
    image = pack_header(document, offset, offset + len(document)) + bulk + document
    head = safetensors_head(memoryview(image))
    digest = hashlib.sha256(head + image).hexdigest()
    record = CommitRecord(step=7, size_bytes=len(image), sha256=digest, image=IMAGE_NAME)
    return [
        join_frames([FROM_JSON, document, bulk]),
        join_frames([AS_IT_IS, image]),
        join_frames([ON_DISK, msgspec.json.encode(record), head, image]),
    ]


TARGET = Target(
    name="commit",
    run=run,
    seeds=seeds,
    codec=JSON_FRAMES,
    words=(
        "tensors",
        "blobs",
        "meta",
        "offset",
        "size",
        "stride",
        "dtype",
        "float32",
        "bfloat16",
        "int",
        "float",
        "bytes",
        "tuple",
        "set",
        "frozenset",
        "dict",
        "odict",
        "counter",
        "tensor",
        "array",
        "scalar",
        "<f4",
        "O",
        "V8",
        "M8[ns]",
        "0x10",
        "7ff0000000000000",
        IMAGE_NAME,
    ),
)
