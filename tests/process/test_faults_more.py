"""Further faults: stopped and killed processes, full disks, damaged state, malicious peers."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import selectors
import shutil
import signal
import socket
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import process_tools as tools
import pytest
import torch

from pipeswitch.base import errors
from pipeswitch.controller.journal import FIELDS, FILE_NAME
from pipeswitch.controller.processes import Child, Processes
from pipeswitch.ipc.channel import channel_pair
from pipeswitch.ipc.messages.base import Exit


def log_is_clean(checked: tools.Checked) -> None:
    log = checked.running.log()
    for word in ("InvalidTransition", "AssertionError", "scheduler=dead", "CRITICAL"):
        at = log.find(word)
        assert at < 0, log[max(0, at - 3000) : at + 500]


def test_a_channel_that_was_closed_by_its_childs_exit_is_not_read_again(tmp_path: Path) -> None:
    """Let one select call report an exit and a message, and handle the exit first."""
    ours, theirs = channel_pair()
    ours.setblocking(False)
    exits: list[int] = []
    heard: list[object] = []
    with selectors.DefaultSelector() as selector:
        processes = Processes(selector, tmp_path / "log", lambda _: None)
        child = Child("worker", "w", [ours], lambda m, _: heard.append(m), exits.append)
        child.open_channels.add(ours.fileno())
        selector.register(ours, selectors.EVENT_READ)
        theirs.send(Exit())
        theirs.close()
        assert selector.select(0)
        processes._exited(child, -9)
        processes._read(child, ours)
        processes._exited(child, -9)
    assert heard == [Exit()]  # the child has sent it before its exit
    assert exits == [-9]


# ------------------------------------------------------------------------------- stopped, killed

LONG, LONG_ROWS = 1024, 4096  # 8 layers: about a second on one core


@pytest.fixture(scope="module")
def running() -> Iterator[tools.Checked]:
    with tools.checked_server(arena="64MiB", environment=tools.ENVIRONMENT) as checked:
        checked.client.register("small", tools.mlp(64, 2, 1), example_inputs=(torch.zeros(1, 64),))
        example = (torch.zeros(2, LONG),)
        checked.client.register(
            "long", tools.mlp(LONG, 8, 2), example_inputs=example, max_batch=8192
        )
        yield checked
        log_is_clean(checked)


SMALL = torch.linspace(-1, 1, 64).reshape(1, 64)


def answers(checked: tools.Checked) -> None:
    answer = checked.client.submit("small", SMALL).result(60)["y"]
    assert tools.is_bit_equal(answer, tools.eager(tools.mlp(64, 2, 1), SMALL))


def is_replaced(checked: tools.Checked, pid: int) -> None:
    tools.until(lambda: not Path("/proc", str(pid)).exists(), f"{pid} was killed")
    checked.wait_until_whole()
    answers(checked)
    checked.settle()


def computing_pid(checked: tools.Checked) -> int:
    row = tools.until(
        lambda: next(
            (r for r in checked.rows("model") if r["name"] == "long" and r["state"] == "active"),
            None,
        ),
        "it computes",
    )
    return int(row["pid"])


def test_a_worker_stopped_while_it_computes_is_replaced_and_its_request_answered(
    running: tools.Checked,
) -> None:
    x = torch.ones(LONG_ROWS, LONG)
    future = running.client.submit("long", x)
    pid = computing_pid(running)
    tools.stop(pid)
    assert future.result(60)["y"].shape == x.shape
    is_replaced(running, pid)


def test_a_worker_that_goes_on_soon_is_left_alone(running: tools.Checked) -> None:
    # No request is sent while the worker is stopped, because this worker might get the request.
    pid = next(r["pid"] for r in running.rows("worker") if r["state"] == "standby")
    tools.stop(pid)
    tools.kill(pid, signal.SIGCONT)
    answers(running)
    assert pid in running.worker_pids().values()


def test_a_stopped_fork_server_is_replaced_and_forks_again(running: tools.Checked) -> None:
    pid = running.fork_server_pid()
    tools.stop(pid)
    is_replaced(running, pid)
    worker = running.worker_pids()[0]
    tools.kill(worker)
    tools.until(lambda: running.worker_pids().get(0, worker) != worker, "a new one was forked")


def test_a_worker_stopped_while_it_trains_blocks_nobody_and_the_job_resumes(
    running: tools.Checked, tmp_path: Path
) -> None:
    task = tools.start_endless_job(running, tmp_path)
    tools.until(lambda: task.status()["committed_step"] > 0, "it commits")
    pid = next(int(r["pid"]) for r in running.client.ps() if r["name"] == task.name)
    tools.stop(pid)
    answers(running)
    tools.until(lambda: not Path("/proc", str(pid)).exists(), "it was killed")
    committed = task.status()["committed_step"]
    tools.until(lambda: task.status()["committed_step"] > committed, "the job goes on")


def test_three_deaths_of_the_daemon_in_a_row_lose_no_request(
    running: tools.Checked, tmp_path: Path
) -> None:
    task = tools.start_endless_job(running, tmp_path)  # commits all the time
    futures = [running.client.submit("long", torch.ones(64, LONG)) for _ in range(8)]
    for _ in range(3):
        pid, workers = (
            tools.until(running.daemon_pid, "a daemon"),
            {*running.worker_pids().values()},
        )
        tools.kill(pid)
        tools.until(lambda pid=pid: running.daemon_pid() not in (0, pid), "the next one")
        assert not workers & tools.marked_pids(running.mark), "one outlives the arena's owner"
    for future in futures:
        assert future.result(60)["y"].shape == (64, LONG)
    committed = task.status()["committed_step"]
    tools.until(lambda: task.status()["committed_step"] > committed, "the job goes on")


def test_a_killed_builder_is_a_refusal_and_leaves_nothing(running: tools.Checked) -> None:
    def named(name: str) -> set[int]:
        pids = set()
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    if Path("/proc", entry, "comm").read_text().strip() == name:
                        pids.add(int(entry))
        return pids & tools.marked_pids(running.mark)

    failures: list[errors.PipeSwitchError] = []

    def register() -> None:
        try:
            running.client.register(
                "big", tools.mlp(2048, 4, 3), example_inputs=(torch.zeros(1, 2048),)
            )
        except errors.PipeSwitchError as error:
            failures.append(error)

    thread = threading.Thread(target=register)
    thread.start()
    tools.kill(tools.until(lambda: named("pipeswitch-bld"), "a builder").pop())
    thread.join(30)
    assert [type(error) for error in failures] == [errors.RegistrationRefused]
    tools.until(
        lambda: not list((running.running.state_dir / "models").glob(".build-*")),
        "its folder is gone",
    )
    answers(running)


# ------------------------------------------------------------------------------- disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 4 MiB for the test."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Write to a file until the disk is full; return its path."""
    path = folder / "filler"
    with open(path, "ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return path


def test_a_full_disk_refuses_what_cannot_be_kept_and_serves_on(
    small_disk: Path, tmp_path: Path
) -> None:
    with tools.checked_server(
        state_dir=small_disk / "state", environment=tools.ENVIRONMENT
    ) as checked:
        client = checked.client
        client.register("small", tools.mlp(64, 2, 1), example_inputs=(torch.zeros(1, 64),))
        filler = fill(small_disk)
        with pytest.raises(errors.PipeSwitchError) as refused:
            client.register("other", tools.mlp(64, 2, 2), example_inputs=(torch.zeros(1, 64),))
        assert "No space left" in str(refused.value), refused.value
        fill(small_disk)  # the server has removed an older upload, which made room
        script = tools.write_script(tmp_path, "hello.py", "from pipeswitch import job\n")
        args = ["x" * 200] * 30  # does not fit in the journal's last page
        with pytest.raises(errors.ServerUnavailable, match="No space left"):
            client.train(script, name="hello", args=args)
        answers(checked)
        client.unload("small")
        assert {row["name"] for row in client.models()} == {"small"}
        filler.unlink()
        client.register("other", tools.mlp(64, 2, 2), example_inputs=(torch.zeros(1, 64),))
        tools.finish(client.train(script, name="hello"))
        log_is_clean(checked)


def test_a_stop_on_a_full_disk_fails_and_names_the_steps_that_are_lost(
    small_disk: Path, tmp_path: Path
) -> None:
    status = os.EX_IOERR
    with tools.checked_server(
        state_dir=small_disk / "state", environment=tools.ENVIRONMENT, settles=False, status=status
    ) as checked:
        task = tools.start_endless_job(checked, tmp_path, "trains")
        tools.until(lambda: task.status()["persisted_step"] > 0, "a commit is on disk")
        fill(small_disk)
        tools.until(lambda: "No space left" in task.status()["why"], "a commit is not")
        fill(small_disk)  # the failed commit has freed its space
        step = task.status()["committed_step"]
        tools.until(lambda: task.status()["committed_step"] > step, "it goes on")
        done = tools.command("--host", checked.running.ipc_address, "stop")
        assert done.returncode == 1
        [steps] = re.findall(r'job "trains" loses steps (\d+) to (\d+)', done.stderr)
        assert int(steps[0]) <= int(steps[1])
        assert int(steps[1]) > step
        assert "No space left" in done.stderr


def test_a_start_on_a_read_only_disk_is_one_line(small_disk: Path) -> None:
    state = small_disk / "state"
    for folder in ("models", "commits", "logs"):
        (state / folder).mkdir(mode=0o700, parents=True)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    words = r"(?i)status 2 .*\n.*read-only file system"
    with (
        pytest.raises(RuntimeError, match=words) as refused,
        tools.checked_server(state_dir=state, settles=False),
    ):
        pass
    assert "Traceback" not in str(refused.value)


SOUND = {bytes: b"spec", str: "s", int: 1, bool: 0, list: "[]"}
"""A valid value for each type of column of the journal."""


def test_damage_to_the_state_directory_costs_what_is_damaged_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    modules = {name: tools.mlp(64, 2, seed) for seed, name in enumerate(("a", "b", "c"), 1)}
    digests = {}
    with tools.checked_server(state_dir=state, environment=tools.ENVIRONMENT) as checked:
        for name, module in modules.items():
            checked.client.register(name, module, example_inputs=(SMALL,))
            digests[name] = checked.client.show(name)["digest"]
    deep = "[" * 100_000
    garbage = [
        ("model", "half", dict.fromkeys(FIELDS["model"])),
        ("model", "bytes", {"spec": "text", "digest": 2, "priority": "high", "tenant": 3}),
        ("model", "../../etc", {}),
        ("model", b"\xff\xfe\x00", {}),
        ("job", "j", {"entry": 3, "args": "[4", "priority": "x", "tenant": 5, "share": 6}),
        ("job", "deep", {"args": deep, "tenant": None}),
    ]
    with contextlib.closing(sqlite3.connect(state / FILE_NAME)) as database, database:
        for kind, name, wrong in garbage:
            row = {"name": name, **{f: SOUND[type_] for f, type_ in FIELDS[kind].items()}, **wrong}
            marks = ", ".join("?" * len(row))
            database.execute(
                f"INSERT INTO {kind} ({', '.join(row)}) VALUES ({marks})", [*row.values()]
            )
    weights = next((state / "models" / digests["b"]).glob("*.safetensors"), None) or max(
        (state / "models" / digests["b"]).iterdir(), key=lambda path: path.stat().st_size
    )
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 0xFF
    weights.write_bytes(data)
    shutil.rmtree(state / "models" / digests["c"])
    shutil.rmtree(state / "uploads", ignore_errors=True)
    with tools.checked_server(state_dir=state, environment=tools.ENVIRONMENT) as checked:
        tools.until(lambda: "a" in {row["name"] for row in checked.client.models()}, "it is back")
        answer = checked.client.submit("a", SMALL).result(60)["y"]
        assert tools.is_bit_equal(answer, tools.eager(modules["a"], SMALL))
        tools.until(
            lambda: all(row["state"] != "building" for row in checked.client.models()), "all tried"
        )
        for name in ("b", "c"):  # they may be lost, failed or built again, but answers are right
            with contextlib.suppress(errors.ModelNotFound, errors.ServerUnavailable):
                answer = checked.client.submit(name, SMALL).result(60)["y"]
                assert tools.is_bit_equal(answer, tools.eager(modules[name], SMALL))
        log_is_clean(checked)


# ------------------------------------------------------------------------------- hostile peers


def test_two_thousand_idle_connections_disturb_nobody(running: tools.Checked) -> None:
    """With the usual soft limit of 1024 open files, the server must still be able to fork."""
    host, port = running.running.tcp_address.removeprefix("tcp://").split(":")
    answers(running)
    before = tools.rss_bytes(running.pid)
    with contextlib.ExitStack() as stack:
        for _ in range(2000):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(10)
            with contextlib.suppress(OSError):
                sock.connect((host, int(port)))
        answers(running)
        worker = running.worker_pids()[0]
        tools.kill(worker)
        tools.until(lambda: running.worker_pids().get(0, worker) != worker, "a new one was forked")
        answers(running)
        assert tools.rss_bytes(running.pid) - before < 256 << 20
    running.wait_until_whole()


def test_a_server_that_is_out_of_descriptors_recovers() -> None:
    with tools.checked_server(arena="64MiB", environment=tools.ENVIRONMENT) as checked:
        checked.client.register("small", tools.mlp(64, 2, 1), example_inputs=(torch.zeros(1, 64),))
        limit = resource.prlimit(checked.pid, resource.RLIMIT_NOFILE)
        in_use = len(os.listdir(f"/proc/{checked.pid}/fd"))
        resource.prlimit(checked.pid, resource.RLIMIT_NOFILE, (in_use + 1, limit[1]))
        worker = checked.worker_pids()[0]
        tools.kill(worker)
        tools.until(lambda: "not forked" in checked.running.log(), "it ran out")
        answers(checked)
        resource.prlimit(checked.pid, resource.RLIMIT_NOFILE, limit)
        checked.wait_until_whole()
        answers(checked)
        log_is_clean(checked)
