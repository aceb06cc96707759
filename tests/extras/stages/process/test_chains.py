"""Chains of models: their bits and timings, failures in the middle, and resources freed."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import msgspec
import numpy as np
import pytest
import torch
from process_tools import Checked, checked_server, is_bit_equal, kill, mlp, until, write_script

from pipeswitch.base import errors

WIDTH = 64
TEXTS = {"text": (((1, 8),), "bytes")}
LABELS = {"label": (((1, 8),), "bytes"), "score": (((1, 8),), "float32")}
STEPS = [{"model": "encoder"}, {"model": "head", "inputs": {"x": "encoder.y"}}]
FUNCTIONS = f"""
import fcntl
import numpy as np, torch

def read(text):
    found = np.zeros((len(text), {WIDTH}), np.float32)
    for row, one in zip(found, text): row[: len(one)] = list(one)
    return {{"x": found}}

def label(y): return {{"label": np.array([f"no. {{n}}" for n in y.argmax(1)]), "score": y.max(1)}}

def blocks(path):
    with open(bytes(path).decode()) as file: fcntl.flock(file, fcntl.LOCK_SH)
    return np.ones((1, {WIDTH}), np.float32)

class Writes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear({WIDTH}, {WIDTH})
    def forward(self, x):
        y = self.net(x) * 0
        if x.sum().item() < -1e6: raise ValueError("too cold")
        return x.add_(y + 1)

def writes(): return Writes()

"""


class Joined(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return 2 * a + b


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("chains")
    write_script(folder, "chained.py", FUNCTIONS)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("chained")
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def options(functions: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = Path(str(functions.__file__)).parent
    path = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    return {
        "arena": "16MiB",
        "host_store": "64MiB",
        "state_dir": tmp_path_factory.mktemp("state"),
        "tcp_roles": ("infer", "register"),
        "http": True,
        "environment": {"PYTHONPATH": path},
    }


@pytest.fixture(scope="module")
def running(options: dict[str, Any]) -> Iterator[Checked]:
    with checked_server(settles=False, **options) as checked:  # the last test stops the server
        client, example = checked.client, torch.zeros(2, WIDTH)
        client.register("encoder", mlp(WIDTH, 2, 0), example_inputs=example)
        client.register("head", mlp(WIDTH, 2, 1), example_inputs=example)
        client.register(
            "reads", mlp(WIDTH, 2, 0), example_inputs=example, preprocess="chained:read", raw=TEXTS
        )
        client.register(
            "labels",
            mlp(WIDTH, 2, 1),
            example_inputs=example,
            postprocess="chained:label",
            returns=LABELS,
        )
        client.register(
            "blocks",
            mlp(WIDTH, 2, 0),
            example_inputs=torch.zeros(1, WIDTH),
            preprocess="chained:blocks",
            raw={"path": (((1, 4096),), "uint8")},
        )
        for name in ("writes", "fails"):
            client.register(
                name, "chained:writes", weights="random:0", inputs={"x": ((1, WIDTH), "float32")}
            )
        client.register_chain("both", STEPS)
        yield checked


@pytest.fixture(autouse=True)
def nothing_is_left(running: Checked) -> Iterator[None]:
    yield
    if running.running.process.poll() is None:
        stats = until(lambda: (s := running.stats())["pool_slabs"] == 0 and s, "the pool is empty")
        assert stats["pool_free_bytes"] == stats["pool_capacity_bytes"]


def rows(count: int = 1, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


def same(one: Any, other: Any) -> bool:
    return is_bit_equal(torch.as_tensor(one), torch.as_tensor(other))


def after_each_other(running: Checked, x: Any) -> Any:
    return running.client.infer("head", running.client.infer("encoder", x)["y"])["y"]


def test_a_chain_answers_as_its_models_one_after_the_other(running: Checked) -> None:
    client = running.client
    for count in (1, 2):
        answer = client.infer("both", rows(count))
        assert [*answer.outputs] == ["y"]
        assert same(answer["y"], after_each_other(running, rows(count)))
        timing = answer.timing
        assert [*timing.steps] == ["encoder", "head"]
        for part in ("queue_ms", "compute_ms", "total_ms"):
            assert getattr(timing, part) == sum(getattr(b, part) for b in timing.steps.values())
    many = [client.submit("both", rows(1, seed)) for seed in range(32)]
    for seed, one in enumerate(many):
        assert same(one.result(30)["y"], after_each_other(running, rows(1, seed)))


def test_texts_in_front_and_labels_behind(running: Checked) -> None:
    client, texts = running.client, ["a text", "größer", ""]
    steps = [{"model": "reads"}, {"model": "labels", "inputs": {"x": "reads.y"}}]
    client.register_chain("read", steps, {"mood": "labels.label", "rows": "reads.y"})
    answer = client.infer("read", {"text": texts})
    plain = client.infer("reads", {"text": texts})["y"]
    expected = client.infer("labels", plain)
    assert answer["mood"].tolist() == expected["label"].tolist()
    assert same(answer["rows"], plain)
    timing = answer.timing
    assert timing.steps["reads"].preprocess_ms == timing.preprocess_ms > 0.0
    assert timing.steps["labels"].postprocess_ms == timing.postprocess_ms > 0.0


def test_values_of_two_steps_lie_anywhere_in_the_pool(running: Checked) -> None:
    client, x = running.client, rows(2)
    client.register("batched", Joined(), example_inputs=(torch.zeros(2, WIDTH),) * 2)
    parts = {name: client.infer(name, x)["y"] for name in ("encoder", "head")}
    steps = [{"model": "encoder", "inputs": {"x": "x"}}, {"model": "head", "inputs": {"x": "x"}}]
    for first, second in (("encoder", "head"), ("head", "encoder")):
        last = {"model": "batched", "inputs": {"a": f"{first}.y", "b": f"{second}.y"}}
        client.register_chain(f"{first}-first", [*steps, last])
        output = client.infer(f"{first}-first", x)["y"]
        assert same(output, np.float32(2) * parts[first] + parts[second])


def test_a_value_that_several_read_is_the_same_for_all(running: Checked) -> None:
    """Check that steps get separate copies of a value, because a module's code may write to it."""
    steps = [
        {"model": "writes"},
        {"model": "writes", "name": "again"},
        {"model": "head", "inputs": {"x": "writes.y"}},
    ]
    outputs = {"y": "head.y", "again": "again.y", "first": "writes.y"}
    running.client.register_chain("shared", steps, outputs)
    answer = running.client.infer("shared", rows())
    assert same(answer["first"], rows() + 1)
    assert same(answer["again"], rows() + 1)
    assert same(answer["y"], running.client.infer("head", rows() + 1)["y"])


