"""Jobs and batched requests in the simulator, compared with closed forms."""

from __future__ import annotations

import json
from itertools import permutations

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.cli.main import main
from pipeswitch.extras.lab.arrivals import Arrival
from pipeswitch.extras.lab.costs import Costs, Link
from pipeswitch.extras.lab.replay import Outcome, PaperJob, PaperModel, Setting, replay
from pipeswitch.programs.interface.layout import Batching

MIB = 1 << 20
STEP_MS = 100.0
LINK = Costs(to_device=Link(bytes_per_ms=float(MIB)))


def job(name: str, seconds: float, mib: int = 2, at_ms: float = 0.0) -> PaperJob:
    return PaperJob(
        name=name,
        steps=round(1000.0 * seconds / STEP_MS),
        step_ms=STEP_MS,
        memory_bytes=mib * MIB,
        at_ms=at_ms,
    )


def trained(order: str, *jobs: PaperJob, mib: int = 64) -> Outcome:
    return replay(Setting(memory_bytes=mib * MIB, costs=LINK, training=order), [], [], jobs)


@pytest.mark.parametrize(
    ("order", "ends"), [("rotate", (6000.0, 5200.0, 3200.0)), ("srtf", (6000.0, 3300.0, 1600.0))]
)
def test_srtf_ends_three_jobs_sooner_on_average_than_turns(
    order: str, ends: tuple[float, ...]
) -> None:
    """Train jobs l, m and s of 3, 2 and 1 s. ``rotate`` runs l m s l m l, for 1 s each, up to the
    next step's end. ``srtf`` runs l m s m l, first three steps each of l and m to learn lengths."""
    outcome = trained(order, job("long", 3.0), job("middle", 2.0), job("short", 1.0))
    assert tuple(one.jct_ms for one in outcome.jobs) == pytest.approx(ends)
    assert outcome.jct_ms == pytest.approx(sum(ends) / 3)
    assert outcome.makespan_ms == pytest.approx(6000.0)
    assert outcome.idle_share == pytest.approx(0.0)
    assert [one.trained_ms for one in outcome.jobs] == pytest.approx([3000.0, 2000.0, 1000.0])


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from((20.0, 100.0, 300.0)), st.integers(0, 9)),
        min_size=2,
        max_size=4,
    )
)
def test_srtf_ends_jobs_no_later_on_average_than_fifo_but_for_what_it_takes_to_learn(
    shapes: list[tuple[int, float, int]],
) -> None:
    """Jobs have any lengths and arrivals. Even if ``fifo`` has the best order, a job delays others
    by at most three steps: two show its length, and it stops at the end of the third."""
    jobs = [
        PaperJob(name=f"j{i}", steps=steps, step_ms=step_ms, memory_bytes=MIB, at_ms=1000.0 * at_s)
        for i, (steps, step_ms, at_s) in enumerate(shapes)
    ]
    fifo, srtf = (trained(order, *jobs) for order in ("fifo", "srtf"))
    assert srtf.jct_ms <= fifo.jct_ms + 3 * sum(step_ms for _, step_ms, _ in shapes)
    assert srtf.makespan_ms == pytest.approx(fifo.makespan_ms)
    by_arrival = sorted(zip(jobs, fifo.jobs, strict=True), key=lambda pair: pair[0].at_ms)
    ends_ms = [job.at_ms + one.jct_ms for job, one in by_arrival]
    assert ends_ms == sorted(ends_ms)


def test_srtf_ends_jobs_of_very_different_lengths_a_quarter_sooner_than_fifo() -> None:
    lengths_s = (1.0, 1.5, 3.0, 12.0)
    means = {
        order: sum(
            trained(order, *(job(str(s), s) for s in row)).jct_ms for row in permutations(lengths_s)
        )
        for order in ("fifo", "srtf")
    }
    assert means["srtf"] < 0.75 * means["fifo"]


def test_by_pack_small_jobs_end_beside_each_other_and_the_large_one_leaves_once() -> None:
    """Memory has room for the large job alone, or for both small jobs."""
    jobs = job("large", 3.0, 8), job("small", 3.0, 4), job("little", 3.0, 4)
    packed, turns = (trained(order, *jobs, mib=9) for order in ("pack", "rotate"))
    large, small, little = packed.jobs
    assert (large.evictions, small.evictions, little.evictions) == (1, 0, 0)
    assert max(small.jct_ms, little.jct_ms) == pytest.approx(7100.0)  # "large" ran a cycle first
    assert large.jct_ms == pytest.approx(9008.0)  # and its copy in
    assert sum(one.evictions for one in turns.jobs) > 1


