"""Who is connected, and the bytes on their way out.

Owned by the frontend. A client is a session (128 random bits) on one connection; an answer goes
only to both together.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..roles import Standing
from ..scheduler.events import Token


def _nothing() -> None:
    """For messages that hold no room and settle no request."""


Outcome = Literal["ok", "error", "undeliverable"]


@dataclass(kw_only=True)
class Counters:
    """``accepted = ok + error + undeliverable + in_flight``, at every moment (invariant I1)."""

    accepted: int = 0
    ok: int = 0
    error: int = 0
    undeliverable: int = 0
    rejected: int = 0  # refused before acceptance; not part of the sum

    @property
    def in_flight(self) -> int:
        return self.accepted - self.ok - self.error - self.undeliverable

    def settle(self, outcome: Outcome) -> None:
        """One accepted request got its final answer."""
        setattr(self, outcome, getattr(self, outcome) + 1)

    def as_dict(self) -> dict[str, int]:
        """As ``stats`` shows them."""
        return {
            "accepted": self.accepted,
            "ok": self.ok,
            "error": self.error,
            "undeliverable": self.undeliverable,
            "in_flight": self.in_flight,
            "rejected": self.rejected,
        }


@dataclass(kw_only=True, eq=False)
class Outgoing:
    """A message for one client, until the kernel has taken all of it."""

    frames: list[Any]
    since_ms: float
    on_sent: Callable[[], None] = _nothing
    on_lost: Callable[[], None] = _nothing
    on_released: Callable[[], None] = _nothing  # nothing points at its pool bytes any more
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.size_bytes = sum(map(len, self.frames))


class Peer(Protocol):
    """A client's connection."""

    @property
    def wants_turn(self) -> bool:
        """It would go on without waiting."""

    def transmit(self, outgoing: Outgoing) -> bool:
        """Send a message, or go on with it; False: not all has left, call again with the same.

        Raises:
            OSError: it is gone.
        """

    def close(self) -> None: ...


@dataclass(kw_only=True, eq=False)
class Client:
    """One session on one connection."""

    peer: Peer
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    standing: Standing
    requests: dict[str, Token] = field(default_factory=dict)  # that wait for their final answer
    readings: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of events: their topics
    backlog: deque[Outgoing] = field(default_factory=deque)
    unsent_bytes: int = 0
    upload_chunks: int = 0
    counts: Counters = field(default_factory=Counters)  # of this session's requests
    is_gone: bool = False
