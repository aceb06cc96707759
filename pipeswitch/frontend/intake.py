"""What comes in by the listeners: whole messages, and the news of their connections.

Owned by the frontend. Each connection that is not the owner's is told to ``Connections``, which
judges it; libzmq's news of it may come after its first message, so a message is news as well.
All is taken in bursts: neither a storm of connections nor an endless message holds up the others.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import zmq

from ..config import ServerConfig
from ..errors import PermissionDenied, RemoteProtocolError
from ..roles import Standing
from ..wire.frames import MAX_TENSORS
from ..wire.sockets import DONTWAIT, MORE, is_readable, next_events
from ..wire.stream import Message
from .clients import Client, ClientTable, Origin
from .connections import Connections, wire_bytes
from .listeners import ACCEPTED, Listener, Listeners
from .peers import StreamPeer

_logger = logging.getLogger(__name__)

BURST_EVENTS: Final = 32  # of connections, from one listener: a third of a millisecond
BURST_PARTS: Final = 1_000  # of one message: libzmq bounds neither their number nor their memory
BURST_MESSAGES: Final = 16  # from one listener before the other and the answers get their turn
COMPLAINTS_PER_MINUTE: Final = 10
KEYS_LOOK_MS: Final = 1000.0  # between looks at the allow-list, for clients that are in already
_SRCFD: Final = int(zmq.SRCFD)


class Intake:
    """Connections and messages of both listeners, within their limits."""

    def __init__(
        self, config: ServerConfig, clients: ClientTable, now_ms: Callable[[], float]
    ) -> None:
        self._clients = clients
        self._now_ms = now_ms
        self.connections = Connections(
            max_count=config.max_connections,
            client_bytes=config.pool_bytes,  # more than its requests could ever take
            total_bytes=2 * config.pool_bytes,
        )
        self.malformed_count = 0  # messages that were not of the protocol
        self._complaints: deque[float] = deque()  # when they were written
        self._overlong: dict[zmq.Socket[bytes], list[zmq.Frame]] = {}  # still being read
        self._keys_look_at_ms = 0.0

    # ---- connections ---------------------------------------------------------------------------

    def gone(self, listeners: Listeners, stirred: Container[zmq.Socket[bytes]]) -> list[Client]:
        """Read the news of connections, where there may be any; clients whose own has ended."""
        now_ms = self._now_ms()
        gone = self._clients.settle_suspects(now_ms) if self._clients.has_suspects else []
        for listener in listeners.all:
            if listener.monitor is None or listener.monitor not in stirred:
                continue
            for event, fd in next_events(listener.monitor, BURST_EVENTS):
                if event != ACCEPTED:
                    gone += self._clients.disconnected(listener, fd, now_ms)
                self._note(listener, event, fd, now_ms)
        return gone

    def revoked(self, listeners: Listeners) -> list[Client]:
        """Look at connections and keys when it is time; clients whose key is not admitted now.

        The others have from now on the roles that their keys have now.
        """
        if not self.connections:
            return []
        now_ms = self._now_ms()
        self.connections.tick(now_ms / 1000)
        if listeners.tcp.allowed is None or now_ms <= self._keys_look_at_ms:
            return []
        self._keys_look_at_ms = now_ms + KEYS_LOOK_MS
        standings = listeners.tcp.allowed.standings()
        revoked = []
        for client in [client for client in self._clients.all() if client.user_id]:
            client.standing = client.listener.standing(client.user_id)
            if client.user_id.encode() not in standings:
                revoked.append(client)
        return revoked

    def _note(self, listener: Listener, event: int, fd: int, now_ms: float) -> None:
        """A connection came or went; the owner's own are not limited."""
        if listener.is_owner:
            return
        if event == ACCEPTED:
            self.connections.accepted(
                fd,
                int(listener.local),
                now_ms / 1000,
                is_keyed=listener.allowed is not None,
            )
        else:
            self.connections.disconnected(fd)

    def _hang_up(self, listener: Listener, frame: zmq.Frame, cause: str) -> None:
        """End the connection this frame came from; the owner's own are not judged."""
        fd = -1 if listener.is_owner else _descriptor(frame)
        if fd >= 0:
            if not self.connections.knows(fd):
                self._note(listener, ACCEPTED, fd, self._now_ms())
            self.connections.end(fd, cause)

    def welcome(self, peer: StreamPeer) -> None:
        """A connection came without libzmq."""
        self._note(peer.listener, ACCEPTED, peer.fileno(), self._now_ms())

    def part(self, peer: StreamPeer) -> None:
        """It ends."""
        if not peer.listener.is_owner:
            self.connections.disconnected(peer.fileno())

    def hears(self, peer: StreamPeer, message: Message) -> bool:
        """Whether to look at a message; not while its connection is being hung up."""
        now_s = self._now_ms() / 1000
        return peer.listener.is_owner or self.connections.took(
            peer.fileno(), message.size_bytes, now_s
        )

    # ---- messages ------------------------------------------------------------------------------

    def messages(self, listener: Listener) -> Iterator[list[zmq.Frame]]:
        """Whole messages that wait at a listener: routing id and parts."""
        router = listener.router
        for _ in range(BURST_MESSAGES):
            if router is None or not is_readable(router):
                return
            begun = self._overlong.pop(router, None)
            frames = begun or [_next_frame(router)]
            for _ in range(BURST_PARTS):
                if not frames[-1].more:
                    break
                frame = _next_frame(router)  # a message comes whole
                if len(frames) < MAX_TENSORS + 4:
                    frames.append(frame)
                else:
                    frames[-1] = frame  # too many: only the last one's `more` matters now
            if frames[-1].more:
                self._overlong[router] = frames  # the others get their turn
                if begun is None:  # once: its descriptor's number may be another's by and by
                    self._hang_up(listener, frames[0], "too many parts")
                return
            yield frames

    def admits(self, listener: Listener, frames: Sequence[zmq.Frame]) -> bool:
        """Whether to look at a message; not while its connection is being hung up.

        Raises:
            RemoteProtocolError: libzmq does not know its connection.
        """
        if listener.is_owner:
            return True
        fd = _known_descriptor(frames[0])
        now_ms = self._now_ms()
        if not self.connections.knows(fd):
            self._note(listener, ACCEPTED, fd, now_ms)
        size_bytes = wire_bytes(frames[1:], self.connections.is_keyed(fd))
        return self.connections.took(fd, size_bytes, now_ms / 1000) or not self.connections.knows(
            fd
        )

    def greet(self, origin: Origin) -> tuple[Client, Client | None]:
        """A new session for a connection, and the one it replaces.

        Raises:
            RemoteProtocolError, PermissionDenied: the connection, or its key, is not known.
        """
        client, replaced = self._clients.greet(origin)
        if not origin.listener.is_owner:
            self.connections.greeted(client.fd, client.standing.tenant)
        if isinstance(origin, StreamPeer):
            origin.greeted()
        return client, replaced

    def sender(self, origin: Origin, session: str) -> Client:
        """Whose message it is.

        Raises:
            RemoteProtocolError: this session did not come by this connection.
            PermissionDenied: its key is not known.
        """
        client = self._clients.find(origin, session)
        if client is None:
            raise RemoteProtocolError(
                "this session is not known here: say hello first", reason="unknown_session"
            )
        return client

    def complain(self, listener: Listener, error: RemoteProtocolError) -> None:
        """Count a malformed message; at most COMPLAINTS_PER_MINUTE lines, whatever is sent."""
        self.malformed_count += 1
        now_ms = self._now_ms()
        while self._complaints and now_ms - self._complaints[0] > 60_000:
            self._complaints.popleft()
        if len(self._complaints) < COMPLAINTS_PER_MINUTE:
            self._complaints.append(now_ms)
            _logger.warning(
                "refused listener=%s malformed=%d cause=%r",
                listener.address,
                self.malformed_count,
                error.message[:200],
            )


