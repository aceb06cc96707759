"""``kill -9`` in a real job, at every instant of a step and commit: the job ends bit-equal (I2).

The victim is the worker that trains, or the memory daemon that commits for it. An instant is named
after the victim's position: a failpoint, a place in the script, or ``at random``. The next life
must begin at the last acknowledged commit or later, skip no step, compute the same losses as the
undisturbed run, and commit.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from process_tools import Checked, checked_server, finish, kill, mlp, run_plain, until, write_script

from pipeswitch.base.failpoints import VARIABLE
from pipeswitch.base.quantiles import quantile
from pipeswitch.client.client import Task
from tests.process.figures import publishing, say

SEED: Final = 1121
ENVIRONMENT: Final = {
    "PIPESWITCH_SCHEDULER__COMMIT_EVERY": "10ms",
    "PIPESWITCH_WORKERS__RESTART_BACKOFF": "20ms",
}
HELD_MS: Final = 60  # the daemon waits this long while the worker is killed
EPOCH_STEPS: Final = 8
KILLS_A_JOB: Final = 25  # few, so that the undisturbed run of each job stays short

VICTIM: Final = """
    import hashlib, json, os, signal, sys, time
    import torch
    from torch.utils.data import DataLoader, Dataset
    from pipeswitch import job

    seed, out, epochs = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])

    def die(where):
        try:
            os.unlink(f"{out}.{where}")  # armed: once
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    class Noisy(Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            die("loader")
            x = torch.full((3, 12, 12), index / 64) + 0.1 * torch.randn(3, 12, 12)
            return x, index % 4

    torch.manual_seed(seed)
    body = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Dropout(0.3),
        torch.nn.Flatten(), torch.nn.Linear(800, 64),
    )
    head = torch.nn.Linear(64, 4)
    net = torch.nn.Sequential(body, torch.nn.ReLU(), head).to(job.device)
    body[1].register_forward_hook(lambda *_: die("forward"))
    head.weight.register_hook(lambda _: die("backward"))
    optimizers = [torch.optim.Adam(body.parameters(), 0.001),
                  torch.optim.SGD(head.parameters(), 0.01, momentum=0.9)]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 20)
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True)
    trace = os.open(out + ".trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for epoch in job.epochs(1_000_000):
        if epoch == epochs or os.path.exists(out + f".enough-{epoch}"):
            break
        for x, y in job.steps(loader, model=net, optimizer=optimizers, scheduler=schedule):
            loss = torch.nn.functional.cross_entropy(net(x), y)
            os.write(trace, f"{os.getpid()} {job.step} {loss.item().hex()}\\n".encode())
            loss.backward()
            optimizers[0].step()
            die("half update")
            optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        schedule.step()
    state = [net.state_dict(), *(o.state_dict() for o in optimizers), schedule.state_dict(),
             torch.get_rng_state(), job.step]
    text = json.dumps(state, default=lambda tensor: tensor.tolist())
    with open(out, "w") as file:
        file.write(f"{hashlib.sha256(text.encode()).hexdigest()} {job.step} {epoch}")
"""


@dataclass
class Life:
    """Steps and losses that one process of the job has written to the trace."""

    pid: int
    first_step: int
    losses: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return self.first_step + len(self.losses) - 1


def lives(trace: str) -> list[Life]:
    """Return the lives of a job in order; check that the steps of each are consecutive."""
    lives_seen: list[Life] = []
    for line in trace.splitlines():
        pid, step, loss = line.split()
        if not lives_seen or lives_seen[-1].pid != int(pid):
            lives_seen.append(Life(int(pid), int(step)))
        lives_seen[-1].losses.append(loss)
        assert lives_seen[-1].last_step == int(step), f"{pid} counted {step} out of order"
    return lives_seen


class Killer:
    """Killer of one job's processes. Each method in ``AIMS`` kills at one kind of instant."""

    def __init__(self, checked: Checked, points: Path, out: Path, task: Task, seed: int) -> None:
        self.checked, self.points, self.out, self.task = checked, points, out, task
        self.generator = random.Random(seed)
        self.kills = 0
        self.recovery_ms: dict[str, list[float]] = defaultdict(list)

    def strike(self, name: str) -> None:
        """Kill at the instant ``name``; wait until a later process has committed its own steps."""
        before, known = self.task.status(), len(self.lives())
        deaths = AIMS[name](self)
        dead_at_s = time.monotonic()
        self.kills += deaths

        def recovered() -> Life | None:
            row, new = self.task.status(), self.lives()[known:]
            assert row["state"] not in ("failed", "done"), row
            is_restarted = row["restarts"] >= before["restarts"] + deaths
            has_committed = new and row["committed_step"] > new[-1].first_step
            return new[-1] if is_restarted and has_committed else None

        life = until(recovered, f"it commits after: {name}")
        self.recovery_ms[name].append((time.monotonic() - dead_at_s) * 1000)
        committed = before["committed_step"]  # acknowledged, so it is never computed again
        assert life.first_step >= committed, f"{name}: {life.first_step} after {committed}"
        assert self.task.status()["restarts"] == before["restarts"] + deaths, name

    def lives(self) -> list[Life]:
        return lives(Path(f"{self.out}.trace").read_text())

    # -- aims ---------------------------------------------------------------------------------

    def _pid(self) -> int:
        row = until(
            lambda: row if (row := self.checked.row(self.task.name))["pid"] else None,
            "the job has a worker",
        )
        return int(row["pid"])

    def worker(self) -> int:
        self._moment()
        assert kill(self._pid())
        return 1

    def daemon(self) -> int:
        self._moment()
        assert kill(self.checked.daemon_pid())
        return 1

    def beside(self) -> int:
        """Kill the worker while the job stops for a request, is parked, or continues."""
        future = self.checked.client.submit("small", torch.ones(1, 64))
        assert kill(self._pid())
        future.result(30)
        return 1

    def evicted(self) -> int:
        fired = self._arm("job.evicted", "crash")
        self.task.pause()
        self._wait(fired)
        self.task.resume()
        return 1

    def script(self, place: str) -> int:
        self._moment()
        armed = self.out.with_name(f"{self.out.name}.{place}")
        armed.touch()
        self._wait(armed)
        return 1

    def at(self, point: str) -> int:
        self._moment()
        self._wait(self._arm(point, "crash"))
        return 1

    def asked(self, point: str) -> int:
        fired = self._arm(point, "crash")
        answer = self.checked.client.infer("small", torch.ones(1, 64))
        assert answer["y"].shape == (1, 64)
        self._wait(fired)
        return 1

    def start(self, point: str) -> int:
        """Kill the worker, and then its successor during the start."""
        pid = self._pid()
        fired = self._arm(point, "crash")
        assert kill(pid)
        self._wait(fired)
        return 2

    def held(self, point: str) -> int:
        """Kill the worker while the daemon waits at ``point`` of this job's commit."""
        pid = self._pid()
        self._wait(self._arm(point, f"delay {HELD_MS}"))
        assert kill(pid)
        return 1

    # -- tools --------------------------------------------------------------------------------

    def _moment(self) -> None:
        """Wait for a random time within some steps and the commits between them."""
        threading.Event().wait(self.generator.uniform(0, 0.05))  # a random instant, not a condition

    def _arm(self, point: str, action: str) -> Path:
        """Arm a failpoint. The rename makes the whole file visible at once."""
        draft = self.points / f".{point}"
        draft.write_text(action)
        return draft.rename(self.points / point)

    def _wait(self, armed: Path) -> None:
        until(lambda: not armed.exists(), f"a process comes by {armed.name}")


RESIDENCY: Final = ("loader", "forward", "backward", "half update")
COMMIT: Final = (
    "commit.struck",
    "commit.read",
    "commit.copied",
    "commit.recorded",
    "commit.flipped",
    "commit.acknowledge",
)
PERSIST: Final = (
    "persist.image.write",
    "persist.image.written",
    "persist.image.renamed",
    "persist.record.written",
    "persist.record.renamed",
)
AIMS: Final[Mapping[str, Callable[[Killer], int]]] = {
    "worker at random": Killer.worker,
    "daemon at random": Killer.daemon,
    "worker beside a request": Killer.beside,
    "worker at job.evicted": Killer.evicted,
    **{f"worker at {place}": partial(Killer.script, place=place) for place in RESIDENCY},
    **{
        f"worker at {point}": partial(Killer.at, point=point)
        for point in ("job.commit", "job.committed", "job.report")
    },
    **{
        f"worker at {point}": partial(Killer.asked, point=point)
        for point in ("job.obey", "job.park", "job.parked")
    },
    **{
        f"worker at {point}": partial(Killer.start, point=point)
        for point in ("job.start", "job.restore", "job.lease", "job.leased")
    },
    **{f"worker, daemon at {point}": partial(Killer.held, point=point) for point in COMMIT},
    **{f"daemon at {point}": partial(Killer.at, point=point) for point in (*COMMIT, *PERSIST)},
}
"""Functions by name of the instant; each kills and returns the number of workers that died."""
ALL_AIMS: Final = [*AIMS, *["worker at random"] * 8, *["daemon at random"] * 2]
SHORT_AIMS: Final = [
    "worker at half update",
    "worker at backward",
    "worker, daemon at commit.recorded",
    "daemon at commit.struck",
    "daemon at commit.recorded",
    "worker at job.restore",
]


def judge(killer: Killer, plain: Path) -> dict[str, Any]:
    """Compare the job's end and every step with the undisturbed run; return the figures."""
    served, out = killer.lives(), killer.out
    (expected,) = lives(Path(f"{plain}.trace").read_text())
    assert out.read_text() == plain.read_text(), "the final states differ"
    last = -1
    for life in served:
        assert life.first_step <= last + 1, f"{life.pid} skipped steps after {last}"
        assert life.losses == expected.losses[life.first_step : life.last_step + 1], life.pid
        last = life.last_step
    assert last == expected.last_step
    steps = sum(len(life.losses) for life in served)
    return {
        "kills": killer.kills,
        "steps": expected.last_step + 1,
        "lives": len(served),
        "recomputed": steps - expected.last_step - 1,
    }


def kill_one_job(checked: Checked, folder: Path, aims: list[str], seed: int) -> Killer:
    """Train, strike at each of ``aims``, and end the job; return its killer for ``judge``."""
    script, out = folder / "victim.py", folder / f"served-{seed}"
    name = f"victim-{seed}"
    task = checked.client.train(script, name=name, args=[str(seed), str(out), "-1"])
    killer = Killer(checked, folder / "points", out, task, seed)
    until(lambda: task.status()["committed_step"] > 0, "it commits")
    for aim in aims:
        killer.strike(aim)
    furthest = max(life.last_step for life in killer.lives())
    Path(f"{out}.enough-{furthest // EPOCH_STEPS + 5}").touch()  # no process has reached this epoch
    finish(task)
    return killer


def kill_real_jobs(folder: Path, kills: int, aims: list[str], figures: dict[str, Any]) -> None:
    """Kill at least ``kills`` times, in as many jobs as needed, at ``aims`` in shuffled order."""
    write_script(folder, "victim.py", VICTIM)
    (folder / "points").mkdir()
    generator = random.Random(SEED)
    recovery_ms: dict[str, list[float]] = defaultdict(list)
    figures.update(kills=0, jobs=0, steps=0, lives=0, recomputed=0, differences=0)
    environment = {**ENVIRONMENT, VARIABLE: str(folder / "points")}
    with checked_server(arena="64MiB", environment=environment) as checked:
        checked.client.register("small", mlp(64, 3, 1), example_inputs=(torch.zeros(1, 64),))
        todo: list[str] = []
        while figures["kills"] < kills:
            while len(todo) < KILLS_A_JOB:
                todo += generator.sample(aims, len(aims))
            these, todo = todo[: min(KILLS_A_JOB, kills)], todo[KILLS_A_JOB:]
            seed = SEED + figures["jobs"]
            killer = kill_one_job(checked, folder, these, seed)
            plain = folder / f"plain-{seed}"
            epochs = killer.out.read_text().split()[-1]
            run_plain(folder / "victim.py", str(seed), str(plain), epochs)
            figures["differences"] += 1  # the job counts as different until ``judge`` returns
            figures_of_job = judge(killer, plain)
            figures["differences"] -= 1
            figures["jobs"] += 1
            for key, value in figures_of_job.items():
                figures[key] += value
            for name, times_ms in killer.recovery_ms.items():
                recovery_ms[name] += times_ms
            figures["instants"] = {
                name: {
                    "strikes": len(times_ms),
                    "recovery_ms_p50": round(quantile(times_ms, 0.5)),
                    "recovery_ms_p99": round(quantile(times_ms, 0.99)),
                }
                for name, times_ms in sorted(recovery_ms.items())
            }
            say(f"job {figures['jobs']}: {figures_of_job}; {figures['kills']} of {kills} kills")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_job_killed_in_mid_step_mid_commit_and_mid_flip_ends_bit_equal(tmp_path: Path) -> None:
    figures: dict[str, Any] = {}
    kill_real_jobs(tmp_path, len(SHORT_AIMS), SHORT_AIMS, figures)
    assert figures["kills"] >= len(SHORT_AIMS)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_five_hundred_kills_of_real_jobs_end_bit_equal(tmp_path: Path) -> None:
    with publishing("training_kills") as figures:
        kill_real_jobs(tmp_path, 500, ALL_AIMS, figures)
