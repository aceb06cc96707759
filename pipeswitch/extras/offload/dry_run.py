"""``plan --train``: activations of a script's steps, and the cost of several memory limits."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ...base import config
from ...base.errors import InvalidInput, OutOfDeviceMemory
from ...base.units import format_bytes, printed
from ...cli import views
from . import swaps

SHARES: Final = (0.7, 0.5, 0.3)  # default limits, as shares of a step's activations
COLUMNS: Final = ("memory", "offloaded", "storages", "step_ms", "speed", "layer_wise_ms", "why")
UNLIMITED: Final = 1 << 62


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Measurement in the form that ``pipeswitch/extras/offload/script_dry_run.py`` writes."""

    step: swaps.Step
    links: swaps.Links
    compute_ms: float
    min_bytes: int = 0  # enough for a job's first steps, which have no plan yet


def rehearse(entry: str, args: Sequence[str]) -> Measured:
    """Run and measure the script's first steps in a child process; block until it ends.

    Raises:
        InvalidInput: the script is missing, fails, or has no step.
    """
    if entry.endswith(".py") and not Path(entry).is_file():
        raise InvalidInput(f"no file {entry!r}", hint="pipeswitch plan --train SCRIPT.py")
    device = config.load().device
    with tempfile.TemporaryDirectory(prefix="pipeswitch-plan-") as folder:
        out = Path(folder, "step.json")
        command = rehearsal_command(out, device.names[0], device.link_gbps * 1e9, entry, args)
        child = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
        if child.returncode:
            raise InvalidInput(
                f"{entry} failed before its first steps were measured (exit status "
                f"{child.returncode}); see its output above",
                hint=f"run it by hand: python {entry}",
            )
        if not out.exists():
            raise InvalidInput(
                f"{entry} has no step of job.steps in which forward saves activations",
                hint="for batch in job.steps(loader, model=model, optimizer=optimizer)",
            )
        return msgspec.json.decode(out.read_bytes(), type=Measured)


def report(entry: str, measured: Measured, budget_bytes: int | None) -> dict[str, Any]:
    """Return the plans for a budget, or for several shares of a step's activations.

    Raises:
        OutOfDeviceMemory: no plan fits into ``budget_bytes``; the error has the smallest budget.
    """
    unlimited = swaps.forecast(measured.step, (), UNLIMITED, measured.links)
    assert unlimited is not None
    needed = unlimited.peak_bytes
    least = min(needed, max(_least_bytes(measured, needed), measured.min_bytes))
    if budget_bytes is not None and budget_bytes < least:
        raise OutOfDeviceMemory(
            f"{entry}: a step saves {format_bytes(needed)} for backward, at least "
            f"{format_bytes(least)} of it on the device at once; it may take "
            f"{format_bytes(budget_bytes)}",
            hint=f"--memory {-(-least >> 10)}KiB, or a smaller batch",
            requested_bytes=least,
            largest_free_bytes=budget_bytes,
        )
    shares = [int(share * needed) for share in SHARES]
    budgets = [needed, *(shares if budget_bytes is None else [budget_bytes])]
    rows = [_row(measured, budget) for budget in budgets]
    return {"entry": entry, "needed_bytes": needed, "min_bytes": least, "plans": rows}


def _least_bytes(measured: Measured, needed: int) -> int:
    """Return the smallest budget into which some plan fits, in bytes, rounded to a KiB."""
    low, high = 0, -(-needed >> 10)
    while low < high:
        middle = (low + high) // 2
        is_kept = swaps.plan(measured.step, middle << 10, measured.links)
        low, high = (low, middle) if is_kept else (middle + 1, high)
    return min(low << 10, needed)


def _row(measured: Measured, budget_bytes: int) -> dict[str, Any]:
    step, links = measured.step, measured.links
    plan = swaps.plan(step, budget_bytes, links)
    if plan is None:
        return {"memory_bytes": budget_bytes, "why": "no plan keeps to it"}
    layer_wise = [one.wait_ms for one in swaps.hiding(step, budget_bytes, links)]
    fetched = dict(plan.fetches)
    return {
        "memory_bytes": budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "offloaded_bytes": plan.moved_bytes,
        "storages": len(plan.leaving),
        "step_ms": measured.compute_ms + plan.wait_ms,
        "speed": measured.compute_ms / (measured.compute_ms + plan.wait_ms),
        "layer_wise_ms": measured.compute_ms + min(layer_wise) if layer_wise else None,
        "leaving": [
            {"storage": one, "bytes": step.sizes_bytes[one], "back_at_event": fetched.get(one)}
            for one in sorted(plan.leaving)
        ],
    }


def show(entry: str, args: Sequence[str], budget_bytes: int | None, as_json: bool) -> None:
    """Measure the script, plan, and print the plans."""
    figures = report(entry, rehearse(entry, args), budget_bytes)
    if as_json:
        views.print_json(figures)
        return
    views.echo(
        f"{entry}: a step saves {format_bytes(figures['needed_bytes'])} for backward; at least "
        f"{format_bytes(figures['min_bytes'])} of it must be on the device at once"
    )
    rows = [
        {
            **row,
            "memory": format_bytes(row["memory_bytes"]),
            "offloaded": format_bytes(row.get("offloaded_bytes", 0)),
            "speed": f"{row['speed']:.0%}" if "speed" in row else "",
        }
        for row in figures["plans"]
    ]
    views.console().print(views.Listing(printed(rows), COLUMNS))


def rehearsal_command(
    out: Path, device: str, link_bytes_per_s: float, entry: str, args: Sequence[str]
) -> list[str]:
    """Return the command line that measures a training script's first steps."""
    module = [sys.executable, "-P", "-m", "pipeswitch.extras.offload.script_dry_run"]
    return [*module, str(out), device, str(link_bytes_per_s), entry, *args]
