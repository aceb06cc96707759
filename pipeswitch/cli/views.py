"""Output of the command line: rich tables for people, JSON for programs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import click
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ..base.roles import ANYONE
from ..base.units import escape_control_chars, format_number, printed, short_bytes
from ..wire.request_timing import OPTIONAL, PARTS

PIPE_COLUMNS: Final = 240
ELASTIC: Final = ("why", "source", "reason")  # columns whose long texts wrap on a narrow screen
ELASTIC_WIDTH: Final = 20
NAMES: Final = ("name", "model", "job", "nodes")
NAME_WIDTH: Final = 16
DROPPED_FIRST: Final = (
    *(
        "groups",
        "mode",
        "precision",
        "last_used",
        "offloaded_bytes",
        "streamed_bytes",
        "prio",
    ),
    *("swaps", "swapped_bytes"),
    *("evictions", "pinned", "sequence_bytes", "tokens", "sequences", "priority", "host", "bytes"),
    *("suspensions", "source", "activation_bytes", "restarts", "tokens_per_s", "p50_ms", "p99_ms"),
    *("committed_step", "persisted_step", "worker", "requests", "residency", "device", "why"),
)
"""Columns that are left out on a narrow screen, the least important first."""

_RANKS: Final = (
    ("active", "running", "transmitting", "stopping", "evicting", "suspended"),
    ("swapping_out", "swapped", "swapping_in"),
    ("queued", "paused"),
    ("resident", "pinned", "ready"),
    ("host", "standby"),
)
BUSY: Final = {state: rank for rank, states in enumerate(_RANKS) for state in states}
"""Rank of each state in a listing; other states (ended, failed) come last."""
WITHOUT_KEY: Final = "callers without a key or token"
REFRESH_S: Final = 0.5  # interval of refreshes of --watch and top
_STYLES: Final = {
    "bold green": "active running",
    "green": "ready resident pinned",
    "cyan": "transmitting swapping_out swapping_in",
    "yellow": "suspended paused stopping evicting swapped",
    "bold red": "failed dead quarantined",
    "dim": "done host standby",
}
STATE_STYLES: Final = {state: one for one, states in _STYLES.items() for state in states.split()}

PS_SIZES: Final = {
    "activation_bytes": "ACTIVATIONS",
    "offloaded_bytes": "OFFLOADED",
    "streamed_bytes": "STREAMED",
    "swapped_bytes": "SWAPPED",
    "sequence_bytes": "KEPT",
}
PS_COUNTS: Final = {"sequences": "SEQUENCES", "tokens": "TOKENS", "tokens_per_s": "TOKENS/S"}
COUNTS: Final = ("groups", "requests", *PS_COUNTS)
PS_COLUMNS: Final = (
    "name",
    "kind",
    "state",
    "precision",
    "worker",
    "on",
    "device",
    "activation_bytes",
    "host",
    "offloaded_bytes",
    "streamed_bytes",
    "swapped_bytes",
    *PS_COUNTS,
    "sequence_bytes",
    "p50_ms",
    "p99_ms",
    "prio",
    "last_used",
    "why",
)
PS_TITLES: Final = {"name": "MODEL/JOB", "last_used": "LAST USED", **PS_SIZES, **PS_COUNTS}
MODEL_COLUMNS: Final = (
    "name",
    "state",
    "residency",
    "on",
    "bytes",
    "groups",
    "mode",
    "priority",
    "pinned",
    "requests",
    "source",
)
VERSION_COLUMNS: Final = (
    "name",
    "version",
    "current",
    "share",
    "state",
    "residency",
    "bytes",
    "requests",
    "source",
)
JOB_COLUMNS: Final = (
    *("name", "state", "on", "step", "steps_per_s", "committed_step", "persisted_step", "why"),
    *("bytes", "suspensions", "swaps", "evictions", "restarts", "swapped_bytes"),
)
TIMING_COLUMNS: Final = tuple(name for name in PARTS if name not in OPTIONAL)


def console() -> Console:
    """Return the console for tables; a pipe has no width, so it gets a wide one.

    rich itself handles NO_COLOR.
    """
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def ping_line(answer: Mapping[str, Any]) -> str:
    """Return a line such as ``ready 1.9 ms: controller 0.7 ms, worker 0 (active) silent``."""

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
    """Print a text from elsewhere, with control characters escaped so that none reach a terminal.

    Pieces of a log (no ``nl``) keep their carriage returns, which progress bars need and which
    overwrite only the log's own line.
    """
    click.echo(escape_control_chars(text, keep="\n\t" if nl else "\n\t\r"), err=err, nl=nl)


def print_json(value: Any) -> None:
    """Print one JSON document."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, default=str) + "\n")


