"""Training on a real server: a script's output, errors and requests, and job control."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import process_tools as tools
import pytest
import torch

from pipeswitch.base.errors import InvalidInput, TaskFailed

ENVIRONMENT = {
    "PIPESWITCH_SCHEDULER__COMMIT_EVERY": "50ms",  # often, so that killed jobs make progress
    "PIPESWITCH_WORKERS__RESTART_BACKOFF": "20ms",
    "PIPESWITCH_SCHEDULER__EVICT_GRACE": "8s",  # after this, a script that still runs is killed
}


@pytest.fixture(scope="module")
def running() -> Iterator[tools.Checked]:
    with tools.checked_server(arena="96MiB", environment=ENVIRONMENT) as checked:
        checked.client.register("small", tools.mlp(64, 3, 1), example_inputs=(torch.zeros(1, 64),))
        yield checked


@pytest.fixture(autouse=True)
def _settled(running: tools.Checked) -> Iterator[None]:
    yield
    running.settle()
    running.wait_until_whole()


def test_a_paused_job_makes_no_step_and_a_resumed_one_goes_on(
    running: tools.Checked, tmp_path: Path
) -> None:
    task = tools.start_endless_job(running, tmp_path, "held")
    paused = task.pause()
    assert paused["state"] == "paused"
    assert paused["worker"] is None
    tools.until(lambda: running.count("arena_leases") == 0, "its memory is free")
    for _ in range(5):
        running.client.infer("small", torch.ones(1, 64))
    assert task.status()["step"] == paused["step"]
    task.resume()
    tools.until(lambda: task.status()["step"] > paused["step"], "it goes on")
    assert task.cancel()["state"] == "cancelled"
    with pytest.raises(InvalidInput):
        task.pause()
    assert task.wait(60)["state"] == "cancelled"


def test_what_a_script_prints_is_in_its_log_even_when_followed(
    running: tools.Checked, tmp_path: Path
) -> None:
    script = tools.write_script(
        tmp_path,
        "talks.py",
        """
        import sys
        from pipeswitch import job
        for epoch in job.epochs(3):
            print("epoch", epoch, flush=True)
        print("to stderr", file=sys.stderr)
        """,
    )
    task = running.client.train(script)
    text = "".join(task.logs(follow=True))
    assert task.wait(60)["state"] == "done"
    assert [line for line in text.splitlines() if line.startswith("epoch")] == [
        "epoch 0",
        "epoch 1",
        "epoch 2",
    ]
    assert "to stderr" in text


def test_a_script_that_raises_fails_with_its_own_type_and_text(
    running: tools.Checked, tmp_path: Path
) -> None:
    script = tools.write_script(
        tmp_path,
        "raises.py",
        """
        class OutOfCoffee(Exception):
            pass
        raise OutOfCoffee("the pot is empty")
        """,
    )
    task = running.client.train(script)
    with pytest.raises(TaskFailed, match="the pot is empty") as caught:
        task.wait(60)
    assert caught.value.data["type"].endswith("OutOfCoffee")
    assert caught.value.data["text"] == "the pot is empty"
    assert task.status()["state"] == "failed"
    assert "Traceback" in "".join(task.logs())  # but not in the error
    assert "Traceback" not in str(caught.value)


def test_a_script_that_leaves_with_a_status_says_so(running: tools.Checked, tmp_path: Path) -> None:
    fine = running.client.train(tools.write_script(tmp_path, "fine.py", "raise SystemExit(0)"))
    assert fine.wait(60)["state"] == "done"
    bad = running.client.train(tools.write_script(tmp_path, "bad.py", "raise SystemExit(3)"))
    with pytest.raises(TaskFailed, match="SystemExit"):
        bad.wait(60)


def test_a_script_that_swallows_its_preemption_is_killed_and_others_go_on(
    running: tools.Checked, tmp_path: Path
) -> None:
    script = tools.write_script(
        tmp_path,
        "stubborn.py",
        """
        import torch
        from pipeswitch import job
        net = torch.nn.Linear(8, 8).to(job.device)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        while True:
            try:
                for x in job.steps([torch.ones(4, 8)] * 10_000, model=net, optimizer=optimizer):
                    net(x).sum().backward(); optimizer.step(); optimizer.zero_grad()
            except BaseException:
                pass
        """,
    )
    task = running.client.train(script)
    tools.until(lambda: task.status()["step"] > 0, "it trains")
    running.client.infer("small", torch.ones(1, 64))  # the job stops although it catches all errors
    row = task.cancel()
    assert row["state"] == "cancelled"
    assert running.client.infer("small", torch.ones(1, 64))["y"].shape == (1, 64)


def test_a_script_asks_its_own_server(running: tools.Checked, tmp_path: Path) -> None:
    script = tools.write_script(
        tmp_path,
        "asks.py",
        """
        import sys
        import pipeswitch
        with pipeswitch.Client() as client:
            names = sorted(row["name"] for row in client.models())
        with open(sys.argv[1], "w") as file:
            file.write(" ".join(names))
        """,
    )
    assert running.client.train(script, args=[str(tmp_path / "said")]).wait(60)["state"] == "done"
    assert (tmp_path / "said").read_text() == "small"


def test_a_loop_outside_of_epochs_says_how_much_is_left(
    running: tools.Checked, tmp_path: Path
) -> None:
    script = tools.write_script(
        tmp_path,
        "plain.py",
        """
        import torch
        from pipeswitch import job

        net = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for epoch in job.epochs(2):
            pass
        for x in job.steps([torch.ones(1, 4)] * 8, model=net, optimizer=optimizer):
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    row = running.client.train(script).wait(60)
    assert (row["state"], row["step"], row["steps_left"]) == ("done", 8, 0)