def test_a_chain_is_listed_and_its_name_is_taken(running: Checked) -> None:
    client, example = running.client, torch.zeros(2, WIDTH)
    row = client.show("both")
    assert [step["model"] for step in row["steps"]] == ["encoder", "head"]
    assert row["steps"][1]["inputs"] == {"x": "encoder.y"}
    assert row["inputs"] == client.show("encoder")["inputs"]
    assert row["outputs"] == {"y": [["batch", WIDTH], "float32"]}
    assert "both" in {one["name"] for one in client.models()}
    assert client.register_chain("both", STEPS)["model"] == "both"  # equal, so it changes nothing
    with pytest.raises(errors.AlreadyExists, match="another chain"):
        client.register_chain("both", ["encoder"])
    with pytest.raises(errors.AlreadyExists, match="is a model"):
        client.register_chain("head", STEPS)
    with pytest.raises(errors.AlreadyExists):
        client.register("both", mlp(WIDTH, 2, 0), example_inputs=example)
    with pytest.raises(errors.ModelNotFound, match="is a chain, not a model"):
        client.load("both")
    with running.running.client(tcp=True) as other:
        assert other.register_chain("theirs", ["encoder"])["model"] == "theirs"
        with pytest.raises(errors.PermissionDenied, match='of "both", which is another'):
            other.unregister("both")
        other.unregister("theirs")
    with pytest.raises(errors.ModelNotFound):
        client.infer("theirs", rows())


def test_the_gateway_serves_a_chain_as_a_model(running: Checked) -> None:
    def ask(method: str, path: str, body: Any = None) -> Any:
        with contextlib.closing(HTTPConnection(running.running.http_address, timeout=30)) as line:
            line.request(method, path, None if body is None else msgspec.json.encode(body))
            return msgspec.json.decode(line.getresponse().read())

    metadata = ask("GET", "/v2/models/both")
    assert [one["name"] for one in (*metadata["inputs"], *metadata["outputs"])] == ["x", "y"]
    config = ask("GET", "/v2/models/both/config")
    assert config["ensemble_scheduling"]["step"][1]["input_map"] == {"x": "encoder.y"}
    index = {one["name"]: one["state"] for one in ask("POST", "/v2/repository/index", {})}
    assert index["both"] == "READY"
    sent = {"name": "x", "shape": [1, WIDTH], "datatype": "FP32", "data": rows().tolist()[0]}
    answer = ask("POST", "/v2/models/both/infer", {"inputs": [sent]})
    expected = after_each_other(running, rows())
    assert np.array_equal(np.float32(answer["outputs"][0]["data"]), expected[0])
    parameters = answer["parameters"]
    assert parameters["total_ms"] >= parameters["encoder.total_ms"] > 0.0
    triton = pytest.importorskip("tritonclient.grpc")
    with triton.InferenceServerClient(running.running.grpc_address) as client:
        tensor = triton.InferInput("x", [1, WIDTH], "FP32")
        tensor.set_data_from_numpy(rows())
        assert np.array_equal(client.infer("both", [tensor]).as_numpy("y"), expected)
        (first, _) = client.get_model_config("both").config.ensemble_scheduling.step
        assert (first.model_name, dict(first.input_map)) == ("encoder", {"x": "x"})


