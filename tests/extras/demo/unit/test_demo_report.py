"""Calculations of the demo: percentiles, parts of a request's time, remaining training speed."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipeswitch.extras.demo import report as demo_report
from pipeswitch.extras.demo import run as demo

BILL = {"queue_ms": 1.0, "switch_ms": 2.0, "copy_ms": 3.0, "stall_ms": 4.0, "compute_ms": 5.0}


def test_a_percentile_is_a_value_that_was_measured() -> None:
    assert demo_report.percentile([3.0, 1.0, 2.0, 4.0], 0.50) == 2.0
    assert demo_report.percentile([3.0, 1.0, 2.0, 4.0], 0.99) == 4.0
    assert demo_report.percentile([7.0], 0.50) == 7.0


def test_the_bill_is_averaged_and_switches_are_counted() -> None:
    first = {**BILL, "resident": True, "preempted": ""}
    second = {**BILL, "compute_ms": 15.0, "resident": False, "preempted": "digits"}
    averaged = demo_report.timing_summary([first, second])
    assert averaged["compute_ms"] == 10.0
    assert (averaged["resident_count"], averaged["preempted_count"]) == (1, 1)


def test_kept_speed_is_measured_against_the_windows_without_requests() -> None:
    speed = demo_report.kept_speed((2.0, 100), (10.0, 300), (2.0, 60), busy_ms=2500.0)
    assert speed["steps_per_s_alone"] == 40.0
    assert speed["kept_percent"] == 75.0
    assert speed["device_time_of_requests_percent"] == 25.0


def _result(**changes: object) -> dict[str, object]:
    training = {
        "state": "done",
        "error": "",
        "steps_lost": 0,
        "suspensions": 3,
        "kept_percent": 60.0,
        "device_time_of_requests_percent": 40.0,
        "accuracy_percent": 98.5,
    }
    ends = {"count": 2, "p50_ms": 12.0, "p95_ms": 4200.0, "by_model": {"m": {}}}
    bill = {**BILL, "resident_count": 1, "preempted_count": 2}
    return {
        "pipeswitch": {**ends, **bill},
        "plan": {"fast": "m"},
        "ready_model": ends,
        "ready_model_in_fast_turns": ends,
        "stop_and_start": ends,
        "training": training,
        "errors": [],
        "largest_difference": 0.0,
        "fast": {
            "pipeswitch": {**ends, **bill, "p50_ms": 7.0},
            "errors": [],
            "largest_error": 1e-6,
        },
        **changes,
    }


def test_the_table_shows_the_run_and_nothing_else() -> None:
    text = io.StringIO()
    demo_report.show(_result(), Console(file=text, width=120))
    for part in (
        "12 ms",
        "4.20 s",
        "0 steps lost",
        "3 suspensions",
        "60 %",
        "98.5 %",
        "bit-equal",
        "7.0 ms",
        "0.58 times the ready m's",
        "1.0e-06",
    ):
        assert part in text.getvalue()


def test_a_lower_bound_that_is_none_is_said_to_be_noise() -> None:
    text = io.StringIO()
    demo_report.show(_result(), Console(file=text, width=200))
    assert "run it again" not in text.getvalue()
    slow = {"count": 2, "p50_ms": 13.0, "p95_ms": 4200.0, "by_model": {"m": {}}}
    demo_report.show(_result(ready_model=slow), Console(file=text, width=200))
    assert "run it again" in text.getvalue()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"errors": ["QueueFull: no"]}, "request failed"),
        ({"largest_difference": 0.5}, "differs from the plain"),
        ({"largest_difference": float("nan")}, "differs from the plain"),
        ({"fast": {"errors": ["QueueFull: no"], "largest_error": 0.0}}, "precision fast"),
        ({"fast": {"errors": [], "largest_error": float("nan")}}, "precision fast: the error"),
    ],
)
def test_what_must_not_happen_is_a_problem(changes: dict[str, object], text: str) -> None:
    assert demo._problems(_result()) == []
    assert text in demo._problems(_result(**changes))[0]


def test_a_lost_step_is_a_problem() -> None:
    training = {**dict(_result()["training"]), "steps_lost": 2}  # type: ignore[call-overload]
    assert demo._problems(_result(training=training)) == ["2 training steps had to be recomputed"]
