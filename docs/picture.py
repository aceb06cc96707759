"""Draw the pictures of README and ``docs/papers.md``: ``python docs/picture.py``.

They show the newest results of the benchmarks, as ``benchmarks/papers.toml`` says. A test compares
the pictures in ``docs/images`` with the results in ``benchmarks/results``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # it has the script's folder instead

from benchmarks import papers  # noqa: E402
from benchmarks.readme import newest  # noqa: E402

IMAGES: Final = ROOT / "docs" / "images"
RESULTS: Final = ROOT / "benchmarks" / "results"
WIDTH: Final = 880
LEFT: Final = 130  # of the bars; the groups' names stand before it
RIGHT: Final = WIDTH - 80
BAR: Final = 16  # with the space below
STYLE: Final = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
  .card { fill: #ffffff; stroke: #d0d7de; }
  .say { fill: #1f2328; } .soft { fill: #59636e; } .bold { font-weight: 600; }
  .theirs { fill: #8c959f; } .slow { fill: #bc4c00; } .other { fill: #d4a72c; }
  .ours { fill: #0969da; } .fast { fill: #54aeff; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d; }
    .say { fill: #f0f6fc; } .soft { fill: #9198a1; }
    .theirs { fill: #7d8590; } .slow { fill: #db6d28; } .other { fill: #bb8009; }
    .ours { fill: #4493f8; } .fast { fill: #9ecbff; }
  }
"""  # it has its own background: readable whatever the page around it looks like


def text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def bar(x: float, y: float, width: float, kind: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="13" rx="2" class="{kind}"/>'


def label(number: str, value: float) -> str:
    """Return a bar's value with its unit."""
    if not number.endswith("_ms"):
        return f"{value:.3g}/s" if value < 1000 else f"{value:.0f}/s"
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.{1 if value < 100 else 0}f} ms"


def drawing(shown: papers.Picture, document: Mapping[str, Any]) -> str:
    """Return an SVG with the groups of bars; each quantity has one scale."""
    rows = {(row["case"], row["arm"], row["number"]): row for row in document["summary"]}
    groups = []
    for name, case, number, quantile in shown.groups:
        keys = [((case, arm, number), kind) for arm, _, kind in shown.arms]
        values = [(float(rows[key][quantile]), kind) for key, kind in keys if key in rows]
        if values:  # a quick run has fewer cases
            groups.append((name, number, values))
    largest: dict[str, float] = {}
    for _, number, values in groups:
        largest[number] = max([largest.get(number, 0.0), *(value for value, _ in values)])
    parts = [text(24, 31, shown.title, "say bold")]
    x = 24.0
    for _, name, kind in shown.arms:
        parts += [bar(x, 46, 13, kind), text(x + 20, 57, name, "soft")]
        x += 50 + 7 * len(name)
    y = 82.0
    for name, number, values in groups:
        middle = y + len(values) * BAR / 2 + 3
        parts.append(text(LEFT - 14, middle, name, "say", "end"))
        for value, kind in values:
            width = value * (RIGHT - LEFT) / largest[number]
            parts.append(bar(LEFT, y, width, kind))
            parts.append(text(LEFT + width + 7, y + 11, label(number, value), "say"))
            y += BAR
        y += 14
    if facts := document.get("facts"):
        commit = facts["commit"][:7] + (" with changes" if facts["dirty"] else "")
        where = f"{facts['device']} device, {facts['cores']} cores, commit {commit}"
        parts.append(text(RIGHT, y + 4, where, "soft", "end"))
        y += 14
    body = "\n".join(parts)
    height = int(y) + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"<title>{shown.title}</title>\n<style>{STYLE}</style>\n"
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" class="card"/>\n'
        f"{body}\n</svg>\n"
    )


def drawings(folder: Path) -> dict[str, str]:
    """Return the name and the content of each picture whose benchmark has a result here."""
    results = newest(folder)
    claims = [claim for source in papers.sources() for claim in source.claims if claim.picture]
    found = [(claim, papers.document_of(claim, results)) for claim in claims]
    return {
        f"{claim.benchmark}.svg": drawing(claim.picture, result[1])
        for claim, result in found
        if claim.picture and result
    }


def draw(results: Path = RESULTS, folder: Path = IMAGES) -> None:
    """Write pictures with results to a folder."""
    for name, content in drawings(results).items():
        (folder / name).write_text(content, "utf-8")


if __name__ == "__main__":
    draw()
