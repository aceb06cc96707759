"""The timeline: a ring of fixed size, and its conversion to a trace."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.scheduler.state.events import Span, Spans
from pipeswitch.scheduler.timeline import KEPT, RING_BYTES, Timeline


def span(name: str = "a", begin_ms: float = 1.0, flow: int = 0, **args: Any) -> Spans:
    return Spans(
        spans=[
            Span(
                track="copy",
                name=name,
                begin_ms=begin_ms,
                end_ms=begin_ms + 1,
                args=args,
                flow=flow,
            )
        ]
    )


def complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_a_span_comes_back_in_microseconds_on_its_track() -> None:
    timeline = Timeline()
    timeline.add(span("copy m group 0", 2.5, model="m"))
    (event,) = complete(timeline.chrome_trace(0.0))
    assert (event["name"], event["ts"], event["dur"], event["tid"]) == (
        "copy m group 0",
        2500.0,
        1000.0,
        1,
    )
    assert event["args"] == {"model": "m"}


def test_older_spans_than_asked_for_are_left_out() -> None:
    timeline = Timeline()
    for begin_ms in (0.0, 10.0, 20.0):
        timeline.add(span(begin_ms=begin_ms))
    assert len(complete(timeline.chrome_trace(11.0))) == 2


def test_the_ring_forgets_the_oldest_and_never_grows() -> None:
    timeline = Timeline()
    for number in range(KEPT + 5):
        timeline.add(span(str(number), float(number)))
    names = [event["name"] for event in complete(timeline.chrome_trace(0.0))]
    assert (len(names), names[0], names[-1]) == (KEPT - 1, "6", str(KEPT + 4))
    for _ in range(400):  # large spans reach the limit of bytes before the limit of spans
        timeline.add(Spans(spans=span("x" * 90).spans * 270))
    assert len(timeline._ring) == RING_BYTES
    names = [event["name"] for event in complete(timeline.chrome_trace(0.0))]
    assert set(names) == {"x" * 90}
    assert len(names) % 270 == 0
    assert len(names) > 50 * 300


def test_a_reader_during_a_write_does_not_decode_the_group_that_is_replaced() -> None:
    """A new group of spans takes the slot of the oldest group; its bytes are written last."""
    timeline, traces = Timeline(), list[dict[str, Any]]()
    for _ in range(KEPT):
        timeline.add(span("x"))

    class Ring(bytearray):
        def __setitem__(self, key: Any, value: Any) -> None:
            traces.append(timeline.chrome_trace(0.0))
            super().__setitem__(key, value)

    timeline._ring = Ring(timeline._ring)
    timeline.add(span("a longer name"))
    assert len(traces) == 1
    assert {event["name"] for event in complete(traces[0])} == {"x"}


def test_a_flow_starts_once_and_goes_on() -> None:
    timeline = Timeline()
    for begin_ms in (1.0, 2.0, 3.0):
        timeline.add(span(begin_ms=begin_ms, flow=7))
    phases = [e["ph"] for e in timeline.chrome_trace(0.0)["traceEvents"] if e.get("id") == 7]
    assert phases == ["s", "t", "t"]


@given(st.text(max_size=400), st.text(max_size=400))
def test_a_span_of_any_length_fits_its_slot(name: str, value: str) -> None:
    timeline = Timeline()
    timeline.add(span(name, value=value))
    timeline.add(span("next"))
    first, second = complete(timeline.chrome_trace(0.0))
    assert second["name"] == "next"
    assert len(first["name"]) <= len(name)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.floats(0, 110))
def test_a_look_at_the_end_finds_what_a_look_at_all_of_it_does(
    begins_ms: list[float], since_ms: float
) -> None:
    timeline = Timeline()
    for begin_ms in begins_ms:
        timeline.add(span(begin_ms=begin_ms))
    instants = [event["ts"] / 1000.0 for event in complete(timeline.chrome_trace(since_ms))]
    assert instants == pytest.approx(sorted(at for at in begins_ms if at + 1 >= since_ms))


def test_a_short_look_does_not_decode_what_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline()
    for number in range(1000):
        timeline.add(span(begin_ms=float(number)))
    monkeypatch.setattr("pipeswitch.scheduler.timeline._decoder", None)
    assert complete(timeline.chrome_trace(2000.0)) == []
