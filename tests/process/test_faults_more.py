"""Chaos under mixed load, stopped processes, full disks, damaged state, hostile peers."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import selectors
import shutil
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from process_tools import (
    Checked,
    check_identity,
    checked_server,
    eager,
    finish,
    is_bit_equal,
    kill,
    mlp,
    run_plain,
    start_endless_job,
    stop,
    until,
    write_script,
)

from pipeswitch.controller.journal import FIELDS, FILE_NAME
from pipeswitch.controller.processes import Child, Processes
from pipeswitch.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    ModelNotFound,
    ModelQuarantined,
    PipeSwitchError,
    QueueFull,
    RegistrationRefused,
    ServerUnavailable,
    WorkerLost,
)
from pipeswitch.ipc.channel import channel_pair
from pipeswitch.ipc.messages import Exit
from pipeswitch.wire.frames import MAGIC
from pipeswitch.wire.sockets import Caps, make_dealer

SEED = 1121
ENVIRONMENT = {
    "PIPESWITCH_SCHEDULER__COMMIT_EVERY": "50ms",
    "PIPESWITCH_WORKERS__RESTART_BACKOFF": "20ms",
}

TRAIN = """
    import hashlib, sys
    import torch
    from pipeswitch import job

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(64, 64)
    ).to(job.device)
    optimizer = torch.optim.Adam(net.parameters(), 0.001)
    data = [torch.randn(64, 64) for _ in range(50)]
    for epoch in job.epochs(int(sys.argv[1])):
        for x in job.steps(data, model=net, optimizer=optimizer):
            net(x + 0.1 * torch.randn_like(x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    total = hashlib.sha256()
    for value in net.state_dict().values():
        total.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    total.update(torch.get_rng_state().numpy().tobytes())
    with open(sys.argv[2], "w") as file:
        file.write(total.hexdigest())
"""

WIDTH = 512
MAY_FAIL = (WorkerLost, DeadlineExceeded, Cancelled, CancelledError, QueueFull)


class Chaos:
    """Kills rows of ``ps`` at random until it is told to stop; one thread."""

    def __init__(self, checked: Checked, generator: random.Random) -> None:
        self.checked = checked
        self.kills: Counter[str] = Counter()
        self.answers_at_daemon_kill = -1
        self.answered = 0  # by the load
        self._random = generator
        self._stop = threading.Event()
        self._client = checked.running.client()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Chaos:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stop.wait(self._random.uniform(0.05, 1.0)):
            for _ in range(self._random.choice((1, 1, 1, 2, 3))):
                rows = [r for r in self._client.ps() if r["pid"] and r["state"] != "dead"]
                workers = [r for r in rows if r["kind"] == "worker"]
                draw = self._random.random()
                if draw < 0.08:
                    try:
                        pid = self.checked.fork_server_pid()
                    except AssertionError:
                        continue
                    # Three deaths before it is ready would rightly end the server.
                    if f"fork_server=ready pid={pid} " in self.checked.running.log():
                        self.kills["fork server"] += kill(pid)
                elif draw < 0.2 and self.answered > self.answers_at_daemon_kill + 3:
                    daemon = [r["pid"] for r in rows if r["kind"] == "daemon"]
                    if daemon:  # five deaths without one answer would rightly end the server
                        self.answers_at_daemon_kill = self.answered
                        self.kills["daemon"] += kill(daemon[0])
                elif workers:
                    row = self._random.choice(workers)
                    self.kills[f"worker {row['state']}"] += kill(row["pid"])


def log_is_clean(checked: Checked) -> None:
    log = checked.running.log()
    for word in ("InvalidTransition", "AssertionError", "scheduler=dead", "CRITICAL"):
        at = log.find(word)
        assert at < 0, log[max(0, at - 3000) : at + 500]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "seconds",
    [pytest.param(8.0, marks=pytest.mark.slow), pytest.param(90.0, marks=pytest.mark.soak)],
)
def test_random_kills_of_every_process_lose_and_mix_up_nothing(
    seconds: float, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    generator = random.Random(SEED)
    script = write_script(tmp_path, "train.py", TRAIN)
    epochs = str(int(seconds * 2))
    run_plain(script, epochs, str(tmp_path / "plain"))
    modules = {name: mlp(WIDTH, 8, seed) for seed, name in enumerate("abc")}  # 8 MiB each
    zero = torch.zeros(1, WIDTH)
    outcomes: Counter[str] = Counter()
    with checked_server(arena="24MiB", environment=ENVIRONMENT) as checked:
        client = checked.client
        for name, module in modules.items():
            client.register(name, module, example_inputs=(zero,))
        task = client.train(script, args=[epochs, str(tmp_path / "served")], name="exact")
        ends_at = time.monotonic() + seconds
        with Chaos(checked, generator) as chaos:
            while time.monotonic() < ends_at:
                sent: list[tuple[str, torch.Tensor, Future[Any], bool]] = []
                for _ in range(generator.randrange(1, 9)):
                    name = generator.choice("abc")
                    x = torch.full((generator.randrange(1, 4), WIDTH), generator.random())
                    deadline = generator.choice((None, None, None, 30.0, 2000.0))
                    future = client.submit(name, x, deadline_ms=deadline)
                    may_fail = deadline is not None
                    if generator.random() < 0.1:
                        future.cancel()
                        may_fail = True
                    sent.append((name, x, future, may_fail))
                if generator.random() < 0.1:
                    outcomes[come_and_go(checked, f"extra-{generator.randrange(2)}")] += 1
                for name, x, future, may_fail in sent:
                    try:
                        answer = future.result(60)["y"]
                    except ModelQuarantined:
                        client.load(name)  # pardons
                        outcomes["quarantined"] += 1
                    except MAY_FAIL as error:
                        if not may_fail and not isinstance(error, WorkerLost):
                            raise
                        outcomes[type(error).__name__] += 1
                    else:
                        assert is_bit_equal(answer, eager(modules[name], x)), name
                        outcomes["ok"] += 1
                        chaos.answered += 1
                check_identity(client.stats())
        for name, module in modules.items():
            row = next(r for r in client.models() if r["name"] == name)
            if row["state"] == "quarantined":
                client.load(name)
            x = torch.full((1, WIDTH), 0.25)
            answer = client.submit(name, x).result(20)["y"]
            assert is_bit_equal(answer, eager(module, x))
        row = finish(task, 90.0)
        record_property("kills", dict(chaos.kills))
        record_property("outcomes", {**outcomes, "job restarts": row["restarts"]})
        assert (tmp_path / "served").read_text() == (tmp_path / "plain").read_text()
        checked.wait_until_whole()
        log_is_clean(checked)
    assert sum(chaos.kills.values()) >= seconds
    assert outcomes["ok"] > seconds


def come_and_go(checked: Checked, name: str) -> str:
    """Register a small model and take it back; how that ended."""
    zero = torch.zeros(1, 16)
    try:
        checked.client.register(name, mlp(16, 1, 9), example_inputs=(zero,))
        checked.client.unregister(name)
    except (RegistrationRefused, AlreadyExists, ModelNotFound) as error:
        return f"register: {type(error).__name__}"
    return "registered and gone"


def test_a_channel_that_was_closed_by_its_childs_exit_is_not_read_again(tmp_path: Path) -> None:
    """One look of the selector finds both; the exit is handled first."""
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
    assert heard == [Exit()]  # what it still said
    assert exits == [-9]


# ------------------------------------------------------------------------------- stopped, killed

LONG, LONG_ROWS = 1024, 4096  # 8 layers: about a second on one core


@pytest.fixture(scope="module")
def running() -> Iterator[Checked]:
    with checked_server(arena="64MiB", environment=ENVIRONMENT) as checked:
        checked.client.register("small", mlp(64, 2, 1), example_inputs=(torch.zeros(1, 64),))
        example = (torch.zeros(2, LONG),)
        checked.client.register("long", mlp(LONG, 8, 2), example_inputs=example, max_batch=8192)
        yield checked
        log_is_clean(checked)


SMALL = torch.linspace(-1, 1, 64).reshape(1, 64)


def answers(checked: Checked) -> None:
    answer = checked.client.submit("small", SMALL).result(20)["y"]
    assert is_bit_equal(answer, eager(mlp(64, 2, 1), SMALL))


def is_replaced(checked: Checked, pid: int) -> None:
    until(lambda: not Path("/proc", str(pid)).exists(), f"{pid} was killed")
    checked.wait_until_whole()
    answers(checked)
    checked.settle()


def computing_pid(checked: Checked) -> int:
    row = until(
        lambda: next(
            (r for r in checked.rows("model") if r["name"] == "long" and r["state"] == "active"),
            None,
        ),
        "it computes",
    )
    return int(row["pid"])


def test_a_worker_stopped_while_it_computes_is_replaced_and_its_request_answered(
    running: Checked,
) -> None:
    x = torch.ones(LONG_ROWS, LONG)
    future = running.client.submit("long", x)
    pid = computing_pid(running)
    stop(pid)
    assert future.result(60)["y"].shape == x.shape
    is_replaced(running, pid)


def test_a_stopped_standby_is_replaced(running: Checked) -> None:
    pid = next(r["pid"] for r in running.rows("worker") if r["state"] == "standby")
    stop(pid)
    answers(running)
    is_replaced(running, pid)


def test_a_worker_that_goes_on_soon_is_left_alone(running: Checked) -> None:
    # No request while it stands still: the server may hand it to the very worker.
    pid = next(r["pid"] for r in running.rows("worker") if r["state"] == "standby")
    stop(pid)
    kill(pid, signal.SIGCONT)
    answers(running)
    assert pid in running.worker_pids().values()


def test_a_stopped_memory_daemon_is_replaced(running: Checked) -> None:
    pid = running.daemon_pid()
    stop(pid)
    is_replaced(running, pid)


def test_a_stopped_fork_server_is_replaced_and_forks_again(running: Checked) -> None:
    pid = running.fork_server_pid()
    stop(pid)
    is_replaced(running, pid)
    worker = running.worker_pids()[0]
    kill(worker)
    until(lambda: running.worker_pids().get(0, worker) != worker, "a new one was forked")


def test_a_worker_stopped_while_it_trains_blocks_nobody_and_the_job_resumes(
    running: Checked, tmp_path: Path
) -> None:
    task = start_endless_job(running, tmp_path)
    until(lambda: task.status()["committed_step"] > 0, "it commits")
    pid = next(int(r["pid"]) for r in running.client.ps() if r["name"] == task.name)
    stop(pid)
    answers(running)
    until(lambda: not Path("/proc", str(pid)).exists(), "it was killed")
    committed = task.status()["committed_step"]
    until(lambda: task.status()["committed_step"] > committed, "the job goes on")


def test_three_deaths_of_the_daemon_in_a_row_lose_no_request(
    running: Checked, tmp_path: Path
) -> None:
    task = start_endless_job(running, tmp_path)  # it commits all the time
    futures = [running.client.submit("long", torch.ones(64, LONG)) for _ in range(8)]
    for _ in range(3):
        pid = until(lambda: running.daemon_pid(), "a daemon")
        kill(pid)
        until(lambda pid=pid: running.daemon_pid() not in (0, pid), "the next one")
    for future in futures:
        assert future.result(60)["y"].shape == (64, LONG)
    committed = task.status()["committed_step"]
    until(lambda: task.status()["committed_step"] > committed, "the job goes on")


def test_a_killed_builder_is_a_refusal_and_leaves_nothing(running: Checked) -> None:
    def named(name: str) -> set[int]:
        found = set()
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    if Path("/proc", entry, "comm").read_text().strip() == name:
                        found.add(int(entry))
        return found & set(marked(running))

    failures: list[PipeSwitchError] = []

    def register() -> None:
        try:
            running.client.register("big", mlp(2048, 4, 3), example_inputs=(torch.zeros(1, 2048),))
        except PipeSwitchError as error:
            failures.append(error)

    thread = threading.Thread(target=register)
    thread.start()
    kill(until(lambda: named("pipeswitch-bld"), "a builder").pop())
    thread.join(30)
    assert [type(error) for error in failures] == [RegistrationRefused]
    until(
        lambda: not list((running.running.state_dir / "models").glob(".build-*")),
        "its folder is gone",
    )
    answers(running)


def marked(checked: Checked) -> set[int]:
    from process_tools import marked_pids

    return marked_pids(checked.mark)


# ------------------------------------------------------------------------------- disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """4 MiB, mounted for the test."""
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
    """Until not one more byte fits."""
    path = folder / "filler"
    with open(path, "ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return path


def test_a_full_disk_refuses_what_cannot_be_kept_and_serves_on(
    small_disk: Path, tmp_path: Path
) -> None:
    with checked_server(state_dir=small_disk / "state", environment=ENVIRONMENT) as checked:
        client = checked.client
        client.register("small", mlp(64, 2, 1), example_inputs=(torch.zeros(1, 64),))
        # Waits for its turn to write its journal entry while the disk fills up.
        filler = fill(small_disk)
        with pytest.raises(PipeSwitchError) as refused:
            client.register("other", mlp(64, 2, 2), example_inputs=(torch.zeros(1, 64),))
        assert "No space left" in str(refused.value), refused.value
        fill(small_disk)  # what the refused upload made free: an older one went
        script = write_script(tmp_path, "hello.py", "from pipeswitch import job\n")
        args = ["x" * 200] * 30  # more than what is left of the journal's last page
        with pytest.raises(ServerUnavailable, match="No space left"):
            client.train(script, name="hello", args=args)
        answers(checked)
        client.unload("small")
        assert {row["name"] for row in client.models()} == {"small"}
        filler.unlink()
        client.register("other", mlp(64, 2, 2), example_inputs=(torch.zeros(1, 64),))
        finish(client.train(script, name="hello"))
        log_is_clean(checked)


def test_a_start_on_a_read_only_disk_is_one_line(small_disk: Path) -> None:
    state = small_disk / "state"
    for folder in ("models", "commits", "logs"):
        (state / folder).mkdir(mode=0o700, parents=True)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    words = r"(?i)status 2 .*\n.*read-only file system"
    with (
        pytest.raises(RuntimeError, match=words) as refused,
        checked_server(state_dir=state, settles=False),
    ):
        pass
    assert "Traceback" not in str(refused.value)


SOUND = {bytes: b"spec", str: "s", int: 1, bool: 0, list: "[]"}
"""What each kind of column of the journal may hold."""


def test_damage_to_the_state_directory_costs_what_is_damaged_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    modules = {name: mlp(64, 2, seed) for seed, name in enumerate(("a", "b", "c"), 1)}
    digests = {}
    with checked_server(state_dir=state, environment=ENVIRONMENT) as checked:
        for name, module in modules.items():
            checked.client.register(name, module, example_inputs=(SMALL,))
            digests[name] = checked.client.show(name)["digest"]
    deep = "[" * 100_000
    garbage = [
        ("model", "half", dict.fromkeys(FIELDS["model"])),
        ("model", "bytes", {"spec": "text", "digest": 2, "priority": "high", "tenant": 3}),
        ("model", "../../etc", {}), ("model", b"\xff\xfe\x00", {}),
        ("job", "j", {"entry": 3, "args": "[4", "priority": "x", "tenant": 5, "share": 6}),
        ("job", "deep", {"args": deep, "tenant": None}),
    ]  # fmt: skip
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
    data[-100] ^= 0xFF
    weights.write_bytes(data)
    shutil.rmtree(state / "models" / digests["c"])
    shutil.rmtree(state / "uploads", ignore_errors=True)
    with checked_server(state_dir=state, environment=ENVIRONMENT) as checked:
        until(lambda: "a" in {row["name"] for row in checked.client.models()}, "it is back")
        answer = checked.client.submit("a", SMALL).result(20)["y"]
        assert is_bit_equal(answer, eager(modules["a"], SMALL))
        until(
            lambda: all(row["state"] != "building" for row in checked.client.models()), "all tried"
        )
        for name in ("b", "c"):  # dropped, or built again: never wrong
            with contextlib.suppress(ModelNotFound, RegistrationRefused):
                answer = checked.client.submit(name, SMALL).result(20)["y"]
                assert is_bit_equal(answer, eager(modules[name], SMALL))
        log_is_clean(checked)


# ------------------------------------------------------------------------------- hostile peers


def rss_bytes(pid: int) -> int:
    return int(Path("/proc", str(pid), "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_two_thousand_idle_connections_disturb_nobody(running: Checked) -> None:
    """The usual soft limit of 1024 open files must not be what stops the server from forking."""
    host, port = running.running.tcp_address.removeprefix("tcp://").split(":")
    answers(running)
    before = rss_bytes(running.pid)
    with contextlib.ExitStack() as stack:
        for _ in range(2000):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(10)
            with contextlib.suppress(OSError):
                sock.connect((host, int(port)))
        answers(running)
        worker = running.worker_pids()[0]
        kill(worker)
        until(lambda: running.worker_pids().get(0, worker) != worker, "a new one was forked")
        answers(running)
        assert rss_bytes(running.pid) - before < 256 << 20
    running.wait_until_whole()


def test_a_server_that_is_out_of_descriptors_recovers() -> None:
    with checked_server(arena="64MiB", environment=ENVIRONMENT) as checked:
        checked.client.register("small", mlp(64, 2, 1), example_inputs=(torch.zeros(1, 64),))
        limit = resource.prlimit(checked.pid, resource.RLIMIT_NOFILE)
        in_use = len(os.listdir(f"/proc/{checked.pid}/fd"))
        resource.prlimit(checked.pid, resource.RLIMIT_NOFILE, (in_use + 1, limit[1]))
        worker = checked.worker_pids()[0]
        kill(worker)
        until(lambda: "not forked" in checked.running.log(), "it ran out")
        answers(checked)
        resource.prlimit(checked.pid, resource.RLIMIT_NOFILE, limit)
        checked.wait_until_whole()
        answers(checked)
        log_is_clean(checked)


@contextlib.contextmanager
def stranger(checked: Checked) -> Iterator[Callable[..., dict[str, Any]]]:
    """A peer that speaks the protocol by hand; call it with a header's fields and frames."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sock = make_dealer(context, Caps(max_message_bytes=64 << 20))
    sock.connect(checked.running.tcp_address)
    session = ""
    numbers = iter(range(1 << 30))

    def ask(*frames: bytes, **fields: Any) -> dict[str, Any]:
        header = {"v": 1, "id": str(next(numbers)), "session": session, **fields}
        sock.send_multipart([MAGIC, msgspec.msgpack.encode(header), *frames])
        assert sock.poll(20_000), fields
        answer: dict[str, Any] = msgspec.msgpack.decode(sock.recv_multipart()[1])
        return answer

    try:
        session = ask(op="hello")["session"]
        yield ask
    finally:
        sock.close(0)
        context.term()


SHAPES = [[-1, 64], [1 << 62, 1 << 62], [0, 64], [1] * 9, [2**63 - 1], [1, 63], [], [1, 64, 1]]


def test_hostile_requests_get_one_typed_error_each(running: Checked) -> None:
    before = rss_bytes(running.pid)
    with stranger(running) as ask:
        for shape in SHAPES:
            tensor = {"name": "x", "dtype": "float32", "shape": shape, "frame": 0}
            assert ask(bytes(256), op="infer", model="small", inputs=[tensor])["error"]["type"]
        tensor = {"name": "x", "dtype": "float32", "shape": [1, 64], "frame": 0}
        for frames in ((), (b"",), (bytes(255),), (bytes(256), bytes(256))):
            assert ask(*frames, op="infer", model="small", inputs=[tensor])["error"]["type"]
        for name in ("../small", "small/../small", "\0", "a" * 65, "..", "/etc/passwd", "\ud7ff"):
            assert ask(op="show", model=name)["error"]["type"]
            assert ask(op="job", body={"name": name, "action": "show"})["error"]["type"]
            assert ask(op="register", model=name, body={"source": "random"})["error"]["type"]
        for body in ({}, {"digest": "../x", "size_bytes": 1},
                     {"digest": "0" * 64, "size_bytes": -1},
                     {"digest": "0" * 64, "size_bytes": 1 << 60},
                     {"digest": "0" * 64, "size_bytes": 4, "offset_bytes": 1 << 60},
                     {"digest": "0" * 64, "size_bytes": 4}):  # fmt: skip
            put = [{"name": "chunk", "dtype": "uint8", "shape": [4], "frame": 0}]
            assert ask(b"abcd", op="put", inputs=put, body=body)["error"]["type"], body
        assert ask(bytes(8), op="put", body={"size_bytes": 1})["error"]["type"]
        assert ask(op="ping", body={"deep": 1}, id="x" * 64)["status"]
        for number in range(100):  # unfinished uploads: each holds a descriptor
            body = {"digest": f"{number:064x}", "size_bytes": 2}
            last = ask(b"a", op="put", body=body)
        assert last["error"]["type"] == "QueueFull", last
    answers(running)
    uploads = running.running.state_dir / "uploads"
    until(lambda: not list(uploads.glob(".part-*")), "unfinished uploads are gone")
    assert rss_bytes(running.pid) - before < 64 << 20
