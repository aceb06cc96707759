"""``/metrics``: what Prometheus reads, in the controller's words and in base units.

Everyone who may ask models is told of requests that came through the gateway, by model; operators
are told of the server too, from its listings at each look.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from ..wire.bill import PARTS

SECONDS: Final = (
    0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
PHASES: Final[Mapping[str, str]] = {
    **{name.removesuffix("_ms"): text for name, text in PARTS.items()},
    "gateway": "In the gateway, beside that",
}
_COUNTERS: Final[Mapping[str, str]] = {
    "switches": "Models that took the device from another one",
    "preemptions": "Times that training stepped aside for a request",
    "evictions": "Models that left the device for others",
    "inferences": "Requests that were computed",
    "runs": "Times that a model computed, for one request or for joined ones",
    "transmissions": "Copies of models to the device",
    "transmitted_bytes": "Bytes of models copied to the device",
    "commits": "States of training jobs that were kept",
    "worker_restarts": "Workers started again",
    "daemon_restarts": "Memory daemons started again",
    "malformed": "Messages that were none of the protocol",
    "queue_full": "Requests refused because a queue was full",
    "slow_clients": "Clients dropped because they did not read",
}
OK: Final = "ok"
_OUTCOMES: Final = (OK, "error", "undeliverable")
_TIERS: Final[Mapping[str, str]] = {"arena": "device", "store": "host", "pool": "requests"}
_NV_COUNTERS: Final[Mapping[str, tuple[str, str, float]]] = {  # Triton's: phase, field, per unit
    "nv_inference_request_success": ("success", "count", 1),
    "nv_inference_request_failure": ("fail", "count", 1),
    "nv_inference_request_duration_us": ("success", "ns", 1000),
    "nv_inference_queue_duration_us": ("queue", "ns", 1000),
    "nv_inference_compute_input_duration_us": ("compute_input", "ns", 1000),
    "nv_inference_compute_infer_duration_us": ("compute_infer", "ns", 1000),
    "nv_inference_compute_output_duration_us": ("compute_output", "ns", 1000),
}
_JOB_STEPS: Final[Mapping[str, str]] = {
    "step": "The step a job is at; back after a kill",
    "committed_step": "The last step kept in memory, which a worker's death goes back to; -1: none",
    "persisted_step": "The last step on disk, which the server's death goes back to; -1: none",
}
_JOB_COUNTERS: Final[Mapping[str, str]] = {
    "suspensions": "Times a job stepped aside in place",
    "evictions": "Times a job left the device",
    "restarts": "Times a job began again from its last commit",
    "steps_recomputed": "Steps a job did again",
    "preempted_s": "Seconds a job waited in place for requests",
}


MAX_NAME_CHARS: Final = 64  # a longer one is no model's
MAX_COUNTED: Final = 1 << 14  # models and outcomes; an operator's look forgets what is gone


class Metrics:
    """What was counted since the gateway began, and how it is told."""

    def __init__(self, *, has_nv_names: bool = False) -> None:
        """``has_nv_names``: tell Triton's metrics by their names too."""
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "pipeswitch_gateway_requests",
            "Requests to models through the gateway",
            ["model", "outcome"],
            registry=self._registry,
        )
        self._phases = {
            phase: Histogram(
                f"pipeswitch_request_{phase}_seconds",
                f"{text}; of requests through the gateway",
                ["model"],
                buckets=SECONDS,
                registry=self._registry,
            )
            for phase, text in PHASES.items()
        }
        self._seen: set[tuple[str, str]] = set()  # models and outcomes
        self._parts: dict[str, list[tuple[str, Any]]] = {}  # of each model's bill
        self._server = _Server(has_nv_names=has_nv_names)
        self._registry.register(self._server)

    def answered(self, model: str, bill: Mapping[str, Any]) -> None:
        self._count(model, OK)
        if model not in self._parts:  # to look them up costs more than to count
            self._parts[model] = [
                (f"{phase}_ms", histogram.labels(model))
                for phase, histogram in self._phases.items()
            ]
        for key, part in self._parts[model]:
            part.observe(bill.get(key, 0.0) / 1000.0)

    def failed(self, model: str, outcome: str) -> bool:
        """``outcome``: the error's name. False: it is not counted: not every failure tells that
        there is such a model, and a stranger can ask for one name after the other."""
        is_counted = (model, outcome) in self._seen or (
            len(self._seen) < MAX_COUNTED and len(model) <= MAX_NAME_CHARS
        )
        if is_counted:
            self._count(model, outcome)
        return is_counted

    def _count(self, model: str, outcome: str) -> None:
        self._seen.add((model, outcome))
        self._requests.labels(model, outcome).inc()

    def forget_others(self, models: set[str]) -> None:
        """Of models that are registered no more."""
        for model, outcome in {one for one in self._seen if one[0] not in models}:
            self._seen.remove((model, outcome))
            self._requests.remove(model, outcome)
            if outcome == OK:
                del self._parts[model]
                for histogram in self._phases.values():
                    histogram.remove(model)

    def text(self, accept: str, facts: Mapping[str, Any] | None) -> tuple[bytes, str]:
        """The page and its type.

        Args:
            accept: the scraper's ``Accept``.
            facts: ``stats``, ``jobs``, ``ps`` and ``models`` (all versions) of the server, and
                ``tally``, the rows of Triton's statistics; None: not for this caller.
        """
        encode, content_type = choose_encoder(accept)
        self._server.facts = facts
        try:
            return encode(self._registry), content_type
        finally:
            self._server.facts = None


