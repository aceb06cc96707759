"""The connections of the TCP listeners: how many there may be, and what they may make us hold.

libzmq's caps bound one frame and the count of whole messages, but not a message that never ends:
one connection took 600 MiB with all of them set. The kernel, however, counts what it received on
each. What was received and did not come out as a message is *held* for that one, and:

1. one without a session may have SESSIONLESS_BYTES held, must say hello within HELLO_S, and
   may send few other messages before;
2. one with a session may have ``client_bytes`` held, all together ``total_bytes``; over that the
   largest go first of the tenant that has most;
3. over ``max_count`` connections, the one that has waited longest to say hello goes while another
   waits too; over so many sessions, the newest of the tenant that has most.

Who goes is hung up; an honest client's library connects again by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final

_logger = logging.getLogger(__name__)

HELLO_S: Final = 30.0
SESSIONLESS_BYTES: Final = 16 << 10  # greeting, keys, hello and a few pings are a tenth of it
SESSIONLESS_MESSAGES: Final = 32  # pings and nonsense: they cost the loop time
SESSIONLESS_MESSAGES_PER_S: Final = 10
HEARTBEAT_BYTES_PER_S: Final = 128  # pings and pongs come out as no message
ROUND_S: Final = 0.1  # every connection is looked at once in this time
SLICE: Final = 64  # connections at a time: 0.2 ms, no request waits longer for it
TCP_INFO_BYTES: Final = 136
_RECEIVED: Final = Struct("=Q")  # tcpi_bytes_received
_RECEIVED_AT: Final = 128  # its offset in linux/tcp.h
_LONG_FRAME: Final = 255  # ZMTP: a longer frame's header has 9 bytes instead of 2
_CURVE_BYTES: Final = 33  # around a frame's content: MESSAGE, nonce, flags, MAC


@dataclass(kw_only=True, eq=False)
class Connection:
    """One accepted TCP connection."""

    fd: int
    inode: int  # tells it from a later connection with the same descriptor number
    since_s: float
    is_keyed: bool  # its frames are encrypted
    has_session: bool = False
    tenant: str = ""  # with a session
    is_ended: bool = False  # by us; libzmq still has messages of it, and closes it soon
    message_count: int = 0  # without a session
    taken_bytes: int = 0  # on the wire, of messages that came out
    held_bytes: int = 0  # when it was last looked at


def socket_inode(fd: int) -> int:
    """The identity of the socket behind a descriptor number; 0 when there is none."""
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return 0


def connection_inode(fd: int, local: int | str) -> int:
    """The identity of a listener's connection; 0 when the number means something else by now.

    A number is reused at once after its connection ends, and what is looked at here may be hung
    up later: it must be a connection of this listener, and never a worker's channel.

    Args:
        fd: a descriptor number that libzmq named.
        local: the listener's end: its TCP port, or its unix socket's path.
    """
    with contextlib.suppress(OSError), os.fdopen(os.dup(fd), "rb", buffering=0) as held:
        sock = socket.socket(fileno=held.fileno())
        try:
            name = sock.getsockname()
            if (name if isinstance(name, str) else name[1]) == local:
                return os.fstat(held.fileno()).st_ino
        finally:
            sock.detach()
    return 0


def hang_up(fd: int, inode: int) -> None:
    """End a connection. libzmq has no call for one peer, so its socket is shut down.

    The descriptor is duplicated first, then compared: it cannot become another socket between.
    """
    with contextlib.suppress(OSError):
        duplicate = os.dup(fd)
        if os.fstat(duplicate).st_ino != inode:
            os.close(duplicate)
            return
        with socket.socket(fileno=duplicate) as sock:
            sock.shutdown(socket.SHUT_RDWR)


def received_bytes(fd: int) -> int:
    """What the kernel has received on a TCP connection; 0 when it does not say."""
    sock = None
    try:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=fd)
        facts = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    except OSError:
        return 0
    finally:
        if sock is not None:
            sock.detach()  # it is libzmq's
    received: int = _RECEIVED.unpack_from(facts, _RECEIVED_AT)[0] if len(facts) > 128 else 0
    return received


def wire_bytes(frames: Sequence[Any], is_keyed: bool) -> int:
    """What a message of these frames was on the wire."""
    total = 0
    for frame in frames:
        size = len(frame) + (_CURVE_BYTES if is_keyed else 0)
        total += size + (9 if size > _LONG_FRAME else 2)
    return total


class Connections:
    """Accepted TCP connections; owned by the frontend."""

    def __init__(self, *, max_count: int, client_bytes: int, total_bytes: int) -> None:
        """Limits: connections at one port; bytes held for one client, and for all of them."""
        self._max_count = max_count
        self._client_bytes = client_bytes
        self._total_bytes = total_bytes
        self._connections: dict[int, Connection] = {}  # by descriptor number
        # Of them, clients without a session; oldest first.
        self._waiting: dict[int, Connection] = {}
        self._count = 0  # of living ones
        self._sessions: Counter[str] = Counter()  # living ones, by tenant
        self._round: list[Connection] = []  # still to be looked at
        self._next_at_s = 0.0
        self.hung_up: Counter[str] = Counter()  # by us, and why

    def __len__(self) -> int:
        """Connections, those that are being ended too."""
        return len(self._connections)

    def accepted(
        self,
        fd: int,
        port: int,
        now_s: float,
        *,
        is_keyed: bool = False,
    ) -> None:
        """A connection to ``port`` was accepted, or is heard of first by its message."""
        inode = connection_inode(fd, port)
        known = self._connections.get(fd)
        if known is not None and known.inode == inode:
            return
        if known is not None:
            self._forget(known)
        if not inode:
            return  # it has ended already
        connection = Connection(fd=fd, inode=inode, since_s=now_s, is_keyed=is_keyed)
        if not self._connections:
            self._next_at_s = now_s + ROUND_S
        self._connections[fd] = connection
        self._count += 1
        self._waiting[fd] = connection
        if self._count > self._max_count and len(self._waiting) > 1:
            self._end(next(iter(self._waiting.values())), "too many connections")

    def knows(self, fd: int) -> bool:
        """Whether this connection was reported; its first message may come before the news."""
        return fd in self._connections

    def is_keyed(self, fd: int) -> bool:
        """Its frames are encrypted."""
        return fd in self._connections and self._connections[fd].is_keyed

    def took(self, fd: int, size_bytes: int, now_s: float) -> bool:
        """A whole message of this connection has come, so large on the wire; False: do not look
        at it."""
        connection = self._connections.get(fd)
        if connection is None or connection.is_ended:
            return False
        connection.taken_bytes += size_bytes
        if not connection.has_session:
            connection.message_count += 1
            allowed = SESSIONLESS_MESSAGES + SESSIONLESS_MESSAGES_PER_S * (
                now_s - connection.since_s
            )
            if connection.message_count > allowed:
                self._end(connection, "too many messages without a session")
        return not connection.is_ended

    def greeted(self, fd: int, tenant: str) -> None:
        """It has a session of this tenant now."""
        connection = self._connections.get(fd)
        if connection is None or connection.is_ended:
            return
        if self._waiting.pop(fd, None) is not None:
            connection.has_session, connection.tenant = True, tenant
            self._sessions[tenant] += 1
        if self._count > self._max_count:
            most = self._sessions.most_common(1)[0][0]
            newest = next(
                other
                for other in reversed(self._connections.values())
                if other.has_session and not other.is_ended and other.tenant == most
            )
            self._end(newest, "too many connections")

    def disconnected(self, fd: int) -> None:
        """A connection with this number ended; that may be an earlier one's."""
        connection = self._connections.get(fd)
        if connection is not None and socket_inode(fd) != connection.inode:
            self._forget(connection)

    def end(self, fd: int, cause: str) -> None:
        """Hang this connection up; what libzmq has of it already is not looked at."""
        connection = self._connections.get(fd)
        if connection is not None:
            self._end(connection, cause)

    def wait_s(self, now_s: float) -> float | None:
        """Until ``tick`` has something to do; None: never."""
        return max(0.0, self._next_at_s - now_s) if self._connections else None

    def tick(self, now_s: float) -> None:
        """Look at the next few connections when it is time."""
        if not self._connections or now_s < self._next_at_s:
            return
        if not self._round:
            self._shed()
            self._round = list(self._connections.values())
        for connection in self._round[-SLICE:]:
            self._look(connection, now_s)
        del self._round[-SLICE:]
        self._next_at_s = now_s + ROUND_S / (1 + len(self._connections) // SLICE)

    def _look(self, connection: Connection, now_s: float) -> None:
        if self._connections.get(connection.fd) is not connection:
            return
        if socket_inode(connection.fd) != connection.inode:
            self._forget(connection)
        if connection.is_ended or connection.fd not in self._connections:
            return
        age_s = now_s - connection.since_s
        received = received_bytes(connection.fd) - connection.taken_bytes
        connection.held_bytes = max(0, received - int(HEARTBEAT_BYTES_PER_S * age_s))
        limit = self._client_bytes if connection.has_session else SESSIONLESS_BYTES
        if connection.held_bytes > limit:
            self._end(connection, "unfinished messages")
        elif connection.fd in self._waiting and age_s > HELLO_S:
            self._end(connection, "no hello")

    def _shed(self) -> None:
        """The largest go of who holds most, until all together hold no more than they may."""
        held = Counter[str]()
        for connection in self._connections.values():
            held[connection.tenant] += connection.held_bytes
        while held.total() > self._total_bytes:
            most = held.most_common(1)[0][0]
            ours = (one for one in self._connections.values() if one.tenant == most)
            largest = max(ours, key=lambda one: one.held_bytes)
            held[most] -= largest.held_bytes
            self._end(largest, "unfinished messages")

    def _end(self, connection: Connection, cause: str) -> None:
        if connection.is_ended:
            return
        held_bytes = connection.held_bytes
        hang_up(connection.fd, connection.inode)
        self._leave(connection)
        self.hung_up[cause] += 1
        if self.hung_up[cause].bit_count() == 1:  # the 1st, 2nd, 4th, 8th…: no storm in the log
            _logger.warning(
                "hung up cause=%r held=%d times=%d", cause, held_bytes, self.hung_up[cause]
            )

    def _leave(self, connection: Connection) -> None:
        """It counts no more."""
        if not connection.is_ended:
            connection.is_ended = True
            connection.held_bytes = 0
            self._count -= 1
            self._sessions[connection.tenant] -= connection.has_session
            self._waiting.pop(connection.fd, None)

    def _forget(self, connection: Connection) -> None:
        self._leave(connection)
        if self._connections.get(connection.fd) is connection:
            del self._connections[connection.fd]
