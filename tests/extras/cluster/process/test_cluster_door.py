"""Unmodified HTTP and gRPC clients at each node of a cluster, while nodes die."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from process_tools import ray_of_its_own, until

from pipeswitch import Client
from pipeswitch.base.roles import ANYONE
from pipeswitch.wire.tokens import OWNER_FILE, owner_token
from tests.extras.cluster.process.test_cluster import Cluster, wait_for
from tests.extras.text.process.test_completions import PROMPT, made
from tests.extras.text.process.test_generate import wanted

NEEDED = ("ray", "openai", "tritonclient", "transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # servers restart; another test file may use Ray first
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, NEEDED)), reason=f"needs {', '.join(NEEDED)}"
    ),
]

X = np.random.default_rng(0).random((1, 8), dtype=np.float32)
TOKENS = 40
ASKING = """
import json, select, sys
import numpy as np
kind, address = sys.argv[1:]
x = np.random.default_rng(0).random((1, 8), dtype=np.float32)
if kind in ("openai", "whole"):
    import openai
    client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="EMPTY")
    asked = {"model": "chat", "prompt": "The data set has", "max_tokens": 40, "temperature": 0}
    def ask():
        if kind == "whole":
            return client.completions.create(**asked).choices[0].text
        stream = client.completions.create(**asked, stream=True)
        return "".join(one.choices[0].text for one in stream)
else:
    import importlib
    triton = importlib.import_module(f"tritonclient.{kind}")
    client = triton.InferenceServerClient(address)
    given = triton.InferInput("x", x.shape, "FP32")
    given.set_data_from_numpy(x)
    def ask():
        return client.infer("m", [given]).as_numpy("y").tobytes().hex()
answers, errors, count = {}, [], 0
while not select.select([0], [], [], 0)[0]:
    try:
        answer = ask()
        answers[answer] = answers.get(answer, 0) + 1
    except Exception as error:
        errors.append(f"{count}: {type(error).__name__}: {error}")
    count += 1
    print(count, flush=True)
