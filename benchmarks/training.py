"""``bench training``: how much slower a job is because it is preemptible, and how fast it stops.

The script runs as a job and as a plain process. A job's worker has allocator settings that make it
faster (``workers/training/script.py``). To see the cost without this gain, the plain script also
runs with these settings. Runs are compared in pairs within a round, because the heap's state
differs from process to process.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from pipeswitch.base.quantiles import quantile
from pipeswitch.client.client import Client
from pipeswitch.testing import server

from .baselines import TRAIN_MODULE
from .request_path import SOURCE
from .serving import TRAIN_ENTRY, Training, ask
from .trials import Arm, Numbers, Run

KEPT_HEAP: Final = {  # allocator settings of a job's worker
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
PLAIN: Final = "plain"
PLAIN_KEPT: Final = "plain, heap kept"
WARM_STEPS: Final = 5
MAX_SLOWDOWN: Final = 0.02  # limit of a job's slowdown, for steps of at least LONG_STEP_MS
MAX_MORE_MS: Final = 0.3  # limit of a job's additional time per step, for shorter steps
LONG_STEP_MS: Final = 20.0
MAX_OVER_LAYER_MS: Final = 1.0
RUN_S: Final = 12.0
QUICK_RUN_S: Final = 1.5
ROUNDS: Final = 5
QUICK_ROUNDS: Final = 3
STOPS: Final = 200
QUICK_STOPS: Final = 25
GAP_STEPS: Final = 40
EVENTS_WAIT_S: Final = 0.3  # time to wait for the last event after the last request


SHAPES: Final = {  # size of a training step, as arguments of train_script
    "long-steps": ("--width", "512", "--layers", "4", "--batch", "448"),
    "middle-steps": ("--width", "512", "--layers", "4", "--batch", "48"),
    "small-steps": ("--width", "128", "--layers", "4", "--batch", "64"),
}


def run(bench: Run, _: Any = ()) -> None:
    """Measure steps of all sizes in ``SHAPES`` on one server."""
    with (
        tempfile.TemporaryDirectory(prefix="pipeswitch-bench-") as folder,
        server(
            arena="512MiB", host_store="1GiB", args=("--threads", str(bench.threads))
        ) as running,
        running.client() as client,
    ):
        client.register("tiny", SOURCE, weights="random:0", inputs={"x": ((1, 16), "float32")})
        client.infer("tiny", np.ones((1, 16), np.float32))
        for shape, args in SHAPES.items():
            runs = _Runs(bench, client, Path(folder) / shape, args)
            _slowdown(bench, shape, runs)
            _latency(bench, shape, runs, client)
    bench.notes.append("the job commits as often as by default; its first commits come sooner")
    bench.notes.append("plain, heap kept: the plain script with a worker's allocator settings")
    bench.notes.append("slowdowns are medians over pairs of neighbouring runs")
    bench.notes.append("stop_ms: the worker has read the stop, until the device is free")


class _Runs:
    """Starter of the script, plain and as a job; all runs have the same number of steps."""

    def __init__(self, bench: Run, client: Client, folder: Path, args: tuple[str, ...]) -> None:
        self._client, self._numbers, self.args = client, itertools.count(), args
        self._folder = folder
        folder.mkdir()
        self._options = ("--threads", str(bench.threads), *args)
        probe = self._plain(GAP_STEPS, "--gaps")
        self.gaps = probe.gaps_ms
        seconds = QUICK_RUN_S if bench.is_quick else RUN_S
        self.steps = max(30, round(seconds * 1000 / quantile(probe.wall_ms, 0.5)))

    def _words(self, steps: int) -> tuple[Path, list[str]]:
        path = self._folder / f"{next(self._numbers)}.json"
        return path, [*self._options, "--steps", str(steps), "--record", str(path)]

    def _plain(self, steps: int, *more: str, **environment: str) -> _Steps:
        path, words = self._words(steps)
        words += more
        command = [sys.executable, "-P", "-m", TRAIN_MODULE, *words]
        subprocess.run(command, check=True, env=os.environ | environment)
        return _read(path)

    def plain(self, **environment: str) -> Numbers:
        return _numbers(self._plain(self.steps, **environment))

    def job(self) -> Numbers:
        path, words = self._words(self.steps)
        before = self._client.stats()["commits"]
        name = f"run-{self._folder.name}-{path.stem}"
        self._client.train(TRAIN_ENTRY, name=name, args=words).wait()
        commits = self._client.stats()["commits"] - before
        return _numbers(_read(path)) | {"commits": commits}


@dataclass(frozen=True)
class _Steps:
    """Times of each step after the warm-up."""

    wall_ms: list[float]
    cpu_ms: list[float]  # CPU time of the script's thread
    gaps_ms: list[list[float]]  # for each step, the times between places that may stop a job


def _read(path: Path) -> _Steps:
    record = json.loads(path.read_text())
    wall, cpu = (
        [after - before for before, after in pairwise(record[key][WARM_STEPS:])]
        for key in ("instants_ms", "cpu_ms")
    )
    return _Steps(wall, cpu, record["gaps_ms"][WARM_STEPS:])


def _numbers(steps: _Steps) -> Numbers:
    return {
        "step_ms": sum(steps.wall_ms) / len(steps.wall_ms),  # mean, which includes commits
        "median_step_ms": quantile(steps.wall_ms, 0.5),
        "fastest_tenth_step_ms": quantile(steps.wall_ms, 0.1),
        "cpu_step_ms": sum(steps.cpu_ms) / len(steps.cpu_ms),
        "fastest_tenth_cpu_step_ms": quantile(steps.cpu_ms, 0.1),
        "steps": len(steps.wall_ms),
        "steps_per_s": 1000 * len(steps.wall_ms) / sum(steps.wall_ms),
    }


def _slowdown(bench: Run, shape: str, runs: _Runs) -> None:
    bench.say(f"{shape}: {runs.steps} steps, plain and as a job in turns")
    plain = (Arm(PLAIN, runs.plain), Arm(PLAIN_KEPT, partial(runs.plain, **KEPT_HEAP)))
    arms = [*plain, Arm("job", runs.job)]
    bench.trial_loop(shape, arms, bench.rounds(ROUNDS, QUICK_ROUNDS), warmup=0)
    step_ms = bench.p50(shape, PLAIN, "median_step_ms")
    bench.find(f"{shape}: plain step, median", step_ms, "ms")
    for arm in (PLAIN_KEPT, PLAIN):
        for key, what in (
            ("step_ms", "mean step"),
            ("median_step_ms", "median step"),
            ("cpu_step_ms", "mean CPU time of a step"),
        ):
            both = (bench.values(shape, each, key) for each in ("job", arm))
            pairs = [*zip(*both, strict=True)]
            text = f"{shape}: {what} of the job against {arm}"
            if step_ms >= LONG_STEP_MS:
                slowdown = statistics.median(job / plain - 1 for job, plain in pairs)
                bench.find(f"{text}, slowdown", slowdown, at_most=MAX_SLOWDOWN)
            else:
                more_ms = statistics.median(job - plain for job, plain in pairs)
                bench.find(f"{text}, more", more_ms, "ms", at_most=MAX_MORE_MS)


def _latency(bench: Run, shape: str, runs: _Runs, client: Client) -> None:
    """Send requests at random moments of an endless job; measure how long the job takes to stop."""
    layer_ms = _longest_layer_ms(runs.gaps)
    stops = QUICK_STOPS if bench.is_quick else STOPS
    bench.say(f"{shape}: {stops} preemptions")
    training = Training(client, bench.threads, bench.seed, runs.args)
    training.run()
    events = Suspensions(client)
    dice = random.Random(bench.seed)
    payload = np.ones((1, 16), np.float32)
    for number in range(stops):
        time.sleep(dice.uniform(0.02, 0.12))
        _, numbers = ask(client, "tiny", payload, is_resident=True)
        bench.record(shape, "request", number, numbers)
    for number, event in enumerate(events.stop()):
        bench.record(shape, f"stop-{event['where']}", number, {"stop_ms": event["stop_ms"]})
    training.task.cancel()
    limit_ms = layer_ms + MAX_OVER_LAYER_MS
    bench.find(f"{shape}: longest layer, median", layer_ms, "ms")
    for where in ("forward", "backward", "boundary", "loader"):
        values = bench.values(shape, f"stop-{where}", "stop_ms")
        if not values:
            continue
        limit = limit_ms if where in ("forward", "backward") else None  # the limit is for layers
        for what, share in (("p50", 0.5), ("p99", 0.99)):
            stop_ms = quantile(values, share)
            bench.find(f"{shape}: stop in {where}, {what}", stop_ms, "ms", at_most=limit)


def _longest_layer_ms(gaps: Sequence[Sequence[float]]) -> float:
    """Return the longest gap of a step in ms; each gap's time is its median over all steps."""
    return max(quantile(place, 0.5) for place in zip(*gaps, strict=True))


class Suspensions:
    """Thread that collects ``job.suspended`` events until ``stop``."""

    def __init__(self, client: Client) -> None:
        self._found: list[dict[str, Any]] = []
        self._records = client.events("job.suspended", timeout_s=EVENTS_WAIT_S)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._collect, args=(client,), daemon=True)
        self._thread.start()

    def _collect(self, client: Client) -> None:
        while True:
            self._found += self._records  # blocks until no event has come for EVENTS_WAIT_S
            if self._is_over.is_set():
                return
            self._records = client.events("job.suspended", timeout_s=EVENTS_WAIT_S)

    def stop(self) -> list[dict[str, Any]]:
        """Stop the thread; return all events, including the last request's event."""
        self._is_over.set()
        self._thread.join()
        return self._found
