"""Entries of the journal: their kinds, their check, and a copy of each entry in its own file.

The file is named ``NAME~KIND``. Copies about models (the kinds model, chain, serving and alias) are
in ``models/``, copies about jobs (job, ended, hold and placed) in ``commits/``. A damaged or
missing journal is rebuilt from these copies. An entry's copy is written after the journal has the
entry, and removed before the journal drops the entry. So a copy without an entry proves that the
journal lost the entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from ..base.plain_files import read_plain, write_whole
from ..base.settings import NAME_PATTERN

log = logging.getLogger(__name__)

Entry = dict[str, Any]
Key = tuple[str, str]  # kind and name

FIELDS: Final[Mapping[str, Mapping[str, type]]] = {
    "model": {
        "spec": bytes,
        "spec_digest": str,
        "digest": str,
        "priority": int,
        "pin": bool,
        "tenant": str,
        "lent": list,  # ``HostStoreAllocator.lent``
    },
    "job": {
        "entry": str,
        "args": list,
        "priority": int,
        "tenant": str,
        "share": str,
        "devices": list,
        "defaults": list,
        "folder": str,
        "env": list,
    },
    "hold": {"why": str},  # for a job that stays paused until its user resumes it
    "placed": {"device": str, "is_sent": bool},  # for a job; the device that its user chose
    # for a model; each share is [version, percent], for a version that is not the served one
    "serving": {"version": int, "last": int, "spec_digest": str, "shares": list},
    "chain": {"spec": bytes, "tenant": str},
    "alias": {"model": str},  # name of the model that the alias stands for
    "ended": {"record": dict},  # for a job; its settings, and how it ended
}
"""Kind of an entry -> its required fields besides the name. Each kind is a table."""

ENDS: Final = {
    "model-gone": ("model",),
    "serving-gone": ("serving",),
    "chain-gone": ("chain",),
    "alias-gone": ("alias",),
    "job-over": ("job", "hold", "placed", "ended"),
    "hold-over": ("hold",),
}
"""Kind of an entry that is not stored, but deletes others -> the kinds that it deletes."""

REPLACES: Final = {"job": ("ended", "placed"), "ended": ("job", "hold", "placed")}
"""Kind of an entry -> the kinds of other entries that it replaces."""

_NAME: Final = re.compile(NAME_PATTERN.pattern + r"(@[1-9][0-9]{0,8})?")  # models have a version
_SEPARATOR: Final = "~"  # between name and kind; not allowed in names
_OF_MODELS: Final = ("model", "serving", "chain", "alias")
MAX_COPY_BYTES: Final = 256 << 20  # a larger copy is damaged
_DIGEST_CHARS: Final = 64  # length of the hex digest before a file's content


def key_of(entry: Entry) -> Key:
    """Return an entry's key."""
    return str(entry["kind"]), str(entry["name"])


def digest_of(values: Any) -> str:
    """Return the SHA-256 of the values in hex; a later comparison shows damage."""
    return hashlib.sha256(msgspec.msgpack.encode(values)).hexdigest()


def superseded_by(entry: Entry) -> list[Key]:
    """Return the keys of the entries that this entry supersedes."""
    kind = entry["kind"]
    gone = ENDS.get(kind) or REPLACES.get(kind, ())
    return [(other, entry["name"]) for other in gone]


def is_name(name: str) -> bool:
    """Return whether a text is a valid name."""
    return bool(_NAME.fullmatch(name))


def check(entry: Entry) -> None:
    """Raise ValueError unless the entry is valid."""
    name, kind = entry.get("name"), entry.get("kind")
    if not isinstance(name, str) or not is_name(name):
        raise ValueError(f"invalid name {str(name)[:80]!r}")
    if not isinstance(kind, str) or (kind not in FIELDS and kind not in ENDS):
        raise ValueError(f"unknown kind {str(kind)[:80]!r}")
    for field, kind_of_field in FIELDS.get(kind, {}).items():
        if not isinstance(entry.get(field), kind_of_field):
            raise ValueError(f"{kind} {name}: {field} is not of type {kind_of_field.__name__}")
    if kind == "job" and not all(isinstance(one, str) for one in entry["args"] + entry["devices"]):
        raise ValueError(f"job {name}: an argument or a device is not text")
    if kind == "serving" and any([*map(type, pair)] != [int, int] for pair in entry["shares"]):
        raise ValueError(f"serving {name}: a share is not [version, percent]")


class EntryCopies:
    """The copies in ``models/`` and ``commits/`` of one state directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self) -> tuple[dict[Key, Entry], set[Key]]:
        """Return the sound copies in the order of acceptance, and the keys of the damaged ones."""
        paths = [p for folder in ("models", "commits") for p in self._root.glob(f"{folder}/*~*")]
        sound: dict[Key, Entry] = {}
        damaged: set[Key] = set()
        for path in sorted(paths, key=lambda path: path.lstat().st_mtime_ns):
            name, _, kind = path.name.partition(_SEPARATOR)
            if kind in FIELDS:
                entries = _unpacked(path)
                entry = entries[0] if len(entries) == 1 else {}
                is_own = (entry.get("kind"), entry.get("name")) == (kind, name)
                if is_own and _is_sound(entry):
                    sound[kind, name] = entry
                else:
                    damaged.add((kind, name))
        return sound, damaged

    def drop(self, keys: Iterable[Key]) -> None:
        """Remove copies, before the journal drops the entries.

        Raises:
            OSError: a copy could not be removed.
        """
        for key in keys:
            self._path(*key).unlink(missing_ok=True)

    def keep(self, entry: Entry) -> None:
        """Write the copy of an entry that the journal has, unless the copy is up to date.

        Nothing is synced: the next start writes the copy again if a power loss destroys it.

        Raises:
            OSError: the disk is full or gone; the previous copy is unchanged.
        """
        path = self._path(*key_of(entry))
        fields = ("kind", "name", *FIELDS[entry["kind"]])
        content = msgspec.msgpack.encode([{field: entry[field] for field in fields}])
        data = hashlib.sha256(content).hexdigest().encode() + content
        if _content(path) != data:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_whole(path, data, is_synced=False)

    def _path(self, kind: str, name: str) -> Path:
        folder = "models" if kind in _OF_MODELS else "commits"
        return self._root / folder / f"{name}{_SEPARATOR}{kind}"


def _unpacked(path: Path) -> list[Entry]:
    """Return the one entry (MessagePack after a digest) as a list; empty if damaged."""
    data = _content(path)
    content = data[_DIGEST_CHARS:]
    if hashlib.sha256(content).hexdigest().encode() != data[:_DIGEST_CHARS]:
        return []
    entry: list[Entry] = msgspec.msgpack.decode(content)
    return entry


def _content(path: Path) -> bytes:
    try:
        return read_plain(path, MAX_COPY_BYTES)
    except OSError:
        return b""


def _is_sound(entry: Entry) -> bool:
    """Return whether this release can use an entry whose digest matches."""
    with contextlib.suppress(ValueError):
        check(entry)
        return True
    return False
