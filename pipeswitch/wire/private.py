"""Folders and files that are their owner's alone, checked before they are trusted."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from ..errors import ConfigError


def private_directory(path: Path, setting: str) -> Path:
    """Make or accept a folder only its owner can enter.

    Args:
        path: the folder; missing parents are made too.
        setting: what to change to have it elsewhere, for the hint.

    Raises:
        ConfigError: it belongs to somebody else, others may enter it, or it is a link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    check_private(path, setting, stat.S_IFDIR)
    return path


def check_private(path: Path, setting: str, kind: int = stat.S_IFREG) -> None:
    """Raise ConfigError unless ``path`` is of this kind, ours, and closed to everybody else."""
    facts = path.lstat()
    mode = stat.S_IMODE(facts.st_mode)
    if stat.S_IFMT(facts.st_mode) != kind or facts.st_uid != os.getuid() or mode & 0o077:
        what, wanted = ("folder", 0o700) if kind == stat.S_IFDIR else ("file", 0o600)
        raise ConfigError(
            f"{path} must be a {what} of user {os.getuid()} with mode {wanted:04o}, "
            f"it belongs to {facts.st_uid} with mode {mode:04o}",
            hint=f"chmod {wanted:o} {path}, or set {setting}",
        )
