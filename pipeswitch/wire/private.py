"""Checks that other users cannot read or change a folder or file, before it is trusted."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from pathlib import Path

from ..base.errors import ConfigError


def private_directory(path: Path, setting: str) -> Path:
    """Create a folder that only its owner can enter, or check an existing one; return ``path``.

    Args:
        path: the folder; missing parents are created too.
        setting: name of the setting that moves the folder, for the error's hint.

    Raises:
        ConfigError: the folder belongs to another user, is open to others, or is a link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    check_private(path, setting, stat.S_IFDIR)
    return path


def check_secret(path: Path) -> None:
    """Raise ConfigError if others may read this file, which has a secret key.

    For a link the target is checked, because containers often get secrets as links.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"{path} holds a secret key and has mode {mode:04o}: others may read it",
            hint=f"chmod 600 {shlex.quote(str(path))}",
        )


def check_trusted(path: Path, setting: str) -> None:
    """Check that no other user could have written a file or folder; a missing path is accepted.

    Everything below the path must be a file or folder, not a link, of this user or root. Others
    must not have write access to it. Inside a folder that others cannot enter, modes do not matter.

    Raises:
        ConfigError: a file or folder fails the check; the hint says how to fix the first one.
    """
    if path.exists():
        _check_tree(path, setting, path.stat(), is_reachable=True)


def _check_tree(path: Path, setting: str, facts: os.stat_result, *, is_reachable: bool) -> None:
    mode = stat.S_IMODE(facts.st_mode)
    shown = shlex.quote(str(path))
    if facts.st_uid not in (os.getuid(), 0):
        raise ConfigError(
            f"{path} belongs to user {facts.st_uid}, this is user {os.getuid()}: its contents "
            "cannot be trusted",
            hint=f"chown -R {os.getuid()} {shown} if you trust its contents, or set {setting}",
        )
    if is_reachable and mode & 0o022:
        raise ConfigError(
            f"{path} has mode {mode:04o}: others may change files that this server trusts",
            hint=f"chmod -R go-w {shown} if you trust its contents, or set {setting}",
        )
    if stat.S_ISDIR(facts.st_mode):
        is_reachable = is_reachable and bool(mode & 0o077)
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    facts = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # removed meanwhile, by a server that uses this folder
                    continue
                if stat.S_ISLNK(facts.st_mode):
                    raise ConfigError(
                        f"{entry.path} is a link, which may point anywhere",
                        hint=f"replace it with its target, or set {setting}",
                    )
                _check_tree(Path(entry.path), setting, facts, is_reachable=is_reachable)


def check_private(path: Path, setting: str, kind: int = stat.S_IFREG) -> None:
    """Raise ConfigError unless ``path`` has this file type and only this user can access it."""
    facts = path.lstat()
    mode = stat.S_IMODE(facts.st_mode)
    if stat.S_IFMT(facts.st_mode) != kind or facts.st_uid != os.getuid() or mode & 0o077:
        what, mode_needed = ("folder", 0o700) if kind == stat.S_IFDIR else ("file", 0o600)
        is_ours = facts.st_uid == os.getuid()
        mend = f"chmod {mode_needed:o}" if is_ours else f"chown {os.getuid()}"
        raise ConfigError(
            f"{path} must be a {what} of user {os.getuid()} with mode {mode_needed:04o}, "
            f"it belongs to {facts.st_uid} with mode {mode:04o}",
            hint=f"{mend} {shlex.quote(str(path))}, or set {setting}",
        )
