"""Commit areas and commits on disk, read after a write that was interrupted anywhere."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from pipeswitch.base.errors import RemoteProtocolError
from pipeswitch.commits import area as commit_area
from pipeswitch.commits import commit_files
from pipeswitch.commits.area import HEADER_BYTES, Commit, CommitArea, area_bytes, create_area
from pipeswitch.frontend.frontend import Frontend
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.ipc.messages.base import JobName, OpId
from pipeswitch.ipc.messages.daemon import CommitCopy
from pipeswitch.memory_daemon import commit_areas
from pipeswitch.scheduler.state import events as ev

SLOT_BYTES = 10_000
COMMIT_POINTS = ["commit.struck", "commit.copied", "commit.recorded", "commit.flipped"]
PERSIST_POINTS = [
    "persist.image.written",
    "persist.image.renamed",
    "persist.record.written",
    "persist.record.renamed",
]


class Died(BaseException):
    """Stand-in for ``kill -9``: after it, no code of the writer runs."""


def dies_at(point: str) -> Callable[[str], None]:
    def failpoint(name: str) -> None:
        if name == point:
            raise Died

    return failpoint


def image_of(step: int, size_bytes: int = 5000) -> bytes:
    return bytes((step * 31 + index) % 251 for index in range(size_bytes))


def filler(image: bytes) -> Callable[[memoryview], None]:
    def fill(view: memoryview) -> None:
        view[:] = image

    return fill


def commit(area: CommitArea, step: int, size_bytes: int = 5000) -> Commit:
    return area.write(step, size_bytes, filler(image_of(step, size_bytes)))


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = create_area(SLOT_BYTES)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def writer(descriptor: int) -> Iterator[CommitArea]:
    area = CommitArea(descriptor, SLOT_BYTES, is_writer=True)
    yield area
    area.close()


@pytest.fixture
def reader(descriptor: int) -> Iterator[CommitArea]:
    area = CommitArea(descriptor, SLOT_BYTES)
    yield area
    area.close()


def test_a_new_area_holds_no_commit(reader: CommitArea) -> None:
    assert reader.newest() is None


def test_the_reader_finds_what_the_writer_flipped_last(
    writer: CommitArea, reader: CommitArea
) -> None:
    for step in range(1, 6):
        commit(writer, step, size_bytes=step * 1000)
        newest = reader.newest()
        assert (newest.step, newest.sequence) == (step, step)
        assert bytes(reader.image(newest)) == image_of(step, step * 1000)


def test_a_slot_is_reserved_by_who_writes_it_and_a_full_machine_fails_that_commit_alone(
    descriptor: int, writer: CommitArea, reader: CommitArea, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The creator must not block to reserve pages. A write to an unreserved page raises SIGBUS."""
    assert os.fstat(descriptor).st_blocks * 512 == HEADER_BYTES
    commit(writer, 1)
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "full")
        patch.setattr(commit_area.os, "posix_fallocate", Mock(side_effect=full))
        with pytest.raises(OSError, match="full"):
            commit(writer, 2)
    assert reader.newest().step == 1
    commit(writer, 3)
    assert reader.newest().step == 3


