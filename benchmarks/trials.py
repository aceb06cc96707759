"""Common trial loop: warm-up, then trials of all arms, one record per trial, then p50 and p99.

An arm is one of the ways that a benchmark compares. A machine's speed drifts with other programs,
clocks and caches, so the arms take turns (A B A B), and only numbers of one run are compared.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeswitch.base.machine import cpu_count
from pipeswitch.base.quantiles import quantile

from .machine import Others, warnings_of
from .models import missing

Numbers = dict[str, Any]
Emit = Callable[[str], None]


def now_ms() -> float:
    """Return the time of the monotonic clock, which all processes share, in milliseconds."""
    return time.monotonic() * 1000


def say(**values: Any) -> None:
    """Write one JSON line to standard output: a child process answers the benchmark like this."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def ratio(over: float, under: float) -> float:
    """Return ``over / under``, with a minimum for ``under``, which noise may have made zero."""
    return over / max(under, 1e-3)


def paired_differences(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Return the difference in each round, in which drift that affects both arms cancels out."""
    return [a - b for a, b in zip(over, under, strict=True)]


def table(head: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; ``head`` has the column names, separated by ``|``."""
    lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def nothing() -> None:
    """Do nothing: the default preparation of an arm."""


@dataclass(frozen=True)
class Arm:
    """One arm of a comparison. ``prepare`` is not timed; ``measure`` does one trial.

    ``every``: rounds from one trial to the next (a stop-and-start takes seconds).
    """

    name: str
    measure: Callable[[], Numbers]
    prepare: Callable[[], None] = nothing
    every: int = 1
    warms_up: bool = True


def interleave(
    arms: Sequence[Arm], rounds: int, *, warmup: int = 1
) -> Iterator[tuple[Arm, int, Numbers]]:
    """Run rounds with one trial of each arm; yield each trial, except those of warm-up rounds."""
    for number in range(-warmup, rounds):
        for arm in arms:
            if number % arm.every if number >= 0 else not arm.warms_up:
                continue
            arm.prepare()
            numbers = arm.measure()
            if number >= 0:
                yield arm, number, numbers


@dataclass(frozen=True)
class Finding:
    """A number that follows from the trials, with its target if there is one."""

    name: str
    value: float
    unit: str = ""
    target: str = ""
    is_met: bool | None = None  # None: there is no target


@dataclass
class Run:
    """A benchmark in progress: facts, trials, findings. ``emit`` gets each line of output."""

    what: str
    command: str
    is_quick: bool
    seed: int
    as_json: bool
    emit: Emit
    facts: Numbers  # return value of ``machine_facts``
    threads: int = field(default_factory=lambda: max(1, cpu_count() - 1))
    trials: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # return value of ``warnings_of``
    began_at_s: float = field(default_factory=time.monotonic)
    trials_asked: int = 0  # requested rounds of each case; 0: the benchmark's own number
    others: Others = field(default_factory=Others)

    def __post_init__(self) -> None:
        self.facts = self.facts | {"threads": self.threads, "seed": self.seed}

    def rounds(self, full: int, quick: int) -> int:
        """Return the number of rounds from the command line, else ``full`` or ``quick``."""
        return self.trials_asked or (quick if self.is_quick else full)

    def usable(self, names: Sequence[str]) -> list[str]:
        """Return the models that can be measured here; report the others as skipped."""
        reasons = {name: missing(name) for name in names}
        self.skip({name: reason for name, reason in reasons.items() if reason})
        return [name for name in names if not reasons[name]]

    def skip(self, arms: Mapping[str, str]) -> None:
        """Report that arms are left out; ``arms`` has the reason for each."""
        for arm, reason in arms.items():
            self.say(f"{arm}: skipped: {reason}")
            self.notes.append(f"{arm}: skipped: {reason}")

    def say(self, text: str) -> None:
        """Print progress, unless the output is JSON."""
        if not self.as_json:
            self.emit(f"[{time.monotonic() - self.began_at_s:5.1f} s] {text}")

    def record(self, case: str, arm: str, number: int, numbers: Numbers) -> None:
        """Add a trial; with ``as_json`` print it as one JSON line."""
        trial = {"bench": self.what, "case": case, "arm": arm, "trial": number} | numbers
        self.trials.append(trial)
        if self.as_json:
            self.emit(json.dumps(trial | self.facts))

    def trial_loop(self, case: str, arms: Sequence[Arm], rounds: int, *, warmup: int = 1) -> None:
        """Interleave the arms and record each of their trials."""
        for arm, number, numbers in interleave(arms, rounds, warmup=warmup):
            self.record(case, arm.name, number, numbers)

    def values(self, case: str, arm: str, key: str) -> list[float]:
        """Return the value of ``key`` in all trials of an arm, in order."""
        return [
            float(trial[key])
            for trial in self.trials
            if (trial["case"], trial["arm"]) == (case, arm) and trial.get(key) is not None
        ]

    def p50(self, case: str, arm: str, key: str, share: float = 0.5) -> float:
        """Return the median (or another quantile) of ``key`` in all trials of an arm."""
        return quantile(self.values(case, arm, key), share)

    def find(
        self,
        name: str,
        value: float,
        unit: str = "",
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """Add a finding; if it has a target, decide whether the target is met."""
        target, is_met = "", None
        if at_most is not None:
            target, is_met = f"≤ {at_most:g}", value <= at_most
        elif at_least is not None:
            target, is_met = f"≥ {at_least:g}", value >= at_least
        self.findings.append(Finding(name, value, unit, target, is_met))

    # ---- reports -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Record how quiet the machine was. Call this once, after all our processes have ended."""
        share = self.others.share()
        self.facts = self.facts | {"others_share": round(share, 3)}
        warnings = warnings_of(float(self.facts.get("load_1m", 0.0)), share)
        self.warnings += warnings
        for text in warnings:
            self.say(f"warning: {text}")

    def summary(self) -> list[dict[str, Any]]:
        """Return p50, p99 and minimum of each timed number, by case and arm."""
        keys: dict[tuple[str, str, str], list[float]] = {}
        for trial in self.trials:
            for key, value in trial.items():
                if key.endswith(("_ms", "_per_s")) and isinstance(value, int | float):
                    keys.setdefault((trial["case"], trial["arm"], key), []).append(float(value))
        return [
            {
                "case": case,
                "arm": arm,
                "number": key,
                "p50": quantile(values, 0.5),
                "p99": quantile(values, 0.99),
                "min": min(values),
                "n": len(values),
            }
            for (case, arm, key), values in keys.items()
        ]

    def document(self) -> dict[str, Any]:
        """Return the content of the JSON file, which has all trials."""
        return {
            "bench": self.what,
            "command": self.command,
            "is_quick": self.is_quick,
            "duration_s": time.monotonic() - self.began_at_s,
            "facts": self.facts,
            "findings": [asdict(finding) for finding in self.findings],
            "summary": self.summary(),
            "notes": self.notes,
            "warnings": self.warnings,
            "trials": self.trials,
        }

    def compact_json(self) -> str:
        """Return the document as JSON with one line per trial, so that diffs are readable."""
        document = self.document()
        trials = ",\n".join(f"  {json.dumps(trial)}" for trial in document.pop("trials"))
        head = json.dumps(document, indent=1)[:-2]
        return f'{head},\n "trials": [\n{trials}\n ]\n}}\n'

    def markdown(self) -> str:
        """Return the report as Markdown."""
        facts = ", ".join(f"{key} {value}" for key, value in self.facts.items())
        lines = [f"# {self.what} on {self.facts['device']}", "", f"`{self.command}`", "", facts, ""]
        lines += [*(f"**Warning:** {text}." for text in self.warnings), ""] if self.warnings else []
        met = {True: "yes", False: "**no**", None: ""}
        cells = [
            (one.name, f"{one.value:.4g} {one.unit}".strip(), one.target, met[one.is_met])
            for one in self.findings
        ]
        lines += table("finding | value | target | met", cells)
        rows = [
            [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row.values()]
            for row in self.summary()
        ]
        lines += ["", *table("case | arm | number | p50 | p99 | min | n", rows)]
        lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines).rstrip() + "\n"

    def write(self, folder: Path) -> list[Path]:
        """Write ``<what>_<device>_<date>`` as ``.md`` and ``.json``; return the paths."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self.what}_{self.facts['device']}_{time.strftime('%Y-%m-%d')}"
        report, data = folder / f"{stem}.md", folder / f"{stem}.json"
        report.write_text(self.markdown(), "utf-8")
        data.write_text(self.compact_json(), "utf-8")
        return [report, data]
