"""Uploads are bounded in number, in all and for each client, as well as in bytes."""

from __future__ import annotations

import hashlib
import os
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeswitch.errors import HostStoreFull, QueueFull
from pipeswitch.frontend import uploads
from pipeswitch.frontend.disk import Disk
from pipeswitch.frontend.uploads import Uploads
from pipeswitch.units import Amount
from pipeswitch.wire.frames import RequestHeader


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Uploads]:
    monkeypatch.setattr(uploads, "MAX_FILES", 6)
    monkeypatch.setattr(uploads, "MAX_FILES_PER_CLIENT", 4)
    monkeypatch.setattr(uploads, "MAX_PARTIALS_PER_CLIENT", 2)
    disk = Disk(tmp_path, Amount(size_bytes=1 << 20), Amount(size_bytes=1000))
    found = Uploads(tmp_path / "uploads", 1 << 20, disk)
    found.start()
    yield found
    found.stop()


def put(
    writer: Uploads, session: str, text: str, *, size_bytes: int = 0, tenant: str = ""
) -> tuple[str, Any]:
    """The file's name and the error; a larger size than the text's leaves it unfinished."""
    data = text.encode()
    digest = hashlib.sha256(data).hexdigest()
    body = {"digest": digest, "size_bytes": size_bytes or len(data), "offset_bytes": 0}
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    header = RequestHeader(v=1, id="1", op="put", body=body)
    writer.offer(
        session, header, data, lambda body, error: answers.put(error), tenant=tenant or session
    )
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


@pytest.mark.parametrize("sessions", [1, 9])
def test_a_clients_files_are_counted_over_its_sessions_and_apart_from_others_in_one(
    sessions: int, writer: Uploads
) -> None:
    """One session is the gateway's, with all its callers."""
    others, _ = put(writer, "session 0", "friend-0", tenant="friend")
    mine = [
        put(writer, f"session {number % sessions}", f"enemy-{number}", tenant="enemy")[0]
        for number in range(1, 10)
    ]
    assert names(writer) == {others, *mine[-4:]}
    for number in range(2):
        put(writer, "session 0", f"enemy-{number}", size_bytes=100, tenant="enemy")
    _, error = put(writer, "session 1", "enemy-2", size_bytes=100, tenant="enemy")
    assert isinstance(error, QueueFull)
    assert put(writer, "session 0", "enemy-0", size_bytes=100, tenant="friend")[1] is None


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


def test_what_one_session_sends_never_lies_in_anothers_file(writer: Uploads) -> None:
    """It would change a file that others take for the bytes of its digest."""
    for session in ("0123456789", "0123456780"):
        assert put(writer, session, "enemy-1", size_bytes=100, tenant="enemy")[1] is None
    assert len([path for path in writer.directory.iterdir() if path.name[0] == "."]) == 2


def test_a_client_has_so_many_bytes_and_its_own_oldest_files_make_room(writer: Uploads) -> None:
    others, _ = put(writer, "friend", "friend-0")
    size_bytes = 501
    texts = [f"enemy-{number}".rjust(size_bytes, "x") for number in (1, 2)]
    mine = [put(writer, "enemy", text)[0] for text in texts]
    assert names(writer) == {others, mine[1]}
    _, error = put(writer, "enemy", "enemy-3", size_bytes=1001)
    assert isinstance(error, HostStoreFull)
    assert (error.requested_bytes, error.tenant) == (1001, "enemy")
    assert "max_disk_per_client" in error.hint


def test_what_is_promised_counts_before_it_is_written(writer: Uploads) -> None:
    assert put(writer, "enemy", "enemy-1", size_bytes=900)[1] is None
    _, error = put(writer, "enemy", "enemy-2", size_bytes=200)
    assert isinstance(error, HostStoreFull)
    writer.forget("enemy")
    assert put(writer, "enemy", "enemy-3", size_bytes=900)[1] is None
