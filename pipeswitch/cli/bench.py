"""What ``pipeswitch bench`` runs. Imports no torch: whatever computes is a child process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ..benchmarks.machine import machine_facts
from ..benchmarks.models import MODELS
from ..benchmarks.trials import Run
from ..errors import InvalidInput
from .common import check_folder

BENCHMARKS: Final = {
    "switch": "switch",
    "throughput": "throughput",
    "pipeline": "pipeline",
    "memory": "memory",
    "workers": "workers",
    "state": "state",
    "interference": "interference",
    "request-path": "request_path",
    "gateway": "gateway",
    "crowd": "crowd",
    "overload": "overload",
    "training": "training",
    "devices": "devices",
    "shared-input": "shared_input",
    "switchflow": "switchflow",
    "replay": "replay",
    "decisions": "decisions",
    "batching": "batching",
}
"""Name on the command line to module of ``pipeswitch.benchmarks``; each has ``run``."""
OF_OTHERS: Final = ("switchflow",)  # they run others again: only when asked for


def run(
    names: Sequence[str] = (),
    *,
    models: Sequence[str] = (),
    is_quick: bool = False,
    out: Path | None = None,
    as_json: bool = False,
    seed: int = 0,
    trials: int = 0,
    emit: Callable[[str], None] | None = None,
) -> int:
    """Run benchmarks by name (none: all of them); the exit status, 0 whatever was measured.

    Args:
        models: for the benchmarks of models; empty: each one's own choice.
        is_quick: under two minutes each, few trials.
        trials: rounds of each case instead of the benchmark's own choice; 0: that choice.
        out: a folder for one Markdown and one JSON file each.
        as_json: one JSON line per trial instead of progress and tables.
        emit: takes each line; default: standard output.
    """
    for unknown in [name for name in names if name not in BENCHMARKS]:
        raise InvalidInput(f"no benchmark {unknown!r}", hint=f"one of {', '.join(BENCHMARKS)}")
    for unknown in [name for name in models if name not in MODELS]:
        raise InvalidInput(f"no model {unknown!r} here", hint=f"one of {', '.join(MODELS)}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        check_folder("--out", out / "report.md")
    tell = emit or _write_line
    facts = machine_facts()  # once: afterwards the load is also ours
    for name in names or [name for name in BENCHMARKS if name not in OF_OTHERS]:
        module: Any = importlib.import_module(f"..benchmarks.{BENCHMARKS[name]}", __package__)
        command = _command(name, models, is_quick, trials)
        bench = Run(name, command, is_quick, seed, as_json, tell, facts, trials_asked=trials)
        module.run(bench, tuple(models))
        bench.finish()
        if not as_json:
            tell(bench.markdown())
        if out is not None:
            for path in bench.write(out):
                bench.say(f"wrote {path}")
    return 0


def _command(name: str, models: Sequence[str], is_quick: bool, trials: int) -> str:
    """As it can be typed again."""
    words = ["pipeswitch", "bench", name]
    if models:
        words += ["--models", ",".join(models)]
    words += ["--trials", str(trials)] if trials else []
    return " ".join(words + ["--quick"] * is_quick)


def _write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
