"""Tools for tests of a running server; conftest.py loads this module as ``process_tools``.

Tests do not sleep; they wait for conditions, with a deadline. Processes of a server are found by a
mark in the environment, which all its children inherit, even those whose parent has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil

from pipeswitch.base.errors import InvalidInput, TaskFailed
from pipeswitch.base.roles import Role
from pipeswitch.client.client import FINAL_JOB_STATES, Task
from pipeswitch.testing import RunningServer, server

DEADLINE_S = 60.0  # a busy machine takes half of it to start a process that imports torch
POLL_S = 0.002  # time between two checks of a condition
MARK = "PIPESWITCH_TESTS_MARK"
ENVIRONMENT = {
    "PIPESWITCH_SCHEDULER__COMMIT_EVERY": "50ms",
    "PIPESWITCH_WORKERS__RESTART_BACKOFF": "20ms",
}
"""Settings of a server that commits every 50 ms, and restarts dead workers after 20 ms."""


def fake_gpu(folder: Path) -> dict[str, str]:
    """Return the environment of a fake machine with its own folder for GPU locks."""
    tests = Path(__file__).resolve().parents[1]
    return ENVIRONMENT | {
        "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests / "fakes")]),  # this checkout
        "PIPESWITCH_CUDA_BINDINGS": "fake_cuda",
        "TMPDIR": str(folder),
        "CUDA_FAKE_LEDGER": str(folder / "allocated"),
    }


COMMAND = [sys.executable, "-P", "-c", "from pipeswitch.cli.main import main; main()"]

T = TypeVar("T")


def command(
    *words: str, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``pipeswitch`` in its own process; return its status and output."""
    return subprocess.run(
        [*COMMAND, *words],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=250,  # below pytest's own limit; a busy machine needs minutes
        check=False,
        **options,
    )


def until(look: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Call ``look`` until it returns a true value; return this value. Fail after the deadline."""
    ends_at = time.monotonic() + deadline_s
    while True:
        value = look()
        if value:
            return value
        assert time.monotonic() < ends_at, f"not within {deadline_s} s: {what} (last: {value!r})"
        threading.Event().wait(POLL_S)


# ------------------------------------------------------------------------------- processes


def marked_pids(mark: str) -> set[int]:
    """Return the ids of living processes (no zombies) that have this mark in their environment."""
    mark_text, pids = f"{MARK}={mark}".encode(), set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            environment = Path("/proc", entry, "environ").read_bytes()
            if mark_text in environment.split(b"\0"):
                pids.add(int(entry))
    return pids


def children_of(pid: int) -> set[int]:
    """Return the ids of all direct children of a process."""
    pids: set[int] = set()
    for task in Path("/proc", str(pid), "task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            pids.update(int(child) for child in (task / "children").read_text().split())
    return pids


def command_of(pid: int) -> str:
    """Return a process's command line, or "" if it has exited."""
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def rss_bytes(pid: int) -> int:
    return int(Path("/proc", str(pid), "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def private_bytes(pid: int) -> int:
    """Return a process's private memory in bytes, without pages of memfds."""
    maps = psutil.Process(pid).memory_maps()
    return sum(m.private_clean + m.private_dirty for m in maps if m.path[:7] != "/memfd:")


def shm_names() -> set[str]:
    """Return the names in /dev/shm, except those of fuzzers and other programs."""
    others = ("pipeswitch-fuzz-", "sem.mp-")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(others)}


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal to a process; return False if the process has already exited."""
    assert pid > 1
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def stop(pid: int) -> None:
    """Stop a process; wait until no thread of it runs, because a running thread could answer."""
    is_there = kill(pid, signal.SIGSTOP)
    assert is_there, f"{pid} is gone"
    until(lambda: _stands_still(pid), f"{pid} stands still")


def _stands_still(pid: int) -> bool:
    try:
        stats = [path.read_bytes() for path in Path("/proc", str(pid), "task").glob("*/stat")]
    except OSError:  # one of the threads has just exited
        return False
    assert stats, f"{pid} is gone"
    return all(stat.rpartition(b")")[2].split()[0] == b"T" for stat in stats)


# ------------------------------------------------------------------------------- the server


class Checked:
    """A running server with its owner's client, and with checks that tests use."""

    def __init__(self, running: RunningServer, mark: str) -> None:
        self.running = running
        self.mark = mark
        self.client = running.client()

    @property
    def pid(self) -> int:
        return self.running.pid

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.client.ps() if row["kind"] == kind]

    def row(self, name: str) -> dict[str, Any]:
        return next(row for row in self.client.ps() if row["name"] == name)

    def stats(self) -> dict[str, Any]:
        stats = self.client.stats()
        check_identity(stats)
        return stats

    def count(self, key: str) -> int:
        return int(self.stats()[key])

    def fork_server_pid(self) -> int:
        """Return the pid of the fork server; other children of the controller may be orphans."""
        for pid in children_of(self.pid):
            with contextlib.suppress(OSError):  # it has just ended
                if Path("/proc", str(pid), "comm").read_text().strip() == "pipeswitch-fork":
                    return pid
        raise AssertionError("no fork server")

    def daemon_pid(self) -> int:
        return int(self.row("memory-daemon")["pid"])

    def gateway_pid(self) -> int:
        """Return the pid of the current gateway."""
        return int((self.running.state_dir / "gateway.lock").read_text())

    def worker_pids(self) -> dict[int, int]:
        """Return slot -> pid of all living workers."""
        rows = self.rows("worker")
        return {row["worker"]: row["pid"] for row in rows if row["state"] != "dead" and row["pid"]}

    def wait_until_whole(self, workers: int = 3) -> None:
        """Wait until daemon and ``workers`` workers are ready. A suspended job needs one more."""

        def is_whole() -> bool:
            rows = self.client.ps()
            free = [
                r for r in rows if r["kind"] == "worker" and r["state"] not in ("dead", "starting")
            ]
            return len(free) >= workers and any(
                r["kind"] == "daemon" and r["state"] == "active" for r in rows
            )

        try:
            until(is_whole, "all processes are up")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.client.ps()}") from None

    def settle(self) -> dict[str, Any]:
        """Cancel all jobs; wait until every lease and slab is free; return the last statistics."""
        for row in self.client.jobs():
            if row["state"] not in FINAL_JOB_STATES:
                with contextlib.suppress(InvalidInput):  # it has just ended by itself
                    self.client.job(row["name"], "cancel")
        last: dict[str, Any] = {}

        def is_settled() -> bool:
            last.update(self.stats())
            return (
                last["arena_leases"] == 0
                and last["pool_slabs"] == last["pool_spare_slabs"]
                and last["queued"] == 0
                and last["in_flight"] == 1  # this is the request for the statistics
            )

        try:
            until(is_settled, "leases, slabs and requests are back to zero")
        except AssertionError:
            raise AssertionError(f"did not settle: {last}\n{self.client.ps()}") from None
        return last


