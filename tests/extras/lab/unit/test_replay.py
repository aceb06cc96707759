"""Replays of traces through the real scheduler on the virtual clock, and their command."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
import re
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import thesis
from pipeswitch.cli.main import main
from pipeswitch.extras.lab import arrivals
from pipeswitch.extras.lab.arrivals import Arrival, TraceError
from pipeswitch.extras.lab.costs import Costs, Link
from pipeswitch.extras.lab.replay import (
    Models,
    Outcome,
    PaperModel,
    Replay,
    Setting,
    quantile_ms,
    replay,
    serial,
)
from pipeswitch.programs.interface.layout import Batching
from pipeswitch.scheduler.state.events import Reply, Spans

DATA = files("pipeswitch.extras.lab") / "data"
PER_MS = 1 << 20  # bytes that the link copies in a millisecond
LINK = Costs(to_device=Link(bytes_per_ms=float(PER_MS)))


def whole(name: str, load_ms: float, compute_ms: float) -> PaperModel:
    """Return a model of one group, so that it computes only after all its bytes are copied."""
    return PaperModel(
        name=name, layer_bytes=(int(load_ms * PER_MS),), layer_ms=(compute_ms,), plan=(0,)
    )


def at_once(models: list[PaperModel], order: str, **settings: Any) -> Outcome:
    names = [model.name for model in models]
    arrived = [Arrival(i * 1e-6, names.index(name)) for i, name in enumerate(order)]
    memory = settings.pop("memory_bytes", 2 * sum(model.size_bytes for model in models))
    setting = Setting(memory_bytes=memory, costs=LINK, policy="fifo", **settings)
    return replay(setting, models, arrived)


@pytest.mark.parametrize(("order", "total_ms"), [("ABCD", 2062.5), ("DBCA", 2005.0)])
def test_the_worked_example_of_the_thesis_on_the_real_scheduler(
    order: str, total_ms: float
) -> None:
    models = [whole(name, *job) for name, job in thesis.EXAMPLE.items()]
    outcome = at_once(models, order)
    assert outcome.makespan_ms == pytest.approx(total_ms, abs=0.01)
    assert outcome.order == (0, 1, 2, 3)
    assert outcome.busy_ms == sum(job.compute_ms for job in thesis.EXAMPLE.values())


def test_memory_for_one_model_is_no_prefetch_at_all() -> None:
    models = [whole(name, 10.0, 20.0) for name in "AB"]
    one = models[0].size_bytes + (1 << 20)
    assert at_once(models, "ABAB", memory_bytes=one).makespan_ms == pytest.approx(120.0, abs=0.01)
    assert at_once(models, "ABAB").makespan_ms == pytest.approx(90.0, abs=0.01)


def test_what_is_resident_takes_its_computing_alone() -> None:
    outcome = at_once([whole("A", 10.0, 20.0)], "AAA")
    assert outcome.switches == 1
    assert outcome.copied_bytes == 10 * PER_MS
    assert outcome.latency_ms == pytest.approx((30.0, 50.0, 70.0), abs=0.01)
    assert quantile_ms(outcome, 0.5) == pytest.approx(50.0, abs=0.01)
    assert outcome.idle_share == pytest.approx(10 / 70, abs=0.01)


def test_the_first_group_computes_while_the_second_arrives() -> None:
    model = PaperModel(name="A", layer_bytes=(5 * PER_MS,) * 2, layer_ms=(20.0, 20.0), plan=(0, 1))
    assert at_once([model], "A").latency_ms == pytest.approx((45.0,), abs=0.01)


@pytest.mark.parametrize("sizes", ["01", "10", "001", "010", "100", "0101", "0", "00"])
def test_groups_without_bytes_are_served(sizes: str) -> None:
    """A layer without weights may be a group of its own, anywhere in the plan."""
    layers = tuple(5 * PER_MS * int(size) for size in sizes)
    models = [
        PaperModel(name=name, layer_bytes=layers, layer_ms=(1.0,) * len(layers), plan=plan)
        for name, plan in (("A", tuple(range(len(layers)))), ("B", (0,)))
    ]
    outcome = at_once(models, "AABBAB", memory_bytes=sum(layers) + (1 << 20))
    assert len(outcome.latency_ms) == 6


def test_late_requests_are_computed_or_refused_as_the_setting_says() -> None:
    models = [whole("A", 1.0, 20.0)]
    late = at_once(models, "A" * 10, slo_ms=50.0)
    assert (late.in_slo, late.refused, len(late.latency_ms)) == (3, {}, 10)
    dropped = at_once(models, "A" * 10, slo_ms=50.0, has_deadlines=True)
    assert dropped.in_slo >= 3
    assert set(dropped.refused) == {"DeadlineExceeded"}
    assert sum(dropped.refused.values()) + len(dropped.latency_ms) == 10


def test_serial_overlaps_nothing_and_admission_refuses_what_would_be_late() -> None:
    models = [whole(name, 10.0, 20.0) for name in "AB"]
    requests = [Arrival(0.0, 0), Arrival(0.0, 1), Arrival(1.0, 0), Arrival(1.5, 1)]
    setting = Setting(memory_bytes=30 * PER_MS, costs=LINK, slo_ms=45.0)
    one_by_one = serial(setting, models, requests)
    assert one_by_one.latency_ms == pytest.approx((30.0, 60.0, 79.0, 98.5))
    assert (one_by_one.in_slo, one_by_one.switches, one_by_one.makespan_ms) == (2, 2, 100.0)
    for_one = dataclasses.replace(setting, memory_bytes=10 * PER_MS)
    assert serial(for_one, models, requests).latency_ms == pytest.approx((30.0, 60.0, 89.0, 118.5))
    with pytest.raises(ValueError, match='"A" has'):
        serial(dataclasses.replace(setting, memory_bytes=PER_MS), models, requests)
    strict = dataclasses.replace(setting, has_deadlines=True, admission="deadline")
    warm = [Arrival(0.0, 0), Arrival(200.0, 1)]  # these runs measure the models' times
    outcome = replay(strict, models, [*warm, *(Arrival(400.0 + i, i % 2) for i in range(6))])
    assert outcome.refused["DeadlineExceeded"] >= 2
    assert outcome.in_slo == len(outcome.latency_ms)


def test_tokens_come_one_after_the_other_and_join_those_of_others() -> None:
    models = [whole("A", 10.0, 4.0), whole("B", 10.0, 4.0)]
    setting = Setting(memory_bytes=30 * PER_MS, costs=LINK, slo_ms=20.0, prompt_share=0.01)
    alone = replay(setting, models, [Arrival(0.0, 0, prompt=100, tokens=5)])
    assert alone.latency_ms == pytest.approx((18.0,), abs=0.01)  # ms: copy 10, prompt 4, step 4
    assert alone.between_ms == pytest.approx((4.0,) * 4, abs=0.01)
    assert (alone.in_slo, alone.makespan_ms) == (1, pytest.approx(34.0, abs=0.01))
    assert alone.busy_ms == pytest.approx(24.0, abs=0.01)
    batched = [
        dataclasses.replace(
            model, row_share=0.5, batching=Batching(limit=4, delay_ms=0.0, is_exact=True)
        )
        for model in models
    ]
    six = replay(setting, batched, [Arrival(0.1 * at, 0, tokens=5) for at in range(6)])
    assert len(six.between_ms) == 24
    assert six.busy_ms < 27 * 4.0  # in a batch, each further row takes half as long
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:20:07.1,30,2\n"
    (plain,), (with_tokens,) = (
        arrivals.of_services([text], has_tokens=has_tokens).arrivals for has_tokens in (False, True)
    )
    assert (plain, with_tokens) == (Arrival(0.0, 0), Arrival(0.0, 0, prompt=30, tokens=2))


def test_a_model_larger_than_the_memory_is_an_error() -> None:
    with pytest.raises(ValueError, match='"A" has 10485760 bytes'):
        at_once([whole("A", 10.0, 1.0)], "A", memory_bytes=PER_MS)


def test_the_timeline_and_the_watcher_are_told() -> None:
    spans: list[Spans] = []
    counts: list[int] = []
    setting = Setting(memory_bytes=100 * PER_MS, costs=LINK)
    trace = arrivals.poisson(20.0, count=1000, model_count=2, seed=3)
    models = [whole("a", 5.0, 5.0), whole("b", 5.0, 5.0)]
    outcome = replay(setting, models, trace.arrivals, watch=counts.append, take_span=spans.append)
    assert counts == [500, 1000]
    assert {span.track for one in spans for span in one.spans} > {"scheduler", "copy"}
    assert sorted(outcome.order) == list(range(1000))


# -- traces ------------------------------------------------------------------------------------


def test_the_traces_that_come_along_are_the_published_ones() -> None:
    digests = dict(re.findall(r"([0-9a-f]{64})  (\S+)", (DATA / "README.md").read_text("utf-8")))
    assert len(digests) == 4
    for digest, name in digests.items():
        assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() == digest, name


def test_azure_functions_are_spread_over_their_minutes() -> None:
    text = (DATA / "azure_functions_2019_100fn_invocations.csv").read_text("utf-8")
    trace = arrivals.of_functions(text, speed_up=20.0, seed=1)
    assert (len(trace.arrivals), trace.model_count) == (49_317, 100)
    assert list(trace.arrivals) == sorted(trace.arrivals)
    assert trace.arrivals[-1].at_ms <= 24 * 3600e3 / 20
    busiest = sum(arrival.model == 0 for arrival in trace.arrivals)
    assert busiest == 14_214
    assert arrivals.of_functions(text, speed_up=20.0, seed=1) == trace
    assert arrivals.of_functions(text, speed_up=20.0, seed=2) != trace


def test_azure_services_come_in_order_of_their_times() -> None:
    texts = [
        (DATA / f"azure_llm_2023_{kind}_15min.csv").read_text("utf-8") for kind in ("code", "conv")
    ]
    trace = arrivals.of_services(texts)
    assert [sum(a.model == m for a in trace.arrivals) for m in (0, 1)] == [2842, 4518]
    assert trace.arrivals[0].at_ms == 0.0
    assert trace.arrivals[-1].at_ms < 15 * 60e3


def test_random_arrivals_have_the_rate_and_repeat_with_their_seed() -> None:
    trace = arrivals.poisson(100.0, count=20_000, model_count=5, seed=7)
    assert trace.arrivals[-1].at_ms == pytest.approx(200e3, rel=0.05)
    counts = [sum(a.model == m for a in trace.arrivals) for m in range(5)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] / counts[1] == pytest.approx(2.0, rel=0.1)
    assert trace == arrivals.poisson(100.0, count=20_000, model_count=5, seed=7)


@pytest.mark.parametrize(
    ("text", "text_expected"),
    [
        ("", "no rows"),
        ("at_ms,model\n", "no rows"),
        ("time,model\n1,a\n", "line 1"),
        ("at_ms,model\nx,a\n", "line 2"),
        ("at_ms,model\n1,a\n-1,a\n", "line 3"),
        ("at_ms,model\nnan,a\n", "line 2"),
        ("at_ms,model\n1\n", "line 2"),
        ("at_ms,model\n1,\n", "line 2"),
        ("at_ms,model,deadline_ms\n1,a,x\n", "line 2"),
        ("at_ms,model,deadline_ms\n1,a,-5\n", "line 2"),
    ],
)
def test_what_is_no_trace_is_said_with_its_line(text: str, text_expected: str) -> None:
    with pytest.raises(TraceError, match=text_expected):
        arrivals.of_rows(text)


def test_a_request_of_ones_own_trace_may_have_a_deadline_of_its_own() -> None:
    trace, names = arrivals.of_rows("at_ms,model,deadline_ms\n0,a\n2,a,5\n1,a,\n3,a\n")
    assert names == ["a"]
    assert [a.deadline_ms for a in trace.arrivals] == [None, None, 5.0, None]
    setting = Setting(memory_bytes=8 * PER_MS, costs=LINK)
    outcome = replay(setting, [whole("a", 1.0, 20.0)], trace.arrivals)
    assert outcome.refused == {"DeadlineExceeded": 1}


@pytest.mark.parametrize("cell", ["x", "-1", "1.5", "9999999999"])
def test_a_count_that_cannot_be_is_said_with_its_line(cell: str) -> None:
    with pytest.raises(TraceError, match="line 3"):
        arrivals.of_functions(f"HashFunction,1_minute\na,1\nb,{cell}\n")


# -- the command -------------------------------------------------------------------------------


def simulate(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["simulate", *args])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_compares_policies_and_memories(tmp_path: Path) -> None:
    drawn, traced = tmp_path / "plot.png", tmp_path / "trace.json"
    words = "poisson:50", "--requests=120", "--models=random:10", "--memory=30%,90%", "--json"
    files = "--plot", str(drawn.with_suffix("")), "--timeline", str(traced)
    status, text, _ = simulate(*words, *files)
    assert status == 0
    report = json.loads(text)
    assert (report["requests"], report["models"], report["is_estimate"]) == (120, 10, True)
    runs = [(run["memory"], run["policy"]) for run in report["runs"]]
    assert runs == [("30%", "fifo"), ("30%", "priority"), ("90%", "fifo"), ("90%", "priority")]
    assert all(0.0 < run["in_slo"] <= 1.0 and run["refused"] == 0 for run in report["runs"])
    assert report["runs"][0]["switches"] > report["runs"][2]["switches"]
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert any(
        event.get("name") == "switch" for event in json.loads(traced.read_text())["traceEvents"]
    )


FAILING = """
from pipeswitch.scheduler.policies import Eviction, Order, Policy

