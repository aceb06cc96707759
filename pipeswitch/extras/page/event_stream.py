"""The server's events for HTTP callers, as they happen (server-sent events).

Events are numbered and kept in one ring that all readers share. A reader is only a position in the
ring, so a slow reader costs nothing; it gets the number of the events that it missed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Final

from ...base.codec import encode_json
from ...base.errors import QueueFull

KEPT: Final = 2000  # number of events: a minute of training with a request every 50 ms
MAX_BATCH: Final = 100  # events sent at once
KEEP_ALIVE_S: Final = 15.0  # proxies close a connection that is silent for a minute
MAX_READERS: Final = 256
MAX_READERS_PER_ADDRESS: Final = 32


class EventLog:
    """Ring of events. Owned by the gateway's loop."""

    def __init__(self) -> None:
        self._name = secrets.token_hex(4)  # identifies this process and its event numbers
        self._events: deque[tuple[str, bytes]] = deque(maxlen=KEPT)  # topic and whole record
        self.next_number = 1
        self._news = asyncio.Event()
        self._readers: Counter[str] = Counter()

    def add(self, topic: str, body: dict[str, Any]) -> None:
        """Add an event for all readers."""
        data = encode_json({"topic": topic, **body})
        record = b"id: %s-%d\ndata: %s\n\n" % (self._name.encode(), self.next_number, data)
        self._events.append((topic, record))
        self.next_number += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    def read(self, peer: str, topics: Sequence[str] = (), last_id: str = "") -> Reader:
        """Return a reader of the events from now on, or after ``last_id`` (``Last-Event-ID``).

        Args:
            topics: prefixes of topics; empty: all topics.

        Raises:
            QueueFull: there are too many readers, of this address or in total.
        """
        self.enter(peer)
        name, _, number = last_id.partition("-")
        is_known = name == self._name and number.isdecimal() and len(number) < 20
        next_number = min(int(number) + 1, self.next_number) if is_known else self.next_number
        return Reader(
            self, peer, tuple(topics), next_number, has_gap=bool(last_id) and not is_known
        )

    def enter(self, peer: str) -> None:
        """Count one more reader of this address.

        Raises:
            QueueFull: there are too many readers, of this address or in total.
        """
        if self._readers.total() >= MAX_READERS or self._readers[peer] >= MAX_READERS_PER_ADDRESS:
            raise QueueFull(
                "too many streams are open",
                hint="close one: each page holds one",
                limit="event_streams",
            )
        self._readers[peer] += 1

    def leave(self, peer: str) -> None:
        self._readers[peer] -= 1
        if not self._readers[peer]:
            del self._readers[peer]

    @property
    def first(self) -> int:
        """Number of the oldest event in the ring."""
        return self.next_number - len(self._events)

    def records(self, number: int) -> list[tuple[str, bytes]]:
        """Return a batch of events from ``number`` on, which must still be in the ring."""
        start = number - self.first
        return [self._events[at] for at in range(start, min(start + MAX_BATCH, len(self._events)))]

    async def news(self, timeout_s: float) -> bool:
        """Wait for one more event; return False after the timeout."""
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


class Reader:
    """One caller's position in the ring; a ``BodyStream``."""

    def __init__(
        self, feed: EventLog, peer: str, topics: tuple[str, ...], number: int, *, has_gap: bool
    ) -> None:
        self._feed = feed
        self._peer = peer
        self._topics = topics
        self._number = number  # number of the next event to read
        self._has_gap = has_gap  # the caller's last event is from another process
        self._has_begun = False

    async def next(self) -> bytes:
        """Return a greeting; later the number of missed events and new events, or a keep-alive."""
        if not self._has_begun:
            self._has_begun = True
            gap = _dropped(None) if self._has_gap else b""
            return b"retry: 1000\n\n" + _named("hello", now_ms=time.monotonic() * 1000.0) + gap
        missed = max(0, self._feed.first - self._number)
        self._number += missed
        pieces = [_dropped(missed)] if missed else []
        has_more = bool(pieces) or self._number < self._feed.next_number
        if not has_more and not await self._feed.news(KEEP_ALIVE_S):
            return b": still here\n\n"
        records = self._feed.records(self._number)
        self._number += len(records)
        pieces += [
            record
            for topic, record in records
            if not self._topics or topic.startswith(self._topics)
        ]
        return b"".join(pieces) or b":\n\n"

    def close(self) -> None:
        self._feed.leave(self._peer)


def _named(name: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode_json(fields))


def _dropped(count: int | None) -> bytes:
    """Return the record that replaces missed events; ``count`` None: the number is unknown."""
    return _named("dropped", count=count)
