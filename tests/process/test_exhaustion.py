"""Real processes that run out of a resource: other requests are served, and no call hangs."""

from __future__ import annotations

import gc
import os
import resource
import selectors
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import process_tools as tools
import pytest
import torch
from frontend_rig import FakeScheduler, until

from pipeswitch import Client
from pipeswitch.base.errors import ServerUnavailable
from pipeswitch.scheduler.state import events as ev
from pipeswitch.wire.frames import INLINE, pack_table

X = np.ones((1, 64), dtype=np.float32)
TRAIN = """
    import pathlib, sys, time
    import torch
    from pipeswitch import job
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pathlib.Path(sys.argv[1] + ".begun").touch()
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.02)
    for x in job.steps([torch.ones(2, 4)] * 40, model=model, optimizer=optimizer):
        model(x).sum().backward()
        optimizer.step()
"""
LARGE = np.ones((512, 1024), dtype=np.float32)  # larger than INLINE_COPY_BYTES


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeScheduler]:
    scheduler = FakeScheduler(tmp_path)
    scheduler.announce("m", width=1024, batch_max=1024)
    yield scheduler
    scheduler.close()


def fails_once(monkeypatch: pytest.MonkeyPatch, of: Any, name: str, error: BaseException) -> None:
    whole = getattr(of, name)

    def fails(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(of, name, whole)
        raise error

    monkeypatch.setattr(of, name, fails)


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "No space left on device")])
def test_a_large_request_that_cannot_be_copied_is_answered_and_the_next_is_served(
    server: FakeScheduler, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with Client(server.listeners.ipc.address) as client:
        monkeypatch.setattr(server.tcp.pool, "lend", lambda *_: None)
        fails_once(monkeypatch, server.tcp.pool, "fill", error)
        with pytest.raises(ServerUnavailable):
            client.submit("m", LARGE).result(20)
        assert client.submit("m", LARGE).result(20)["y"].shape == LARGE.shape
    assert len(server.wait_for(ev.InferArrived)) == 1


def test_a_server_without_descriptors_rests_and_then_takes_who_waited(
    server: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop must sleep while there are no descriptors, although the listener stays readable."""
    turns, rested = 0, threading.Event()
    select = selectors.EpollSelector.select

    def counted(self: Any, timeout: float | None = None) -> Any:
        nonlocal turns
        turns += rested.is_set()
        return select(self, timeout)

    monkeypatch.setattr(selectors.EpollSelector, "select", counted)
    fails_once(monkeypatch, server.listeners.ipc.sock.__class__, "accept", OSError(24, "too many"))
    rested.set()
    with Client(server.listeners.ipc.address, timeout_s=20) as client:
        assert client.infer("m", LARGE[:1])["y"].shape == (1, 1024)
    until(lambda: not server.tcp.sessions.peers.resting)
    assert turns < 100


def test_a_connection_that_ends_leaves_no_circle_that_keeps_what_it_held(
    server: FakeScheduler,
) -> None:
    """A reference cycle would keep a closed connection's unread bytes until a rare collection."""
    peers, refs = server.tcp.sessions.peers, []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with Client(server.listeners.ipc.address) as client:
                assert client.infer("m", LARGE[:1])["y"].shape == (1, 1024)
                refs += map(weakref.ref, peers.all)
            until(lambda: not peers.all)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(server.listeners.ipc.address.removeprefix("ipc://"))
            until(lambda: bool(peers.all))
            refs += map(weakref.ref, peers.all)
            sock.sendall(pack_table([(1 << 20, INLINE)]) + bytes(1000))
        until(lambda: not peers.all)
        with Client(server.listeners.ipc.address) as client:  # drops the loop's last references
            client.infer("m", LARGE[:1])
            until(lambda: not any(one() for one in refs))
    finally:
        gc.enable()


def test_a_job_whose_commits_cannot_be_kept_ends_and_the_server_lives(tmp_path: Path) -> None:
    """Leave no descriptor for a job's commit area."""
    with tools.checked_server(arena="64MiB", environment=tools.ENVIRONMENT) as checked:
        checked.client.register("small", tools.mlp(64, 2, 1), example_inputs=(torch.zeros(1, 64),))
        script = tools.write_script(tmp_path, "train.py", TRAIN)
        limit = resource.prlimit(checked.pid, resource.RLIMIT_NOFILE)
        task = checked.client.train(script, name="j", args=[str(tmp_path / "go")])
        tools.until(lambda: (tmp_path / "go.begun").exists(), "the script runs")
        in_use = len(os.listdir(f"/proc/{checked.pid}/fd"))
        resource.prlimit(checked.pid, resource.RLIMIT_NOFILE, (in_use, limit[1]))
        (tmp_path / "go").touch()
        assert task.wait(60)["state"] == "cancelled"
        resource.prlimit(checked.pid, resource.RLIMIT_NOFILE, limit)
        assert checked.client.infer("small", X)["y"].shape == (1, 64)


@pytest.mark.parametrize("descriptors", [12, 20, 26])
def test_a_server_that_has_too_few_descriptors_to_start_says_so(
    tmp_path: Path, descriptors: int
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            "from pipeswitch.cli.main import main; main()",
            "serve",
            "--device",
            "cpu",
            "--arena",
            "64MiB",
            "--host-store",
            "64MiB",
            "--no-http",
            "--listen",
            "tcp://127.0.0.1:0",
            "--state-dir",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors)),
    )
    assert done.returncode not in (0, 1), done.stderr
    assert "Error: " in done.stderr
    assert "Traceback" not in done.stderr
