"""The folders and files of a state directory."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..wire.private import check_trusted

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
