"""The installed package, not the checkout: the image's steps in an empty environment, and a server
that starts as the compose file says. torch and other dependencies come from this environment."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "packaging/Dockerfile").read_text()
(COMPOSED,) = yaml.safe_load((ROOT / "packaging/compose.yaml").read_text())["services"].values()
TOKEN = "0123456789abcdef"
SMALL = ("--device", "cpu", "--arena", "64MiB", "--host-store", "256MiB")


@dataclass(frozen=True)
class Installed:
    """An environment with the installed wheel, and a folder that replaces the image's root."""

    root: Path
    python: Path

    def command(self, *words: str) -> list[str]:
        return [str(self.python.with_name("pipeswitch")), *words]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the image, with paths below our folder."""
        image = dict(re.findall(r"\b([A-Z_]+)=(/(?:var|run)/\S+)", DOCKERFILE))
        moved = {name: f"{self.root}{place}" for name, place in image.items()}
        return {"PATH": os.environ["PATH"], **moved}

    def run(self, *words: str, folder: Path | None = None) -> str:
        done = subprocess.run(
            self.command(*words),
            cwd=folder or self.root,
            env=self.environment,
            text=True,
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed() -> Iterator[Installed]:
    with tempfile.TemporaryDirectory(prefix="pipeswitch-", dir="/tmp") as folder:  # short: sockets
        root = Path(folder)
        for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE):
            *sources, target = [word for word in line.split() if not word.startswith("--")]
            if target.startswith("/src"):
                for source in sources:
                    copy(ROOT / source, Path(f"{root}{target}"))
        wheels = root / "wheels"
        # The same command as in ``make wheel``.
        arguments = ["wheel", "--no-build-isolation", "--wheel-dir", wheels, root / "src"]
        pip(sys.executable, *arguments)
        shutil.rmtree(root / "src")
        python = environment_at(root / "opt/pipeswitch")
        pip(
            python,
            "install",
            "--no-index",
            "--find-links",
            wheels,
            "--force-reinstall",
            "pipeswitch",
        )
        for place in ("var/lib/pipeswitch", "run/user/pipeswitch"):
            (root / place).mkdir(mode=0o700, parents=True)
        yield Installed(root, python)


def environment_at(folder: Path) -> Path:
    """Create an environment that can import our dependencies; return its Python interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/*/site-packages"))
    (packages / "there.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return folder / "bin/python"


def pip(python: str | Path, verb: str, *words: str | Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        verb,
        "--quiet",
        "--no-deps",
        *words,
    ]
    subprocess.run(command, check=True, cwd="/", timeout=200)


def copy(source: Path, target: Path) -> None:
    """Copy like a COPY step of the image: put a file into the target, or a folder's content."""
    if source.is_dir():
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, target, symlinks=True, ignore=skipped)
    else:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def files(folder: Path) -> set[str]:
    paths = [path for path in folder.rglob("*.*") if "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)) for path in paths if path.is_file()}


def status(address: str, path: str, token: str = "") -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://{address}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


@contextlib.contextmanager
def served(installed: Installed, *args: str, **environment: str) -> Iterator[str]:
    """Yield the ready line of a server; then stop the server like a container."""
    command = installed.command("serve", *args, *SMALL)
    with subprocess.Popen(
        command,
        cwd=installed.root,
        env=installed.environment | environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline()
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def address_of(line: str, scheme: str) -> str:
    match = re.search(rf"{scheme}://\S+:(\d+)", line)
    assert match, line
    return f"127.0.0.1:{match[1]}"


@pytest.mark.slow
def test_the_wheel_serves_as_the_compose_file_says(installed: Installed) -> None:
    packages = next((installed.root / "opt").glob("pipeswitch/lib/*/site-packages"))
    ours = files(ROOT / "pipeswitch")  # all modules and data files
    for name in ("workers", "memory_daemon"):
        assert files(ROOT / name) != set()
        ours |= {f"{name}/{file}" for file in files(ROOT / name)}
    assert files(packages / "pipeswitch") == ours
    (record,) = packages.glob("pipeswitch-*.dist-info/RECORD")
    tops = {line.partition("/")[0] for line in record.read_text().splitlines()}
    assert tops == {"..", "pipeswitch", record.parent.name}, "it owns no other name"
    tokens = installed.root / "tokens"
    tokens.write_text(f"web {TOKEN} infer")
    tokens.chmod(0o600)
    verb, *args = COMPOSED["command"]
    assert verb == "serve"
    args = [re.sub(r":800[01]$", ":0", word) for word in args]
    args = [str(tokens) if word.startswith("/run/secrets/") else word for word in args]
    with served(installed, *args, **COMPOSED["environment"]) as line:
        assert installed.run("ping").startswith("ready")  # the image's health check
        source = ("torchvision:mobilenet_v2", "--weights", "random:0")
        installed.run("register", "m", *source, "--input", "1x3x32x32:float32")
        assert installed.run("infer", "m", "-n", "2").endswith("\n")
        http = address_of(line, "http")
        paths = ("/v2/health/ready", "/ui", "/ui/page.js", "/ui/icon.svg")
        assert [status(http, path) for path in paths] == 4 * [200]
        statuses = [status(http, "/v2/models/m", token) for token in ("", TOKEN)]
        assert statuses == [401, 200]
        address_of(line, "grpc")


