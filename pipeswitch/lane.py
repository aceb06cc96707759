"""One thread with a queue: work that would hold up the loop, done in order beside it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from .errors import PipeSwitchError, ServerUnavailable

log = logging.getLogger(__name__)

Work = Callable[[], object]
Failed = Callable[[PipeSwitchError], object]


def _nobody_waits(_: PipeSwitchError) -> None:
    """The log has the error."""


class Lane:
    """A thread that does its work in order and outlives any of it that fails."""

    def __init__(self, name: str) -> None:
        """``name``: of the thread."""
        self._queue: queue.SimpleQueue[tuple[Work, Failed] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, before or after the first ``put``.

        Raises:
            RuntimeError: the system has no room for another thread.
        """
        self._thread.start()

    @property
    def is_started(self) -> bool:
        return self._thread.ident is not None

    def stop(self) -> None:
        """Finish what is queued, join."""
        self._queue.put(None)
        self._thread.join()

    def put(self, work: Work, failed: Failed = _nobody_waits) -> None:
        """Queue work; never blocks. Both are called on the lane's thread.

        Args:
            failed: answers whoever waits for the work, with the error that it raised.
        """
        self._queue.put((work, failed))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, failed = item
            try:
                work()
            except BaseException as error:  # whatever it is, others wait for this thread
                log.exception("thread=%s", self._thread.name)
                failed(_as_ours(error))
            del item, work, failed  # or what they hold, perhaps a payload, lives until the next one


def _as_ours(error: BaseException) -> PipeSwitchError:
    if isinstance(error, PipeSwitchError):
        return error
    what = "no memory is left" if isinstance(error, MemoryError) else "internal error"
    return ServerUnavailable(f"the server could not do this: {what}", hint="see its log; try again")
