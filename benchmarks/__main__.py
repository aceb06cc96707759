"""Entry point of ``python -m benchmarks``. Imports no torch, because child processes compute."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click

from pipeswitch.base.errors import InvalidInput, PipeSwitchError
from pipeswitch.cli.common import check_folder, json_option

from .machine import machine_facts
from .models import MODELS
from .precision import CASES as PRECISION_CASES
from .readme import newest
from .trials import Run

ROOT: Final = Path(__file__).resolve().parents[1]

NAMES: Final = (
    "switch",
    "variants",
    "swap",
    "throughput",
    "pipeline",
    "memory",
    "workers",
    "state",
    "interference",
    "request-path",
    "gateway",
    "crowd",
    "training",
    "devices",
    "shared-input",
    "generation",
    "peers",
    "precision",
)
BENCHMARKS: Final = {name: name.replace("-", "_") for name in NAMES}
"""Module in ``benchmarks`` for each name on the command line; each module has ``run``."""


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
    """Run benchmarks; return exit status 0, even if a target is missed.

    Args:
        names: names of the benchmarks; all of them if empty.
        models: models to measure; if empty, each benchmark uses its own models.
        is_quick: run few trials, in less than two minutes for each benchmark.
        trials: number of rounds of each case; if 0, each benchmark uses its own number.
        out: folder for one Markdown and one JSON file of each benchmark.
        as_json: print one JSON line per trial instead of progress and tables.
        emit: function that gets each line of output; the default prints the line.
    """
    for unknown in [name for name in names if name not in BENCHMARKS]:
        raise InvalidInput(f"no benchmark {unknown!r}", hint=f"one of {', '.join(BENCHMARKS)}")
    known = {*MODELS, *PRECISION_CASES}
    for unknown in [name for name in models if name not in known]:
        raise InvalidInput(f"no model {unknown!r} here", hint=f"one of {', '.join(sorted(known))}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        check_folder("--out", out / "report.md")
    tell = emit or click.echo
    facts = machine_facts()  # taken once, before the benchmarks themselves load the machine
    for name in names or NAMES:
        module: Any = importlib.import_module(f".{BENCHMARKS[name]}", __package__)
        command = _command(name, models, is_quick, trials)
        bench = Run(name, command, is_quick, seed, as_json, tell, facts, trials_asked=trials)
        try:
            module.run(bench, tuple(models))
        except BaseException:
            bench.warnings.append("the run was stopped before its end")
            raise
        finally:
            if bench.trials:
                _report(bench, out)
    return 0


def _report(bench: Run, out: Path | None) -> None:
    """Print the report, and write it; a stopped run reports what it has measured."""
    bench.finish()
    if not bench.as_json:
        bench.emit(bench.markdown())
    if out is not None:
        for path in bench.write(out):
            bench.say(f"wrote {path}")


def _command(name: str, models: Sequence[str], is_quick: bool, trials: int) -> str:
    words = ["python", "-m", "benchmarks", name]
    words += ["--models", ",".join(models)] if models else []
    words += ["--trials", str(trials)] if trials else []
    return " ".join(words + ["--quick"] * is_quick)


def listing() -> list[str]:
    """Return a line for each benchmark, with the minutes that its run in ``results/`` took."""
    results = newest(ROOT / "benchmarks" / "results")
    lines = ["Name one or several, or all:"]
    for name in NAMES:
        document = results[name][1] if name in results else {}
        quick = " (--quick)" if document.get("is_quick") else ""
        detail = (
            f"{document['duration_s'] / 60:.0f} min{quick}"
            if "duration_s" in document
            else "not kept"
        )
        lines.append(f"  {name:<14}{detail}")
    return lines


@click.command(epilog=f"{', '.join(NAMES)}, or all.")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--models", default="", help="Such as resnet152,inception_v3,bert-base,mlp.")
@click.option("--quick", is_flag=True, help="Under two minutes each, few trials.")
@click.option("--trials", type=click.IntRange(min=0), default=0, help="Rounds of each case.")
@click.option("--out", type=click.Path(file_okay=False), help="A folder for the reports.")
@click.option("--seed", type=int, default=0, show_default=True)
@json_option
def main(
    names: tuple[str, ...],
    models: str,
    quick: bool,
    trials: int,
    out: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Measure this machine with one or several benchmarks; none named: list them."""
    if not names:
        click.echo("\n".join(listing()))
        return
    names = () if names == ("all",) else names
    # Servers and rivals import this package, too: its factories create the models that they serve.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.getenv("PYTHONPATH"))))
    chosen = [model for model in models.split(",") if model]
    folder = Path(out) if out else None
    options: dict[str, Any] = {"trials": trials, "as_json": as_json, "seed": seed}
    try:
        sys.exit(run(names, models=chosen, is_quick=quick, out=folder, **options))
    except PipeSwitchError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
