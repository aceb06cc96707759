"""Metrics of the gateway and of the server for Prometheus."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="make installs it")

from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open
from prometheus_client.parser import text_string_to_metric_families as read_plain

from pipeswitch.frontend.transport.clients import Counters
from pipeswitch.gateway.serving import model_stats as tally_module
from pipeswitch.gateway.serving.metrics import Metrics
from pipeswitch.gateway.serving.model_stats import ModelStats
from pipeswitch.scheduler.scheduler import Scheduler, SchedulerSettings

ROOT = Path(__file__).parents[2]
BILL = {"queue_ms": 1.0, "switch_ms": 2.0, "compute_ms": 30.0, "total_ms": 33.0, "resident": True}


def samples(text: str, read: Any = read_plain) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in read(text)
        for sample in family.samples
    }


def told(
    metrics: Metrics | ModelStats, facts: dict[str, Any] | None = None
) -> dict[tuple[str, ...], float]:
    metrics = Metrics(metrics) if isinstance(metrics, ModelStats) else metrics
    return samples(metrics.text("", facts)[0].decode())


def test_requests_are_counted_and_their_bills_are_histograms_in_seconds() -> None:
    model_stats = ModelStats()
    model_stats.answered("m", 33.0, BILL)
    model_stats.failed("m", "QueueFull")
    values = told(model_stats)
    assert values["pipeswitch_gateway_requests_total", "m", "ok"] == 1
    assert values["pipeswitch_gateway_requests_total", "QueueFull", "m"] == 1
    assert values["pipeswitch_request_compute_seconds_sum", "m"] == 0.03
    assert values["pipeswitch_request_compute_seconds_bucket", "0.02", "m"] == 0
    assert values["pipeswitch_request_compute_seconds_bucket", "0.05", "m"] == 1
    model_stats.failed("n", "TaskFailed")
    model_stats.forget_others({"n"})
    assert not [key for key in told(model_stats) if "m" in key]
    assert told(model_stats)["pipeswitch_gateway_requests_total", "TaskFailed", "n"] == 1


def test_a_strangers_names_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the server is down, the gateway cannot know which models exist."""
    monkeypatch.setattr(tally_module, "MAX_COUNTED", 3)
    model_stats = ModelStats()
    model_stats.answered("m", 33.0, BILL)
    assert not model_stats.failed("x" * 10_000, "ServerUnavailable")
    counted = [model_stats.failed(f"m{number}", "ServerUnavailable") for number in range(5)]
    assert counted == [True, True, False, False, False]
    assert model_stats.failed("m1", "ServerUnavailable")
    model_stats.answered("n", 33.0, BILL)  # an answer proves that the model exists
    assert told(model_stats)["pipeswitch_gateway_requests_total", "n", "ok"] == 1
    model_stats.forget_others({"m", "n"})
    assert model_stats.failed("m", "QueueFull")


def facts() -> dict[str, Any]:
    """Return the facts of a server that has just started."""
    settings = SchedulerSettings(
        device="cpu", arena_bytes=8 << 20, store_bytes=8 << 20, fence_count=64, standby=1
    )
    scheduler = Scheduler(settings)
    scheduler.machine.devices[0].state.accounts.of("alice").used_ms = 1500.0
    stats = scheduler.listing.stats()
    own = dict.fromkeys(
        (
            "malformed",
            "queue_full",
            "gateway_queue_full",
            "slow_clients",
            "clients",
            "sequences",
            "sequence_steps",
            "tokens_reused",
        ),
        0,
    )
    own["gateway_errors"], own["rejected"] = {"400": 3}, 2
    counts = Counters(accepted=9, ok=2, error=6, queue_full=5).as_dict()
    row = {"sequences": 2, "sequence_bytes": 96, "spare_bytes": 32, "tokens": 7}
    own["sequences_by_model"] = {"chat": row, "chat@2": row | {"tokens": 1}}
    own |= {"pool_capacity_bytes": 10, "pool_free_bytes": 4, "inference": counts}
    job = {
        "name": "j",
        "state": "running",
        "step": 7,
        "committed_step": 6,
        "persisted_step": 4,
        "suspensions": 2,
        "swaps": 4,
        "evictions": 0,
        "restarts": 1,
        "steps_recomputed": 3,
        "preempted_s": 1.5,
    }
    workers = [{"kind": "worker", "state": "standby"}] * 2
    model_stats = ModelStats()
    model_stats.answered("m", 40.0, BILL)
    models = [
        {"name": name, "version": version, "share": share}
        for name, version, share in (("m", 1, 0), ("m", 2, 90), ("m", 3, 10), ("whole", 1, 100))
    ]
    models[-1]["precision"] = {"name": "bf16"}
    rows = {
        "jobs": [job],
        "ps": [*workers, {"kind": "model"}],
        "model_stats": [model_stats.row("m", 1)],
        "models": models,
    }
    return {"stats": {**stats, **own}, **rows}


