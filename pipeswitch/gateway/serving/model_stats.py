"""Counts of each model's requests, for Prometheus metrics and for Triton's ``statistics``."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from ...wire.request_timing import PARTS

SECONDS: Final = (
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
)
PHASES: Final[Mapping[str, str]] = {
    **{name.removesuffix("_ms"): text for name, text in PARTS.items()},
    "gateway": "Time in the gateway, outside of the total",
}
TRITONS: Final = {"queue": "queue", "compute_input": "switch", "compute_infer": "compute"}
OK: Final = "ok"
MAX_NAME_CHARS: Final = 64  # no model has a longer name
MAX_COUNTED: Final = 1 << 14  # maximum (model, outcome) pairs; operators' queries drop old models
_ENDS_MS: Final = [seconds * 1000.0 for seconds in SECONDS]
_ENDS: Final = [floatToGoString(seconds) for seconds in (*SECONDS, float("inf"))]


Values = Mapping[Any, float]  # tuple of labels -> value


def counters(name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
    """Return a metric of counters."""
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def gauges(name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
    """Return a metric of gauges."""
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    for names, value in values.items():
        family.add_metric(names, float(value))
    return family


class _Phase(msgspec.Struct, gc=False):
    key: str  # field of a timing
    ms: float
    counts: list[int]  # requests, by the smallest of ``SECONDS`` that they do not exceed


class _Model(msgspec.Struct):
    outcomes: dict[str, int] = {}
    ok_ms: float = 0.0
    failed: int = 0
    failed_ms: float = 0.0
    last_ms: int = 0
    rows: float = 0.0  # computed rows; each request of a batch counts its share
    runs: float = 0.0
    phases: list[_Phase] = []  # empty before the first answer

    def ns_of(self, phase: str) -> int:
        return round(sum(one.ms for one in self.phases if one.key == f"{phase}_ms") * 1e6)


class ModelStats:
    """Counts since the gateway began, by model, for models that the server has."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}
        self._counted = 0  # pairs of model and outcome

    def answered(self, model: str, took_ms: float, timing: Mapping[str, Any]) -> None:
        stats = self._models.get(model)
        if stats is None or not stats.phases:
            stats = self._count(model, OK, 0)
            for phase in PHASES:
                stats.phases.append(_Phase(f"{phase}_ms", 0.0, [0] * len(_ENDS)))
        stats.outcomes[OK] += 1
        stats.ok_ms += took_ms
        stats.last_ms = int(time.time() * 1000)
        batched = timing.get("batched", 1)
        stats.rows += timing.get("batch", 1) / batched
        stats.runs += 1 / batched
        for part in stats.phases:
            ms = timing.get(part.key, 0.0)
            part.ms += ms
            part.counts[bisect_left(_ENDS_MS, ms)] += 1

    def failed(self, model: str, outcome: str, took_ms: float | None = None) -> bool:
        """Count a failure; return False if it is not counted.

        ``outcome`` is the error's name; ``took_ms`` is None if the model did not cause it. The
        number of names is limited, because a client may send any number of unknown names.
        """
        is_full = self._counted >= MAX_COUNTED or len(model) > MAX_NAME_CHARS
        if is_full and outcome not in self._models.get(model, _Model()).outcomes:
            return False
        stats = self._count(model, outcome, 1)
        if took_ms is not None:
            stats.failed += 1
            stats.failed_ms += took_ms
        return True

    def _count(self, model: str, outcome: str, more: int) -> _Model:
        stats = self._models.setdefault(model, _Model())
        self._counted += outcome not in stats.outcomes
        stats.outcomes[outcome] = stats.outcomes.get(outcome, 0) + more
        return stats

    def forget_others(self, models: set[str]) -> None:
        """Drop the counts of models that are no longer registered."""
        for name in self._models.keys() - models:
            self._counted -= len(self._models.pop(name).outcomes)

    def row(self, model: str, version: int) -> dict[str, Any]:
        """Return a row of ``model_stats``: the counts of a name, at its current version."""
        stats = self._models.get(model, _Model())
        ok_count = stats.outcomes.get(OK, 0)
        phases = {
            "success": (ok_count, round(stats.ok_ms * 1e6)),
            "fail": (stats.failed, round(stats.failed_ms * 1e6)),
            **{name: (ok_count, stats.ns_of(phase)) for name, phase in TRITONS.items()},
            **dict.fromkeys(("compute_output", "cache_hit", "cache_miss"), (0, 0)),
        }
        return {
            "name": model,
            "version": str(version),
            "last_inference": stats.last_ms,
            "inference_count": round(stats.rows),
            "execution_count": round(stats.runs),
            "inference_stats": {
                name: {"count": count, "ns": ns} for name, (count, ns) in phases.items()
            },
            "batch_stats": [],
        }

    def collect(self) -> Iterable[Metric]:
        """Yield the Prometheus metrics of requests."""
        yield counters(
            "pipeswitch_gateway_requests",
            "Requests to models through the gateway",
            ["model", "outcome"],
            {
                (name, outcome): count
                for name, stats in self._models.items()
                for outcome, count in stats.outcomes.items()
            },
        )
        for number, (phase, text) in enumerate(PHASES.items()):
            family = HistogramMetricFamily(
                f"pipeswitch_request_{phase}_seconds",
                f"{text}; of requests through the gateway",
                labels=["model"],
            )
            for name, stats in self._models.items():
                if stats.phases:
                    part = stats.phases[number]
                    buckets = [*zip(_ENDS, accumulate(part.counts), strict=True)]
                    family.add_metric([name], buckets=buckets, sum_value=part.ms / 1000.0)
            yield family
