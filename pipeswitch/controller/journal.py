"""What survives the server: which models are registered, which jobs were accepted.

An SQLite database (docs/adr/0010): what was appended is on the disk, whole, before its asker is
answered. A model is there until it is unregistered, a job until it is over and an ended one until
it is removed, a hold until its job is resumed or over. A row that cannot be used is dropped with a
warning; a file that is no database any more is set aside, and what can still be read of it is kept.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ..config import NAME_PATTERN
from ..errors import ConfigError
from ..machine import sync_directory

log = logging.getLogger(__name__)

Entry = dict[str, Any]

FILE_NAME: Final = "journal.sqlite"
SCHEMA_VERSION: Final = (
    10  # in the file's user_version; 0 is a file without tables, 1 had no holds,
)
# 2 no tenants, 3 no ended jobs, 4 no versions, 5 no shared input, 6 no devices of jobs, 7 no split,
# 8 no chains, 9 no defaults of job.steps
SLOW_APPEND_MS: Final = 100.0  # the loop stands still so long: worth a line in the log
CHECKPOINT_PAGES: Final = 64  # of 4 KiB in the write-ahead log, then they go to the main file

FIELDS: Final[Mapping[str, Mapping[str, type]]] = {
    "model": {
        "spec": bytes,
        "spec_digest": str,
        "digest": str,
        "priority": int,
        "pin": bool,
        "tenant": str,
    },
    "job": {
        "entry": str,
        "args": list,
        "priority": int,
        "tenant": str,
        "share": str,
        "devices": list,
        "defaults": list,
    },
    "hold": {"why": str},  # its name is a job's: paused, and not to go on by itself
    "placed": {"device": str, "is_sent": bool},  # its name is a job's: where it went, by its user
    # its name is a model's; shares are of other versions: [version, percent]
    "serving": {"version": int, "last": int, "spec_digest": str, "shares": list},
    "chain": {"spec": bytes, "tenant": str},
    "ended": {"record": dict},  # its name is a job's: what it was, and how it ended
}
"""What an entry of each kind must have beside its name; each kind is a table."""

ENDS: Final = {
    "model-gone": ("model",), "serving-gone": ("serving",), "chain-gone": ("chain",),
    "job-over": ("job", "hold", "placed", "ended"), "hold-over": ("hold",),
}  # fmt: skip
"""Entries that end those of other kinds."""

REPLACES: Final = {"job": ("ended", "placed"), "ended": ("job", "hold", "placed")}
"""Entries that take the place of those of other kinds."""

_NAME: Final = re.compile(NAME_PATTERN.pattern + r"(@[1-9][0-9]{0,8})?")  # a model's with version

_COLUMNS: Final = {
    bytes: "BLOB", str: "TEXT", int: "INTEGER", bool: "INTEGER", list: "TEXT", dict: "TEXT",
}  # fmt: skip


class JournalFile:
    """One writer: the state directory is locked. One thread: the controller's loop.

    Attributes:
        models, chains, serving, jobs, holds, placed, ended: what it held when it was opened, by
            name, in the order of acceptance.
    """

    def __init__(self, path: Path) -> None:
        """Open, or make.

        Raises:
            OSError: it can be neither read nor written.
            ConfigError: a later release wrote it.
        """
        self._path = path
        self._owed: dict[tuple[str, str], Entry] = {}  # could not be written yet; the latest each
        self.models: dict[str, Entry] = {}
        self.chains: dict[str, Entry] = {}
        self.jobs: dict[str, Entry] = {}
        self.serving: dict[str, Entry] = {}
        self.holds: dict[str, Entry] = {}
        self.placed: dict[str, Entry] = {}
        self.ended: dict[str, Entry] = {}
        try:
            kept: list[Entry] = []
            try:
                self._database = _opened(path)
            except sqlite3.DatabaseError as problem:
                if _errno(problem) != errno.EIO:
                    raise
                kept = _set_aside(path, problem)
                self._database = _opened(path)
            try:
                self._take_over(kept)
                (self.models, self.chains, self.serving, self.jobs, self.holds, self.placed,
                 self.ended) = (
                    {entry["name"]: entry for entry in _rows(self._database, kind)}
                    for kind in ("model", "chain", "serving", "job", "hold", "placed", "ended")
                )  # fmt: skip
                sync_directory(path.parent)
            except BaseException:
                self._database.close()
                raise
        except sqlite3.DatabaseError as problem:
            raise _os_error(problem) from None

    def _take_over(self, entries: Iterable[Entry]) -> None:
        """All of them or none."""
        with _transaction(self._database):
            for entry in entries:
                try:
                    _check(entry)
                    _write(self._database, entry)
                except (ValueError, OverflowError) as error:  # nothing was written of it
                    log.warning("journal=%s entry ignored: %s", self._path, error)

    def append(self, entry: Entry) -> None:
        """Write and sync, with everything that is owed, or leave no trace.

        Raises:
            OSError: the disk is full or gone; what was there before is intact.
        """
        began_s = time.monotonic()
        try:
            with _transaction(self._database):
                for owed in self._owed.values():
                    _write(self._database, owed)
                _write(self._database, entry)
        except sqlite3.Error as problem:
            raise _os_error(problem) from None
        self._owed.clear()
        took_ms = (time.monotonic() - began_s) * 1000.0
        if took_ms > SLOW_APPEND_MS:
            log.warning("journal=%s slow disk: an entry took %.0f ms", self._path, took_ms)

    def owe(self, entry: Entry) -> None:
        """To be written when something else can be: it is a fact whether the disk takes it or not.

        Until then the journal is behind, and a server that starts from it repeats something.
        """
        kind = str(entry["kind"])
        about = ENDS.get(kind) or REPLACES.get(kind) or (kind,)
        self._owed[about[0], str(entry["name"])] = entry

    def close(self) -> None:
        if self._owed:
            try:
                self.append(self._owed.popitem()[1])
            except OSError as problem:
                log.error("journal=%s is behind: %s", self._path, problem.strerror)
        self._database.close()


def _opened(path: Path) -> sqlite3.Connection:
    """A connection that syncs each transaction, to a sound database with our tables.

    Raises:
        sqlite3.DatabaseError: it is damaged, or the disk does not do.
        OSError, ConfigError: as ``JournalFile``.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite makes 0644
    database = _connect(path)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise ConfigError(
                f"journal {path} is of schema {version}, this release knows {SCHEMA_VERSION}",
                hint="start the release that wrote it, or choose another --state-dir",
            )
        (state,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(state)
        if version < SCHEMA_VERSION:
            _create(database)
        for kind, fields in FIELDS.items():  # whatever user_version says
            database.execute(f"SELECT name, {', '.join(fields)} FROM {kind} LIMIT 0")
    except BaseException:
        database.close()
        raise
    return database


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    # The log's index then lies in this process's memory, not in a mapped file: where the disk is
    # full, such a mapping ends in a SIGBUS.
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    # A damaged text must not be what ends the reading; what becomes of it is checked.
    database.text_factory = lambda raw: raw.decode(errors="replace")
    return database


def _create(database: sqlite3.Connection) -> None:
    with _transaction(database):
        for kind, fields in FIELDS.items():
            columns = ", ".join(f"{name} {_COLUMNS[type_]}" for name, type_ in fields.items())
            columns = f"name TEXT PRIMARY KEY, {columns}"
            database.execute(f"CREATE TABLE IF NOT EXISTS {kind} ({columns})")
        # What was there before there were tenants is the owner's.
        for kind, column, empty in (
            ("model", "tenant", ""), ("job", "tenant", ""), ("job", "share", ""),
            ("job", "devices", "[]"), ("job", "defaults", "[]"), ("serving", "shares", "[]"),
        ):  # fmt: skip
            known = {row[1] for row in database.execute(f"PRAGMA table_info({kind})")}
            if column not in known:
                database.execute(f"ALTER TABLE {kind} ADD COLUMN {column} TEXT DEFAULT '{empty}'")
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; synced when it is left."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:  # SQLite has rolled back itself when the disk was full
            with contextlib.suppress(sqlite3.Error):
                database.execute("ROLLBACK")
        raise


def _write(database: sqlite3.Connection, entry: Entry) -> None:
    """One checked entry into the tables. A name keeps its place among the others."""
    kind = entry["kind"]
    if kind in ENDS:
        for table in ENDS[kind]:
            database.execute(f"DELETE FROM {table} WHERE name = ?", (entry["name"],))
        return
    for table in REPLACES.get(kind, ()):
        database.execute(f"DELETE FROM {table} WHERE name = ?", (entry["name"],))
    fields = FIELDS[kind]
    values = [json.dumps(entry[f]) if fields[f] in (list, dict) else entry[f] for f in fields]
    marks = ", ".join("?" * len(fields))
    updates = ", ".join(f"{field} = excluded.{field}" for field in fields)
    database.execute(
        f"INSERT INTO {kind} (name, {', '.join(fields)}) VALUES (?, {marks}) "
        f"ON CONFLICT (name) DO UPDATE SET {updates}",
        (entry["name"], *values),
    )


def _rows(database: sqlite3.Connection, kind: str) -> Iterator[Entry]:
    """Its usable entries, in the order of acceptance.

    Raises:
        sqlite3.DatabaseError: at the place where the file is damaged.
    """
    fields = FIELDS[kind]
    for name, *values in database.execute(
        f"SELECT name, {', '.join(fields)} FROM {kind} NOT INDEXED ORDER BY rowid"
    ):
        entry: Entry = {"kind": kind, "name": name, **dict(zip(fields, values, strict=True))}
        try:
            for field, type_ in fields.items():
                if type_ in (list, dict):
                    entry[field] = json.loads(entry[field])
                elif type_ is bool:
                    entry[field] = bool(entry[field])
            _check(entry)
        except (ValueError, TypeError, RecursionError) as error:
            log.warning("journal row of kind %s ignored: %s", kind, error)
        else:
            yield entry


def _check(entry: Entry) -> None:
    """ValueError when it is none of ours."""
    name, kind = entry.get("name"), entry.get("kind")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"name {str(name)[:80]!r}")
    if not isinstance(kind, str) or (kind not in FIELDS and kind not in ENDS):
        raise ValueError(f"kind {str(kind)[:80]!r}")
    for field, wanted in FIELDS.get(kind, {}).items():
        if not isinstance(entry.get(field), wanted):
            raise ValueError(f"{kind} {name}: {field} is no {wanted.__name__}")
    if kind == "job" and not all(isinstance(one, str) for one in entry["args"] + entry["devices"]):
        raise ValueError(f"job {name}: an argument or a device is no text")
    if kind == "serving" and any([*map(type, pair)] != [int, int] for pair in entry["shares"]):
        raise ValueError(f"serving {name}: a share is no version and percent")


