"""Pieces of a job's log, as clients page through it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from ..errors import ModelNotFound
from ..ipc.messages import JobName

CHUNK_BYTES: Final = 256 << 10  # small enough to be read between two messages


def read_piece(directory: Path, name: JobName, offset_bytes: int) -> dict[str, Any]:
    """``text`` from ``offset_bytes`` on, where to go on, and where the log ends now.

    Raises:
        ModelNotFound: no job of that name has written anything.
    """
    try:
        with open(directory / f"job-{name}.log", "rb") as file:
            end_bytes = os.fstat(file.fileno()).st_size
            begin_bytes = min(offset_bytes, end_bytes)
            file.seek(begin_bytes)
            data = file.read(CHUNK_BYTES)
    except FileNotFoundError:
        raise ModelNotFound(f'no log of a job "{name}"', hint="pipeswitch jobs") from None
    size_bytes = whole_characters(data)
    return {
        "text": data[:size_bytes].decode("utf-8", "replace"),
        "offset_bytes": begin_bytes + size_bytes,
        "end_bytes": end_bytes,
    }


def whole_characters(data: bytes) -> int:
    """Length of ``data`` without a UTF-8 character that is cut off at its end."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue  # inside a character: its first byte is further left
        width = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return len(data) - back if back < width else len(data)
    return len(data)
