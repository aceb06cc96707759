"""The version of this package."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

UNKNOWN = "0+unknown"
"""Version of a copy without git that is used without an installation, through ``PYTHONPATH``."""
PACKAGE = Path(__file__).parents[1]


def release() -> str:
    """Return the installed release, such as ``0.2.0``; ``UNKNOWN`` if none is installed."""
    from importlib import metadata  # only here, because it imports all of email

    try:
        return metadata.version("pipeswitch")
    except metadata.PackageNotFoundError:
        return UNKNOWN


@functools.cache
def own_version() -> str:
    """Return the release and the commit of its sources: ``0.2.0+05374f1f``.

    A wheel contains its commit. In a checkout it is the current one.
    """
    commit = _commit()
    return f"{release().partition('+')[0]}+{commit}" if commit else release()


def _commit() -> str:
    try:
        return (PACKAGE / "commit.txt").read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        pass
    if not (PACKAGE.parent / "pyproject.toml").exists():
        return ""
    command = ["git", "-C", str(PACKAGE.parent), "rev-parse", "--short=8", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