@pytest.mark.slow
def test_a_second_server_of_one_machine_takes_free_addresses(installed: Installed) -> None:
    def args(name: str) -> tuple[str, ...]:
        return ("--listen", "tcp://127.0.0.1:0", "--state-dir", str(installed.root / name))

    with served(installed, *args("one")) as first, served(installed, *args("two")) as second:
        for scheme in ("tcp", "http", "grpc"):
            assert address_of(first, scheme) != address_of(second, scheme)
        assert status(address_of(second, "http"), "/v2/health/ready") == 200


PROJECT = {
    "workers.py": """
        from torch import nn

        POOL = 4

        def net():
            return nn.Sequential(nn.Linear(4, POOL))
        """,
    "memory_daemon.py": "SIZE = 2",
    "benchmarks/__init__.py": "RUNS = 3",
    "train.py": """
        import torch
        import benchmarks, memory_daemon, workers
        from pipeswitch import job

        print("theirs", workers.POOL, memory_daemon.SIZE, benchmarks.RUNS)
        model = workers.net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x in job.steps([torch.ones(2, 4)] * benchmarks.RUNS, model=model, optimizer=optimizer):
            model(x).sum().backward()
            optimizer.step()
        """,
}


@pytest.mark.slow
def test_a_projects_own_modules_keep_their_names(installed: Installed) -> None:
    """Import a user's modules, named like folders of this repository, in the server's processes."""
    project = installed.root / "project"
    for name, text in PROJECT.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(textwrap.dedent(text))
    with served(installed, "--state-dir", "state", PYTHONPATH=str(project)):
        installed.run("register", "net", "workers:net", "--input", "input=1x4:float32")
        assert installed.run("infer", "net", "-n", "1", folder=project)
        installed.run("train", "train.py", folder=project)
        installed.run("jobs", "wait", "train", folder=project)
        assert "theirs 4 2 3" in installed.run("jobs", "logs", "train", folder=project)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["editable", "editable, links lost", "checkout"])
def test_a_checkout_imports_what_the_wheel_does(tmp_path: Path, way: str) -> None:
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        copy(ROOT / name, tmp_path / "src")
    for name in ("pipeswitch", "workers", "memory_daemon"):
        copy(ROOT / name, tmp_path / "src" / name)
    python = environment_at(tmp_path / "environment")
    if way == "editable, links lost":
        for name in ("workers", "memory_daemon"):
            (tmp_path / "src/pipeswitch" / name).unlink()
    if way != "checkout":
        pip(python, "install", "--no-index", "--no-build-isolation", "--editable", tmp_path / "src")
    code = """if True:
        import importlib.util
        import pipeswitch.launch, pipeswitch.memory_daemon.main, pipeswitch.workers.main
        from pipeswitch.workers.training import script_watch
        print(pipeswitch.__file__, script_watch.__file__)
        print(importlib.util.find_spec("workers"), importlib.util.find_spec("memory_daemon"))
    """
    environment = {"PYTHONPATH": str(tmp_path / "src")} if way == "checkout" else {}
    done = subprocess.run(
        [python, "-P", "-c", code],
        cwd=tmp_path,
        env=environment,
        text=True,
        check=False,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    files, specs = done.stdout.splitlines()
    assert all(file.startswith(str(tmp_path / "src")) for file in files.split())
    if way != "checkout":
        assert specs == "None None"
