"""Messages that were not of the protocol: counted, and a few lines about them in the log."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from ..errors import RemoteProtocolError

_logger = logging.getLogger(__name__)

COMPLAINTS_PER_MINUTE: Final = 10


class Complaints:
    """Owned by the frontend."""

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self.count = 0
        self._written: deque[float] = deque()  # when

    def add(self, who: str, error: RemoteProtocolError) -> None:
        """At most COMPLAINTS_PER_MINUTE lines, whatever is sent. ``who``: for the log."""
        self.count += 1
        now_ms = self._now_ms()
        while self._written and now_ms - self._written[0] > 60_000:
            self._written.popleft()
        if len(self._written) < COMPLAINTS_PER_MINUTE:
            self._written.append(now_ms)
            cause = error.message[:200]
            _logger.warning("refused from=%s malformed=%d cause=%r", who, self.count, cause)
