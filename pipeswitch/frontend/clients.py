"""Who is connected, and the bytes on their way out.

Owned by the frontend. A client is a session (128 random bits) on one connection; an answer goes
only to the (routing id, session) pair last seen, because a routing id alone proves nothing.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from ..roles import Standing
from ..scheduler.events import Token
from .connections import connection_inode, socket_inode
from .listeners import Listener

ZERO_COPY_BYTES: Final = 64 << 10  # below, a copy is cheaper than tracking the message
FD_SETTLE_MS: Final = 1_000.0  # libzmq reports a disconnect shortly before it closes the socket


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
    """A message for one client, until libzmq has taken all of it."""

    frames: list[Any]
    since_ms: float
    on_sent: Callable[[], None] = _nothing
    on_lost: Callable[[], None] = _nothing
    on_released: Callable[[], None] = _nothing  # nothing points at its pool bytes any more
    is_zero_copy: bool = False
    is_lost: bool = False  # its client went while libzmq still had it
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.size_bytes = sum(map(len, self.frames))


class Peer(Protocol):
    """A client's connection that is not libzmq's."""

    @property
    def wants_turn(self) -> bool:
        """It would go on without waiting."""

    def transmit(self, outgoing: Outgoing) -> None:
        """Raises zmq.Again: not all has left; zmq.ZMQError: it is gone."""

    def close(self) -> None: ...


class Origin(Protocol):
    """Where a message came from: one connection, by either socket."""

    @property
    def listener(self) -> Listener: ...
    @property
    def routing_id(self) -> bytes: ...
    @property
    def peer(self) -> Peer | None:
        """None: it is libzmq's."""

    def standing(self) -> Standing:
        """With a session or without."""

    def user_id(self) -> str:
        """The key it proved to have; empty where none is asked for."""

    def descriptor(self) -> int:
        """Of its socket; -1: it is not libzmq's."""

    def send_now(self, frames: list[Any]) -> None:
        """Now or never: nothing is kept for a peer without a session."""


@dataclass(kw_only=True, eq=False)
class Client:
    """One session on one connection."""

    listener: Listener
    routing_id: bytes
    session: str
    standing: Standing
    fd: int
    inode: int  # of the connection's socket: tells a reused descriptor number from this one
    requests: dict[str, Token] = field(default_factory=dict)  # that wait for their final answer
    readings: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of events: their topics
    backlog: deque[Outgoing] = field(default_factory=deque)
    unsent_bytes: int = 0
    upload_chunks: int = 0
    counts: Counters = field(default_factory=Counters)  # of this session's requests
    user_id: str = ""  # the key it came in with; empty where no key is asked for
    peer: Peer | None = None  # its connection at the plain socket; None: libzmq has it
    is_gone: bool = False


class ClientTable:
    """Clients by session and by connection."""

    def __init__(self) -> None:
        self._by_session: dict[str, Client] = {}
        self._by_route: dict[tuple[str, bytes], Client] = {}
        self._by_fd: dict[tuple[str, int], list[Client]] = {}  # more than one: numbers are reused
        self._suspects: dict[Client, float] = {}  # its descriptor was reported; decided by then

    def __len__(self) -> int:
        return len(self._by_session)

    @property
    def has_suspects(self) -> bool:
        return bool(self._suspects)

    def all(self) -> list[Client]:
        return list(self._by_session.values())

    def greet(self, origin: Origin) -> tuple[Client, Client | None]:
        """A new session for this connection, and the one it replaces (the caller drops it)."""
        listener, routing_id, fd = origin.listener, origin.routing_id, origin.descriptor()
        replaced = self._by_route.get((listener.address, routing_id))
        client = Client(
            listener=listener,
            routing_id=routing_id,
            session=secrets.token_hex(16),
            standing=origin.standing(),
            fd=fd,
            inode=connection_inode(fd, listener.local),
            user_id=origin.user_id(),
            peer=origin.peer,
        )
        self._by_session[client.session] = client
        self._by_fd.setdefault((listener.address, fd), []).append(client)
        self._by_route[listener.address, routing_id] = client
        return client, replaced

    def find(self, origin: Origin, session: str) -> Client | None:
        """The client, only when session, connection and key are the ones last seen together."""
        client = self._by_session.get(session)
        if client is None or client.routing_id != origin.routing_id:
            return None
        is_same = client.listener is origin.listener and client.user_id == origin.user_id()
        return client if is_same else None

    def at(self, origin: Origin) -> Client | None:
        """Whose session is on this connection."""
        return self._by_route.get((origin.listener.address, origin.routing_id))

    def remove(self, client: Client) -> None:
        """Forget it; late answers to it are undeliverable from now on."""
        client.is_gone = True
        self._by_session.pop(client.session, None)
        self._suspects.pop(client, None)
        place = (client.listener.address, client.fd)
        here = self._by_fd.get(place, [])
        if client in here:
            here.remove(client)
            if not here:
                del self._by_fd[place]
        route = (client.listener.address, client.routing_id)
        if self._by_route.get(route) is client:
            del self._by_route[route]

    def disconnected(self, listener: Listener, fd: int, now_ms: float) -> list[Client]:
        """A connection ended: its clients that are certainly gone.

        Descriptor numbers are reused, so the number alone does not decide:
        1. the number means another socket now, or none: the client is gone;
        2. it still means the client's socket: either libzmq has not closed it yet, or the report
           is about an earlier connection. ``settle_suspects`` looks again.
        """
        gone = []
        for client in self._by_fd.get((listener.address, fd), ()):
            if socket_inode(fd) != client.inode:
                gone.append(client)
            else:
                self._suspects[client] = now_ms + FD_SETTLE_MS
        return gone

    def settle_suspects(self, now_ms: float) -> list[Client]:
        """Suspected clients whose socket is closed by now; cleared ones are forgotten."""
        gone = [c for c in self._suspects if socket_inode(c.fd) != c.inode]
        for client, until_ms in list(self._suspects.items()):
            if client in gone or now_ms > until_ms:
                del self._suspects[client]
        return gone
