"""Uploads: their number and bytes are limited, in total and for each client."""

from __future__ import annotations

import hashlib
import itertools
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeswitch.base.errors import HostStoreFull, InvalidInput, PipeSwitchError, QueueFull
from pipeswitch.base.units import SizeSpec
from pipeswitch.frontend import uploads
from pipeswitch.frontend.disk import Disk
from pipeswitch.frontend.uploads import Uploads
from pipeswitch.wire.frames import RequestHeader


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Uploads]:
    """Yield uploads with room for 8 files: a first client may have 6 of them, the next client 1."""
    monkeypatch.setattr(uploads, "MAX_FILES", 8)
    monkeypatch.setattr(uploads, "MAX_PARTIALS", 4)
    disk = Disk(tmp_path, SizeSpec(size_bytes=1 << 20), SizeSpec(size_bytes=1000))
    own_uploads = Uploads(tmp_path / "uploads", 1 << 20, disk)
    own_uploads.start()
    yield own_uploads
    own_uploads.stop()


def put(
    writer: Uploads,
    session: str,
    text: str,
    *,
    size_bytes: int = 0,
    tenant: str = "",
    part: slice = slice(None),
) -> tuple[str, Any]:
    """Upload a text or a part of it; return file name and error. If ``size_bytes`` is larger, it
    is unfinished."""
    data = text.encode()
    digest = hashlib.sha256(data).hexdigest()
    body = {
        "digest": digest,
        "size_bytes": size_bytes or len(data),
        "offset_bytes": part.start or 0,
    }
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    header = RequestHeader(v=1, id="1", op="put", body=body)
    writer.offer(
        session,
        header,
        data[part],
        lambda body, error: answers.put(error or body),
        tenant=tenant or session,
    )
    answer = answers.get(timeout=30)
    return f"{digest}.bundle", answer if isinstance(answer, PipeSwitchError) else None


def names(writer: Uploads) -> set[str]:
    return {path.name for path in writer.directory.iterdir() if not path.name.startswith(".")}


def test_a_clients_files_have_its_share_whatever_its_sessions_and_no_others_go_for_it(
    writer: Uploads,
) -> None:
    """Use several sessions: shares are per client, because a gateway has one session for all."""
    friend, _ = put(writer, "session 0", "friend-0", tenant="friend")
    mine = []
    for number in range(9):
        name, error = put(writer, f"session {number % 3}", f"e-{number}", tenant="enemy")
        if error is None:
            mine.append(name)
        else:
            assert isinstance(error, QueueFull)
    assert len(mine) == 5
    assert names(writer) == {friend, *mine}
    assert put(writer, "session 0", "friend-1", tenant="friend")[1] is None


def test_a_promise_removes_nothing_of_anybodys_before_it_is_refused(writer: Uploads) -> None:
    names_kept = {put(writer, client, f"{client}-0")[0] for client in ("a", "b")}
    _, error = put(writer, "enemy", "enemy-1", size_bytes=1 << 20)
    assert isinstance(error, HostStoreFull)
    assert names(writer) == names_kept


def test_a_clients_own_oldest_files_make_room_once_they_are_no_longer_fresh(
    writer: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"mine-{number}".rjust(300, "x") for number in range(4)]
    mine = [put(writer, "me", text)[0] for text in texts[:3]]
    assert isinstance(put(writer, "me", texts[3])[1], HostStoreFull), "they were just uploaded"
    monkeypatch.setattr(uploads, "FRESH_S", 0.0)
    last, error = put(writer, "me", texts[3])
    assert error is None
    assert names(writer) == {*mine[1:], last}


def test_a_file_stays_as_long_as_a_registration_names_it(
    writer: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "FRESH_S", 0.0)
    name, _ = put(writer, "me", "mine".rjust(600, "x"))
    spec = msgspec.msgpack.encode({"name": "m", "source": str(writer.directory / name)})
    first, second = writer.pin(spec), writer.pin(spec)
    assert isinstance(put(writer, "me", "more".rjust(600, "x"))[1], HostStoreFull)
    writer.unpin(first)
    assert isinstance(put(writer, "me", "more".rjust(600, "x"))[1], HostStoreFull)
    writer.unpin(second)
    assert put(writer, "me", "more".rjust(600, "x"))[1] is None
    assert name not in names(writer), "its program is a copy"


def test_a_file_that_another_client_was_told_of_stays_for_its_registration(writer: Uploads) -> None:
    """If uploads removed the file, it would be missing when the other client registers it."""
    (name, _), (same, _) = put(writer, "me", "same"), put(writer, "friend", "same")
    spec = msgspec.msgpack.encode({"name": "m", "source": str(writer.directory / name)})
    writer.unpin(writer.pin(spec))
    put(writer, "me", "other")
    assert name == same in names(writer)
    writer.unpin(writer.pin(spec))
    put(writer, "me", "another")
    assert name not in names(writer)


