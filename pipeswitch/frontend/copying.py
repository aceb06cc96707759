"""Copies of large payloads, off the loop: a decision never waits for a memcpy."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

INLINE_COPY_BYTES: Final = 1 << 20  # about 0.1 ms: what a hop to another thread and back costs


class Copier:
    """One thread that makes the copies it is given, in order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pipeswitch-copy", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish what is queued, join."""
        self._queue.put(None)
        self._thread.join()

    def put(self, copy: Callable[[], None]) -> None:
        """Never blocks; ``copy`` is called on the copier's thread, and tells when it is done."""
        self._queue.put(copy)

    def _run(self) -> None:
        while (copy := self._queue.get()) is not None:
            copy()
            del copy  # or the payload lives until the next one
