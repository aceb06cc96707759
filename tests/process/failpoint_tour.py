"""Tour of all failpoints: a server under load, and acts that make a process reach each point.

The load never stops: two clients compare every answer with the plain model's, and a job trains,
which commits to the store and to disk every 100 ms. For each point that the load does not reach, an
*act* makes a process reach it. After each fault, all processes must be back, the clients must get
answers, and the job must progress. A fault in the controller itself ends the server; then the tour
starts it again on the same state directory.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from pipeswitch.base.errors import PipeSwitchError
from pipeswitch.base.failpoints import REACHED
from pipeswitch.client.client import FINAL_JOB_STATES, Client

from ..chaos.history import History
from ..chaos.stage import Stage
from .failpoint_load import TRAIN, Lane, Undisturbed
from .tools import eager, finish, gone, kill, mlp, until, write_script

FIRES_WITHIN_S: Final = 30.0
RECOVERS_WITHIN_S: Final = 60.0
EXIT_INTERNAL: Final = 70  # os.EX_SOFTWARE: a bug of the controller, described in its log

WIDTH: Final = 512
DEPTH: Final = 10  # a model has 10 MiB in two groups; the arena has room for two of three models
MODELS: Final = ("a", "b", "c")
FULL_DEPTH: Final = 20  # such a model does not fit beside a job's slice
LARGE_BATCH: Final = 520  # rows of 2 KiB, in sum more than the 1 MiB that the loop itself copies
PACE_S: Final = 0.004  # time per batch of a job's loader on the server

FOREVER: Final = str(10**9)


# ---- the points --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stop:
    """One failpoint of the tour."""

    point: str
    act: str = ""  # act that makes a process reach the point; empty if the load reaches it
    fatal: tuple[str, ...] = ()  # actions that end the server, if the point is in the controller
    writes: bool = False  # True if the point is before a write to the disk, which may be full


LOOP: Final = ("crash", "error", "memory")  # actions that end the loop's thread, and the server
WRITER: Final = ("crash",)  # after any other action, this thread reports an error and continues


def _stops(
    *points: str, act: str = "", fatal: tuple[str, ...] = (), writes: bool = False
) -> tuple[Stop, ...]:
    return tuple(Stop(point, act, fatal, writes) for point in points)


TOUR: Final[Mapping[str, tuple[Stop, ...]]] = {
    "workers": (
        *_stops("worker.infer.received", "worker.infer.turn", "worker.infer.group"),
        *_stops("worker.infer.outputs", "worker.infer.done", "worker.send"),
        *_stops("worker.prepare", "worker.start", "fork.child", "fork.order", act="evict"),
        *_stops("build.begin", "build.write", act="register", writes=True),
        *_stops("stage.call", "stage.done", act="preprocess"),
    ),
    "memory-daemon": (
        *_stops("daemon.message", "daemon.send"),
        *_stops("daemon.transmit.begin", "daemon.transmit.group", "daemon.transmit.end"),
        *_stops("daemon.scrub", act="evict"),
        *_stops("daemon.slice.out", "daemon.slice.in", "daemon.slice.done", act="swap"),
        *_stops("daemon.start", act="kill-daemon"),
        *_stops("daemon.store.read", "daemon.store.done", act="register", writes=True),
        *_stops(
            "commit.struck", "commit.read", "commit.copied", "commit.recorded", "commit.flipped"
        ),
        *_stops("commit.acknowledge"),
        *_stops(
            "persist.image.write", "persist.image.written", "persist.image.renamed", writes=True
        ),
        *_stops("persist.record.written", "persist.record.renamed", writes=True),
    ),
    "jobs": (
        *_stops("job.commit", "job.committed", "job.obey", "job.park", "job.parked"),
        *_stops("job.start", "job.restore", "job.lease", "job.leased", "job.report", act="evict"),
        *_stops("job.evicted", "job.ended", act="evict"),
        *_stops("job.hidden", act="swap"),
    ),
    "controller": (
        *_stops("controller.answer", "controller.event", fatal=LOOP),
        *_stops("controller.send.daemon", "controller.send.worker", fatal=LOOP),
        *_stops("controller.send.stage", act="preprocess", fatal=LOOP),
        *_stops("controller.exit", "controller.fork", act="evict", fatal=LOOP),
        *_stops("frontend.message", "frontend.accepted", "frontend.copied", fatal=LOOP),
        *_stops("frontend.reply", fatal=LOOP),
    ),
    "state": (
        *_stops("journal.write", "journal.written", act="register", fatal=LOOP, writes=True),
        *_stops("upload.write", "upload.publish", act="register", fatal=WRITER, writes=True),
        *_stops("upload.published", act="register", fatal=WRITER, writes=True),
        *_stops("build.done", act="register", fatal=LOOP),
        *_stops("commits.create", "commits.drop", act="short-job", fatal=LOOP),
        *_stops("image.create", act="swap", fatal=LOOP, writes=True),
    ),
}
"""All points, by the part of the server that they affect."""


# ---- the tour ----------------------------------------------------------------------------------


@dataclass
class Kept:
    """Names that acts have registered, which the server must not lose."""

    models: set[str] = field(default_factory=set)
    jobs: set[str] = field(default_factory=set)


class Tour:
    """A server with its load, into which one fault after the other is injected."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.history = History()
        self.script = write_script(folder, "train.py", TRAIN)
        self._undisturbed = Undisturbed(self.script)
        self._numbers = itertools.count()
        self.kept = Kept()
        self.job = ""
        self._lanes: list[Lane] = []
        self._judged_s = 0.0
        self.stage = Stage(folder, self.history)
        modules = {name: mlp(WIDTH, DEPTH, seed) for seed, name in enumerate(MODELS)}
        small, large = torch.linspace(-1, 1, WIDTH)[None], torch.randn(LARGE_BATCH, WIDTH)
        self._small = {name: (small, eager(module, small)) for name, module in modules.items()}
        answered = eager(modules["a"], large)
        # Received into the pool; with a version, copied there.
        self._large = {"a": (large, answered), "a@1": (large, answered)}
        for name, module in modules.items():
            self.client.register(name, module, example_inputs=(small,), max_batch=LARGE_BATCH)

    @property
    def client(self) -> Client:
        """Owner's client of the server that runs now."""
        return self.stage.checked.client

    def new_name(self, kind: str) -> str:
        return f"{kind}-{next(self._numbers)}"

    # -- load ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """Run clients and a job during the block; then check the job's bits, and for leaks."""
        self.start_job()
        self._lanes = [
            Lane(self.stage, "small", self._small),
            Lane(self.stage, "large", self._large),
        ]
        try:
            yield
        finally:
            for lane in self._lanes:
                lane.stop()
        self.finish_job(self.job)
        self.stage.checked.wait_until_whole()
        self.stage.checked.settle()

    def start_job(self) -> None:
        self.job = self.new_name("job")
        self.client.train(self.script, name=self.job, args=self.arguments(self.job))
        until(lambda: self.row(self.job)["committed_step"] > 0, "the job commits")

    def arguments(self, name: str, last: str = FOREVER) -> list[str]:
        out, stop_file = self.folder / f"{name}.out", self.folder / f"{name}.stop"
        return [str(PACE_S), str(stop_file), str(out), last]

    def row(self, job: str) -> dict[str, Any]:
        row: dict[str, Any] = self.client.job(job, "show")["job"]
        return row

    def finish_job(self, name: str) -> None:
        """End the job; check that it has computed the same bits as the plain script."""
        (self.folder / f"{name}.stop").touch()
        with contextlib.suppress(PipeSwitchError):
            self.client.job(name, "resume")  # a fault may have come while the job was paused
        row = finish(self.client.task(name))
        text = (self.folder / f"{name}.out").read_text()
        assert text == self._undisturbed.after(row["step"]), f"{name} differs at {row['step']}"

    # -- faults ----------------------------------------------------------------------------------

    def fire(self, stop: Stop, action: str) -> None:
        """Inject one fault; check that it fires and that nothing is lost."""
        try:
            self._fire(stop, action)
        except (AssertionError, PipeSwitchError) as error:
            log = self.stage.running.log()[-6000:]
            raise AssertionError(f"{stop.point} x {action}: {error!r}\n{log}") from None

    def _fire(self, stop: Stop, action: str) -> None:
        armed_at_s = time.monotonic()
        path = self.stage.arm(stop.point, action)
        act = Act(self, ACTS[stop.act], path) if stop.act else None
        try:
            until(lambda: not path.exists(), "it fires", FIRES_WITHIN_S)
        finally:
            path.unlink(missing_ok=True)
        assert (self.stage.points / REACHED / stop.point).exists()
        if has_ended(self.stage, stop, action):
            self.stage.revive(armed_at_s)
        fired_at_s = time.monotonic()
        if act is not None:
            act.join()
        self._recover(stop, action, fired_at_s)

    def _recover(self, stop: Stop, action: str, fired_at_s: float) -> None:
        """Check that clients are served, the job trains, and registered names still exist."""
        for lane in self._lanes:
            until(
                lambda lane=lane: lane.is_served_since(fired_at_s),  # type: ignore[misc]
                f"a client is answered (last: {[a.said for a in lane.answers[-3:]]})",
                RECOVERS_WITHIN_S,
            )
        self._judge(stop, action)
        self.stage.checked.wait_until_whole()
        with contextlib.suppress(PipeSwitchError):
            self.client.job(self.job, "resume")  # an act may have left the job paused
        self._keep_training(stop, action)
        self._look_at_kept()
        assert self.stage.is_up, "the server left later"

    def _judge(self, stop: Stop, action: str) -> None:
        """Check new answers: each has the right bits, or the error that was injected into it."""
        answers = [answer for lane in self._lanes for answer in list(lane.answers)]
        for answer in answers:
            if answer.said == "ok" or answer.ended_at_s <= self._judged_s:
                continue
            was_down = self.history.was_down(answer.sent_at_s, answer.ended_at_s)
            is_refused = answer.said.startswith("ServerUnavailable") and was_down
            is_injected = action != "crash" and stop.point in answer.said
            assert is_refused or is_injected, f"a client was told: {answer.said}"
        self._judged_s = max((a.ended_at_s for a in answers), default=0.0)

    def _keep_training(self, stop: Stop, action: str) -> None:
        """Wait for the next commit; start a new job if the injected error failed the script."""
        row = self.row(self.job)
        if row["state"] == "failed" and action != "crash" and stop.point in str(row):
            self.start_job()
            return
        before = row["committed_step"]

        def goes_on() -> bool:
            row = self.row(self.job)
            assert row["state"] not in FINAL_JOB_STATES, row
            return bool(row["committed_step"] > before)

        until(goes_on, f"the job commits again after {row}")

    def _look_at_kept(self) -> None:
        """Check that the models and jobs of acts exist, then remove them."""
        for name in sorted(self.kept.models):
            self.client.infer(name, torch.zeros(1, 8))
        for row in self.client.models():
            if row["name"] not in MODELS:
                self.client.unregister(row["name"])
        self.kept.models.clear()
        if self.kept.jobs:
            self.client.job(self.job, "pause")  # so that the acts' jobs have the device alone
            for name in sorted(self.kept.jobs):
                self.finish_job(name)
            self.client.job(self.job, "resume")
        self.kept.jobs.clear()

    # -- end -------------------------------------------------------------------------------------

    def end(self) -> None:
        """Stop the server; check that it exits with status 0 and leaves no process behind."""
        status = self.stage.end()
        assert status == 0, f"status {status}\n{self.stage.running.log()[-4000:]}"

    def abandon(self) -> None:
        """Kill the server after a failure; the next batch of points gets a new server."""
        for lane in self._lanes:
            lane.over.set()
        self.stage.kill_all()
        gone(self.stage.mark)


