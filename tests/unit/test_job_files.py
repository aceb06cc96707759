"""Logs of jobs: whatever they contain, they are cut only between characters."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.base.errors import ModelNotFound, RemoteProtocolError
from pipeswitch.commits.commit_files import CommitRecord, load_commit, remove_unnamed
from pipeswitch.commits.progress import HANDED_ON, SUFFIX, Life, read_life
from pipeswitch.controller.effects import Effects
from pipeswitch.controller.folders import StateDir
from pipeswitch.controller.journal import FILE_NAME, JournalFile
from pipeswitch.frontend.job_files import CHUNK_BYTES, CUT, read_piece, whole_characters
from pipeswitch.ipc.messages.base import JobName
from pipeswitch.ipc.sparse import held_bytes, keep_newest
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.events import JobSpec
from pipeswitch.scheduler.training.jobs import entry_of


@given(st.text(max_size=30), st.integers(0, 120))
def test_a_cut_never_splits_a_character(text: str, at: int) -> None:
    data = text.encode("utf-8", "ignore")[:at]
    whole = whole_characters(data)
    data[:whole].decode("utf-8")
    assert len(data) - whole < 4


@given(st.binary(max_size=20))
def test_bytes_that_are_no_text_do_not_stop_the_paging(data: bytes) -> None:
    assert len(data) - whole_characters(data) < 4


def test_pieces_join_to_the_whole_log(tmp_path: Path) -> None:
    text = "ü✔🚀" * (CHUNK_BYTES // 4)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "job-j.log").write_text(text, "utf-8")
    read, offset = "", 0
    while True:
        piece = read_piece(tmp_path, JobName("j"), "logs", offset)
        read, offset = read + piece["text"], piece["offset_bytes"]
        if offset == piece["end_bytes"]:
            break
    assert read == text


def test_a_job_that_has_logged_nothing_has_an_empty_history(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("j", "j.1"):
        (tmp_path / "logs" / f"job-{name}.log").write_text("a line that it printed")
        piece = read_piece(tmp_path, JobName(name), "history", 5)
        assert piece == {"offset_bytes": 0, "end_bytes": 0, "text": ""}
        with pytest.raises(ModelNotFound):
            read_piece(tmp_path, JobName(name), "state", 0)
    for kind in ("history", "logs"):
        with pytest.raises(ModelNotFound):
            read_piece(tmp_path, JobName("absent"), kind, 0)


def test_of_a_long_log_the_newest_stays_and_who_follows_goes_on(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    path, resident_bytes, written = tmp_path / "logs" / "job-j.log", 1 << 18, 0
    with path.open("ab", buffering=0) as log:
        follows, read = 0, ""
        for number in range(20_000):
            line = f"line {number} of a script that says a good deal while it trains\n".encode()
            written += log.write(line)
            if number % 500 == 499:
                keep_newest(str(path), resident_bytes)
                assert held_bytes(log.fileno()) <= 2 * resident_bytes
                piece = read_piece(tmp_path, JobName("j"), "logs", follows)
                follows, read = piece["offset_bytes"], read + piece["text"]
    assert (follows, CUT in read) == (written, False)  # a reader that follows misses nothing
    assert [int(line.split()[1]) for line in read.splitlines()] == list(range(20_000))
    late = read_piece(tmp_path, JobName("j"), "logs", 0)
    assert late["text"].startswith(f"{CUT}line ")
    first = int(late["text"].split("\n")[1].split()[1])
    rest = read_piece(tmp_path, JobName("j"), "logs", late["offset_bytes"])
    lines = (late["text"] + rest["text"]).splitlines()[1:]
    assert [int(line.split()[1]) for line in lines] == list(range(first, 20_000))
    assert sum(map(len, lines)) >= resident_bytes // 2
    assert path.stat().st_size == written


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
@pytest.mark.parametrize("place", ["logs/job-j.log", "commits/j/commit.json", "image"])
def test_what_a_script_puts_in_place_of_its_files_is_not_read(
    kind: str, place: str, tmp_path: Path
) -> None:
    commits, secret = tmp_path / "commits" / "j", tmp_path / "secret"
    for folder in (commits, tmp_path / "logs"):
        folder.mkdir(parents=True)
    image = commits / "commit-1-0.safetensors"
    record = CommitRecord(step=1, size_bytes=1, sha256="", image=image.name)
    (commits / "commit.json").write_bytes(msgspec.json.encode(record))
    secret.write_text("not yours")
    path = image if place == "image" else tmp_path / place
    path.unlink(missing_ok=True)
    {"fifo": os.mkfifo, "link": lambda at: at.symlink_to(secret), "folder": Path.mkdir}[kind](path)
    stream = "logs" if "log" in place else "state"
    with pytest.raises(ModelNotFound):  # raised at once: opening a fifo must not wait for a writer
        read_piece(tmp_path, JobName("j"), stream, 0)
    assert read_life(path) == Life()
    if stream == "state":  # a starting server reads the commits, too
        with pytest.raises((RemoteProtocolError, OSError)):
            load_commit(commits)
        remove_unnamed(commits)


def test_a_job_is_removed_although_its_script_made_a_folder_of_its_log(tmp_path: Path) -> None:
    effects = Effects.__new__(Effects)
    effects._places = StateDir(root=tmp_path)
    for name in ("job-j.log", "job-j.history"):
        (tmp_path / "logs" / name).mkdir(parents=True)
    effects._remove_job(JobName("j"))


def test_the_past_of_a_job_of_another_node_is_kept_when_it_is_accepted(tmp_path: Path) -> None:
    places, history = StateDir(root=tmp_path), tmp_path / "jobs" / "j" / HANDED_ON
    places.create()
    places.sweep("1")
    history.parent.mkdir(parents=True)
    history.write_bytes(Life(False, 3, 30, 7).packed())
    effects = Effects.__new__(Effects)
    effects._places, effects._journal = places, JournalFile(tmp_path / FILE_NAME)
    entry = {"kind": "job", **entry_of(JobSpec(JobName("j"), "t.py", (), 1))}
    for expected in (Life(False, 3, 30, 7), Life()):
        effects._write_journal(ev.Journal(entry=entry, accepts=(ev.Token(1),)))
        assert read_life(tmp_path / "logs" / f"job-j{SUFFIX}") == expected
        assert not history.exists()
