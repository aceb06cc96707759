"""Write ``reliability.md`` and its picture again: ``python docs/reliability.py``.

The page is made of the JSON files in ``benchmarks/results/reliability`` and of nothing else; a
file that is missing is said to be missing. ``tests/unit/test_docs.py`` compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
FOLDER: Final = HERE.parent / "benchmarks/results/reliability"
DOCUMENT, PICTURE = HERE / "reliability.md", HERE / "reliability.png"

Result = Mapping[str, Any]
Results = Mapping[str, Result]  # name of the file -> what it holds
Verdict = tuple[str, bool]  # the figure, and whether it meets the target


def load(folder: Path = FOLDER) -> dict[str, Result]:
    """Every file of the folder by its name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


# ---- goals -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """A target, and how the figure is read from its files."""

    name: str
    target: str
    files: tuple[str, ...]
    judge: Callable[..., Verdict]  # is given what each of the files holds

    def row(self, results: Results) -> list[str]:
        """Of the table: goal, target, figure, verdict, files."""
        missing = [name for name in self.files if name not in results]
        if missing:
            lacks = ", ".join(f"`{name}.json`" for name in missing)
            return [self.name, self.target, f"no {lacks}", "not run", ""]
        found = [results[name] for name in self.files]
        try:
            figure, is_met = self.judge(*found)
        except KeyError as error:  # a test that failed leaves what it had
            figure, is_met = f"incomplete: no {error} in the file", False
        if not all(each.get("passed", True) for each in found):
            figure, is_met = f"{figure}; its test failed", False
        links = ", ".join(link(name) for name in self.files)
        return [self.name, self.target, figure, "met" if is_met else "**missed**", links]


def chaos_goal(chaos: Result) -> Verdict:
    dead = chaos["dead_worker_recovery_ms"]
    worst = dead["alone"]["p99"]
    minutes = chaos["seconds"] / 60
    figure = (
        f"{minutes:.0f} min, {chaos['faults_survived']:,}/{chaos['faults_injected']:,} faults "
        f"survived, {chaos['lost']} lost, {chaos['duplicated']} duplicated, {chaos['wrong']} "
        f"wrong, {len(chaos['violations'])} violations of {chaos['requests']:,} requests; "
        f"{chaos['cells_exercised']}/{chaos['cells']} cells; dead worker p99 {number(worst)} ms "
        f"({dead['alone']['count']} kills; {number(dead['all']['p99'])} ms of all "
        f"{dead['all']['count']}, other faults just before included)"
    )
    is_met = (
        minutes >= 10
        and chaos["faults_injected"] >= 300
        and chaos["faults_survived"] == chaos["faults_injected"]
        and not any(chaos[key] for key in ("lost", "duplicated", "wrong", "violations"))
        and chaos["cells_exercised"] == chaos["cells"]
        and worst is not None
        and worst <= 250
    )
    return figure, is_met


def failpoints_goal(result: Result) -> Verdict:
    found = result.get("failpoints", result)
    points, reached, survived = (count(found[key]) for key in ("points", "reached", "survived"))
    actions = found["actions"]
    shown = actions if isinstance(actions, int) else ", ".join(actions)
    figure = f"{reached}/{points} points reached; actions: {shown}; {survived:,} survived"
    fired = count(found.get("fired", survived))
    return figure, points >= 40 and reached == points and survived >= max(points, fired)


def training_goal(real: Result, session: Result) -> Verdict:
    differ = real["differences"] + session["differences"]
    figure = (
        f"{real['kills']} kills under {real['jobs']} real jobs at {len(real['instants'])} instants "
        f"and {session['kills']} in {session['runs']} runs of the session alone: {differ} differ"
    )
    return figure, real["kills"] >= 200 and session["kills"] >= 200 and differ == 0


FLAT_MIB: Final = 64  # libFuzzer keeps its corpus and its table of features in memory


