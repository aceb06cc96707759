"""Trace spans of requests: off by default, below the caller's span, one for each part of a time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeswitch.base.errors import InvalidInput, ModelNotFound
from pipeswitch.base.roles import OWNER
from pipeswitch.client.client import Client
from pipeswitch.frontend.intake.validation import Body, trace_id_of
from pipeswitch.gateway.serving.oip import InferRequest
from pipeswitch.gateway.serving.service import Service
from pipeswitch.wire import tracing
from pipeswitch.wire.request_timing import RequestTiming
from pipeswitch.wire.tracing import open_tracer
from tests.unit.request_rig import BILL, answering

pytest.importorskip("opentelemetry.sdk", reason="make installs it")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE, PARENT = "ab" * 16, "cd" * 8
CALLERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "kim=1"}
PARTS = ["queue", "switch", "groups", "compute", "out"]
TIMES = RequestTiming(
    queue_ms=1.0, switch_ms=2.0, copy_ms=9.0, stall_ms=3.0, compute_ms=4.0, total_ms=10.5
)
ASKED = InferRequest(id="", inputs=(), frames=())


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED", *tracing.ENDPOINTS):
        monkeypatch.delenv(name, raising=False)
    yield
    tracing._own_tracer.cache_clear()


class Seen:
    """Tracer provider that the program itself configures."""

    def __init__(self) -> None:
        self.exporter, self.provider = InMemorySpanExporter(), TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def take(self) -> dict[str, Any]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


class Answering:
    """Server that answers every request."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.told: list[str] = []

    async def infer(self, *args: Any) -> tuple[list[Any], dict[str, Any]]:
        self.told.append(args[-1])
        if self.error is not None:
            raise self.error
        return [], TIMES.as_dict()


def ask(upstream: Any, carrier: Mapping[str, str], tracer: Any = None) -> Awaitable[Any]:
    service = Service(upstream, tracer=tracer)
    return service.infer(OWNER, "m", "", ASKED, carrier)


def took_ms(span: Any) -> float:
    return float(span.end_time - span.start_time) / 1e6


def test_a_request_through_the_gateway_is_seen_under_its_callers_span() -> None:
    collector, upstream = Seen(), Answering()
    asyncio.run(ask(upstream, CALLERS, collector.provider.get_tracer("t")))
    spans = collector.take()
    whole = spans.pop("infer")
    assert whole.kind is trace.SpanKind.SERVER
    assert f"{whole.parent.span_id:016x}" == PARENT
    assert whole.context.trace_state.get("kim") == "1"
    assert (whole.attributes["pipeswitch.model"], whole.attributes["pipeswitch.copy_ms"]) == (
        "m",
        9,
    )
    assert list(spans) == PARTS
    assert {span.parent.span_id for span in spans.values()} == {whole.context.span_id}
    assert [took_ms(span) for span in spans.values()] == pytest.approx([1.0, 2.0, 3.0, 4.0, 0.5])
    for before, after in pairwise(PARTS):
        assert spans[before].end_time == spans[after].start_time
    assert spans["queue"].start_time >= whole.start_time
    assert upstream.told == [f"00-{TRACE}-{whole.context.span_id:016x}-01"]


def test_a_failed_request_is_a_span_that_failed() -> None:
    collector = Seen()
    with pytest.raises(ModelNotFound):
        asyncio.run(ask(Answering(ModelNotFound("none")), {}, collector.provider.get_tracer("t")))
    (whole,) = collector.take().values()
    assert whole.parent is None
    assert not whole.status.is_ok
    assert whole.attributes["error.type"] == "ModelNotFound"


@pytest.mark.parametrize("traceparent", [CALLERS["traceparent"], "00-zz", ""])
def test_without_spans_of_its_own_a_gateway_hands_the_callers_trace_on(traceparent: str) -> None:
    upstream = Answering()
    asyncio.run(ask(upstream, {"traceparent": traceparent}))
    assert upstream.told == [traceparent if TRACE in traceparent else ""]


def test_a_request_of_the_sdk_is_seen_under_the_programs_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector, x = Seen(), np.ones((1, 4), np.float32)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: collector.provider)
    with answering(tmp_path / "s") as address, Client(address, shared_memory=False) as client:
        with collector.provider.get_tracer("t").start_as_current_span("mine") as mine:
            client.infer("m", x)
            client.submit("m", x).result()
        client.close()  # waits until all callbacks have run
    spans = collector.exporter.get_finished_spans()
    whole = [span for span in spans if span.name == "infer"]
    assert [span.parent.span_id for span in whole] == [mine.get_span_context().span_id] * 2
    for one in whole:
        parts = {s.name: s for s in spans if s.parent and s.parent.span_id == one.context.span_id}
        assert list(parts) == PARTS
        assert took_ms(parts["switch"]) == pytest.approx(BILL["switch_ms"])


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, ["otlp"]),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, []),
        ({"OTEL_TRACES_EXPORTER": "console,otlp"}, ["console", "otlp"]),
        ({"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"}, []),
    ],
)
def test_the_standard_variables_say_where_spans_go(
    variables: dict[str, str], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tracing._exporters() == names
    if not names:
        assert open_tracer() is None


def test_an_exporter_that_is_not_there_is_said_once_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    assert open_tracer() is None
    assert open_tracer() is None
    (line,) = caplog.messages
    assert "no exporter 'zipkin' is installed; pip install 'pipeswitch[otel]'" in line


def test_nothing_is_imported_where_nobody_asks() -> None:
    code = (
        "import sys\nfrom pipeswitch.client import Client\nfrom pipeswitch.wire.tracing import *\n"
        "Client('ipc:///nowhere', timeout_s=0.0).close()\nassert open_tracer() is None\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    "traceparent", ["00-zz", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"]
)
def test_the_server_says_what_a_traceparent_looks_like(traceparent: str) -> None:
    with pytest.raises(InvalidInput):
        trace_id_of(Body("infer", {"traceparent": traceparent}))
    assert trace_id_of(Body("infer", CALLERS)) == TRACE
