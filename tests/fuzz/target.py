"""Fuzz targets, and codecs that cut their inputs into parts for the mutator."""

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
LENGTH_BYTES = 2  # in front of each frame
MAX_FRAMES = 24


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Functions that split an input into parts, decode a part to a value, and reverse both."""

    split: Callable[[bytes], list[bytes]]
    join: Callable[[Sequence[bytes]], bytes]
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One interface under fuzz.

    Attributes:
        run: takes an input; raises only if the interface lets something escape.
        seeds: returns valid inputs to begin with, the same at each call.
        words: texts with a meaning to the interface, which the mutator inserts.
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
    """Return the frames of any bytes; the last may be short, and at most MAX_FRAMES are kept."""
    frames: list[bytes] = []
    position = 0
    while position + LENGTH_BYTES <= len(data) and len(frames) < MAX_FRAMES:
        size = int.from_bytes(data[position : position + LENGTH_BYTES], "little")
        position += LENGTH_BYTES
        frames.append(data[position : position + size])
        position += size
    return frames


def join_frames(frames: Sequence[bytes]) -> bytes:
    """Return frames as one input (see ``split_frames``); frames are cut to 65,535 bytes."""
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
"""Frames of one byte, which names the sender, and msgpack."""


def _json_encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


JSON_FRAMES = Codec(split=split_frames, join=join_frames, decode=json.loads, encode=_json_encode)
JSON_TEXT = Codec(
    split=lambda data: [data], join=lambda parts: parts[0], decode=json.loads, encode=_json_encode
)