def _finite(value: Any) -> Any:
    """Replace NaN and infinite numbers with None, because JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Listing:
    """Table of rows that fits its screen; a missing value is an empty cell.

    If the table is too wide, its titles wrap first, then names are shortened in the middle. Then
    the columns in ``DROPPED_FIRST`` are dropped in their order, and a line names them.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        columns: Sequence[str],
        titles: Mapping[str, str] | None = None,
    ) -> None:
        seldom = ("on", "precision", "p50_ms", "p99_ms", *PS_SIZES, *PS_COUNTS)
        shown = [one for one in columns if one not in seldom or any(one in row for row in rows)]
        self._rows = len(rows)
        self._cells = {one: [cell(one, row.get(one)) for row in rows] for one in shown}
        self._titles = {
            one: (titles or {}).get(one, one.replace("_", " ").upper()) for one in shown
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table, dropped = self.fitted(options.max_width)
        yield table
        if dropped:
            yield Text(f"not shown: {', '.join(dropped)} (a wider screen, or --json)", style="dim")

    def fitted(self, width: int) -> tuple[Table, list[str]]:
        """Return the table for a screen of ``width``, and the titles of the dropped columns."""
        columns, titles, dropped = list(self._cells), dict(self._titles), []
        widths = {one: self._width(one, titles[one]) for one in columns}
        if _total(widths) > width:
            titles = {one: title.replace(" ", "\n") for one, title in titles.items()}
            widths = {one: self._width(one, titles[one]) for one in columns}
        for one in NAMES:
            if one in widths and (over := _total(widths) - width) > 0:
                widths[one] = min(widths[one], max(NAME_WIDTH, widths[one] - over))
        for one in DROPPED_FIRST:
            if one in widths and _total(widths) > width:
                del widths[one]
                dropped.append(self._titles[one])
        for one in NAMES:
            if one in widths:
                spare = max(0, width - _total(widths))
                widths[one] = min(self._width(one, titles[one]), widths[one] + spare)
        view = Table(box=None, pad_edge=False, header_style="bold")
        for one in widths:
            number = one.endswith(("_ms", "bytes", "_s", "step")) or one in COUNTS
            view.add_column(
                titles[one],
                justify="right" if number else "left",
                no_wrap=one not in ELASTIC,
                min_width=widths[one] if _total(widths) <= width else None,
            )
        for row in range(self._rows):
            cells = {one: self._cells[one][row] for one in widths}
            view.add_row(
                *(
                    shortened(text, widths[one]) if one in NAMES else text
                    for one, text in cells.items()
                )
            )
        return view, dropped

    def _width(self, column: str, title: str) -> int:
        lines = title.split("\n")
        widest = max(map(len, [*lines, *(one.plain for one in self._cells[column])]))
        return min(widest, ELASTIC_WIDTH) if column in ELASTIC else widest


def _total(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def shortened(text: Text, width: int) -> Text:
    """Return a name with at most ``width`` characters: its beginning, an ellipsis and its end."""
    plain = text.plain
    if len(plain) <= width:
        return text
    tail = (width - 1) // 2
    return Text(f"{plain[: width - 1 - tail]}…{plain[-tail:]}", style=text.style)


def busy_first(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return sorted rows: jobs, then models, then processes; within a kind by rank in ``BUSY``."""
    kinds = {"job": 0, "model": 1, "chain": 1}

    def order(row: Mapping[str, Any]) -> tuple[int, int]:
        return kinds.get(row.get("kind", ""), 2), BUSY.get(row.get("state", ""), len(BUSY))

    return sorted(rows, key=order)


def ps_table(rows: Sequence[Mapping[str, Any]]) -> Listing:
    """Return the table of ``ps`` and ``top``."""
    return Listing(busy_first(rows), PS_COLUMNS, PS_TITLES)


def add_rates(rows: Sequence[dict[str, Any]], since: Mapping[str, int], took_s: float) -> None:
    """Add tokens per second to the rows of language models.

    Args:
        since: each model's token count from ``took_s`` seconds ago.
    """
    for row in rows:
        if took_s > 0 and row.get("tokens"):
            token_count = row["tokens"] - since.get(row["name"], 0)
            row["tokens_per_s"] = max(0, token_count) / took_s  # a new registration counts from 0


def cell(column: str, value: Any) -> Text:
    """Return a value formatted for people, with control characters escaped."""
    value = printed(value)
    if value is None or value == "":
        return Text("")
    if column in ("name", "tenant") and value == ANYONE:
        return Text(WITHOUT_KEY)
    if column in ("state", "residency"):
        return Text(str(value), style=STATE_STYLES.get(str(value), ""))
    if column in ("bytes", *PS_SIZES) or (column in ("device", "host") and type(value) is int):
        return Text(short_bytes(value) if value else "")
    if column == "last_used":
        return Text(f"{_duration(float(value))} ago")
    if isinstance(value, list):
        return Text(", ".join(map(str, value)))
    if isinstance(value, bool):
        return Text("yes" if value else "")
    if isinstance(value, float):
        return Text(format_number(value))
    return Text(str(value))


def _duration(seconds: float) -> str:
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "min"), (86_400, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} d"


def details(row: Mapping[str, Any]) -> Table:
    """Return one record as a table with a line for each value that is not empty."""
    view = Table.grid(padding=(0, 2))
    for key, value in row.items():
        shown = cell("bytes" if key.endswith("bytes") else key, _plain(key, value))
        if shown.plain:
            name = key.removesuffix("_bytes") if key.endswith("_bytes") else key
            view.add_row(Text(escape_control_chars(name.replace("_", " ")), style="bold"), shown)
    return view


def _plain(key: str, value: Any) -> Any:
    """Return a nested value as one text: ``x [batch, 3] float32; y [batch] int64``."""
    if isinstance(value, Mapping):
        parts = [
            f"{WITHOUT_KEY if name == ANYONE else name} {_plain(f'{key} {name}', item)}"
            for name, item in value.items()
            if item is not None
        ]
        return ("; " if any(isinstance(one, list) for one in value.values()) else ", ").join(parts)
    if isinstance(value, list | tuple) and key.partition(" ")[0] in ("batch", "dims"):
        return " to ".join(map(str, value))
    if isinstance(value, list | tuple) and " " in key:  # a tensor's shape and dtype
        return " ".join(
            f"[{', '.join(map(str, one))}]" if isinstance(one, list | tuple) else str(one)
            for one in value
        )
    if isinstance(value, float) and " " in key:
        return format_number(value)
    is_size = isinstance(value, int) and key.endswith("bytes") and " " in key
    return short_bytes(value) if is_size else value


class Scrolled:
    """Screen that shows a part of a longer output, from line ``top`` on."""

    def __init__(self) -> None:
        self.top = 0
        self.page = 1
        self.inner: RenderableType = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.inner, options.update(height=None), pad=False)
        self.page = max(1, console.height - 2)
        is_long = len(lines) > self.page + 1
        self.top = max(0, min(self.top, len(lines) - self.page)) if is_long else 0
        for line in lines[self.top : self.top + self.page] if is_long else lines:
            yield from line
            yield Segment.line()
        if is_long:
            end = min(len(lines), self.top + self.page)
            yield Text(f"lines {self.top + 1} to {end} of {len(lines)}: ↑ ↓ PgUp PgDn, q leaves")

    def press(self, keys: bytes) -> None:
        """Scroll by the pressed keys; ``q`` raises KeyboardInterrupt, like Ctrl-C."""
        if b"q" in keys:
            raise KeyboardInterrupt
        up, down, back, on = b"\x1b[A", b"\x1b[B", b"\x1b[5~", b"\x1b[6~"
        steps = {up: -1, b"k": -1, down: 1, b"j": 1, back: -self.page, on: self.page}
        self.top += sum(keys.count(key) * step for key, step in steps.items())


def show(render: Callable[[], RenderableType], *, watch: bool) -> None:
    """Print once, or with ``watch`` refresh until ``q`` or Ctrl-C."""
    while not (watch and sys.stdout.isatty()):  # a pipe has no screen: each look follows the last
        console().print(render())
        if not watch:
            return
        time.sleep(REFRESH_S)
    screen = Scrolled()
    screen.inner = render()
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as keys,
        Live(screen, console=console(), auto_refresh=False, vertical_overflow="crop") as live,
    ):
        next_at_s = time.monotonic()
        while True:
            if keys and select.select(keys, [], [], max(0.0, next_at_s - time.monotonic()))[0]:
                screen.press(os.read(keys[0], 64) or b"q")
            else:
                time.sleep(max(0.0, next_at_s - time.monotonic()))  # to the next refresh
                screen.inner = render()
                next_at_s = time.monotonic() + REFRESH_S
            live.update(screen, refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[list[int]]:
    """Yield the terminal's descriptor in single-key mode, or an empty list without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield []
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield [descriptor]
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def dashboard(about: Mapping[str, Any], rows: Any, stats: Mapping[str, Any]) -> RenderableType:
    """Return the screen of ``top``."""
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
    sequences_bytes = sum(row.get("sequence_bytes", 0) + row.get("spare_bytes", 0) for row in rows)
    pool = _memory("pool", stats, sequences_bytes, "of sequences")
    last = stats.get("last_error")
    error = (
        [Text(f"last error  {printed(last['model'])}: {printed(last['error'])}")] if last else []
    )
    return Group(head, *error, arena, store, pool, Text(""), ps_table(rows))


def _memory(name: str, stats: Mapping[str, Any], part: int, what: str) -> Text:
    capacity, free = (int(stats.get(f"{name}_{of}_bytes", 0)) for of in ("capacity", "free"))
    text = f"{name} {_bar(capacity - free, capacity)} {short_bytes(capacity - free)} of "
    return Text(text + short_bytes(capacity) + (f", {short_bytes(part)} {what}" if part else ""))


def _bar(used: int, capacity: int, width: int = 30) -> str:
    filled = round(width * used / capacity) if capacity else 0
    return "█" * filled + "░" * (width - filled)


@contextlib.contextmanager
def progress_bar(enabled: bool, title: str) -> Iterator[Callable[[str, float], None] | None]:
    """Yield the callback that updates a progress bar, or None if ``enabled`` is false."""
    if not enabled:
        yield None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)

        def report(stage: str, part: float) -> None:
            description = escape_control_chars(f"{title} {stage}", keep="")
            bar.update(task, completed=part, total=1.0 if part else None, description=description)

        yield report