def test_a_job_waits_in_place_for_just_what_requests_take() -> None:
    """Send five requests to a job's device: they take one copy and five computations."""
    model = PaperModel(name="A", layer_bytes=(10 * MIB,), layer_ms=(20.0,), plan=(0,))
    arrivals = [Arrival(150.0 + 100.0 * i, 0) for i in range(5)]
    outcome = replay(Setting(memory_bytes=64 * MIB, costs=LINK), [model], arrivals, [job("j", 1.0)])
    assert outcome.latency_ms == pytest.approx((30.0, 20.0, 20.0, 20.0, 20.0), abs=0.01)
    (one,) = outcome.jobs
    assert (one.jct_ms, one.trained_ms, one.preempted_ms) == pytest.approx((1110.0, 1000.0, 110.0))
    assert outcome.makespan_ms == pytest.approx(1110.0)
    assert outcome.idle_share == pytest.approx(10 / 1110, abs=1e-4)


def test_a_job_larger_than_the_memory_is_an_error() -> None:
    with pytest.raises(ValueError, match='"large" has 8388608 bytes'):
        trained("rotate", job("large", 1.0, 8), mib=4)


# -- batched requests --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked_at_ms", "took_ms", "busy_ms"),
    [
        ((0.0,), (12.0,), 10.0),  # the request waits for the whole delay
        ((0.0, 1.0), (17.0, 16.0), 15.0),  # the oldest request's delay counts
        ((0.0, 0.0, 0.0, 0.0), (25.0,) * 4, 25.0),  # a full batch starts at once
        ((0.0,) * 5, (25.0,) * 4 + (35.0,), 35.0),
        ((0.0, 3.0), (12.0, 19.0), 20.0),  # the second has waited 2 ms when the first ends
    ],
)
def test_joined_requests_take_what_their_rows_do(
    asked_at_ms: tuple[float, ...], took_ms: tuple[float, ...], busy_ms: float
) -> None:
    """Batch up to four rows, which wait 2 ms. A run takes 10 ms, plus 5 ms per further row."""
    model = PaperModel(
        name="A",
        layer_bytes=(MIB,),
        layer_ms=(10.0,),
        plan=(0,),
        row_share=0.5,
        batching=Batching(limit=4, delay_ms=2.0, is_exact=True),
    )
    warm_ms = 100.0
    arrivals = [Arrival(0.0, 0), *(Arrival(warm_ms + at_ms, 0) for at_ms in asked_at_ms)]
    outcome = replay(Setting(memory_bytes=8 * MIB, costs=LINK), [model], arrivals)
    assert outcome.latency_ms[1:] == pytest.approx(took_ms, abs=0.01)
    assert outcome.busy_ms == pytest.approx(10.0 + busy_ms)


# -- the command -------------------------------------------------------------------------------


def simulate(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["simulate", *args])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_compares_orders_of_jobs() -> None:
    args = (
        "none",
        "--job",
        "long:30:100ms:8MiB",
        "--job",
        "short:10:100ms:8MiB@500ms",
        "--training",
        "rotate,srtf",
        "--memory",
        "32MiB",
    )
    status, text, _ = simulate(*args, "--json")
    assert status == 0
    turns, shortest = json.loads(text)["runs"]
    assert (turns["training"], shortest["training"]) == ("rotate", "srtf")
    assert [one["job"] for one in turns["jobs"]] == ["long", "short"]
    assert shortest["jobs"][1]["at_ms"] == 500.0
    assert turns["jct_ms"] == pytest.approx(sum(one["jct_ms"] for one in turns["jobs"]) / 2)
    status, text, _ = simulate(*args)
    assert status == 0
    assert "IN TIME" not in text
    assert text.split().count("srtf") == 3


def test_the_command_joins_requests() -> None:
    args = "poisson:100", "--requests=200", "--models=random:1", "--memory=100%", "--json"
    alone, batched = (
        json.loads(simulate(*args, *more)[1])["runs"][0]
        for more in ((), ("--batch", "8", "--batch-delay", "2ms", "--batch-row", "10%"))
    )
    assert batched["p99_ms"] < alone["p99_ms"]
    assert batched["makespan_ms"] < alone["makespan_ms"]


@pytest.mark.parametrize(
    ("args", "text_expected"),
    [
        (["none"], "nothing to simulate"),
        (["none", "--job", "a:1:1ms"], "four parts"),
        (["none", "--job", "a:0:1ms:1MiB"], "number of steps"),
        (["none", "--job", "a:1:1:1MiB"], "'1'"),
        (["none", "--job", "a:1:1ms:0"], "some memory"),
        (["none", "--job", "a:1:1ms:1GiB", "--job", "a:1:1ms:1GiB"], "a different name"),
        (["none", "--job", "a:1:1ms:1GiB", "--memory", "1%"], "job a"),
        (["none", "--job", "a:1:1ms:1GiB", "--training", "strf"], 'did you mean "srtf"'),
        (["poisson:5", "--job", "a:1:1ms:1GiB", "--policy", "serial"], "does not simulate jobs"),
        (["poisson:5", "--batch-delay", "2ms"], "--batch 8"),
        (["poisson:5", "--batch", "2", "--batch-row", "2"], "from 0% to 100%"),
    ],
)
def test_bad_input_is_one_sentence(args: list[str], text_expected: str) -> None:
    status, _, error = simulate(*args)
    assert status != 0
    assert text_expected in error
    assert "Traceback" not in error
