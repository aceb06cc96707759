"""Pieces of a job's files for clients that page through them: log, history, state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from ..base.errors import ModelNotFound, RemoteProtocolError
from ..base.plain_files import open_plain
from ..commits.commit_files import read_record
from ..ipc.messages.base import JobName
from ..ipc.sparse import kept_from

CHUNK_BYTES: Final = 256 << 10  # small enough to be read between two messages
TEXTS: Final = {"logs": "log", "history": "history"}
CUT: Final = "[older lines were removed: [log] max]\n"
PIECES: Final = (*TEXTS, "state")


def read_piece(state: Path, name: JobName, kind: str, offset_bytes: int) -> dict[str, Any]:
    """Return a piece of the file from ``offset_bytes`` on, the next offset, and the file's end.

    Returns:
        ``text`` for a log or a history. For a state: ``data`` (see ``commits/commit_files.py``),
        and a ``digest``, which changes when a newer commit replaces the file.

    Raises:
        ModelNotFound: no job of that name has written anything.
    """
    more: dict[str, Any] = {}
    path = state / "logs" / f"job-{name}.{TEXTS.get(kind)}"
    if kind == "state":
        try:
            record = read_record(state / "commits" / name)
        except RemoteProtocolError:  # a script wrote another file there
            record = None
        if record is None:
            raise _nothing(kind, name)
        path = state / "commits" / name / record.image
        more = {"digest": record.sha256}
    try:
        with open(path, "rb", opener=open_plain) as file:
            end_bytes = os.fstat(file.fileno()).st_size
            begin_bytes = min(offset_bytes, end_bytes)
            kept_bytes = kept_from(file.fileno(), begin_bytes) if kind == "logs" else begin_bytes
            file.seek(kept_bytes)
            is_cut = kept_bytes > begin_bytes
            if is_cut:
                begin_bytes = kept_bytes + len(file.readline(CHUNK_BYTES))  # skip a cut line
            data = file.read(CHUNK_BYTES)
    except OSError:
        if kind != "history" or not path.with_name(f"job-{name}.{TEXTS['logs']}").is_file():
            raise _nothing(kind, name) from None
        return {"offset_bytes": 0, "end_bytes": 0, "text": ""}  # the job has not called job.log
    if kind == "state":
        size_bytes = len(data)
        more["data"] = data
    else:
        size_bytes = whole_characters(data)
        more["text"] = CUT * is_cut + data[:size_bytes].decode("utf-8", "replace")
    return {"offset_bytes": begin_bytes + size_bytes, "end_bytes": end_bytes, **more}


def _nothing(kind: str, name: JobName) -> ModelNotFound:
    what = {"logs": "log"}.get(kind, kind)
    return ModelNotFound(f'job "{name}" has no {what}', hint="pipeswitch jobs")


def whole_characters(data: bytes) -> int:
    """Return the length of ``data`` without a UTF-8 character that is cut off at its end."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue  # inside a character: its first byte is further left
        width = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return len(data) - back if back < width else len(data)
    return len(data)
