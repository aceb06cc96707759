"""``kill -9`` of the server at random: what was acknowledged is there, once; no commit is torn."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import (
    Checked,
    checked_server,
    finish,
    gone,
    kill,
    mlp,
    run_plain,
    until,
    write_script,
)

from pipeswitch.commit_files import load_commit
from pipeswitch.errors import PipeSwitchError

SEED = 1121
ENVIRONMENT = {
    "PIPESWITCH_SCHEDULER__COMMIT_EVERY": "20ms",
    "PIPESWITCH_SCHEDULER__PERSIST_EVERY": "50ms",
    "PIPESWITCH_WORKERS__RESTART_BACKOFF": "20ms",
}

# ------------------------------------------------------------------------------- the journal alone

WRITER = """
    import os, sys
    from pathlib import Path
    from pipeswitch.controller.journal import JournalFile

    journal = JournalFile(Path(sys.argv[1]))
    number = int(sys.argv[2])
    while True:
        name = f"j{number}"
        entry = {"kind": "job", "name": name, "entry": "x.py", "args": ["x" * 900], "priority": 1}
        os.write(1, f"{name} asked\\n".encode())
        journal.append(entry)
        os.write(1, f"{name} there\\n".encode())
        if number % 3 == 0:
            os.write(1, f"{name} ends\\n".encode())
            journal.append({"kind": "job-over", "name": name, "state": "done"})
            os.write(1, f"{name} over\\n".encode())
        number += 1
"""
READ = """
    import json, sys
    from pathlib import Path
    from pipeswitch.controller.journal import JournalFile

    journal = JournalFile(Path(sys.argv[1]))
    print(json.dumps(list(journal.jobs)))
    journal.close()
"""


def kill_writers(folder: Path, kills: int) -> dict[str, int]:
    """Kill as many writers in the middle of things; what they acknowledged against what is there.

    Where a kill came between the question and the answer, both are right.
    """
    writer, reader = write_script(folder, "w.py", WRITER), write_script(folder, "r.py", READ)
    path, generator = folder / "journal.sqlite", random.Random(SEED)
    there: set[str] = set()
    unsure: set[str] = set()
    number = appended = 0
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, writer, str(path), str(number)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(generator.randint(2, 12))]
        threading.Event().wait(generator.uniform(0, 0.003))  # a moment inside of an entry
        process.kill()
        lines += process.stdout.read().splitlines()
        process.wait()
        process.stdout.close()
        for name, word in (line.split() for line in lines):
            number = max(number, int(name[1:]) + 1)
            if word in ("asked", "ends"):
                unsure.add(name)
                continue
            unsure.discard(name)
            appended += 1
            (there.add if word == "there" else there.discard)(name)
    done = subprocess.run(
        [sys.executable, reader, path], capture_output=True, text=True, check=True
    )
    found: list[str] = json.loads(done.stdout)
    assert not done.stderr, done.stderr
    assert not list(folder.glob("*damaged*"))
    lost, extra = there - set(found) - unsure, set(found) - there - unsure
    assert (lost, extra, len(found) - len(set(found))) == (set(), set(), 0)
    return {"kills": kills, "acknowledged": appended, "unsure": len(unsure), "lost": len(lost)}


def test_thirty_killed_writers_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    assert kill_writers(tmp_path, 30)["acknowledged"] >= 30


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_three_hundred_killed_writers_lose_nothing(tmp_path: Path) -> None:
    sys.__stdout__.write(json.dumps(kill_writers(tmp_path, 300)) + "\n")  # type: ignore[union-attr]


# ------------------------------------------------------------------------------- the whole server


SHORT = """
    from pipeswitch import job
    print("ran")
"""
TRAINS = """
    import sys
    import torch
    from pipeswitch import job
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(), torch.nn.Linear(64, 8))
    net.to(job.device)
    optimizer = torch.optim.Adam(net.parameters(), 0.001)
    data = [torch.full((64, 64), float(i % 7)) for i in range(100)]
    for epoch in job.epochs(int(sys.argv[2])):
        for x in job.steps(data, model=net, optimizer=optimizer):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    import hashlib
    state = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    with open(sys.argv[1], "w") as file:
        file.write(f"{job.step} {hashlib.sha256(state).hexdigest()}")
