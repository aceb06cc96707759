"""Connections of unknown clients: limits on their number and on the memory that they occupy.

A connection *holds* the received part of an incomplete message. The limits are:

1. Without a session, a connection may hold SESSIONLESS_BYTES, must say hello within HELLO_S, and
   may send few other messages before that.
2. With a session, it may hold ``client_bytes``. All connections together may hold ``total_bytes``;
   over that, the largest ones of the tenant that holds most are closed first.
3. If a new connection exceeds ``max_count`` and several wait to say hello, the one that waited
   longest is closed. If a hello exceeds it, the tenant with most sessions loses its newest one.

A client whose connection was closed connects again.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import Final

_logger = logging.getLogger(__name__)

HELLO_S: Final = 30.0
SESSIONLESS_BYTES: Final = 16 << 10  # greeting, keys, hello and a few pings need a tenth of this
SESSIONLESS_MESSAGES: Final = 32  # number of pings and invalid messages, which cost the loop time
SESSIONLESS_MESSAGES_PER_S: Final = 10
ROUND_S: Final = 0.1  # every connection is checked once in this time
SLICE: Final = 64  # connections checked at once; more would delay requests


class LimitedConnection:
    """Accepted connection. A subclass reports the bytes that it holds, and shuts it down."""

    since_s = 0.0
    tenant = ""  # empty without a session
    has_session = False
    is_ended = False  # it was hung up, and is closed soon
    message_count = 0  # messages before its session
    last_held_bytes = 0  # held bytes at the last check

    def held_bytes(self, now_s: float) -> int:
        """Return the bytes of an incomplete message; below 0: the connection has ended."""
        raise NotImplementedError

    def hang_up(self) -> None:
        """Shut the connection down, so that both sides soon read its end."""
        raise NotImplementedError


class ConnectionLimits:
    """All connections at one port."""

    def __init__(self, *, max_count: int, client_bytes: int, total_bytes: int) -> None:
        """Set the limits: the number of connections, and the bytes held for one and for all."""
        self._max_count = max_count
        self._client_bytes = client_bytes
        self._total_bytes = total_bytes
        self._connections: dict[LimitedConnection, None] = {}  # in order of arrival
        self._waiting: dict[LimitedConnection, None] = {}  # connections without a session
        self._count = 0  # connections that were not hung up
        self._sessions: Counter[str] = Counter()  # tenant -> number of its sessions
        self._round: list[LimitedConnection] = []  # connections still to be checked
        self.next_at_s = math.inf  # time of the next check by ``tick``
        self.hung_up: Counter[str] = Counter()  # connections that we hung up, by cause

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, one: LimitedConnection, now_s: float) -> None:
        one.since_s = now_s
        if not self._connections:
            self.next_at_s = now_s + ROUND_S
        self._connections[one] = self._waiting[one] = None
        self._count += 1
        if self._count > self._max_count and len(self._waiting) > 1:
            self.end(next(iter(self._waiting)), "too many connections")

    def took(self, one: LimitedConnection, now_s: float) -> bool:
        """Count a whole message of a connection. False: ignore the message."""
        if not one.is_ended and not one.has_session:
            one.message_count += 1
            allowed = SESSIONLESS_MESSAGES + SESSIONLESS_MESSAGES_PER_S * (now_s - one.since_s)
            if one.message_count > allowed:
                self.end(one, "too many messages without a session")
        return not one.is_ended

    def on_hello(self, one: LimitedConnection, tenant: str) -> None:
        """Record that the connection has a session of this tenant now."""
        if one not in self._waiting:
            return
        del self._waiting[one]
        one.has_session, one.tenant = True, tenant
        self._sessions[tenant] += 1
        if self._count > self._max_count:
            most = self._sessions.most_common(1)[0][0]
            newest = next(
                other
                for other in reversed(self._connections)
                if other.has_session and not other.is_ended and other.tenant == most
            )
            self.end(newest, "too many connections")

    def remove(self, one: LimitedConnection) -> None:
        """Remove an ended connection. Idempotent."""
        if one in self._connections:
            self._leave(one)
            del self._connections[one]

    def tick(self, now_s: float) -> None:
        """Check the next few connections when it is time."""
        if now_s < self.next_at_s:
            return
        if not self._round:
            self._shed()
            self._round = list(self._connections)
        for _ in range(min(SLICE, len(self._round))):
            self._poll(self._round.pop(), now_s)
        wait_s = ROUND_S / (1 + len(self._connections) // SLICE) if self._connections else math.inf
        self.next_at_s = now_s + wait_s

    def _poll(self, one: LimitedConnection, now_s: float) -> None:
        if one not in self._connections or one.is_ended:
            return
        one.last_held_bytes = one.held_bytes(now_s)
        if one.last_held_bytes < 0:
            self.remove(one)
        elif one.last_held_bytes > (self._client_bytes if one.has_session else SESSIONLESS_BYTES):
            self.end(one, "unfinished messages")
        elif not one.has_session and now_s - one.since_s > HELLO_S:
            self.end(one, "no hello")

    def _shed(self) -> None:
        """End the largest connections of the tenant that holds most, until the limit is met."""
        held_bytes = Counter[str]()
        for one in self._connections:
            held_bytes[one.tenant] += one.last_held_bytes
        while held_bytes.total() > self._total_bytes:
            most = held_bytes.most_common(1)[0][0]
            ours = (one for one in self._connections if one.tenant == most)
            largest = max(ours, key=lambda one: one.last_held_bytes)
            held_bytes[most] -= largest.last_held_bytes
            self.end(largest, "unfinished messages")

    def end(self, one: LimitedConnection, cause: str) -> None:
        """Hang the connection up; messages that it has sent already are ignored."""
        if one.is_ended:
            return
        held_bytes = one.last_held_bytes
        self._leave(one)
        one.is_ended = True
        one.hang_up()
        self.hung_up[cause] += 1
        if self.hung_up[cause].bit_count() == 1:  # log only the 1st, 2nd, 4th, 8th…
            _logger.warning(
                "hung up cause=%r held=%d times=%d", cause, held_bytes, self.hung_up[cause]
            )

    def _leave(self, one: LimitedConnection) -> None:
        """Stop counting the connection."""
        if not one.is_ended:
            one.last_held_bytes = 0
            self._count -= 1
            self._sessions[one.tenant] -= one.has_session
            self._waiting.pop(one, None)