def _set_aside(path: Path, problem: sqlite3.DatabaseError) -> list[Entry]:
    """Rename a damaged file; what could still be read of it."""
    entries = _salvaged(path)
    aside = path.with_suffix(f".damaged-{time.time_ns()}")
    for suffix in ("", "-wal"):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    log.warning(
        "journal=%s is damaged (%s): set aside as %s, %d entries could be kept",
        path, problem, aside.name, len(entries),
    )  # fmt: skip
    return entries


def _salvaged(path: Path) -> list[Entry]:
    entries: list[Entry] = []
    with contextlib.suppress(sqlite3.Error):
        database = _connect(path)
        try:
            for kind in FIELDS:
                with contextlib.suppress(sqlite3.Error):
                    for entry in _rows(database, kind):
                        entries.append(entry)
        finally:
            database.close()
    return entries


def _errno(problem: sqlite3.Error) -> int:
    """What the disk said; EIO for damage and everything else."""
    code = getattr(problem, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return {
        sqlite3.SQLITE_FULL: errno.ENOSPC,
        sqlite3.SQLITE_READONLY: errno.EROFS,
        sqlite3.SQLITE_CANTOPEN: errno.EACCES,
        sqlite3.SQLITE_BUSY: errno.EBUSY,
    }.get(code, errno.EIO)


def _os_error(problem: sqlite3.Error) -> OSError:
    number = _errno(problem)
    return OSError(number, os.strerror(number))
