"""Writer of the benchmark results that pages show, from the files in ``benchmarks/results``.

README has two sentences and a picture; ``benchmarks/results/README.md`` has the tables, and every
missed target. Each page has two marks, and the text between them is replaced. A test checks that
this text matches the newest results. Only ``newest`` and ``main`` use files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from . import papers
from .trials import table

BEGIN: Final = "<!-- results: written by python -m benchmarks.readme, do not edit -->"
END: Final = "<!-- end of results -->"
SWITCH_ARMS: Final = (
    "ready",
    "resident",
    "cold",
    "resident, fast",
    "cold, fast",
    "pipeswitch-style",
    "serial",
    "to-device",
    "stop-and-start",
)
DEMO: Final = "demo"
SECOND_MS: Final = 1000.0

Document = Mapping[str, Any]
Results = Mapping[str, tuple[str, Document]]
"""For each benchmark, the name and the content of its result file."""


def newest(folder: Path) -> dict[str, tuple[str, Document]]:
    """Return the name and the content of each benchmark's newest result file from a cpu device.

    File names are ``<what>_cpu_<date>.json``. Results of other devices have their own page.
    """
    results: dict[str, tuple[str, Document]] = {}
    for path in sorted(folder.glob("*_cpu_*.json"), key=lambda each: each.stem.rpartition("_")[2]):
        results[path.stem.partition("_")[0]] = (path.name, json.loads(path.read_text("utf-8")))
    return results


def front_page(results: Results) -> list[str]:
    """Return README's paragraphs: a sentence about the demo, and how many claims hold."""
    parts = []
    if DEMO in results:
        parts.append(demo_sentence(*results[DEMO]))
    claims = [claim for source in papers.sources() for claim in source.claims]
    verdicts = [papers.judge(claim, results)[1].partition(",")[0] for claim in claims]
    if held := verdicts.count("yes"):
        parts.append(
            f"Of the papers' claims that were tried on the cpu device, {held} hold, "
            f"{verdicts.count('in part')} hold in part, and {verdicts.count('**no**') or 'none'} "
            "fails ([which, and why](docs/papers.md)). [benchmarks/results/README.md]"
            "(benchmarks/results/README.md) lists our own targets, met and missed."
        )
    return parts


def results_page(results: Results) -> list[str]:
    """Return the paragraphs of the page of results: all targets, then each benchmark's findings."""
    measured = _measured(results)
    parts = [target_table(measured)] if measured else []
    own = {"switch": switch_table, DEMO: demo_table, "peers": peers_table}
    for name in sorted(results):
        parts.append(f"### {name}")
        if name in own:
            parts.append(own[name](*results[name]))
        if name in measured and name != "peers":
            parts.append(findings_table(*results[name]))
    return parts


PAGES: Final[Mapping[str, Callable[[Results], list[str]]]] = {
    "README.md": front_page,
    "benchmarks/results/README.md": results_page,
    "docs/papers.md": papers.page,
}
"""Pages with a section of results, each with the function that returns its paragraphs."""


