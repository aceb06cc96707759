"""Subscription to the server's events on a separate connection, so that replies are not delayed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..base.errors import Cancelled, PipeSwitchError
from .connection import Connection

KEPT_RECORDS: Final = 10_000  # maximum number of unread records; beyond it the oldest are dropped


class Subscription:
    """Queue of the records that were published since its creation. The reader closes it."""

    def __init__(
        self, connection: Connection, topics: Sequence[str], on_news: Callable[[], None]
    ) -> None:
        """Subscribe, and return when the server confirms. The subscription owns ``connection``.

        Args:
            on_news: called in another thread when a record arrives or the subscription ends.

        Raises:
            PipeSwitchError: no server answers, or it refuses the subscription.
        """
        self._connection = connection
        self._records: deque[dict[str, Any]] = deque(maxlen=KEPT_RECORDS)
        self._on_news = on_news
        self._changed = threading.Condition()
        self._is_made = self.is_over = False
        self._call = connection.request(
            "events", body={"topics": list(topics)}, on_progress=self._took, is_safe=True
        )
        self._call.add_done_callback(lambda _: self._ended())
        with self._changed:
            self._changed.wait_for(lambda: self._is_made or self.is_over)
        if not self._is_made:
            self.close()
            self._call.result()

    def _took(self, record: dict[str, Any]) -> None:
        with self._changed:
            self._is_made = True
            if record:  # an empty record confirms the subscription
                self._records.append(record)
            self._changed.notify_all()
        self._on_news()

    def _ended(self) -> None:
        with self._changed:
            self.is_over = True
            self._changed.notify_all()
        self._on_news()

    def take(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Wait for the next record; return None at the timeout or after ``close``.

        Raises:
            PipeSwitchError: the server is gone, or has ended the subscription.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._records or self.is_over, timeout_s)
            if self._records:
                return self._records.popleft()
        error = self._call.exception() if self.is_over else None
        if isinstance(error, PipeSwitchError) and not isinstance(error, Cancelled):
            raise error
        return None

    def close(self) -> None:
        """Close the connection and drop unread records. Idempotent; any thread may call it."""
        self._connection.close()
        with self._changed:
            self._records.clear()