def check_identity(stats: dict[str, Any]) -> None:
    """Check invariant I1: an accepted request is answered, in flight, or counted undeliverable."""
    for counts in (stats, stats["inference"]):
        answered = counts["ok"] + counts["error"] + counts["undeliverable"]
        assert counts["accepted"] == answered + counts["in_flight"], stats


def gone(mark: str, deadline_s: float = DEADLINE_S, *, but: frozenset[int] = frozenset()) -> None:
    """Wait until no process of this server is alive, except those in ``but``."""
    try:
        until(lambda: marked_pids(mark) <= but, "every process left", deadline_s)
    except AssertionError:
        remaining = {pid: command_of(pid) for pid in marked_pids(mark) - but}
        for pid in remaining:
            kill(pid)
        raise AssertionError(f"orphans: {remaining}") from None


@contextlib.contextmanager
def checked_server(*, settles: bool = True, status: int = 0, **options: Any) -> Iterator[Checked]:
    """Start a server with one compute thread; check at the end that all its resources are freed.

    Args:
        settles: if True, cancel jobs and check leases before the stop. If the test itself ends the
            server, pass False.
        status: expected exit status.
        **options: options of ``pipeswitch.testing.server``; by default TCP clients have every role.
    """
    options.setdefault("tcp_roles", tuple(Role))
    mark, names = uuid.uuid4().hex, shm_names()
    args = ("--threads", "1", *options.pop("args", ()))
    environment = {**options.pop("environment", {}), MARK: mark}
    try:
        with server(args=args, environment=environment, **options) as running:
            checked = Checked(running, mark)
            try:
                yield checked
                if settles:
                    checked.settle()
            except BaseException:
                sys.stderr.write(running.log()[-8000:])
                raise
            finally:
                checked.client.close()
            ended = running.stop()
            assert ended == status, f"status {ended}\n{running.log()[-4000:]}"
            if settles:
                assert "the grace period is over" not in running.log(), "it waited for nothing"
    finally:
        gone(mark)
    # Data loaders in another test's scripts use /dev/shm for a moment.
    until(lambda: shm_names() <= names, f"nothing is left in /dev/shm beside {names}")


# ------------------------------------------------------------------------------- training


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def write_script(folder: Path, name: str, source: str) -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return path


LOOP = """
    import torch
    from pipeswitch import job

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)
    ).to(job.device)
    optimizer = torch.optim.SGD(net.parameters(), 0.001)
    data = [torch.randn(256, 64) for _ in range(1_000_000 // 1000)]
    for epoch in job.epochs(100_000):
        for x in job.steps(data, model=net, optimizer=optimizer):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
"""Script that trains until it is cancelled."""


DIGESTED = """
    import hashlib, os, sys
    import torch
    from pipeswitch import job
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(), torch.nn.Linear(64, 8))
    net.to(job.device)
    optimizer = torch.optim.Adam(net.parameters(), 0.001)
    data = [torch.full((int(sys.argv[3]), 64), float(i % 7)) for i in range(100)]
    for epoch in job.epochs(int(sys.argv[2])):
        if os.path.exists(f"{sys.argv[1]}.enough-{epoch}"):
            break
        for x in job.steps(data, model=net, optimizer=optimizer):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    state = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    with open(sys.argv[1], "w") as file:
        file.write(f"{job.step} {hashlib.sha256(state).hexdigest()}")
