"""OpenTelemetry spans of requests, made in the SDK's or the gateway's process from the timing.

The server makes no spans. A tracer provider that the program has set gets the spans; without one,
the standard ``OTEL_…`` variables name exporters. If they name none either, nothing is imported
(``pip install 'pipeswitch[otel]'``).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from functools import cache
from typing import Any, Final

from .request_timing import PARTS

_logger = logging.getLogger(__name__)

# A request's spans in order, each with the field of the timing that has its length. A last span,
# ``out``, has the rest of the total. The waits for all groups are drawn as one span.
ORDER: Final = (
    ("preprocess", "preprocess_ms"),
    ("queue", "queue_ms"),
    ("switch", "switch_ms"),
    ("groups", "stall_ms"),
    ("compute", "compute_ms"),
    ("postprocess", "postprocess_ms"),
)
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Traced:
    """Span of one request; it begins with the object, and ``answered`` or ``failed`` ends it."""

    def __init__(self, tracer: Any, model: str, carrier: Mapping[str, str] | None = None) -> None:
        """``carrier``: headers that name the parent span; None: use the current span."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation import tracecontext

        self._trace, self._tracer, self._began_ns = trace, tracer, time.time_ns()
        context, kind = None, trace.SpanKind.CLIENT
        if carrier is not None:
            context = tracecontext.TraceContextTextMapPropagator().extract(carrier)
            kind = trace.SpanKind.SERVER
        tags = {"pipeswitch.model": model}
        self._span = tracer.start_span("infer", context, kind, tags, start_time=self._began_ns)
        here = self._span.get_span_context()
        self.traceparent = ""  # W3C header; empty if the span is not in a trace
        if here.is_valid:
            ids = f"{here.trace_id:032x}-{here.span_id:016x}"
            self.traceparent = f"00-{ids}-{here.trace_flags:02x}"

    def answered(self, timing: Mapping[str, Any]) -> None:
        """End the span, with a child for each part of the timing. Assume that sending the request
        and sending the answer take equally long."""
        ended_ns = time.time_ns()
        parts = [(name, timing.get(key, 0.0)) for name, key in ORDER]
        parts.append(("out", max(0.0, timing["total_ms"] - sum(ms for _, ms in parts))))
        on_way_ns = ended_ns - self._began_ns - _ns(timing["total_ms"])
        at_ns = self._began_ns + max(0, on_way_ns) // 2
        context = self._trace.set_span_in_context(self._span)
        for name, took_ms in parts:
            if took_ms or not name.endswith("process"):
                span = self._tracer.start_span(name, context, start_time=at_ns)
                at_ns += _ns(took_ms)
                span.end(at_ns)
        for name, value in timing.items():
            if name not in PARTS or name == "copy_ms":  # a copy overlaps with other parts
                self._span.set_attribute(f"pipeswitch.{name}", value)
        self._span.end(ended_ns)

    def over(self, future: Future[Any]) -> None:
        """End the span with the result or the error of a future that is done."""
        error = CancelledError() if future.cancelled() else future.exception()
        if error is None:
            self.answered(future.result().timing.as_dict())
        else:
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        self._span.set_attribute("error.type", type(error).__name__)
        self._span.set_status(self._trace.StatusCode.ERROR, str(error))
        self._span.end()


def _ns(ms: float) -> int:
    return round(ms * 1e6)


def open_tracer(service: str = "") -> Any:
    """Return this process's tracer; None: tracing is off. ``service``: its default name."""
    api = sys.modules.get("opentelemetry.trace")
    if api is not None and not isinstance(api.get_tracer_provider(), api.ProxyTracerProvider):
        return api.get_tracer("pipeswitch")
    return _own_tracer(service) if _exporters() else None


def _exporters() -> list[str]:
    """Return the exporters that the standard environment variables name."""
    default = "otlp" if any(map(os.environ.get, ENDPOINTS)) else ""
    names = os.environ.get("OTEL_TRACES_EXPORTER") or default
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    names_listed = [] if is_off else [one.strip() for one in names.split(",")]
    return [one for one in names_listed if one not in ("", "none")]


@cache  # one tracer for the process, because it has a thread and a connection
def _own_tracer(service: str) -> Any:
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = Resource.create({"service.name": service} if service else {})
        provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()))
        for name in _exporters():
            provider.add_span_processor(BatchSpanProcessor(_exporter(name)))
        return provider.get_tracer("pipeswitch")
    except Exception as error:  # requests are served without traces
        hint = "pip install 'pipeswitch[otel]' has the exporters otlp (http/protobuf) and console"
        _logger.warning("traces=off cause=%s: %s; %s", type(error).__name__, error, hint)
        return None


def _exporter(name: str) -> Any:
    from importlib.metadata import entry_points

    if name == "otlp":
        protocol = next(filter(None, map(os.environ.get, PROTOCOLS)), "http/protobuf")
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    for entry_point in entry_points(group="opentelemetry_traces_exporter", name=name):
        return entry_point.load()()
    raise LookupError(f"no exporter {name!r} is installed")
