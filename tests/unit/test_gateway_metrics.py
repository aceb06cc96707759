"""What Prometheus reads of the gateway and of the server."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="make installs it")

from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open
from prometheus_client.parser import text_string_to_metric_families as read_plain

from pipeswitch.frontend.clients import Counters
from pipeswitch.gateway.metrics import Metrics
from pipeswitch.scheduler.scheduler import Scheduler, SchedulerSettings

BILL = {"queue_ms": 1.0, "switch_ms": 2.0, "compute_ms": 30.0, "total_ms": 33.0, "resident": True}


def samples(text: str, read: Any = read_plain) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in read(text)
        for sample in family.samples
    }


def told(metrics: Metrics, facts: dict[str, Any] | None = None) -> dict[tuple[str, ...], float]:
    return samples(metrics.text("", facts)[0].decode())


def test_requests_are_counted_and_their_bills_are_histograms_in_seconds() -> None:
    metrics = Metrics()
    metrics.answered("m", BILL)
    metrics.failed("m", "QueueFull")
    found = told(metrics)
    assert found["pipeswitch_gateway_requests_total", "m", "ok"] == 1
    assert found["pipeswitch_gateway_requests_total", "QueueFull", "m"] == 1
    assert found["pipeswitch_request_compute_seconds_sum", "m"] == 0.03
    assert found["pipeswitch_request_compute_seconds_bucket", "0.02", "m"] == 0
    assert found["pipeswitch_request_compute_seconds_bucket", "0.05", "m"] == 1
    metrics.failed("n", "TaskFailed")
    metrics.forget_others({"n"})
    assert not [key for key in told(metrics) if "m" in key]
    assert told(metrics)["pipeswitch_gateway_requests_total", "TaskFailed", "n"] == 1


def facts() -> dict[str, Any]:
    """As a server that has just begun tells them."""
    settings = SchedulerSettings(
        device="cpu", arena_bytes=8 << 20, store_bytes=8 << 20, words=64, standby=1
    )
    stats = Scheduler(settings).listing.stats()
    own = dict.fromkeys(("malformed", "queue_full", "slow_clients", "clients"), 0)
    counts = Counters(accepted=3, ok=2).as_dict()
    own |= {"pool_capacity_bytes": 10, "pool_free_bytes": 4, "inference": counts}
    job = {"name": "j", "state": "running", "step": 7, "suspensions": 2, "evictions": 0,
           "restarts": 1, "steps_recomputed": 3}  # fmt: skip
    workers = [{"kind": "worker", "state": "standby"}] * 2
    return {"stats": {**stats, **own}, "jobs": [job], "ps": [*workers, {"kind": "model"}]}


def test_an_operator_is_told_of_the_server_and_others_are_not() -> None:
    metrics = Metrics()
    found = told(metrics, facts())
    assert found["pipeswitch_switches_total",] == 0
    assert found["pipeswitch_requests_total", "ok"] == 2
    assert found["pipeswitch_in_flight_requests",] == 1
    assert found["pipeswitch_memory_capacity_bytes", "device"] > 0
    assert found["pipeswitch_memory_free_bytes", "requests"] == 4
    assert found["pipeswitch_workers", "standby"] == 2
    assert found["pipeswitch_job_step", "j", "running"] == 7
    assert found["pipeswitch_job_suspensions_total", "j"] == 2
    assert told(metrics) == {}


def test_a_scraper_that_asks_for_openmetrics_gets_it_whole() -> None:
    metrics = Metrics()
    metrics.answered("m", BILL)
    text, kind = metrics.text("application/openmetrics-text; version=1.0.0", facts())
    assert kind.startswith("application/openmetrics-text")
    found = samples(text.decode(), read_open)
    assert found["pipeswitch_transmitted_bytes_total",] == 0
    assert found["pipeswitch_request_queue_seconds_count", "m"] == 1
