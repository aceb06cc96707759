"""``kill -9`` of every part, at every moment: one answer each, the next request works, no trace."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import (
    DIGESTED,
    ENVIRONMENT,
    Checked,
    check_identity,
    checked_server,
    eager,
    finish,
    gone,
    is_bit_equal,
    kill,
    marked_pids,
    mlp,
    run_plain,
    shm_names,
    start_endless_job,
    stop,
    until,
    write_script,
)

from pipeswitch.errors import ModelQuarantined, PipeSwitchError, ServerUnavailable, WorkerLost

SEED = 1121
SLOW_LINK = ("--link-gbps", "0.05")  # GB/s: 32 MB are on their way for more than half a second
WIDE, LONG = 1024, 1024
WIDE_DEPTH = 8  # 32 MiB
LONG_BATCH = 4096  # rows, each 24 layers of 1024 x 1024: seconds on one core


@pytest.fixture(scope="module")
def wide() -> torch.nn.Module:
    return mlp(WIDE, WIDE_DEPTH, seed=1)


@pytest.fixture(scope="module")
def running(wide: torch.nn.Module) -> Iterator[Checked]:
    """One model fits at a time, over a slow link."""
    with checked_server(arena="42MiB", environment=ENVIRONMENT, args=SLOW_LINK) as checked:
        client = checked.client
        client.register("wide", wide, example_inputs=(torch.zeros(1, WIDE),))
        client.register("other", mlp(WIDE, WIDE_DEPTH, 2), example_inputs=(torch.zeros(1, WIDE),))
        client.register("tiny", mlp(16, 2, 3), example_inputs=(torch.zeros(1, 16),))
        yield checked


@pytest.fixture(autouse=True)
def _settled(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test of the shared server: whole again, and everything given back."""
    yield
    if "running" in request.fixturenames:
        checked = request.getfixturevalue("running")
        checked.wait_until_whole()
        checked.settle()


def model_state(checked: Checked, name: str, *states: str) -> dict[str, Any]:
    """Wait until a model's row shows one of these states on a worker; the row."""

    def look() -> dict[str, Any] | None:
        row = checked.row(name)
        return row if row["state"] in states and row["pid"] else None

    return until(look, f"{name} is {' or '.join(states)}")


def evict(checked: Checked, name: str) -> None:
    """Make sure that the model's next request has to transmit it."""
    checked.client.infer("other" if name == "wide" else "wide", torch.zeros(1, WIDE))
    assert checked.row(name)["state"] == "host"


X = torch.linspace(-1, 1, WIDE).reshape(1, WIDE)


def test_a_worker_killed_in_every_part_of_a_switch_costs_no_answer(
    running: Checked, wide: torch.nn.Module
) -> None:
    expected = eager(wide, X)
    for delay_s in (0.0, 0.05, 0.15, 0.3, 0.45, 0.6):  # of about 0.65 s
        evict(running, "wide")
        running.wait_until_whole()
        future = running.client.submit("wide", X)
        row = model_state(running, "wide", "transmitting", "active")
        threading.Event().wait(delay_s)  # a moment inside the transfer, not a condition
        kill(row["pid"])
        assert is_bit_equal(future.result(30)["y"], expected), f"{delay_s} s"


def test_a_request_that_kills_every_worker_it_gets_is_answered_and_its_model_set_aside(
    running: Checked,
) -> None:
    module = mlp(LONG, 2, 4)
    deep = torch.nn.Sequential(*[module[0], module[1]] * 12).eval()
    running.client.register("poison", deep, example_inputs=(torch.zeros(2, LONG),), max_batch=8192)
    future = running.client.submit("poison", torch.zeros(LONG_BATCH, LONG))
    killed: set[int] = set()

    def hit() -> bool:
        row = running.row("poison")
        if row["pid"] and row["pid"] not in killed and row["state"] == "active":
            assert kill(row["pid"])
            killed.add(row["pid"])
        return future.done()

    until(hit, "the request is answered", 60)
    with pytest.raises((WorkerLost, ModelQuarantined)):
        future.result()
    assert len(killed) >= 3  # a worker killed before the task began is not blamed on it
    assert running.client.infer("tiny", torch.zeros(1, 16))["y"].shape == (1, 16)
    running.client.unregister("poison")


def test_all_workers_killed_at_once_come_back_and_every_request_is_answered(
    running: Checked, wide: torch.nn.Module
) -> None:
    futures = [running.client.submit("wide", X) for _ in range(4)]
    for pid in running.worker_pids().values():
        kill(pid)
    # Three deaths may all have hit one request, and then its model is set aside.
    assert {outcome(future) for future in futures} <= {None, WorkerLost, ModelQuarantined}
    running.wait_until_whole()
    forgive(running, "wide")
    assert is_bit_equal(running.client.infer("wide", X)["y"], eager(wide, X))


