"""``trace``: a timeline is decoded beside the loop, which 30,000 spans would hold for 0.2 s."""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec

from ..lane import Lane
from ..scheduler.events import Answer, Token
from ..scheduler.timeline import Timeline
from ..wire.frames import pack_dict


class Tracer:
    """A lane, started by the first question."""

    def __init__(self, timeline: Timeline, answer: Callable[[Answer], None]) -> None:
        """``answer`` may be called from any thread."""
        self._timeline = timeline
        self._answer = answer
        self._lane = Lane("pipeswitch-trace")

    def ask(self, token: Token, since_ms: float) -> None:
        """Never blocks; ``since_ms`` as of ``Timeline.chrome_trace``."""
        if not self._lane.is_started:
            self._lane.start()
        self._lane.put(functools.partial(self._tell, token, since_ms))

    def stop(self) -> None:
        """Answer what is asked, join."""
        if self._lane.is_started:
            self._lane.stop()

    def _tell(self, token: Token, since_ms: float) -> None:
        trace = pack_dict(self._timeline.chrome_trace(since_ms))
        self._answer(Answer(token=token, body={"trace": msgspec.Raw(trace)}))
