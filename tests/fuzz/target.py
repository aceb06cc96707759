"""What a fuzz target is, and how its input is cut into parts that a mutator understands."""

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
    """How a part of an input becomes a plain value and bytes again; None: it stays bytes."""

    split: Callable[[bytes], list[bytes]]
    join: Callable[[Sequence[bytes]], bytes]
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One interface under fuzz.

    Attributes:
        run: takes an input; raises nothing unless the interface let something escape.
        seeds: valid inputs to begin with; the same at each call.
        words: texts that mean something to the interface, for the mutator.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    codec: Codec
    words: tuple[str, ...] = ()
    max_bytes: int = 4096

    def kept(self) -> list[Path]:
        """The files of its corpus and of its regressions, in order."""
        folders = (CORPUS / self.name, REGRESSIONS / self.name)
        return [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]


# ---- frames: a length of two bytes, then so many bytes ------------------------------------------


def split_frames(data: bytes) -> list[bytes]:
    """Any bytes are frames: the last one may be short, what exceeds ``MAX_FRAMES`` is dropped."""
    frames: list[bytes] = []
    position = 0
    while position + LENGTH_BYTES <= len(data) and len(frames) < MAX_FRAMES:
        size = int.from_bytes(data[position : position + LENGTH_BYTES], "little")
        position += LENGTH_BYTES
        frames.append(data[position : position + size])
        position += size
    return frames


def join_frames(frames: Sequence[bytes]) -> bytes:
    """Inverse of ``split_frames``; a frame longer than 64 KiB is cut."""
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
"""Frames whose first byte says who sends; msgpack follows."""


def _json_encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


JSON_FRAMES = Codec(split=split_frames, join=join_frames, decode=json.loads, encode=_json_encode)
JSON_TEXT = Codec(
    split=lambda data: [data], join=lambda parts: parts[0], decode=json.loads, encode=_json_encode
)
