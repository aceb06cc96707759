"""What survives the server: which models are registered, which jobs were accepted.

One JSON object per line, fsynced before a job is answered; compacted when the server starts. A
torn last line (power loss) is ignored. Bytes travel as base64.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

Entry = dict[str, Any]


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
        self._path = path
        self.models, self.jobs = fold(_read(path))
        self._file = self._compact()

    def _compact(self) -> Any:
        temporary = self._path.with_suffix(".new")
        with open(temporary, "w", encoding="utf-8") as file:
            for entry in (*self.models.values(), *self.jobs.values()):
                file.write(_line(entry))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
        _sync_directory(self._path.parent)
        return open(self._path, "a", encoding="utf-8")

    def append(self, entry: Entry) -> None:
        """Write and fsync.

        Raises:
            OSError: the disk is full or gone; the journal's earlier part is intact.
        """
        self._file.write(_line(entry))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _line(entry: Entry) -> str:
    packed = {
        key: {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
        for key, value in entry.items()
    }
    return json.dumps(packed) + "\n"


def _read(path: Path) -> list[Entry]:
    entries: list[Entry] = []
    if not path.exists():
        return entries
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            raw = json.loads(line)
            entries.append(
                {
                    key: base64.b64decode(value["base64"]) if isinstance(value, dict) else value
                    for key, value in raw.items()
                }
            )
        except (ValueError, KeyError, AttributeError) as error:
            log.warning("journal=%s line=%d unreadable, ignored: %s", path, number, error)
    return entries


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
