"""Executor of one thread for work that would hold up a loop, done in order beside it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from .errors import PipeSwitchError, ServerUnavailable

log = logging.getLogger(__name__)

Work = Callable[[], object]
Failed = Callable[[PipeSwitchError], object]


class Lane(ThreadPoolExecutor):
    """Executor of one thread, where an error in work reaches the owner of the work."""

    _has_thread = False

    def __init__(self, name: str) -> None:
        """``name``: prefix of the thread's name; the thread begins with the first work."""
        super().__init__(1, name)

    def put(self, work: Work, failed: Failed = lambda _: None) -> None:
        """Queue work; never block.

        Args:
            failed: called with the error if the work fails, on the lane's thread; or on the
            caller's if the system has no room for that thread or the lane is shut down.
        """
        try:
            if not self._has_thread:
                self.submit(int)  # what no thread could begin for stays queued, so let it be this
                self._has_thread = True
            self.submit(_perform, work, failed)
        except RuntimeError as error:
            failed(_as_ours(error))


def _perform(work: Work, failed: Failed) -> None:
    try:
        work()
    except BaseException as error:  # whatever it is, others wait for this work
        thread = threading.current_thread()
        log.exception("thread=%s", thread.name)
        try:
            failed(_as_ours(error))
        except BaseException:  # the future would keep it, and nobody looks there
            threading.excepthook(threading.ExceptHookArgs([*sys.exc_info(), thread]))


def _as_ours(error: BaseException) -> PipeSwitchError:
    if isinstance(error, PipeSwitchError):
        return error
    return ServerUnavailable("the server could not do this now", hint="its log says why; try again")
