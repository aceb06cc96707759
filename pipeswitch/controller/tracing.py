"""``trace``: a timeline is decoded beside the loop, which 30,000 spans would hold for 0.2 s."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import msgspec

from ..scheduler.events import Answer, Token
from ..wire.frames import pack_dict
from .timeline import Timeline


class Tracer:
    """One thread, started by the first question; it answers in order."""

    def __init__(self, timeline: Timeline, answer: Callable[[Answer], None]) -> None:
        """``answer`` may be called from any thread."""
        self._timeline = timeline
        self._answer = answer
        self._queue: queue.SimpleQueue[tuple[Token, float] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, token: Token, since_ms: float) -> None:
        """Never blocks; ``since_ms`` as of ``Timeline.chrome_trace``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pipeswitch-trace", daemon=True)
            self._thread.start()
        self._queue.put((token, since_ms))

    def stop(self) -> None:
        """Answer what is asked, join."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (asked := self._queue.get()) is not None:
            token, since_ms = asked
            trace = pack_dict(self._timeline.chrome_trace(since_ms))
            self._answer(Answer(token=token, body={"trace": msgspec.Raw(trace)}))
