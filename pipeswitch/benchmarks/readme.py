"""README's results, written from the files in ``benchmarks/results``: never typed.

What stands between the two marks is replaced; a test checks that it is what the newest results
say. Pure but for ``newest``, which reads files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

BEGIN: Final = "<!-- results: written by benchmarks/readme.py, do not edit -->"
END: Final = "<!-- end of results -->"
SWITCH_ARMS: Final = (
    "ready", "resident", "cold", "pipeswitch-style", "serial", "to-device", "stop-and-start",
)  # fmt: skip
DEMO: Final = "demo"
SECOND_MS: Final = 1000.0

Document = Mapping[str, Any]


def newest(folder: Path) -> dict[str, tuple[str, Document]]:
    """By benchmark of the cpu device: the newest result's file name and content.

    Names are ``<what>_cpu_<date>.json``. Other devices' results have a page of their own.
    """
    found: dict[str, tuple[str, Document]] = {}
    for path in sorted(folder.glob("*_cpu_*.json"), key=lambda each: each.stem.rpartition("_")[2]):
        found[path.stem.partition("_")[0]] = (path.name, json.loads(path.read_text("utf-8")))
    return found


def section(results: Mapping[str, tuple[str, Document]]) -> str:
    """The Markdown between the marks, marks included."""
    parts = [BEGIN]
    if DEMO in results:
        parts.append(demo_table(*results[DEMO]))
    if "switch" in results:
        parts.append(switch_table(*results["switch"]))
    measured = {name: found for name, found in results.items() if "findings" in found[1]}
    if measured:
        parts.append(target_table(measured))
    return "\n\n".join([*parts, END])


def replaced(readme: str, results: Mapping[str, tuple[str, Document]]) -> str:
    """The README with its section as the results say.

    Raises:
        ValueError: it does not have the two marks, once each and in order.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README needs one {BEGIN!r} and one {END!r}")
    head, _, rest = readme.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise ValueError(f"{END!r} comes before {BEGIN!r}")
    return head + section(results) + tail


def demo_table(file: str, demo: Document) -> str:
    """``make demo``: three ways to answer the same requests."""
    ours, machine = demo["pipeswitch"], demo["machine"]
    bill = " | ".join(
        _ms(ours[f"{part}_ms"]) for part in ("queue", "switch", "copy", "stall", "compute")
    )
    rows = [f"| pipeswitch | {_ms(ours['p50_ms'])} | {_ms(ours['p99_ms'])} | {bill} |"]
    for key, name in (
        ("ready_model", "ready model (lower bound)"),
        ("stop_and_start", "stop-and-start"),
    ):
        both = f"{_ms(demo[key]['p50_ms'])} | {_ms(demo[key]['p99_ms'])}"
        rows.append(f"| {name} | {both} | | | | | |")
    training = demo["training"]
    switched = ours["count"] - ours["resident_count"]
    same = "bit-equal" if demo["largest_difference"] == 0 else "not equal"
    return "\n".join(
        [
            f"**`make demo`** on {machine['cores']} cores ({machine['cpu']}), "
            f"{demo['threads']} compute thread(s), torch {machine['torch']}: {ours['count']} "
            f"requests for {len(demo['plan']['models'])} models, of which the device holds two, "
            "beside a training job.",
            "",
            "| | p50 | p99 | queue | switch | copy | stall | compute |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"{switched} of {ours['count']} requests switched a model in, "
            f"{ours['preempted_count']} preempted the job. Training lost "
            f"{training['steps_lost']} steps and kept {training['kept_percent']:.0f} % of its "
            "speed while requests held the device for "
            f"{training['device_time_of_requests_percent']:.0f} % of the time. All answers were "
            f"compared with the plain models': {same}. ([{file}](benchmarks/results/{file}))",
        ]
    )


def switch_table(file: str, document: Document) -> str:
    """One request that preempts training, p50 and p99 by model and way to serve it."""
    rows = {
        (row["case"], row["arm"]): row for row in document["summary"] if row["number"] == "total_ms"
    }
    cases = list(dict.fromkeys(case for case, _ in rows))
    arms = [arm for arm in SWITCH_ARMS if any((case, arm) in rows for case in cases)]
    lines = [
        f"**`{document['command']}`**: a request that preempts training, p50 (p99), "
        f"{_where(document)}. *Ready* has nothing beside it; *resident* and *cold* are "
        "PipeSwitch with the model on the device, and not.",
        "",
        f"| | {' | '.join(cases)} |",
        "|---" * (len(cases) + 1) + "|",
    ]
    for arm in arms:
        cells = [_p50_p99(rows.get((case, arm))) for case in cases]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"([{file}](benchmarks/results/{file}))"])


def target_table(results: Mapping[str, tuple[str, Document]]) -> str:
    """How many targets each benchmark meets, and every one that it misses."""
    lines = [
        "**Targets** of the newest result of each benchmark; those that are missed are named.",
        "",
        "| benchmark | met | missed |",
        "|---|---|---|",
    ]
    for name, (file, document) in sorted(results.items()):
        judged = [row for row in document["findings"] if row["is_met"] is not None]
        missed = [
            f"{row['name']}: {_value(row)} (target {row['target']})"
            for row in judged
            if not row["is_met"]
        ]
        met = f"{len(judged) - len(missed)} of {len(judged)}" if judged else "none judged"
        link = f"[{name}](benchmarks/results/{file.removesuffix('.json')}.md)"
        warned = " (the machine was not quiet)" if document.get("warnings") else ""
        lines.append(f"| {link}{warned} | {met} | {'; '.join(missed)} |")
    return "\n".join(lines)


def _where(document: Document) -> str:
    facts = document["facts"]
    quick = "quick, " if document["is_quick"] else ""
    return f"{quick}{facts['cores']} cores ({facts['cpu']}), commit {facts['commit'][:7]}"


def _p50_p99(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"{_ms(row['p50'])} ({_ms(row['p99'])})"


def _ms(value_ms: float) -> str:
    """Three digits, in seconds from one second up."""
    if value_ms >= SECOND_MS:
        return f"{value_ms / SECOND_MS:.2f} s"
    return f"{value_ms:.0f} ms" if value_ms >= 10 else f"{value_ms:.1f} ms"


def _value(row: Mapping[str, Any]) -> str:
    return f"{row['value']:.3g} {row['unit']}".strip()


def main(root: Path, arguments: Sequence[str]) -> int:
    """Rewrite ``README.md`` of a checkout; with ``--check`` only say (1) that it is stale."""
    path = root / "README.md"
    before = path.read_text("utf-8")
    after = replaced(before, newest(root / "benchmarks" / "results"))
    if "--check" in arguments:
        return int(after != before)
    path.write_text(after, "utf-8")
    return 0
