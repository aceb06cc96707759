"""What ``pipeswitch bench`` runs. Imports no torch: whatever computes is a child process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from .benchmarks.models import MODELS
from .benchmarks.trials import Run, machine_facts
from .errors import InvalidInput

BENCHMARKS: Final = {
    "switch": "switch",
    "pipeline": "pipeline",
    "request-path": "request_path",
    "training": "training",
}
"""Name on the command line to module of ``pipeswitch.benchmarks``; each has ``run``."""


def run(
    names: Sequence[str] = (),
    *,
    models: Sequence[str] = (),
    is_quick: bool = False,
    out: Path | None = None,
    as_json: bool = False,
    seed: int = 0,
    emit: Callable[[str], None] | None = None,
) -> int:
    """Run benchmarks by name (none: all of them); the exit status, 0 whatever was measured.

    Args:
        models: of ``switch``; empty: its own choice.
        is_quick: under a minute each, few trials.
        out: a folder for one Markdown and one JSON file each.
        as_json: one JSON line per trial instead of progress and tables.
        emit: takes each line; default: standard output.
    """
    for unknown in [name for name in names if name not in BENCHMARKS]:
        raise InvalidInput(f"no benchmark {unknown!r}", hint=f"one of {', '.join(BENCHMARKS)}")
    for unknown in [name for name in models if name not in MODELS]:
        raise InvalidInput(f"no model {unknown!r} here", hint=f"one of {', '.join(MODELS)}")
    tell = emit or _write_line
    for name in names or BENCHMARKS:
        module: Any = importlib.import_module(f".benchmarks.{BENCHMARKS[name]}", __package__)
        command = _command(name, models, is_quick)
        bench = Run(name, command, is_quick, seed, as_json, tell, machine_facts())
        module.run(bench, tuple(models))
        if not as_json:
            tell(bench.markdown())
        if out is not None:
            for path in bench.write(out):
                bench.say(f"wrote {path}")
    return 0


def _command(name: str, models: Sequence[str], is_quick: bool) -> str:
    """As it can be typed again."""
    words = ["pipeswitch", "bench", name]
    if models:
        words += ["--models", ",".join(models)]
    return " ".join(words + ["--quick"] * is_quick)


def _write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
