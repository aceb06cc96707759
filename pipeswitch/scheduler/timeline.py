"""Named spans of the last minutes, written as one Chrome trace (opens in Perfetto).

Tracks: the scheduler, the copy engine, each worker's compute; flow arrows go from a request's
switch to the copy of its groups and to its computation.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import msgspec

from .events import Span

SLOT_BYTES: Final = 192  # a packed span; one that is longer loses its arguments, then its tail
SLOT_COUNT: Final = 32_768  # some 30 a switch: the last 1,000 switches
LENGTH_BYTES: Final = 1
NAME_CHARACTERS: Final = 100
PROCESS_ID: Final = 1
FIXED_TRACKS: Final = {"scheduler": 0, "copy": 1}

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[str, str, float, float, dict[str, Any], int])


class Timeline:
    """A ring of packed spans in memory taken at the start, so that it never grows.

    Written by the scheduler's thread. Any thread may read meanwhile and locks nothing: a slot is
    empty while it is written, and is read in one piece under the interpreter lock. (A deque of
    objects grew the controller by 18 MiB over its first 10,000 switches, which looks like a leak
    and hides one.)
    """

    def __init__(self) -> None:
        self._ring = bytearray(b"\xff") * (SLOT_BYTES * SLOT_COUNT)  # touched: resident now
        # The latest end of a span up to each slot's: what ended later lies behind it.
        self._latest_ms = array("d", [0.0]) * SLOT_COUNT
        self._newest_ms = 0.0
        self._count = 0  # spans ever added

    def add(self, span: Span) -> None:
        packed = _pack(span)
        slot = self._count % SLOT_COUNT
        self._newest_ms = self._latest_ms[slot] = max(self._newest_ms, span.end_ms)
        start = slot * SLOT_BYTES
        end = start + LENGTH_BYTES + len(packed)
        self._ring[start] = 0
        self._ring[start + LENGTH_BYTES : end] = packed
        self._ring[start] = len(packed)
        self._count += 1

    def _spans(self, since_ms: float) -> list[Span]:
        """Those that end after ``since_ms``; what is older is not decoded but for a few."""
        count = self._count
        first, oldest = count, max(0, count - SLOT_COUNT)
        while first > oldest and self._latest_ms[(first - 1) % SLOT_COUNT] >= since_ms:
            first -= 1
        spans = []
        for index in range(first, count):
            start = index % SLOT_COUNT * SLOT_BYTES
            slot = self._ring[start : start + SLOT_BYTES]
            if not slot[0]:  # overwritten right now: it was the oldest
                continue
            track, name, begin_ms, end_ms, args, flow = _decoder.decode(
                slot[LENGTH_BYTES : LENGTH_BYTES + slot[0]]
            )
            if end_ms < since_ms:
                continue
            spans.append(
                Span(
                    track=track,
                    name=name,
                    begin_ms=begin_ms,
                    end_ms=end_ms,
                    args=args,
                    flow=flow,
                )
            )
        return spans

    def chrome_trace(self, since_ms: float) -> dict[str, Any]:
        """All spans that end after ``since_ms`` (monotonic clock), as trace events."""
        spans = self._spans(since_ms)
        tracks = _tracks(spans)
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": PROCESS_ID, "name": "process_name", "args": {"name": "pipeswitch"}}
        ]
        for name, track in tracks.items():
            events.append(
                {"ph": "M", "pid": PROCESS_ID, "tid": track, "name": "thread_name",
                 "args": {"name": name}}
            )  # fmt: skip
        began: set[int] = set()
        for span in sorted(spans, key=lambda span: span.begin_ms):
            events.append(_complete(span, tracks[span.track]))
            if span.flow:
                events.append(_flow(span, tracks[span.track], is_first=span.flow not in began))
                began.add(span.flow)
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _pack(span: Span) -> bytes:
    """At most SLOT_BYTES - LENGTH_BYTES, whatever the name and the arguments are."""
    name = span.name[:NAME_CHARACTERS]
    fields = (span.track, name, span.begin_ms, span.end_ms, span.args, span.flow)
    packed = _encoder.encode(fields)
    if len(packed) > SLOT_BYTES - LENGTH_BYTES:
        short = name.encode("ascii", "replace").decode()
        packed = _encoder.encode(
            (span.track[:20], short, span.begin_ms, span.end_ms, {}, span.flow)
        )
    return packed


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
        "args": span.args,
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