def fuzz_goal(fuzz: Result) -> Verdict:
    growth = {
        name: target["rss_to_mib"] - target["rss_from_mib"]
        for name, target in fuzz["targets"].items()
    }
    figure = (
        f"{fuzz['executions'] / 1e6:,.1f} million over {len(growth)} targets, {fuzz['escapes']} "
        f"escapes, resident size at most {max(growth.values(), default=0):+.0f} MiB"
    )
    is_flat = all(mib <= FLAT_MIB for mib in growth.values())
    return figure, fuzz["executions"] >= 50e6 and fuzz["escapes"] == 0 and is_flat


def soak_goal(soak: Result) -> Verdict:
    slopes, deltas = soak["slope_mib_per_10000"], {**soak["deltas"], **soak["held_deltas"]}
    moved = {name: delta for name, delta in deltas.items() if delta}
    steepest = max(slopes, key=lambda name: slopes[name])
    figure = (
        f"{soak['switches']:,} switches; steepest {slopes[steepest]:+.2f} MiB per 10,000 "
        f"({steepest}); deltas {moved or 0}"
    )
    return figure, soak["switches"] >= 20_000 and slopes[steepest] < 1 and not moved


def model_goal(model: Result) -> Verdict:
    scopes = model["scopes"]
    violations = [scope["name"] for scope in scopes if scope["violation"]]
    slowest = max((scope["seconds"] for scope in scopes), default=0)
    figure = (
        f"{sum(scope['states'] for scope in scopes):,} states in {len(scopes)} scopes, "
        f"{len(violations)} violations, {model['mutants_caught']}/{model['mutants']} mutants "
        f"caught; longest scope {slowest:.0f} s"
    )
    all_caught = model["mutants"] > 0 and model["mutants_caught"] == model["mutants"]
    return figure, bool(scopes) and not violations and all_caught and slowest <= 120


def hostile_goal(once: Result, again: Result) -> Verdict:
    times = [each["attacked_p99_ms"] / each["quiet_p99_ms"] for each in (once, again)]
    growth_mib = max(once["rss_growth_mib"], again["rss_growth_mib"])
    figure = (
        f"{once['connections']:,} connections, with keys: {growth_mib:+.1f} MiB, p99 "
        f"{number(once['quiet_p99_ms'])} → {number(once['attacked_p99_ms'])} ms "
        f"({times[0]:.1f} x); while all that are cut come again at once "
        f"({again['cut']:,} in 15 s): {times[1]:.1f} x"
    )
    return figure, once["connections"] >= 1000 and growth_mib <= 64 and times[0] <= 2


def durability_goal(servers: Result, writers: Result) -> Verdict:
    broken = [servers.get(key) for key in ("lost", "twice", "torn")]
    figure = (
        f"{servers['kills']} servers killed, {servers['acknowledged']} acknowledged, "
        f"{servers['removed']} removed, {shown_or_dash(broken[0])} lost, "
        f"{shown_or_dash(broken[1])} twice, {shown_or_dash(broken[2])} torn; {writers['kills']} "
        f"writers killed, {writers['acknowledged']} acknowledged, {writers['lost']} lost"
    )
    is_whole = broken == [0, 0, 0] and writers["lost"] == 0
    return figure, servers["kills"] >= 300 and writers["kills"] >= 300 and is_whole


GOALS: Final = (
    Goal("G1 chaos", "10 min, ≥ 300 random faults under load, all survived, 0 lost, 0 duplicated, "
         "every cell, dead worker p99 ≤ 250 ms", ("chaos",), chaos_goal),
    Goal("G2 failpoints", "≥ 40 points, each reached, each fired and survived", ("failpoints",),
         failpoints_goal),
    Goal("G3 training exactness", "200 `kill -9`, final state bit-equal",
         ("training_kills", "session_kills"), training_goal),
    Goal("G4 fuzzing", f"≥ 50 million executions, 0 escapes, resident size ≤ + {FLAT_MIB} MiB",
         ("fuzz",), fuzz_goal),
    Goal("G5 soak", "20,000 switches, < 1 MiB per 10,000 in every process, descriptors, threads, "
         "memfds, arena delta 0", ("switches",), soak_goal),
    Goal("G6 protocol model", "every scope exhausted within 120 s each, 0 violations, all mutants "
         "caught", ("model",), model_goal),
    Goal("G7 hostile clients", "1,000 with keys, once each: ≤ + 64 MiB, good client's p99 ≤ 2 x",
         ("hostile_keys_once", "hostile_keys_all"), hostile_goal),
    Goal("G9 durability", "300 killed servers and 300 killed journal writers, nothing lost, "
         "doubled or torn", ("server_kills", "journal_kills"), durability_goal),
)  # fmt: skip
BY_TEST: Final = (
    ("G8 honesty", "death → not ready ≤ 1 s, engine death exits ≠ 0", "test_health.py"),
    ("G10 security regressions", "one test per class of weakness", "test_neighbours.py"),
)
"""Goals without a figure: tests of every run of ``make test`` assert them."""


