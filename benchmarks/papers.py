"""The papers' claims, figure by figure, with our newest numbers, for the page ``docs/papers.md``.

``python -m benchmarks.readme`` writes the page, and a test fails if the page is stale. The claims
are in ``papers.toml``, in our own words. This module decides from the newest results if a claim
holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

Results = Mapping[str, tuple[str, Mapping[str, Any]]]
THESIS: Final = "thesis"


class Number(msgspec.Struct, frozen=True):
    """Name of one of our findings, with bounds: the claim holds if the value is within bounds."""

    finding: str
    label: str
    low: float = -math.inf
    high: float = math.inf
    above: str = ""  # name of another finding whose value is a lower bound

    def holds(self, values: Mapping[str, float]) -> bool | None:
        """Return True if the value is within the bounds; None without a value or without bounds."""
        value = values.get(self.finding)
        if value is None or (self.low, self.high, self.above) == (-math.inf, math.inf, ""):
            return None
        return max(self.low, values.get(self.above, -math.inf)) <= value <= self.high


class Picture(msgspec.Struct, frozen=True):
    """Our figure for the paper's, drawn by ``docs/picture.py``."""

    title: str
    arms: tuple[tuple[str, str, str], ...]  # arm, label, and the bar's class in the picture's style
    groups: tuple[tuple[str, str, str, str], ...]  # label, case, number, quantile


class Claim(msgspec.Struct, frozen=True):
    """Claim of one figure or table, with our numbers, and how our measurement differs."""

    figure: str
    claim: str
    differs: str  # how our measurement differs; without a number, why there is none
    benchmark: str = ""  # "thesis" is computed, not measured
    numbers: tuple[Number, ...] = ()
    picture: Picture | None = None

    @property
    def command(self) -> str:
        return f"benchmarks{'.' if self.benchmark == THESIS else ' '}{self.benchmark}"


class Source(msgspec.Struct, frozen=True):
    """A paper and its claims."""

    name: str
    citation: str
    claims: tuple[Claim, ...] = msgspec.field(name="claim")


def sources() -> list[Source]:
    """Return the papers of ``papers.toml``."""
    text = Path(__file__).with_suffix(".toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, list[Source]])["source"]


def benchmarks() -> list[str]:
    """Return the names of the benchmarks that measure what the papers' figures show."""
    names = [claim.benchmark for source in sources() for claim in source.claims]
    return [name for name in names if name not in ("", THESIS)]


def document_of(claim: Claim, results: Results) -> tuple[str, Mapping[str, Any]] | None:
    """Return the file name (or empty) and content of the newest result; None without one."""
    if claim.benchmark != THESIS:
        return results.get(claim.benchmark)
    from .thesis import example

    ways = [(row["way"], row["total_ms"]) for row in example()]
    findings = [{"name": way, "value": value} for way, value in ways]
    cells = [{"case": "", "arm": way, "number": "total_ms", "p50": value} for way, value in ways]
    return "", {"is_quick": False, "findings": findings, "summary": cells}


def page(results: Results) -> list[str]:
    """Return the paragraphs of ``docs/papers.md``."""
    parts = []
    for source in sources():
        parts += [f"## {source.name}", source.citation]
        for claim in source.claims:
            numbers, holds = judge(claim, results)
            parts += [f"### {claim.figure}", f"Theirs: {claim.claim}"]
            if claim.picture:
                parts.append(f"Ours (`{claim.command}`): {claim.picture.title}.")
                parts.append(f"![ours](images/{claim.benchmark}.svg)")
            verdict = f"Holds: {holds}. " if holds else ""
            parts.append(f"{verdict}{numbers}. {claim.differs}")
    return parts


def judge(claim: Claim, results: Results) -> tuple[str, str]:
    """Return a claim's numbers as text, and whether it holds."""
    found = document_of(claim, results)
    if found is None:
        return "No number" + ": no result of this benchmark is kept" * bool(claim.benchmark), ""
    file, document = found
    values = {row["name"]: float(row["value"]) for row in document["findings"]}
    numbers = [
        f"{one.label}: {values[one.finding]:.5g}"
        if one.finding in values
        else f"{one.label}: not in the newest result"
        for one in claim.numbers
    ]
    verdicts = {one.label: one.holds(values) for one in claim.numbers}
    missed = [label for label, is_held in verdicts.items() if is_held is False]
    holds = "yes" if True in verdicts.values() else "**no**" if missed else "not decided"
    holds = f"in part, except: {'; '.join(missed)}" if missed and holds == "yes" else holds
    shown = "; ".join(numbers) + " (a quick run)" * document["is_quick"]
    return shown + (f" ([{file}](../benchmarks/results/{file}))" if file else ""), holds