def test_unfinished_files_have_their_share_and_lose_it_when_nothing_comes(
    writer: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = [put(writer, "enemy", f"enemy-{number}", size_bytes=100)[1] for number in range(4)]
    assert [isinstance(error, QueueFull) for error in refused] == [False, False, False, True]
    assert isinstance(put(writer, "friend", "friend-0", size_bytes=100)[1], QueueFull)
    monkeypatch.setattr(uploads, "PROMISE_S", 0.0)
    assert put(writer, "friend", "friend-0", size_bytes=100)[1] is None
    writer.remove_session("friend")
    assert put(writer, "enemy", "enemy-9", size_bytes=100)[1] is None


@pytest.mark.parametrize("step", ["os.fsync", "os.replace", "sync_directory"])
def test_a_file_that_cannot_be_published_leaves_nothing_and_costs_no_share(
    writer: Uploads, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(f"pipeswitch.frontend.uploads.{step}", fail)
        for _ in range(9):
            assert isinstance(put(writer, "me", "mine".rjust(600, "x"))[1], PipeSwitchError)
        assert [*writer.directory.iterdir()] == []
    name, error = put(writer, "me", "mine".rjust(600, "x"))
    assert (names(writer), error) == ({name}, None)


def test_what_one_session_sends_never_lies_in_anothers_file(writer: Uploads) -> None:
    """A session must not write to another's file, which clients trust by its digest."""
    for session in ("0123456789", "0123456780"):
        assert put(writer, session, "enemy-1", size_bytes=100, tenant="enemy")[1] is None
    assert len([path for path in writer.directory.iterdir() if path.name[0] == "."]) == 2


def test_what_is_promised_counts_before_it_is_written(writer: Uploads) -> None:
    assert put(writer, "enemy", "enemy-1", size_bytes=900)[1] is None
    _, error = put(writer, "enemy", "enemy-2", size_bytes=200)
    assert isinstance(error, HostStoreFull)
    writer.remove_session("enemy")
    assert put(writer, "enemy", "enemy-3", size_bytes=900)[1] is None


TEXT = "0123456789" * 40
CHUNKS = [slice(at, at + 100) for at in range(0, 400, 100)]


@pytest.mark.parametrize(
    ("lead", "chunks"),
    [(0, CHUNKS), (1, CHUNKS), (3, [slice(0, 250), slice(250, 400)]), (4, CHUNKS)],
)
def test_two_uploads_of_one_file_at_a_time_are_both_served_and_counted_once(
    writer: Uploads, lead: int, chunks: list[slice]
) -> None:
    """One upload is ``lead`` chunks ahead of the other, whose chunks may have another size."""
    first, second = [slice(0, 0), *CHUNKS], [slice(0, 0), *chunks]
    turns = [*((one, None) for one in first[: lead + 1])]
    turns += itertools.zip_longest(first[lead + 1 :], second)  # type: ignore[arg-type]
    for pair in turns:
        for part in filter(None, pair):
            _, error = put(writer, "gateway", TEXT, tenant="me", part=part)
            assert error is None
            assert writer._bytes.of("me") == len(TEXT)
            assert writer._places.of("me") == 1
    (name,) = names(writer)
    assert (writer.directory / name).read_text() == TEXT
    spec = msgspec.msgpack.encode({"name": "m", "source": str(writer.directory / name)})
    writer.unpin(writer.pin(spec))
    assert put(writer, "me", "wait for the unpin")[1] is None
    assert name in names(writer), "the other upload's registration is still to come"


@pytest.mark.parametrize("wrong", ["size", "gap", "digest", "other size"])
def test_a_wrong_chunk_is_refused_and_harms_no_other_upload(writer: Uploads, wrong: str) -> None:
    assert put(writer, "gateway", TEXT, tenant="me", part=CHUNKS[0])[1] is None
    error: Any = None
    match wrong:
        case "size":
            _, error = put(writer, "gateway", TEXT, size_bytes=401, tenant="me", part=CHUNKS[1])
        case "gap":
            _, error = put(writer, "gateway", TEXT, tenant="me", part=CHUNKS[2])
        case "other size":
            assert not put(writer, "gateway", TEXT, size_bytes=401, tenant="me", part=CHUNKS[0])[1]
        case "digest":
            body = {"digest": "0" * 64, "size_bytes": 4}
            header = RequestHeader(v=1, id="1", op="put", body=body)
            answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
            writer.offer("gateway", header, b"1234", lambda _, bad: answers.put(bad), tenant="me")
            error = answers.get(timeout=30)
            assert len([*writer.directory.iterdir()]) == 1
    assert isinstance(error, InvalidInput) or wrong == "other size"
    assert writer._bytes.of("me") == len(TEXT) + 401 * (wrong == "other size")
    for part in CHUNKS[1:]:
        assert put(writer, "gateway", TEXT, tenant="me", part=part)[1] is None
    assert sum(path.stat().st_size for path in writer.directory.glob("[!.]*")) == len(TEXT)