# ---- the page ----------------------------------------------------------------------------------


def page(results: Results) -> str:
    """The whole document."""
    return "\n\n".join(part for part in (
        HEAD, goals(results), "## Recovery, fault by fault", chaos_tables(results),
        "## Training under `kill -9`", training_table(results),
        "## Fuzzing", fuzz_table(results), "## Protocol model", model_table(results),
        "## Hostile clients", hostile_table(results), "## 20,000 switches", soak_table(results),
        "## How each figure is made", HOW, "## Where and when", places(results), NOT_COVERED,
    ) if part) + "\n"  # fmt: skip


HEAD: Final = """# Reliability figures

Made by `python docs/reliability.py` from the files in
[`benchmarks/results/reliability`](../benchmarks/results/reliability/README.md); do not edit. A goal
whose file is missing says *not run*. What each fault and each goal means is told in
[threat-model.md](threat-model.md) and [architecture.md](architecture.md); what these tests found
is in [track-record.md](track-record.md)."""

HOW: Final = """`make reliability` runs everything of this list but chaos, fuzzing and the model, then
writes this page. Each file says which commit it ran on.

| file | command |
|---|---|
| `chaos.json` | `python -m tests.chaos --minutes 10 --seed 7 --out benchmarks/results/reliability/chaos.json` |
| `failpoints.json` | `PIPESWITCH_FIGURES=benchmarks/results/reliability pytest -m soak -k failpoint tests/process` |
| `fuzz.json` | `python -m tests.fuzz --seconds 3600 --out benchmarks/results/reliability/fuzz.json` |
| `model.json` | `make model` |
| `training_kills.json` | `pytest -m soak -s tests/process/test_training_kills.py` |
| `session_kills.json` | `pytest -m soak -s tests/process/test_training_exact.py` |
| `server_kills.json`, `journal_kills.json` | `pytest -m soak -s tests/process/test_durability.py` |
| `switches.json` | `pytest -m soak -s tests/process/test_server_soak.py` |
| `hostile_….json` | `pytest -m soak -s tests/process/test_hostile.py` |

The `pytest` lines need `PIPESWITCH_FIGURES=folder` in the environment to write the file; `make
reliability` writes into `out/reliability` and copies at the end. An interrupted one continues with
`make reliability SOAKS="test_durability test_hostile"`."""  # noqa: E501  # a table's row is one line

NOT_COVERED: Final = """## Not covered

- **Power loss**: `kill -9` loses no page that the kernel has; a disk that drops what was not synced
  is not simulated. Commits and journal are synced in the order that survives it, which is tested by
  the order alone.
- **A GPU**: all of this ran on the cpu device. Sticky device errors, Xid events and memory left by
  a dead process are tested over a fake, or not at all.
- **Long runs**: chaos of hours, a billion executions, a hundred thousand switches.
- **More than one machine or user**: one host, one user id; attackers share its cores.
- **Clock jumps and memory pressure of the machine** are not injected; deadlines use a monotonic
  clock, and limits are checked before memory is taken."""


def goals(results: Results) -> str:
    """G1 to G10: target, figure, verdict."""
    rows = [goal.row(results) for goal in GOALS]
    for name, target, file in BY_TEST:
        path = f"[{file}](../tests/process/{file})"
        rows.append([name, target, "no figure: asserted by its tests", "in `make test`", path])
    rows.sort(key=lambda row: int(row[0].split()[0][1:]))
    return table(["goal", "target", "figure", "verdict", "from"], rows)


