"""Large payloads into the request pool, off the loop: a decision never waits for a memcpy."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

INLINE_COPY_BYTES: Final = 1 << 20  # about 0.1 ms: what a hop to another thread and back costs

Piece = tuple[int, Any]
"""Where in the pool (bytes), and a buffer of what belongs there."""


def copy_pieces(pool: np.ndarray[Any, Any], pieces: Sequence[Piece]) -> None:
    """Copy each buffer to its place; numpy releases the interpreter lock meanwhile."""
    for offset_bytes, data in pieces:
        source = np.frombuffer(data, dtype=np.uint8)
        np.copyto(pool[offset_bytes : offset_bytes + len(source)], source)


class Copier:
    """One thread that copies what it is given, in order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pipeswitch-copy", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish what is queued, join."""
        self._queue.put(None)
        self._thread.join()

    def copy(
        self,
        pool: np.ndarray[Any, Any],
        pieces: Sequence[Piece],
        on_copied: Callable[[], None],
    ) -> None:
        """Never blocks; ``on_copied`` is called on the copier's thread."""

        def work() -> None:
            copy_pieces(pool, pieces)
            on_copied()

        self._queue.put(work)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # or the payload lives until the next one
