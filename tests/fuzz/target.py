"""Types of fuzz targets, and codecs that split their inputs into parts for the mutator."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
REGRESSIONS = HERE / "regressions"
LENGTH_BYTES = 2  # size of the length before each frame
MAX_FRAMES = 24


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Functions that split an input into parts and decode a part to a value, and their inverses."""

    split: Callable[[bytes], list[bytes]]
    join: Callable[[Sequence[bytes]], bytes]
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Interface that is fuzzed.

    Attributes:
        run: function that passes an input to the interface, and raises only for an escape.
        seeds: function that returns valid first inputs, the same ones at each call.
        words: texts that the interface understands; the mutator inserts them.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    codec: Codec
    words: tuple[str, ...] = ()
    max_bytes: int = 4096

    def kept(self) -> list[Path]:
        """Return the files of the target's corpus, then those of its regressions, in order."""
        folders = (CORPUS / self.name, REGRESSIONS / self.name)
        return [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]


# ---- frames: a length of two bytes, then the content --------------------------------------------


def split_frames(data: bytes) -> list[bytes]:
    """Split any bytes into frames. The last frame may be short; frames after MAX_FRAMES are cut."""
    frames: list[bytes] = []
    position = 0
    while position + LENGTH_BYTES <= len(data) and len(frames) < MAX_FRAMES:
        size = int.from_bytes(data[position : position + LENGTH_BYTES], "little")
        position += LENGTH_BYTES
        frames.append(data[position : position + size])
        position += size
    return frames


def join_frames(frames: Sequence[bytes]) -> bytes:
    """Join frames to an input for ``split_frames``; each frame is cut to 65,535 bytes."""
    cut = [frame[:0xFFFF] for frame in frames]
    return b"".join(len(frame).to_bytes(LENGTH_BYTES, "little") + frame for frame in cut)


MSGPACK_FRAMES = Codec(
    split=split_frames,
    join=join_frames,
    decode=msgspec.msgpack.decode,
    encode=msgspec.msgpack.encode,
)


def _tagged_decode(frame: bytes) -> Any:
    return [frame[0], msgspec.msgpack.decode(frame[1:])]


def _tagged_encode(value: Any) -> bytes:
    first, rest = value
    return bytes([first & 0xFF]) + msgspec.msgpack.encode(rest)


TAGGED_FRAMES = Codec(
    split=split_frames, join=join_frames, decode=_tagged_decode, encode=_tagged_encode
)
"""Codec of frames that have one byte for the sender, then msgpack."""


def _json_encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


JSON_FRAMES = Codec(split=split_frames, join=join_frames, decode=json.loads, encode=_json_encode)
JSON_TEXT = Codec(
    split=lambda data: [data], join=lambda parts: parts[0], decode=json.loads, encode=_json_encode
)
