"""The journal keeps what was written, nothing of what was not, and survives damage."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from pipeswitch.controller import journal
from pipeswitch.controller.journal import JournalFile


def job(name: str) -> dict[str, Any]:
    return {"kind": "job", "name": name, "entry": "x.py", "args": ["a"], "priority": 1}


def test_what_was_appended_is_there_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    file = JournalFile(path)
    file.append(job("one"))
    file.append(job("two"))
    file.append({"kind": "job-over", "name": "one", "state": "done"})
    file.close()
    again = JournalFile(path)
    assert again.jobs == {"two": job("two")}
    again.close()


def test_an_entry_that_could_not_be_synced_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    file = JournalFile(path)
    file.append(job("before"))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(journal.os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            file.append(job("refused"))
    file.append(job("after"))
    file.close()
    again = JournalFile(path)
    assert set(again.jobs) == {"before", "after"}
    again.close()


def test_half_a_line_that_cannot_be_taken_back_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    file = JournalFile(path)
    file.append(job("before"))

    def broken(*_: int) -> None:
        with open(path, "ab") as torn:
            torn.write(b'{"half')
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(journal.os, "fsync", broken)
        patched.setattr(journal.os, "ftruncate", broken)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            file.append(job("refused"))
    file.append(job("after"))
    file.close()
    again = JournalFile(path)
    assert {"before", "after"} <= set(again.jobs)
    again.close()


def test_a_disk_without_room_for_a_compact_copy_leaves_the_old_file_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    file = JournalFile(path)
    file.append(job("one"))
    file.close()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(journal.os, "replace", full)
        again = JournalFile(path)
    assert set(again.jobs) == {"one"}
    again.append(job("two"))
    again.close()
    last = JournalFile(path)
    assert set(last.jobs) == {"one", "two"}
    last.close()
    assert [p.name for p in tmp_path.iterdir()] == ["journal.jsonl"]


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\x00",
        b"[]",
        b"7",
        b"[" * 100_000,
        b"{}",
        b'{"kind": "model", "name": "half"}',
        b'{"kind": "job", "name": "../../etc", "entry": "x", "args": [], "priority": 1}',
        b'{"kind": "job", "name": "j", "entry": "x", "args": [1], "priority": 1}',
        b'{"kind": "model", "name": "m", "spec": {"base64": 5}}',
        b'{"kind": ["x"], "name": "m"}',
        b'{"kind": "unheard-of", "name": "m"}',
    ],
    ids=range(11),
)
def test_a_damaged_line_costs_itself_alone(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    file = JournalFile(path)
    file.append(job("one"))
    file.close()
    path.write_bytes(line + b"\n" + path.read_bytes() + line)
    again = JournalFile(path)
    assert set(again.jobs) == {"one"}
    assert not again.models
    again.close()
