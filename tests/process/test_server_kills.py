"""``kill -9`` in the middle of a switch, signals, and the next server on the same state."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import process_tools as tools
import pytest
import torch

from pipeswitch.base.errors import DRAINING, PipeSwitchError, ServerUnavailable

SLOW_LINK = ("--link-gbps", "0.05")  # GB/s: copying 32 MB takes more than half a second
WIDE = 1024
WIDE_DEPTH = 8  # 32 MiB: one model fits at a time
X = torch.linspace(-1, 1, WIDE).reshape(1, WIDE)


def test_a_worker_killed_in_every_part_of_a_switch_costs_no_answer() -> None:
    expected = tools.eager(tools.mlp(WIDE, WIDE_DEPTH, 0), X)
    with tools.checked_server(
        arena="42MiB", environment=tools.ENVIRONMENT, args=SLOW_LINK
    ) as checked:
        register_both(checked)
        for delay_s in (0.0, 0.05, 0.15, 0.3, 0.45, 0.6):  # a copy takes about 0.65 s
            checked.client.infer("other", X)
            assert checked.row("wide")["state"] == "host"
            checked.wait_until_whole()
            future = checked.client.submit("wide", X)
            pid = tools.until(lambda: checked.row("wide")["pid"], "a worker has it")
            threading.Event().wait(delay_s)  # a random moment during the transfer, not a condition
            tools.kill(pid)
            assert tools.is_bit_equal(future.result(60)["y"], expected), f"{delay_s} s"
        checked.wait_until_whole()


def outcome(future: Future[Any]) -> type[PipeSwitchError] | None:
    """Wait for a request; return None if it succeeded, else the error's type."""
    try:
        future.result(40)
    except PipeSwitchError as error:
        return type(error)
    return None


# ------------------------------------------------------------------------------- the server


def busy_server(**options: Any) -> Any:
    return tools.checked_server(
        arena="42MiB", environment=tools.ENVIRONMENT, args=SLOW_LINK, settles=False, **options
    )


def register_both(checked: tools.Checked) -> None:
    for seed, name in enumerate(("wide", "other")):
        module = tools.mlp(WIDE, WIDE_DEPTH, seed)
        checked.client.register(name, module, example_inputs=(torch.zeros(1, WIDE),))


def submit_both(checked: tools.Checked, count: int) -> list[Future[Any]]:
    """Send requests to both models in turn, so that each needs a switch; wait for acceptance."""
    before = checked.stats()["inference"]["accepted"]
    futures = [checked.client.submit(("wide", "other")[i % 2], X) for i in range(count)]
    tools.until(
        lambda: checked.stats()["inference"]["accepted"] == before + count, "all were accepted"
    )
    return futures


GRPC = """
import sys
import grpc, tritonclient.grpc as triton
from pipeswitch.extras.grpc.protos import HEALTH
channel = grpc.insecure_channel(sys.argv[1])
read = HEALTH["HealthCheckResponse"].FromString
state = channel.unary_unary("/grpc.health.v1.Health/Check", None, read)(b"").status
client = triton.InferenceServerClient(sys.argv[1])
word = HEALTH["HealthCheckResponse"].ServingStatus.Name(state)
print(word, client.is_model_ready("wide"), client.is_server_live(), end="")
"""
INPUT = {"name": "x", "datatype": "FP32", "shape": [1, WIDE], "data": [0.0] * WIDE}
BODY = json.dumps({"inputs": [INPUT]}).encode()
HANGUP = signal.SIGHUP  # of a closed terminal


@contextlib.contextmanager
def hangups(how: signal.Handlers) -> Iterator[None]:
    """Handle SIGHUP like this in the block: a server inherits it, and a suite may run in nohup."""
    usual = signal.signal(HANGUP, how)
    try:
        yield
    finally:
        signal.signal(HANGUP, usual)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, HANGUP], ids=["SIGTERM", "ctrl-c", "closed-terminal"]
)
def test_a_signal_drains_what_was_accepted_is_answered_and_what_is_new_refused(
    number: signal.Signals, tmp_path: Path
) -> None:
    with hangups(signal.SIG_DFL), busy_server(http=True) as checked:
        register_both(checked)
        tools.start_endless_job(checked, tmp_path)
        futures = submit_both(checked, 8)
        needed = {checked.fork_server_pid(), checked.daemon_pid(), checked.gateway_pid()}
        for pid in tools.marked_pids(checked.mark) if number == HANGUP else {checked.pid}:
            tools.kill(pid, number)
        tools.until(lambda: is_draining(checked), "it drains")
        if number == HANGUP:  # several come: with SIGTERM, and when the terminal's shell exits
            for again in (signal.SIGTERM, HANGUP):
                tools.kill(checked.pid, again)
            assert needed <= tools.marked_pids(checked.mark), "a process left before the drain"
        with pytest.raises(ServerUnavailable):
            checked.client.infer("wide", X)
        check_not_ready(checked)
        for future in futures:
            assert future.result(40)["y"].shape == (1, WIDE)
        assert checked.running.process.wait(40) == 0
        tools.gone(checked.mark)


