"""Journal of the server: it keeps exactly the entries that were written, and survives damage."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import shutil
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeswitch.base.errors import ConfigError
from pipeswitch.base.version import own_version
from pipeswitch.controller import journal
from pipeswitch.controller.folders import TRASH_KEPT_S, StateDir
from pipeswitch.controller.journal import FILE_NAME, JournalFile, copy_journal


def job(name: str, **more: Any) -> dict[str, Any]:
    return {
        "kind": "job",
        "name": name,
        "entry": "x.py",
        "args": ["a"],
        "priority": 1,
        "tenant": "",
        "share": "",
        "devices": [],
        "defaults": [],
        "folder": "",
        "env": [],
        **more,
    }


def model(name: str, **more: Any) -> dict[str, Any]:
    return {
        "kind": "model",
        "name": name,
        "spec": b"\0spec",
        "spec_digest": "s",
        "digest": "d",
        "priority": 1,
        "pin": False,
        "tenant": "",
        "lent": [[1, "other"]],
        **more,
    }


@contextmanager
def opened(folder: Path) -> Iterator[JournalFile]:
    with closing(JournalFile(folder / FILE_NAME)) as file:
        yield file
        file.drop_notes()


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Limit the size of files, as on a full disk. The signal that the limit sends is ignored."""
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


def test_what_was_appended_is_there_though_nothing_was_closed(tmp_path: Path) -> None:
    """Copy the journal's file and write-ahead log while they are open, as a kill leaves them."""
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


@pytest.mark.parametrize("failed_on_a_full_disk", [False, True])
def test_what_is_owed_last_is_written_last(tmp_path: Path, failed_on_a_full_disk: bool) -> None:
    """A job fails, is resumed and ends; the disk is full from the job's first or second end on."""
    failed, done = (
        {"kind": "ended", "name": "it", "record": {"state": one}} for one in ("failed", "done")
    )
    with opened(tmp_path) as file:
        (file.owe if failed_on_a_full_disk else file.append)(failed)
        file.owe(job("it"))
        file.owe(done)
    for _ in range(2):
        with opened(tmp_path) as again:
            assert (again.ended, again.jobs, again.losses) == ({"it": done}, {}, [])


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
    assert modes == {
        FILE_NAME: 0o600,
        FILE_NAME + "-wal": 0o600,
        "commits": 0o700,
    }  # there is no "-shm" file, because sqlite does not map the log's index here


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
        case "page":  # all pages between the schema and the last page
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
@pytest.mark.parametrize("has_copies", [True, False])
def test_a_row_that_cannot_be_used_costs_itself_alone(
    tmp_path: Path, change: str, has_copies: bool
) -> None:
    with opened(tmp_path) as file:
        file.append(job("bad"))
        file.append(job("one"))
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        database.execute(change)
        database.commit()
    if not has_copies:
        (tmp_path / "commits" / "bad~job").unlink()
    whole = {"one": job("one")} | ({"bad": job("bad")} if has_copies else {})
    with opened(tmp_path) as again:
        assert again.jobs == whole
        assert again.losses
        assert [*again.lost] == ([] if has_copies or "etc" in change else [("job", "bad")])
    with opened(tmp_path) as last:
        assert (last.jobs, last.losses) == (whole, [])


