"""Connected clients, and the messages that are being sent to them.

Owned by the frontend. A client is a session (128 random bits) on one connection; an answer goes
only to this session on this connection.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from ...base.roles import Principal
from ...scheduler.state.events import Token

Outcome = Literal["ok", "error", "undeliverable"]


@dataclass(kw_only=True)
class Counters:
    """``accepted = ok + error + undeliverable + in_flight``, at every moment (invariant I1)."""

    accepted: int = 0
    ok: int = 0
    error: int = 0
    queue_full: int = 0  # part of ``error``: requests that ended with QueueFull
    undeliverable: int = 0
    rejected: int = 0  # refused before acceptance; not part of the sum

    @property
    def in_flight(self) -> int:
        return self.accepted - self.ok - self.error - self.undeliverable

    def as_dict(self) -> dict[str, int]:
        """Return the counters' part of ``stats``."""
        return {**asdict(self), "in_flight": self.in_flight}


class Outgoing(msgspec.Struct, kw_only=True, eq=False):
    """A message for one client, until the kernel has taken all of it."""

    frames: list[Any]
    on_end: Callable[[bool], None] | None = None  # gets True when the message left, False if lost
    size_bytes: int = 0  # set by the send queue
    since_ms: float = 0.0  # set when it begins to wait in the send queue


class Peer(Protocol):
    """A client's connection."""

    @property
    def needs_poll(self) -> bool:
        """True if the peer has work that can be done without waiting for its socket."""

    def transmit(self, outgoing: Outgoing) -> bool:
        """Send a message, or the rest of it. False: call again with the same message for its rest.

        Raises:
            OSError: the connection is gone.
        """

    def close(self) -> None: ...


@dataclass(kw_only=True, eq=False)
class Session:
    """One session on one connection."""

    peer: Peer
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    principal: Principal
    requests: dict[str, Token] = field(default_factory=dict)  # request id -> token, if unanswered
    # request id -> topics of its event subscription
    subscriptions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    backlog: deque[Outgoing] = field(default_factory=deque)  # messages that are next
    long_answers: deque[Outgoing] = field(default_factory=deque)  # sent after ``backlog``
    sending: deque[Outgoing] | None = None  # the one of both whose first message has begun
    unsent_bytes: int = 0
    upload_chunks: int = 0
    counts: Counters = field(default_factory=Counters)  # counters of this session's requests
    is_gone: bool = False
