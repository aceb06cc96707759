"""Three nodes on this machine under Ray: all verbs, and one of them dies under requests."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeswitch import Client, ModelNotFound, PermissionDenied
from pipeswitch.client.cluster import connected_ray, placement_of, told
from pipeswitch.errors import InvalidInput, ServerUnavailable
from pipeswitch.wire.addresses import is_loopback, parse_listen

pytest.importorskip("ray", reason="Ray is not installed: pip install 'pipeswitch[ray]'")

COMMAND = [sys.executable, "-P", "-c", "from pipeswitch.cli.main import main; main()"]
SMALL = ("--device", "cpu", "--arena", "64MiB", "--host-store", "128MiB", "--standby", "1",
         "--commit-every", "200ms")  # fmt: skip
REQUESTS = 200
JOB = """
import sys, time
import torch
from pipeswitch import job
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x in job.steps([torch.ones(2, 4)] * 60, model=model, optimizer=optimizer):
    time.sleep(float(sys.argv[2]))
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

        # Ray tries for 20 s: meanwhile the other tests are run.
        self.stranger = subprocess.Popen(
            [*COMMAND, "cluster", "status"], env={**os.environ, "RAY_AUTH_TOKEN": "0" * 64},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def cli(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*COMMAND, *words], env={**os.environ, **environment}, text=True,
                              capture_output=True, timeout=60)  # fmt: skip

    def status(self) -> dict[str, Any]:
        found = self.cli("cluster", "status", "--json")
        assert found.returncode == 0, found.stderr
        return dict(json.loads(found.stdout))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    before = dict(os.environ)  # Ray adds to it
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    stopped = made.cli("cluster", "down")
    assert made.process.wait(60) == 0, stopped.stderr
    assert made.process.stdout is not None
    made.process.stdout.close()
    os.environ.clear()
    os.environ.update(before)


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


def test_each_node_listens_on_loopback_and_asks_for_its_key(nodes: Cluster, client: Client) -> None:
    for node in nodes.status()["nodes"]:
        assert is_loopback(parse_listen(node["address"])[0])
        with (
            Client(node["address"]) as stranger,
            pytest.raises((PermissionDenied, ServerUnavailable)),
        ):
            stranger.models()


def test_the_verbs_speak_of_all_nodes(nodes: Cluster, client: Client, tmp_path: Path) -> None:
    (model,) = client.models()
    assert len(model["nodes"]) == 2
    assert client.show("m")["digest"] == model["digest"]
    assert client.ping(deep=True)["ready"]
    assert set(client.stats()["nodes"]) == {"node-0", "node-1", "node-2"}
    assert {row["name"].partition("/")[0] for row in client.ps()} == set(client.stats()["nodes"])
    with pytest.raises(ModelNotFound):
        client.job("nothing", "show")
    with pytest.raises(InvalidInput, match="one node"):
        client.trace()
    table = nodes.cli("--host", "cluster", "ps")
    assert table.returncode == 0, table.stderr
    assert "node-2/memory-daemon" in table.stdout


def test_placement_that_is_started_again_knows_as_much(nodes: Cluster, client: Client) -> None:
    before = nodes.status()
    with connected_ray("auto") as ray:
        ray.kill(placement_of(ray), no_restart=False)
        again = told(ray, placement_of(ray).table.options(max_task_retries=-1).remote())
    assert again["version"] > before["version"]
    assert {"serving": again["models"]["m"], "nodes": again["holders"]["m"]} == before["models"][
        "m"
    ]


def test_a_jobs_node_is_killed_and_it_ends_with_the_same_bits(
    nodes: Cluster, client: Client, tmp_path: Path
) -> None:
    """Ray starts the node again, and the job goes on from its last commit."""
    (tmp_path / "job.py").write_text(JOB)
    for name, step_s in (("whole", "0"), ("killed", "0.05")):
        client.train(tmp_path / "job.py", name=name, args=[f"{tmp_path}/{name}.pt", step_s])
    assert client.task("whole").wait(60)["state"] == "done"
    row = wait_for(lambda: job_row(client, "killed"), lambda row: row["persisted_step"] >= 10)
    assert len({row["node"] for row in client.jobs()}) == 2
    victim = next(node for node in nodes.status()["nodes"] if node["name"] == row["node"])
    os.kill(victim["pid"], signal.SIGKILL)
    row = wait_for(lambda: job_row(client, "killed"), lambda row: row["state"] == "done")
    assert (row["node"], row["restarts"]) == (victim["name"], 1)
    weights = [torch.load(tmp_path / f"{name}.pt", weights_only=True)["weight"]
               for name in ("whole", "killed")]  # fmt: skip
    assert torch.equal(*weights)


def job_row(client: Client, name: str) -> dict[str, Any]:
    """Empty: its node is not there."""
    return next((row for row in client.jobs() if row["name"] == name), {})


def wait_for(
    look: Callable[[], dict[str, Any]], is_so: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    until_s = time.monotonic() + 60.0
    while not (found := look()) or not is_so(found):
        assert time.monotonic() < until_s, found
        time.sleep(0.05)
    return found


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


def test_who_has_another_token_hears_nothing(nodes: Cluster) -> None:
    heard, error = nodes.stranger.communicate(timeout=60)
    assert (nodes.stranger.returncode, heard) == (3, ""), error
    assert "no Ray answers" in error
