"""Named spans of the last minutes, written as one Chrome trace (opens in Perfetto).

Tracks: the scheduler, the copy engine, each worker's compute; flow arrows go from a request's
switch to the copy of its groups and to its computation.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from .controller.events import Span

CAPACITY: Final = 100_000  # spans; some 30 a switch: the last 3,000 switches
PROCESS_ID: Final = 1
FIXED_TRACKS: Final = {"scheduler": 0, "copy": 1}


class Timeline:
    """A ring of spans. Owned by the scheduler's thread."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=CAPACITY)

    def add(self, span: Span) -> None:
        self._spans.append(span)

    def chrome_trace(self, since_ms: float) -> dict[str, Any]:
        """All spans that end after ``since_ms`` (monotonic clock), as trace events."""
        spans = [span for span in self._spans if span.end_ms >= since_ms]
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
