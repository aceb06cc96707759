"""Kills of servers, actors, placement and a raylet during requests: each request is answered."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from process_tools import free_port, ray_of_its_own, until

from pipeswitch import Client
from pipeswitch.base.errors import PipeSwitchError
from pipeswitch.extras.cluster.cluster_client import answer_of, connected_ray, placement_of
from tests.process.figures import publish

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),  # servers restart one after the other
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="no Ray: pip install 'pipeswitch[ray]'"
    ),
]

CLUSTER = [sys.executable, "-P", "-c", "from pipeswitch.cli.main import main; main()", "cluster"]
SMALL = ["--device", "cpu", "--arena", "64MiB", "--host-store", "128MiB", "--standby", "1"]
RAY = [
    sys.executable,
    "-m",
    "ray.scripts.scripts",
    "start",
    "--block",
    "--num-cpus=2",
    "--min-worker-port=0",
    "--max-worker-port=0",
    "--object-store-memory=100000000",
    "--disable-usage-stats",
]
RETURN_S = 240.0  # limit for a killed node's return, on a busy machine
REQUESTS, KILLS, REPEATS = 300, 8, 20
SEED = int(os.environ.get("SEED", "0")) or random.randrange(1, 1 << 30)
X = np.random.default_rng(0).random((1, 8), dtype=np.float32)


@pytest.fixture(scope="module")
def raylets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a Ray of three raylets, and three nodes; yield the raylets' processes, head first."""
    processes: list[subprocess.Popen[str]] = []
    with ray_of_its_own(RAY_AUTH_MODE="token", RAY_worker_niceness="0") as (_, started):

        def start(*words: str) -> None:
            processes.append(
                subprocess.Popen(
                    [*RAY, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
            assert processes[-1].stdout is not None
            lines: list[str] = []
            while "runtime started" not in "".join(lines[-1:]):
                lines.append(processes[-1].stdout.readline())
                assert lines[-1], lines

        try:
            port, clients = free_port(), free_port()
            start(
                "--head",
                f"--port={port}",
                f"--ray-client-server-port={clients}",
                "--include-dashboard=false",
            )
            os.environ["RAY_ADDRESS"] = f"127.0.0.1:{port}"
            for _ in range(2):
                start(f"--address={os.environ['RAY_ADDRESS']}")
            state = str(tmp_path_factory.mktemp("cluster"))
            subprocess.run([*CLUSTER, "up", "--state-dir", state, "--", *SMALL], check=True)
            yield processes
        finally:
            for one in processes:
                started += psutil.Process(one.pid).children(recursive=True)
            for process in (*(psutil.Process(one.pid) for one in processes), *started):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            for one in processes:
                one.communicate()


@pytest.fixture(scope="module")
def client(raylets: list[subprocess.Popen[str]]) -> Iterator[Client]:
    with Client("cluster") as own_client:
        torch.manual_seed(0)
        module = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
        ).eval()
        until(lambda: len(status()["nodes"]) >= 2, "two nodes", RETURN_S)
        own_client.register("m", module, example_inputs=(torch.zeros(1, 8),))
        yield own_client


def status() -> dict[str, Any]:
    with contextlib.suppress(Exception), connected_ray("auto") as ray:
        answer = dict(answer_of(ray, placement_of(ray).status.remote(), 30.0))
        return {**answer, "nodes": {node["name"]: node for node in answer["nodes"]}}
    return {"nodes": {}, "models": {}}


def holders() -> list[dict[str, Any]]:
    """Return the nodes that hold the model, beginning with the node that serves it."""
    facts = status()
    model = facts["models"].get("m", {"nodes": [], "serving": ""})
    names = sorted(model["nodes"], key=lambda name: name != model["serving"])
    return [facts["nodes"][name] for name in names if name in facts["nodes"]]


def kill_server(node: dict[str, Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(node["pid"], signal.SIGKILL)


def kill_actor(node: dict[str, Any]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        actor = psutil.Process(node["pid"]).parent()
        if actor is not None:
            actor.kill()


def kill_placement() -> None:
    with contextlib.suppress(Exception), connected_ray("auto") as ray:
        ray.kill(placement_of(ray), no_restart=False)


def kill_raylet(raylet: subprocess.Popen[str]) -> None:
    for process in psutil.Process(raylet.pid).children(recursive=True):
        if process.name() == "raylet":
            process.kill()


def wait_for(is_so: Callable[[list[dict[str, Any]]], bool], what: str) -> list[dict[str, Any]]:
    """Wait until ``is_so(holders())`` is true; return these holders."""
    until_s = time.monotonic() + RETURN_S
    while not is_so(rows := holders()):
        assert time.monotonic() < until_s, f"{what}: {status()}"
    return rows


def test_of_two_nodes_that_die_in_turn_the_first_is_found_again(client: Client) -> None:
    """Restart one node on another port, then kill the others: the client must find it again."""
    expected = client.infer("m", X).outputs["y"].tobytes()
    waits_s = []
    for number in range(REPEATS):
        first = wait_for(lambda rows: len(rows) >= 2, f"{number}: two holders")[0]
        kill_server(first)
        back = (first["name"], first["pid"])
        others = wait_for(
            lambda rows, back=back: any(  # type: ignore[misc]
                one["name"] == back[0] and one["pid"] != back[1] for one in rows
            ),
            f"{number}: the first is back",
        )
        for node in others:
            if node["name"] != first["name"]:
                kill_server(node)
        began_s = time.monotonic()
        assert client.infer("m", X).outputs["y"].tobytes() == expected
        waits_s.append(time.monotonic() - began_s)
        sys.stdout.write(f"{number}: {waits_s[-1]:.1f} s\n")
    publish("cluster_deaths_in_turn", {"repeats": REPEATS, "slowest_s": max(waits_s)})


def test_kills_of_all_kinds_cost_no_request(
    raylets: list[subprocess.Popen[str]], client: Client
) -> None:
    expected = client.infer("m", X).outputs["y"].tobytes()
    rng = random.Random(SEED)
    kinds: list[Callable[[], None]] = [
        lambda: kill_server(holders()[0]),
        lambda: kill_actor(holders()[0]),
        kill_placement,
        lambda: kill_server(holders()[-1]),
        lambda: kill_actor(holders()[-1]),
        kill_placement,
        lambda: kill_server(holders()[0]),
    ]
    rng.shuffle(kinds)
    kinds.insert(rng.randrange(3, KILLS), lambda: kill_raylet(raylets[-1]))
    moments = sorted(rng.sample(range(5, REQUESTS - 5), KILLS))
    errors, waits_s, answers = [], [], set()
    for number in range(REQUESTS):
        if number in moments:
            wait_for(bool, "a holder")
            kinds.pop(0)()
        began_s = time.monotonic()
        try:
            answer = client.submit("m", X).result(120) if number % 2 else client.infer("m", X)
            answers.add(answer.outputs["y"].tobytes())
        except PipeSwitchError as error:
            errors.append((number, error))
        waits_s.append(time.monotonic() - began_s)
    late = sum(wait_s > 1.0 for wait_s in waits_s)
    figures = {
        "seed": SEED,
        "requests": REQUESTS,
        "kills": KILLS,
        "errors": len(errors),
        "over_1_s": late,
        "slowest_s": max(waits_s),
    }
    sys.stdout.write(f"{figures}\n")
    publish("cluster_kills", figures)
    assert not errors
    assert answers == {expected}
    assert not kinds
