"""Backup of a state directory while its server runs, and restoration from such a backup.

Programs never change, each image of a commit has a name of its own, and entries and records are
replaced as a whole. So a read returns a whole file or fails because the file is gone. A pass copies
the files that changed, then compares the backup with its source; passes repeat until both agree.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ..base.errors import InvalidInput, PipeSwitchError, RemoteProtocolError, ServerUnavailable
from ..commits.commit_files import read_record
from ..programs.spec import MANIFEST_FILE
from .entries import EntryCopies
from .folders import StateDir
from .journal import FILE_NAME, copy_journal

FOLDERS: Final = ("models", "commits", "keys", "profiles")
PASSES: Final = 10
PAUSE_S: Final = 0.2  # pause between two passes


def backup(root: Path, target: Path) -> dict[str, int]:
    """Copy a state directory to a new folder; return the counts of models and jobs. Blocks.

    Raises:
        InvalidInput: ``root`` has no journal, or ``target`` is not empty.
        PipeSwitchError: the journal is damaged, or the disk of ``target`` is full.
        ServerUnavailable: models and jobs changed during each of the ``PASSES``.
    """
    if not (root / FILE_NAME).exists():
        raise InvalidInput(f"{root} has no state of a server", hint="--state-dir, as in serve")
    with _made(target, root, hint="name a folder of another disk"):
        for number in range(PASSES):
            time.sleep(PAUSE_S * min(number, 1))
            _copy(root, target)
            if _agrees(root, target):
                return _counted(target)
        raise ServerUnavailable("models and jobs change too fast", hint="try again")


def restore(source: Path, root: Path) -> dict[str, int]:
    """Create a state directory from a backup; return the counts of models and jobs. Blocks.

    Raises:
        InvalidInput: ``source`` is not a backup, or ``root`` is not empty.
        PipeSwitchError: the backup is damaged, or the disk of ``root`` is full.
    """
    if not (source / FILE_NAME).exists():
        raise InvalidInput(f"{source} is not a backup", hint="pipeswitch backup DIR makes one")
    with _made(root, source, hint="restore to a folder of another disk: --state-dir DIR"):
        _copy(source, root)
        if not _agrees(source, root):
            raise PipeSwitchError(f"{source} lacks files that its journal names")
        return _counted(root)


@contextlib.contextmanager
def _made(target: Path, source: Path, *, hint: str) -> Iterator[None]:
    """Create a folder; remove it if the body raises. ``hint`` is added to the full-disk error."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidInput(f"{target} is not an empty folder", hint="name a new one")
    if any(target.absolute().is_relative_to(source.absolute() / one) for one in FOLDERS):
        raise InvalidInput(f"{target} would be copied into itself", hint=hint)
    try:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PipeSwitchError(
                f"{target}: {error.strerror}: the copy of {source} does not fit, and was removed",
                hint=f"free space and type the same again; or {hint}",
            ) from None
        raise


def _copy(root: Path, target: Path) -> None:
    """Bring a backup up to date: copy the entries first, then the files that entries name."""
    for folder in FOLDERS:
        for old in (target / folder).glob("*~*"):
            old.unlink()
        for place, below, names in os.walk(root / folder):  # the top folder, with entries, is first
            below[:] = [name for name in below if not name.startswith(".")]
            there = target / Path(place).relative_to(root)
            there.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in names:
                path, new = Path(place, name), there / name
                with contextlib.suppress(FileNotFoundError):
                    if not (name.endswith(".tmp") or (new.exists() and filecmp.cmp(path, new))):
                        shutil.copy2(path, new, follow_symlinks=False)


def _agrees(root: Path, target: Path) -> bool:
    """Copy the journal; return whether the backup has its entries and the files that they name.

    If so, remove all other files. An entry's copy may be missing: a full disk refuses to write it.
    """
    entries = copy_journal(root / FILE_NAME, target / FILE_NAME)
    copies, damaged = EntryCopies(target).read()
    if entries is None or damaged or copies != EntryCopies(root).read()[0]:
        return False
    if any(entries.get(key) != copy for key, copy in copies.items()):
        return False
    for (kind, name), entry in entries.items():
        if kind == "model" and not (target / "models" / entry["digest"] / MANIFEST_FILE).is_file():
            return False
        if kind in ("job", "ended") and _has_commit(root, name) > _has_commit(target, name):
            return False
    digests = {str(entry.get("digest")) for entry in entries.values()}
    for path in StateDir(root=target).unnamed(digests, {name for _, name in entries}):
        shutil.rmtree(path)
    return True


def _has_commit(root: Path, job: str) -> bool:
    folder = root / "commits" / job
    with contextlib.suppress(RemoteProtocolError):
        record = read_record(folder)
        return record is not None and (folder / record.image).is_file()
    return False


def _counted(root: Path) -> dict[str, int]:
    kinds = [kind for kind, _ in EntryCopies(root).read()[0]]
    return {"models": kinds.count("model"), "jobs": kinds.count("job") + kinds.count("ended")}
