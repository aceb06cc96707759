"""Scaling by Ray's autoscaler with fake machines: load adds a machine, and idling removes it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
from process_tools import ray_of_its_own, until

from pipeswitch import Client
from pipeswitch.extras.cluster.cluster_client import answer_of, connected_ray, placement_of

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),  # a minute of idling, and machines that start one after the other
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="no Ray: pip install 'pipeswitch[ray]'"
    ),
]

CLUSTER = [sys.executable, "-P", "-c", "from pipeswitch.cli.main import main; main()", "cluster"]
IN_FLIGHT = 80  # number of open requests of each of the two clients
PROVIDER = {
    "type": "fake_multinode",
    "use_node_id_as_ip": True,
    "disable_node_updaters": True,
    "disable_launch_config_check": True,
}
LAUNCHER = yaml.safe_load((Path(__file__).parents[4] / "packaging/cluster.yaml").read_text())
SERVER = LAUNCHER["available_node_types"]["server"]
SMALL = {"CPU": 1, "object_store_memory": 100_000_000}
DEFAULTS = (
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
    "head_setup_commands",
    "worker_setup_commands",
)
FAKE = (
    LAUNCHER
    | {key: [] for key in DEFAULTS}
    | {
        "upscaling_speed": 1.0,
        "file_mounts_sync_continuously": False,
        "head_node_type": "ray.head.default",
        "idle_timeout_minutes": 0.05,
        "file_mounts": {},
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "server": SERVER | {"resources": SERVER["resources"] | SMALL},
        },
    }
)


@pytest.fixture
def ray_that_scales(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start a Ray with an autoscaler, without ``ray.cluster_utils``, which would end other Rays."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, clients = one.getsockname()[1], other.getsockname()[1]
    with ray_of_its_own(
        RAY_AUTH_MODE="token",
        RAY_FAKE_CLUSTER="1",
        RAY_worker_niceness="0",
        AUTOSCALER_UPDATE_INTERVAL_S="1",
    ) as (folder, started):
        provider = PROVIDER | {"gcs_address": f"127.0.0.1:{port}"}
        (folder / "fake.json").write_text(json.dumps(FAKE | {"provider": provider}))
        head = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ray.scripts.scripts",
                "start",
                "--head",
                "--block",
                "--num-cpus=1",
                f"--port={port}",
                f"--ray-client-server-port={clients}",
                "--min-worker-port=0",
                "--max-worker-port=0",
                "--object-store-memory=100000000",
                "--include-dashboard=false",
                "--disable-usage-stats",
                f"--autoscaling-config={folder / 'fake.json'}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert head.stdout is not None
        try:
            assert any("runtime started" in line for line in head.stdout)  # reads up to this line
            monkeypatch.setenv("RAY_ADDRESS", provider["gcs_address"])  # another Ray may run here
            yield
        finally:
            started += psutil.Process(head.pid).children(recursive=True)
            for one in (psutil.Process(head.pid), *started):  # they restart processes that end
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            head.communicate()


def nodes() -> list[dict[str, Any]]:
    with contextlib.suppress(Exception), connected_ray("auto") as ray:
        return list(answer_of(ray, placement_of(ray).status.remote())["nodes"])
    return []


def machines() -> int:
    with connected_ray("auto") as ray:
        return sum(node["Alive"] and "pipeswitch" in node["Resources"] for node in ray.nodes())


def test_a_load_brings_a_machine_and_rest_lets_it_go(ray_that_scales: None, tmp_path: Path) -> None:
    """The second machine's answers must have equal bits; no answer may be lost when it leaves."""
    up = ["up", "--scale", "1", "2", "--state-dir", str(tmp_path), "--", "--device", "cpu"]
    sizes = ["--arena", "128MiB", "--host-store", "256MiB", "--standby", "1"]
    subprocess.run([*CLUSTER, *up, *sizes], check=True)
    (first,) = until(nodes, "a server", 200)
    torch.manual_seed(0)
    module = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(16)]).eval()
    x = np.random.default_rng(0).random((64, 512), dtype=np.float32)
    answers: Counter[bytes] = Counter()
    rested = threading.Event()

    def ask(one: Client) -> bool:
        answers[one.infer("m", x).outputs["y"].tobytes()] += 1
        return True

    def load() -> None:
        with Client("cluster") as one:
            waiting: deque[Any] = deque()
            while waiting or not rested.is_set():
                if not rested.is_set() and len(waiting) < IN_FLIGHT:
                    waiting.append(one.submit("m", x))
                else:
                    answers[waiting.popleft().result(200).outputs["y"].tobytes()] += 1

    def has_answered(name: str) -> bool:
        with Client("cluster") as newer:  # with a current table of nodes
            return ask(newer) and newer.stats()["nodes"][name]["inferences"] > 0

    with Client("cluster") as client:
        client.register("m", module, example_inputs=(torch.zeros(64, 512),))
        loads = [threading.Thread(target=load) for _ in range(2)]
        for thread in loads:
            thread.start()
        try:
            until(
                lambda: len(nodes()) == 2 and len(client.models()[0]["nodes"]) == 2,
                "a second server with the model",
                200,
            )
            (second,) = [one["name"] for one in nodes() if one["name"] != first["name"]]
            until(lambda: has_answered(second), "an answer of the second", 200)
        finally:
            rested.set()
            for thread in loads:
                thread.join()
        until(lambda: ask(client) and len(nodes()) == 1, "one server", 200)
        until(lambda: ask(client) and machines() == 1, "one machine", 200)
        assert len(answers) == 1
    subprocess.run([*CLUSTER, "down"], check=True)
    until(lambda: machines() == 0, "no machine", 200)
