"""The folders and files of a state directory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ..base.plain_files import open_plain, read_plain, write_whole
from ..planning.planned_groups import DIGEST_CHARS, MAX_BYTES, PlannedError, PlannedFile, decode
from ..programs.interface.packing import DERIVED_FILE
from ..programs.spec import BUNDLE_FILE, MANIFEST_FILE, is_checked, load_manifest
from ..wire.private import check_trusted

DIGEST: Final = "[0-9a-f]{64}"
_NO_FOLDER: Final = "(?!)"
_FOLDERS: Final = {
    ".": "models|commits|logs|profiles|uploads|published|keys|jobs|trash|orphans",
    "models": rf"{DIGEST}|[.]build-.*",
    "commits": "[^~]+",
    "keys": "clients",
}
"""Place in a state directory -> pattern of the names of its folders; other names are files."""
_LEFT_ALONE: Final = ("uploads", "published", "jobs", "trash", "orphans")
_OWN_FILES: Final = re.compile(r"journal[.].*|lock|gateway[.]lock|owner[.]token")
TRASH_KEPT_S: Final = 24 * 3600.0
STATE_SETTING: Final = "[server] state_dir"


class StateDir:
    """Folders under the state directory.

    Attributes:
        losses: sentences about files that were moved away when the server started.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.losses = root, list[str]()
        self.models, self.commits, self.logs = root / "models", root / "commits", root / "logs"
        self.profiles, self.uploads = root / "profiles", root / "uploads"
        # Copies of commits that become versions of models; removed when a server starts.
        self.published = root / "published"

    def create(self) -> None:
        """Create the state directory if it is missing.

        Raises:
            ConfigError: another user could write files that this server would trust.
            OSError: it cannot be created or read.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_trusted(self.root, STATE_SETTING)

    def unnamed(self, digests: Collection[str], jobs: Collection[str]) -> list[Path]:
        """Return the programs and commits that no model and no job names."""
        programs = [path for path in self.models.glob("*") if re.fullmatch(DIGEST, path.name)]
        commits = [path for path in self.commits.glob("[!.]*") if path.is_dir()]
        paths = [path for path in programs if path.name not in digests]
        return paths + [path for path in commits if path.name not in jobs]

    def set_aside(self, digests: Collection[str], jobs: Collection[str], folder: str) -> list[Path]:
        """Move unnamed programs and commits to a folder under ``root``; return their new paths."""
        moved = []
        for path in self.unnamed(digests, jobs):
            with contextlib.suppress(OSError):  # the next start tries it again
                moved.append(self._move(path, folder))
        return moved

    def _move(self, path: Path, folder: str) -> Path:
        place = self.root / folder / path.relative_to(self.root)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.rename(path, place)
        return place

    def old_trash(self, now_s: float) -> list[Path]:
        """Return the trash folders that are at least a day old; the caller removes them."""
        stamped = [p for p in (self.root / "trash").glob("*") if p.name.isdecimal()]
        return [path for path in stamped if now_s - int(path.name) >= TRASH_KEPT_S]

    def sweep(self, stamp: str) -> None:
        """Create missing folders; remove leftovers of killed builders. No builder runs, because the
        server's lock is held. Move away what is not a file or a folder as its name requires: to
        open a pipe would block. ``stamp`` names a folder in ``orphans``.

        Raises:
            OSError: a folder cannot be created or read.
        """
        for path in sorted(self._misplaced(self.root)):
            what = "a folder" if path.is_dir() else "not a regular file"
            if path.name == "orphans":
                moved = path.rename(path.with_name(f"orphans.{stamp}"))
            else:
                moved = self._move(path, f"orphans/{stamp}")
            self.losses.append(f"{path.relative_to(self.root)} was {what}: moved to {moved}")
        for path in (self.models, self.commits, self.logs, self.profiles):
            path.mkdir(mode=0o700, exist_ok=True)
        for leftover in self.models.glob(".build-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.rmtree(self.published, ignore_errors=True)

    def _misplaced(self, folder: Path) -> Iterator[Path]:
        """Yield folders in places of files, files in places of folders, pipes, sockets, devices."""
        pattern = _FOLDERS.get(str(folder.relative_to(self.root)), _NO_FOLDER)
        for path in folder.iterdir():
            mode, is_folder = path.lstat().st_mode, re.fullmatch(pattern, path.name)
            if folder == self.root and not is_folder and not _OWN_FILES.fullmatch(path.name):
                continue
            if not (stat.S_ISDIR(mode) if is_folder else stat.S_ISREG(mode)):
                yield path
            elif is_folder and path.name not in _LEFT_ALONE:
                yield from self._misplaced(path)

    @staticmethod
    def name_for(tenant: str, digest: str) -> str:
        """Return the digest that names a program's folder; ``digest`` is the builder's digest.

        A tenant's code may control its builder, which may then claim any digest. So the name
        depends on the tenant, too. Programs of one tenant with the same digest are the same.
        """
        return hashlib.sha256(f"{tenant}/{digest}".encode()).hexdigest() if tenant else digest

    def publish(self, folder: str, digest: str) -> None:
        """Move a built program to its folder, unless the same program is already there.

        Raises:
            OSError: the disk refuses to move it.
        """
        work, target = self.models / folder, self.models / digest
        try:
            os.rename(work, target)
        except OSError:
            if not (target / MANIFEST_FILE).is_file():
                raise
            if not is_checked(load_manifest(target)):
                os.replace(work / MANIFEST_FILE, target / MANIFEST_FILE)

    def open_program(self, digest: str) -> list[int]:
        """Open a program's manifest and bundle for reading; return [] if a file is missing.

        If there is a derived bundle, it is opened, because the manifest describes it.
        """
        opened: list[int] = []
        is_derived = (self.models / digest / DERIVED_FILE).exists()
        try:
            for name in (MANIFEST_FILE, DERIVED_FILE if is_derived else BUNDLE_FILE):
                opened.append(open_plain(self.models / digest / name, os.O_RDONLY))
        except OSError:  # the worker reports that its registration is damaged
            while opened:
                os.close(opened.pop())
        return opened

    def take_away(self, digests: Collection[str]) -> list[Path]:
        """Rename programs not in ``digests``; return the new paths, which the caller removes.

        Call this only while no builder runs: it may rely on a program that is already there.
        """
        try:
            names = [path.name for path in self.models.iterdir()]
        except OSError:  # no descriptor is left; the next sweep removes them
            return []
        gone = [name for name in names if re.fullmatch(DIGEST, name) and name not in digests]
        return [path for name in gone for path in self.take_away_program(name)]

    def take_away_program(self, digest: str) -> list[Path]:
        """Rename one program, to free its digest; return the new path, which the caller removes."""
        target = self.models / f".build-gone-{digest}"
        try:
            os.rename(self.models / digest, target)
        except OSError:  # the next sweep tries it again
            return []
        return [target]


def find_planned(folders: Sequence[Path], digest: str) -> Iterator[PlannedFile]:
    """Yield every file of planned groups of a program, folder by folder. Never raises."""
    for folder in folders:
        for path in sorted(folder.glob(f"*.{digest[:DIGEST_CHARS]}.*.json")):
            try:
                yield PlannedFile(path.name, decode(read_plain(path, MAX_BYTES)))
            except OSError as error:
                yield PlannedFile(path.name, None, error.strerror or str(error))
            except PlannedError as error:
                yield PlannedFile(path.name, None, str(error))


def save_planned(folder: Path, name: str, document: bytes) -> None:
    """Write planned groups atomically, indented for people; an older file of this name is replaced.

    Raises:
        OSError: the disk is full, or the folder may not be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(folder / name, msgspec.json.format(document, indent=1) + b"\n")
