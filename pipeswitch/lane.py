"""One thread with a queue: work that would hold up the loop, done in order beside it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Lane:
    """Does what it is given, in order. Work answers by itself, and raises nothing."""

    def __init__(self, name: str) -> None:
        """``name``: of the thread."""
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Once, before or after the first ``put``."""
        self._thread.start()

    @property
    def is_started(self) -> bool:
        return self._thread.ident is not None

    def stop(self) -> None:
        """Finish what is queued, join."""
        self._queue.put(None)
        self._thread.join()

    def put(self, work: Callable[[], None]) -> None:
        """Never blocks; ``work`` is called on the lane's thread."""
        self._queue.put(work)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # or what it holds, perhaps a payload, lives until the next one
