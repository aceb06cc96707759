"""Draw the README's picture again: ``python docs/picture.py`` writes ``images/switch.svg``.

It shows the newest result of ``python -m benchmarks switch``; a test compares it with that file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

PICTURE: Final = Path(__file__).parent / "images" / "switch.svg"
RESULTS: Final = Path(__file__).parent.parent / "benchmarks" / "results"
TITLE: Final = "A request that preempts training: time to the answer (p50)"
ARMS: Final = (
    ("ready", "always loaded", "theirs"),
    ("cold", "PipeSwitch, switched in", "ours"),
    ("cold, fast", "with precision fast", "fast"),
    ("stop-and-start", "stop training, start a process", "slow"),
)
WIDTH: Final = 880
LEFT: Final = 130  # of the bars; the models' names stand before it
RIGHT: Final = WIDTH - 80
BAR: Final = 16  # with the space below
STYLE: Final = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
  .card { fill: #ffffff; stroke: #d0d7de; }
  .say { fill: #1f2328; } .soft { fill: #59636e; } .bold { font-weight: 600; }
  .theirs { fill: #8c959f; } .slow { fill: #bc4c00; }
  .ours { fill: #0969da; } .fast { fill: #54aeff; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d; }
    .say { fill: #f0f6fc; } .soft { fill: #9198a1; }
    .theirs { fill: #7d8590; } .slow { fill: #db6d28; }
    .ours { fill: #4493f8; } .fast { fill: #9ecbff; }
  }
"""  # it has its own background: readable whatever the page around it looks like


def text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def bar(x: float, y: float, width: float, kind: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="13" rx="2" class="{kind}"/>'


def newest() -> Path:
    """The result that the picture shows."""
    return max(RESULTS.glob("switch_cpu_*.json"), key=lambda path: path.stem)


def picture(document: Mapping[str, Any]) -> str:
    """An SVG with a group of bars for each model, a bar for each way to serve it."""
    p50_ms = {
        (row["case"], row["arm"]): row["p50"]
        for row in document["summary"]
        if row["number"] == "total_ms"
    }
    models = list(dict.fromkeys(case for case, _ in p50_ms))
    arms = [one for one in ARMS if all((model, one[0]) in p50_ms for model in models)]
    scale = (RIGHT - LEFT) / max(p50_ms[model, arm] for model in models for arm, _, _ in arms)
    parts = [text(24, 31, TITLE, "say bold")]
    x = 24.0
    for _, name, kind in arms:
        parts += [bar(x, 46, 13, kind), text(x + 20, 57, name, "soft")]
        x += 50 + 7 * len(name)
    y = 82.0
    for model in models:
        parts.append(text(LEFT - 14, y + 1.5 * BAR + 3, model, "say", "end"))
        for arm, _, kind in arms:
            value_ms = p50_ms[model, arm]
            label = f"{value_ms:.0f} ms" if value_ms < 1000 else f"{value_ms / 1000:.2f} s"
            parts.append(bar(LEFT, y, value_ms * scale, kind))
            parts.append(text(LEFT + value_ms * scale + 7, y + 11, label, "say"))
            y += BAR
        y += 14
    facts = document["facts"]
    commit = facts["commit"][:7] + (" with changes" if facts["dirty"] else "")
    where = f"{facts['device']} device, {facts['cores']} cores, commit {commit}"
    parts.append(text(RIGHT, y + 4, where, "soft", "end"))
    body = "\n".join(parts)
    height = int(y) + 22
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"<title>{TITLE}</title>\n<style>{STYLE}</style>\n"
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" class="card"/>\n'
        f"{body}\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(json.loads(newest().read_text("utf-8"))), "utf-8")