class _Server:
    """The server's numbers as metrics."""

    def __init__(self, *, has_nv_names: bool) -> None:
        self.facts: Mapping[str, Any] | None = None
        self._has_nv_names = has_nv_names
        self._idle_s: dict[str, float] = {}  # of each device, and these, as of the last look
        self._up_s = self._busy_s = 0.0

    def collect(self) -> Iterable[Metric]:
        if self.facts is None:
            return
        stats = self.facts["stats"]
        for key, text in _COUNTERS.items():
            yield CounterMetricFamily(f"pipeswitch_{key}", text, value=stats[key])
        requests = CounterMetricFamily(
            "pipeswitch_requests", "Accepted requests to models, by how they ended",
            labels=["outcome"],
        )  # fmt: skip
        for outcome in _OUTCOMES:
            requests.add_metric([outcome], stats["inference"][outcome])
        yield requests
        yield _gauge(
            "in_flight_requests", "Accepted, not answered", stats["inference"]["in_flight"]
        )
        yield _gauge("queued_requests", "Waiting for the device", stats["queued"])
        yield _gauge("ready", "1 when a request would be served now", stats["ready"])
        yield _gauge("draining", "1 when the server is leaving", stats["draining"])
        dispatches = CounterMetricFamily(
            "pipeswitch_dispatches",
            "Requests that got the device, by what of their model had to be sent: all (cold), what "
            "lies behind its prefix, nothing (resident)",
            labels=["kind"],
        )
        for kind, count in stats["dispatches"].items():
            dispatches.add_metric([kind], count)
        yield dispatches
        yield _gauge("uptime_seconds", "Since the server began", stats["up_s"])
        yield from self._device_time(stats)
        used = CounterMetricFamily(
            "pipeswitch_tenant_device_seconds", "Device time of runs, by who asked",
            labels=["tenant"],
        )  # fmt: skip
        for name, seconds in stats["tenant_s"].items():
            used.add_metric([name], seconds)
        yield used
        yield _gauge("models", "Registered", stats["models"])
        yield _gauge("clients", "With a session", stats["clients"])
        for part in ("capacity", "free"):
            tiers = GaugeMetricFamily(
                f"pipeswitch_memory_{part}_bytes", f"Memory, {part}", labels=["tier"]
            )
            for key, tier in _TIERS.items():
                tiers.add_metric([tier], stats[f"{key}_{part}_bytes"])
            yield tiers
        yield self._shares(self.facts["models"])
        yield from self._workers(self.facts["ps"])
        yield from self._jobs(self.facts["jobs"])
        if self._has_nv_names:
            yield from self._triton(self.facts["tally"])

    def _device_time(self, stats: Mapping[str, Any]) -> Iterable[Metric]:
        """By kind, and by device where there are several. What computes is told when it is over, so
        idle time, the rest, is not let sink: a counter that does has begun anew."""
        up_s = stats["up_s"]
        if up_s < self._up_s:  # another server
            self._idle_s, self._up_s, self._busy_s = {}, 0.0, 0.0
        busy_s = sum(stats["device_s"].values())
        several = stats.get("devices", [])
        times = CounterMetricFamily(
            "pipeswitch_device_seconds",
            "Device time: requests compute (infer), a request waits for its model (switch), a job "
            "computes (train), none of it (idle)",
            labels=["kind", "device"] if several else ["kind"],
        )
        for row in several or [stats]:
            name, spent_s = row["device"], row["device_s"]
            idle_s = max(self._idle_s.get(name, 0.0), up_s - sum(spent_s.values()))
            self._idle_s[name] = idle_s
            for kind, seconds in {**spent_s, "idle": idle_s}.items():
                times.add_metric([kind, name] if several else [kind], seconds)
        yield times
        if several:
            served = CounterMetricFamily(
                "pipeswitch_device_inferences", "Answered with outputs", labels=["device"]
            )
            ready = GaugeMetricFamily(
                "pipeswitch_device_ready", "1 when it would serve a request", labels=["device"]
            )
            for row in several:
                served.add_metric([row["device"]], row["inferences"])
                ready.add_metric([row["device"]], float(row["ready"]))
            yield served
            yield ready
        if self._has_nv_names:
            since_s = max(1e-9, up_s - self._up_s)
            share = (busy_s - self._busy_s) / since_s / (len(several) or 1)
            share = min(1.0, max(0.0, share))
            used = stats["arena_capacity_bytes"] - stats["arena_free_bytes"]
            for name, text, value in (
                ("utilization", "Busy since the last look, from 0 to 1", share),
                ("memory_used_bytes", "Of the arena", used),
                ("memory_total_bytes", "Of the arena", stats["arena_capacity_bytes"]),
            ):
                gauge = GaugeMetricFamily(f"nv_gpu_{name}", text, labels=["gpu_uuid"])
                gauge.add_metric([stats["device"]], value)
                yield gauge
        self._up_s, self._busy_s = up_s, busy_s

    @staticmethod
    def _triton(rows: Iterable[Mapping[str, Any]]) -> Iterable[Metric]:
        """Gauges to the library, since Triton's counters do not end in _total."""
        rows = list(rows)
        told = {
            name: [row["inference_stats"][phase][field] / unit for row in rows]
            for name, (phase, field, unit) in _NV_COUNTERS.items()
        }
        told["nv_inference_count"] = [row["inference_count"] for row in rows]
        told["nv_inference_exec_count"] = [row["execution_count"] for row in rows]
        for name, values in told.items():
            family = GaugeMetricFamily(
                name, "As Triton's, through the gateway", labels=["model", "version"]
            )
            for row, value in zip(rows, values, strict=True):
                family.add_metric([row["name"], row["version"]], value)
            yield family

    @staticmethod
    def _shares(rows: Iterable[Mapping[str, Any]]) -> Metric:
        """Of names that several versions stand for. While one of them is quarantined the current
        one has its share too."""
        shares = GaugeMetricFamily(
            "pipeswitch_model_share_ratio",
            "Of the requests that name no version, each version's part of a split, from 0 to 1",
            labels=["model", "version"],
        )
        split = {row["name"] for row in rows if 0 < row["share"] < 100}
        for row in rows:
            if row["name"] in split and row["share"]:
                shares.add_metric([row["name"], str(row["version"])], row["share"] / 100)
        return shares

    @staticmethod
    def _workers(rows: Iterable[Mapping[str, Any]]) -> Iterable[Metric]:
        states = Count(row["state"] for row in rows if row["kind"] == "worker")
        workers = GaugeMetricFamily("pipeswitch_workers", "By state", labels=["state"])
        for state, count in sorted(states.items()):
            workers.add_metric([state], count)
        yield workers

    @staticmethod
    def _jobs(rows: Iterable[Mapping[str, Any]]) -> Iterable[Metric]:
        jobs = list(rows)
        for key, text in _JOB_STEPS.items():
            steps = GaugeMetricFamily(f"pipeswitch_job_{key}", text, labels=["job", "state"])
            for job in jobs:
                steps.add_metric([job["name"], job["state"]], job[key])
            yield steps
        for key, text in _JOB_COUNTERS.items():
            name = key.removesuffix("_s") + "_seconds" if key.endswith("_s") else key
            family = CounterMetricFamily(f"pipeswitch_job_{name}", text, labels=["job"])
            for job in jobs:
                family.add_metric([job["name"]], job[key])
            yield family


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"pipeswitch_{name}", text, value=float(value))