def _next_frame(router: zmq.Socket[bytes]) -> zmq.Frame:
    frame: zmq.Frame = router.recv(DONTWAIT, copy=False)
    return frame


def _descriptor(routing_frame: zmq.Frame) -> int:
    """Of the connection a message came by; -1 where libzmq does not know it.

    It knows for ZMTP 3 only. Bytes that do not begin as a greeting are taken for a peer of ZMTP 1,
    so any peer can send messages without one.
    """
    try:
        return int(routing_frame.get(_SRCFD))
    except zmq.ZMQError:
        return -1


def _known_descriptor(routing_frame: zmq.Frame) -> int:
    fd = _descriptor(routing_frame)
    if fd < 0:
        raise RemoteProtocolError("the peer speaks ZMTP 1 or 2, or none at all")
    return fd


@dataclass(slots=True)
class ZmqOrigin:
    """A connection of libzmq's, by the first frame of a message that came by it."""

    listener: Listener
    frame: zmq.Frame
    routing_id: bytes
    peer: None = None

    def standing(self) -> Standing:
        return self.listener.standing(self.user_id())

    def user_id(self) -> str:
        """
        Raises:
            PermissionDenied: libzmq does not say: it must not happen, and nothing is served then.
        """
        if self.listener.allowed is None:
            return ""
        try:
            return str(self.frame.get("User-Id"))
        except (zmq.ZMQError, KeyError):
            raise PermissionDenied("this connection has not proved a key") from None

    def descriptor(self) -> int:
        """
        Raises:
            RemoteProtocolError: libzmq does not know it.
        """
        return _known_descriptor(self.frame)

    def send_now(self, frames: list[Any]) -> None:
        router = self.listener.router
        if router is None:
            return
        with contextlib.suppress(zmq.ZMQError):
            router.send(self.routing_id, MORE | DONTWAIT)
            router.send_multipart(frames, DONTWAIT)