"""


class Ledger:
    """What clients asked for and what they were told, over all lives of one state directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.waits = write_script(folder, "waits.py", SHORT)
        self.models: set[str] = set()
        self.jobs: set[str] = set()
        self.asked: set[str] = set()
        self.persisted_step = -1
        self.numbers = iter(range(1_000_000))

    def ask(self, checked: Checked, generator: random.Random, over: threading.Event) -> None:
        """Register and submit until the server is gone; only what was answered is noted."""
        x = torch.zeros(1, 16)
        with contextlib.suppress(PipeSwitchError):
            while not over.is_set():
                number = next(self.numbers)
                if generator.random() < 0.3:
                    name = f"m{number}"
                    self.asked.add(name)
                    checked.client.register(name, mlp(16, 1, number), example_inputs=(x,))
                    self.models.add(name)
                else:
                    name = f"s{number}"
                    self.asked.add(name)
                    # Behind the job that trains, at the lowest priority: it stays in the queue.
                    checked.client.train(self.waits, name=name)
                    checked.client.job(name, "pause")
                    self.jobs.add(name)

    def check(self, checked: Checked) -> None:
        """Everything acknowledged is there, once, and nothing that nobody asked for."""
        until(
            lambda: all(row["state"] == "ready" for row in checked.client.models()), "models ready"
        )
        for kind, acknowledged, rows in (
            ("m", self.models, checked.client.models()),
            ("s", self.jobs, checked.client.jobs()),
        ):
            names = [row["name"] for row in rows if row["name"].startswith(kind)]
            assert len(names) == len(set(names)), f"twice: {sorted(names)}"
            finished = {r["name"] for r in checked.client.jobs() if r["state"] == "done"}
            assert acknowledged - set(names) - finished == set(), "lost"
            assert set(names) <= self.asked, "nobody asked for it"


def live_and_die(ledger: Ledger, state: Path, generator: random.Random, script: Path) -> None:
    """One life of the server: checked at its start, used, hurt, and killed at random."""
    with checked_server(
        arena="64MiB", state_dir=state, environment=ENVIRONMENT, settles=False,
        status=-signal.SIGKILL,
    ) as checked:  # fmt: skip
        ledger.check(checked)
        task = checked.client.task("trains")
        row = task.status()
        assert row["committed_step"] >= ledger.persisted_step, "a persisted commit is lost"
        over = threading.Event()
        asker = threading.Thread(target=ledger.ask, args=(checked, generator, over))
        asker.start()
        until(lambda: task.status()["persisted_step"] > row["committed_step"], "it persists")
        hurt = generator.choice(["", "worker", "daemon"])
        with contextlib.suppress(StopIteration):
            if hurt == "daemon":
                kill(checked.daemon_pid())
            elif hurt == "worker" and checked.row("trains")["pid"]:
                kill(checked.row("trains")["pid"])
        threading.Event().wait(generator.uniform(0, 0.3))  # a moment, not a condition
        with contextlib.suppress(PipeSwitchError):
            ledger.persisted_step = max(ledger.persisted_step, task.status()["persisted_step"])
        kill(checked.pid)
        checked.running.process.wait(30)
        over.set()
        checked.client.close()
        asker.join(30)
        assert not asker.is_alive()
        gone(checked.mark, 10)
    loaded = load_commit(state / "commits" / "trains")  # raises when it is torn
    assert loaded is not None, "the checkpoint is missing"
    descriptor, _, record = loaded
    os.close(descriptor)
    assert record.step >= ledger.persisted_step


def kill_servers(folder: Path, kills: int, epochs: int) -> dict[str, Any]:
    script, state = write_script(folder, "trains.py", TRAINS), folder / "state"
    generator, ledger = random.Random(SEED), Ledger(folder)
    run_plain(script, str(folder / "plain"), str(epochs))
    options: dict[str, Any] = {"arena": "64MiB", "state_dir": state, "environment": ENVIRONMENT}
    with checked_server(settles=False, **options) as first:
        first.client.train(script, name="trains", args=[str(folder / "served"), str(epochs)])
    for _ in range(kills):
        live_and_die(ledger, state, generator, script)
    with checked_server(**options) as last:
        ledger.check(last)
        for name in ledger.jobs:
            with contextlib.suppress(PipeSwitchError):
                last.client.job(name, "cancel")
        finish(last.client.task("trains"), 240)
    assert (folder / "served").read_text() == (folder / "plain").read_text()
    return {"kills": kills, "models": len(ledger.models), "jobs": len(ledger.jobs),
            "lost": 0, "twice": 0, "torn": 0, "step": ledger.persisted_step}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_killed_servers_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    found = kill_servers(tmp_path, 2, epochs=80)
    assert found["step"] > 0  # what was acknowledged was checked at each start


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_three_hundred_killed_servers_lose_nothing(tmp_path: Path) -> None:
    found = kill_servers(tmp_path, 300, epochs=3000)
    sys.__stdout__.write(json.dumps(found) + "\n")  # type: ignore[union-attr]
