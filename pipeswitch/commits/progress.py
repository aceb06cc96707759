"""Progress of a job, in a file that outlives the server and travels with the job between nodes.

A job resumes from a commit. This file has the last step that the job has done, so that the next
server can count the steps that are repeated. The job's process writes it through a mapping, with
one store for each step and no system call. The kernel keeps the data if all processes are killed.
After a power loss the counts may be wrong, but no state is lost.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Final, NamedTuple

from ..base.plain_files import open_plain

SUFFIX: Final = ".progress"
HANDED_ON: Final = f"job{SUFFIX}"  # in ``jobs/NAME``, for a job that comes from another node
_LIFE: Final = struct.Struct("<qqqq")
_STEP_AT: Final = 3  # index of the step's word in the file


class Life(NamedTuple):
    """Progress of a job over all its processes so far."""

    is_running: bool = False  # the script runs, or its process died
    restarts: int = 0
    steps_recomputed: int = 0
    step: int = 0  # the last step that was done

    def continued(self) -> Life:
        """Return the progress for the next process; count a restart if the last process died."""
        return Life(False, self.restarts + self.is_running, self.steps_recomputed, self.step)

    def packed(self) -> bytes:
        """Return the content of a progress file."""
        return _LIFE.pack(*self)


class Progress:
    """Writer of a progress file; only one thread of one process may use it.

    Raises:
        OSError: the disk has no space for 32 bytes, or is gone.
    """

    def __init__(self, path: Path, life: Life) -> None:
        descriptor = open_plain(path, os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(descriptor, 0, _LIFE.size)  # a full disk raises OSError here
            self._map = mmap.mmap(descriptor, _LIFE.size)
        finally:
            os.close(descriptor)
        _LIFE.pack_into(self._map, 0, *life)
        self._words = memoryview(self._map).cast("q")

    def at(self, step: int) -> None:
        """Record that steps 1 to ``step`` are done."""
        self._words[_STEP_AT] = step

    def ended(self) -> None:
        """Note that the script has ended, so its process may exit."""
        self._words[0] = False


def read_life(path: Path) -> Life:
    """Return the content of a progress file; an empty ``Life`` if there is no valid file."""
    try:
        with open(path, "rb", opener=open_plain) as file:
            restarts_and_more = _LIFE.unpack(file.read(_LIFE.size))
    except (OSError, struct.error):
        return Life()
    is_running, *counts = restarts_and_more
    return Life(bool(is_running), *(max(0, count) for count in counts))
