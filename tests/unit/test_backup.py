"""Backups of a state directory that is in use, and state directories restored from backups."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeswitch.base.errors import InvalidInput, PipeSwitchError, ServerUnavailable
from pipeswitch.commits.commit_files import load_commit, write_commit
from pipeswitch.controller import backup as module
from pipeswitch.controller.backup import backup, restore
from pipeswitch.controller.journal import FILE_NAME, JournalFile
from pipeswitch.programs.spec import MANIFEST_FILE
from tests.unit.test_journal import job, model


def digest(name: str) -> str:
    return name.encode().hex().ljust(64, "0")


class State:
    """State directory with an open journal, like a running server's, with models a, b and job j."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(mode=0o700)
        self.journal = JournalFile(root / FILE_NAME)
        self.register("a")
        self.register("b")
        self.journal.append(job("j"))
        self.commit(3)
        self.commit(4)

    def register(self, name: str) -> None:
        folder = self.root / "models" / digest(name)
        folder.mkdir(parents=True)
        (folder / MANIFEST_FILE).write_text(name)
        self.journal.append({**model(name), "digest": digest(name)})

    def unregister(self, name: str) -> None:
        self.journal.append({"kind": "model-gone", "name": name})
        (self.root / "models" / digest(name) / MANIFEST_FILE).unlink(missing_ok=True)

    def commit(self, step: int) -> None:
        write_commit(self.root / "commits" / "j", step, memoryview(bytes([step]) * 64))


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    return State(tmp_path / "state")


def restored(copy: Path, root: Path) -> tuple[set[str], int]:
    """Restore a backup; return the names of its models, and its job's step."""
    restore(copy, root)
    journal = JournalFile(root / FILE_NAME)
    journal.close()
    assert (set(journal.jobs), journal.losses) == ({"j"}, [])
    loaded = load_commit(root / "commits" / "j")
    assert loaded is not None
    os.close(loaded[0])
    return set(journal.models), loaded[2].step


def test_what_a_running_server_has_is_restored(state: State, tmp_path: Path) -> None:
    for name in ("keys", "logs", "models/.build-1"):
        (state.root / name).mkdir()
        (state.root / name / "file").write_text(name)
    copy, root = tmp_path / "copy", tmp_path / "new" / "state"
    assert backup(state.root, copy) == {"models": 2, "jobs": 1}
    assert {path.name for path in copy.iterdir()} == {"models", "commits", "keys", FILE_NAME}
    assert not (copy / "models" / ".build-1").exists()
    assert restored(copy, root) == ({"a", "b"}, 4)
    assert (root / "keys" / "file").read_text() == "keys"


@pytest.mark.parametrize("what", ["register", "unregister", "commit"])
def test_what_changes_while_it_is_copied_is_whole_in_the_copy(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    copied: list[Path] = []
    copy2 = module.shutil.copy2

    def meanwhile(path: Path, *args: Any, **options: Any) -> None:
        copied.append(path)
        if what == "commit" and path.parent.name == "j" and len(copied) < 40:
            state.commit(len(copied) + 5)  # removes the image that is about to be copied
            state.commit(len(copied) + 6)
        elif what == "register" and len(copied) == 4:
            state.register("c")
        elif what == "unregister" and len(copied) == 4:
            state.unregister("b")
        copy2(path, *args, **options)

    monkeypatch.setattr(module.shutil, "copy2", meanwhile)
    backup(state.root, tmp_path / "copy")
    monkeypatch.undo()
    models, step = restored(tmp_path / "copy", tmp_path / "again")
    assert models == {"register": {"a", "b", "c"}, "unregister": {"a"}}.get(what, {"a", "b"})
    assert step >= 4


def test_a_copy_has_the_whole_journal_and_a_start_finds_no_damage(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.journal.append({"kind": "hold", "name": "j", "why": "asked"})
    for number in range(300):  # some entries stay in the journal's write-ahead log
        state.journal.append({**model("a"), "digest": digest("a"), "priority": number})
    (state.root / "models" / "b~model").unlink()  # as if the disk had had no room for the file
    copyfile, numbers = shutil.copyfile, iter(range(3))

    def meanwhile(path: Any, to: Any, **options: Any) -> None:
        copyfile(path, to, **options)
        if Path(path).name.startswith(FILE_NAME) and (number := next(numbers, -1)) >= 0:
            state.register(f"m{number}")

    monkeypatch.setattr(shutil, "copyfile", meanwhile)
    copy, root = tmp_path / "copy", tmp_path / "restored"
    backup(state.root, copy)
    restore(copy, root)
    for folder in (copy, root):  # a server may also start in the backup itself
        journal = JournalFile(folder / FILE_NAME)
        journal.close()
        assert (journal.losses, journal.lost, {*journal.holds}) == ([], [], {"j"})
        assert {*journal.models} == {"a", "b", "m0", "m1", "m2"}
        assert journal.models["a"]["priority"] == 299


def test_a_damaged_journal_is_named_and_leaves_no_copy(state: State, tmp_path: Path) -> None:
    state.journal.close()
    data = (state.root / FILE_NAME).read_bytes()
    for wrong in (data[:2000], bytes(8) + data[8:], data.replace(b"j", b"q")):
        (state.root / FILE_NAME).write_bytes(wrong)
        with pytest.raises(PipeSwitchError):
            backup(state.root, tmp_path / "copy")
        assert not (tmp_path / "copy").exists()


def test_a_state_that_never_stands_still_is_refused_and_leaves_nothing(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, numbers = module._copy, iter(range(1000))

    def never(root: Path, target: Path) -> None:
        copy(root, target)
        state.register(f"m{next(numbers)}")

    monkeypatch.setattr(module, "_copy", never)
    with pytest.raises(ServerUnavailable):
        backup(state.root, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_what_cannot_be_backed_up_or_restored_is_refused(state: State, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="into itself"):
        backup(state.root, state.root / "models" / "copy")
    full, copy, again = tmp_path / "full", tmp_path / "copy", tmp_path / "again"
    full.mkdir()
    (full / "file").write_text("")
    wrong = (backup, tmp_path / "no", copy), (backup, state.root, full), (restore, full, again)
    for call, source, target in wrong:
        with pytest.raises(InvalidInput):
            call(source, target)
    backup(state.root, copy)
    with pytest.raises(InvalidInput):
        restore(copy, full)
    (copy / "models" / digest("a") / MANIFEST_FILE).unlink()
    with pytest.raises(PipeSwitchError):
        restore(copy, again)
    assert not again.exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("fails", ["copy2", "copyfile", "mkdir"])
def test_a_full_disk_names_both_folders_and_leaves_nothing(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fails: str
) -> None:
    copy, root = tmp_path / "copy", tmp_path / "root"
    backup(state.root, copy)
    calls = ((restore, copy, root, "--state-dir"), (backup, state.root, root, "another disk"))
    for call, source, target, told in calls:
        whole = {path: path.stat().st_mtime_ns for path in source.rglob("*")}

        def full(*_: Any, **__: Any) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(Path if fails == "mkdir" else shutil, fails, full)
            with pytest.raises(PipeSwitchError) as refused:
                call(source, target)
        assert str(source) in refused.value.message
        assert str(target) in refused.value.message
        assert told in refused.value.hint
        assert not target.exists()
        assert whole == {path: path.stat().st_mtime_ns for path in source.rglob("*")}
        call(source, target)  # succeeds, because the disk has room again
        shutil.rmtree(target)
