"""Journal of the state that survives the server: registered models and accepted jobs.

It is an SQLite database (docs/adr/0010). An entry is on disk before the client gets its answer.
A model's entry stays until it is unregistered, a job's until the job is over, an ended job's until
it is removed, and a hold until its job is resumed or over.

Each row has a digest. If the journal is damaged, in one row or as a whole, it is renamed and
rebuilt from its sound rows and from the copies beside models and commits (``entries``). Files that
no entry names after that are moved to ``orphans/`` and never removed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from ..base.errors import ConfigError, PipeSwitchError
from ..base.machine import sync_directory
from ..base.plain_files import open_plain
from ..base.version import own_version
from .entries import (
    ENDS,
    FIELDS,
    REPLACES,
    Entry,
    EntryCopies,
    Key,
    check,
    digest_of,
    is_name,
    key_of,
    superseded_by,
)
from .folders import StateDir

log = logging.getLogger(__name__)

FILE_NAME: Final = "journal.sqlite"
SCHEMA_VERSION: Final = 15  # the file's user_version; 0: no tables yet
SLOW_APPEND_MS: Final = 100.0  # an append blocks the loop, so a longer one is logged
DIGEST_COLUMN: Final = "sha256"
SUFFIXES: Final = ("", "-wal", "-journal", "-shm")  # of the database's files
MAX_BYTES: Final = 1 << 30  # a larger file is damaged: it has a hole
DAMAGE: Final = (sqlite3.DatabaseError, UnicodeDecodeError)  # SQLite's messages quote the file
CHECKPOINT_PAGES: Final = 64  # pages of 4 KiB in the write-ahead log before a checkpoint

WRITER: Final = "SELECT text FROM note WHERE kind = 'version'"  # the version that wrote the file
_COLUMNS: Final = {
    bytes: "BLOB",
    str: "TEXT",
    int: "INTEGER",
    bool: "INTEGER",
    list: "TEXT",
    dict: "TEXT",
}


class JournalFile:
    """Open journal. The caller holds the state directory's lock; the controller's loop writes it.

    Attributes:
        models, chains, serving, aliases, jobs, holds, placed, ended: entries of each kind when
            the journal was opened, by name, in the order of acceptance.
        losses: sentences for the user about damage and about its repair.
        lost: keys of entries that existed and could not be restored from any source.
    """

    def __init__(
        self,
        path: Path,
        wall_clock: Callable[[], float] = time.time,
        losses: Sequence[str] = (),
    ) -> None:
        """Open the journal, or create one. ``losses`` become the first of the new losses.

        Raises:
            OSError: the file cannot be read or written.
            ConfigError: another release wrote the file.
        """
        self._path, self._places = path, StateDir(root=path.parent)
        self._owed: dict[Key, Entry] = {}  # the latest entry of each key that is not written yet
        self._copies = EntryCopies(path.parent)
        self.losses, self.lost = [*losses], list[Key]()
        try:
            self._entries = self._read(f"{wall_clock():.0f}")
            self._note()
        except sqlite3.Error as problem:
            raise _os_error(problem) from None
        (self.models, self.chains, self.serving, self.jobs, self.holds, self.placed, self.ended) = (
            {name: entry for (known, name), entry in self._entries.items() if known == kind}
            for kind in ("model", "chain", "serving", "job", "hold", "placed", "ended")
        )
        self.aliases = {name: one for (kind, name), one in self._entries.items() if kind == "alias"}
        with contextlib.suppress(OSError):  # a full disk: the journal itself is sound
            for entry in self._entries.values():
                self._copies.keep(entry)
            sync_directory(path.parent)
        for text in self.losses:
            log.warning("journal=%s %s", path, text)

    def _read(self, stamp: str) -> dict[Key, Entry]:
        """Open the database, repair it if need be, and return its entries.

        1. If it is sound and has an entry for each copy, use it as it is.
        2. If it is sound but lacks entries (a damaged write-ahead log), add them from the copies.
        3. If it is damaged or missing, create a new one from rows and copies.
        """
        copies, bad = self._copies.read()
        problem, sound = "", dict[Key, Entry]()
        is_used = bool(copies or bad or self._places.unnamed((), ()))
        if is_used and not self._path.exists():
            problem = "it is missing"
        else:
            try:
                self._database = _opened(self._path)
                sound, wrong = _entries(self._database)
                if wrong:
                    problem = f"{len(wrong)} of its entries are damaged"
                    self._database.close()
            except DAMAGE as error:
                # A damaged header may say that the file is read-only or cannot be opened.
                is_writable = os.access(self._path, os.R_OK | os.W_OK)
                if _errno(error) not in (errno.EIO, *[errno.EROFS, errno.EACCES] * is_writable):
                    raise
                problem, wrong = str(error), set()
                with (
                    contextlib.suppress(*DAMAGE, OSError),
                    contextlib.closing(_connect(self._path)) as database,
                ):
                    sound, wrong = _entries(database, is_damaged=True)
            bad |= wrong
        missed = {key: entry for key, entry in copies.items() if key not in sound}
        if problem:
            self._rewrite(problem, _merged(sound, copies))
        else:
            self._put(missed)
        entries, _ = _entries(self._database)
        replaced = {key for entry in entries.values() for key in superseded_by(entry)}
        lost_keys = sorted(bad - entries.keys() - replaced)
        if problem or missed or lost_keys:
            self.lost = [(kind, name) for kind, name in lost_keys if is_name(name)]
            for what, keys in (
                ("read from copies", entries.keys() & missed.keys()),
                ("lost", lost_keys),
            ):
                if names := ", ".join(f"{kind} {name!r:.80}" for kind, name in sorted(keys)):
                    self.losses.append(
                        f"entries were missing from the journal and are {what}: {names}"
                    )
            digests = {entry["digest"] for (kind, _), entry in entries.items() if kind == "model"}
            jobs = {name for kind, name in entries if kind in ("job", "ended")}
            orphans = self._places.set_aside(digests, jobs, f"orphans/{stamp}")
            self.losses += [f"no entry names {path.name}: moved to {path}" for path in orphans]
        return entries

    def _rewrite(self, problem: str, entries: dict[Key, Entry]) -> None:
        """Rename the damaged file and create a new one in its place."""
        path, fresh = self._path, self._path.with_name("journal.new.sqlite")
        for suffix in SUFFIXES:  # left by an interrupted start
            Path(f"{fresh}{suffix}").unlink(missing_ok=True)
        self._database = _opened(fresh)
        try:
            self._put(entries)
        finally:
            self._database.close()  # moves the log's content into the file
        aside = path.with_suffix(f".damaged-{time.time_ns()}")
        for suffix in SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", f"{aside}{suffix}")
        os.replace(fresh, path)
        self._database = _opened(path)
        what = f", set aside as {aside.name}" if aside.exists() else ""
        self.losses.append(f"{path.name} is damaged ({problem}){what}: it is rebuilt")

    def _note(self) -> None:
        """Write this version, and the losses until ``drop_notes``; read earlier losses."""
        rows = self._database.execute("SELECT kind, text FROM note ORDER BY rowid").fetchall()
        earlier = [text for kind, text in rows if kind == "loss"]
        self.losses[:0] = [text for text in earlier if text not in self.losses]
        noted = [("version", own_version()), *(("loss", text) for text in self.losses)]
        if noted != rows:
            with contextlib.suppress(sqlite3.Error), _transaction(self._database):  # a full disk
                self._database.execute("DELETE FROM note")
                self._database.executemany("INSERT INTO note VALUES (?, ?)", noted)

    def drop_notes(self) -> None:
        """Drop the notes of losses: a server that has started reported them to its user."""
        with contextlib.suppress(sqlite3.Error):
            self._database.execute("DELETE FROM note WHERE kind = 'loss'")

    def _put(self, entries: dict[Key, Entry]) -> None:
        """Write entries in one transaction, and delete the entries that they supersede."""
        with _transaction(self._database):
            for entry in entries.values():
                _delete(self._database, superseded_by(entry))
            for entry in entries.values():
                _insert(self._database, entry)

    def append(self, entry: Entry) -> None:
        """Write and sync an entry and those that ``owe`` kept, in one transaction. Blocks.

        Raises:
            OSError: the disk is full or gone; the journal is unchanged.
        """
        began_s = time.monotonic()
        entries = [*self._owed.values(), entry]
        for one in entries:
            self._copies.drop(superseded_by(one))
        try:
            with _transaction(self._database):
                for one in entries:
                    _delete(self._database, superseded_by(one))
                    if one["kind"] in FIELDS:
                        _insert(self._database, one)
        except sqlite3.Error as problem:
            raise _os_error(problem) from None
        self._owed.clear()
        for one in entries:
            for key in superseded_by(one):
                self._entries.pop(key, None)
            if one["kind"] in FIELDS:
                self._entries[key_of(one)] = one
        for one in entries:
            if self._entries.get(key_of(one)) is one:  # no later one has superseded it
                with contextlib.suppress(OSError):  # the next start writes the copy
                    self._copies.keep(one)
        took_ms = (time.monotonic() - began_s) * 1000.0
        if took_ms > SLOW_APPEND_MS:
            log.warning("journal=%s slow disk: an entry took %.0f ms", self._path, took_ms)

    def owe(self, entry: Entry) -> None:
        """Keep in memory an entry that the disk refused; its change stands all the same.

        The next ``append`` writes it. A server that starts before that does not know the change.
        """
        kind = str(entry["kind"])
        about = ENDS.get(kind) or REPLACES.get(kind) or (kind,)
        key = about[0], str(entry["name"])
        self._owed.pop(key, None)  # the newest entry is written last
        self._owed[key] = entry

    def close(self) -> None:
        if self._owed:
            try:
                self.append(self._owed.popitem()[1])
            except OSError as problem:
                log.error("journal=%s is behind: %s", self._path, problem.strerror)
        self._database.close()


def copy_journal(path: Path, target: Path) -> dict[Key, Entry] | None:
    """Copy a journal that a server may have open; return its entries, or None if it changed.

    A server's lock keeps other connections out (docs/adr/0010). So the database and its log are
    first copied as files. SQLite then writes their committed rows to ``target``. Blocks.

    Raises:
        OSError: a file cannot be read or written.
        ConfigError: another release wrote the journal.
        PipeSwitchError: the journal is damaged.
    """

    def stamps() -> list[tuple[int, int]]:
        facts = [one.stat() for one in path.parent.glob(f"{path.name}*")]
        return sorted((fact.st_mtime_ns, fact.st_size) for fact in facts)

    before = stamps()
    with tempfile.TemporaryDirectory(prefix=".journal-", dir=target.parent) as folder:
        raw = Path(folder) / path.name
        try:
            if any(size_bytes > MAX_BYTES for _, size_bytes in before):
                raise sqlite3.DatabaseError("it is too large")
            for suffix in ("-wal", ""):
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(f"{path}{suffix}", f"{raw}{suffix}")
            if stamps() != before:
                return None
            with contextlib.closing(_opened(raw, path)) as source:
                entries, wrong = _entries(source)
                os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
                with contextlib.closing(_connect(target)) as copy:
                    source.backup(copy)
        except DAMAGE as problem:
            if _errno(problem) != errno.EIO:
                raise _os_error(problem) from None
            wrong = {(path.name, str(problem))}
    if wrong:
        raise PipeSwitchError(
            f"{path} is damaged", hint="a server that starts in that folder rebuilds it"
        )
    return entries


def _opened(path: Path, original: Path | None = None) -> sqlite3.Connection:
    """Open a sound database, create missing tables, and make each transaction sync.
    Raises sqlite3.DatabaseError, UnicodeDecodeError: the database is damaged, or the disk refuses a
    write; OSError, ConfigError: as in ``JournalFile``."""
    os.close(open_plain(path, os.O_RDWR | os.O_CREAT))  # SQLite would use mode 0644
    if path.stat().st_size > MAX_BYTES:
        raise sqlite3.DatabaseError(f"it has {path.stat().st_size} bytes")
    database = _connect(path)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            writer = ""
            with contextlib.suppress(*DAMAGE, TypeError):  # TypeError: there is no such row
                (writer,) = database.execute(WRITER).fetchone()
            raise ConfigError(
                f"journal {original or path} has schema {version}; "
                f"this release reads {SCHEMA_VERSION}",
                hint=f"start the release that wrote it{writer and f' ({writer})'}, or choose "
                "another --state-dir. If no release wrote it, the file is damaged: move it away, "
                "and the server rebuilds it from copies",
            )
        (state,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(state)
        if version == 0:
            _create(database)
        database.execute("CREATE TABLE IF NOT EXISTS note (kind TEXT, text TEXT)")
        database.execute("SELECT kind, text FROM note LIMIT 0")
        for kind, fields in FIELDS.items():  # a damaged file may lack a table or a column
            columns = ", ".join([*fields, DIGEST_COLUMN])
            database.execute(f"SELECT name, {columns} FROM {kind} LIMIT 0")
    except BaseException:
        database.close()
        raise
    return database


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    # With an exclusive lock the log's index is in this process's memory, not in a mapped file.
    # On a full disk, access to such a mapping would raise SIGBUS.
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    # Text that is not UTF-8 must not stop the query: the row's digest shows the damage.
    database.text_factory = lambda raw: raw.decode(errors="replace")
    return database


def _create(database: sqlite3.Connection) -> None:
    with _transaction(database):
        for kind, fields in FIELDS.items():
            columns = ", ".join(f"{name} {_COLUMNS[type_]}" for name, type_ in fields.items())
            columns = f"name TEXT PRIMARY KEY, {columns}, {DIGEST_COLUMN} TEXT"
            database.execute(f"CREATE TABLE IF NOT EXISTS {kind} ({columns})")
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Commit and sync when the body ends; roll back if it raises."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:  # SQLite rolls back on its own if the disk is full
            with contextlib.suppress(sqlite3.Error):
                database.execute("ROLLBACK")
        raise


def _merged(*sources: dict[Key, Entry]) -> dict[Key, Entry]:
    """Merge the entries of all sources; a later source overrides an earlier one."""
    merged: dict[Key, Entry] = {}
    for source in sources:
        for key in [key for entry in source.values() for key in superseded_by(entry)]:
            merged.pop(key, None)
        merged |= source
    return merged


def _delete(database: sqlite3.Connection, keys: Iterable[Key]) -> None:
    for table, name in keys:
        database.execute(f"DELETE FROM {table} WHERE name = ?", (name,))


def _insert(database: sqlite3.Connection, entry: Entry) -> None:
    """Write one checked entry. It takes the place of an old entry of the same name in the order."""
    kind = entry["kind"]
    fields = FIELDS[kind]
    values = [entry["name"]]
    for field, type_ in fields.items():
        value = entry[field]
        values.append(
            json.dumps(value) if type_ in (list, dict) else int(value) if type_ is bool else value
        )
    columns = [*fields, DIGEST_COLUMN]
    marks = ", ".join("?" * len(columns))
    updates = ", ".join(f"{column} = excluded.{column}" for column in columns)
    database.execute(
        f"INSERT INTO {kind} (name, {', '.join(columns)}) VALUES (?, {marks}) "
        f"ON CONFLICT (name) DO UPDATE SET {updates}",
        (*values, digest_of([kind, *values])),
    )


def _rows(database: sqlite3.Connection, kind: str) -> Iterator[tuple[Key, Entry | None]]:
    """Yield the entries of a kind in the order of acceptance; None instead of a damaged entry.
    Raises sqlite3.DatabaseError: the next row is in a damaged part of the file."""
    fields = FIELDS[kind]
    for name, *values, digest in database.execute(
        f"SELECT name, {', '.join(fields)}, {DIGEST_COLUMN} FROM {kind} NOT INDEXED ORDER BY rowid"
    ):
        entry: Entry = {"kind": kind, "name": name, **dict(zip(fields, values, strict=True))}
        try:
            if digest != digest_of([kind, name, *values]):
                raise ValueError(f"{name!r:.80} does not match its digest")
            for field, type_ in fields.items():
                if type_ in (list, dict):
                    entry[field] = json.loads(entry[field])
                elif type_ is bool:
                    entry[field] = bool(entry[field])
            check(entry)
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            log.warning("journal row of kind %s ignored: %s", kind, error)
            yield (kind, str(name)), None
        else:
            yield (kind, name), entry


def _entries(
    database: sqlite3.Connection, *, is_damaged: bool = False
) -> tuple[dict[Key, Entry], set[Key]]:
    """Return the sound entries, and the keys of the damaged ones.

    ``is_damaged``: read each kind up to its first unreadable row instead of raising.

    Raises:
        sqlite3.DatabaseError: the file is damaged, and ``is_damaged`` is False.
    """
    rows: list[tuple[Key, Entry | None]] = []
    for kind in FIELDS:
        with contextlib.suppress(*[*DAMAGE, sqlite3.Error] * is_damaged):
            for row in _rows(database, kind):
                rows.append(row)
    sound = {key: entry for key, entry in rows if entry is not None}
    return sound, {key for key, entry in rows if entry is None}


def _errno(problem: Exception) -> int:
    """Return the errno of an SQLite error; EIO for damage and for all unlisted errors."""
    code = getattr(problem, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return {
        sqlite3.SQLITE_FULL: errno.ENOSPC,
        sqlite3.SQLITE_READONLY: errno.EROFS,
        sqlite3.SQLITE_CANTOPEN: errno.EACCES,
        sqlite3.SQLITE_BUSY: errno.EBUSY,
    }.get(code, errno.EIO)


def _os_error(problem: Exception) -> OSError:
    number = _errno(problem)
    return OSError(number, os.strerror(number))