def chaos_tables(results: Results) -> str:
    """One table per component, a row per fault."""
    if "chaos" not in results:
        return not_run("chaos")
    chaos = results["chaos"]
    by_component: dict[str, list[list[str]]] = {}
    for name, cell in chaos["recovery"].items():
        component, fault = name.split(" x ")
        times = [shown_or_dash(cell[f"recovery_ms_{share}"]) for share in ("p50", "p99")]
        row = [fault, f"{cell['survived']}/{cell['count']}", *times]
        by_component.setdefault(component, []).append(row)
    head = ["fault", "survived", "recovery p50, ms", "p99, ms"]
    parts = [
        f"From the fault to the first good answer to a request that was sent after it, seed "
        f"{chaos['seed']}, {chaos['controller_restarts']} restarts of the controller "
        f"({link('chaos')}). Few of a kind: p99 is then the largest.\n\n"
        f"![recovery per fault: p50 as a dot, a line to p99]({PICTURE.name})"
    ]
    for component, rows in by_component.items():
        parts.append(f"**{component}**\n\n{table(head, rows)}")
    if chaos["cells_missed"]:
        parts.append(f"Not exercised: {', '.join(chaos['cells_missed'])}.")
    if chaos["violations"]:
        firsts = [violation.splitlines()[0] for violation in chaos["violations"]]
        parts.append("Violations:\n\n" + "\n".join(f"- `{first}`" for first in firsts))
    if "leaks" in chaos:
        leaks = ", ".join(f"{name} {delta:+d}" for name, delta in chaos["leaks"].items())
        parts.append(f"Of the controller, after minus before: {leaks}.")
    return "\n\n".join(parts)


def training_table(results: Results) -> str:
    """Kills by instant."""
    if "training_kills" not in results:
        return not_run("training_kills")
    real = results["training_kills"]
    rows = [
        [name, str(each["strikes"]), str(each["recovery_ms_p50"]), str(each["recovery_ms_p99"])]
        for name, each in real.get("instants", {}).items()
    ]
    text = (
        f"{real['kills']} kills of real workers under {real['jobs']} jobs, {real['steps']:,} steps "
        f"of which {real['recomputed']:,} were computed again after a kill, in {real['lives']} "
        f"lives: {real['differences']} jobs differ from their undisturbed run "
        f"({link('training_kills')}). `worker, daemon at …`: the worker is killed while the daemon "
        "stands there. Recovery: from the death to the next committed step."
    )
    head = ["who and where", "strikes", "recovery p50, ms", "p99, ms"]
    return f"{text}\n\n{table(head, rows)}"


def fuzz_table(results: Results) -> str:
    """Targets."""
    if "fuzz" not in results:
        return not_run("fuzz")
    rows = [
        [name, f"{each['executions']:,}", f"{each['seconds']:,.0f}", str(each["escapes"]),
         f"{each['rss_from_mib']:.0f} → {each['rss_to_mib']:.0f}"]
        for name, each in results["fuzz"]["targets"].items()
    ]  # fmt: skip
    head = ["target", "executions", "s", "escapes", "resident size, MiB"]
    note = results["fuzz"].get("note", "")
    return f"{link('fuzz')}{note and f': {note}'}\n\n{table(head, rows)}"


def model_table(results: Results) -> str:
    """Scopes."""
    if "model" not in results:
        return not_run("model")
    rows = [
        [scope["name"], f"{scope['states']:,}", f"{scope['seconds']:,.0f}",
         str(scope["violation"] or "none")]
        for scope in results["model"]["scopes"]
    ]  # fmt: skip
    return f"{link('model')}\n\n{table(['scope', 'states', 's', 'violation'], rows)}"


def hostile_table(results: Results) -> str:
    """With and without keys, all kinds and each kind alone."""
    names = sorted(name for name in results if name.startswith("hostile_"))
    if not names:
        return not_run("hostile_keys_all")
    rows = []
    for name in names:
        each = results[name]
        if "answers" not in each:
            rows.append([link(name), "its test failed", "", "", ""])
            continue
        p99s = f"{number(each['quiet_p99_ms'])} → {number(each['attacked_p99_ms'])}"
        growth = f"{each['rss_growth_mib']:+.1f} (limit {each['rss_limit_mib']})"
        rows.append([link(name), f"{each['connections']:,}", growth, p99s, f"{each['answers']:,}"])
    head = ["", "connections", "controller, MiB", "good client's p99, ms", "its answers"]
    return table(head, rows)