def forgive(checked: Checked, name: str) -> None:
    """Give a model that may be quarantined another chance."""
    checked.client.load(name)
    checked.client.unload(name)


def outcome(future: Future[Any]) -> type[PipeSwitchError] | None:
    """None for a result, else the error's type."""
    try:
        future.result(40)
    except PipeSwitchError as error:
        return type(error)
    return None


@pytest.mark.parametrize("moment", ["idle", "transmitting"])
def test_a_killed_memory_daemon_is_restarted_with_its_workers_and_requests_survive(
    running: Checked, wide: torch.nn.Module, moment: str
) -> None:
    old, workers = running.daemon_pid(), set(running.worker_pids().values())
    futures: list[Future[Any]] = []
    if moment == "transmitting":
        evict(running, "wide")
        futures = [
            running.client.submit("wide", X),
            running.client.submit("tiny", torch.ones(1, 16)),
        ]
        model_state(running, "wide", "transmitting", "active")
    assert kill(old)
    futures.append(running.client.submit("wide", X))
    for future in futures:
        future.result(30)
    assert is_bit_equal(futures[-1].result()["y"], eager(wide, X))
    until(lambda: running.daemon_pid() not in (0, old), "another daemon")
    running.wait_until_whole()
    assert not workers & set(running.worker_pids().values())  # none outlives the arena's owner
    assert not workers & marked_pids(running.mark)


def test_a_killed_fork_server_is_restarted_and_workers_can_be_replaced_again(
    running: Checked, wide: torch.nn.Module
) -> None:
    old = running.fork_server_pid()
    future = running.client.submit("wide", X)
    assert kill(old)
    assert is_bit_equal(future.result(30)["y"], eager(wide, X))
    standby = next(r for r in running.rows("worker") if r["state"] == "standby")
    assert kill(standby["pid"])  # an orphan by now: its death must be seen all the same
    until(
        lambda: (
            standby["pid"] not in running.worker_pids().values() and len(running.worker_pids()) >= 3
        ),
        "the orphan was replaced",
    )
    assert running.fork_server_pid() != old
    assert is_bit_equal(running.client.infer("wide", X)["y"], eager(wide, X))


def test_random_kills_under_load_lose_and_duplicate_nothing(
    running: Checked, wide: torch.nn.Module
) -> None:
    inputs = {"wide": X, "other": X, "tiny": torch.ones(1, 16)}
    expected = {
        "wide": eager(wide, X),
        "other": eager(mlp(WIDE, WIDE_DEPTH, 2), X),
        "tiny": eager(mlp(16, 2, 3), inputs["tiny"]),
    }
    before = running.stats()["inference"]["ok"]
    generator, total = random.Random(SEED), 0
    for _ in range(5):
        names = generator.choices(["wide", "other", "tiny"], k=6)
        futures = [(name, running.client.submit(name, inputs[name])) for name in names]
        for _ in range(2):  # a third death might hit the same request, which is then given up
            active = [r["pid"] for r in running.rows("model") if r["pid"]]
            kill(generator.choice(active or list(running.worker_pids().values())))
        for name, future in futures:
            assert is_bit_equal(future.result(60)["y"], expected[name])
        total += len(futures)
    until(lambda: running.stats()["inference"]["in_flight"] == 0, "all are answered")
    assert running.stats()["inference"]["ok"] - before == total  # each once


# ------------------------------------------------------------------------------- clients


CLIENT = """
    import sys
    import numpy as np
    from pipeswitch.client.client import Client
    client = Client(sys.argv[1])
    futures = [client.submit("wide", np.zeros((1, 1024), "float32")) for _ in range(20)]
    futures += [client.submit("other", np.zeros((1, 1024), "float32")) for _ in range(5)]
    client.ps()  # what was sent before it has arrived
    print("sent", flush=True)
    for future in futures:
        future.result()
    print("answered", flush=True)
    sys.stdin.read()
"""