def replaced(page: str, paragraphs: Sequence[str]) -> str:
    """Return the page with these paragraphs between its marks.

    Raises:
        ValueError: the page does not have each mark once, in order.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page needs one {BEGIN!r} and one {END!r}")
    head, _, rest = page.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise ValueError(f"{END!r} comes before {BEGIN!r}")
    return head + "\n\n".join([BEGIN, *paragraphs, END]) + tail


def demo_sentence(file: str, demo: Document) -> str:
    """Return sentences about a result of ``make demo``, which is in ``file``."""
    ours, ready, fast = demo["pipeswitch"], demo["ready_model"], demo["fast"]["pipeswitch"]
    return (
        f"`make demo` ({demo['took_s']:.0f} s) sends {ours['count'] + fast['count']} requests "
        f"({ours['count']} in `exact`) to a device that holds two of {len(demo['plan']['models'])} "
        f"models. The median time in `exact` is {_ms(ours['p50_ms'])}; it is "
        f"{_ms(ready['p50_ms'])} if all are always loaded, and "
        f"{_ms(demo['stop_and_start']['p50_ms'])} with a process per request. "
        f"{demo['plan']['fast']} takes {_ms(fast['p50_ms'])} in `fast` ({fast['resident_count']} "
        f"of {fast['count']} requests found it on the device), "
        f"{_ms(demo['ready_model_in_fast_turns']['p50_ms'])} eager, always loaded. Training lost "
        f"{demo['training']['steps_lost']} steps; answers in `exact` were {_same(demo)} to the "
        f"plain models' ([{file}](benchmarks/results/{file}), "
        f"release {demo['pipeswitch_version'].partition('+')[0]})."
    )


def demo_table(file: str, demo: Document) -> str:
    """Return the table of ``make demo``: the ways to answer requests."""
    ours, machine, training = demo["pipeswitch"], demo["machine"], demo["training"]
    parts = ("p50", "p95", "queue", "switch", "copy", "stall", "compute")
    arms = {
        "pipeswitch": ours,
        f"{demo['plan']['fast']} in precision fast": demo["fast"]["pipeswitch"],
        "ready model (lower bound)": demo["ready_model"],
        "stop-and-start": demo["stop_and_start"],
    }
    rows = [
        (name, *(_ms(row[f"{part}_ms"]) if f"{part}_ms" in row else "" for part in parts))
        for name, row in arms.items()
    ]
    about = (
        f"**`make demo`** on {machine['cores']} cores ({machine['cpu']}), torch "
        f"{machine['torch']}: {ours['count']} requests beside a training job, "
        f"{ours['count'] - ours['resident_count']} of them for a model that was not on the device. "
        f"Training kept {training['kept_percent']:.0f} % of its speed while requests held the "
        f"device for {training['device_time_of_requests_percent']:.0f} % of the time. "
        f"Answers: {_same(demo)} to the plain models'. ([{file}]({file}))"
    )
    return "\n".join([about, "", *_columns(parts, rows)])


def _same(demo: Document) -> str:
    return "bit-equal" if demo["largest_difference"] == 0 else "not equal"


def switch_table(file: str, document: Document) -> str:
    """Return a table of requests that preempt training: p50 and p99 by arm and model."""
    rows = {
        (row["case"], row["arm"]): row for row in document["summary"] if row["number"] == "total_ms"
    }
    cases = list(dict.fromkeys(case for case, _ in rows))
    arms = [arm for arm in SWITCH_ARMS if any((case, arm) in rows for case in cases)]
    about = (
        f"**`{document['command']}`**: a request that preempts training, p50 (p99), "
        f"{_where(document)}. *Ready* has nothing beside it; *resident* and *cold* are "
        "PipeSwitch with the model on the device, and not."
    )
    rows_shown = [(arm, *(_p50_p99(rows.get((case, arm))) for case in cases)) for arm in arms]
    return "\n".join([about, "", *_columns(cases, rows_shown), "", f"([{file}]({file}))"])


def peers_table(file: str, document: Document) -> str:
    """Return a table of language models' p50 by case and peer; each row's best value is bold."""
    p50 = {
        (row["case"], row["arm"]): row["p50"]
        for row in document["summary"]
        if row["number"] in ("tokens_per_s", "first_ms")
    }
    arms = list(dict.fromkeys(arm for _, arm in p50))
    about = (
        f"**`{document['command']}`**: language models in float32 beside peers', p50, "
        f"{_where(document)}, {document['facts']['threads']} compute thread(s)"
        f"{', not quiet' if document.get('warnings') else ''}. Tokens a second, or the time to the "
        "first token; the best of each row is bold. "
        "[What is alike and what is not](../README.md#peers)."
    )
    rows = []
    for case in dict.fromkeys(case for case, _ in p50):
        values = {arm: p50[case, arm] for arm in arms if (case, arm) in p50}
        is_speed = "at once" in case
        best = (max if is_speed else min)(values.values())
        cells = {
            arm: f"{value:.{0 if value >= 100 else 1}f}/s" if is_speed else _ms(value)
            for arm, value in values.items()
        }
        cells |= {arm: f"**{cells[arm]}**" for arm, value in values.items() if value == best}
        rows.append((case, *(cells.get(arm, "") for arm in arms)))
    return "\n".join([about, "", *_columns(arms, rows), "", f"([{file}]({file}))"])


def target_table(results: Results) -> str:
    """Return a table: how many targets each benchmark meets, on which commit and machine."""
    rows = []
    for name, (file, document) in sorted(results.items()):
        judged = _judged(document)
        met = f"{sum(row['is_met'] for row in judged)} of {len(judged)}" if judged else "none set"
        quiet = "not quiet" if document.get("warnings") else "quiet"
        page = f"[{name}]({file.removesuffix('.json')}.md)"
        rows.append((page, _commit(document), quiet, met))
    lines = table("benchmark | commit | machine | targets met", rows)
    return "\n".join(["**Targets** of the newest result of each benchmark.", "", *lines])


def findings_table(file: str, document: Document) -> str:
    """Return a table of a result's missed targets or, if it has no targets, of all its findings."""
    judged = _judged(document)
    shown = [row for row in judged if not row["is_met"]] if judged else document["findings"]
    rows = [
        (row["name"], f"{row['value']:.3g} {row['unit']}".strip(), row["target"]) for row in shown
    ]
    missed = f"{len(rows)} of {len(judged)} targets are missed" if judged else "No targets are set"
    about = f"{missed} ([{file.removesuffix('.json')}.md]({file.removesuffix('.json')}.md))."
    return "\n".join([about, "", *table("what | measured | target", rows)] if rows else [about])


def _measured(results: Results) -> Results:
    return {name: result for name, result in results.items() if "findings" in result[1]}


def _judged(document: Document) -> list[Mapping[str, Any]]:
    return [row for row in document["findings"] if row["is_met"] is not None]


def _commit(document: Document) -> str:
    facts = document["facts"]
    return f"{facts['commit'][:7]}{' with changes' if facts.get('dirty') else ''}"


def _columns(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table with these column names, after a first column without a name."""
    _, *lines = table(" | ".join(["", *names]), rows)
    return [f"| | {' | '.join(names)} |", *lines]


def _where(document: Document) -> str:
    facts = document["facts"]
    quick = "quick, " if document["is_quick"] else ""
    return f"{quick}{facts['cores']} cores ({facts['cpu']}), commit {_commit(document)}"


def _p50_p99(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"{_ms(row['p50'])} ({_ms(row['p99'])})"


def _ms(value_ms: float) -> str:
    """Return a time as text with three digits: in ms or, from one second up, in s."""
    if value_ms >= SECOND_MS:
        return f"{value_ms / SECOND_MS:.2f} s"
    return f"{value_ms:.0f} ms" if value_ms >= 10 else f"{value_ms:.1f} ms"


def main(root: Path, arguments: Sequence[str]) -> int:
    """Rewrite the pages of a checkout; with ``--check``, write nothing, but return 1 if stale."""
    results = newest(root / "benchmarks" / "results")
    is_stale = False
    for name, paragraphs in PAGES.items():
        path = root / name
        before = path.read_text("utf-8")
        after = replaced(before, paragraphs(results))
        is_stale |= after != before
        if "--check" not in arguments:
            path.write_text(after, "utf-8")
    return int(is_stale and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1], sys.argv[1:]))
