"""``/api`` of a real server: jobs, models, events, the timeline, and permissions."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import Checked, checked_server, mlp, until, write_script
from safetensors.torch import save

pytest.importorskip("httptools", reason="make installs it")

from pipeswitch.programs.compiler.export import export_module_to_bundle
from pipeswitch.wire.frames import CHUNK_BYTES

SCRIPT = """
    import torch
    from pipeswitch import job

    print("<img src=x onerror=alert(1)>", flush=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in job.steps(range(10**9), model=model, optimizer=optimizer):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.log(loss=loss)
"""
INFER = (
    b'{"inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1,1,1,1,1,1,1,1]}]}'
)


@pytest.fixture(scope="module")
def checked() -> Iterator[Checked]:
    with checked_server(http=True, arena="128MiB") as checked:
        checked.client.register("a", mlp(8, 1, seed=0), example_inputs=(torch.zeros(1, 8),))
        yield checked


class Caller:
    """Caller with one connection, with or without the owner's token."""

    def __init__(self, checked: Checked, *, is_owner: bool = True) -> None:
        host, _, port = checked.running.http_address.rpartition(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=60)
        token = (checked.running.state_dir / "owner.token").read_text().strip()
        self._headers = {"Authorization": f"Bearer {token}"} if is_owner else {}
        self._answer: http.client.HTTPResponse | None = None

    def open(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> http.client.HTTPResponse:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, path, body, {**self._headers, **fields})
        self._answer = self._connection.getresponse()
        return self._answer

    def close(self) -> None:
        if self._answer is not None:
            self._answer.close()
        self._connection.close()

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Any:
        answer = self.open(method, path, body, **headers)
        reply = json.loads(answer.read())
        assert answer.status == 200, reply
        return reply


Call = Callable[..., Caller]


@pytest.fixture
def call(checked: Checked) -> Iterator[Call]:
    """Yield a function that creates callers; close them at the end."""
    callers = []

    def make(*, is_owner: bool = True) -> Caller:
        callers.append(Caller(checked, is_owner=is_owner))
        return callers[-1]

    yield make
    for caller in callers:
        caller.close()


def records(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream, each with its ``id``."""
    number = ""
    while line := answer.readline():
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "id":
            number = value
        elif name == "data":
            yield {"id": number, **json.loads(value)}


def test_a_job_is_steered_and_its_log_followed_to_its_end(
    checked: Checked, call: Call, tmp_path: Path
) -> None:
    owner = call()
    script = write_script(tmp_path, "endless.py", SCRIPT)
    checked.client.train(script, name="endless")
    until(lambda: owner.ask("GET", "/api/jobs/endless")["step"] > 3, "it trains")
    log = call().open("GET", "/api/jobs/endless/logs?follow=true")
    assert log.getheader("Content-Type") == "text/plain; charset=utf-8"
    assert log.getheader("X-Content-Type-Options") == "nosniff"
    assert log.readline() == b"<img src=x onerror=alert(1)>\n"
    assert owner.ask("POST", "/api/jobs/endless/pause")["state"] == "paused"
    assert owner.ask("POST", "/api/jobs/endless/resume")["state"] != "paused"
    (row,) = [row for row in owner.ask("GET", "/api/jobs")["jobs"] if row["name"] == "endless"]
    assert row["log"]["loss"] >= 0
    assert owner.ask("POST", "/api/jobs/endless/cancel")["state"] == "cancelled"
    log.read()  # blocks until the stream ends with the job


def test_callers_that_send_one_bundle_at_a_time_are_all_served(call: Call, tmp_path: Path) -> None:
    bundle = tmp_path / "net.bundle"
    export_module_to_bundle(mlp(1100, 1, seed=1), (torch.zeros(1, 1100),), bundle)
    data = bundle.read_bytes()
    assert len(data) > CHUNK_BYTES

    def send(name: str) -> Any:
        octets = {"content_type": "application/octet-stream"}
        return call().ask("POST", f"/api/models/{name}", data, **octets)["model"]

    names = [f"same-{number}" for number in range(3)]
    with ThreadPoolExecutor(len(names)) as pool:
        assert [*pool.map(send, names)] == names
    for name in names:
        call().ask("DELETE", f"/api/models/{name}")


def test_a_model_comes_as_a_bundle_answers_and_goes(call: Call, tmp_path: Path) -> None:
    owner, bundle = call(), tmp_path / "net.bundle"
    export_module_to_bundle(mlp(8, 1, seed=1), (torch.zeros(1, 8),), bundle)
    octets = {"content_type": "application/octet-stream"}
    body = owner.ask("POST", "/api/models/b?priority=high&pin=true", bundle.read_bytes(), **octets)
    assert body["model"] == "b"
    row = owner.ask("GET", "/api/models/b")
    assert (row["state"], row["priority"], row["pinned"]) == ("ready", "high", True)
    assert owner.ask("POST", "/v2/models/b/infer", INFER)["parameters"]["total_ms"] > 0
    (entry,) = [one for one in owner.ask("GET", "/api/ps")["rows"] if one["name"] == "b"]
    ((_, size),) = entry["regions"]
    assert 0 < sum(entry["group_bytes"]) <= size
    tuned = save(mlp(8, 1, seed=2).state_dict())
    assert owner.ask("POST", "/api/models/tuned?like=b", tuned, **octets)["model"] == "tuned"
    answers = [owner.ask("POST", f"/v2/models/{name}/infer", INFER) for name in ("b", "tuned")]
    assert answers[0]["outputs"][0]["data"] != answers[1]["outputs"][0]["data"]
    owner.ask("DELETE", "/api/models/tuned")
    owner.ask("POST", "/api/models/b/unload")
    owner.ask("DELETE", "/api/models/b")
    answer = owner.open("GET", "/api/models/b")
    assert (answer.status, json.loads(answer.read())["code"]) == (404, "ModelNotFound")
    broken = owner.open("POST", "/api/models/c", b"no bundle", **octets)
    assert (broken.status, json.loads(broken.read())["code"]) == (400, "RegistrationRefused")


def test_events_are_read_as_they_come_and_gone_on_with(checked: Checked, call: Call) -> None:
    stream = call().open("GET", "/api/events?topics=model.")
    events = records(stream)
    assert "now_ms" in next(events)
    received: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: received.append(next(events)))
    reader.start()

    def more() -> bool:  # called again, because the subscription may begin late
        checked.client.register("e", mlp(8, 1, seed=2), example_inputs=(torch.zeros(1, 8),))
        checked.client.unregister("e")
        return bool(received)

    until(more, "an event came")
    reader.join()
    again = records(call().open("GET", "/api/events", last_event_id=received[0]["id"]))
    assert "now_ms" in next(again)
    following = next(again)
    first, second = (int(one["id"].rpartition("-")[2]) for one in (received[0], following))
    assert second == first + 1


def test_the_timeline_and_the_plan_are_told(call: Call) -> None:
    owner = call()
    owner.ask("POST", "/v2/models/a/infer", INFER)
    trace = owner.ask("GET", "/api/trace?seconds=60")
    named = [event for event in trace["traceEvents"] if event["name"].endswith(" a")]
    assert [event for event in named if "stall_ms" in event["args"]]
    assert trace["now_ms"] * 1000 >= max(event.get("ts", 0) for event in trace["traceEvents"])
    assert "arena_bytes" in owner.ask("GET", "/api/plan")
    assert owner.ask("GET", "/api/stats")["inference"]["ok"] >= 1
    assert owner.ask("GET", "/api/about")["http"].startswith("http://")


def test_a_stranger_is_told_of_models_alone_and_may_change_nothing(call: Call) -> None:
    stranger = call(is_owner=False)
    assert stranger.open("GET", "/ui").read().startswith(b"<!doctype html>")
    assert "source" not in stranger.ask("GET", "/api/models/a")
    for method, path in (
        ("GET", "/api/ps"),
        ("GET", "/api/events"),
        ("GET", "/api/about"),
        ("POST", "/api/models/a"),
        ("DELETE", "/api/models/a"),
        ("POST", "/api/jobs/j/cancel"),
    ):
        answer = stranger.open(method, path)
        assert (answer.status, json.loads(answer.read())["code"]) == (403, "PermissionDenied"), path
