"""How the command line shows rows: rich tables for people, JSON for programs."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..base.units import format_bytes, printable, printed
from ..wire.bill import PARTS, SELDOM

PIPE_COLUMNS: Final = 240
ELASTIC: Final = ("why", "source")  # columns that give way on a narrow screen
REFRESH_S: Final = 0.5  # of --watch and top
STATE_STYLES: Final = {
    "active": "bold green", "running": "bold green", "ready": "green", "resident": "green",
    "pinned": "green", "transmitting": "cyan", "suspended": "yellow", "paused": "yellow",
    "stopping": "yellow", "evicting": "yellow", "failed": "bold red", "dead": "bold red",
    "quarantined": "bold red", "done": "dim", "host": "dim", "standby": "dim",
}  # fmt: skip

PS_SIZES: Final = {"activation_bytes": "ACTIVATIONS", "offloaded_bytes": "OFFLOADED",
                   "streamed_bytes": "STREAMED", "sequence_bytes": "KEPT"}  # fmt: skip
PS_COUNTS: Final = {"sequences": "SEQUENCES", "tokens": "TOKENS", "tokens_per_s": "TOKENS/S"}
COUNTS: Final = ("groups", "requests", *PS_COUNTS)
PS_COLUMNS: Final = ("name", "kind", "state", "precision", "worker", "on", "device",
                     "activation_bytes", "host", "offloaded_bytes", "streamed_bytes", *PS_COUNTS,
                     "sequence_bytes", "prio", "last_used", "why")  # fmt: skip
PS_TITLES: Final = {"name": "MODEL/JOB", "last_used": "LAST USED", **PS_SIZES, **PS_COUNTS}
MODEL_COLUMNS: Final = ("name", "state", "residency", "on", "bytes", "groups", "mode",
                        "priority", "pinned", "requests", "source")  # fmt: skip
VERSION_COLUMNS: Final = ("name", "version", "current", "share", "state", "residency", "bytes",
                          "requests", "source")  # fmt: skip
JOB_COLUMNS: Final = ("name", "state", "on", "bytes", "step", "committed_step",
                      "persisted_step", "steps_per_s", "suspensions", "evictions", "restarts",
                      "why")  # fmt: skip
BILL_COLUMNS: Final = tuple(name for name in PARTS if name not in SELDOM)


def console() -> Console:
    """Where tables go; NO_COLOR is rich's own business. A pipe has no width: nothing is cut."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def ping_line(answer: Mapping[str, Any]) -> str:
    """``ready 1.9 ms: controller 0.7 ms, daemon 0.2 ms, worker 0 (active) silent``."""

    def took(ms: float | None) -> str:
        return "silent" if ms is None else f"{ms:.1f} ms"

    hops = [
        f"{hop} {took(answer[f'{hop}_ms'])}"
        for hop in ("controller", "daemon")
        if f"{hop}_ms" in answer
    ]
    hops += [
        f"worker {row['worker']} ({row['state']}) {took(row['ms'])}"
        for row in answer.get("workers", ())
    ]
    state = "ready" if answer["ready"] else f"not ready ({answer['why']})"
    return f"{state} {took(answer['total_ms'])}" + (f": {', '.join(hops)}" if hops else "")


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print what others may have written: a terminal shows it and obeys none of it.

    Pieces of a log (no ``nl``) keep their carriage returns: progress bars are made of them, and
    what they hide is their own line.
    """
    click.echo(printable(text, keep="\n\t" if nl else "\n\t\r"), err=err, nl=nl)


def print_json(value: Any) -> None:
    """One JSON document."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, default=str) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN: a lost loss is null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    titles: Mapping[str, str] | None = None,
) -> Table:
    """Rows by column name; a missing value is empty. Some columns are there with a value only."""
    seldom = ("on", "precision", *PS_SIZES, *PS_COUNTS)
    columns = [one for one in columns if one not in seldom or any(one in row for row in rows)]
    view = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        title = (titles or {}).get(column, column.replace("_", " ").upper())
        cells = [cell(column, row.get(column)) for row in rows]
        number = column.endswith(("_ms", "bytes", "_s", "step")) or column in COUNTS
        widest = max([len(title), *(len(one.plain) for one in cells)])
        is_elastic = column in ELASTIC
        view.add_column(
            title,
            justify="right" if number else "left",
            no_wrap=not is_elastic,
            min_width=None if is_elastic else widest,
        )
    for row in rows:
        view.add_row(*(cell(column, row.get(column)) for column in columns))
    return view