def test_an_operator_is_told_of_the_server_and_others_are_not() -> None:
    metrics = Metrics(ModelStats())
    samples_by_name = told(metrics, facts())
    assert samples_by_name["pipeswitch_switches_total",] == 0
    outcomes = {key[1]: n for key, n in samples_by_name.items() if "_requests_total" in key[0]}
    assert outcomes == {"ok": 2, "error": 1, "queue_full": 5, "undeliverable": 0}
    assert samples_by_name["pipeswitch_gateway_queue_full_total",] == 0
    assert samples_by_name["pipeswitch_gateway_errors_total", "400"] == 3
    assert samples_by_name["pipeswitch_rejected_total",] == 2
    assert samples_by_name["pipeswitch_in_flight_requests",] == 1
    assert samples_by_name["pipeswitch_memory_capacity_bytes", "device"] > 0
    assert samples_by_name["pipeswitch_memory_free_bytes", "requests"] == 4
    assert samples_by_name["pipeswitch_workers", "standby"] == 2
    assert samples_by_name["pipeswitch_job_step", "j", "running"] == 7
    counted = ("suspensions", "swaps", "evictions", "restarts")
    totals = [samples_by_name[f"pipeswitch_job_{what}_total", "j"] for what in counted]
    assert totals == [2, 4, 0, 1]
    assert samples_by_name["pipeswitch_tenant_device_seconds_total", "alice"] == 1.5
    for name, values in {
        "tokens_total": (7, 1),
        "model_sequences": (2, 2),
        "sequence_bytes": (96, 96),
        "spare_bytes": (32, 32),
    }.items():
        versions = ("1", "2")
        assert (
            tuple(samples_by_name[f"pipeswitch_{name}", one, "chat"] for one in versions) == values
        )
    shares = {key[1:]: value for key, value in samples_by_name.items() if "share_ratio" in key[0]}
    assert shares == {("2", "m"): 0.9, ("3", "m"): 0.1}
    forms = {tuple(sorted(key[1:])) for key in samples_by_name if key[0] == "pipeswitch_model_info"}
    assert forms >= {("1", "exact", "m"), ("1", "bf16", "whole")}
    assert not [key for key in samples_by_name if "shared" in key[0]]
    shared = facts()
    shared["stats"]["store_shared_bytes"] = 7
    assert told(metrics, shared)["pipeswitch_memory_shared_bytes", "host"] == 7
    assert told(metrics) == {}


def test_a_scraper_that_asks_for_openmetrics_gets_it_whole() -> None:
    model_stats = ModelStats()
    model_stats.answered("m", 33.0, BILL)
    metrics = Metrics(model_stats)
    for wrong in ("abc", "1.x.0", "\xb2"):  # versions
        plain = metrics.text(f"application/openmetrics-text; version={wrong}", None)
        assert plain == metrics.text("", None)
    text, kind = metrics.text("application/openmetrics-text; version=1.0.0", facts())
    assert kind.startswith("application/openmetrics-text")
    values = samples(text.decode(), read_open)
    assert values["pipeswitch_transmitted_bytes_total",] == 0
    assert values["pipeswitch_request_queue_seconds_count", "m"] == 1


def spent(facts: dict[str, Any], up_s: float, **device_s: float) -> dict[str, Any]:
    known = {**facts["stats"]["device_s"], **device_s}
    return {**facts, "stats": {**facts["stats"], "up_s": up_s, "device_s": known}}


