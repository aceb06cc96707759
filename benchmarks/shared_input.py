"""``bench shared-input``: jobs that train on the same data, with one loader or with a loader each.

As in SwitchFlow's figures 8 to 10, one, two or three jobs, with equal or different models, train in
turns on one device with one compute thread. Arms: *own* (each job has a DataLoader) and *shared*
(``job.shared``). In most cases, loading a batch takes as long as training on it. In "short steps"
both times are short, so that the fixed cost of a step counts more. In "cheap input", jobs load as
fast as possible. The measured number is images per second of all jobs together, from the first step
of any job to the last step of any job, so the start of the processes does not count.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from pipeswitch.client.client import Client
from pipeswitch.testing import server

from .trials import Arm, Numbers, Run

MODULE: Final = "benchmarks.input_script"
BATCH: Final = 16
WIDTH: Final = 48  # a step takes about 13 ms
NARROW: Final = 12  # a step takes about 2 ms
PASSES: Final = 10
QUICK_PASSES: Final = 5
MANY_UNITS: Final = 20  # units per sample in the measurement of one unit's time
MIN_GAIN: Final = 1.4


@dataclass(frozen=True)
class Case:
    name: str
    widths: tuple[int, ...]  # width of each job's model
    width: int = WIDTH
    load: float = 1.0  # time to load a batch / time to train a model of ``width`` on the batch
    at_least: float | None = None


CASES: Final = (
    Case("1 job", (WIDTH,)),
    Case("2 equal jobs", (WIDTH,) * 2),
    Case("3 equal jobs", (WIDTH,) * 3, at_least=MIN_GAIN),
    Case("3 mixed jobs", (WIDTH // 2, WIDTH, WIDTH * 3 // 2)),
    Case("3 equal jobs, short steps", (NARROW,) * 3, NARROW),
    Case("3 equal jobs, cheap input", (WIDTH,) * 3, load=0.0),
)


def run(bench: Run, _: Any = ()) -> None:
    """Measure the times to load a batch and to train on it, then all cases on one server."""
    one, many = _measured(1, WIDTH), _measured(MANY_UNITS, WIDTH)
    unit_ms = (many["load_ms"] - one["load_ms"]) / (MANY_UNITS - 1)
    train_ms = {WIDTH: one["train_ms"], NARROW: _measured(1, NARROW)["train_ms"]}
    for width, found_ms in train_ms.items():
        bench.find(f"training on a batch, width {width}", found_ms, "ms")
    with (
        tempfile.TemporaryDirectory(prefix="pipeswitch-bench-") as folder,
        server(arena="256MiB", host_store="512MiB", args=("--threads", "1")) as running,
        running.client() as client,
    ):
        for case in CASES:
            more_ms = case.load * train_ms[case.width] - one["load_ms"]
            units = max(1, round(1 + more_ms / unit_ms))
            jobs = _Jobs(bench, client, case, units, Path(folder))
            bench.say(f"{case.name}: {units} units of loading a sample")
            arms = [Arm(arm, partial(jobs.train, arm)) for arm in ("own", "shared")]
            bench.trial_loop(case.name, arms, bench.rounds(3, 1), warmup=0)
            own, shared = (bench.p50(case.name, arm.name, "images_per_s") for arm in arms)
            name = f"{case.name}: images a second, shared / own"
            bench.find(name, shared / own, at_least=case.at_least)
    bench.notes.append("cheap input: each sample is unpacked once")


def _measured(units: int, width: int) -> Numbers:
    options = ["--measure", "--units", str(units), "--width", str(width)]
    command = [sys.executable, "-P", "-m", MODULE, *options]
    numbers: Numbers = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    )
    return numbers


class _Jobs:
    """Starter of a case's jobs, all at once."""

    def __init__(self, bench: Run, client: Client, case: Case, units: int, folder: Path) -> None:
        self._client, self._case, self._folder = client, case, folder
        passes = QUICK_PASSES if bench.is_quick else PASSES
        self._words = ("--units", str(units), "--passes", str(passes))
        self._numbers = itertools.count()

    def train(self, arm: str) -> Numbers:
        is_shared = arm == "shared"
        group = f"{arm}-{next(self._numbers)}"
        records, tasks = [], []
        for index, width in enumerate(self._case.widths):
            records.append(self._folder / f"{group}-{index}.json")
            words = [*self._words, "--width", str(width), "--record", str(records[-1])]
            words += ["--shared"] * is_shared
            name, share = records[-1].stem, group if is_shared else ""
            tasks.append(self._client.train(f"{MODULE}:main", name=name, args=words, share=share))
        for task in tasks:
            task.wait()
        return _rate([json.loads(record.read_text()) for record in records])


def _rate(instants_ms: Sequence[Sequence[float]]) -> Numbers:
    """Return images per second of all jobs together, from the first to the last step of any job."""
    seconds = (max(one[-1] for one in instants_ms) - min(one[0] for one in instants_ms)) / 1000.0
    return {"images_per_s": sum(map(len, instants_ms)) * BATCH / seconds, "window_s": seconds}