def has_ended(stage: Stage, stop: Stop, action: str) -> bool:
    """Return True if the action must end the server, after the server has ended as expected."""
    process = stage.running.process
    if action not in stop.fatal:
        return False
    until(lambda: process.poll() is not None, "the server ends")
    assert process.returncode == (-signal.SIGKILL if action == "crash" else EXIT_INTERNAL)
    return True


# ---- acts --------------------------------------------------------------------------------------


class Act:
    """Thread that repeats an act until the failpoint has fired."""

    def __init__(self, tour: Tour, what: Callable[[Tour], None], path: Path) -> None:
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(tour, what, path), daemon=True)
        self._thread.start()

    def _run(self, tour: Tour, what: Callable[[Tour], None], path: Path) -> None:
        while path.exists():
            try:
                what(tour)
            except PipeSwitchError:
                continue  # the server is down, or the fault was injected into this request
            except BaseException as error:
                self._errors.append(error)
                return

    def join(self) -> None:
        """Wait for the thread; check that each of its requests was answered."""
        self._thread.join(RECOVERS_WITHIN_S)
        assert not self._thread.is_alive(), "an act was never answered"
        assert not self._errors, f"an act failed: {self._errors}"


def _register(tour: Tour) -> None:
    name = tour.new_name("extra")
    tour.client.register(name, torch.nn.Linear(8, 8), example_inputs=(torch.zeros(1, 8),))
    tour.kept.models.add(name)