def ps_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What ``ps`` and ``top`` show."""
    return table(rows, PS_COLUMNS, PS_TITLES)


def add_rates(rows: Sequence[dict[str, Any]], since: Mapping[str, int], took_s: float) -> None:
    """Tokens a second of language models.

    Args:
        since: how many each had at an earlier look, ``took_s`` ago.
    """
    for row in rows:
        if took_s > 0 and row.get("tokens"):
            made = row["tokens"] - since.get(row["name"], 0)
            row["tokens_per_s"] = max(0, made) / took_s  # it may have been registered anew


def cell(column: str, value: Any) -> Text:
    """One value as people read it; what others wrote is shown and not obeyed."""
    value = printed(value)
    if value is None or value == "":
        return Text("")
    if column in ("state", "residency"):
        return Text(str(value), style=STATE_STYLES.get(str(value), ""))
    if column in ("bytes", *PS_SIZES) or (column in ("device", "host") and str(value).isdigit()):
        return Text(format_bytes(int(value)) if int(value) else "")
    if column == "last_used":
        return Text(f"{_duration(float(value))} ago")
    if isinstance(value, list):
        return Text(", ".join(map(str, value)))
    if isinstance(value, bool):
        return Text("yes" if value else "")
    if isinstance(value, float):
        return Text(f"{value:.2f}")
    return Text(str(value))


def _duration(seconds: float) -> str:
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "min"), (86_400, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} d"


def details(row: Mapping[str, Any]) -> Table:
    """One record, a line for each value."""
    view = Table.grid(padding=(0, 2))
    for key, value in row.items():
        shown: Any = value
        if isinstance(value, Mapping):
            shown = ", ".join(f"{name}: {item}" for name, item in value.items())
        view.add_row(Text(printable(key.replace("_", " ")), style="bold"), cell(key, shown))
    return view


def show(render: Callable[[], RenderableType], *, watch: bool) -> None:
    """Print once, or again and again until Ctrl-C."""
    if not watch:
        console().print(render())
        return
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(render(), console=console(), auto_refresh=False) as live,
    ):
        while True:
            time.sleep(REFRESH_S)  # the screen's pace; nothing waits for this
            live.update(render(), refresh=True)


def dashboard(about: Mapping[str, Any], rows: Any, stats: Mapping[str, Any]) -> RenderableType:
    """What ``top`` shows."""
    inference = stats.get("inference", {})
    head = Text.assemble(
        ("pipeswitch ", "bold"),
        f"pid {about.get('pid')}  device {about.get('device', '?')}  ",
        f"queued {stats.get('queued', 0)}  in flight {inference.get('in_flight', 0)}  ",
        f"answered {inference.get('ok', 0)}  errors {inference.get('error', 0)}  ",
        f"switches {stats.get('switches', 0)}  preemptions {stats.get('preemptions', 0)}  ",
        f"sequences {stats.get('sequences', 0)}  "
        f"tokens/s {sum(row.get('tokens_per_s', 0.0) for row in rows):.1f}",
    )
    of_jobs = sum(int(row["device"] or 0) for row in rows if row["kind"] == "job")
    arena = _memory("arena", stats, of_jobs, "of jobs")
    store = _memory("store", stats, int(stats.get("store_offloaded_bytes", 0)), "offloaded")
    kept = sum(row.get("sequence_bytes", 0) + row.get("spare_bytes", 0) for row in rows)
    pool = _memory("pool", stats, kept, "of sequences")
    return Group(head, arena, store, pool, Text(""), ps_table(rows))


def _memory(name: str, stats: Mapping[str, Any], part: int, what: str) -> Text:
    capacity, free = (int(stats.get(f"{name}_{of}_bytes", 0)) for of in ("capacity", "free"))
    told = f"{name} {_bar(capacity - free, capacity)} {format_bytes(capacity - free)} of "
    return Text(told + format_bytes(capacity) + (f", {format_bytes(part)} {what}" if part else ""))


def _bar(used: int, capacity: int, width: int = 30) -> str:
    filled = round(width * used / capacity) if capacity else 0
    return "█" * filled + "░" * (width - filled)


@contextlib.contextmanager
def progress_bar(enabled: bool, title: str) -> Iterator[Callable[[str, float], None] | None]:
    """A bar for registration; None where it is not watched."""
    if not enabled:
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda stage, part: bar.update(
            task, completed=part, description=printable(f"{title} {stage}", keep="")
        )
