"""The journal keeps what was written, nothing of what was not, and survives damage."""

from __future__ import annotations

import errno
import logging
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeswitch.controller import journal
from pipeswitch.controller.journal import FILE_NAME, JournalFile
from pipeswitch.errors import ConfigError


def job(name: str, **more: Any) -> dict[str, Any]:
    return {
        "kind": "job", "name": name, "entry": "x.py", "args": ["a"], "priority": 1, "tenant": "",
        "share": "",
        "devices": [],
        "defaults": [],
        **more,
    }  # fmt: skip


def model(name: str, **more: Any) -> dict[str, Any]:
    return {
        "kind": "model", "name": name, "spec": b"\0spec", "spec_digest": "s", "digest": "d",
        "priority": 1, "pin": False, "tenant": "", **more,
    }  # fmt: skip


@contextmanager
def opened(folder: Path) -> Iterator[JournalFile]:
    with closing(JournalFile(folder / FILE_NAME)) as file:
        yield file


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """The disk is full for whatever would grow beyond; nothing is sent to this process."""
    import signal

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_what_was_appended_is_there_at_the_next_start_and_nothing_else(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        file.append(job("one"))
        file.append(job("two"))
        file.append(model("kept"))
        file.append(model("dropped"))
        file.append({"kind": "job-over", "name": "one", "state": "done"})
        file.append({"kind": "model-gone", "name": "dropped"})
    with opened(tmp_path) as again:
        assert again.jobs == {"two": job("two")}
        assert again.models == {"kept": model("kept")}


def test_a_hold_is_there_until_its_job_is_resumed_or_over(tmp_path: Path) -> None:
    names = ("held", "resumed", "cancelled")
    with opened(tmp_path) as file:
        for name in names:
            file.append(job(name))
            file.append({"kind": "hold", "name": name, "why": "paused"})
        file.append({"kind": "hold-over", "name": "resumed"})
        file.append({"kind": "job-over", "name": "cancelled", "state": "cancelled"})
    with opened(tmp_path) as again:
        assert set(again.holds) == {"held"}
        assert set(again.jobs) == {"held", "resumed"}


def test_a_journal_of_a_release_without_holds_keeps_what_it_has(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        file.append(job("one"))
        file.append(model("kept"))
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        database.execute("DROP TABLE hold")
        database.execute("PRAGMA user_version = 1")
    with opened(tmp_path) as again:
        assert again.jobs == {"one": job("one")}
        assert again.models == {"kept": model("kept")}
        again.append({"kind": "hold", "name": "one", "why": "paused"})
    with opened(tmp_path) as last:
        assert set(last.holds) == {"one"}


def test_where_a_job_went_is_known_until_it_ends_or_runs_again(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        for name in ("kept", "over", "again"):
            file.append(job(name, devices=["cpu:0", "cpu:1"]))
            for device in ("cpu:0", "cpu:1"):
                file.append({"kind": "placed", "name": name, "device": device, "is_sent": True})
        file.append({"kind": "ended", "name": "over", "record": {}})
        file.append(job("again"))
    with opened(tmp_path) as again:
        assert again.jobs["kept"]["devices"] == ["cpu:0", "cpu:1"]
        assert {name: entry["device"] for name, entry in again.placed.items()} == {"kept": "cpu:1"}


def test_an_ended_job_is_there_until_it_is_removed_or_runs_again(tmp_path: Path) -> None:
    record = {"state": "done", "step": 7}
    with opened(tmp_path) as file:
        for name in ("kept", "removed", "again"):
            file.append(job(name))
            file.append({"kind": "hold", "name": name, "why": "paused"})
            file.append({"kind": "ended", "name": name, "record": record})
        file.append({"kind": "job-over", "name": "removed"})
        file.append(job("again"))
    with opened(tmp_path) as again:
        assert again.ended == {"kept": {"kind": "ended", "name": "kept", "record": record}}
        assert set(again.jobs) == {"again"}
        assert not again.holds


def test_jobs_of_a_release_without_ended_ones_are_the_owners(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        file.append(job("one", tenant="a"))
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        database.execute("ALTER TABLE job DROP COLUMN tenant")
        for column in ("share", "devices", "defaults"):
            database.execute(f"ALTER TABLE job DROP COLUMN {column}")
        database.execute("DROP TABLE ended")
        database.execute("PRAGMA user_version = 3")
    with opened(tmp_path) as again:
        assert again.jobs == {"one": job("one")}
        again.append({"kind": "ended", "name": "one", "record": {}})
    with opened(tmp_path) as last:
        assert set(last.ended) == {"one"}


def test_models_of_a_release_without_tenants_are_the_owners(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        file.append(model("m", tenant="a"))
        file.append({"kind": "serving", "name": "m", "version": 2, "last": 2, "spec_digest": "s",
                     "shares": [(1, 10)]})  # fmt: skip
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        database.execute("ALTER TABLE model DROP COLUMN tenant")
        database.execute("ALTER TABLE serving DROP COLUMN shares")
        database.execute("PRAGMA user_version = 2")
    with opened(tmp_path) as again:
        assert again.models == {"m": model("m")}
        assert again.serving["m"]["shares"] == []
        again.append(model("n", tenant="a"))
    with opened(tmp_path) as last:
        assert {name: entry["tenant"] for name, entry in last.models.items()} == {"m": "", "n": "a"}


def test_what_was_appended_is_there_though_nothing_was_closed(tmp_path: Path) -> None:
    """The file and its write-ahead log as a kill leaves them."""
    copy = tmp_path / "copy"
    copy.mkdir()
    with opened(tmp_path) as file:
        file.append(job("one"))
        for path in tmp_path.glob(FILE_NAME + "*"):
            (copy / path.name).write_bytes(path.read_bytes())
    with opened(copy) as again:
        assert set(again.jobs) == {"one"}


def test_a_torn_transaction_of_the_write_ahead_log_costs_itself_alone(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    with opened(whole) as file:
        file.append(job("one"))
        log = Path(f"{whole / FILE_NAME}-wal")
        acknowledged = log.stat().st_size
        file.append(job("two"))
        contents = {path.name: path.read_bytes() for path in whole.glob(FILE_NAME + "*")}
    for torn in range(acknowledged, len(contents[log.name]), 997):
        folder = tmp_path / str(torn)
        folder.mkdir()
        for name, data in contents.items():
            (folder / name).write_bytes(data[:torn] if name == log.name else data)
        with opened(folder) as again:
            assert set(again.jobs) == {"one"}


def test_jobs_come_back_in_the_order_they_were_accepted(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        for name in ("b", "a", "c"):
            file.append(job(name))
        file.append({"kind": "job-over", "name": "b", "state": "done"})
        file.append(job("b"))
    with opened(tmp_path) as again:
        assert list(again.jobs) == ["a", "c", "b"]


def test_a_model_that_is_remembered_again_has_its_new_values(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        file.append(model("m"))
        file.append(model("m", pin=True))
    with opened(tmp_path) as again:
        assert again.models == {"m": model("m", pin=True)}


def test_an_entry_the_disk_has_no_room_for_leaves_no_trace(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        file.append(job("before"))
        size = Path(f"{tmp_path / FILE_NAME}-wal").stat().st_size
        with largest_file(size + 100), pytest.raises(OSError, match=r"space|error") as refused:
            file.append(job("refused"))
        assert refused.value.errno in (errno.ENOSPC, errno.EIO)
        file.append(job("after"))
    with opened(tmp_path) as again:
        assert set(again.jobs) == {"before", "after"}


def test_what_is_owed_is_written_with_the_next_entry(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        file.append(job("one"))
        file.append(model("m"))
        file.owe(model("m", pin=True))
        file.owe({"kind": "model-gone", "name": "m"})
        file.owe({"kind": "job-over", "name": "one", "state": "done"})
        file.append(job("two"))
        assert not file._owed
    with opened(tmp_path) as again:
        assert (set(again.jobs), set(again.models)) == ({"two"}, set())


def test_what_is_owed_at_the_end_is_written_then(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        file.append(job("one"))
        file.append(job("two"))
        file.owe({"kind": "job-over", "name": "one", "state": "done"})
        file.owe({"kind": "job-over", "name": "two", "state": "done"})
    with opened(tmp_path) as again:
        assert not again.jobs


def test_a_journal_is_the_owners_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        file.append(job("one"))
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {FILE_NAME: 0o600, FILE_NAME + "-wal": 0o600}  # and no file is mapped


@pytest.mark.parametrize("damage", ["header", "page", "empty-table", "no-table", "garbage"])
def test_a_damaged_database_is_set_aside_with_one_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / FILE_NAME
    with opened(tmp_path) as file:
        for number in range(20):
            file.append(job(f"j{number}", args=["x" * 2000]))
        file.append(model("m"))
    data = bytearray(path.read_bytes())
    match damage:
        case "header":
            data[0:16] = b"not a database!!"
        case "page":  # all that follow the schema but the last
            data[4096:-4096] = b"\xa5" * (len(data) - 8192)
        case "empty-table":
            data[4096:8192] = bytes(4096)
        case "no-table":
            with closing(sqlite3.connect(path)) as database:
                database.execute("DROP TABLE model")
            data = bytearray(path.read_bytes())
        case "garbage":
            data = bytearray(b"\xff" * 10_000)
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING), opened(tmp_path) as again:
        again.append(job("new"))
    warnings = [record for record in caplog.records if "is damaged" in record.message]
    assert len(warnings) == 1
    (aside,) = tmp_path.glob("journal.damaged-*")
    assert aside.name in warnings[0].message
    with opened(tmp_path) as last:
        assert "new" in last.jobs
    assert len(list(tmp_path.glob("journal.damaged-*"))) == 1


def test_what_can_be_read_of_a_damaged_database_is_kept(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    with opened(tmp_path) as file:
        file.append(job("one"))
        file.append(model("m"))
    with closing(sqlite3.connect(path)) as database:
        (page,) = database.execute(
            "SELECT rootpage FROM sqlite_schema WHERE type = 'index' AND tbl_name = 'model'"
        ).fetchone()
    data = bytearray(path.read_bytes())
    data[(page - 1) * 4096 : page * 4096] = b"\xa5" * 4096
    path.write_bytes(data)
    with opened(tmp_path) as again:
        assert (again.jobs, again.models) == ({"one": job("one")}, {"m": model("m")})


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE job SET name = '../../etc' WHERE name = 'bad'",
        "UPDATE job SET args = '[1]' WHERE name = 'bad'",
        "UPDATE job SET args = '[' WHERE name = 'bad'",
        "UPDATE job SET args = NULL WHERE name = 'bad'",
        "UPDATE job SET priority = 'x' WHERE name = 'bad'",
        "UPDATE job SET entry = x'ff00' WHERE name = 'bad'",
    ],
    ids=range(6),
)
def test_a_row_that_cannot_be_used_costs_itself_alone(tmp_path: Path, change: str) -> None:
    with opened(tmp_path) as file:
        file.append(job("bad"))
        file.append(job("one"))
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        database.execute(change)
        database.commit()
    with opened(tmp_path) as again:
        assert set(again.jobs) == {"one"}
    assert not list(tmp_path.glob("*damaged*"))


def test_a_journal_of_a_later_release_is_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        file.append(job("one"))
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        database.execute(f"PRAGMA user_version = {journal.SCHEMA_VERSION + 1}")
    with pytest.raises(ConfigError, match="schema 11, this release knows 10"):
        JournalFile(tmp_path / FILE_NAME)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
