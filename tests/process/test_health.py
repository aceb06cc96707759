"""Health probes, a scheduler that hangs, and an engine that cannot recover."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import process_tools as tools
import pytest
import torch

from pipeswitch.base.errors import DeadlineExceeded, PipeSwitchError, ServerUnavailable
from pipeswitch.client.client import Client

X = torch.ones(1, 16)


@pytest.fixture(scope="module")
def running() -> Iterator[tools.Checked]:
    with tools.checked_server(arena="64MiB", environment=tools.ENVIRONMENT) as checked:
        checked.client.register("small", tools.mlp(16, 2, 1), example_inputs=(X,))
        yield checked


# ------------------------------------------------------------------------------- ping


def test_the_command_exits_with_what_a_probe_wants_to_know(running: tools.Checked) -> None:
    address = running.running.ipc_address
    done = tools.command("--host", address, "ping", "--deep", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ready"]
    assert tools.command("--host", address, "ping").stdout.startswith("ready ")
    assert "daemon" in tools.command("--host", address, "ping", "--deep").stdout
    assert tools.command("--host", "tcp://127.0.0.1:9", "ping", "--deep").returncode == 3


def test_probes_disturb_no_training_and_no_request(running: tools.Checked, tmp_path: Path) -> None:
    task = tools.start_endless_job(running, tmp_path)
    before = task.status()
    for _ in range(50):
        answer = running.client.ping(deep=True)
        assert answer["ready"], answer
        assert "active" in {row["state"] for row in answer["workers"]}
        assert all(row["ms"] is not None for row in answer["workers"])
    after = task.status()
    assert (after["suspensions"], after["evictions"], after["restarts"]) == (
        before["suspensions"],
        before["evictions"],
        before["restarts"],
    )
    tools.until(lambda: task.status()["step"] > after["step"], "it trains on")
    futures = [running.client.submit("small", X) for _ in range(20)]
    assert running.client.ping(deep=True)["ready"]
    for future in futures:
        future.result(30)
    task.cancel()


def test_a_daemon_that_is_stopped_is_told_by_the_deep_probe(running: tools.Checked) -> None:
    running.wait_until_whole()
    pid = running.daemon_pid()
    tools.stop(pid)
    answer = running.client.ping(deep=True)
    assert not answer["ready"]
    assert "memory daemon" in answer["why"]
    tools.until(lambda: running.daemon_pid() not in (0, pid), "it was replaced")
    running.wait_until_whole()
    assert running.client.ping(deep=True)["ready"]


def test_a_standby_that_is_stopped_is_named_and_the_server_is_ready(running: tools.Checked) -> None:
    running.wait_until_whole()
    slot, pid = next(iter(running.worker_pids().items()))
    tools.stop(pid)
    answer = running.client.ping(deep=True)
    assert answer["ready"]
    assert [row["worker"] for row in answer["workers"] if row["ms"] is None] == [slot]
    tools.until(lambda: running.worker_pids().get(slot) not in (None, pid), "it was replaced")
    running.wait_until_whole()


# ------------------------------------------------------------------------------- no recovery


def test_a_daemon_that_dies_too_often_ends_the_server_with_a_status() -> None:
    with tools.checked_server(
        arena="64MiB", environment=tools.ENVIRONMENT, settles=False, status=os.EX_SOFTWARE
    ) as checked:
        waiting = checked.client.task("nobody")
        pids: set[int] = set()
        while checked.running.process.poll() is None:
            try:
                pid = checked.daemon_pid()
            except (PipeSwitchError, StopIteration):
                break  # the server is exiting
            if pid and pid not in pids:
                pids.add(pid)
                tools.kill(pid)
            assert len(pids) < 20
        assert checked.running.process.wait(60) == os.EX_SOFTWARE
        assert "died too often" in checked.running.log()
        with pytest.raises(PipeSwitchError):
            waiting.status()


def test_a_fork_server_that_cannot_start_ends_the_server_with_a_status(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('broken on purpose')\n")
    done, _ = serve_until_it_ends(tmp_path, environment={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == os.EX_SOFTWARE
    assert "fork server does not start" in done.stdout
    assert "broken on purpose" in (tmp_path / "state/logs/processes.log").read_text()


def replace_fork_server(checked: tools.Checked) -> None:
    old = checked.fork_server_pid()

    def is_another() -> bool:
        with contextlib.suppress(AssertionError, OSError):  # at this moment there may be no process
            return checked.fork_server_pid() != old
        return False

    tools.kill(old)
    tools.until(is_another, "another fork server")


def test_two_deaths_of_the_fork_server_lose_nobody_it_has_forked(running: tools.Checked) -> None:
    """Kill the fork server twice: the controller must watch each child once, without it."""
    running.wait_until_whole()
    workers = running.worker_pids()
    for _ in range(2):
        replace_fork_server(running)
        assert running.client.infer("small", X)["y"].shape == (1, 16)
    assert running.worker_pids() == workers
    tools.kill(workers[0])
    tools.until(
        lambda: running.worker_pids().get(0) not in (None, workers[0]), "a death is still seen"
    )
    running.wait_until_whole()


# ------------------------------------------------------------------------------- a loop that hangs

PLANTED = """
import sys
from pipeswitch.cli.main import main
from pipeswitch.scheduler.introspection import Introspection

def for_ever(self):
    while True:
        pass

