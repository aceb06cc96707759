"""Reports, plots, warnings and README's results, which benchmarks make from trials."""

from __future__ import annotations

import importlib
import itertools
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import papers, readme
from benchmarks.__main__ import NAMES, main, run
from benchmarks.machine import Others, warnings_of
from benchmarks.pipeline import costs_of
from benchmarks.rig import Switch
from benchmarks.trials import Run
from pipeswitch.base.errors import InvalidInput

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FACTS = {"device": "cpu", "cpu": "x", "cores": 2, "commit": "0123456789ab", "load_1m": 0.1}


def a_run(what: str = "switch", **options: object) -> Run:
    return Run(
        what, f"python -m benchmarks {what}", True, 0, True, lambda line: None, FACTS, **options
    )


@pytest.mark.parametrize("page", readme.PAGES)
def test_a_page_shows_the_newest_results(page):
    text = (ROOT / page).read_text("utf-8")
    expected = readme.replaced(text, readme.PAGES[page](readme.newest(RESULTS)))
    assert text == expected, "run: python -m benchmarks.readme"


def test_a_page_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="the page needs"):
        readme.replaced("# no marks", [])
    with pytest.raises(ValueError, match="comes before"):
        readme.replaced(f"{readme.END} {readme.BEGIN}", [])


def test_the_newest_result_wins_whatever_its_name(tmp_path):
    for date in ("2026-01-09", "2025-12-31"):
        (tmp_path / f"request-path_cpu_{date}.json").write_text(json.dumps({"date": date}))
    file, document = readme.newest(tmp_path)["request-path"]
    assert (file, document["date"]) == ("request-path_cpu_2026-01-09.json", "2026-01-09")


def test_every_missed_target_is_named():
    bench = a_run()
    bench.find("good", 200.0, at_least=100.0)
    bench.find("bad", 99.0, "ms", at_most=3.0)
    bench.find("neither", 1.0)
    results = {"switch": ("switch_cpu_2026-01-01.json", bench.document())}
    assert readme.target_table(results).endswith("| 0123456 | quiet | 1 of 2 |")
    rows = readme.findings_table(*results["switch"]).splitlines()
    assert rows[0].startswith("1 of 2 targets are missed")
    assert rows[4:] == ["| bad | 99 ms | ≤ 3 |"]
    assert "1 hold, 0 hold in part, and none fails" in readme.front_page(results)[-1]


def test_claims_that_hold_in_part_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = papers.Number("a", "a", low=1.0), papers.Number("b", "b", high=1.0)
    judged = itertools.cycle([a_claim(good), a_claim(good, bad)])
    monkeypatch.setattr(papers, "judge", lambda *_: next(judged))
    count = sum(len(source.claims) for source in papers.sources())
    text = f"{-(-count // 2)} hold, {count // 2} hold in part, and none fails"
    assert text in readme.front_page({})[-1]


def test_the_best_of_a_row_is_marked_whoevers_it_is() -> None:
    bench = a_run("peers")
    for case, key, ours, theirs in (
        ("small, 8 at once", "tokens_per_s", 585.0, 1478.0),
        ("small, first token, prompt of 32", "first_ms", 8.0, 9.0),
    ):
        bench.record(case, "ours", 0, {key: ours})
        bench.record(case, "theirs", 0, {key: theirs})
    bench.record("small, another model wanted", "ours", 0, {"first_ms": 1500.0})
    assert readme.peers_table("peers.json", bench.document()).splitlines()[2:7] == [
        "| | ours | theirs |",
        "|---|---|---|",
        "| small, 8 at once | 585/s | **1478/s** |",
        "| small, first token, prompt of 32 | **8.0 ms** | 9.0 ms |",
        "| small, another model wanted | **1.50 s** |  |",
    ]


def test_a_result_of_a_busy_machine_says_so():
    bench = a_run()
    bench.warnings += warnings_of(3.0, 0.5)
    assert "**Warning:** the machine was not quiet when this began: load average 3." in (
        bench.markdown()
    )
    assert "other programs took 50% of all cores' time meanwhile" in bench.document()["warnings"]
    table = readme.target_table({"switch": ("switch_cpu_2026-01-01.json", bench.document())})
    assert "| not quiet |" in table


def test_what_this_process_computes_is_not_others_work():
    others = Others()
    others.own_s -= 1000.0  # as if this process had used 1000 s of CPU time in between
    assert others.share() == 0.0


def test_a_report_is_written_with_one_line_per_trial(tmp_path):
    bench = a_run()
    bench.record("m", "cold", 0, {"total_ms": 2.0})
    bench.record("m", "cold", 1, {"total_ms": 4.0})
    report, data, *_ = bench.write(tmp_path)
    assert "| m | cold | total_ms | 3.000 |" in report.read_text()
    assert json.loads(data.read_text())["trials"] == bench.trials
    assert sum('"trial":' in line for line in data.read_text().splitlines()) == 2


def test_what_is_skipped_is_told_with_its_reason():
    bench = a_run()
    bench.skip({"mps": "needs a CUDA device"})
    assert bench.notes == ["mps: skipped: needs a CUDA device"]


def switch(transfers_ms: list[float], computes_ms: list[float]) -> Switch:
    arrivals, begins, ends = [], [], []
    for transfer, compute in zip(transfers_ms, computes_ms, strict=True):
        arrivals.append((arrivals[-1] if arrivals else 1.0) + transfer)
        begins.append(max(arrivals[-1], ends[-1] if ends else 0.0))
        ends.append(begins[-1] + compute)
    return Switch(0.0, tuple(arrivals), tuple(begins), tuple(ends), 0.0, copy_began_at_ms=1.0)


