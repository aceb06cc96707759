"""Progress of a job, in a file that outlives the server and travels with the job between nodes.

A commit says from where a job can resume; this says how far it came, so that the next server can
count the steps that are repeated. The job's process writes it through a mapping: a store for each
step, no system call, and a ``kill -9`` of everything leaves it to the kernel. A power loss may take
it, which costs a count and no state.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Final, NamedTuple

from ..ipc.sparse import open_plain

SUFFIX: Final = ".progress"
HANDED_ON: Final = f"job{SUFFIX}"  # in ``jobs/NAME``, of a job that comes from another node
_LIFE: Final = struct.Struct("<qqqq")
_STEP_AT: Final = 3  # its word in the file


class Life(NamedTuple):
    """A job's life until now."""

    is_running: bool = False  # its script was under way
    restarts: int = 0
    steps_recomputed: int = 0
    step: int = 0  # the last that was done

    def continued(self) -> Life:
        """Return it as its next process begins: the end of one that was under way is a restart."""
        return Life(False, self.restarts + self.is_running, self.steps_recomputed, self.step)

    def packed(self) -> bytes:
        """Return the content of its file."""
        return _LIFE.pack(*self)


class Progress:
    """The writer's side; one process at a time, from one thread.

    Raises:
        OSError: the disk has no room for 32 bytes, or is gone.
    """

    def __init__(self, path: Path, life: Life) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _LIFE.size)  # a full disk is told here, by an error
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
    """Return what a job's process recorded; a new life if it never ran."""
    try:
        with open(path, "rb", opener=open_plain) as file:
            restarts_and_more = _LIFE.unpack(file.read(_LIFE.size))
    except (OSError, struct.error):
        return Life()
    is_running, *counts = restarts_and_more
    return Life(bool(is_running), *(max(0, count) for count in counts))
