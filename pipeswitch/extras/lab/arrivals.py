"""Arrivals of requests by model: recorded and random traces. Pure: takes text, opens no file.

The included traces are from Microsoft Azure (CC BY 4.0); see ``data/README.md``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from datetime import datetime
from random import Random
from typing import Final, NamedTuple

MINUTE_MS: Final = 60_000.0
MAX_ARRIVALS: Final = 5_000_000
HEADER: Final = ["at_ms", "model"]


class Arrival(NamedTuple):
    """Arrival of a request. ``at_ms`` counts from the start of the trace."""

    at_ms: float
    model: int  # index among the models of the trace
    deadline_ms: float | None = None  # counts from the arrival; None: as in the replay's settings
    caller: str = ""
    prompt: int = 0  # number of tokens in a language model's prompt
    tokens: int = 1  # number of tokens in its answer; each is a request of its own


class Trace(NamedTuple):
    """Arrivals for ``model_count`` models, in order of time."""

    name: str
    arrivals: tuple[Arrival, ...]
    model_count: int


class TraceError(ValueError):
    """Invalid trace; the text names the place and the expected form."""


def of_functions(text: str, *, speed_up: float = 1.0, seed: int = 0) -> Trace:
    """Parse Azure Functions 2019: a row for each function, a column with the count of each minute.

    The arrivals of a minute are uniformly random (``seed``); times are divided by ``speed_up``.
    Functions are numbered by their total counts; number 0 is the busiest.
    """
    header, *rows = _rows(text)
    first = next((i for i, name in enumerate(header) if not name.startswith("Hash")), len(header))
    chance = Random(seed)
    counts = [_counts(row[first:], number) for number, row in enumerate(rows, start=2)]
    counts.sort(key=sum, reverse=True)
    arrivals = [
        Arrival((minute + chance.random()) * MINUTE_MS / speed_up, model)
        for model, row in enumerate(counts)
        for minute, count in enumerate(row)
        for _ in range(count)
    ]
    return Trace("azure", tuple(sorted(arrivals)), len(counts))


def of_services(texts: Sequence[str], *, speed_up: float = 1.0, has_tokens: bool = False) -> Trace:
    """Parse Azure LLM 2023: a file for each service, a row for each request.
    A row has a time and the numbers of prompt and answer tokens; ``has_tokens``: use them."""
    times: list[tuple[datetime, int, list[int]]] = []
    for model, text in enumerate(texts):
        _, *rows = _rows(text)
        counts = [_counts(row[1:3], at) if has_tokens else [] for at, row in enumerate(rows, 2)]
        times += [
            (_instant(row[0], at), model, count)
            for at, (row, count) in enumerate(zip(rows, counts, strict=True), 2)
        ]
    times.sort()
    begin = times[0][0]
    arrivals = [
        Arrival((at - begin).total_seconds() * 1e3 / speed_up, model, None, "", *count)
        for at, model, count in times
    ]
    return Trace("azure-llm", tuple(arrivals), len(texts))


def of_rows(text: str, *, name: str = "trace", speed_up: float = 1.0) -> tuple[Trace, list[str]]:
    """Parse a user's trace, and return it with the models' names. A header ``at_ms,model`` may
    precede the rows. Each has these values, and may have ``deadline_ms`` (from the arrival) and the
    client.

    Raises:
        TraceError: a row has another form.
    """
    first, *rows = enumerate(_rows(text.removeprefix("\ufeff")), start=1)
    if [word.strip() for word in first[1][:2]] != HEADER:
        rows.insert(0, first)
    names: dict[str, int] = {}
    arrivals: list[Arrival] = []
    for number, row in rows:
        try:
            at_ms, model = float(row[0]), row[1].strip()
            deadline_ms = float(row[2]) if len(row) > 2 and row[2].strip() else None
        except (ValueError, IndexError):
            raise TraceError(
                f"line {number} is {','.join(row)[:80]!r}, expected 12.5,name"
                + (f", or the header {','.join(HEADER)}" if number == 1 else "")
            ) from None
        if not 0.0 <= at_ms < math.inf or not model or not (deadline_ms or 0.0) >= 0.0:
            raise TraceError(f"line {number}: a time of at least 0 and a name are expected")
        place = names.setdefault(model, len(names))
        caller = row[3].strip() if len(row) > 3 else ""
        arrivals.append(Arrival(at_ms / speed_up, place, deadline_ms, caller))
    if not arrivals:
        raise TraceError("it has no rows under its header")
    arrivals.sort(key=lambda arrival: arrival.at_ms)
    return Trace(name, tuple(arrivals), len(names)), list(names)


def poisson(rate_per_s: float, *, count: int, model_count: int, seed: int = 0) -> Trace:
    """Return Poisson arrivals; by Zipf's law, model k gets 1/k of the first model's requests."""
    chance = Random(seed)
    weights = [1.0 / (1 + model) for model in range(model_count)]
    models = chance.choices(range(model_count), weights, k=count)
    at_ms, arrivals = 0.0, []
    for model in models:
        at_ms += chance.expovariate(rate_per_s) * 1e3
        arrivals.append(Arrival(at_ms, model))
    return Trace(f"poisson:{rate_per_s:g}", tuple(arrivals), model_count)


def tiled(trace: Trace, tiles: int, requests: int, seed: int = 0) -> Trace:
    """Return the trace for ``tiles`` concurrent clients.
    It has about ``requests`` requests in total, or all if there are fewer. Each client has its own
    models, starts at a random instant, and continues at the trace's beginning after its end."""
    chance, times = Random(f"tiles {seed}"), [one.at_ms for one in trace.arrivals]
    length_ms = times[-1] + times[-1] / len(times)
    span_ms = length_ms * min(1.0, requests / (tiles * len(times)))
    arrivals = []
    for tile in range(tiles):
        begin_ms = chance.uniform(0.0, length_ms) if tile else 0.0
        for number in range(first := bisect_left(times, begin_ms), first + len(times)):
            lap, place = divmod(number, len(times))
            at_ms, one = times[place] + lap * length_ms - begin_ms, trace.arrivals[place]
            if at_ms >= span_ms:
                break
            arrivals.append(one._replace(at_ms=at_ms, model=one.model + tile * trace.model_count))
    return Trace(trace.name, tuple(sorted(arrivals)), tiles * trace.model_count)


def _rows(text: str) -> list[list[str]]:
    rows = [line.split(",") for line in text.splitlines() if line.strip()]
    if not rows:
        raise TraceError("it has no rows")
    if len(rows) > MAX_ARRIVALS:
        raise TraceError(f"it has {len(rows)} rows, the limit is {MAX_ARRIVALS}")
    return rows


def _counts(words: Iterable[str], number: int) -> list[int]:
    try:
        counts = [int(word) for word in words]
    except ValueError:
        raise TraceError(f"line {number}: a count is not a whole number") from None
    if min(counts, default=0) < 0 or sum(counts) > MAX_ARRIVALS:
        raise TraceError(f"line {number}: counts are from 0 to {MAX_ARRIVALS} in all")
    return counts


def _instant(word: str, number: int) -> datetime:
    try:
        return datetime.fromisoformat(word.strip()[:26])  # of seven decimals it takes only six
    except ValueError:
        raise TraceError(f"line {number}: {word[:40]!r} is not a time") from None
