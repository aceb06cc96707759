"""Parsers and formatters for sizes, times and texts that people read or write."""

from __future__ import annotations

import contextlib
import difflib
import heapq
import logging
import logging.handlers
import math
import re
import sys
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, Final

from .plain_files import open_plain

_SIZE_UNITS: Final = {
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


_TIME_UNITS_MS: Final = {
    "us": 1e-3,
    "ms": 1.0,
    "s": 1e3,
    "m": 60e3,
    "min": 60e3,
    "h": 3600e3,
    "d": 24 * 3600e3,
}


LIMIT: Final = 1 << 63  # bytes or milliseconds
_QUANTITY: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def _quantity(text: object, units: Mapping[str, float], example: str) -> float:
    match = _QUANTITY.fullmatch(str(text))
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in units:
        raise ValueError(f"{text!r} is not of the form {example}")
    number = float(match.group(1)) * units[unit]
    if number >= LIMIT:  # also refuses infinity, which has no integer
        raise ValueError(f"{text!r} is too large")
    return number


def parse_size(text: object) -> int:
    """Parse ``512MiB``, ``20GiB``, ``1GB`` or a plain number into bytes, or raise ValueError."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    if isinstance(text, str) and text.strip().isdecimal() and int(text) < LIMIT:
        return int(text)
    return round(_quantity(text, _SIZE_UNITS, "512MiB or 20GiB"))


def parse_ms(text: object) -> float:
    """Parse ``50ms``, ``5s``, ``2m``, ``1h`` or 0 into milliseconds, or raise ValueError."""
    if text in (0, "0"):
        return 0.0
    return _quantity(text, _TIME_UNITS_MS, "50ms or 5s")


def format_bytes(size_bytes: float) -> str:
    """Format a size for messages that compare two: ``428.97 MiB``."""
    size, unit = _in_unit(size_bytes)
    return f"{size:.2f} {unit}" if unit != "B" else f"{size:.0f} B"


def short_bytes(size_bytes: float) -> str:
    """Format a size for tables: three significant digits, or an integer: ``429 MiB``."""
    size, unit = _in_unit(size_bytes)
    return f"{format_number(size)} {unit}" if unit != "B" else f"{size:.0f} B"


def _in_unit(size_bytes: float) -> tuple[float, str]:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    number = 0
    while abs(size_bytes) >= 1024 and number < len(units) - 1:
        size_bytes, number = size_bytes / 1024, number + 1
    return size_bytes, units[number]


def format_number(number: float) -> str:
    """Format a number for people: three significant digits, or whole: 3.30e-06, 1.25, 1234."""
    if 99.95 <= abs(number) < 1e15:
        return f"{number:.0f}"
    return f"{number:#.3g}" if number else "0.00"


@dataclass(frozen=True)
class RetentionPolicy:
    """Rule for keeping items: the newest ``count``, or those up to a maximum age."""

    count: int = 1 << 30
    time_ms: float = 0.0  # maximum age; 0: no limit

    @classmethod
    def parse(cls, text: object) -> RetentionPolicy:
        """Parse ``20`` or ``7d``, or raise ValueError."""
        if str(text).strip().isdigit():
            return cls(count=int(str(text)))
        return cls(time_ms=_quantity(text, _TIME_UNITS_MS, "20 (jobs) or 7d"))

    def __str__(self) -> str:
        return f"{self.time_ms / _TIME_UNITS_MS['h']:g}h" if self.time_ms else str(self.count)


@dataclass(frozen=True)
class SizeSpec:
    """Size setting: ``auto``, a number of bytes, or a fraction of the total."""

    size_bytes: int | None = None
    fraction: float | None = None

    def resolve(self, total_bytes: int, auto_bytes: int) -> int:
        """Return the size: ``auto`` is ``auto_bytes``, a fraction is a part of ``total_bytes``."""
        if self.size_bytes is not None:
            return self.size_bytes
        return auto_bytes if self.fraction is None else int(total_bytes * self.fraction)

    @staticmethod
    def parse(text: object) -> SizeSpec:
        """Parse ``auto``, ``20GiB`` or ``0.9``, or raise ValueError."""
        if isinstance(text, SizeSpec):
            return text
        if text == "auto":
            return SizeSpec()
        try:
            number = float(str(text))
        except ValueError:
            number = math.nan
        if 0 < number <= 1:
            return SizeSpec(fraction=number)
        if 1 < number < 1 << 20:
            raise ValueError(f"{text!r} is only {text} bytes; write {text}GiB or {text}MiB")
        return SizeSpec(size_bytes=parse_size(text))

    def __str__(self) -> str:
        if self.size_bytes is not None:
            return format_bytes(self.size_bytes)
        return "auto" if self.fraction is None else str(self.fraction)


MAX_WORD: Final = 200  # longer words are not compared with names
MAX_COMPARED: Final = 50
UNPRINTABLE: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories that change a terminal instead of being shown: control characters (also C1),
format characters (such as changes of direction), surrogates, line and paragraph separators."""


class PrintableFormatter(logging.Formatter):
    """Log formatter that escapes control characters, so that they cannot control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_control_chars(super().format(record))


class LogFile(logging.handlers.RotatingFileHandler):
    """Log file of limited size. The first failed write in a row is reported on stderr."""

    _is_failing = False
    _has_failed = False

    def _open(self) -> IO[str]:  # type: ignore[override]
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=open_plain)

    def emit(self, record: logging.LogRecord) -> None:
        self._has_failed = False
        super().emit(record)
        self._is_failing = self._has_failed

    def handleError(self, record: logging.LogRecord) -> None:
        self._has_failed = True
        if not self._is_failing:
            why = getattr(sys.exc_info()[1], "strerror", None) or sys.exc_info()[1]
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{self.baseFilename} cannot be written: {why}\n")


def escape_control_chars(text: str, keep: str = "\n\t") -> str:
    """Escape each character that would control a terminal, except those in ``keep``."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode() if is_obeyed(c) and c not in keep else c for c in text
    )


def is_obeyed(character: str) -> bool:
    """Return True if a terminal obeys the character instead of showing it."""
    return unicodedata.category(character) in UNPRINTABLE


def printed(value: Any) -> Any:
    """Return a JSON value with control characters escaped in all its texts."""
    if isinstance(value, str):
        return escape_control_chars(value)
    if isinstance(value, Mapping):
        return {printed(key): printed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [printed(item) for item in value]
    return value


def nearest(word: str, known: Any) -> str:
    """Return ``; did you mean "x"?`` if one of ``known`` is close, else an empty string.
    A comparison takes up to 0.1 ms, so only MAX_COMPARED names that look alike are compared."""
    near = lambda one: (one[:2] != word[:2], abs(len(one) - len(word)))  # noqa: E731
    likely = heapq.nsmallest(MAX_COMPARED, known, near) if len(word) <= MAX_WORD else []
    close = difflib.get_close_matches(word, likely, n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""