class Failing(Order):
    window = 3 if "{method}" == "arrange" else 0
    def {method}(self, *args):
        raise RuntimeError("of mine")

def make(*, max_wait_ms):
    return Policy("failing", Failing(), Eviction())
"""


def test_the_command_takes_ones_own_models_and_trace(tmp_path: Path) -> None:
    models, trace = tmp_path / "models.json", tmp_path / "own.csv"
    rows = [
        {"name": "a", "bytes": 8_000_000, "compute_ms": 2.5},
        {"name": "b", "bytes": 4_000_000, "compute_ms": 1.0, "layers": 2},
    ]
    models.write_text(json.dumps(rows))
    trace.write_text("at_ms,model\n0,b\n5,a\n9,b\n")
    command = (str(trace), "--models", str(models), "--memory", "16MiB", "--json")
    status, text, _ = simulate(*command)
    assert status == 0
    report = json.loads(text)
    assert (report["requests"], report["models"], report["models_bytes"]) == (3, 2, 12_000_000)
    rows.append(rows[0] | {"name": "tuned", "shares_with": "a", "shared_bytes": 6_000_000})
    models.write_text(json.dumps(rows))
    trace.write_text("at_ms,model\n0,a\n90,tuned\n")
    [run] = json.loads(simulate(*command[:-2], "9MiB", "--json")[1])["runs"][:1]
    assert 10_000_000 <= run["copied_bytes"] < 10_200_000
    trace.write_text("at_ms,model\n0,b\n5,c\n")
    status, _, error = simulate(*command[:-1])
    assert status != 0
    assert "'c', which is not a model" in error
    for odd in ({"shares_with": "no"}, {"shares_with": "tuned"}, {"shared_bytes": -3}):
        models.write_text(json.dumps([*rows, rows[0] | {"name": "odd"} | odd]))
        status, _, error = simulate(*command[:-1])
        assert status != 0
        assert "'odd'" in error


OF_MINE = """
from pipeswitch.scheduler.policies import Eviction, Order, Policy

