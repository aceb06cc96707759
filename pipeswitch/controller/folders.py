"""The folders and files of a state directory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Final

from ..programs.interface.packing import DERIVED_FILE
from ..programs.spec import BUNDLE_FILE, MANIFEST_FILE, is_checked, load_manifest
from ..wire.private import check_trusted

DIGEST: Final = "[0-9a-f]{64}"
TRASH_KEPT_S: Final = 24 * 3600.0
STATE_SETTING: Final = "[server] state_dir"


class StateDir:
    """Folders under the state directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models, self.commits, self.logs = root / "models", root / "commits", root / "logs"
        self.profiles, self.uploads = root / "profiles", root / "uploads"
        # Copies of commits that versions are made of; nothing of it survives the server.
        self.published = root / "published"

    def create(self) -> None:
        """Make what is missing.

        Raises:
            ConfigError: another user may have put there what this server would trust.
            OSError: it cannot be made or read.
        """
        for path in (self.root, self.models, self.commits, self.logs, self.profiles):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_trusted(self.root, STATE_SETTING)

    def unnamed(self, digests: Collection[str], jobs: Collection[str]) -> list[Path]:
        """Return the programs and commits that no model and no job names."""
        programs = [path for path in self.models.glob("*") if re.fullmatch(DIGEST, path.name)]
        commits = [path for path in self.commits.glob("[!.]*") if path.is_dir()]
        paths = [path for path in programs if path.name not in digests]
        return paths + [path for path in commits if path.name not in jobs]

    def set_aside(self, digests: Collection[str], jobs: Collection[str], folder: str) -> list[Path]:
        """Move what no entry names to a folder under ``root``; return the new places."""
        moved = []
        for path in self.unnamed(digests, jobs):
            place = self.root / folder / path.relative_to(self.root)
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # it stays until the next start
                os.rename(path, place)
                moved.append(place)
        return moved

    def old_trash(self, now_s: float) -> list[Path]:
        """Return the files that a start moved to the trash a day ago; the caller removes them."""
        stamped = [p for p in (self.root / "trash").glob("*") if p.name.isdecimal()]
        return [path for path in stamped if now_s - int(path.name) >= TRASH_KEPT_S]

    def sweep(self) -> None:
        """Remove what a killed builder left; only one who holds the lock knows that it is dead."""
        for leftover in self.models.glob(".build-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.rmtree(self.published, ignore_errors=True)

    @staticmethod
    def name_for(tenant: str, digest: str) -> str:
        """Return the name of a program that a builder calls by this digest.

        Two programs of one tenant with one digest are the same. That is not certain for another
        tenant's builder: it may have been taken over, and claim any digest.
        """
        return hashlib.sha256(f"{tenant}/{digest}".encode()).hexdigest() if tenant else digest

    def publish(self, folder: str, digest: str) -> None:
        """Give a built program its place. The same digest is the same program: the first wins.

        Raises:
            OSError: the disk refuses it.
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
        """Open a program's manifest and bundle for reading; return nothing if one is missing.

        If there is a derived bundle, it is that one, since the manifest describes it.
        """
        opened: list[int] = []
        is_derived = (self.models / digest / DERIVED_FILE).exists()
        try:
            for name in (MANIFEST_FILE, DERIVED_FILE if is_derived else BUNDLE_FILE):
                opened.append(os.open(self.models / digest / name, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:  # the worker says so: its registration is damaged
            while opened:
                os.close(opened.pop())
        return opened

    def take_away(self, digests: Collection[str]) -> list[Path]:
        """Programs of other digests, under names that no build asks for; the caller removes them.

        No builder may run: it may have found its program there already.
        """
        try:
            names = [path.name for path in self.models.iterdir()]
        except OSError:  # no descriptor is left: they stay, until the next sweep
            return []
        gone = [name for name in names if re.fullmatch(DIGEST, name) and name not in digests]
        return [path for name in gone for path in self.take_away_program(name)]

    def take_away_program(self, digest: str) -> list[Path]:
        """Rename one program, so that its place is free; the caller removes it."""
        target = self.models / f".build-gone-{digest}"
        try:
            os.rename(self.models / digest, target)
        except OSError:  # it stays, until the next sweep
            return []
        return [target]
