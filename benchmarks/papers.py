"""The papers' claims, figure by figure, with our newest numbers, for the page ``docs/papers.md``.

``python -m benchmarks.readme`` writes the page, and a test fails if the page is stale. The claims
are in ``papers.toml``, in our own words. This module decides from the newest results if a claim
holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from .trials import table

Results = Mapping[str, tuple[str, Mapping[str, Any]]]


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


class Claim(msgspec.Struct, frozen=True):
    """Claim of one figure or table, with our numbers, and how our measurement differs."""

    figure: str
    claim: str
    differs: str  # how our measurement differs; without a number, why there is none
    benchmark: str = ""
    numbers: tuple[Number, ...] = ()

    @property
    def command(self) -> str:
        known = {"simulated": "python -m benchmarks.thesis", "": ""}
        return known.get(self.benchmark, f"python -m benchmarks {self.benchmark}")


class Source(msgspec.Struct, frozen=True):
    """A paper and its claims."""

    name: str
    citation: str
    claims: tuple[Claim, ...] = msgspec.field(name="claim")


def sources() -> list[Source]:
    """Return the papers of ``papers.toml``."""
    text = Path(__file__).with_suffix(".toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, list[Source]])["source"]


def page(results: Results) -> list[str]:
    """Return the paragraphs of ``docs/papers.md``."""
    parts = []
    for source in sources():
        rows = [_row(claim, results) for claim in source.claims]
        head = "figure | claim | ours | our numbers | holds | what differs"
        parts.append("\n".join([f"## {source.name}", "", source.citation, "", *table(head, rows)]))
    return parts


def _row(claim: Claim, results: Results) -> list[str]:
    if not claim.benchmark:
        return [claim.figure, claim.claim, "", f"no number, because {claim.differs}", "", ""]
    if claim.benchmark == "simulated":
        from .thesis import example

        source, quick = "", False
        values = {str(row["way"]): float(row["total_ms"]) for row in example()}
    else:
        if claim.benchmark not in results:
            why = "no number, because no result of this benchmark is kept"
            return [claim.figure, claim.claim, f"`{claim.command}`", why, "", claim.differs]
        file, document = results[claim.benchmark]
        source, quick = f" ([{file}](../benchmarks/results/{file}))", document["is_quick"]
        values = {row["name"]: float(row["value"]) for row in document["findings"]}
    numbers = [
        f"{one.label}: {values[one.finding]:.5g}"
        if one.finding in values
        else f"{one.label}: not in the newest result"
        for one in claim.numbers
    ]
    verdicts = {one.label: one.holds(values) for one in claim.numbers}
    missed = [label for label, is_held in verdicts.items() if is_held is False]
    holds = "yes" if True in verdicts.values() else "not decided"
    if missed:
        holds = f"partly, not: {'; '.join(missed)}" if True in verdicts.values() else "**no**"
    shown = "; ".join(numbers) + (" (a quick run)" if quick else "") + source
    return [claim.figure, claim.claim, f"`{claim.command}`", shown, holds, claim.differs]
