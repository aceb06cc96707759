"""Training on a real server: suspended, evicted and killed, it ends like one left alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from process_tools import (
    Checked,
    checked_server,
    finish,
    kill,
    mlp,
    run_plain,
    start_endless_job,
    until,
    write_script,
)

from pipeswitch.errors import InvalidInput, TaskFailed

SEED = 1121
ENVIRONMENT = {
    "PIPESWITCH_SCHEDULER__COMMIT_EVERY": "50ms",  # kills must not stop all progress
    "PIPESWITCH_WORKERS__RESTART_BACKOFF": "20ms",
    "PIPESWITCH_SCHEDULER__EVICT_GRACE": "8s",  # a script that will not go is killed then
}

EXACT = """
    import hashlib, os, sys
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from pipeswitch import job

    accumulate, epochs, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
        torch.nn.Dropout(0.3), torch.nn.Flatten(), torch.nn.Linear(16 * 14 * 14, 32),
        torch.nn.ReLU(), torch.nn.Linear(32, 4),
    ).to(job.device)
    optimizer = torch.optim.Adam(net.parameters(), 0.001)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    images = torch.randn(160, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(images, torch.arange(160) % 4)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    criterion = torch.nn.CrossEntropyLoss()
    progress = os.open(out + ".step", os.O_RDWR | os.O_CREAT)
    for epoch in job.epochs(epochs):
        for x, y in job.steps(loader, model=net, optimizer=optimizer, scheduler=schedule):
            os.pwrite(progress, b"%6d" % job.step, 0)  # finer than the job's own reports
            x = x + 0.1 * torch.randn_like(x)
            (criterion(net(x), y) / accumulate).backward()
            if (job.step_in_epoch + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()

    total = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            total.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in value.items():
                total.update(repr(key).encode())
                add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            total.update(repr(value).encode())

    add([dict(net.state_dict()), optimizer.state_dict(), schedule.state_dict(), job.step])
    add(torch.get_rng_state())
    with open(out, "w") as file:
        file.write(total.hexdigest())
"""


@pytest.fixture(scope="module")
def running() -> Iterator[Checked]:
    with checked_server(arena="96MiB", environment=ENVIRONMENT) as checked:
        client = checked.client
        client.register("small", mlp(64, 3, 1), example_inputs=(torch.zeros(1, 64),))
        # all of the 94 MiB there are: a job's slice must leave the arena for it
        client.register("huge", mlp(2470, 4, 2), example_inputs=(torch.zeros(1, 2470),))
        yield checked


@pytest.fixture(autouse=True)
def _settled(running: Checked) -> Iterator[None]:
    yield
    running.settle()
    running.wait_until_whole()


class Disturber:
    """Does one of the bad things to a job, at steps drawn beforehand."""

    def __init__(self, running: Checked, name: str) -> None:
        self.running = running
        self.task = running.client.task(name)
        self.killed: set[int] = set()

    def infer(self) -> None:
        self.running.client.infer("small", torch.ones(1, 64))

    def press(self) -> None:
        self.running.client.infer("huge", torch.ones(1, 2470))

    def pause(self) -> None:
        self.task.pause()
        self.task.resume()

    def kill(self) -> None:
        def new_pid() -> int:
            pid = int(self.running.row(self.task.name)["pid"])
            return 0 if pid in self.killed else pid

        pid = until(new_pid, "the job is on a worker that lives")
        assert kill(pid)
        self.killed.add(pid)


@pytest.mark.timeout(200)
def test_training_that_was_suspended_evicted_and_killed_ends_bit_equal(
    running: Checked, tmp_path: Path
) -> None:
    epochs, accumulate = 60, 3
    script = write_script(tmp_path, "exact.py", EXACT)
    run_plain(script, str(accumulate), str(epochs), str(tmp_path / "plain"))

    generator = random.Random(SEED + accumulate)
    name = f"exact-{accumulate}"
    arguments = [str(accumulate), str(epochs), str(tmp_path / "served")]
    task = running.client.train(script, name=name, args=arguments)
    disturber = Disturber(running, name)
    deeds = [disturber.infer] * 10 + [disturber.press] * 5 + [disturber.pause] * 4
    deeds += [disturber.kill] * 8
    generator.shuffle(deeds)
    total = epochs * 10
    steps = sorted(generator.sample(range(2, int(total * 0.85)), len(deeds)))
    history = []

    def reached() -> int:
        place = tmp_path / "served.step"
        return int(place.read_bytes() or 0) if place.exists() else 0

    for deed, step in zip(deeds, steps, strict=True):
        until(lambda step=step: reached() >= step, f"step {step} is reached")
        threading.Event().wait(generator.random() * 0.01)  # anywhere in a step
        deed()
        history.append((deed.__name__, step))
    row = finish(task)
    assert row["steps_left"] == 0

    served, plain = ((tmp_path / n).read_text() for n in ("served", "plain"))
    assert served == plain, f"seed {SEED + accumulate}: {history}"
    assert row["step"] == total
    assert len(disturber.killed) == row["restarts"] == 8, (history, row)
    assert row["evictions"] >= 9
    assert row["suspensions"] > 0
    assert row["committed_step"] <= total


def test_a_paused_job_makes_no_step_and_a_resumed_one_goes_on(
    running: Checked, tmp_path: Path
) -> None:
    task = start_endless_job(running, tmp_path, "held")
    paused = task.pause()
    assert paused["state"] == "paused"
    assert paused["worker"] is None
    until(lambda: running.count("arena_leases") == 0, "its memory is free")
    for _ in range(5):
        running.client.infer("small", torch.ones(1, 64))
    assert task.status()["step"] == paused["step"]
    task.resume()
    until(lambda: task.status()["step"] > paused["step"], "it goes on")
    assert task.cancel()["state"] == "cancelled"
    with pytest.raises(InvalidInput, match="is over"):
        task.pause()
    assert task.wait(10)["state"] == "cancelled"


def test_what_a_script_prints_is_in_its_log_even_when_followed(
    running: Checked, tmp_path: Path
) -> None:
    script = write_script(
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
    assert task.wait(10)["state"] == "done"
    assert [line for line in text.splitlines() if line.startswith("epoch")] == [
        "epoch 0",
        "epoch 1",
        "epoch 2",
    ]
    assert "to stderr" in text


def test_a_script_that_raises_fails_with_its_own_type_and_text(
    running: Checked, tmp_path: Path
) -> None:
    script = write_script(
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
        task.wait(20)
    assert caught.value.data["type"].endswith("OutOfCoffee")
    assert caught.value.data["text"] == "the pot is empty"
    assert task.status()["state"] == "failed"
    assert "Traceback" in "".join(task.logs())  # where it belongs
    assert "Traceback" not in str(caught.value)


def test_a_script_that_leaves_with_a_status_says_so(running: Checked, tmp_path: Path) -> None:
    fine = running.client.train(write_script(tmp_path, "fine.py", "raise SystemExit(0)"))
    assert fine.wait(20)["state"] == "done"
    bad = running.client.train(write_script(tmp_path, "bad.py", "raise SystemExit(3)"))
    with pytest.raises(TaskFailed, match="SystemExit"):
        bad.wait(20)


def test_a_script_that_swallows_its_preemption_is_killed_and_others_go_on(
    running: Checked, tmp_path: Path
) -> None:
    script = write_script(
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
    until(lambda: task.status()["step"] > 0, "it trains")
    running.client.infer("small", torch.ones(1, 64))  # a stop is obeyed all the same
    row = task.cancel()
    assert row["state"] == "cancelled"
    assert running.client.infer("small", torch.ones(1, 64))["y"].shape == (1, 64)


def test_a_script_asks_its_own_server(running: Checked, tmp_path: Path) -> None:
    script = write_script(
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
    assert running.client.train(script, args=[str(tmp_path / "said")]).wait(20)["state"] == "done"
    assert (tmp_path / "said").read_text() == "huge small"