print(json.dumps({"answers": answers, "errors": errors}), flush=True)
"""


class Asking:
    """Process in which another project's client sends requests to one address without end."""

    def __init__(self, kind: str, address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ASKING, kind, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.count, self._last = 0, ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._last = line
            self.count += 1

    def goes_on(self, more: int = 10) -> None:
        """Wait until the client has had ``more`` further answers or errors."""
        target = self.count + more
        wait_for(lambda: self.count >= target or self.process.poll() is not None)
        assert self.process.poll() is None

    def end(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._reading.join(100)
        return dict(json.loads(self._last))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ray_of_its_own() as (_, started):
        cluster = Cluster(tmp_path_factory.mktemp("cluster"))
        cluster.stranger.kill()
        cluster.stranger.communicate()
        yield cluster
        started += psutil.Process(cluster.process.pid).children(recursive=True)
        stopped = cluster.cli("cluster", "down")
        assert cluster.process.wait(200) == 0, stopped.stderr
        assert cluster.process.stdout is not None
        cluster.process.stdout.close()


@pytest.fixture(scope="module")
def client(nodes: Cluster) -> Iterator[Client]:
    with Client("cluster") as client:
        torch.manual_seed(0)
        module = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
        )
        assert (
            client.register("m", module.eval(), example_inputs=(torch.zeros(1, 8),))["notes"] == []
        )
        model, tokenizer = made()
        row = client.register("chat", model, generate=True, tokenizer=tokenizer, precision="exact")
        assert row["notes"] == []
        yield client


def asked(url: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=100) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def rows_of(nodes: Cluster, model: str = "m") -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Wait until two nodes hold a model; return all nodes by name, and the holders."""
    status = wait_for(
        nodes.status,
        lambda status: (
            len(status["nodes"]) == 3 and len(status["models"].get(model, {}).get("nodes", ())) >= 2
        ),
    )
    return {one["name"]: one for one in status["nodes"]}, status["models"][model]["nodes"]


def test_each_node_serves_all_models_of_the_cluster(nodes: Cluster, client: Client) -> None:
    rows, _ = rows_of(nodes)
    expected = client.infer("m", X).outputs["y"].tolist()
    tensor = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": X.ravel().tolist()}
    for row in [*rows.values()]:
        url = f"http://{row['http']}"
        status, answer = asked(f"{url}/v2/models/m/infer", {"inputs": [tensor]})
        assert status == 200, answer
        assert np.float32(answer["outputs"][0]["data"]).reshape(1, 4).tolist() == expected
        rows = asked(f"{url}/v2/repository/index", {})[1]
        assert sorted(one["name"] for one in rows) == ["chat", "m"]
        assert [one["id"] for one in asked(f"{url}/v1/models")[1]["data"]] == ["chat"]
        assert asked(f"{url}/v2/models/m")[1]["inputs"][0]["name"] == "x"
        assert asked(f"{url}/v2/health/ready") == (200, {"ready": True})
        assert asked(f"{url}/v2/models/none/infer", {"inputs": [tensor]})[0] == 404
        late = {"inputs": [tensor], "parameters": {"timeout": 1}}
        assert asked(f"{url}/v2/models/m/infer", late)[0] == 504


def test_what_changes_the_cluster_is_refused_at_one_node(nodes: Cluster, client: Client) -> None:
    rows, _ = rows_of(nodes)
    for name, row in rows.items():
        token = owner_token(nodes.folder / name / OWNER_FILE)
        for path, method, data in (("other", "POST", b"a bundle"), ("m", "DELETE", None)):
            request = urllib.request.Request(
                f"http://{row['http']}/api/models/{path}",
                data,
                method=method,
                headers={
                    "Authorization": f"Bearer {token}",
                    "Content-Type": "application/octet-stream",
                },
            )
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=100)
            assert json.loads(refused.value.read())["code"] == "InvalidInput"
            refused.value.close()
    assert sorted(row["name"] for row in client.models()) == ["chat", "m"]


def test_callers_are_the_same_at_the_node_that_computes(nodes: Cluster, client: Client) -> None:
    """Check that a forwarded request keeps its tenant, and that a disconnect ends its sequence."""
    rows, holders = rows_of(nodes, "chat")
    body = {"model": "chat", "prompt": PROMPT, "max_tokens": 1900, "temperature": 0, "stream": True}
    for name, row in rows.items():
        request = urllib.request.Request(
            f"http://{row['http']}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=100) as answer:
            assert answer.readline().startswith(b"data: ")
            tenants = sequences(rows)
            assert [*tenants.values()] == [ANYONE]
            assert {*tenants} <= ({name} if name in holders else {*holders})
        until(lambda: not sequences(rows), "its sequence is gone")


def sequences(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return, by node, the tenant of the node's sequence."""
    tenants = {}
    for name, row in rows.items():
        with Client(row["owners"]) as owner:
            for one in owner.sequences():
                tenants[name] = one["tenant"]
    return tenants


def test_nodes_die_and_no_client_of_a_door_loses_a_request(nodes: Cluster, client: Client) -> None:
    """Kill the nodes that hold models one after the other, each after the previous one's return."""
    rows, holders = rows_of(nodes)
    answer = client.generate("chat", PROMPT, max_new_tokens=TOKENS)
    text, (model, tokenizer) = answer.text, made()
    assert answer.tokens == wanted(model, tokenizer(PROMPT)["input_ids"], TOKENS)
    expected = client.infer("m", X).outputs["y"].tobytes().hex()
    door = next(name for name in rows if name not in holders)
    clients = {
        kind: Asking(kind, rows[door]["grpc" if kind == "grpc" else "http"])
        for kind in ("openai", "http", "grpc")
    }
    try:
        for victim in (*holders, *holders):
            for one in clients.values():
                one.goes_on()
            killed(nodes, victim, clients)
        ends = {kind: one.end() for kind, one in clients.items()}
    finally:
        for one in clients.values():
            one.close()
    sys.stdout.write(f"{ {kind: [*one['answers'].values()] for kind, one in ends.items()} }\n")
    assert {kind: one["errors"] for kind, one in ends.items()} == {kind: [] for kind in clients}
    assert {*ends["openai"]["answers"]} == {text}
    assert {*ends["http"]["answers"]} == {*ends["grpc"]["answers"]} == {expected}


def killed(nodes: Cluster, victim: str, clients: dict[str, Asking]) -> None:
    """Kill a node's server and wait until it is back; check that clients are served meanwhile."""
    before = rows_of(nodes)[0][victim]
    os.kill(before["pid"], signal.SIGKILL)
    for one in clients.values():
        one.goes_on()
    wait_for(lambda: rows_of(nodes)[0], lambda rows: rows[victim]["pid"] != before["pid"])
    after = rows_of(nodes)[0][victim]
    assert [after[kind] for kind in ("http", "grpc")] == [before[kind] for kind in ("http", "grpc")]


def test_a_door_whose_server_dies_goes_on_with_the_other_nodes(
    nodes: Cluster, client: Client
) -> None:
    """Kill the node of the client's own address; OpenAI's client retries until it is back."""
    rows, holders = rows_of(nodes)
    text = client.generate("chat", PROMPT, max_new_tokens=TOKENS).text
    for door in rows:
        one = Asking("whole", rows[door]["http"])
        try:
            one.goes_on(3)
            killed(nodes, door, {"whole": one})
            one.goes_on(3)
            end = one.end()
        finally:
            one.close()
        sys.stdout.write(
            f"{door} {door in holders}: {[*end['answers'].values()]} {end['errors']}\n"
        )
        assert {*end["answers"]} == {text}
        assert end["errors"] == []
