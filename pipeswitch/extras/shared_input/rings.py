"""Controller's side of shared input: the rings, one for each group of jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable

from ...base.config import Config
from ...controller.server_memory import close_soon
from ...ipc.control_page import sealed_memfd
from .table import SHARERS_BYTE


class Rings:
    """Rings by group. A ring lives as long as one of its group's jobs runs."""

    def __init__(self, config: Config) -> None:
        self._size_bytes = config.jobs.shared_input_bytes & -4096
        self._rings: dict[str, int] = {}
        self._sharers: dict[str, int] = {}  # number of jobs in each group
        self._readers: dict[Hashable, str] = {}  # process -> the group whose ring it maps

    def of(self, group: str, reader: Hashable) -> int:
        """Return a group's ring for a process. Raises OSError if no descriptor is left."""
        if group not in self._rings:
            self._rings[group] = sealed_memfd("pipeswitch-input", self._size_bytes)
            self._write(group)
        self._readers[reader] = group
        return self._rings[group]

    def count(self, group: str, jobs: int) -> None:
        """Set how many jobs share a ring; 0 removes the group."""
        self._sharers[group] = jobs
        if group in self._rings:
            self._write(group)
        if not jobs:
            del self._sharers[group]

    def _write(self, group: str) -> None:
        word = self._sharers.get(group, 0).to_bytes(8, sys.byteorder)
        os.pwrite(self._rings[group], word, SHARERS_BYTE)

    def leave(self, reader: Hashable) -> None:
        group = self._readers.pop(reader, None)
        if group is not None and group not in self._readers.values():
            close_soon([self._rings.pop(group)])

    def close(self) -> None:
        for descriptor in self._rings.values():
            os.close(descriptor)