def test_a_switchs_times_are_those_of_its_groups():
    measured = switch([2.0, 3.0], [1.0, 4.0])
    assert measured.transfers_ms == [2.0, 3.0]
    assert measured.computes_ms == [1.0, 4.0]
    assert measured.makespan_ms == 10.0  # 1 ms before the copy, 5 ms of copies, 4 ms of computing
    assert measured.numbers()["stall_ms"] == 5.0


def test_the_links_two_numbers_are_found_from_one_copy_and_many():
    layer_bytes = [1000, 3000, 2000]
    alpha_ms, beta_ms = 0.5, 0.001
    pieces = switch([alpha_ms + beta_ms * size for size in layer_bytes], [1.0, 2.0, 3.0])
    whole = switch([alpha_ms + beta_ms * 6000], [6.0])
    costs = costs_of(layer_bytes, [pieces], [whole])
    assert costs.link.alpha_ms == pytest.approx(alpha_ms)
    assert costs.link.beta_ms_per_byte == pytest.approx(beta_ms)
    assert costs.compute_ms == pytest.approx((1.0, 2.0, 3.0))


def test_a_model_whose_library_is_missing_is_skipped_not_failed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    bench = a_run()
    assert bench.usable(("bert-base", "mlp")) == ["mlp"]
    assert bench.notes == [
        "bert-base: skipped: transformers is not installed: pip install 'pipeswitch[hf]'"
    ]


def a_claim(*numbers: papers.Number) -> tuple[str, str]:
    findings = [{"name": "a", "value": 2.0}, {"name": "b", "value": 3.0}]
    results = {"switch": ("switch.json", {"is_quick": False, "findings": findings})}
    return papers.judge(papers.Claim("1", "c", "d", "switch", numbers), results)


def test_whether_a_papers_claim_holds_is_computed_from_our_numbers() -> None:
    good, bad = papers.Number("a", "a", high=2.5), papers.Number("b", "b", high=2.5)
    assert a_claim(good)[1] == "yes"
    assert a_claim(good, papers.Number("b", "b", above="a"))[1] == "yes"
    assert a_claim(good, bad, papers.Number("a", "c", above="b"))[1] == "in part, except: b; c"
    assert a_claim(bad)[1] == "**no**"
    assert a_claim(papers.Number("a", "a"), papers.Number("gone", "b", low=0)) == (
        "a: 2; b: not in the newest result ([switch.json](../benchmarks/results/switch.json))",
        "not decided",
    )


def test_every_figure_of_the_papers_has_a_number_or_says_why_not() -> None:
    results = readme.newest(RESULTS)
    sources = papers.sources()
    claims = [claim for source in sources for claim in source.claims]
    figures = " ".join(claim.figure for claim in sources[0].claims)
    assert figures == "Figure 5 Figure 6 Figure 7 Figure 8 Figure 9"
    for claim in claims:
        numbers, holds = papers.judge(claim, results)
        assert ("No number" in numbers) == (not claim.benchmark) == (not holds), numbers
        assert "not in the newest result" not in numbers
        assert claim.benchmark in ("", papers.THESIS, *NAMES)
        assert (claim.picture is None) == (not claim.benchmark)


def test_a_stopped_run_writes_what_it_has_measured(monkeypatch, tmp_path) -> None:
    for trials in (1, 0):

        def stop(bench: Run, models: object, trials: int = trials) -> None:
            for number in range(trials):
                bench.record("case", "arm", number, {"total_ms": 1.0})
            raise KeyboardInterrupt

        monkeypatch.setattr(importlib.import_module("benchmarks.state"), "run", stop)
        with pytest.raises(KeyboardInterrupt):
            run(["state"], out=tmp_path / str(trials), emit=lambda line: None)
    (report,) = (tmp_path / "1").glob("*.md")
    assert "the run was stopped before its end" in report.read_text("utf-8")
    assert not [*(tmp_path / "0").iterdir()]


def test_too_little_memory_is_said_before_anything_is_measured(monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.__main__.available_bytes", lambda: 217 << 20)
    for name in papers.benchmarks():
        with pytest.raises(InvalidInput, match=rf"{name} needs .+ GiB .+ has 0\.2"):
            run([name], is_quick=True, emit=lambda line: pytest.fail(line))


def test_without_a_name_benchmarks_are_listed_and_none_is_run(monkeypatch, tmp_path) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setenv("PYTHONPATH", "")  # the command sets it for its children
    monkeypatch.setattr("benchmarks.__main__.run", lambda names, **_: ran.append(names) or 0)
    output = CliRunner().invoke(main, []).output
    assert not ran
    assert all(f"  {name} " in output for name in NAMES)
    assert " min" in output
    shutil.copy(next(RESULTS.glob("state_cpu_*.json")), tmp_path)
    for words, names in (
        (["all"], ()),
        (["switch", "state"], ("switch", "state")),
        (["papers", "--out", str(tmp_path)], tuple(papers.benchmarks())),
        (["papers", "state", "--out", str(tmp_path)], ("state",)),
    ):
        assert CliRunner().invoke(main, words).exit_code == 0
        assert ran.pop() == names
    assert {path.name for path in tmp_path.glob("*.svg")} == {"state.svg", "thesis.svg"}
