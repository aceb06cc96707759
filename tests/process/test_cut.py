"""The engine alone: a checkout without ``pipeswitch/extras`` and ``tests/extras``.

It installs, imports, passes the engine's unit tests, and serves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.process.test_install import ROOT, copy, environment_at, pip

pytestmark = pytest.mark.slow
# Tests of extras' entry points that import no extra, not even through a rig.
UNIT = "client_calls gateway_callers permissions processes registration requests router"
IMPORTS = """
import importlib, pkgutil, pipeswitch
failed = []
for one in pkgutil.walk_packages(pipeswitch.__path__, "pipeswitch.", onerror=failed.append):
    if not one.name.endswith((".__main__", ".main")):
        importlib.import_module(one.name)
assert not failed and not importlib.util.find_spec("pipeswitch.extras"), failed
"""
SERVES = """
import json, sys, urllib.request
from pathlib import Path

import torch

from pipeswitch import testing
from pipeswitch.errors import ConfigError
from pipeswitch.wire.tokens import OWNER_FILE, owner_token

FOLDER, SIZE = Path(sys.argv[1]), 1024
X = torch.linspace(-1, 1, SIZE).reshape(1, SIZE)
SCRIPT = '''
import torch
from pipeswitch import job

def main():
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in job.steps(torch.randn(40, 8).split(1), model=model, optimizer=optimizer):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
'''
(FOLDER / "train.py").write_text(SCRIPT)
models = {name: torch.nn.Linear(SIZE, SIZE) for name in "ab"}
server = dict(arena="11MiB", host_store="64MiB", state_dir=FOLDER / "state", http=True)


def same(answer, name):
    assert torch.equal(torch.as_tensor(answer).reshape(1, SIZE), models[name](X)), name


def over_http(address, name):
    tensor = {"name": "x", "shape": [1, SIZE], "datatype": "FP32", "data": X[0].tolist()}
    url = f"http://{address}/v2/models/{name}/infer"
    request = urllib.request.Request(url, json.dumps({"inputs": [tensor]}).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return torch.tensor(json.load(answer)["outputs"][0]["data"])


def refused(call, text):
    try:
        call()
    except ConfigError as error:
        assert f"this installation has no {text}" in error.message, error
    else:
        raise AssertionError(text)


with torch.inference_mode():
    with testing.server(**server) as running, running.client() as owner:
        for name, module in models.items():
            owner.register(name, module, example_inputs=(X,))
        with running.client(tcp=True) as client:
            for name in "abab":  # the arena has room for one of them
                same(client.infer(name, X)["y"], name)
                same(over_http(running.http_address, name), name)
        token = owner_token(FOLDER / "state" / OWNER_FILE)
        headers = {"Authorization": f"Bearer {token}"}
        url = f"http://{running.http_address}/metrics"
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            assert b"pipeswitch_sequence_steps" in answer.read()
        assert owner.stats()["evictions"] >= 3
        task = owner.train(str(FOLDER / "train.py"), name="job")
        same(owner.infer("a", X)["y"], "a")
        assert task.wait(120)["state"] == "done"
    with testing.server(**server) as running, running.client() as owner:
        same(owner.infer("b", X)["y"], "b")
        refused(lambda: owner._ask("generate", model="b"), "kind of request 'generation'")
        refused(lambda: owner.generate("b", [1]), "method of a client: 'generate'")
        refused(lambda: owner.register("c", models["a"], generate=True), "model builder for")
        register = dict(source="hf:gpt2", weights="pretrained", generate=True)
        refused(lambda: owner._ask("register", model="c", body=register), "kind of request")
        assert owner.jobs()[0]["state"] == "done"
print("served")
"""


@dataclass(frozen=True)
class Cut:
    """A checkout without extras, and an environment in which it is installed."""

    source: Path
    python: Path

    def run(self, *words: str | Path, folder: Path) -> str:
        environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
        command = [self.python, "-P", *words]
        done = subprocess.run(
            command, cwd=folder, env=environment, text=True, capture_output=True, timeout=280
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Cut:
    root = tmp_path_factory.mktemp("cut")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        copy(ROOT / name, root / "src")
    for name in ("pipeswitch", "workers", "memory_daemon", "tests"):
        copy(ROOT / name, root / "src" / name)
    for name in ("pipeswitch", "tests"):
        shutil.rmtree(root / "src" / name / "extras")
    python = environment_at(root / "environment")
    pip(python, "install", "--no-index", "--no-build-isolation", root / "src")
    return Cut(root / "src", python)


def test_the_engine_imports(cut: Cut, tmp_path: Path) -> None:
    cut.run("-c", IMPORTS, folder=tmp_path)


def test_the_engine_passes_its_tests(cut: Cut) -> None:
    files = [f"tests/unit/test_{name}.py" for name in UNIT.split()]
    cut.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, folder=cut.source)


def test_the_engine_serves_and_trains_over_a_restart(cut: Cut, tmp_path: Path) -> None:
    (tmp_path / "serves.py").write_text(SERVES)
    assert "served" in cut.run(tmp_path / "serves.py", tmp_path, folder=tmp_path)
