"""The demo's numbers and their display. Pure: it gets lists of milliseconds and returns rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from ...base.quantiles import percentile

BILL: Final = ("queue_ms", "switch_ms", "copy_ms", "stall_ms", "compute_ms")
SECOND_MS: Final = 1000.0


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean, or 0 if there are no values."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def latency(values_ms: Sequence[float]) -> dict[str, Any]:
    """Return a summary of latencies in milliseconds."""
    return {
        "count": len(values_ms),
        "p50_ms": round(percentile(values_ms, 0.50), 3),
        "p95_ms": round(percentile(values_ms, 0.95), 3),
        "mean_ms": round(mean(values_ms), 3),
    }


def timing_summary(timings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return mean times, and the counts of answers without a copy and with a preempted job."""
    return {
        **{name: round(mean(float(t[name]) for t in timings), 3) for name in BILL},
        "resident_count": sum(bool(t["resident"]) for t in timings),
        "preempted_count": sum(bool(t["preempted"]) for t in timings),
    }


def kept_speed(
    before: tuple[float, int], under: tuple[float, int], after: tuple[float, int], busy_ms: float
) -> dict[str, Any]:
    """Return training's speeds, and the share of its speed that it kept while requests came.

    Args:
        before: (seconds, finished steps) of the window before the requests.
        under: seconds and steps while requests came.
        after: the same after the requests. A difference from ``before`` shows the machine's drift.
        busy_ms: time for which requests had the device in the middle window.
    """
    alone = (before[1] + after[1]) / (before[0] + after[0])
    rate = under[1] / under[0]
    share = min(1.0, busy_ms / SECOND_MS / under[0])
    return {
        "steps_per_s_before": round(before[1] / before[0], 3),
        "steps_per_s_after": round(after[1] / after[0], 3),
        "steps_per_s_alone": round(alone, 3),
        "steps_per_s_under_requests": round(rate, 3),
        "kept_percent": round(100.0 * rate / alone, 1) if alone else 0.0,
        "device_time_of_requests_percent": round(100.0 * share, 1),
    }


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the README's table and sentences from the result of this run."""
    view = Table(box=None, pad_edge=False, header_style="bold")
    view.add_column("")
    for title in ("p50", "p95", "queue", "switch", "copy", "stall", "compute"):
        view.add_column(title, justify="right")
    ours, ready, cold = (result[n] for n in ("pipeswitch", "ready_model", "stop_and_start"))
    no_bill = ["-"] * len(BILL)
    view.add_row("pipeswitch", *_ends(ours), *(_span(ours[name]) for name in BILL))
    fast = result["fast"]["pipeswitch"]
    fast_name = result["plan"]["fast"]
    view.add_row(f"fast, {fast_name}", *_ends(fast), *(_span(fast[name]) for name in BILL))
    view.add_row("ready model", *_ends(ready), *no_bill)
    view.add_row("stop-and-start", *_ends(cold), *no_bill)
    console.print(view)
    console.print(
        f"ready model: all {len(ready['by_model'])} stay loaded in a plain process, the same "
        "requests, no training (lower bound)\n"
        f"stop-and-start: a new process for each of {cold['count']} requests, file cache warm"
    )
    if ready["p50_ms"] > ours["p50_ms"]:
        console.print(
            "note: the lower bound came out above pipeswitch, so other work ran on this machine "
            "meanwhile; run it again when it is quiet"
        )
    _show_requests(ours, result["largest_difference"], console)
    alike_ms = result["ready_model_in_fast_turns"]["p50_ms"]
    console.print(
        f"precision fast: p50 {fast['p50_ms'] / alike_ms:.2f} times the ready {fast_name}'s, "
        f"error {result['fast']['largest_error']:.1e} of the largest output"
    )
    _show_training(result["training"], console)


def _show_requests(ours: Mapping[str, Any], difference: float, console: Console) -> None:
    equal = (
        "in precision exact bit-equal to" if difference == 0.0 else f"within {difference:.1e} of"
    )
    console.print(
        f"requests: {ours['count']} answered, {equal} the plain models' answers; "
        f"{ours['count'] - ours['resident_count']} switched a model in, "
        f"{ours['resident_count']} found it resident, {ours['preempted_count']} preempted the job"
    )


def _show_training(training: Mapping[str, Any], console: Console) -> None:
    console.print(
        f"training: {training['steps_lost']} steps lost, {training['suspensions']} suspensions, "
        f"kept {training['kept_percent']:.0f} % of its speed while requests held the device for "
        f"{training['device_time_of_requests_percent']:.0f} % of the time, "
        f"accuracy {training['accuracy_percent']:.1f} %"
    )


def _ends(row: Mapping[str, Any]) -> tuple[str, str]:
    return _span(row["p50_ms"]), _span(row["p95_ms"])


def _span(value_ms: float) -> str:
    if value_ms >= SECOND_MS:
        return f"{value_ms / SECOND_MS:.2f} s"
    return f"{value_ms:.0f} ms" if value_ms >= 10.0 else f"{value_ms:.1f} ms"