def _preprocess(tour: Tour) -> None:
    """Send a request to a model whose preprocessing is numpy's copy."""
    linear, x = torch.nn.Linear(8, 8), torch.zeros(1, 8)
    raw = {"a": ((1, 8), "float32")}
    name = tour.new_name("staged")
    tour.client.register(name, linear, example_inputs=(x,), preprocess="numpy:copy", raw=raw)
    tour.client.infer(name, x)


def _evict(tour: Tour) -> None:
    """Evict the job; later another worker restores the job from its commit."""
    tour.client.job(tour.job, "pause")
    until(lambda: tour.row(tour.job)["state"] not in ("stopping", "evicting"), "it is unwound")
    before = tour.row(tour.job)["committed_step"]
    tour.client.job(tour.job, "resume")

    def is_back() -> bool:
        row = tour.row(tour.job)
        return row["state"] in FINAL_JOB_STATES or row["committed_step"] > before

    until(is_back, "it commits again")


def _swap(tour: Tour) -> None:
    """Send a request to a model that does not fit beside the job."""
    device = tour.row(tour.job)["on"]
    name, x = f"full-{device[-1]}", torch.zeros(1, WIDTH)
    if name not in {row["name"] for row in tour.client.models()}:
        module = mlp(WIDTH, FULL_DEPTH, 9)
        tour.client.register(name, module, example_inputs=(x,), devices=device)
    before = tour.row(tour.job)["committed_step"]
    tour.client.infer(name, x)
    until(lambda: tour.row(tour.job)["committed_step"] > before, "it trains again")


def _short_job(tour: Tour) -> None:
    """Run a short job alone on the device; when it ends, its commits are dropped."""
    tour.client.job(tour.job, "pause")
    name = tour.new_name("short")
    tour.client.train(tour.script, name=name, args=tour.arguments(name, "10"))
    tour.kept.jobs.add(name)
    tour.client.task(name).wait(30.0)
    tour.client.job(tour.job, "resume")


def _kill_daemon(tour: Tour) -> None:
    pid = tour.stage.checked.daemon_pid()
    kill(pid)
    until(lambda: tour.stage.checked.daemon_pid() not in (0, pid), "another daemon")


ACTS: Final[Mapping[str, Callable[[Tour], None]]] = {
    "register": _register,
    "preprocess": _preprocess,
    "evict": _evict,
    "swap": _swap,
    "short-job": _short_job,
    "kill-daemon": _kill_daemon,
}
