"""The journal of earlier releases, one JSON object per line: read once, then put aside.

What cannot be read (a line torn by a power loss, damage) is dropped with a warning. Bytes travel
as base64.
"""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

Entry = dict[str, Any]


def read_lines(path: Path) -> list[Entry]:
    """The objects of the file, in order, their fields unchecked; none when there is no file.

    Raises:
        OSError: it cannot be read.
    """
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
    """One object; ValueError when it is none."""
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
    return entry