@pytest.mark.parametrize("size_bytes", [4097, SLOT_BYTES])
def test_the_next_slot_is_ready_before_its_commit(writer: CommitArea, size_bytes: int) -> None:
    commit(writer, 1, size_bytes)
    writer.prepare(size_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_area.os, "posix_fallocate", Mock(side_effect=AssertionError))
        commit(writer, 2, size_bytes)
        writer.prepare(size_bytes)  # both slots are ready
    full = OSError(errno.ENOSPC, "full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_area.os, "posix_fallocate", Mock(side_effect=full))
        writer.prepare(size_bytes + 1)
    assert writer.newest() == writer._record(2)


@pytest.mark.parametrize("committed_count", [0, 1, 2])
@pytest.mark.parametrize("point", COMMIT_POINTS)
def test_a_writer_that_dies_anywhere_leaves_the_last_complete_commit(
    descriptor: int,
    reader: CommitArea,
    committed_count: int,
    point: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = CommitArea(descriptor, SLOT_BYTES, is_writer=True)
    for step in range(1, committed_count + 1):
        commit(writer, step)
    next_step = committed_count + 1
    with monkeypatch.context() as patch:
        patch.setattr(commit_area, "reach", dies_at(point))
        with pytest.raises(Died):
            writer.write(next_step, 5000, filler(image_of(next_step)))
    newest = reader.newest()
    expected = next_step if point == "commit.flipped" else committed_count
    assert (newest.step if newest else 0) == expected
    if newest:
        assert bytes(reader.image(newest)) == image_of(expected)
    # A new writer continues from that commit.
    successor = CommitArea(descriptor, SLOT_BYTES, is_writer=True)
    commit(successor, 77)
    newest = reader.newest()
    assert (newest.step, bytes(reader.image(newest))) == (77, image_of(77))


def test_a_copy_that_fails_halfway_keeps_the_commit_before(
    writer: CommitArea, reader: CommitArea
) -> None:
    commit(writer, 1)

    def fail(view: memoryview) -> None:
        view[:100] = bytes(100)
        raise OSError("device gone")

    with pytest.raises(OSError, match="device gone"):
        writer.write(2, 5000, fail)
    newest = reader.newest()
    assert newest is not None
    assert bytes(reader.image(newest)) == image_of(1)


def test_a_damaged_active_image_falls_back_to_the_commit_before(
    descriptor: int, writer: CommitArea, reader: CommitArea
) -> None:
    commit(writer, 1)
    commit(writer, 2)
    slot_of_two = commit_area.HEADER_BYTES
    os.pwrite(descriptor, b"\xff", slot_of_two + 1234)
    newest = reader.newest()
    assert newest.step == 1


def test_two_damaged_images_are_an_error_and_not_an_empty_area(
    descriptor: int, writer: CommitArea, reader: CommitArea
) -> None:
    commit(writer, 1)
    commit(writer, 2)
    for slot in (0, 1):
        os.pwrite(descriptor, b"\xff", commit_area.HEADER_BYTES + slot * SLOT_BYTES + 1234)
    with pytest.raises(RemoteProtocolError, match="damaged"):
        reader.newest()


def test_a_view_is_no_longer_current_once_its_slot_is_being_rewritten(
    writer: CommitArea, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = commit(writer, 1)
    commit(writer, 2)
    assert writer.is_current(first)
    monkeypatch.setattr(commit_area, "reach", dies_at("commit.struck"))
    with pytest.raises(Died):
        writer.write(3, 10, filler(bytes(10)))
    assert not writer.is_current(first)


def test_an_image_larger_than_a_slot_is_refused(writer: CommitArea) -> None:
    with pytest.raises(RemoteProtocolError):
        writer.write(1, SLOT_BYTES + 1, filler(b""))
    assert writer.newest() is None


def test_an_image_that_fills_its_slot_leaves_the_other_alone(
    writer: CommitArea, reader: CommitArea
) -> None:
    first = commit(writer, 1, SLOT_BYTES)
    commit(writer, 2, SLOT_BYTES)
    assert bytes(reader.image(first)) == image_of(1, SLOT_BYTES)


@pytest.mark.parametrize("slot_bytes", [SLOT_BYTES - 1, SLOT_BYTES + 1])
def test_another_slot_size_is_refused(descriptor: int, slot_bytes: int) -> None:
    with pytest.raises(RemoteProtocolError):
        CommitArea(descriptor, slot_bytes, is_writer=True)


def test_an_area_that_could_shrink_is_refused() -> None:
    descriptor = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, area_bytes(100))
        assert not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        with pytest.raises(RemoteProtocolError):
            CommitArea(descriptor, 100, is_writer=True)
    finally:
        os.close(descriptor)


def test_a_reader_refuses_an_area_nobody_formatted() -> None:
    descriptor = sealed_memfd("blank", area_bytes(100))
    try:
        with pytest.raises(RemoteProtocolError):
            CommitArea(descriptor, 100)
    finally:
        os.close(descriptor)


# ---- on disk --------------------------------------------------------------------------------


def loaded(directory: Path) -> tuple[int, bytes] | None:
    """Return the step and the image that a restarted server restores; None without a commit."""
    content = commit_files.load_commit(directory)
    if content is None:
        return None
    descriptor, slot_bytes, _ = content
    area = CommitArea(descriptor, slot_bytes)
    newest = area.newest()
    result = (newest.step, bytes(area.image(newest)))
    area.close()
    os.close(descriptor)
    return result


def test_what_was_persisted_is_loaded_back(tmp_path: Path) -> None:
    assert loaded(tmp_path) is None
    for step in (3, 9, 9):
        commit_files.write_commit(tmp_path, step, memoryview(image_of(step)))
        assert loaded(tmp_path) == (step, image_of(step))
    assert len(list(tmp_path.iterdir())) == 3, "two images and a record, older ones are gone"


@pytest.mark.parametrize("is_lasting", [True, False])
def test_an_image_is_synced_if_it_must_survive_a_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_lasting: bool
) -> None:
    image, sizes = bytes(1 << 16), list[int]()
    monkeypatch.setattr(os, "fsync", lambda file: sizes.append(os.fstat(file).st_size))
    commit_files.write_commit(tmp_path, 3, memoryview(image), is_lasting=is_lasting)
    assert (max(sizes) > len(image)) is is_lasting
    assert loaded(tmp_path) == (3, image)


@pytest.mark.parametrize("point", PERSIST_POINTS)
@pytest.mark.parametrize("had_one", [False, True])
def test_a_persist_that_is_cut_off_anywhere_leaves_a_whole_commit(
    tmp_path: Path, point: str, had_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if had_one:
        commit_files.write_commit(tmp_path, 1, memoryview(image_of(1)))
    with monkeypatch.context() as patch:
        patch.setattr(
            commit_files, "remove_unnamed", lambda *_, **__: None
        )  # a killed writer does not clean up
        patch.setattr(commit_files, "reach", dies_at(point))
        with pytest.raises(Died):
            commit_files.write_commit(tmp_path, 2, memoryview(image_of(2)))
    before = (1, image_of(1)) if had_one else None
    is_there = point == "persist.record.renamed"
    if not had_one:  # if there is only one complete image, a reader needs no record
        is_there = point in ("persist.image.renamed", "persist.record.written") or is_there
    assert loaded(tmp_path) == ((2, image_of(2)) if is_there else before)
    commit_files.write_commit(tmp_path, 2, memoryview(image_of(2)))
    assert loaded(tmp_path) == (2, image_of(2))
    assert len(list(tmp_path.iterdir())) <= 3


def test_a_full_disk_keeps_the_old_commit_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_files.write_commit(tmp_path, 1, memoryview(image_of(1)))
    before = sorted(path.name for path in tmp_path.iterdir())

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            commit_files.write_commit(tmp_path, 2, memoryview(image_of(2)))
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert loaded(tmp_path) == (1, image_of(1))


def test_an_image_that_changed_meanwhile_is_not_kept(tmp_path: Path) -> None:
    commit_files.write_commit(tmp_path, 1, memoryview(image_of(1)))
    with pytest.raises(commit_files.ImageChanged):
        commit_files.write_commit(
            tmp_path, 2, memoryview(image_of(2)), is_still_whole=lambda: False
        )
    assert loaded(tmp_path) == (1, image_of(1))


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_image_is_refused_with_a_reason(tmp_path: Path, damage: str) -> None:
    commit_files.write_commit(tmp_path, 1, memoryview(image_of(1)))
    record = commit_files.read_record(tmp_path)
    image = tmp_path / record.image
    if damage == "flip":
        image.write_bytes(b"\xff" + image.read_bytes()[1:])
    elif damage == "truncate":
        image.write_bytes(image.read_bytes()[:-1])
    else:
        image.unlink()
    with pytest.raises(RemoteProtocolError, match=r"digest|bytes|missing"):
        commit_files.load_commit(tmp_path)


def damage_record(directory: Path, kind: str) -> None:
    path = directory / commit_files.RECORD_NAME
    match kind:
        case "missing":
            path.unlink()
        case "garbage":
            path.write_bytes(b"\xff" * 40)
        case "another step":  # one digit of the record differs
            path.write_text(path.read_text().replace('"step":9', '"step":8'))
        case "another size":
            path.write_text(path.read_text().replace('"size_bytes":', '"size_bytes":1'))
        case "another job's":
            commit_files.write_commit(directory / "other", 77, memoryview(image_of(5)))
            path.write_bytes((directory / "other" / commit_files.RECORD_NAME).read_bytes())


@pytest.mark.parametrize(
    "kind", ["missing", "garbage", "another step", "another size", "another job's"]
)
def test_a_damaged_record_costs_nothing(tmp_path: Path, kind: str) -> None:
    for step in (3, 9):
        commit_files.write_commit(tmp_path, step, memoryview(image_of(step)))
    damage_record(tmp_path, kind)
    commit_files.remove_unnamed(tmp_path)  # as a starting server does
    messages: list[str] = []
    descriptor, _, record = commit_files.load_commit(tmp_path, messages.append)
    os.close(descriptor)
    assert (record.step, kind == "another job's") == (9, bool(messages))
    commit_files.write_commit(tmp_path, 10, memoryview(image_of(10)))
    assert loaded(tmp_path) == (10, image_of(10))


@pytest.mark.parametrize("kind", ["flip", "truncate", "missing", "another job's"])
def test_a_job_goes_on_from_the_commit_before_a_damaged_one(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (3, 5, 9):
        commit_files.write_commit(tmp_path, step, memoryview(image_of(step)))
    image = tmp_path / commit_files.read_record(tmp_path).image
    data = image.read_bytes()
    other = b"".join([data[: -len(image_of(9))], image_of(4)])
    damaged = {"flip": data[:-1] + bytes([data[-1] ^ 1]), "truncate": data[:-1]}
    if kind == "missing":
        image.unlink()
    else:
        image.write_bytes(damaged.get(kind, other))
    commit_files.remove_unnamed(tmp_path)
    messages: list[str] = []
    descriptor, _, record = commit_files.load_commit(tmp_path, messages.append)
    os.close(descriptor)
    assert record.step == 5
    assert len(messages) == 1
    monkeypatch.setattr(commit_files, "reach", dies_at("persist.image.write"))
    with pytest.raises(Died):
        commit_files.write_commit(tmp_path, 10, memoryview(image_of(10)))
    assert loaded(tmp_path) == (5, image_of(5)), "the next commit removes the damaged one alone"


@pytest.mark.parametrize("text", ["", "{}", '{"step":1,"size_bytes":1,"sha256":"","image":"../x"}'])
def test_a_record_that_is_not_ours_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "commit.json").write_text(text)
    with pytest.raises(RemoteProtocolError):
        commit_files.read_record(tmp_path)
    commit_files.write_commit(tmp_path, 4, memoryview(image_of(4)))
    assert loaded(tmp_path) == (4, image_of(4))


def test_a_resumed_job_goes_on_from_the_commit_before_a_damaged_one(tmp_path: Path) -> None:
    for step in (3, 9):
        record = commit_files.write_commit(tmp_path, step, memoryview(image_of(step)))
    (tmp_path / record.image).write_bytes(b"cut")
    frontend = Mock(call_soon=lambda call: call())
    request = ev.JobRequest(token=ev.Token(1), job=JobName("j"), action="resume")
    Frontend._read_commit(frontend, request, tmp_path)
    loaded = frontend._take.call_args.args[0].loaded
    os.close(loaded.descriptor)
    assert (loaded.step, loaded.why[:23]) == (3, "continues from step 3: ")


def test_a_part_of_the_last_commit_is_read_while_the_next_one_is_written() -> None:
    descriptor = create_area(64)
    try:
        area = CommitArea(descriptor, 64, is_writer=True)
        with pytest.raises(RemoteProtocolError):
            area.part_of_last(0, 0)
        for _ in range(3):
            area.write(1, 8, lambda view: view.__setitem__(slice(None), b"12345678"))
            part = area.part_of_last(2, 4)
            area.write(2, 4, lambda view, part=part: view.__setitem__(slice(None), part))  # type: ignore[misc]
            assert bytes(area.part_of_last(0, 4)) == b"3456"
        for offset_bytes, size_bytes in ((0, 5), (-1, 2), (4, 1), (2, -1)):
            with pytest.raises(RemoteProtocolError):
                area.part_of_last(offset_bytes, size_bytes)
        os.pwrite(descriptor, b"x", HEADER_BYTES)
        os.pwrite(descriptor, b"x", HEADER_BYTES + 64)
        with pytest.raises(RemoteProtocolError):
            area.part_of_last(0, 4)
    finally:
        os.close(descriptor)


def test_a_commits_duration_has_its_checksum_because_it_limits_their_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock_ms, read_at_ms = 0.0, list[float]()

    def write(_: int, size_bytes: int, fill: Callable[[memoryview], None]) -> Commit:
        nonlocal clock_ms
        fill(memoryview(bytearray(size_bytes)))
        clock_ms += 30.0
        return Commit(sequence=1, step=1, size_bytes=size_bytes, checksum=0)

    monkeypatch.setattr(commit_areas, "now_ms", lambda: clock_ms)
    areas = commit_areas.CommitAreas(Mock(), lambda _: read_at_ms.append(clock_ms))
    order = CommitCopy(
        job=JobName("j"),
        op_id=OpId(1),
        number=1,
        step=1,
        slice_offset_bytes=0,
        slice_bytes=8,
        ranges=(),
    )
    assert areas.copy(order, Mock(write=write)).copy_ms == 30.0
    assert read_at_ms == [0.0]
