"""Executor of one thread that does slow work in order, so that a loop need not wait for it."""

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


class WorkerThread(ThreadPoolExecutor):
    """Executor of one thread that reports an error to the function that came with the work."""

    _has_thread = False

    def __init__(self, name: str) -> None:
        """Set up; ``name`` is the prefix of the thread's name. The first work starts the thread."""
        super().__init__(1, name)

    def put(self, work: Work, failed: Failed = lambda _: None) -> None:
        """Queue work; never block.

        Args:
            failed: called with the error, on the executor's thread. If that thread cannot start or
                the executor is shut down, it is called on the caller's thread.
        """
        try:
            if not self._has_thread:
                self.submit(int)  # a test: if no thread can start, real work would stay queued
                self._has_thread = True
            self.submit(_perform, work, failed)
        except RuntimeError as error:
            failed(_as_ours(error))


def _perform(work: Work, failed: Failed) -> None:
    try:
        work()
    except BaseException as error:  # every error is caught, because others wait for this work
        thread = threading.current_thread()
        log.exception("thread=%s", thread.name)
        try:
            failed(_as_ours(error))
        except BaseException:  # log it, because nobody reads the future
            threading.excepthook(threading.ExceptHookArgs([*sys.exc_info(), thread]))


def _as_ours(error: BaseException) -> PipeSwitchError:
    if isinstance(error, PipeSwitchError):
        return error
    return ServerUnavailable("the server cannot do this now", hint="its log says why; try again")
