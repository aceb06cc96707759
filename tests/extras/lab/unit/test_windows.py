"""Windows of requests (from the thesis): its example, formulas, limits of link and memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import thesis
from benchmarks.thesis import EXAMPLE, exhaustive
from pipeswitch.extras.lab.windows import Memory, makespan_ms, run
from pipeswitch.scheduler.policies.orders import WindowJob, alternating

SERIAL = Memory(is_prefetching=False)
TIMES = st.floats(0.0, 100.0).map(lambda x: round(x, 3))


@st.composite
def distinct(draw: st.DrawFn, most: int = 6) -> list[WindowJob]:
    """Draw jobs, each with its own model of 1 to 10 bytes."""
    return [
        WindowJob(
            model=f"m{i}",
            load_ms=draw(TIMES),
            compute_ms=draw(TIMES),
            size_bytes=draw(st.integers(1, 10)),
        )
        for i in range(draw(st.integers(1, most)))
    ]


@st.composite
def shared(draw: st.DrawFn) -> tuple[list[WindowJob], Memory, tuple[int, ...]]:
    """Draw several jobs per model, a memory that may be too small for all models, and an order."""
    jobs: list[WindowJob] = []
    for model in range(draw(st.integers(1, 4))):
        load_ms, size = draw(TIMES), draw(st.integers(1, 10))
        for _ in range(draw(st.integers(1, 3))):
            jobs.append(
                WindowJob(
                    model=f"m{model}",
                    load_ms=load_ms,
                    compute_ms=draw(TIMES),
                    size_bytes=size,
                    arrived_at_ms=draw(TIMES),
                )
            )
    resident = tuple({j.model: j.size_bytes for j in jobs}.items())[: draw(st.integers(0, 2))]
    least = max(max(j.size_bytes for j in jobs), sum(size for _, size in resident))
    memory = Memory(
        capacity_bytes=least + draw(st.integers(0, 15)),
        resident=resident,
        is_prefetching=draw(st.booleans()),
        is_belady=draw(st.booleans()),
    )
    return jobs, memory, tuple(draw(st.permutations(range(len(jobs)))))


def test_the_worked_example_of_the_thesis() -> None:
    """The order A, B, C, D takes 2375 ms, or 2062.5 ms with prefetch; D, B, C, A takes 2005 ms."""
    order = alternating(EXAMPLE)
    assert "".join(EXAMPLE[i].model for i in order) == "DBCA"
    assert makespan_ms(EXAMPLE, range(4), SERIAL) == 2375.0
    assert makespan_ms(EXAMPLE, range(4)) == 2062.5
    assert makespan_ms(EXAMPLE, order) == 2005.0
    assert makespan_ms(EXAMPLE, exhaustive(EXAMPLE)) == 2005.0


def test_a_resident_model_weighs_most_and_of_equals_the_shorter_load() -> None:
    jobs = [
        WindowJob(model="a", load_ms=10.0, compute_ms=10.0),
        WindowJob(model="b", load_ms=5.0, compute_ms=5.0),
        WindowJob(model="c", load_ms=0.0, compute_ms=1.0),
        WindowJob(model="d", load_ms=100.0, compute_ms=1.0),
        WindowJob(model="e", load_ms=100.0, compute_ms=2.0),
    ]
    assert alternating(jobs) == (2, 3, 1, 4, 0)  # c d b e a


@given(distinct())
def test_johnson_is_the_optimum_where_everything_fits(jobs: list[WindowJob]) -> None:
    best = makespan_ms(jobs, exhaustive(jobs))
    assert makespan_ms(jobs, thesis.johnson(jobs)) == pytest.approx(best)
    compute_ms, load_ms = [j.compute_ms for j in jobs], [j.load_ms for j in jobs]
    min_ms = max(min(load_ms) + sum(compute_ms), sum(load_ms) + min(compute_ms))
    assert best >= min_ms - 1e-6


@given(distinct())
def test_memory_for_one_model_is_no_prefetch_at_all(jobs: list[WindowJob]) -> None:
    one = [
        WindowJob(model=j.model, load_ms=j.load_ms, compute_ms=j.compute_ms, size_bytes=1)
        for j in jobs
    ]
    total = sum(j.load_ms + j.compute_ms for j in jobs)
    order = range(len(jobs))
    assert makespan_ms(one, order, Memory(capacity_bytes=1)) == pytest.approx(total)
    assert makespan_ms(one, order, SERIAL) == pytest.approx(total)


@given(distinct())
def test_what_is_resident_costs_its_computing_alone(jobs: list[WindowJob]) -> None:
    memory = Memory(resident=tuple((j.model, j.size_bytes) for j in jobs))
    turns = run(jobs, range(len(jobs)), memory)
    assert turns[-1].ends_at_ms == pytest.approx(sum(j.compute_ms for j in jobs))
    assert all(turn.load_begins_at_ms is None for turn in turns)


def test_a_model_larger_than_the_memory_is_an_error() -> None:
    with pytest.raises(ValueError, match='"a" has 5 bytes'):
        run(
            [WindowJob(model="a", load_ms=1.0, compute_ms=1.0, size_bytes=5)],
            [0],
            Memory(capacity_bytes=4),
        )


@given(shared())
def test_link_and_device_are_serial_and_memory_is_never_over(
    case: tuple[list[WindowJob], Memory, tuple[int, ...]],
) -> None:
    jobs, memory, order = case
    turns = run(jobs, order, memory)
    assert [turn.job for turn in turns] == list(order)
    for before, after in itertools.pairwise(turns):
        assert after.begins_at_ms >= before.ends_at_ms
    loads = [t for t in turns if t.load_begins_at_ms is not None]
    for before, after in itertools.pairwise(loads):
        assert after.load_begins_at_ms is not None
        assert after.load_begins_at_ms >= before.load_ends_at_ms
    stays: list[tuple[float, float, int]] = []  # begin and end (ms) of each model's stay; its bytes
    where: dict[str, int] = {}
    for name, size in memory.resident:
        where[name] = len(stays)
        stays.append((0.0, 0.0, size))
    for turn in turns:
        job = jobs[turn.job]
        assert turn.begins_at_ms >= max(job.arrived_at_ms, turn.load_ends_at_ms)
        if turn.load_begins_at_ms is not None:
            assert turn.load_begins_at_ms >= job.arrived_at_ms
            where[job.model] = len(stays)
            stays.append((turn.load_begins_at_ms, turn.ends_at_ms, job.size_bytes))
        else:
            begins, _, size = stays[where[job.model]]
            stays[where[job.model]] = (begins, turn.ends_at_ms, size)
    for instant in [begins for begins, _, _ in stays]:
        pinned = sum(s for begins, ends, s in stays if begins <= instant < ends)
        assert pinned <= memory.capacity_bytes


@given(shared())
def test_the_alternating_order_has_each_job_once(
    case: tuple[list[WindowJob], Memory, tuple[int, ...]],
) -> None:
    jobs, _, _ = case
    assert sorted(alternating(jobs)) == list(range(len(jobs)))