def soak_table(results: Results) -> str:
    """Growth by process."""
    if "switches" not in results or "slope_mib_per_10000" not in results["switches"]:
        return not_run("switches")
    soak = results["switches"]
    rows = [
        [name, f"{slope:+.2f}", f"{soak['grown_mib'][name]:+.2f}"]
        for name, slope in soak["slope_mib_per_10000"].items()
    ]
    text = f"After a warm-up of {soak['warm_up']:,} ({link('switches')})."
    head = ["process", "slope, MiB per 10,000", "grown, MiB"]
    return f"{text}\n\n{table(head, rows)}"


def places(results: Results) -> str:
    """Which commit each file ran on, and on what."""
    rows = []
    for name, each in results.items():
        facts = each.get("facts", {})
        commit = f"`{facts['commit']}`" if facts else "not in the file"
        machine = "" if not facts else (
            f"{facts['cpu']}, {facts['cores']} cores, Python {facts['python']}, "
            f"torch {facts['torch']}"
        )  # fmt: skip
        changed = " with changes" if facts.get("dirty") else ""
        seconds = f"{each['seconds']:,.0f}" if "seconds" in each else ""
        rows.append([link(name), each.get("date", ""), commit + changed, seconds, machine])
    if not rows:
        return "*Nothing has been run.*"
    return table(["file", "date (UTC)", "commit", "s", "machine"], rows)


# ---- small things ------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def link(name: str) -> str:
    """To a file of figures."""
    return f"[{name}](../benchmarks/results/reliability/{name}.json)"


def not_run(name: str) -> str:
    return f"*Not run: there is no `{name}.json`.*"


def count(value: object) -> int:
    """A number, or how many a list or dictionary holds."""
    return value if isinstance(value, int) else len(value)  # type: ignore[arg-type]


def number(value: float) -> str:
    """Three digits of a time."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def shown_or_dash(value: float | None) -> str:
    return "-" if value is None else number(value)


# ---- the picture -------------------------------------------------------------------------------

INK: Final = "#808890"  # legible on white and on black: the ground is transparent
COLOURS: Final = ("#3a8fd6", "#d9822b", "#3fa35b", "#c05ab0", "#d1495b", "#8a7de0", "#2aa5a0")


def draw(chaos: Result, path: Path) -> None:
    """Recovery per fault on a logarithmic axis: p50 a dot, a line to p99, by component."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    cells = {name: cell for name, cell in chaos["recovery"].items() if cell["recovery_ms_p50"]}
    names = list(cells)[::-1]
    components = sorted({name.split(" x ")[0] for name in names})
    colours = dict(zip(components, COLOURS, strict=False))
    figure, axes = pyplot.subplots(figsize=(8.4, 0.6 + 0.215 * len(names)), layout="constrained")
    for place, name in enumerate(names):
        p50, p99 = cells[name]["recovery_ms_p50"], cells[name]["recovery_ms_p99"]
        colour = colours.get(name.split(" x ")[0], INK)
        axes.plot([p50, p99], [place, place], color=colour, linewidth=2.4, alpha=0.6)
        axes.plot([p50], [place], "o", color=colour, markersize=5)
        axes.text(p99 * 1.12, place, number(p99), va="center", fontsize=7, color=INK)
    axes.axvline(250, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), [name.replace(" x ", ": ") for name in names], fontsize=8)
    axes.set_ylim(-0.7, len(names) - 0.3)
    axes.set_xlim(right=max(cell["recovery_ms_p99"] for cell in cells.values()) * 2)
    axes.set_xlabel("recovery, ms: p50, line to p99; dotted: 250 ms", fontsize=8, color=INK)
    axes.tick_params(which="both", colors=INK, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    figure.savefig(path, dpi=130, transparent=True)
    pyplot.close(figure)


def main() -> None:
    """Both files."""
    results = load()
    DOCUMENT.write_text(page(results))
    if "chaos" in results:
        draw(results["chaos"], PICTURE)


if __name__ == "__main__":
    main()
