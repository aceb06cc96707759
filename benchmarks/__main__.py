"""Entry point of ``python -m benchmarks``. Imports no torch, because child processes compute."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click

from pipeswitch.base.errors import InvalidInput, PipeSwitchError
from pipeswitch.base.machine import available_bytes
from pipeswitch.cli.common import check_folder, json_option

from . import papers
from .machine import machine_facts
from .models import MODELS
from .precision import CASES as PRECISION_CASES
from .readme import newest
from .trials import Run

ROOT: Final = Path(__file__).resolve().parents[1]
GIB: Final = 1 << 30

NEEDS_GIB: Final = {
    "switch": 12.0,
    "variants": 0.0,
    "swap": 0.0,
    "throughput": 5.5,
    "pipeline": 2.0,
    "memory": 1.5,
    "workers": 7.0,
    "state": 3.5,
    "interference": 2.0,
    "request-path": 0.0,
    "gateway": 0.0,
    "crowd": 0.0,
    "training": 0.0,
    "devices": 1.6,
    "shared-input": 1.3,
    "generation": 0.0,
    "peers": 0.0,
    "precision": 0.0,
}
"""Memory of a full run, scaled from a quick run; 0: not measured."""
NAMES: Final = tuple(NEEDS_GIB)  # each has a module with ``run``


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
    """Run benchmarks (no ``names``: all); return exit status 0, even if a target is missed.

    ``emit`` gets each line of output. The other arguments are options of the command.
    """
    for unknown in [name for name in names if name not in NAMES]:
        raise InvalidInput(f"no benchmark {unknown!r}", hint=f"one of {', '.join(NAMES)}")
    for name in (names or NAMES) if not models else ():
        if (need := NEEDS_GIB[name]) * GIB > (free := available_bytes()):
            raise InvalidInput(
                f"{name} needs {need:g} GiB of free memory, and this machine has {free / GIB:.1f}",
                hint="end other programs, or name smaller models: --models resnet18",
            )
    known = {*MODELS, *PRECISION_CASES}
    for unknown in [name for name in models if name not in known]:
        raise InvalidInput(f"no model {unknown!r} here", hint=f"one of {', '.join(sorted(known))}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        check_folder("--out", out / "report.md")
    tell = emit or click.echo
    facts = machine_facts()  # taken once, before the benchmarks themselves load the machine
    for name in names or NAMES:
        module: Any = importlib.import_module(f".{name.replace('-', '_')}", __package__)
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
        detail = "not kept"
        if "duration_s" in document:
            detail = f"{document['duration_s'] / 60:.0f} min{quick}"
        lines.append(f"  {name:<14}{detail}")
    return [*lines, f"papers [NAME: {', '.join(papers.benchmarks())}]; --out DIR adds pictures"]


@click.command(epilog=f"{', '.join(NAMES)}, papers, or all.")
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
    is_papers = names[:1] == ("papers",)
    names = () if names == ("all",) else names[is_papers:] or tuple(papers.benchmarks())
    # Servers and rivals import this package, too: its factories create the models that they serve.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.getenv("PYTHONPATH"))))
    chosen = [model for model in models.split(",") if model]
    folder = Path(out) if out else None
    options: dict[str, Any] = {"trials": trials, "as_json": as_json, "seed": seed}
    try:
        status = run(names, models=chosen, is_quick=quick, out=folder, **options)
    except PipeSwitchError as error:
        raise click.ClickException(str(error)) from None
    if is_papers and folder:
        runpy.run_path(str(ROOT / "docs" / "picture.py"))["draw"](folder, folder)
    sys.exit(status)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