@pytest.mark.parametrize("version", [journal.SCHEMA_VERSION - 1, journal.SCHEMA_VERSION + 1])
def test_a_journal_of_another_release_is_left_alone(tmp_path: Path, version: int) -> None:
    with opened(tmp_path) as file:
        file.append(job("one"))
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        database.execute("ALTER TABLE job DROP COLUMN env")
        database.execute(f"PRAGMA user_version = {version}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    path = tmp_path / FILE_NAME
    for use in (JournalFile, lambda path: copy_journal(path, tmp_path / "copy")):
        with pytest.raises(
            ConfigError, match=f"{path} has schema {version}; .* {journal.SCHEMA_VERSION}"
        ) as refused:
            use(path)
        assert own_version() in refused.value.hint, "it names the version that wrote the file"
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


# ---- the journal's neighbours in the state directory ----------------------------------------

WHOLE = (
    model("m"),
    model("n", digest="e" * 64),
    model("n@2", digest="f" * 64),
    {
        "kind": "serving",
        "name": "n",
        "version": 2,
        "last": 2,
        "spec_digest": "s",
        "shares": [[1, 10]],
    },
    {"kind": "chain", "name": "c", "spec": b"\0chain", "tenant": ""},
    job("one", args=["--x", "1"]),
    job("held"),
    {"kind": "hold", "name": "held", "why": "paused"},
    {"kind": "placed", "name": "held", "device": "cpu:1", "is_sent": True},
    job("old"),
    {"kind": "ended", "name": "old", "record": {"state": "done", "step": 7}},
)


def contents(file: JournalFile) -> dict[str, dict[str, Any]]:
    tables = ("models", "chains", "serving", "jobs", "holds", "placed", "ended")
    return {table: getattr(file, table) for table in tables}


def filled(folder: Path) -> dict[str, dict[str, Any]]:
    """Fill a state directory with entries, programs and a commit; return the journal's content."""
    with opened(folder) as file:
        for entry in WHOLE:
            file.append(entry)
    for place in (
        "models/" + "e" * 64,
        "models/" + "f" * 64,
        "models/" + "a" * 64,
        "commits/one",
        "commits/nobodys",
    ):
        (folder / place).mkdir(parents=True)
        (folder / place / "file").write_bytes(b"x")
    with opened(folder) as file:
        return contents(file)


def damaged_schema(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"CREATE TABLE model") + 3] ^= 0x01
    path.write_bytes(data)


def damaged_magic(path: Path) -> None:
    path.write_bytes(b"\0" + path.read_bytes()[1:])


def damaged_page(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:4096] + bytes(4096) + data[8192:])


DAMAGES = [
    damaged_schema,
    damaged_magic,
    damaged_page,
    Path.unlink,
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(path.read_bytes()[:5000]),
    lambda path: path.write_bytes((path.parent / "models" / "m~model").read_bytes()),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=range(len(DAMAGES)))
def test_a_journal_is_written_again_from_what_lies_beside_it(tmp_path: Path, damage: Any) -> None:
    before = filled(tmp_path)
    damage(tmp_path / FILE_NAME)
    for path in tmp_path.glob("*/*~*"):  # a coarse clock may give all files the same time
        os.utime(path, ns=(0, 0))
    with closing(JournalFile(tmp_path / FILE_NAME, lambda: 1000.0)) as again:
        assert contents(again) == before
        assert again.losses
        assert not again.lost
        again.drop_notes()
    with opened(tmp_path) as last:
        assert (contents(last), last.losses) == (before, [])
    orphans = {str(p.relative_to(tmp_path)) for p in tmp_path.glob("orphans/1000/*/*")}
    assert orphans == {f"orphans/1000/models/{'a' * 64}", "orphans/1000/commits/nobodys"}
    assert (tmp_path / "commits" / "one" / "file").exists()


