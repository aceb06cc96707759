"""The sandbox of workers and builders, tested by processes that try to leave it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipeswitch as ps
from pipeswitch.sandbox.confine import missing
from pipeswitch.testing import server

ROOT = Path(__file__).parents[2]

needs_sandbox = pytest.mark.skipif(
    bool(missing()), reason=f"this kernel lacks {' and '.join(missing())}: there is no sandbox"
)

CONFINED = """
import json, os, sys, threading
sys.path.insert(0, {here!r})
import hostile_code, socket
from pipeswitch.sandbox.confine import confine_worker
ready, confined, told = threading.Barrier(2), threading.Event(), {{}}
def late():
    ready.wait()
    confined.wait()
    told.update(hostile_code.attempts({victim}, {a_file!r}))
thread = threading.Thread(target=late, daemon=True)
thread.start()
ready.wait()
confine_worker({memory})
mine = hostile_code.attempts({victim}, {a_file!r})
confined.set()
thread.join()
print(json.dumps([mine, told]))
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def victim():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@needs_sandbox
def test_a_confined_process_opens_no_file_no_socket_and_reaches_no_process(victim, tmp_path):
    a_file = tmp_path / "secret"
    a_file.write_text("of another")
    code = CONFINED.format(
        here=str(Path(__file__).parent), victim=victim.pid, a_file=str(a_file), memory=0
    )
    for tried in json.loads(run(code)):  # one from the confined thread, one from another
        assert len(tried) > 150
        assert {name: got for name, got in tried.items() if got not in ("EPERM", "ENOSYS")} == {}
    assert a_file.read_text() == "of another"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert victim.poll() is None


BUILDER = """
import json, os, socket, sys
from pathlib import Path
sys.path.insert(0, {here!r})
import hostile_code, msgspec
from pipeswitch.programs.compiler import build_process as builder, program
from pipeswitch.programs.spec import BuildSpec
from pipeswitch.ipc.channel import channel_pair
from pipeswitch.ipc.messages.base import ResourceLimits
from pipeswitch.ipc.messages.builder import BuildFailed, BuildSettings

def build(spec, work, progress, disk_bytes, **_):
    tried = hostile_code.attempts({victim}, {a_file!r})
    (work / "mine").write_text("may be written")
    (work / "mine").rename(work / "moved")
    tried["reads its source"] = Path(spec.source).read_text()
    import colorsys
    print(json.dumps(tried))
    raise SystemExit

program.build = build
_, channel = channel_pair()
heard = []
channel.send = heard.append
spec = BuildSpec(name="m", source={source!r})
settings = BuildSettings(model="m", op_id=7, spec=msgspec.msgpack.encode(spec),
                         directory={models!r}, limits=ResourceLimits(is_sandboxed=True))
builder.run(settings, channel)
"""
# A hostile builder may use its own descriptors and its own memory as a file. It may also ask
# whether a file exists and how large it is, which Landlock does not hide.
HARMLESS_IN_A_BUILDER = {
    "statx",
    "newfstatat",
    "faccessat",
    "readlinkat",
    "getdents64",
    "ftruncate",
    "fallocate",
    "sendfile",
    "copy_file_range",
    "pwrite64",
    "Python opens /proc/self/mem",
    "Python opens /proc/self/fd/0",
    "Python opens /dev/null",
    "Python imports",
}


@needs_sandbox
def test_a_builder_reads_libraries_and_its_source_and_writes_its_own_folder(victim, tmp_path):
    models, others = tmp_path / "models", tmp_path / "others"
    models.mkdir()
    others.mkdir()
    (others / "secret").write_text("of another")
    (tmp_path / "uploaded.bundle").write_text("the source")
    code = BUILDER.format(
        here=str(Path(__file__).parent),
        victim=victim.pid,
        a_file=str(others / "secret"),
        source=str(tmp_path / "uploaded.bundle"),
        models=str(models),
    )
    tried = json.loads(run(code))
    assert tried.pop("reads its source") == "the source"
    refused = ("EPERM", "ENOSYS", "EACCES")
    assert {name for name, end in tried.items() if end not in refused} == HARMLESS_IN_A_BUILDER
    assert (others / "secret").read_text() == "of another"
    assert victim.poll() is None
    [work] = models.iterdir()
    assert list(work.iterdir()) == []


