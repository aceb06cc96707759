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


class Lane:
    """Thread that does work in order and survives failing work."""

    def __init__(self, name: str) -> None:
        """``name``: of the thread, which begins with the first work."""
        self._queue: queue.SimpleQueue[tuple[Work, Failed] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def stop(self) -> None:
        """Finish what is queued, join."""
        if self._thread.ident is not None:
            self._queue.put(None)
            self._thread.join()

    def put(self, work: Work, failed: Failed = lambda _: None) -> None:
        """Queue work; never blocks. One thread calls this.

        Args:
            failed: called with the error if the work fails, on the lane's thread; or on the
            caller's if the system has no room for that thread.
        """
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError as error:
                failed(_as_ours(error))
                return
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
    return ServerUnavailable("the server could not do this now", hint="its log says why; try again")
