"""Known faults of other servers, tried on a whole server with umask 0.
Slow tests repeat this with PYTHONOPTIMIZE, without ``assert``: Python compiles all imports anew."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from process_tools import Checked, checked_server, marked_pids, until, write_script

import pipeswitch as ps
from pipeswitch.client.client import FINAL_JOB_STATES
from tests.process.bombs import Bomb, pickled

X = np.ones((1, 4), np.float32)
FACTORIES = """
    import ctypes
    import torch

    class Net(torch.nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4, bias=False)
            self.linear.weight.data = scale * torch.eye(4)

        def forward(self, x):
            return self.linear(x)

    class Poisonable(Net):
        def forward(self, x):
            y = self.linear(x)
            if float(x[0, 0]) == 666.0:
                ctypes.string_at(0)  # ends the process, whatever Python could catch
            return y

    def good():
        return Net(2.0)

    def poisonable():
        return Poisonable(3.0)
"""


@pytest.fixture(
    scope="module",
    params=[
        # The keeper (keeper.py) starts no server with this variable, so the server has our umask.
        pytest.param("OMP_NUM_THREADS", id="plain"),
        pytest.param("PYTHONOPTIMIZE", id="without assert", marks=pytest.mark.slow),
    ],
)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Checked]:
    folder = tmp_path_factory.mktemp("neighbours")
    write_script(folder, "neighbours_models.py", FACTORIES)
    environment = {request.param: "1", "PYTHONPATH": str(folder)}
    before = os.umask(0)
    try:
        with checked_server(
            arena="64MiB", state_dir=folder / "state", environment=environment
        ) as checked:
            register(checked, "good")
            yield checked
    finally:
        os.umask(before)


@pytest.fixture(autouse=True)
def _others_are_served(running: Checked) -> Iterator[None]:
    yield
    assert np.array_equal(running.client.infer("good", X)["y"], 2 * X)
    assert running.count("daemon_restarts") == 0


def register(checked: Checked, name: str) -> None:
    source = f"neighbours_models:{name}"
    checked.client.register(name, source, inputs={"x": ((1, 4), "float32")})


def test_what_the_server_writes_is_its_owners_alone(running: Checked) -> None:
    """Check that with umask 0 only the owner may enter the folders of state and socket."""
    listener = Path(running.running.ipc_address.removeprefix("ipc://"))
    state = running.running.state_dir
    for folder in (state, listener.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    assert listener.is_socket()


def test_vllm_one_request_that_kills_its_engine_is_that_requests_alone(running: Checked) -> None:
    """Kill a worker by a request. vLLM's engine would end, while its /health still returns 200."""
    register(running, "poisonable")
    assert np.array_equal(running.client.infer("poisonable", X)["y"], 3 * X)
    with ThreadPoolExecutor(1) as pool:
        poison = pool.submit(running.client.infer, "poisonable", np.full((1, 4), 666, np.float32))
        answered = 0
        while not poison.done():
            assert np.array_equal(running.client.infer("good", X)["y"], 2 * X)
            answered += 1
        with pytest.raises((ps.WorkerLost, ps.ModelQuarantined)):
            poison.result()
    assert answered
    running.wait_until_whole()
    assert running.client.ping(deep=True)["ready"]
    running.client.unregister("poisonable")


def a_pickle(path: Path, target: Path) -> None:
    path.write_bytes(pickled(target))


def saved_by_torch(path: Path, target: Path) -> None:
    import torch

    torch.save(Bomb(target), path)


