"""A real server on a real GPU: correct answers on every rung, deaths, training beside requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeswitch.base.errors import TaskFailed
from pipeswitch.client.client import FINAL_JOB_STATES, Client
from pipeswitch.testing import RunningServer, server

pytestmark = pytest.mark.gpu

LOWEST = {"WAITS": "cpu", "WORDS": "copy", "ACTIVATIONS": "private", "GRAPHS": "off"}
RUNGS = {  # each adds one feature to the lowest, except that device waits need graphs
    "lowest": LOWEST,
    "graphs": LOWEST | {"GRAPHS": "on"},
    "slice": LOWEST | {"ACTIVATIONS": "slice"},
    "waits": LOWEST | {"GRAPHS": "on", "WAITS": "gpu", "WORDS": "write"},
    "highest": {"WAITS": "gpu", "WORDS": "write", "ACTIVATIONS": "slice", "GRAPHS": "on"},
}

TRAIN = """
import hashlib, sys
import torch
from pipeswitch import job
device = sys.argv[2] if len(sys.argv) > 2 else job.device
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.ReLU(), torch.nn.Dropout(0.2),
    torch.nn.Linear(256, 8),
).to(device)
optimizer = torch.optim.Adam(net.parameters(), 0.01)
x, y = torch.randn(128, 64).to(device), (torch.arange(128) % 8).to(device)
for a, b in job.steps([(x, y)] * 400, model=net, optimizer=optimizer):
    torch.nn.functional.cross_entropy(net(a), b).backward()
    optimizer.step()
    optimizer.zero_grad()
digest = hashlib.sha256()
for value in net.state_dict().values():
    digest.update(value.cpu().numpy().tobytes())
open(sys.argv[1], "w").write(digest.hexdigest())
"""


@pytest.fixture(scope="module", params=sorted(RUNGS))
def running(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    environment = {
        f"PIPESWITCH_DEVICE__{key}": value for key, value in RUNGS[request.param].items()
    }
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    with server(
        arena="64MiB", host_store="512MiB", devices=("cuda:0",), environment=environment
    ) as fake_server:
        yield fake_server


def module_of(seed: int) -> Any:
    import torchvision

    torch.manual_seed(seed)
    return torchvision.models.resnet18(num_classes=100).eval()


def test_two_models_that_do_not_fit_together_answer_as_plain_torch_does(
    running: RunningServer,
) -> None:
    with running.client() as client:
        modules = {name: module_of(seed) for seed, name in enumerate(("a", "b"))}
        x = torch.randn(2, 3, 96, 96)
        for name, module in modules.items():
            client.register(name, module, example_inputs=(x,))
        first: dict[str, Any] = {}
        for turn in range(8):
            for name, module in modules.items():
                output = next(iter(client.infer(name, x.numpy()).outputs.values()))
                with torch.inference_mode():
                    expected = module.cuda()(x.cuda()).cpu().numpy()
                np.testing.assert_allclose(output, expected, rtol=2e-3, atol=2e-3)
                first_output = first.setdefault(name, output.copy())
                np.testing.assert_array_equal(output, first_output, err_msg=f"turn {turn}, {name}")


def kill_workers(client: Client) -> None:
    for row in client.ps():
        if row.get("kind") == "worker":
            os.kill(int(row["pid"]), signal.SIGKILL)


def test_killed_workers_come_back(running: RunningServer) -> None:
    with running.client() as client:
        x = torch.randn(1, 3, 64, 64)
        client.register("victim", module_of(2), example_inputs=(x,))
        before = next(iter(client.infer("victim", x.numpy()).outputs.values())).copy()
        kill_workers(client)
        after = next(iter(client.infer("victim", x.numpy()).outputs.values()))
        np.testing.assert_array_equal(before, after)


class Lookup(torch.nn.Module):
    """Module that looks up indices that it computes, so they cannot be known in advance."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(ids * 2 - ids)
        return rows


@pytest.mark.parametrize("running", ["graphs"], indirect=True, scope="module")
def test_a_kernels_assertion_is_answered_and_the_next_request_served(
    running: RunningServer,
) -> None:
    module, good = Lookup().eval(), torch.tensor([[1, 9]])
    with running.client() as client:
        client.register("lookup", module, example_inputs=(good,))
        expected = module(good).detach().numpy()
        for _ in range(2):
            with pytest.raises(TaskFailed) as caught:
                client.infer("lookup", np.array([[1, 99]]))
            assert caught.value.data["type"] == "DeviceAssert"
            output = next(iter(client.infer("lookup", good.numpy()).outputs.values()))
            np.testing.assert_array_equal(output, expected)


class Training:
    """The script ``TRAIN``: its plain run, and a job that must end with the same weights."""

    def __init__(self, running: RunningServer, client: Client, folder: Path) -> None:
        self._running, self._plain, self._served = running, folder / "plain", folder / "served"
        script = folder / "train.py"
        script.write_text(TRAIN)
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        command = [sys.executable, str(script), str(self._plain), "cuda"]
        subprocess.run(command, check=True, env=environment, timeout=120)
        self.task = client.train(str(script), name=folder.name, args=[str(self._served)])

    def is_over(self) -> bool:
        return self.task.status()["state"] in FINAL_JOB_STATES

    def check(self) -> None:
        assert self.task.status()["state"] == "done", self._running.log()[-3000:]
        assert self._served.read_text() == self._plain.read_text()


@pytest.mark.parametrize("running", ["graphs"], indirect=True, scope="module")
def test_a_job_interrupted_by_requests_ends_as_the_plain_run(
    running: RunningServer, tmp_path: Path
) -> None:
    with running.client() as client:
        x = torch.randn(1, 3, 64, 64)
        client.register("visitor", module_of(3), example_inputs=(x,))
        training = Training(running, client, tmp_path)
        while not training.is_over():
            client.infer("visitor", x.numpy())
        training.check()


@pytest.mark.parametrize("running", ["highest"], indirect=True, scope="module")
def test_a_job_whose_worker_is_killed_ends_as_the_plain_run(
    running: RunningServer, tmp_path: Path
) -> None:
    with running.client() as client:
        training = Training(running, client, tmp_path)
        while not training.is_over() and training.task.status()["step"] <= 100:
            pass  # each check waits for two replies
        kill_workers(client)
        training.task.wait()
        training.check()
