"""Orders of the thesis: its example, its formulas, and the rule of Johnson."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.thesis import EXAMPLE, exhaustive, johnson, total_ms
from pipeswitch.scheduler.policies.orders import WindowJob, alternating

TIMES = st.floats(0.0, 100.0).map(lambda x: round(x, 3))
JOBS = st.lists(st.builds(WindowJob, load_ms=TIMES, compute_ms=TIMES), min_size=1, max_size=6)


def test_the_worked_example_of_the_thesis() -> None:
    """The order A, B, C, D takes 2375 ms, or 2062.5 ms with prefetch; D, B, C, A takes 2005 ms."""
    jobs = [*EXAMPLE.values()]
    order = alternating(jobs)
    assert "".join([*EXAMPLE][i] for i in order) == "DBCA"
    assert total_ms(jobs, range(4), is_prefetching=False) == 2375.0
    assert total_ms(jobs, range(4)) == 2062.5
    assert total_ms(jobs, order) == 2005.0
    assert total_ms(jobs, exhaustive(jobs)) == 2005.0


def test_a_resident_model_weighs_most_and_of_equals_the_shorter_load() -> None:
    jobs = [
        WindowJob(load_ms=10.0, compute_ms=10.0),
        WindowJob(load_ms=5.0, compute_ms=5.0),
        WindowJob(load_ms=0.0, compute_ms=1.0),
        WindowJob(load_ms=100.0, compute_ms=1.0),
        WindowJob(load_ms=100.0, compute_ms=2.0),
    ]
    assert alternating(jobs) == (2, 3, 1, 4, 0)


@given(JOBS)
def test_johnson_is_the_optimum(jobs: list[WindowJob]) -> None:
    best_ms = total_ms(jobs, exhaustive(jobs))
    assert total_ms(jobs, johnson(jobs)) == pytest.approx(best_ms)
    compute_ms, load_ms = [j.compute_ms for j in jobs], [j.load_ms for j in jobs]
    min_ms = max(min(load_ms) + sum(compute_ms), sum(load_ms) + min(compute_ms))
    assert best_ms >= min_ms - 1e-6
    serial_ms = total_ms(jobs, range(len(jobs)), is_prefetching=False)
    assert serial_ms == pytest.approx(sum(compute_ms) + sum(load_ms))


@given(JOBS)
def test_the_alternating_order_has_each_job_once(jobs: list[WindowJob]) -> None:
    assert sorted(alternating(jobs)) == list(range(len(jobs)))
