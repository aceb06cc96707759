"""Who is connected, and the bytes on their way out.

Owned by the frontend. A client is a session (128 random bits) on one connection; an answer goes
only to the (routing id, session) pair last seen, because a routing id alone proves nothing.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import zmq

from ..wire.sockets import DONTWAIT, MORE, send_frames
from .connections import connection_inode, socket_inode
from .listeners import Door

if TYPE_CHECKING:
    from .requests import Pending

ZERO_COPY_BYTES: Final = 64 << 10  # below, a copy is cheaper than tracking the message
SLOW_CLIENT_MS: Final = 30_000.0  # a reply nobody reads for this long: the client is dropped
RELEASE_WAIT_MS: Final = 20.0  # for a reply on its way out, before its bytes are missed
FD_SETTLE_MS: Final = 1_000.0  # libzmq reports a disconnect shortly before it closes the socket


def _nothing() -> None:
    """For messages that hold no room and settle no request."""


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


@dataclass(kw_only=True, eq=False)
class Client:
    """One session on one connection."""

    door: Door
    routing_id: bytes
    session: str
    fd: int
    inode: int  # of the connection's socket: tells a reused descriptor number from this one
    requests: dict[str, Pending] = field(default_factory=dict)
    backlog: deque[Outgoing] = field(default_factory=deque)
    unsent_bytes: int = 0
    upload_chunks: int = 0
    user_id: str = ""  # the key it came in with; empty where no key is asked for
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

    def greet(
        self, door: Door, routing_id: bytes, fd: int, user_id: str = ""
    ) -> tuple[Client, Client | None]:
        """A new session for this connection, and the one it replaces (the caller drops it)."""
        replaced = self._by_route.get((door.address, routing_id))
        client = Client(
            door=door,
            routing_id=routing_id,
            session=secrets.token_hex(16),
            fd=fd,
            inode=connection_inode(fd, door.local),
            user_id=user_id,
        )
        self._by_session[client.session] = client
        self._by_fd.setdefault((door.address, fd), []).append(client)
        self._by_route[door.address, routing_id] = client
        return client, replaced

    def find(self, door: Door, routing_id: bytes, session: str, user_id: str = "") -> Client | None:
        """The client, only when session, connection and key are the ones last seen together."""
        client = self._by_session.get(session)
        if client is None or client.routing_id != routing_id or client.door is not door:
            return None
        return client if client.user_id == user_id else None

    def remove(self, client: Client) -> None:
        """Forget it; late answers to it are undeliverable from now on."""
        client.is_gone = True
        self._by_session.pop(client.session, None)
        self._suspects.pop(client, None)
        place = (client.door.address, client.fd)
        here = self._by_fd.get(place, [])
        if client in here:
            here.remove(client)
            if not here:
                del self._by_fd[place]
        route = (client.door.address, client.routing_id)
        if self._by_route.get(route) is client:
            del self._by_route[route]

    def disconnected(self, door: Door, fd: int, now_ms: float) -> list[Client]:
        """A connection ended: its clients that are certainly gone.

        Descriptor numbers are reused, so the number alone does not decide:
        1. the number means another socket now, or none: the client is gone;
        2. it still means the client's socket: either libzmq has not closed it yet, or the report
           is about an earlier connection. ``settle_suspects`` looks again.
        """
        gone = []
        for client in self._by_fd.get((door.address, fd), ()):
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


class Outbox:
    """Sends without ever blocking; what a client does not read waits under its byte budget."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._tracked: deque[tuple[zmq.MessageTracker, Client, Outgoing]] = deque()
        self._backlogged: set[Client] = set()

    @property
    def is_idle(self) -> bool:
        return not self._tracked and not self._backlogged

    def send(self, client: Client, outgoing: Outgoing, now_ms: float) -> bool:
        """Hand a message to libzmq, or keep it. False: over budget or gone, drop the client."""
        client.backlog.append(outgoing)
        client.unsent_bytes += outgoing.size_bytes
        return self._flush(client) and self._is_fast_enough(client, now_ms)

    def _is_fast_enough(self, client: Client, now_ms: float) -> bool:
        is_stuck = client.backlog and now_ms - client.backlog[0].since_ms > SLOW_CLIENT_MS
        return client.unsent_bytes <= self._budget_bytes and not is_stuck

    def _flush(self, client: Client) -> bool:
        """Send in order until the client's queue is full; False: its connection is gone."""
        while client.backlog:
            outgoing = client.backlog[0]
            try:
                tracker = self._transmit(client, outgoing)
            except zmq.Again:
                self._backlogged.add(client)
                return True
            except zmq.ZMQError:  # EHOSTUNREACH: ROUTER_MANDATORY tells us
                return False
            client.backlog.popleft()
            if tracker is not None:
                self._tracked.append((tracker, client, outgoing))
            else:
                client.unsent_bytes -= outgoing.size_bytes
                outgoing.on_sent()
                outgoing.on_released()
        self._backlogged.discard(client)
        return True

    @staticmethod
    def _transmit(client: Client, outgoing: Outgoing) -> zmq.MessageTracker | None:
        """All frames of a message; only the first part can be refused (libzmq router.cpp)."""
        router = client.door.router
        router.send(client.routing_id, MORE | DONTWAIT)
        is_tracked = outgoing.is_zero_copy
        tracker = send_frames(
            router, outgoing.frames, DONTWAIT, copy=not is_tracked, track=is_tracked
        )
        return tracker if is_tracked else None

    def drop(self, client: Client) -> None:
        """The client is gone: what it did not take is lost."""
        self._backlogged.discard(client)
        if any(owner is client for _, owner, _ in self._tracked):
            self.release(RELEASE_WAIT_MS)  # it may have read its reply and left at once
        for _, owner, outgoing in self._tracked:
            if owner is client and not outgoing.is_lost:
                outgoing.is_lost = True
                outgoing.on_lost()
        while client.backlog:
            outgoing = client.backlog.popleft()
            client.unsent_bytes -= outgoing.size_bytes
            outgoing.on_lost()
            outgoing.on_released()

    def release(self, wait_ms: float = 0.0) -> None:
        """Give back what libzmq has sent; ``wait_ms`` grants the oldest message that much time.

        libzmq reports a sent message a little after its reader has it, so a client that asks
        again at once may find its own last reply still in the pool.
        """
        if wait_ms and self._tracked:
            with contextlib.suppress(zmq.NotDone):
                self._tracked[0][0].wait(wait_ms / 1000)
        for _ in range(len(self._tracked)):
            tracker, client, outgoing = self._tracked.popleft()
            if not tracker.done:
                self._tracked.append((tracker, client, outgoing))
                continue
            client.unsent_bytes -= outgoing.size_bytes
            if not outgoing.is_lost:
                outgoing.on_sent()
            outgoing.on_released()

    def sweep(self, now_ms: float) -> list[Client]:
        """Release what was sent, retry what was refused; the clients that are to be dropped."""
        self.release()
        slow = {c for _, c, out in self._tracked if now_ms - out.since_ms > SLOW_CLIENT_MS}
        return [
            client
            for client in [*self._backlogged, *slow]
            if client in slow or not (self._flush(client) and self._is_fast_enough(client, now_ms))
        ]
