"""Three nodes on this machine under Ray: all verbs, and one of them dies under requests."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeswitch import Client, ModelNotFound, PermissionDenied
from pipeswitch.errors import InvalidInput, ServerUnavailable
from pipeswitch.wire.addresses import is_loopback, parse_listen

pytest.importorskip("ray", reason="Ray is not installed: pip install 'pipeswitch[ray]'")

COMMAND = [sys.executable, "-P", "-c", "from pipeswitch.cli.main import main; main()"]
SMALL = ("--device", "cpu", "--arena", "64MiB", "--host-store", "128MiB", "--standby", "1")
REQUESTS = 200
JOB = """
import sys
import torch
from pipeswitch import job
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x in job.steps([torch.ones(2, 4)] * 20, model=model, optimizer=optimizer):
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
torch.save(model.state_dict(), sys.argv[1])
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "cluster", "up", "--local", "3", "--state-dir", str(folder), "--", *SMALL],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "3 nodes is ready" in line, line + self.process.stdout.read()

    def cli(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*COMMAND, *words], env={**os.environ, **environment}, text=True,
                              capture_output=True, timeout=60)  # fmt: skip

    def status(self) -> dict[str, Any]:
        found = self.cli("cluster", "status", "--json")
        assert found.returncode == 0, found.stderr
        return dict(json.loads(found.stdout))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    stopped = made.cli("cluster", "down")
    assert made.process.wait(60) == 0, stopped.stderr
    assert made.process.stdout is not None
    made.process.stdout.close()


@pytest.fixture(scope="module")
def client(nodes: Cluster) -> Iterator[Client]:
    with Client("cluster") as made:
        torch.manual_seed(0)
        module = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
        )
        row = made.register("m", module.eval(), example_inputs=(torch.zeros(1, 8),))
        assert row["notes"] == []  # its second copy is there
        yield made
    os.environ.pop("RAY_AUTH_MODE", None)  # Ray's doing


def test_each_node_listens_on_loopback_and_asks_for_its_key(nodes: Cluster, client: Client) -> None:
    for node in nodes.status()["nodes"]:
        assert is_loopback(parse_listen(node["address"])[0])
        with (
            Client(node["address"]) as stranger,
            pytest.raises((PermissionDenied, ServerUnavailable)),
        ):
            stranger.models()


def test_who_has_another_token_hears_nothing(nodes: Cluster) -> None:
    found = nodes.cli("cluster", "status", RAY_AUTH_TOKEN="0" * 64)
    assert found.returncode == 3, found.stderr
    assert "no Ray answers" in found.stderr
    assert found.stdout == ""


def test_the_verbs_speak_of_all_nodes(nodes: Cluster, client: Client, tmp_path: Path) -> None:
    (model,) = client.models()
    assert len(model["nodes"]) == 2
    assert client.show("m")["digest"] == model["digest"]
    assert client.ping(deep=True)["ready"]
    assert set(client.stats()["nodes"]) == {"node-0", "node-1", "node-2"}
    assert {row["name"].partition("/")[0] for row in client.ps()} == set(client.stats()["nodes"])
    (tmp_path / "job.py").write_text(JOB)
    tasks = [client.train(tmp_path / "job.py", name=f"j{n}", args=[f"{tmp_path}/{n}.pt"])
             for n in range(2)]  # fmt: skip
    assert [task.wait(60)["state"] for task in tasks] == ["done", "done"]
    assert len({row["node"] for row in client.jobs()}) == 2
    weights = [torch.load(tmp_path / f"{n}.pt", weights_only=True)["weight"] for n in range(2)]
    assert torch.equal(*weights)
    with pytest.raises(ModelNotFound):
        client.job("nothing", "show")
    with pytest.raises(InvalidInput, match="one node"):
        client.trace()
    table = nodes.cli("--host", "cluster", "jobs")
    assert table.returncode == 0, table.stderr
    assert "j0" in table.stdout
    assert "j1" in table.stdout


def test_a_node_is_killed_under_requests_and_none_is_lost(nodes: Cluster, client: Client) -> None:
    """Each request is answered once and with the same bits; the node comes back with its model;
    then a drained node's models are elsewhere."""
    x = np.random.default_rng(0).random((1, 8), dtype=np.float32)
    expected = client.infer("m", x).outputs["y"].tobytes()
    status = nodes.status()
    serving = status["models"]["m"]["serving"]
    victim = next(node for node in status["nodes"] if node["name"] == serving)
    killed_at = random.randrange(REQUESTS // 2)
    answers = []
    for number in range(REQUESTS):
        if number == killed_at:
            os.kill(victim["pid"], signal.SIGKILL)
        answer = client.submit("m", x).result(60) if number % 2 else client.infer("m", x)
        answers.append((answer.request_id, answer.outputs["y"].tobytes()))
    assert len({request for request, _ in answers}) == REQUESTS
    assert {bits for _, bits in answers} == {expected}

    other = next(name for name in status["models"]["m"]["nodes"] if name != serving)
    drained = nodes.cli("cluster", "drain", other)
    assert drained.returncode == 0, drained.stderr
    left = nodes.status()
    assert other not in {node["name"] for node in left["nodes"]}
    assert other not in left["models"]["m"]["nodes"]
    assert client.infer("m", x).outputs["y"].tobytes() == expected
    client.unregister("m")
    with pytest.raises(ModelNotFound):
        client.infer("m", x)
