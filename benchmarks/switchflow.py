"""``bench switchflow``: SwitchFlow's figures 2 and 6 to 10 and table 1, one after the other.

Figure 2, case *… twice*: two clients, each with a model of its own, ask back to back. Arms, in
turns: *pipeswitch* (one model computes at a time), *threads* (both in one process, neither excludes
the other: multi-stream), *session-slicing* (a lock that a request holds), *alone* (one client).
Figure 6 is ``bench interference``: requests beside a training job. Figure 7 is
``moving.py``, of ``bench devices``: preempted jobs that go to another device. Table 1, of models,
is ``bench state``. Figures 8 to 10 are ``bench shared-input``: jobs on the same data.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from pipeswitch.planning.fit import quantile

from . import interference, moving, shared_input, state
from .models import MODELS, BenchModel
from .serving import TWINS, inputs_of, serving, window
from .setting import Setting, end, read_line, spawn, tell
from .trials import Arm, Numbers, Run

WINDOW_S: Final = 3.0
QUICK_WINDOW_S: Final = 1.0
DEFAULT_MODELS: Final = ("resnet50",)
QUICK_MODELS: Final = ("resnet18",)
SHARING: Final = {"threads": ("threads", 2), "session-slicing": ("sessions", 2),
                  "alone": ("alone", 1)}  # fmt: skip


def run(bench: Run, models: Sequence[str] = ()) -> None:
    """All figures; ``models``: of those of requests."""
    for name in bench.usable(models or (QUICK_MODELS if bench.is_quick else DEFAULT_MODELS)):
        with tempfile.TemporaryDirectory(prefix="pipeswitch-bench-") as folder:
            _figure_2(bench, MODELS[name], Path(folder))
    interference.run(bench, models)
    moving.run(bench)
    shared_input.run(bench)
    state.run(bench)
    bench.notes.append(
        "… twice: figure 2; one model and a training job: figure 6; … moves, requests stay: "
        "figure 7; jobs: figures 8 to 10; models alone: table 1"
    )


def _figure_2(bench: Run, model: BenchModel, folder: Path) -> None:
    case, seconds = f"{model.name} twice", QUICK_WINDOW_S if bench.is_quick else WINDOW_S
    setting = Setting(model, folder, bench.threads, bench.seed)
    setting.write_files()
    cores = sorted(os.sched_getaffinity(0))[: bench.threads]
    child = spawn("pair", setting.order() | {"cores": cores}, module="sharing")

    def beside(mode: str, count: int) -> Numbers:
        tell(child, mode=mode, seconds=seconds, count=count)
        return read_line(child)

    try:
        read_line(child)
        with serving(model, bench.threads, bench.seed, rooms=2) as (running, client):
            ours = partial(window, running, TWINS, inputs_of(client), seconds)
            arms = [
                Arm("pipeswitch", ours),
                *(Arm(name, partial(beside, *how)) for name, how in SHARING.items()),
            ]
            bench.say(f"{case}: measuring")
            bench.trial_loop(case, arms, bench.rounds(10, 3))
    finally:
        end(child)
    for key, what in (("throughput_per_s", "requests a second"), ("p99_ms", "p99")):
        found = {arm.name: quantile(bench.values(case, arm.name, key), 0.5) for arm in arms}
        for name in SHARING:
            bench.find(f"{case}: {what}, {name} / pipeswitch", found[name] / found["pipeswitch"])