def test_device_time_is_told_by_kind_and_idle_time_never_sinks() -> None:
    metrics, name = Metrics(ModelStats()), "pipeswitch_device_seconds_total"
    values = told(metrics, spent(facts(), 10.0, infer=1.0, train=5.0, switch=0.5))
    assert [values[name, kind] for kind in ("infer", "switch", "train", "idle")] == [
        1.0,
        0.5,
        5.0,
        3.5,
    ]
    values = told(metrics, spent(facts(), 10.5, infer=2.0, train=5.0, switch=0.5))  # arrives late
    assert values[name, "idle"] == 3.5
    values = told(metrics, spent(facts(), 20.0, infer=2.0, train=5.0, switch=0.5))
    assert values[name, "idle"] == 12.5
    assert told(metrics, spent(facts(), 1.0))[name, "idle"] == 1.0  # a restarted server
    assert values["pipeswitch_dispatches_total", "cold"] == 0
    assert values["pipeswitch_job_preempted_seconds_total", "j"] == 1.5


def test_several_devices_are_told_apart() -> None:
    metrics, name = Metrics(ModelStats(), has_nv_names=True), "pipeswitch_device_seconds_total"
    told(metrics, of_two(spent(facts(), 10.0, infer=1.0), 1.0, 0.0))
    values = told(metrics, of_two(spent(facts(), 20.0, infer=6.0), 2.0, 4.0))
    assert values[name, "cpu:0", "infer"] == 2.0
    assert (values[name, "cpu:0", "idle"], values[name, "cpu:1", "idle"]) == (18.0, 16.0)
    assert values["pipeswitch_device_inferences_total", "cpu:1"] == 7
    assert values["pipeswitch_device_ready", "cpu:1"] == 0
    assert values["nv_gpu_utilization", "cpu"] == 0.25  # mean of both devices


def of_two(facts: dict[str, Any], *infer_s: float) -> dict[str, Any]:
    """Return facts of a server whose devices have computed requests for ``infer_s`` seconds."""
    rows = [
        {
            "device": f"cpu:{index}",
            "device_s": {"infer": each_s, "switch": 0.0, "train": 0.0},
            "inferences": 7,
            "ready": index == 0,
        }
        for index, each_s in enumerate(infer_s)
    ]
    return {**facts, "stats": {**facts["stats"], "devices": rows}}


def test_tritons_names_are_told_when_they_are_asked_for() -> None:
    assert not [key for key in told(Metrics(ModelStats()), facts()) if key[0].startswith("nv_")]
    metrics = Metrics(ModelStats(), has_nv_names=True)
    told(metrics, spent(facts(), 10.0, infer=1.0))
    values = told(metrics, spent(facts(), 14.0, infer=3.0))
    assert values["nv_gpu_utilization", "cpu"] == 0.5
    assert values["nv_gpu_memory_total_bytes", "cpu"] > values["nv_gpu_memory_used_bytes", "cpu"]
    assert values["nv_inference_request_success", "1", "m"] == 1
    assert values["nv_inference_request_duration_us", "1", "m"] == 40_000


def test_joined_requests_are_one_run_and_their_rows_are_counted_once() -> None:
    """As in Triton's statistics, count rows as inferences and runs as executions."""
    model_stats = ModelStats()
    model_stats.answered("m", 1.0, {**BILL, "batch": 4, "batched": 1})
    for _ in range(3):
        model_stats.answered("m", 1.0, {**BILL, "batch": 6, "batched": 3})
    row = model_stats.row("m", 1)
    assert (row["inference_count"], row["execution_count"]) == (10, 2)
    assert row["inference_stats"]["success"]["count"] == 4
    metrics = Metrics(ModelStats(), has_nv_names=True)
    values = told(metrics, {**facts(), "model_stats": [row]})
    assert values["nv_inference_count", "1", "m"] == 10
    assert values["nv_inference_exec_count", "1", "m"] == 2


def test_every_metric_of_the_dashboard_and_the_alerts_exists() -> None:
    dashboard = json.loads((ROOT / "packaging/grafana.json").read_text())
    model_stats = ModelStats()
    model_stats.answered("m", 33.0, BILL)
    metrics = Metrics(model_stats)
    known = {key[0] for key in told(metrics, facts())}
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += re.findall(r"expr: .*", (ROOT / "packaging/alerts.yaml").read_text())
    named = set(re.findall(r"\bpipeswitch_\w+", " ".join(expressions)))
    assert len(named) > 15
    assert named <= known
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
