"""What this process has open, by name: threads of other tests open and close theirs meanwhile."""

from __future__ import annotations

import contextlib
from pathlib import Path


def open_files(part: str) -> int:
    """The descriptors of this process whose file's name has ``part`` in it."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += part in str(path.readlink())
    return count