def an_archive(path: Path, target: Path) -> None:
    """Write a zip with pickles and code, like TorchScript, .pt2 and .mar files."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("net/data.pkl", pickled(target))
        archive.writestr("net/code/__torch__.py", f"import os; os.mkdir({str(target)!r})")
        archive.writestr("../../outside.py", f"import os; os.mkdir({str(target)!r})")


def a_script(path: Path, target: Path) -> None:
    path.write_text(f"import os; os.mkdir({str(target)!r})")


def a_library(path: Path, target: Path) -> None:
    path.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(4096))


@pytest.mark.parametrize("write", [a_pickle, saved_by_torch, an_archive, a_script, a_library])
def test_torch_no_file_that_holds_code_is_a_model(
    running: Checked, tmp_path: Path, write: Callable[[Path, Path], None]
) -> None:
    """Register files with code: by upload as bundle or weights, and by path. No code may run."""
    target = tmp_path / "it-ran"
    for name in ("net.bundle", "net.safetensors", "net.pt2", "net.pt", "net.py", "net.so"):
        write(tmp_path / name, target)
    with running.running.client(tcp=True) as stranger:
        with pytest.raises((ps.RegistrationRefused, ps.InvalidInput)):
            stranger.register("bad", tmp_path / "net.bundle")
        with pytest.raises((ps.RegistrationRefused, ps.InvalidInput)):
            stranger.register("bad", "torchvision:alexnet", weights=tmp_path / "net.safetensors")
    for suffix in ("pt2", "pt", "py", "so"):
        body = {"source": str(tmp_path / f"net.{suffix}")}
        with pytest.raises(ps.InvalidInput):
            running.client._ask("register", model="bad", body=body)
    assert not target.exists()
    assert {row["name"] for row in running.client.models() if row["state"] == "ready"} == {"good"}


def listening(pids: set[int]) -> set[str]:
    """Return where these processes accept connections: ``address:port`` or a unix socket's name."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):  # the process has just ended
            for entry in Path("/proc", str(pid), "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # the descriptor was closed meanwhile
                    with_type = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
                    inodes |= {with_type[1]} if with_type else set()
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address, port = words[1].split(":")
                addresses.add(f"{address}:{int(port, 16)}")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[6] in inodes and (len(words) > 7 and int(words[3], 16) & 0x10000):
            addresses.add(words[7])
    return addresses


def test_pipeswitch_nobody_reaches_the_memory_who_was_not_given_it(running: Checked) -> None:
    """Check all listening sockets; the original gives its memory handle to all at 0.0.0.0:9001."""
    folder = Path(running.running.ipc_address.removeprefix("ipc://")).parent
    listeners = listening(marked_pids(running.mark))
    by_name = {listener for listener in listeners if listener.startswith("/")}
    assert len(by_name) == 1  # the owner's socket
    assert {Path(listener).parent for listener in by_name} == {folder}
    assert len(listeners - by_name) == 1
    assert {listener.split(":")[0] for listener in listeners - by_name} == {"0100007F"}  # 127.0.0.1
    assert listening({running.daemon_pid(), *running.worker_pids().values()}) == set()


def test_pipeswitch_a_job_is_not_done_before_it_ran(
    running: Checked, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Read a job's state before its end; the original answers FNSH before the job trains."""
    gate, traces = tmp_path / "gate", tmp_path / "traces"
    os.mkfifo(gate)
    script = write_script(
        tmp_path,
        "job.py",
        f"""
        import sys
        open({str(gate)!r}).read()
        open({str(traces)!r}, "w").write(f"optimize={{sys.flags.optimize}}")
        """,
    )
    task = running.client.train(script, name="slow")
    reached: list[int] = []

    def is_at_the_gate() -> bool:
        with contextlib.suppress(OSError):  # the pipe has no reader yet
            reached.append(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        return bool(reached)

    until(is_at_the_gate, "the script waits in the middle")
    assert task.status()["state"] not in FINAL_JOB_STATES
    assert not traces.exists()
    os.close(reached[0])  # the job continues
    assert task.wait(30)["state"] == "done"
    removes_asserts = "without assert" in request.node.name
    assert traces.read_text() == f"optimize={int(removes_asserts)}"


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))


def test_vllm_requests_leave_nothing_behind_on_the_disk(running: Checked) -> None:
    """Repeat odd requests. In vLLM each left a file in an unlimited cache (CVE-2025-29770)."""

    def ask(number: int) -> None:
        running.client.infer("good", np.full((1, 4), number, np.float32))
        for wrong in (np.ones((1, number % 7 + 5), np.float32), np.ones((1, 4), np.int64)):
            with pytest.raises(ps.InvalidInput):
                running.client.infer("good", wrong)
        with pytest.raises(ps.ModelNotFound):
            running.client.infer(f"absent-{number}", X)
        with pytest.raises(ps.PipeSwitchError):
            running.client.register(f"n{number}", "/nowhere.bundle")

    ask(0)
    before = disk_bytes(running.running.state_dir)
    for number in range(100):
        ask(number)
    assert disk_bytes(running.running.state_dir) - before < 128 << 10  # logs may grow