# The fork server imports this code as sitecustomize, so it controls Python in all workers.
HOSTILE = """
import importlib.util, json, os, sys
sys.path.insert(0, {here!r})
import hostile_code

def infer(message, programs, pool, view, task, slot):
    import torch
    from pipeswitch.ipc.messages.worker import InferenceFailed
    view.wait_turn(message.op_id)
    view.control_page.write_begun(slot, message.op_id)
    tried = hostile_code.attempts(os.getppid(), message.directory + "/program.bundle")
    try:
        torch.ones(6 << 28)
        tried["takes 6 GiB"] = ""
    except RuntimeError:
        tried["takes 6 GiB"] = "EPERM"
    got = {{name: end for name, end in tried.items() if end not in ("EPERM", "ENOSYS")}}
    text = json.dumps([len(tried), got])
    task.send(InferenceFailed(op_id=message.op_id, error="TaskFailed", message=text, data={{}}))
    return False

def run(settings, channel):
    import tempfile
    from pathlib import Path
    if settings.model == "honest":
        return run.real(settings, channel)
    from pipeswitch.ipc.messages.builder import BuildDone
    from pipeswitch.programs.interface.layout import Manifest
    from pipeswitch.programs.spec import save_manifest
    work = tempfile.mkdtemp(prefix=f".build-{{settings.op_id}}-", dir=settings.directory)
    digest, folder = "a" * 64, os.path.basename(work)
    manifest = Manifest(digest=digest, mode="module", mode_reason="", source="os:getcwd",
                        total_bytes=0, tensors=(), groups=(), inputs=(), outputs=())
    save_manifest(work, manifest)
    if settings.model == "another-place":
        digest = "../../uploads"
    if settings.model == "another-folder":
        folder = ".build-1-/../../uploads"
    if settings.model.startswith("steals"):
        [victim] = [name for name in os.listdir(settings.directory) if len(name) == 64]
        text = Path(settings.directory, victim, "manifest.json").read_bytes()
        Path(work, "manifest.json").write_bytes(text)
        digest = victim if settings.model == "steals-by-claim" else digest
        place = os.open(work, os.O_RDONLY)
    done = BuildDone(model=settings.model, op_id=settings.op_id, digest=digest, folder=folder)
    channel.send(done)
    while settings.model == "steals-later":  # until it is ended: its folder is renamed meanwhile
        with open(os.open("manifest.json", os.O_WRONLY | os.O_CREAT, dir_fd=place), "wb") as file:
            file.write(text)
    return 0

HOSTILE = {{"pipeswitch.workers.main": infer, "pipeswitch.programs.compiler.build_process": run}}

class Finder:
    def find_spec(self, name, path, target=None):
        if name not in HOSTILE:
            return None
        function = HOSTILE.pop(name)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            if name in {only!r}:
                function.real = getattr(module, function.__name__)
                setattr(module, function.__name__, function)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def enemys_path(folder: Path, *only: str) -> dict[str, str]:
    """Write a sitecustomize.py that makes a server's children hostile; return its environment."""
    code = HOSTILE.format(here=str(Path(__file__).parent), only=only)
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


SOURCE: dict[str, Any] = {
    "source": "torchvision:squeezenet1_1",
    "weights": "random:0",
    "inputs": {"x": ((1, 3, 64, 64), "float32")},
}


@needs_sandbox
def test_a_workers_hostile_python_opens_no_file_no_socket_and_reaches_no_process(
    tmp_path: Path,
) -> None:
    environment = enemys_path(tmp_path, "pipeswitch.workers.main")
    environment["PIPESWITCH_WORKERS__TASK_MEMORY"] = "2GiB"
    with server(environment=environment) as running, running.client() as client:
        client.register("m", **SOURCE)
        with pytest.raises(ps.TaskFailed) as caught:
            client.infer("m", x=np.zeros((1, 3, 64, 64), np.float32))
        count, got = json.loads(caught.value.message)
        assert count > 150
        assert got == {}
        assert "sandbox=" not in running.log()


def test_a_builder_that_lies_is_refused(tmp_path: Path) -> None:
    environment = enemys_path(tmp_path, "pipeswitch.programs.compiler.build_process")
    with server(environment=environment) as running, running.client() as client:
        for name in ("another-place", "another-folder", "claims-code"):
            with pytest.raises(ps.RegistrationRefused, match=r"invalid message|returned code"):
                client.register(name, **SOURCE)
        assert client.models() == []


def test_a_builder_cannot_pass_another_tenants_program_off_as_its_own(tmp_path: Path) -> None:
    environment = enemys_path(tmp_path, "pipeswitch.programs.compiler.build_process")
    x = np.ones((1, 3, 64, 64), np.float32)
    with (
        server(environment=environment, tcp_roles=("infer", "register")) as running,
        running.client() as owner,
        running.client(tcp=True) as enemy,
    ):
        owner.register("honest", **SOURCE)
        answer = owner.infer("honest", x=x)
        for name in ("steals-by-claim", "steals-by-manifest", "steals-later"):
            with pytest.raises(ps.RegistrationRefused, match=r"program.bundle"):
                enemy.register(name, **SOURCE)
        assert [model["name"] for model in owner.models()] == ["honest"]
        for name, output in owner.infer("honest", x=x).outputs.items():
            assert np.array_equal(np.asarray(output), np.asarray(answer.outputs[name]))


def test_a_model_whose_values_need_more_than_a_task_may_take_is_refused(tmp_path: Path) -> None:
    with (
        server(environment={"PIPESWITCH_WORKERS__TASK_MEMORY": "1MiB"}) as running,
        running.client() as client,
        pytest.raises(ps.RegistrationRefused, match=r"intermediate values.*limit is 1.00 MiB"),
    ):
        client.register("m", **SOURCE)


def test_a_server_without_a_sandbox_says_so() -> None:
    with server(environment={"PIPESWITCH_SECURITY__SANDBOX": "off"}) as running:
        assert "sandbox=off" in running.log()