@pytest.mark.parametrize("flip", [0x80, 0x01, 0xFF])
def test_no_byte_of_the_journal_stops_a_start(tmp_path: Path, flip: int) -> None:
    """Change bytes of the header, of the schema, and of each table's page."""
    before, path = filled(tmp_path), tmp_path / FILE_NAME
    sound = path.read_bytes()
    places = [*range(100), *range(100, len(sound), 1009)]
    for at in {*places, *range(sound.index(b"CREATE"), 4096, 37)}:
        data = bytearray(sound)
        data[at] ^= flip
        path.write_bytes(data)
        Path(f"{path}-wal").unlink(missing_ok=True)
        expected = [ConfigError] if 60 <= at < 64 else []  # the version of the schema
        with contextlib.suppress(*expected), opened(tmp_path) as again:
            assert contents(again) == before, at
    assert not any(tmp_path.glob("journal.new*"))


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "hole", "copy", "twice"])
@pytest.mark.parametrize(
    "name",
    [
        FILE_NAME,
        *(f"{FILE_NAME}-{suffix}" for suffix in ("wal", "shm", "journal")),
        "journal.new.sqlite",
        "models/m~model",
        "models/m~model.tmp",
        "commits/held~hold",
        "models/" + "e" * 64,
        "orphans",
        "trash",
        "published",
    ],
)
def test_the_journal_is_whole_whatever_is_in_a_files_place(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "s"
    root.mkdir()
    before, target = filled(root), root / name
    foreign = {"copy": "commits/one~job", "twice": FILE_NAME}.get(kind)
    data = (root / foreign).read_bytes() if foreign else b""
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    match kind:
        case "folder":
            (target / "inside").mkdir(parents=True)
        case "pipe":
            os.mkfifo(target)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                monkeypatch.chdir(target.parent)  # a socket's path is short
                listener.bind(target.name)
        case _:
            target.write_bytes(data)
            if kind == "hole":
                os.truncate(target, 1 << 40)
    for number in range(2):
        places = StateDir(root=root)
        places.create()
        places.sweep(str(number))
        with closing(JournalFile(root / FILE_NAME, losses=places.losses)) as again:
            assert contents(again) == before
            is_misplaced = kind in ("pipe", "socket") or (kind == "folder" and "." in target.name)
            assert bool(again.losses) >= (is_misplaced and not number), again.losses
            assert not again.lost
            again.drop_notes()


def test_losses_are_noted_until_a_user_was_told(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    for _ in range(2):  # the first start fails later, for another reason
        with closing(JournalFile(tmp_path / FILE_NAME)) as file:
            assert any("it is rebuilt" in text for text in file.losses)
    with opened(tmp_path) as file:
        assert file.losses
    with opened(tmp_path) as file:
        assert not file.losses


def test_a_damaged_copy_of_an_entry_that_the_journal_lacks_is_a_loss(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        file.append(job("one"))
    (tmp_path / "commits" / "two~job").write_bytes(b"damaged")
    with opened(tmp_path) as again:
        assert again.lost == [("job", "two")]
        assert "two" in "".join(again.losses)


def test_nothing_is_removed_where_neither_journal_nor_copies_are_left(tmp_path: Path) -> None:
    filled(tmp_path)
    for path in [*tmp_path.glob("journal*"), *tmp_path.glob("*/*~*")]:
        path.unlink()
    with opened(tmp_path) as again:
        assert again.losses
        assert not any(contents(again).values())
    assert len(list(tmp_path.glob("orphans/*/*/*/file"))) == 5
    with opened(tmp_path) as last:
        assert not last.losses
    assert len(list(tmp_path.glob("orphans/*/*/*/file"))) == 5


def test_entries_that_a_damaged_log_takes_come_from_their_copies(tmp_path: Path) -> None:
    crashed = tmp_path / "crashed"
    with opened(tmp_path) as file:
        file.append(model("m"))
        file.append(job("one"))
        shutil.copytree(tmp_path, crashed)
    log = Path(f"{crashed / FILE_NAME}-wal")
    log.write_bytes(bytes(byte ^ 0x55 for byte in log.read_bytes()))
    with opened(crashed) as again:
        assert (set(again.models), set(again.jobs)) == ({"m"}, {"one"})
        assert again.losses


def test_what_was_dropped_never_comes_back(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        for entry in WHOLE:
            file.append(entry)
        for kind, name in (("model-gone", "m"), ("chain-gone", "c"), ("job-over", "old")):
            file.append({"kind": kind, "name": name})
        file.append({"kind": "ended", "name": "held", "record": {"state": "failed"}})
    (tmp_path / FILE_NAME).unlink()
    with opened(tmp_path) as again:
        assert "m" not in again.models
        assert not again.chains
        assert (set(again.ended), set(again.jobs), again.holds) == ({"held"}, {"one"}, {})


def test_a_copy_that_is_damaged_or_anothers_is_written_again(tmp_path: Path) -> None:
    filled(tmp_path)
    first, second = (tmp_path / "models" / name for name in ("m~model", "n~model"))
    sound = first.read_bytes()
    for damage in (sound[:-1], sound[:-1] + b"\xff", b"", second.read_bytes()):
        first.write_bytes(damage)
        with opened(tmp_path) as again:
            assert not again.losses
        assert first.read_bytes() == sound


def test_a_start_throws_away_what_a_sound_journal_does_not_name_and_keeps_it_a_day(
    tmp_path: Path,
) -> None:
    places = StateDir(root=tmp_path)
    for name in ("a" * 64, "b" * 64):
        (tmp_path / "models" / name).mkdir(parents=True)
    (tmp_path / "commits" / "gone").mkdir(parents=True)
    places.set_aside({"a" * 64}, set(), "trash/1000000")
    paths = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("trash/*/*/*")}
    assert paths == {f"trash/1000000/models/{'b' * 64}", "trash/1000000/commits/gone"}
    assert not places.old_trash(1e6 + TRASH_KEPT_S - 1)
    [old] = places.old_trash(1e6 + TRASH_KEPT_S)
    assert old == tmp_path / "trash" / "1000000"
    assert (tmp_path / "models" / ("a" * 64)).exists()
