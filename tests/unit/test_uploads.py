"""Uploads are bounded in number, in all and for each client, as well as in bytes."""

from __future__ import annotations

import hashlib
import os
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeswitch.errors import QueueFull
from pipeswitch.frontend import uploads
from pipeswitch.frontend.uploads import Uploads
from pipeswitch.wire.frames import RequestHeader


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Uploads]:
    monkeypatch.setattr(uploads, "MAX_FILES", 6)
    monkeypatch.setattr(uploads, "MAX_FILES_PER_CLIENT", 4)
    monkeypatch.setattr(uploads, "MAX_PARTIALS_PER_CLIENT", 2)
    found = Uploads(tmp_path / "uploads", 1 << 20)
    found.start()
    yield found
    found.stop()


def put(writer: Uploads, session: str, text: str, *, size_bytes: int = 0) -> tuple[str, Any]:
    """The file's name and the error; a larger size than the text's leaves it unfinished."""
    data = text.encode()
    digest = hashlib.sha256(data).hexdigest()
    body = {"digest": digest, "size_bytes": size_bytes or len(data), "offset_bytes": 0}
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    header = RequestHeader(v=1, id="1", op="put", body=body)
    writer.offer(session, header, data, lambda body, error: answers.put(error))
    error = answers.get(timeout=30)
    path = writer.directory / f"{digest}.bundle"
    if path.exists():  # file times are coarser than this test is fast
        os.utime(path, (1e9 + int(text.partition("-")[2]),) * 2)
    return path.name, error


def names(writer: Uploads) -> set[str]:
    return {path.name for path in writer.directory.iterdir() if not path.name.startswith(".")}


def test_a_clients_own_oldest_files_go_before_anothers(writer: Uploads) -> None:
    others, _ = put(writer, "friend", "friend-0")
    mine = [put(writer, "enemy", f"enemy-{number}")[0] for number in range(1, 10)]
    assert names(writer) == {others, *mine[-4:]}


def test_all_clients_together_keep_so_many_files(writer: Uploads) -> None:
    sent = [put(writer, f"client {number}", f"file-{number}")[0] for number in range(10)]
    assert names(writer) == set(sent[-6:])


def test_a_client_has_so_many_unfinished_files(writer: Uploads) -> None:
    for number in range(2):
        assert put(writer, "enemy", f"enemy-{number}", size_bytes=100)[1] is None
    assert isinstance(put(writer, "enemy", "enemy-2", size_bytes=100)[1], QueueFull)
    assert put(writer, "friend", "friend-3", size_bytes=100)[1] is None
    writer.forget("enemy")
    assert put(writer, "enemy", "enemy-4", size_bytes=100)[1] is None
