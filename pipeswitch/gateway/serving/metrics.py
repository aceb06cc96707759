"""``/metrics`` for Prometheus, with the controller's names and in base units.

Each caller who may use models gets counts of the gateway's requests, by model. Operators also get
the server's numbers, which are queried for each scrape.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from .model_stats import OK, ModelStats, counters, gauges

_COUNTERS: Final[Mapping[str, str]] = {
    "switches": "Switches from one model to another",
    "preemptions": "Suspensions of training for a request",
    "evictions": "Evictions of models from the device",
    "inferences": "Requests that were computed",
    "runs": "Runs of models, for one request or for a batch",
    "transmissions": "Copies of models to the device",
    "transmitted_bytes": "Bytes of models copied to the device",
    "commits": "Commits of training jobs",
    "worker_restarts": "Restarts of workers",
    "daemon_restarts": "Restarts of memory daemons",
    "malformed": "Malformed messages",
    "rejected": "Requests refused by checks: no such model, a wrong shape",
    "queue_full": "Requests refused because a queue was full",
    "gateway_queue_full": "The same, of HTTP and gRPC: also those that only the gateway refused",
    "slow_clients": "Clients dropped because they did not read",
    "sequence_steps": "Requests of sequences",
    "tokens_reused": "Tokens of prompts that were reused from an earlier request",
}
_BY_LABEL: Final = (
    ("gateway_errors", "gateway_errors", "code", "Answers of HTTP and gRPC with an error, by code"),
    (
        "dispatches",
        "dispatches",
        "kind",
        "Dispatched requests, by the part of the model that was copied: all (cold), some "
        "(partial), none (resident)",
    ),
    ("tenant_device_seconds", "tenant_s", "tenant", "Device time of runs, by tenant"),
)
_SEQUENCES: Final = (
    (counters, "tokens", "tokens", "Tokens of answers of language models"),
    (gauges, "model_sequences", "sequences", "Sequences with state on the server, by model"),
    (gauges, "sequence_bytes", "sequence_bytes", "Bytes of the request pool that sequences use"),
    (gauges, "spare_bytes", "spare_bytes", "Bytes of the prefix cache that no sequence uses"),
)
_OUTCOMES: Final = (OK, "error", "queue_full", "undeliverable")
_TIERS: Final[Mapping[str, str]] = {"arena": "device", "store": "host", "pool": "requests"}
_NV_COUNTERS: Final[Mapping[str, tuple[str, str, float]]] = {  # name: phase, field, divisor
    "nv_inference_request_success": ("success", "count", 1),
    "nv_inference_request_failure": ("fail", "count", 1),
    "nv_inference_request_duration_us": ("success", "ns", 1000),
    "nv_inference_queue_duration_us": ("queue", "ns", 1000),
    "nv_inference_compute_input_duration_us": ("compute_input", "ns", 1000),
    "nv_inference_compute_infer_duration_us": ("compute_infer", "ns", 1000),
    "nv_inference_compute_output_duration_us": ("compute_output", "ns", 1000),
}
_JOB_STEPS: Final[Mapping[str, str]] = {
    "step": "Current step of a job; it falls after a kill",
    "committed_step": "Last step committed in memory, to which a job returns if its worker dies; "
    "-1: none",
    "persisted_step": "Last step on disk, to which a job returns if the server dies; -1: none",
}
_JOB_COUNTERS: Final[Mapping[str, str]] = {
    "suspensions": "Suspensions of a job that kept its memory",
    "swaps": "Swaps of a job: its memory was copied out, and its process stayed",
    "evictions": "Evictions of a job: its process ended, and its script started again",
    "restarts": "Restarts of a job from its last commit",
    "steps_recomputed": "Steps that a job computed again",
    "preempted_s": "Seconds for which a job was suspended for requests",
}


class Metrics:
    """Prometheus output of the counters."""

    def __init__(self, model_stats: ModelStats, *, has_nv_names: bool = False) -> None:
        """Create the registry; ``has_nv_names`` adds metrics under Triton's names."""
        self._registry = CollectorRegistry()
        self._registry.register(model_stats)
        self._server = _Server(has_nv_names=has_nv_names)
        self._registry.register(self._server)

    def text(self, accept: str, facts: Mapping[str, Any] | None) -> tuple[bytes, str]:
        """Return the metrics as text, and their content type.

        Args:
            accept: the scraper's ``Accept``.
            facts: ``stats``, ``jobs``, ``ps`` and ``models`` (all versions) of the server, and
                ``model_stats``, the rows of Triton's statistics; None: the caller sees none.
        """
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is no number
            encode, content_type = choose_encoder("")
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
        self._idle_s: dict[str, float] = {}  # device -> idle time at the last scrape
        self._up_s = self._busy_s = 0.0  # also at the last scrape

    def collect(self) -> Iterable[Metric]:
        if self.facts is None:
            return
        stats = self.facts["stats"]
        for key, text in _COUNTERS.items():
            if key in stats:  # a kind of requests adds its own
                yield counters(f"pipeswitch_{key}", text, [], {(): stats[key]})
        ended = stats["inference"]
        failed = ended["error"] - ended["queue_full"]  # overload is not a failure
        yield counters(
            "pipeswitch_requests",
            "Accepted requests to models, by outcome",
            ["outcome"],
            {(one,): failed if one == "error" else ended[one] for one in _OUTCOMES},
        )
        for key, text, value in (
            ("in_flight_requests", "Accepted, not answered", stats["inference"]["in_flight"]),
            ("queued_requests", "Requests that wait for the device", stats["queued"]),
            ("ready", "1 if a request would be served now", stats["ready"]),
            ("draining", "1 while the server drains", stats["draining"]),
            ("uptime_seconds", "Seconds since the server started", stats["up_s"]),
            ("models", "Registered", stats["models"]),
            ("clients", "With a session", stats["clients"]),
            ("sequences", "Sequences with state on the server", stats["sequences"]),
        ):
            yield gauges(f"pipeswitch_{key}", text, [], {(): value})
        for name, key, label, text in _BY_LABEL:
            values = {(one,): count for one, count in stats.get(key, {}).items()}
            yield counters(f"pipeswitch_{name}", text, [label], values)
        yield from self._device_time(stats)
        for part in ("capacity", "free"):
            yield gauges(
                f"pipeswitch_memory_{part}_bytes",
                f"Memory, {part}",
                ["tier"],
                {(tier,): stats[f"{key}_{part}_bytes"] for key, tier in _TIERS.items()},
            )
        if shared := stats["store_shared_bytes"]:
            text = "Bytes that variants share in the host store"
            yield gauges("pipeswitch_memory_shared_bytes", text, ["tier"], {("host",): shared})
        states = Count(row["state"] for row in self.facts["ps"] if row["kind"] == "worker")
        by_state = {(state,): count for state, count in sorted(states.items())}
        yield gauges("pipeswitch_workers", "By state", ["state"], by_state)
        yield self._shares(self.facts["models"])
        yield _precisions(self.facts["models"])
        yield from self._sequences(stats["sequences_by_model"])
        yield from self._jobs(self.facts["jobs"])
        if self._has_nv_names:
            yield from self._triton(self.facts["model_stats"])

    def _device_time(self, stats: Mapping[str, Any]) -> Iterable[Metric]:
        """Yield device time by kind, and by device if there are several.

        A computation counts only at its end, and idle time is the rest, which could then fall. It
        is not allowed to fall, because Prometheus takes a falling counter for a restarted one.
        """
        up_s = stats["up_s"]
        if up_s < self._up_s:  # the server was restarted
            self._idle_s, self._up_s, self._busy_s = {}, 0.0, 0.0
        busy_s = sum(stats["device_s"].values())
        several = stats.get("devices", [])
        times: dict[tuple[str, ...], float] = {}
        for row in several or [stats]:
            name, spent_s = row["device"], row["device_s"]
            idle_s = max(self._idle_s.get(name, 0.0), up_s - sum(spent_s.values()))
            self._idle_s[name] = idle_s
            for kind, seconds in {**spent_s, "idle": idle_s}.items():
                times[(kind, name) if several else (kind,)] = seconds
        yield counters(
            "pipeswitch_device_seconds",
            "Device time: requests compute (infer), a request waits for its model (switch), a job "
            "computes (train), none of it (idle)",
            ["kind", "device"] if several else ["kind"],
            times,
        )
        if several:
            yield counters(
                "pipeswitch_device_inferences",
                "Answered with outputs",
                ["device"],
                {(row["device"],): row["inferences"] for row in several},
            )
            yield gauges(
                "pipeswitch_device_ready",
                "1 if the device would serve a request",
                ["device"],
                {(row["device"],): row["ready"] for row in several},
            )
        if self._has_nv_names:
            since_s = max(1e-9, up_s - self._up_s)
            share = (busy_s - self._busy_s) / since_s / (len(several) or 1)
            share = min(1.0, max(0.0, share))
            used = stats["arena_capacity_bytes"] - stats["arena_free_bytes"]
            for name, text, value in (
                (
                    "utilization",
                    "Share of the time in use since the last scrape, from 0 to 1",
                    share,
                ),
                ("memory_used_bytes", "Of the arena", used),
                ("memory_total_bytes", "Of the arena", stats["arena_capacity_bytes"]),
            ):
                yield gauges(f"nv_gpu_{name}", text, ["gpu_uuid"], {(stats["device"],): value})
        self._up_s, self._busy_s = up_s, busy_s

    @staticmethod
    def _triton(rows: Iterable[Mapping[str, Any]]) -> Iterable[Metric]:
        """Yield Triton's counters as gauges, because the library adds ``_total`` to counters."""
        rows = list(rows)
        row = {
            name: [row["inference_stats"][phase][field] / unit for row in rows]
            for name, (phase, field, unit) in _NV_COUNTERS.items()
        }
        row["nv_inference_count"] = [row["inference_count"] for row in rows]
        row["nv_inference_exec_count"] = [row["execution_count"] for row in rows]
        names = [(row["name"], row["version"]) for row in rows]
        for name, values in row.items():
            by_name = dict(zip(names, values, strict=True))
            yield gauges(
                name,
                "Triton's metric, for requests through the gateway",
                ["model", "version"],
                by_name,
            )

    @staticmethod
    def _shares(rows: Iterable[Mapping[str, Any]]) -> Metric:
        """Return the traffic shares of names with several versions.

        While one version is quarantined, the current one receives its share too.
        """
        split = {row["name"] for row in rows if 0 < row["share"] < 100}
        return gauges(
            "pipeswitch_model_share_ratio",
            "Share of each version in a split, from 0 to 1",
            ["model", "version"],
            {
                (row["name"], str(row["version"])): row["share"] / 100
                for row in rows
                if row["name"] in split and row["share"]
            },
        )

    @staticmethod
    def _sequences(rows: Mapping[str, Mapping[str, int]]) -> Iterable[Metric]:
        for make, name, key, text in _SEQUENCES:
            values = {tuple(f"{of}@1".split("@")[:2]): row[key] for of, row in rows.items()}
            yield make(f"pipeswitch_{name}", text, ["model", "version"], values)

    @staticmethod
    def _jobs(jobs: Sequence[Mapping[str, Any]]) -> Iterable[Metric]:
        for key, text in _JOB_STEPS.items():
            steps = {(job["name"], job["state"]): job[key] for job in jobs}
            yield gauges(f"pipeswitch_job_{key}", text, ["job", "state"], steps)
        for key, text in _JOB_COUNTERS.items():
            name = key.removesuffix("_s") + "_seconds" if key.endswith("_s") else key
            counts = {(job["name"],): job[key] for job in jobs}
            yield counters(f"pipeswitch_job_{name}", text, ["job"], counts)


def _precisions(models: Iterable[Mapping[str, Any]]) -> Metric:
    return gauges(
        "pipeswitch_model_info",
        "Precision of a version; the value is 1",
        ["model", "version", "precision"],
        {
            (m["name"], str(m["version"]), (m.get("precision") or {"name": "exact"})["name"]): 1
            for m in models
            if "steps" not in m
        },
    )
