"""A load brings a machine, by Ray's autoscaler with its provider of fake ones; rest lets it go."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from pipeswitch import Client
from pipeswitch.client.cluster import connected_ray, placement_of, told

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # a minute of rest, and machines start one after the other
    pytest.mark.skipif(importlib.util.find_spec("ray") is None,
                       reason="no Ray: pip install 'pipeswitch[ray]'"),
]  # fmt: skip

PIPESWITCH = [sys.executable, "-P", "-c", "from pipeswitch.cli.main import main; main()"]
SERVER = {"CPU": 1, "pipeswitch": 1, "object_store_memory": 100_000_000}
IN_FLIGHT = 80  # of each of two clients
FAKE = {
    "cluster_name": "fake", "max_workers": 2, "head_node_type": "ray.head.default",
    "upscaling_speed": 1.0, "idle_timeout_minutes": 0.05, "auth": {}, "file_mounts": {},
    "file_mounts_sync_continuously": False,
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
        "server": {"resources": SERVER, "node_config": {}, "min_workers": 0, "max_workers": 2},
    },
    **{key: [] for key in ("cluster_synced_files", "rsync_exclude", "rsync_filter",
                           "initialization_commands", "setup_commands", "head_setup_commands",
                           "worker_setup_commands", "head_start_ray_commands",
                           "worker_start_ray_commands")},
}  # fmt: skip


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


@pytest.fixture
def ray_that_scales(tmp_path: Path) -> Iterator[None]:
    """Not ``ray.cluster_utils``: that ends every Ray of this machine first."""
    before = dict(os.environ)
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # its sockets want a short name
    (folder / "token").write_text(secrets.token_hex(32))
    port, clients = free_ports()
    provider = {"type": "fake_multinode", "gcs_address": f"127.0.0.1:{port}",
                "use_node_id_as_ip": True, "disable_node_updaters": True,
                "disable_launch_config_check": True}  # fmt: skip
    (folder / "fake.json").write_text(json.dumps(FAKE | {"provider": provider}))
    os.environ |= {
        "RAY_TMPDIR": str(folder), "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_AUTH_MODE": "token", "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_worker_niceness": "0",
    }  # fmt: skip
    head = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=1",
         f"--port={port}", "--include-dashboard=false", "--disable-usage-stats",
         "--min-worker-port=0", "--max-worker-port=0", f"--ray-client-server-port={clients}",
         "--object-store-memory=100000000", f"--autoscaling-config={folder / 'fake.json'}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        started = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        head.wait(60)
        for one in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(started, 60)
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(look: Callable[[], Any], meanwhile: Callable[[], object] = lambda: None) -> Any:
    until_s = time.monotonic() + 200.0
    while not (found := look()):
        assert time.monotonic() < until_s
        meanwhile()
        time.sleep(1.0)  # each look connects to Ray
    return found


def nodes() -> list[dict[str, Any]]:
    with contextlib.suppress(Exception), connected_ray("auto") as ray:
        return list(told(ray, placement_of(ray).status.remote())["nodes"])
    return []


def machines() -> int:
    with connected_ray("auto") as ray:
        return sum(node["Alive"] and "pipeswitch" in node["Resources"] for node in ray.nodes())


def test_a_load_brings_a_machine_and_rest_lets_it_go(ray_that_scales: None, tmp_path: Path) -> None:
    """The second one's answers have the same bits, and none is lost as it goes."""
    up = [*PIPESWITCH, "cluster", "up", "--scale", "1", "2", "--state-dir", str(tmp_path), "--",
          "--device", "cpu", "--arena", "128MiB", "--host-store", "256MiB", "--standby", "1",
          ]  # fmt: skip
    wait_for(lambda: subprocess.run(up, capture_output=True).returncode == 0)
    (first,) = wait_for(nodes)
    torch.manual_seed(0)
    module = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(16)]).eval()
    with Client("cluster") as client:
        client.register("m", module, example_inputs=(torch.zeros(64, 512),))
        x = np.random.default_rng(0).random((64, 512), dtype=np.float32)
        expected = client.infer("m", x).outputs["y"].tobytes()
        answers: Counter[bytes] = Counter()
        rested = threading.Event()

        def load() -> None:
            with Client("cluster") as one:
                waiting: deque[Any] = deque()
                while waiting or not rested.is_set():
                    if not rested.is_set() and len(waiting) < IN_FLIGHT:
                        waiting.append(one.submit("m", x))
                    else:
                        answers[waiting.popleft().result(200).outputs["y"].tobytes()] += 1

        loads = [threading.Thread(target=load) for _ in range(2)]
        for thread in loads:
            thread.start()
        try:
            wait_for(lambda: len(nodes()) == 2 and len(client.models()[0]["nodes"]) == 2)
            (second,) = [one for one in nodes() if one["name"] != first["name"]]
            with Client("cluster") as newer:  # tables are asked for at a client's start
                wait_for(lambda: newer.stats()["nodes"][second["name"]]["inferences"] > 0,
                         lambda: _infer_anew(x, expected))  # fmt: skip
        finally:
            rested.set()
            for thread in loads:
                thread.join()
        assert set(answers) == {expected}

        def ask() -> None:
            assert client.infer("m", x).outputs["y"].tobytes() == expected

        wait_for(lambda: len(nodes()) == 1, ask)
        wait_for(lambda: machines() == 1, ask)
        ask()
    down = subprocess.run([*PIPESWITCH, "cluster", "down"], capture_output=True, text=True)
    assert down.returncode == 0, down.stderr
    wait_for(lambda: machines() == 0)


def _infer_anew(x: Any, expected: bytes) -> None:
    with Client("cluster") as one:
        assert one.infer("m", x).outputs["y"].tobytes() == expected
