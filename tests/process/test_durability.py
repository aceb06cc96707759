"""``kill -9`` of servers at random: acknowledged names must exist once, and commits be whole."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeswitch.base.errors import PipeSwitchError
from pipeswitch.base.failpoints import POINTS, VARIABLE
from pipeswitch.client.client import FINAL_JOB_STATES
from pipeswitch.commits.commit_files import load_commit
from tests.process import tools
from tests.process.figures import publishing, say

SEED = 1121
EPOCH_STEPS = 100
KEPT = 12  # number of models and jobs above which each addition removes the oldest one
LANES = 2
LIVES_OF_A_JOB = 25  # so few that the job's plain run, for comparison, is short
PERSIST = [name for name in POINTS if name.startswith("persist.")]
ENVIRONMENT = {
    "PIPESWITCH_SCHEDULER__COMMIT_EVERY": "20ms",
    "PIPESWITCH_WORKERS__RESTART_BACKOFF": "20ms",
}


SHORT = """
    from pipeswitch import job
    print("ran")
"""


class Ledger:
    """Requests and answers of all clients, during all server lives on one state directory."""

    def __init__(self, folder: Path) -> None:
        self.waits = tools.write_script(folder, "waits.py", SHORT)
        self.there: list[str] = []  # acknowledged models ``m…`` and jobs ``s…``, oldest first
        self.unsure: set[str] = set()  # names whose requests got no answer: both outcomes are right
        self.removed = 0
        self.acknowledged = 0
        self.persisted_step = -1
        self.numbers = iter(range(1_000_000))

    def ask(self, checked: tools.Checked, generator: random.Random, over: threading.Event) -> None:
        """Add and remove names until the server is gone; record only requests with an answer."""
        with contextlib.suppress(PipeSwitchError):
            while not over.is_set():
                kind = generator.choice("mss")
                oldest = next((name for name in self.there if name.startswith(kind)), "")
                if oldest and len(self.there) > KEPT:
                    self._remove(checked, oldest)
                else:
                    self._add(checked, f"{kind}{next(self.numbers)}")

    def _add(self, checked: tools.Checked, name: str) -> None:
        self.unsure.add(name)
        if name.startswith("m"):
            module, x = tools.mlp(16, 1, int(name[1:])), torch.zeros(1, 16)
            checked.client.register(name, module, example_inputs=(x,))
        else:  # the new job is queued behind the job that trains, and then paused
            checked.client.train(self.waits, name=name)
            row = checked.client.job(name, "pause")["job"]
            if row["state"] != "paused":  # it has started, because the other job's worker was dead
                return
        self.there.append(name)
        self.unsure.discard(name)
        self.acknowledged += 1

    def _remove(self, checked: tools.Checked, name: str) -> None:
        self.unsure.add(name)
        self.there.remove(name)
        if name.startswith("m"):
            checked.client.unregister(name)
        else:
            checked.client.job(name, "cancel")
        self.unsure.discard(name)
        self.removed += 1

    def counts(self) -> dict[str, int]:
        """Return the counts that are published as figures."""
        return {
            "acknowledged": self.acknowledged,
            "removed": self.removed,
            "unsure": len(self.unsure),
        }

    def check(self, checked: tools.Checked) -> None:
        """Check that every acknowledged name exists once, and no removed or unknown name exists."""
        tools.until(
            lambda: all(row["state"] == "ready" for row in checked.client.models()), "models ready"
        )
        jobs = [row for row in checked.client.jobs() if row["name"].startswith("s")]
        names = [row["name"] for row in checked.client.models()]
        names += [row["name"] for row in jobs if row["state"] not in FINAL_JOB_STATES]
        assert len(names) == len(set(names)), f"twice: {sorted(names)}"
        lost_jobs = set(self.there) - set(names)
        assert not lost_jobs, (
            f"lost: {lost_jobs} of {self.there}, unsure {self.unsure}, found {jobs}"
        )
        assert set(names) - set(self.there) - self.unsure == set(), "not asked for, or removed"
        freed = {row["name"] for row in jobs if row["state"] != "paused"}
        assert not freed & set(self.there), f"paused, and not any more: {jobs}"


def live_and_die(ledger: Ledger, folder: Path, name: str, generator: random.Random) -> None:
    """Run one life of the server: check its state, use it, inject faults, and kill it at random."""
    points, state = folder / "points", folder / "state"
    with tools.checked_server(
        arena="64MiB",
        state_dir=state,
        environment={**ENVIRONMENT, VARIABLE: str(points)},
        settles=False,
        status=-signal.SIGKILL,
    ) as checked:
        ledger.check(checked)
        task = checked.client.task(name)
        row = task.status()
        assert row["committed_step"] >= ledger.persisted_step, "a persisted commit is lost"
        over = threading.Event()
        asker = threading.Thread(target=ledger.ask, args=(checked, generator, over))
        asker.start()
        tools.until(lambda: task.status()["persisted_step"] > row["committed_step"], "it persists")
        hurt = generator.choice(["", "worker", "daemon", *PERSIST])
        with contextlib.suppress(StopIteration):
            if hurt in PERSIST:
                (points / hurt).write_text("crash")
            elif hurt == "daemon":
                tools.kill(checked.daemon_pid())
            elif hurt == "worker" and checked.row(name)["pid"]:
                tools.kill(checked.row(name)["pid"])
        threading.Event().wait(generator.uniform(0, 0.3))  # a random moment, not a condition
        with contextlib.suppress(PipeSwitchError):
            ledger.persisted_step = max(ledger.persisted_step, task.status()["persisted_step"])
        tools.kill(checked.pid)
        checked.running.process.wait(30)
        over.set()
        checked.client.close()
        asker.join(30)
        assert not asker.is_alive()
        tools.gone(checked.mark)
    for armed in points.iterdir():
        if armed.is_file():
            armed.unlink()
    loaded = load_commit(state / "commits" / name)  # raises if the commit is incomplete
    assert loaded is not None, "the checkpoint is missing"
    descriptor, _, record = loaded
    os.close(descriptor)
    assert record.step >= ledger.persisted_step


def kill_servers(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill ``kills`` servers of one state directory; update ``found.json`` after each kill.

    After every ``LIVES_OF_A_JOB`` lives the training job ends, is compared with its plain run, and
    another job starts.
    """
    script, ledger = tools.write_script(folder, "trains.py", tools.DIGESTED), Ledger(folder)
    generator = random.Random(seed)
    (folder / "points").mkdir()
    options: dict[str, Any] = {
        "arena": "64MiB",
        "state_dir": folder / "state",
        "environment": ENVIRONMENT,
    }
    figures = {"kills": 0, "jobs": 0, "steps": 0}
    while figures["kills"] < kills:
        name = f"trains-{figures['jobs']}"
        served, plain = folder / f"{name}.served", folder / f"{name}.plain"
        with tools.checked_server(settles=False, **options) as first:
            first.client.train(script, name=name, args=[str(served), "1000000", "64"])
        ledger.persisted_step = -1
        for _ in range(min(LIVES_OF_A_JOB, kills - figures["kills"])):
            live_and_die(ledger, folder, name, generator)
            figures["kills"] += 1
            figures.update(ledger.counts())
            (folder / "found.json").write_text(json.dumps(figures))
        with tools.checked_server(settles=False, **options) as last:
            ledger.check(last)
            task = last.client.task(name)
            epoch = task.status()["step"] // EPOCH_STEPS + 5  # an epoch that has not begun yet
            Path(f"{served}.enough-{epoch}").touch()
            figures["steps"] += tools.finish(task)["step"]
        tools.run_plain(script, str(plain), str(epoch), "64")
        assert served.read_text() == plain.read_text()
        figures["jobs"] += 1
        say(f"{folder.name}: {figures['kills']} of {kills} servers killed: {json.dumps(figures)}")
    with tools.checked_server(**options) as last:
        ledger.check(last)
        for job in [name for name in ledger.there if name.startswith("s")]:
            last.client.job(job, "cancel")
    return figures


