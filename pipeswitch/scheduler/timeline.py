"""Named spans of the last minutes, written as one Chrome trace (opens in Perfetto).

Tracks: the scheduler, the copy engine (models), slices of swapped jobs, each worker's compute; flow
arrows go from a request's switch to the copy of its groups and to its computation.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from .state.events import Span, Spans

RING_BYTES: Final = 6 << 20  # about 2 KiB for each switch: the last 3,000 switches
KEPT: Final = 32_768  # number of slots for groups of spans; the writer may be filling one
MOST_BYTES: Final = 32_768  # a longer group loses its spans' arguments, then its last spans
NAME_CHARACTERS: Final = 100
PROCESS_ID: Final = 1
FIXED_TRACKS: Final = {"scheduler": 0, "copy": 1}

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Span])


class Timeline:
    """Groups of spans, stored one after the other in a ring buffer of fixed size.

    Only the scheduler's thread writes. Any thread may read without a lock: the writer invalidates a
    group before it overwrites a byte of it, and the reader copies a group before it checks that the
    group is still valid. (With a deque of objects, the controller would grow by 18 MiB in its first
    10,000 switches. This looks like a leak and would hide a real one.)
    """

    def __init__(self) -> None:
        self._ring = bytearray(b"\xff") * RING_BYTES  # written, so that all its pages are resident
        # Start of each group, counted in bytes ever written, and its length.
        self._begins = array("q", [0]) * KEPT
        self._lengths = array("i", [0]) * KEPT
        # Latest end of all spans up to and including each group.
        self._latest_ms = array("d", [0.0]) * KEPT
        self._newest_ms = 0.0
        self._count = 0  # number of groups ever added
        self._end = 0  # number of bytes ever written

    def add(self, command: Spans) -> None:
        spans = command.spans
        packed = _encoder.encode(spans)
        if len(packed) > MOST_BYTES:
            packed = _short(spans)
        slot, begin = self._count % KEPT, self._end
        if begin % RING_BYTES + len(packed) > RING_BYTES:
            begin += -begin % RING_BYTES  # a group does not wrap around
        self._end = begin + len(packed)
        self._newest_ms = self._latest_ms[slot] = max(
            [self._newest_ms, *[span.end_ms for span in spans]]
        )
        self._begins[slot], self._lengths[slot] = begin, len(packed)
        self._ring[begin % RING_BYTES : begin % RING_BYTES + len(packed)] = packed
        self._count += 1

    def _spans(self, since_ms: float) -> list[Span]:
        """Return the spans that end after ``since_ms``; only a few older ones are decoded."""
        count = self._count
        first, oldest = count, max(0, count - KEPT)
        while first > oldest and self._latest_ms[(first - 1) % KEPT] >= since_ms:
            first -= 1
        spans = []
        for index in range(first, count):
            begin, length = self._begins[index % KEPT], self._lengths[index % KEPT]
            at = begin % RING_BYTES
            packed = bytes(self._ring[at : at + length])
            if begin >= self._end - RING_BYTES and self._count - index < KEPT:
                spans += [span for span in _decoder.decode(packed) if span.end_ms >= since_ms]
        return spans

    def chrome_trace(self, since_ms: float) -> dict[str, Any]:
        """Return all spans that end after ``since_ms`` (monotonic clock), as trace events."""
        spans = self._spans(since_ms)
        tracks = _tracks(spans)
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": PROCESS_ID, "name": "process_name", "args": {"name": "pipeswitch"}}
        ]
        for name, track in tracks.items():
            events.append(
                {
                    "ph": "M",
                    "pid": PROCESS_ID,
                    "tid": track,
                    "name": "thread_name",
                    "args": {"name": name},
                }
            )
        began: set[int] = set()
        for span in sorted(spans, key=lambda span: span.begin_ms):
            events.append(_complete(span, tracks[span.track]))
            if span.flow:
                events.append(_flow(span, tracks[span.track], is_first=span.flow not in began))
                began.add(span.flow)
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _short(spans: Sequence[Span]) -> bytes:
    """Encode spans in at most ``MOST_BYTES``: short names, no arguments, fewer spans if needed."""
    short = [
        replace(span, name=_plain(span.name), track=_plain(span.track), args={}) for span in spans
    ]
    packed = _encoder.encode(short)
    while len(packed) > MOST_BYTES:
        short = short[: len(short) // 2]
        packed = _encoder.encode(short)
    return packed


def _plain(name: str) -> str:
    return name[:NAME_CHARACTERS].encode("ascii", "replace").decode()


def _tracks(spans: list[Span]) -> dict[str, int]:
    names = sorted({span.track for span in spans} - set(FIXED_TRACKS))
    return FIXED_TRACKS | {name: index + 2 for index, name in enumerate(names)}


def _complete(span: Span, track: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": PROCESS_ID,
        "tid": track,
        "name": span.name,
        "ts": span.begin_ms * 1000.0,
        "dur": (span.end_ms - span.begin_ms) * 1000.0,
        "args": span.args | {"event": span.event} if span.event else span.args,
    }


def _flow(span: Span, track: int, *, is_first: bool) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "s" if is_first else "t",
        "pid": PROCESS_ID,
        "tid": track,
        "name": "switch",
        "cat": "switch",
        "id": span.flow,
        "ts": span.begin_ms * 1000.0,
    }
    return event