def test_a_step_that_fails_is_named(running: Checked) -> None:
    client = running.client
    client.register_chain(
        "cold", ["encoder", {"model": "fails"}], {"y": "fails.y", "e": "encoder.y"}
    )
    where = r'chain "cold", step "fails" \(model "fails"\): .*too cold'
    with pytest.raises(errors.TaskFailed, match=where):
        client.infer("cold", np.full((1, WIDTH), -1e6, np.float32))
    assert client.infer("cold", rows())["y"].shape == (1, WIDTH)
    with pytest.raises(errors.InvalidInput, match=r'cold input "x" expects float32\[1\.\.1,64\]'):
        client.infer("cold", rows(2))


def test_a_request_that_is_taken_back_or_whose_client_leaves_goes_no_further(
    running: Checked, tmp_path: Path
) -> None:
    client = running.client
    steps = ["encoder", {"model": "blocks"}, {"model": "head", "inputs": {"x": "blocks.y"}}]
    client.register_chain("slow", steps, {"y": "head.y", "first": "encoder.y"})
    served = running.count("inferences")

    def begun(send: Callable[[Any], Any], name: str) -> tuple[IO[str], Any]:
        lock = (tmp_path / name).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = np.frombuffer(str(tmp_path / name).encode(), np.uint8)
        future = send({"x": rows(), "path": path})
        until(lambda: running.count("preprocessing") == 1, "the first step is over")
        return lock, future

    lock, future = begun(lambda inputs: client.submit("slow", inputs), "taken-back")
    assert future.cancel() or isinstance(future.exception(30), errors.Cancelled)
    until(lambda: running.count("preprocessing") == 0, "it is taken back")
    lock.close()
    with running.running.client(tcp=True) as other:
        lock, future = begun(lambda inputs: other.submit("slow", inputs), "left")
    until(lambda: running.count("preprocessing") == 0, "its client has gone")
    lock.close()
    assert running.count("inferences") == served + 2  # only the encoder has computed

    lock, future = begun(lambda inputs: client.submit("slow", inputs), "killed")
    for row in running.rows("worker") + running.rows("stage"):
        kill(row["pid"])
    until(lambda: running.count("worker_restarts") >= 3, "all start again")
    lock.close()
    answer = future.result(30)
    assert same(answer["first"], client.infer("encoder", rows())["y"])
    assert same(answer["y"], after_each_other(running, np.ones((1, WIDTH), np.float32)))


def test_a_member_that_leaves_is_named_and_what_follows_is_asked_again(running: Checked) -> None:
    client, example = running.client, torch.zeros(2, WIDTH)
    client.register("comes", mlp(WIDTH, 2, 1), example_inputs=example)
    client.register_chain("goes", ["encoder", {"model": "comes", "inputs": {"x": "encoder.y"}}])
    client.unregister("comes")
    with pytest.raises(
        errors.ModelNotFound, match=r'chain "goes", step "comes".*no model "comes"'
    ) as no:
        client.infer("goes", rows())
    assert no.value.hint == "pipeswitch register comes SOURCE"
    row = client.show("goes")
    assert (row["state"], row["reason"]) == (
        "incomplete",
        'step "comes" needs "comes", which is not ready',
    )
    client.register("comes", mlp(WIDTH, 2, 1), example_inputs=example)
    assert same(client.infer("goes", rows())["y"], after_each_other(running, rows()))
    client.unregister("comes")
    client.register("comes", mlp(32, 2, 1), example_inputs=torch.zeros(2, 32))
    with pytest.raises(errors.InvalidInput, match=r'step "comes".*comes input "x" expects'):
        client.infer("goes", rows())


def test_after_a_restart_a_chain_is_there(running: Checked, options: dict[str, Any]) -> None:
    expected = running.client.infer("both", rows())["y"]
    before = running.client.show("both")
    running.client.register_chain("gone", STEPS)
    running.client.unregister("gone")
    running.settle()
    running.client.close()
    assert running.running.stop() == 0
    with checked_server(**options) as again:
        assert same(again.client.infer("both", rows())["y"], expected)
        until(lambda: again.client.show("both")["state"] == "ready", "its models belong")
        assert again.client.show("both") == before
        with pytest.raises(errors.ModelNotFound):
            again.client.show("gone")
        assert again.client.unregister("both") == {"model": "both"}
    with checked_server(**options) as again:
        assert "both" not in {row["name"] for row in again.client.models()}
