"""The folders and files of a state directory."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..wire.private import check_trusted

DIGEST: Final = "[0-9a-f]{64}"
STATE_SETTING: Final = "[server] state_dir"


@dataclass(frozen=True, kw_only=True)
class Places:
    """Folders under the state directory."""

    root: Path

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def commits(self) -> Path:
        return self.root / "commits"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def profiles(self) -> Path:
        return self.root / "profiles"

    @property
    def uploads(self) -> Path:
        return self.root / "uploads"

    def create(self) -> None:
        """Make what is missing.

        Raises:
            ConfigError: another user may have put there what this server would trust.
            OSError: it cannot be made or read.
        """
        for path in (self.root, self.models, self.commits, self.logs, self.profiles):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_trusted(self.root, STATE_SETTING)

    def sweep(self) -> None:
        """Remove what a killed builder left; only one who holds the lock knows that it is dead."""
        for leftover in self.models.glob(".build-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def take_away(self, kept: Collection[str]) -> list[Path]:
        """Programs of other digests, under names that no build asks for; the caller removes them.

        No builder may run: it may have found its program there already.
        """
        away = []
        for path in self.models.iterdir():
            if re.fullmatch(DIGEST, path.name) and path.name not in kept:
                target = path.with_name(f".build-gone-{path.name}")
                with contextlib.suppress(OSError):  # it stays, until the next sweep
                    os.rename(path, target)
                    away.append(target)
        return away