def test_a_server_under_nohup_ignores_its_closed_terminal() -> None:
    with (
        hangups(signal.SIG_IGN),
        tools.checked_server(settles=False, environment={"NO_KEEPER": "1"}) as checked,
    ):
        lines = Path(f"/proc/{checked.pid}/status").read_text().splitlines()
        ignored = next(int(line.split()[1], 16) for line in lines if line[:7] == "SigIgn:")
        assert ignored >> (HANGUP - 1) & 1


def test_a_second_signal_ends_it_at_once_and_answers_what_was_left() -> None:
    with busy_server() as checked:
        register_both(checked)
        futures = submit_both(checked, 12)  # 8 s of transfers
        tools.kill(checked.pid, signal.SIGTERM)
        tools.until(lambda: is_draining(checked), "it drains")
        tools.kill(checked.pid, signal.SIGTERM)
        answers = [outcome(future) for future in futures]
        assert ServerUnavailable in answers  # not all of them were computed
        assert set(answers) <= {ServerUnavailable, None}
        assert checked.running.process.wait(60) == 0
        tools.gone(checked.mark)


def check_not_ready(checked: tools.Checked) -> None:
    """Check that each probe of a draining server says no, and that it is live all the same."""
    for deep in (False, True):
        answer = checked.client.ping(deep=deep)
        assert (answer["ready"], answer["why"]) == (False, DRAINING)
    assert not checked.client.stats()["ready"]
    url = f"http://{checked.running.http_address}"
    for path, body, status in (
        ("/v2/health/live", None, 200),
        ("/v2/health/ready", None, 503),
        ("/health", None, 503),
        ("/v2/models/wide/ready", None, 503),
        ("/v2/models/wide/infer", BODY, 503),
    ):
        try:
            answer = urllib.request.urlopen(url + path, body)
        except urllib.error.HTTPError as refused:
            answer = refused
        answer.close()
        assert (path, answer.status) == (path, status)
    done = subprocess.run(
        [sys.executable, "-c", GRPC, checked.running.grpc_address], capture_output=True, text=True
    )
    assert done.stdout == "NOT_SERVING False True", done.stderr


def is_draining(checked: tools.Checked) -> bool:
    stats = checked.client.stats()
    tools.check_identity(stats)
    return bool(stats["draining"])


@pytest.mark.parametrize("are_stopped", [False, True])
def test_children_of_a_killed_controller_leave(are_stopped: bool, tmp_path: Path) -> None:
    names = tools.shm_names()
    with busy_server(status=-signal.SIGKILL) as checked:
        register_both(checked)
        tools.start_endless_job(checked, tmp_path)
        futures = submit_both(checked, 4)
        children = tools.marked_pids(checked.mark) - {checked.pid}
        assert len(children) >= 5  # fork server, daemon, workers
        if are_stopped:  # the controller would kill stopped children, but dies first
            for pid in children:
                tools.kill(pid, signal.SIGSTOP)
        tools.kill(checked.pid)
        checked.running.process.wait(30)
        tools.gone(checked.mark)
        tools.until(lambda: tools.shm_names() <= names, "nothing is left in /dev/shm")
        checked.client.close()
        for future in futures:
            assert future.done()


def test_a_restarted_server_has_its_models_and_resumes_its_jobs(tmp_path: Path) -> None:
    script = tools.write_script(tmp_path, "resumes.py", tools.DIGESTED)
    tools.run_plain(script, str(tmp_path / "plain"), "12", "512")
    state = tmp_path / "state"
    module = tools.mlp(64, 2, 7)
    x = torch.ones(1, 64)
    options: dict[str, Any] = {
        "arena": "42MiB",
        "state_dir": state,
        "environment": tools.ENVIRONMENT,
    }

    with tools.checked_server(settles=False, status=-signal.SIGKILL, **options) as first:
        first.client.register("kept", module, example_inputs=(x,))
        first.client.register("dropped", tools.mlp(16, 1, 8), example_inputs=(torch.ones(1, 16),))
        first.client.unregister("dropped")
        args = [str(tmp_path / "served"), "12", "512"]
        task = first.client.train(script, name="resumes", args=args)
        tools.until(lambda: task.status()["step"] > 20, "it trains")
        paused = task.pause()  # a paused job is evicted and written to disk at once
        persisted = paused["committed_step"]
        tools.until(lambda: task.status()["persisted_step"] == persisted > 0, "it is on disk")
        task.resume()
        tools.until(lambda: task.status()["step"] > persisted, "it goes on")
        tools.kill(first.pid)
        first.running.process.wait(30)

    with tools.checked_server(**options) as second:
        tools.until(
            lambda: [m["state"] for m in second.client.models()] == ["ready"], "the model is back"
        )
        assert second.client.models()[0]["name"] == "kept"
        assert tools.is_bit_equal(second.client.infer("kept", x)["y"], tools.eager(module, x))
        task = second.client.task("resumes")
        assert task.status()["committed_step"] >= persisted
        assert tools.finish(task)["step"] == 1200
    assert (tmp_path / "served").read_text() == (tmp_path / "plain").read_text()
