"""A picture of each report: bars of p50 with p99, or lines over the scheduling cycle.

Needs matplotlib (``pip install 'pipeswitch[bench]'``); imported only here, only when drawing.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pipeswitch.planning.fit import quantile

NUMBERS: Final[Mapping[str, str]] = {
    "switch": "total_ms",
    "throughput": "throughput_per_s",
    "pipeline": "makespan_ms",
    "memory": "makespan_ms",
    "workers": "total_ms",
    "state": "transfer_ms",
    "interference": "latency_ms",
    "request-path": "path_ms",
    "training": "step_ms",
    "generation": "tokens_per_s total_ms first_ms",
    "peers": "tokens_per_s first_ms",
    "shared-input": "images_per_s",
    "devices": "trained_per_s throughput_per_s worst_ms total_ms transfer_ms",
    "switchflow": "latency_ms trained_per_s throughput_per_s images_per_s total_ms transfer_ms",
}
"""What is drawn of each benchmark's trials; of several, the first that a trial has."""
OURS: Final = frozenset(
    {"cold", "resident", "both-fit", "ours", "planned", "planned-prefix", "packed", "pipeswitch",
     "job", "switch", "shared", "two devices", "four devices", "moving", "moves",
     "served", "switching", "pipeswitch, HTTP",
     "pipeswitch, own socket", "few tensors", "many tensors"}
)  # fmt: skip
OUR_COLOUR, THEIR_COLOUR = "#1f6fb4", "#b0b0b0"
DECADES_FOR_LOG: Final = 1.3  # a panel whose values span more gets a logarithmic axis
COLUMNS: Final = 3

Series = dict[str, dict[str, list[float]]]  # case -> arm -> values


def is_available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(document: Mapping[str, Any], path: Path) -> bool:
    """Draw a report's document into ``path`` (PNG or SVG by its suffix).

    Returns:
        False when there is nothing to draw: no trial carries the benchmark's number.
    """
    numbers = NUMBERS.get(document["bench"], "total_ms").split()
    series, drawn = _series(document["trials"], numbers)
    if not series:
        return False
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    if document["bench"] == "throughput":
        figure = _lines(pyplot, series)
    else:
        figure = _bars(pyplot, series, drawn)
    facts = document["facts"]
    figure.suptitle(
        f"{document['bench']} on {facts['device']}: {facts.get('cpu', '')}, "
        f"{facts.get('cores', '?')} cores, commit {facts['commit']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _series(
    trials: Sequence[Mapping[str, Any]], numbers: Sequence[str]
) -> tuple[Series, dict[str, str]]:
    """Values by case and arm, and which number each case has."""
    found: Series = {}
    drawn: dict[str, str] = {}
    for trial in trials:
        for number in [one for one in numbers if one in trial][:1]:
            drawn[trial["case"]] = number
            arms = found.setdefault(trial["case"], {})
            arms.setdefault(trial["arm"], []).append(float(trial[number]))
    compared = {case: arms for case, arms in found.items() if len(arms) > 1}
    return compared or found, drawn


def _bars(pyplot: Any, series: Series, drawn: Mapping[str, str]) -> Any:
    columns = min(COLUMNS, len(series))
    rows = math.ceil(len(series) / columns)
    tallest = max(len(arms) for arms in series.values())
    size = (5.2 * columns, rows * (0.9 + 0.34 * tallest) + 0.5)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    panels = list(axes.flat)
    for panel, (case, arms) in zip(panels, series.items(), strict=False):
        _panel(panel, case, arms)
        number = drawn[case]
        unit = ", ms" if number.endswith("_ms") else ""
        panel.set_xlabel(f"{number.removesuffix('_ms').replace('_', ' ')}{unit}: p50, line to p99")
    for panel in panels[len(series) :]:
        panel.set_axis_off()
    return figure


def _panel(panel: Any, case: str, arms: Mapping[str, list[float]]) -> None:
    names = list(arms)[::-1]  # the first arm on top
    p50 = [quantile(arms[name], 0.5) for name in names]
    p99 = [quantile(arms[name], 0.99) for name in names]
    colours = [OUR_COLOUR if name in OURS else THEIR_COLOUR for name in names]
    positive = [value for value in p50 if value > 0]
    is_log = bool(positive) and math.log10(max(p99) / min(positive)) > DECADES_FOR_LOG
    whiskers = [[0.0] * len(names), [b - a for a, b in zip(p50, p99, strict=True)]]
    panel.errorbar(p50, names, xerr=whiskers, fmt="none", ecolor="#333333", elinewidth=1)
    if is_log:  # a bar's length would mean nothing
        panel.scatter(p50, names, c=colours, zorder=3)
        panel.set_xscale("log")
        panel.set_xlim(left=min(positive) / 2, right=max(p99) * 4)
    else:
        panel.barh(names, p50, color=colours, height=0.62, zorder=0)
        panel.set_xlim(0, max(p99) * 1.22)
    for name, value, end in zip(names, p50, p99, strict=True):
        place = end * 1.08 if is_log else end + max(p99) * 0.015
        panel.text(place, name, _text(value), va="center", fontsize=8)
    panel.set_ylim(-0.6, len(names) - 0.4)
    panel.set_title(case, fontsize=9)
    panel.tick_params(labelsize=8)
    panel.xaxis.label.set_size(8)
    panel.spines[["top", "right"]].set_visible(False)


def _text(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _lines(pyplot: Any, series: Series) -> Any:
    """Throughput over the cycle's length, one panel per model; cases are ``model, 5 s``."""
    models: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for case, arms in series.items():
        model, _, length = case.rpartition(", ")
        for arm, values in arms.items():
            point = (float(length.removesuffix(" s")), quantile(values, 0.5))
            models.setdefault(model, {}).setdefault(arm, []).append(point)
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(5.6 * len(models), 3.8), squeeze=False, layout="constrained"
    )
    for panel, (model, arms_of_model) in zip(axes.flat, models.items(), strict=True):
        for arm, points in arms_of_model.items():
            x, y = zip(*sorted(points), strict=True)
            panel.plot(x, y, marker="o", markersize=4, label=arm, linewidth=2 if arm in OURS else 1)
        panel.set_xscale("log")
        panel.set_ylim(bottom=0)
        panel.set_xlabel("scheduling cycle, s")
        panel.set_ylabel("requests/s, p50 of cycles")
        panel.set_title(model, fontsize=9)
        panel.legend(fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    return figure