def start_client(running: Checked, folder: Path) -> subprocess.Popen[str]:
    script = write_script(folder, "client.py", CLIENT)
    process = subprocess.Popen(
        [sys.executable, script, running.running.tcp_address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "sent\n"
    return process


def end_client(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        stream.close()


def test_a_stopped_client_holds_nobody_up_and_gets_its_answers_when_it_goes_on(
    running: Checked, tmp_path: Path
) -> None:
    process = start_client(running, tmp_path)
    try:
        stop(process.pid)
        for _ in range(20):
            assert running.client.infer("tiny", torch.zeros(1, 16))["y"].shape == (1, 16)
        until(lambda: running.stats()["inference"]["in_flight"] == 0, "its requests are done")
        kill(process.pid, signal.SIGCONT)
        assert process.stdout.readline() == "answered\n"
    finally:
        end_client(process)


# ------------------------------------------------------------------------------- the server


def busy_server(**options: Any) -> Any:
    return checked_server(
        arena="42MiB", environment=ENVIRONMENT, args=SLOW_LINK, settles=False, **options
    )


def register_both(checked: Checked) -> None:
    for seed, name in enumerate(("wide", "other")):
        module = mlp(WIDE, WIDE_DEPTH, seed)
        checked.client.register(name, module, example_inputs=(torch.zeros(1, WIDE),))


def submit_both(checked: Checked, count: int) -> list[Future[Any]]:
    """Requests that are accepted and each need a switch."""
    before = checked.stats()["inference"]["accepted"]
    futures = [checked.client.submit(("wide", "other")[i % 2], X) for i in range(count)]
    until(lambda: checked.stats()["inference"]["accepted"] == before + count, "all were accepted")
    return futures


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "ctrl-c"])
def test_a_signal_drains_what_was_accepted_is_answered_and_what_is_new_refused(
    number: signal.Signals, tmp_path: Path
) -> None:
    with busy_server() as checked:
        register_both(checked)
        start_endless_job(checked, tmp_path)
        futures = submit_both(checked, 8)
        kill(checked.pid, number)
        until(lambda: is_draining(checked), "it drains")
        with pytest.raises(ServerUnavailable, match="drain"):
            checked.client.infer("wide", X)
        for future in futures:
            assert future.result(40)["y"].shape == (1, WIDE)
        assert checked.running.process.wait(40) == 0
        gone(checked.mark)


def test_a_second_signal_ends_it_at_once_and_answers_what_was_left() -> None:
    with busy_server() as checked:
        register_both(checked)
        futures = submit_both(checked, 12)  # eight seconds of transfers
        kill(checked.pid, signal.SIGTERM)
        until(lambda: is_draining(checked), "it drains")
        kill(checked.pid, signal.SIGTERM)
        answers = [outcome(future) for future in futures]
        assert ServerUnavailable in answers  # it did not wait for all of them
        assert set(answers) <= {ServerUnavailable, None}
        assert checked.running.process.wait(20) == 0
        gone(checked.mark)


def is_draining(checked: Checked) -> bool:
    stats = checked.client.stats()
    check_identity(stats)
    return bool(stats["draining"])


@pytest.mark.parametrize("are_stopped", [False, True])
def test_children_of_a_killed_controller_leave(are_stopped: bool, tmp_path: Path) -> None:
    names = shm_names()
    with busy_server(status=-signal.SIGKILL) as checked:
        register_both(checked)
        start_endless_job(checked, tmp_path)
        futures = submit_both(checked, 4)
        children = marked_pids(checked.mark) - {checked.pid}
        assert len(children) >= 5  # fork server, daemon, workers
        if are_stopped:  # who would kill them for it is killed first
            for pid in children:
                kill(pid, signal.SIGSTOP)
        kill(checked.pid)
        checked.running.process.wait(30)
        gone(checked.mark)
        assert shm_names() <= names
        checked.client.close()
        for future in futures:
            assert future.done()


@pytest.mark.parametrize("end", [pytest.param("SIGTERM", marks=pytest.mark.soak), "SIGKILL"])
def test_a_restarted_server_has_its_models_and_resumes_its_jobs(end: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, "resumes.py", DIGESTED)
    run_plain(script, str(tmp_path / "plain"), "12", "512")
    state = tmp_path / "state"
    module = mlp(64, 2, 7)
    x = torch.ones(1, 64)
    options: dict[str, Any] = {"arena": "42MiB", "state_dir": state, "environment": ENVIRONMENT}

    number = signal.Signals[end]
    status = 0 if end == "SIGTERM" else -number
    with checked_server(settles=False, status=status, **options) as first:
        first.client.register("kept", module, example_inputs=(x,))
        first.client.register("dropped", mlp(16, 1, 8), example_inputs=(torch.ones(1, 16),))
        first.client.unregister("dropped")
        args = [str(tmp_path / "served"), "12", "512"]
        task = first.client.train(script, name="resumes", args=args)
        until(lambda: task.status()["step"] > 20, "it trains")
        paused = task.pause()  # what is put aside is written to disk at once
        persisted = paused["committed_step"]
        until(lambda: task.status()["persisted_step"] == persisted > 0, "it is on disk")
        task.resume()
        until(lambda: task.status()["step"] > persisted, "it goes on")
        kill(first.pid, number)
        first.running.process.wait(30)

    with checked_server(**options) as second:
        until(
            lambda: [m["state"] for m in second.client.models()] == ["ready"], "the model is back"
        )
        assert second.client.models()[0]["name"] == "kept"
        assert is_bit_equal(second.client.infer("kept", x)["y"], eager(module, x))
        task = second.client.task("resumes")
        assert task.status()["committed_step"] >= persisted
        assert finish(task)["step"] == 1200
    assert (tmp_path / "served").read_text() == (tmp_path / "plain").read_text()
