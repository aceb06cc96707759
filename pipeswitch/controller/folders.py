"""The folders and files of a state directory."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path


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
        for path in (self.root, self.models, self.commits, self.logs, self.profiles):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in self.models.glob(".build-*"):
            shutil.rmtree(leftover, ignore_errors=True)
