"""What survives the server: which models are registered, which jobs were accepted.

One JSON object per line, fsynced before a job is answered; compacted when the server starts. What
cannot be read (a line torn by a power loss, damage) is dropped with a warning. Bytes travel as
base64.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..config import NAME_PATTERN

log = logging.getLogger(__name__)

Entry = dict[str, Any]

FIELDS: Final[Mapping[str, Mapping[str, type]]] = {
    "model": {"spec": bytes, "spec_digest": str, "digest": str, "priority": int, "pin": bool},
    "model-gone": {},
    "job": {"entry": str, "args": list, "priority": int},
    "job-over": {},
}
"""What an entry of each kind must have beside its name."""


def fold(entries: list[Entry]) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Registered models and unfinished jobs, by name, after all entries. Pure."""
    models: dict[str, Entry] = {}
    jobs: dict[str, Entry] = {}
    for entry in entries:
        name = str(entry.get("name", ""))
        match entry.get("kind"):
            case "model":
                models[name] = entry
            case "model-gone":
                models.pop(name, None)
            case "job":
                jobs[name] = entry
            case "job-over":
                jobs.pop(name, None)
            case other:
                log.warning("journal entry of unknown kind %r ignored", other)
    return models, jobs


class JournalFile:
    """Append-only; one writer (the state directory is locked)."""

    def __init__(self, path: Path) -> None:
        """Read and compact; a full disk leaves the old file in use.

        Raises:
            OSError: it can be neither read nor written.
        """
        self._path = path
        self.models, self.jobs = fold(_read(path))
        try:
            self._compact()
        except OSError as error:
            log.warning("journal=%s not compacted: %s", path, error.strerror)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the server
        self._size_bytes = os.fstat(self._file.fileno()).st_size
        self._is_torn = not _ends_whole(path)

    def _compact(self) -> None:
        temporary = self._path.with_suffix(".new")
        try:
            with open(temporary, "wb") as file:
                for entry in (*self.models.values(), *self.jobs.values()):
                    file.write(_line(entry))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_directory(self._path.parent)

    def append(self, entry: Entry) -> None:
        """Write and fsync, or leave no trace.

        Raises:
            OSError: the disk is full or gone; the journal's earlier part is intact.
        """
        line = (b"\n" if self._is_torn else b"") + _line(entry)
        try:
            written = self._file.write(line)
            if written < len(line):
                self._file.write(line[written:])  # says why there is no room for the rest
            os.fsync(self._file.fileno())
        except OSError:
            self._is_torn = True  # unless the half line can be taken back
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._size_bytes)
                self._is_torn = not _ends_whole(self._path)
            raise
        self._is_torn = False
        self._size_bytes = os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


def _line(entry: Entry) -> bytes:
    packed = {
        key: {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
        for key, value in entry.items()
    }
    return json.dumps(packed).encode() + b"\n"


def _read(path: Path) -> list[Entry]:
    entries: list[Entry] = []
    if not path.exists():
        return entries
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line:
            continue
        try:
            entries.append(_parse(line))
        except (ValueError, RecursionError) as error:
            log.warning("journal=%s line=%d unreadable, ignored: %s", path, number, error)
    return entries


def _parse(line: bytes) -> Entry:
    """One entry; ValueError when it is none."""
    raw = json.loads(line)
    if not isinstance(raw, dict):
        raise ValueError("no object")
    entry: Entry = {}
    for key, value in raw.items():
        if isinstance(value, dict):
            packed = value.get("base64")
            if not isinstance(packed, str):
                raise ValueError(f"{key}: no base64")
            entry[key] = base64.b64decode(packed)
        else:
            entry[key] = value
    name, kind = entry.get("name"), entry.get("kind")
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise ValueError(f"name {str(name)[:80]!r}")
    if not isinstance(kind, str):
        raise ValueError(f"kind {str(kind)[:80]!r}")
    for field, wanted in FIELDS.get(kind, {}).items():
        if not isinstance(entry.get(field), wanted):
            raise ValueError(f"{kind} {name}: {field} is no {wanted.__name__}")
    if kind == "job" and not all(isinstance(arg, str) for arg in entry["args"]):
        raise ValueError(f"job {name}: an argument is no text")
    return entry


def _ends_whole(path: Path) -> bool:
    """Whether the last line of the file is complete."""
    with open(path, "rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        if size_bytes == 0:
            return True
        file.seek(size_bytes - 1)
        return file.read(1) == b"\n"


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