Introspection.jobs = for_ever
main()
"""


def serve_until_it_ends(
    folder: Path,
    *,
    program: str = tools.COMMAND[-1],
    environment: Mapping[str, str] | None = None,
    when_ready: object = None,
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run a server that ends without a stop; return the ended process, and its ready line."""
    command = [
        sys.executable,
        "-P",
        "-c",
        program,
        "serve",
        "--device=cpu",
        "--listen=tcp://127.0.0.1:0",
        "--arena=64MiB",
        "--host-store=256MiB",
        "--threads=1",
        "--no-http",
        f"--state-dir={folder / 'state'}",
    ]
    mark = f"health-{os.getpid()}-{time.monotonic_ns()}"
    # A socket's path must be short, and a test's folder is long.
    import tempfile

    with tempfile.TemporaryDirectory(prefix="pipeswitch-", dir="/tmp") as runtime:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": runtime, tools.MARK: mark, **(environment or {})},
        )
        heard = []
        try:
            for line in process.stdout:
                heard.append(line)
                if "is ready" in line and callable(when_ready):
                    when_ready(line)
            status = process.wait(60)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        tools.gone(mark)
    text = "".join(heard)
    ready = next((line for line in heard if "is ready" in line), "")
    return subprocess.CompletedProcess(command, status, text), ready


def address_of(ready_line: str) -> str:
    return next(word for word in ready_line.split() if word.startswith("tcp://"))


def test_a_scheduler_that_never_returns_ends_the_server_with_the_stacks_in_its_log(
    tmp_path: Path,
) -> None:
    clients: list[Client] = []

    def ask(ready: str) -> None:
        client = Client(address_of(ready))
        clients.append(client)
        client.ping(deep=True)
        with pytest.raises(ServerUnavailable):
            client.jobs()

    done, _ = serve_until_it_ends(
        tmp_path,
        program=PLANTED,
        when_ready=ask,
        environment={
            "PIPESWITCH_SERVER__WATCHDOG": "2s",
            "PIPESWITCH_SERVER__TCP_ROLES": "infer,operate",
        },
    )
    for client in clients:
        client.close()
    assert done.returncode == os.EX_SOFTWARE
    log = (tmp_path / "state/logs/server.log").read_text()
    for text in (done.stdout, log):
        assert "scheduler=hung" in text
        assert "for_ever" in text


def test_a_server_that_was_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    """Stop and continue a whole server: the gap in its clock must not count as a hang."""
    environment = {**tools.ENVIRONMENT, "PIPESWITCH_SERVER__WATCHDOG": "1s"}
    with tools.checked_server(arena="64MiB", environment=environment) as checked:
        tools.stop(checked.pid)
        time.sleep(2.5)  # longer than the watchdog's limit
        tools.kill(checked.pid, signal.SIGCONT)
        assert checked.client.ping(deep=True)["ready"]
        assert "scheduler=hung" not in checked.running.log()


def test_systemd_hears_readiness_life_and_the_end(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1500000"}
        with tools.checked_server(arena="64MiB", environment=environment, settles=False) as checked:
            while (first := manager.recv(4000).decode()).startswith("EXTEND_TIMEOUT_USEC="):
                pass  # a busy machine starts it slowly
            assert first.startswith("READY=1\nSTATUS=pipeswitch is ready"), first
            assert [manager.recv(4000) for _ in range(3)] == [b"WATCHDOG=1"] * 3
            assert checked.client.ping()["ready"]
            tools.kill(checked.pid, signal.SIGTERM)
            while b"STOPPING=1" not in manager.recv(4000):
                pass
            assert checked.running.process.wait(60) == 0


# ------------------------------------------------------------------------------- a model that hangs

LOOPS = """
    import torch

    class Loops(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            while x.sum() > 100:
                pass
            return self.layer(x)

    def make():
        return Loops()
"""


def test_a_model_in_an_endless_loop_is_killed_and_the_device_is_free_again(tmp_path: Path) -> None:
    tools.write_script(tmp_path, "looping.py", LOOPS)
    environment = {
        **tools.ENVIRONMENT,
        "PYTHONPATH": str(tmp_path),
        "PIPESWITCH_SCHEDULER__MAX_COMPUTE": "4s",
    }
    with tools.checked_server(arena="64MiB", environment=environment) as checked:
        client = checked.client
        client.register("small", tools.mlp(16, 2, 1), example_inputs=(X,))
        client.register(
            "loops", "looping:make", weights="random:0", inputs={"x": ((1, 4), "float32")}
        )
        assert client.show("loops")["mode"] == "module"
        good = client.infer("loops", torch.zeros(1, 4))["y"]
        endless = client.submit("loops", torch.full((1, 4), 100.0))
        behind = client.submit("small", X)
        with pytest.raises(DeadlineExceeded, match="max_compute"):
            endless.result(30)
        assert behind.result(30)["y"].shape == (1, 16)
        checked.wait_until_whole()
        assert torch.equal(client.infer("loops", torch.zeros(1, 4))["y"], good)
        assert checked.count("worker_restarts") == 1


# ------------------------------------------------------------------------------- disks


def test_a_fork_server_is_replaced_though_its_log_cannot_be_written(running: tools.Checked) -> None:
    """Make the log unwritable, as on a disk that has become read-only."""
    logs = running.running.state_dir / "logs"
    path, old_path = logs / "processes.log", logs / "processes.log.kept"
    path.rename(old_path)
    path.mkdir()  # even root cannot open a folder for writing
    replace_fork_server(running)
    worker = running.worker_pids()[0]
    tools.kill(worker)
    tools.until(lambda: running.worker_pids().get(0) not in (None, worker), "it forks")
    assert running.client.infer("small", X)["y"].shape == (1, 16)
    assert "processes.log cannot be written" in (logs / "server.log").read_text()
    path.rmdir()
    old_path.rename(path)
    running.wait_until_whole()