"""
"""Script with arguments OUT EPOCHS ROWS: an epoch has 100 steps of ROWS rows. It ends before epoch
N if ``OUT.enough-N`` exists. It writes its last step and the digest of its parameters to OUT."""


_numbers = itertools.count()


def start_endless_job(checked: Checked, folder: Path, name: str = "") -> Task:
    """Submit an endless job, by default with a new name; wait until it trains."""
    name = name or f"endless-{next(_numbers)}"
    task = checked.client.train(write_script(folder, f"{name}.py", LOOP), name=name)
    until(lambda: task.status()["step"] > 0, f"{name} trains")
    return task


def finish(task: Task, deadline_s: float = 120.0) -> dict[str, Any]:
    """Wait for a job, which must succeed; return its last row. If it fails, show its log."""
    try:
        row = task.wait(deadline_s)
    except (TaskFailed, TimeoutError) as error:
        log = "".join(task.logs())[-4000:]
        raise AssertionError(f"{error!r}\n{task.status()}\n{log}") from None
    assert row["state"] == "done", row
    return row


def hurt(checked: Checked, task: Task, how: str) -> None:
    """Kill a job's process if ``how`` is "kill", else evict the job; spare all other jobs."""
    if how != "kill":
        task.pause()
        task.resume()
        return
    before = task.status()["restarts"]
    pid = until(lambda: checked.row(task.name)["pid"], "it has a worker")
    kill(pid)  # has no effect if the process has just exited
    until(
        lambda: task.status()["restarts"] > before or checked.row(task.name)["pid"] not in (0, pid),
        "its death is known",
    )


_PLAIN = """
import gc, json, os, runpy, sys
import torch, torch._dynamo  # seconds
torch.set_num_threads(1)
gc.freeze()  # no child takes its 190,000 objects down
for line in sys.stdin:
    printed, *sys.argv = json.loads(line)
    if os.fork() == 0:
        os.dup2(os.open(printed, os.O_WRONLY), 1)
        runpy.run_path(sys.argv[0], run_name="__main__")
        break  # an end like any other: with threads and exit hooks
    print(os.wait()[1], flush=True)
"""
_plain_lock = threading.Lock()


@functools.cache
def _plain() -> subprocess.Popen[str]:
    """Start a process that forks for each plain script, so that torch is imported only once."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PLAIN],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    return process


def run_plain(script: Path, *args: str) -> str:
    """Run a script without a server, with one compute thread; return its output."""
    with _plain_lock, tempfile.NamedTemporaryFile("r") as printed:
        process = _plain()
        process.stdin.write(json.dumps([printed.name, str(script), *args]) + "\n")
        process.stdin.flush()
        status, output = process.stdout.readline(), printed.read()
    assert status == "0\n", f"{script} ended with {status}: {output}"
    return output


# ------------------------------------------------------------------------------- models


def mlp(width: int, depth: int, seed: int) -> Any:
    """Return a float32 model ``[B, width] -> [B, width]`` with ``4 * depth * width ** 2`` bytes."""
    import torch

    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers).eval()


def eager(module: Any, *inputs: Any) -> Any:
    """Run the plain module with one compute thread, while no export runs; return its output."""
    import torch

    from pipeswitch.programs.compiler.export_lock import one_export_at_a_time

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with one_export_at_a_time(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return module(*inputs)
    finally:
        torch.set_num_threads(before)


def is_bit_equal(one: Any, other: Any) -> bool:
    """Return True if two tensors have equal dtypes, shapes and bytes."""
    import torch

    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    views = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*views)


@contextlib.contextmanager
def ray_of_its_own(**environment: str) -> Iterator[tuple[Path, list[psutil.Process]]]:
    """Yield a Ray cluster's folder, and a list for its processes; afterwards end and remove all.

    Only one of the tests' Rays runs at a time, because nodes of two Rays would have equal names. A
    test that uses Ray waits here for the previous one, so it needs a longer timeout."""
    with open(Path(tempfile.gettempdir(), "pipeswitch-tests-ray.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from _ray_of_its_own(environment)


def _ray_of_its_own(environment: dict[str, str]) -> Iterator[tuple[Path, list[psutil.Process]]]:
    before = dict(os.environ)  # because Ray adds variables
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a short path for Ray's sockets
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    os.environ |= {"RAY_TMPDIR": str(folder), "RAY_AUTH_TOKEN_PATH": str(token), **environment}
    started: list[psutil.Process] = []
    try:
        yield folder, started
        assert not [one for one in psutil.wait_procs(started, 100)[1] if one.is_running()]
    finally:
        for one in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)
