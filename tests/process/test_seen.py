"""A server's logs and metrics, and Triton's clients that read them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import pipeswitch as ps
from pipeswitch.testing import RunningServer, server

pytest.importorskip("tritonclient.grpc", reason="make installs it")

TRACE = "ab" * 16
HEADERS = {"traceparent": f"00-{TRACE}-{'cd' * 8}-01"}


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with server(http=True, environment={"PIPESWITCH_LOG__REQUESTS": "1"}) as one:
        with one.client() as client:
            client.register("line", torch.nn.Linear(4, 2), example_inputs=(torch.zeros(1, 4),))
        yield one


def clients(running: RunningServer) -> list[tuple[Any, Any]]:
    from tritonclient import grpc, http

    return [
        (http, http.InferenceServerClient(running.http_address)),
        (grpc, grpc.InferenceServerClient(running.grpc_address)),
    ]


def test_the_request_log_has_each_request_with_its_callers_trace(running: RunningServer) -> None:
    x = np.ones((1, 4), np.float32)
    for library, client in clients(running):
        tensor = library.InferInput("x", x.shape, "FP32")
        tensor.set_data_from_numpy(x)
        client.infer("line", [tensor], headers=dict(HEADERS))
        client.close()
    with running.client() as own, pytest.raises(ps.ModelNotFound):
        own.infer("lin", x)
    text = (running.state_dir / "logs/requests.jsonl").read_text()
    *served, refused = [json.loads(line) for line in text.splitlines()]
    assert [one["trace_id"] for one in served] == [TRACE, TRACE]
    assert {(one["tenant"], one["model"], one["outcome"]) for one in served} == {
        ("*", "line", "ok")
    }
    assert {(one["bytes_in"], one["bytes_out"]) for one in served} == {(16, 8)}
    assert all(one["total_ms"] >= one["compute_ms"] > 0 for one in served)
    assert (refused["tenant"], refused["outcome"]) == ("", "ModelNotFound")
    log = running.log()
    assert "model.registered model=line" in log
    assert "model=lin cause=ModelNotFound" in log
    assert "gone cause=" not in log


def test_tritons_clients_read_settings_and_are_told_that_they_set_none(
    running: RunningServer,
) -> None:
    from tritonclient.utils import InferenceServerException

    for library, client in clients(running):
        plain: dict[str, Any] = {"as_json": True} if "grpc" in library.__name__ else {}
        for model in (None, "line"):
            assert "opentelemetry" in json.dumps(client.get_trace_settings(model, **plain))
        assert "server.log" in json.dumps(client.get_log_settings(**plain))
        client.update_trace_settings(settings={"trace_level": ["OFF"], "trace_mode": None})
        client.update_log_settings({"log_info": True, "log_verbose_level": 0})
        for change, words in (
            (lambda c: c.update_trace_settings("line", {"trace_level": "TIMESTAMPS"}), "is 'OFF'"),
            (lambda c: c.update_trace_settings(None, {"trace_rate": "5"}), "'trace_rate' cannot"),
            (
                lambda c: c.update_log_settings({"log_verbose_level": 1}),
                "cannot be changed here and",
            ),
            (lambda c: c.get_trace_settings("lin"), 'did you mean "line"'),
        ):
            with pytest.raises(InferenceServerException, match=words):
                change(client)
        client.close()


def test_the_event_that_caused_a_run_is_named_by_the_log_and_by_the_timeline(
    running: RunningServer,
) -> None:
    with running.client() as client:
        client.unload("line")
        client.infer("line", np.ones((1, 4), np.float32))
        spans = [one for one in client.trace()["traceEvents"] if "event" in one.get("args", {})]
    switch = next(one for one in reversed(spans) if one["name"].startswith("switch"))
    run = next(one for one in reversed(spans) if one["name"] == switch["name"].split(" ", 1)[1])
    assert run["args"]["event"] == switch["args"]["event"] > 0
    numbers = [int(one) for one in re.findall(r" event=(\d+) ", running.log())]
    assert max(numbers) > 0
    registered = next(one for one in running.log().splitlines() if "model.registered" in one)
    assert 0 < int(registered.split(" event=")[1].split()[0]) < run["args"]["event"]
