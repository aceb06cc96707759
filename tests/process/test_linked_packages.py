"""Environments whose packages are links to files elsewhere, as uv, Nix and Bazel make them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeswitch.sandbox.confine import libraries, missing

PACKAGES = Path(sysconfig.get_path("purelib"))
MAIN = "from pipeswitch.cli.main import main; main()"
SERVES = """
import torch
import pipeswitch.testing
module, x = torch.nn.Linear(3, 2), torch.ones(1, 3)
with pipeswitch.testing.server(arena="64MiB", host_store="256MiB") as running:
    client = running.client()
    client.register("own", module, example_inputs=(x,))
    client.register("named", "torchvision:squeezenet1_1", weights="random:0")
    assert torch.equal(torch.as_tensor(client.infer("own", x)["y"]), module(x).detach())
    client.infer("named", torch.zeros(1, 3, 224, 224))
    client.close()
"""


def linked(target: Path, link: Path, how: str) -> None:
    """Link to a package: as a whole through another link, or file by file."""
    if how == "files" and target.is_dir():
        link.mkdir()
        for one in target.iterdir():
            if one.name != "__pycache__":
                linked(one, link / one.name, how)
        return
    if how == "links to links":
        middle = link.parents[3] / "middle" / link.name
        middle.symlink_to(target)
        target = middle
    link.symlink_to(target)


@pytest.fixture(params=["links to links", "files"])
def python(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield the Python of an environment of links to this environment's packages."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    (folder / "middle").mkdir()
    python = folder / "bin" / "python"
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.check_output(command, text=True).strip())
    for one in PACKAGES.iterdir():
        if not (packages / one.name).exists():
            linked(one, packages / one.name, request.param)
    yield python
    subprocess.run(["rm", "-rf", folder], check=True)  # with its hundred thousand links


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(missing()), reason="this kernel lacks the sandbox")
def test_models_are_built_and_served_from_linked_packages(python: Path) -> None:
    environment = {**os.environ, "PIPESWITCH_SECURITY__SANDBOX": "require"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, "-c", SERVES], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_links_beside_a_script_open_only_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    for name in ("module.py", "package/__init__.py", "secrets/key", "secret.txt"):
        (elsewhere / name).parent.mkdir(parents=True, exist_ok=True)
        (elsewhere / name).write_text("")
    here.mkdir()
    for one in elsewhere.iterdir():
        (here / one.name).symlink_to(one)
    monkeypatch.syspath_prepend(here)
    allowed = {path.name for path in libraries() if path.is_relative_to(elsewhere)}
    assert allowed == {"module.py", "package"}


def test_the_doctor_serves_a_tiny_model_and_says_why_it_cannot(tmp_path: Path) -> None:
    def examined(**environment: str) -> tuple[int, dict[str, dict[str, str]]]:
        command = [sys.executable, "-c", MAIN, "doctor", "--json"]
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        return done.returncode, {row["name"]: row for row in json.loads(done.stdout)}

    _, findings = examined()
    assert findings["serving"]["status"] == "ok", findings["serving"]
    status, findings = examined(PIPESWITCH_WORKERS__BUILD_TIMEOUT="1ms")
    assert (status, findings["serving"]["status"]) == (1, "fail")
    assert "build_timeout" in findings["serving"]["text"]