class Newest(Order):
    def rank(self, head, view):
        return (-head.arrived_at_ms,)

class Broken(Order):
    def rank(self, head, view):
        raise KeyError("a bug")

def newest(*, max_wait_ms):
    return Policy("newest", Newest(), Eviction())

def broken(*, max_wait_ms):
    return Policy("broken", Broken(), Eviction())
"""


def test_the_command_takes_ones_own_policy_and_says_so_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "for_simulate.py").write_text(OF_MINE)
    monkeypatch.syspath_prepend(tmp_path)
    policies = "fifo,for_simulate:newest,priority,for_simulate:broken"
    status, text, error = simulate(
        "poisson:80", "--requests", "300", "--memory", "30%", "--policy", policies, "--json"
    )
    assert status == 1
    runs = json.loads(text)["runs"]
    assert [run.pop("policy") for run in runs] == policies.split(",")
    fifo, newest, _, broken = runs
    assert newest["p50_ms"] < fifo["p50_ms"]  # most requests run while they are the newest
    assert set(broken) == {"memory", "failed"}  # the numbers would be those of ``priority``
    assert error.startswith("Error: ")
    assert 'policy "for_simulate:broken" has no result: ' in error


@pytest.mark.parametrize("method", ["key", "rank", "stays_until_ms", "may_backfill", "arrange"])
@pytest.mark.parametrize("where", [(), ("--nodes", "2"), ("--job", "j:5:10ms:1MiB")])
def test_a_policy_that_fails_anywhere_has_no_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, where: tuple[str, ...]
) -> None:
    (tmp_path / "failing.py").write_text(FAILING.format(method=method))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "failing", raising=False)
    arguments = ("poisson:80", "--requests", "200", "--memory", "100%", *where, "--policy")
    plot = tmp_path / "p.png"
    status, text, error = simulate(*arguments, "failing:make,fifo", "--plot", str(plot))
    called = 'policy "failing:make" has no result: ' in error
    assert called == (method not in ("may_backfill",) or status == 1)
    assert (status, "failing:make" in text) == ((1, False) if called else (0, True))
    assert plot.exists()


@pytest.mark.parametrize("head", ["", "at_ms,model\n", "\ufeffat_ms, model ,deadline_ms\n", "\n"])
def test_a_trace_may_have_a_header(tmp_path: Path, head: str) -> None:
    trace = tmp_path / "own.csv"
    trace.write_text(f"{head}0,a\n5,b\n")
    status, text, error = simulate(str(trace), "--json")
    assert (status, json.loads(text)["requests"]) == (0, 2), error
    trace.write_text(f"{head}0;a\n")
    status, _, error = simulate(str(trace))
    assert (status != 0, "expected 12.5,name" in error) == (True, True)


def test_shares_that_are_not_given_fit_the_largest_model() -> None:
    status, text, error = simulate("poisson:50", "--requests", "50", "--json")
    assert status == 0, error
    assert [run["memory"] for run in json.loads(text)["runs"]] == ["9%", "9%", "25%", "25%"]
    assert error == 'memory is 9% instead of 6%: "m15" has 428.97 MiB\n'


def test_the_least_share_that_is_told_works(tmp_path: Path) -> None:
    models, trace = tmp_path / "models.json", tmp_path / "own.csv"
    rows = [
        {"name": name, "bytes": size, "compute_ms": 1.0, "layers": 1}
        for name, size in (("a", 57_000_000), ("b", 43_000_000))
    ]
    models.write_text(json.dumps(rows))
    trace.write_text("at_ms,model\n0,a\n5,b\n")
    command = (str(trace), "--models", str(models), "--memory")
    _, _, error = simulate(*command, "1%")
    (least,) = re.findall(r"--memory (\d+%) at least", error)
    status, output, error = simulate(*command, f"1%,{least}", "--csv")
    assert status == 0, error
    assert "left out" in error
    head, *lines = output.splitlines()
    assert head.startswith("memory,policy,in_slo,")
    assert [line.split(",")[0] for line in lines] == [least, least]
    assert "random sizes" not in simulate(*command, least)[1]


def test_a_policy_is_found_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_order.py").write_text(
        "from pipeswitch.scheduler.policies import MAKERS\nmake = MAKERS['priority']\n"
    )
    monkeypatch.chdir(tmp_path)
    status, output, error = simulate("poisson:5", "--requests", "9", "--policy", "own_order:make")
    assert (status, "random sizes" in output) == (0, True), error


HUGE = "9" * 400  # too large for a float


@pytest.mark.parametrize(
    ("args", "text_expected"),
    [
        (["nosuch"], "no trace 'nosuch'"),
        (["azure", "--policy", "prio"], 'did you mean "priority"?'),
        (["azure", "--policy", "no_such:make"], "No module named 'no_such'"),
        (["azure", "--device", "v10"], "no device 'v10'"),
        (["azure", "--memory", "1%"], "at least"),
        (["azure", "--memory", "much"], "--memory much"),
        (["poisson:-1"], "above 0"),
        (["poisson"], "poisson:RATE"),
        (["poisson:"], "poisson:RATE"),
        (["poisson:a"], "poisson:RATE"),
        (["poisson:5", "--memory", "6%"], "--memory 9% at least"),
        (["poisson:5", "--memory", "x%"], "--memory x%: a number above 0, at most"),
        (["none", "--job", "a:1:1ms:1MiB", "--plot", "p.txt"], "png"),
        (["none", "--job", "a:1:1ms:1MiB", "--plot", "p.png"], "--plot: no requests"),
        (["poisson:5", "--timeline", "sim.png"], "sim.png: the name ends in .json"),
        (
            ["none", "--job", "a:1:1ms:1MiB", "--plot", "/no/such/p"],
            "/no/such/p.png: not a writable folder",
        ),
        (
            ["none", "--job", "a:1:1ms:1MiB", "--timeline", "/no/t"],
            "--timeline /no/t: not a writable folder",
        ),
        (["poisson:5", "--memory", "1e308%"], "--memory 1e308%: a number above 0, at most"),
        (["poisson:5", "--memory", f"{HUGE}MiB"], "MiB' is too large"),
        (["poisson:5", "--memory", HUGE], "is not of the form"),
        (["none", "--job", f"a:{HUGE}:1ms:1MiB"], "a number of steps"),
        (["none", "--job", f"a:1:1ms:1MiB@{HUGE}s"], "s' is too large"),
        (["poisson:5", "--slo", f"{HUGE}s"], "s' is too large"),
        (["poisson:1e-320"], "poisson:RATE"),
        (["poisson:5", "--speed-up", "1e-320"], "--speed-up 1e-320: a number above 0, at most"),
        (["poisson:5", "--speed-up", "nan"], "--speed-up nan: a number above 0, at most"),
        (["poisson:5", "--speed-up", "0"], "--speed-up 0: a number above 0, at most"),
        (["poisson:5", "--batch", "2", "--batch-row", "x%"], "from 0% to 100% is expected"),
        (["poisson:5", "--models", "random:x"], "--models random:x: from 1 to"),
        (["poisson:5", "--models", "random:0"], "from 1 to"),
        (["azure", "--slo", "5"], "--slo 5"),
        (["azure", "--policy", ","], "nothing was named"),
    ],
)
def test_bad_input_is_one_sentence(args: list[str], text_expected: str) -> None:
    status, _, error = simulate(*args)
    assert status not in (0, 1) or error.startswith("Error")
    assert text_expected in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("name", "load", "memory", "rate", "keeping", "greedy"),
    [
        ("device 1.2", 1.2, 0.25, 12.6e6, 0.785, 0.826),  # the device is overloaded
        ("link", 0.8, 0.15, 6e6, 0.843, 0.850),  # the link is overloaded
        ("link x 2", 0.8, 0.15, 3e6, 0.792, 0.795),  # the link has half the bandwidth of "link"
    ],
)
def test_admission_accepts_what_a_plain_server_accepts_and_keeps_what_it_promised(
    name: str, load: float, memory: float, rate: float, keeping: float, greedy: float
) -> None:
    """Compare with two simple servers that know all run times. They answer the shares ``keeping``
    and ``greedy`` of all requests in time; only the second server may drop accepted requests. In
    ``link``, only 88 % of accepted requests would be in time if waiting copies did not count."""
    share, accepted = share_in_time(name, load, memory, rate)
    assert accepted >= 0.95
    assert share >= 0.97 * keeping
    assert share >= 0.94 * greedy


def share_in_time(name: str, load: float, memory: float, rate: float) -> tuple[float, float]:
    """Return two shares that are answered in time: of all requests, and of accepted requests.

    Args:
        name: seed of the trace.
        load: computing time of all requests, divided by the trace's duration.
        memory: the device's memory, divided by that of all models.
        rate: bandwidth of the link, in bytes per millisecond.
    """
    draw, models = random.Random(f"0 {name}"), []
    for number in range(40):
        size = draw.lognormvariate(math.log(200 * PER_MS), 0.6) / 5
        ms = draw.lognormvariate(math.log(14.0), 0.6) / 5
        models.append(
            PaperModel(
                name=f"m{number}",
                layer_bytes=(int(size),) * 5,
                layer_ms=(ms,) * 5,
                plan=tuple(range(5)),
            )
        )
    weights = [1 / (1 + number) for number in range(40)]
    mean_ms = sum(w * m.compute_ms for w, m in zip(weights, models, strict=True)) / sum(weights)
    own_arrivals, at_ms = [], 0.0
    for _ in range(1800):
        at_ms += draw.expovariate(load / mean_ms)
        own_arrivals.append(Arrival(at_ms, draw.choices(range(40), weights)[0]))
    sizes = [model.size_bytes for model in models]
    setting = Setting(
        memory_bytes=max(int(memory * sum(sizes)), 2 * max(sizes)),
        costs=Costs(to_device=Link(bytes_per_ms=rate, fixed_ms=0.01)),
        policy="edf",
        slo_ms=100.0,
        has_deadlines=True,
        admission="deadline",
        is_known=True,
    )
    ours = Kept(setting, Models(models))
    ours.serve(models)
    outcome = ours.replay(own_arrivals)
    return outcome.share_in_slo, outcome.in_slo / (len(own_arrivals) - ours.refused_at_once)


class Kept(Replay):
    """Replay that counts the requests that are refused on arrival."""

    refused_at_once = 0

    def _answered(self, answer: Reply) -> None:
        request = self.asked.get(answer.token)
        if request is not None and answer.error is not None and request.at_ms == self.now_ms:
            self.refused_at_once += 1
        super()._answered(answer)