@contextlib.contextmanager
def lane(folder: Path, kills: int, seed: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``kill_servers`` in its own process; several run in parallel, as starts take long."""
    folder.mkdir()
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, __file__, folder, str(kills), str(seed)],
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # makes the process end its server
        process.wait()


BODIES = """
    import os, sys, time
    import torch
    from pipeswitch import job

    net = torch.nn.Linear(8, 8).to(job.device)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    begun = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for epoch in job.epochs(100_000):
        for x in job.steps([torch.ones(4, 8)] * 1000, model=net, optimizer=optimizer):
            os.write(begun, f"{job.step} {time.monotonic_ns()}\\n".encode())
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
"""Script that writes a line to OUT at the start of each loop body: number of steps, and time."""


def lost(begun: Path) -> list[tuple[int, float]]:
    """Return, for each death of the server, the number of repeated steps and their time in s."""
    rows = [tuple(map(int, line.split())) for line in begun.read_text().splitlines()]
    began_at_ns, repeats = dict[int, int](), []
    for (step, at_ns), (following, _) in itertools.pairwise(rows):
        began_at_ns[step] = at_ns
        if following <= step:
            repeats.append((step - following, (at_ns - began_at_ns[following]) / 1e9))
    return repeats


def _has_grown(out: Path, size_bytes: int) -> bool:
    return out.exists() and out.stat().st_size > size_bytes


def kill_training_servers(
    folder: Path,
    kills: int,
    jobs: int,
    generator: random.Random,
    most_s: float,
    environment: dict[str, str],
) -> tuple[list[list[tuple[int, float]]], list[dict[str, Any]]]:
    """Kill ``kills`` servers that train ``jobs`` jobs, each within ``most_s`` after all jobs train.

    Returns: For each job, the result of ``lost``; for each job, its last row.
    """
    script, names = tools.write_script(folder, "bodies.py", BODIES), [f"j{n}" for n in range(jobs)]
    outs = {name: folder / f"{name}.begun" for name in names}
    for number in range(kills + 1):
        is_last = number == kills
        with tools.checked_server(
            arena="64MiB",
            state_dir=folder / "state",
            environment=environment,
            settles=False,
            status=0 if is_last else -signal.SIGKILL,
        ) as checked:
            before = {name: outs[name].stat().st_size if number else 0 for name in names}
            for name in names if not number else ():
                checked.client.train(script, name=name, args=[str(outs[name])])
            for name, out in outs.items():
                tools.until(partial(_has_grown, out, before[name]), f"{name} goes on")
            if is_last:
                for name in names:
                    checked.client.job(name, "pause")
                rows = [checked.client.task(name).status() for name in names]
                for name in names:
                    checked.client.job(name, "cancel")
                break
            if not number:
                tools.until(
                    lambda: all(
                        checked.client.task(n).status()["persisted_step"] > 0 for n in names
                    ),
                    "the first commits are on disk",
                )
            threading.Event().wait(generator.uniform(0, most_s))
            tools.kill(checked.pid)
            checked.running.process.wait(30)
            checked.client.close()
            tools.gone(checked.mark)
    return [lost(outs[name]) for name in names], rows


def test_steps_that_a_killed_server_costs_are_counted(tmp_path: Path) -> None:
    ((first, second), *_), (row,) = kill_training_servers(
        tmp_path, 2, 1, random.Random(SEED), 0.5, ENVIRONMENT
    )
    assert row["restarts"] == 2
    counted = first[0] + second[0]
    assert counted <= row["steps_recomputed"] <= counted + 2, "a body may have ended unseen"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_killed_servers_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    figures = kill_servers(tmp_path, 2, SEED)
    assert figures["steps"] > 0
    assert figures["acknowledged"] > 0


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_three_hundred_killed_servers_lose_nothing(tmp_path: Path) -> None:
    folders = [tmp_path / f"lane-{number}" for number in range(LANES)]
    with publishing("server_kills") as figures, contextlib.ExitStack() as stack:
        try:
            lanes = [
                stack.enter_context(lane(folder, 300 // LANES, SEED + number))
                for number, folder in enumerate(folders)
            ]
            assert [process.wait() for process in lanes] == [0] * LANES
            figures.update(lost=0, twice=0, torn=0)  # no lane has failed
        finally:
            figures_of_lanes = [
                json.loads(path.read_text()) for path in tmp_path.glob("lane-*/found.json")
            ]
            for key in ("kills", "jobs", "steps", "acknowledged", "removed", "unsure"):
                figures[key] = sum(each[key] for each in figures_of_lanes)


if __name__ == "__main__":
    kill_servers(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
