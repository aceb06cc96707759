"""Connections of clients, each a plain stream (docs/adr/0039).

A *peer* (``ClientConnection``) yields received messages and sends ``Outgoing`` ones. An owner's
peer may have a *share*, memory shared with its client. A tensor in the share is copied once, into
its request's slab, because the client can still change it. Answers are copied to the share a piece
at a time, so that a large one never blocks the loop.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from struct import Struct
from typing import Any, Final

import numpy as np

from ...base.errors import RemoteProtocolError
from ...base.machine import SHORTAGES
from ...base.roles import Principal
from ...ipc.control_page import sealed_memfd
from ...wire.frames import INLINE, MAX_HEADER_BYTES, pack_table
from ...wire.stream import SHARED_BYTES, ShmSegment, Stream, WireMessage, keep_alive
from ..intake.request_log import RateLimitedLog
from .clients import Outgoing, Session
from .connection_limits import SESSIONLESS_BYTES, ConnectionLimits, LimitedConnection
from .listeners import Listener

_logger = logging.getLogger(__name__)

MAX_SHARES: Final = 8  # shares in use at once; other clients send through the socket
POOL_PARTS: Final = 4  # a share is a quarter of the pool, an eighth for each direction
PIECE_BYTES: Final = 1 << 20  # bytes of an answer copied in one iteration of the loop
BURST_PEERS: Final = 16  # connections accepted in one iteration of the loop
BURST_MESSAGES: Final = 16  # messages read from one peer before other work
REST_S: Final = 0.5  # pause before the next attempt to accept when descriptors are short
_CREDENTIALS: Final = Struct("3i")  # pid, uid, gid


class ClientSegments:
    """Shared memory for local clients: at most MAX_SHARES of a fixed size."""

    def __init__(self, size_bytes: int) -> None:
        """Set the size of each share; 0: no client gets one."""
        self._size_bytes = size_bytes
        self.count = 0

    def take(self) -> int:
        """Return a memfd that the caller owns; -1: none is left. Call ``give_back`` later."""
        if not self._size_bytes or self.count >= MAX_SHARES:
            return -1
        try:
            descriptor = sealed_memfd("pipeswitch-share", self._size_bytes)
        except OSError as error:
            _logger.warning("share=none cause=%r", error.strerror)
            return -1
        self.count += 1
        return descriptor

    def give_back(self) -> None:
        self.count -= 1

    def as_dict(self) -> dict[str, int]:
        """Return the shares' part of ``stats``."""
        return {"shares": self.count, "share_bytes": self._size_bytes}


def _nothing() -> None:
    pass


class ClientConnection(LimitedConnection):
    """One client's connection."""

    def __init__(
        self, sock: socket.socket, principal: Principal, max_bytes: int, shares: ClientSegments
    ) -> None:
        """Wrap an accepted socket; ``max_bytes`` limits a message's tensors in a session."""
        self._stream = Stream(sock, max_bytes)
        self.principal = principal  # the client's tenant and roles, also before hello
        self._max_bytes = MAX_HEADER_BYTES + max_bytes
        self.is_owners = principal.is_owner  # not changed by the verb ``caller``
        self._stream.max_bytes = self._max_bytes if self.is_owners else SESSIONLESS_BYTES
        self.client: Session | None = None  # its session, after hello
        self._shares = shares
        self._has_share = self._owes_share = False
        self._is_mapped = False  # the client wrote into the share, so it has mapped our half, too
        self._lent: deque[int] = deque()  # offsets of our parts that the client has not read yet
        self._taken_count = 0  # parts that the client has read
        self._begun: Outgoing | None = None  # the message being sent
        self._pieces: deque[tuple[memoryview, Any]] = deque()  # (target, source), not yet copied
        self.is_closed = False
        self.wants_write = False  # it has data to send when the socket is writable
        self.on_change: Callable[[], None] = _nothing  # called when ``wants_write`` changes

    def receive_into(self, lend: Lend) -> None:
        """Receive the tensors of large messages into memory that ``lend`` returns."""
        self._stream.lend = functools.partial(lend, self)

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def needs_poll(self) -> bool:
        """True if the peer has work that can be done without waiting for its socket."""
        return not self.is_closed and (self._stream.has_more or bool(self._pieces))

    def _changed(self) -> None:
        wants_write = self._stream.is_sending or self._owes_share
        if wants_write != self.wants_write:
            self.wants_write = wants_write
            self.on_change()

    def on_hello(self, client: Session) -> None:
        """Store the session, whose messages may be large."""
        self.client = client
        self._stream.max_bytes = self._max_bytes

    def held_bytes(self, now_s: float) -> int:
        return -1 if self.is_closed else self._stream.held_bytes

    def hang_up(self) -> None:
        self._stream.hang_up()

    # ---- in ------------------------------------------------------------------------------------

    def messages(self) -> Iterator[WireMessage]:
        """Yield the messages that have arrived, at most BURST_MESSAGES.

        Raises:
            EOFError: the client is gone.
            RemoteProtocolError: the client violated the protocol.
        """
        if self._owes_share:
            self._bring_share()
        for message in self._stream.receive(BURST_MESSAGES):
            if self.is_closed:  # closed while an earlier message was handled
                return
            if message.taken_count != self._taken_count:
                self._took(message.taken_count)
            self._is_mapped |= bool(message.shared)
            if message.parts:
                yield message
            elif not self.is_owners:
                raise RemoteProtocolError("shared memory is not available to other machines")
            else:
                self._owes_share = not self._has_share
                self._bring_share()

    def _took(self, taken_count: int) -> None:
        """Free the parts in the share that the client has read; they are read in the order sent."""
        if not self._taken_count <= taken_count <= self._taken_count + len(self._lent):
            raise RemoteProtocolError(f"part {taken_count} of the shared memory is not in use")
        share = self._stream.share
        while share is not None and self._taken_count < taken_count:
            share.free(self._lent.popleft())
            self._taken_count += 1

    def _bring_share(self) -> None:
        """Send the share, or reply that there is none. If the socket is full, try again later."""
        if not self._owes_share or self._stream.is_sending:
            return
        descriptor = self._shares.take()
        try:
            share = ShmSegment(descriptor, is_servers=True) if descriptor >= 0 else None
            self._stream.bring(descriptor)
        except OSError as error:
            self._owes_share = isinstance(error, BlockingIOError)
            if descriptor >= 0:
                self._shares.give_back()
            _logger.debug("share=none cause=%r", error.strerror)
        else:
            self._owes_share, self._has_share = False, share is not None
            self._stream.share = share
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        self._changed()

    # ---- out -----------------------------------------------------------------------------------

    def transmit(self, outgoing: Outgoing) -> bool:
        """Send a message, or the rest of it. False: call again with the same message for its rest.

        Raises:
            OSError: the connection is gone.
        """
        if self.is_closed:
            raise BrokenPipeError
        if outgoing is not self._begun:
            self._begin(outgoing.frames)
            self._begun = outgoing
        if self._pieces:
            self._copy_piece()
        if self._pieces or not self._flush():
            return False
        self._begun = None
        return True

    def send_now(self, frames: Sequence[Any]) -> None:
        """Send to a client without a session; drop the message if the client does not read."""
        if not self.is_closed and self._begun is None and not self._stream.is_sending:
            self._stream.put(pack_table([(len(part), INLINE) for part in frames[1:]]), frames[1:])
            with contextlib.suppress(OSError):
                self._flush()

    def _begin(self, frames: Sequence[Any]) -> None:
        share = self._stream.share if self._is_mapped else None
        table, inline = [], []
        for number, part in enumerate(frames[1:]):
            size = len(part)
            is_large = share is not None and number and size >= SHARED_BYTES
            place = share.place(size) if share is not None and is_large else INLINE
            table.append((size, place))
            if share is None or place == INLINE:
                inline.append(part)
                continue
            self._lent.append(place)
            source = memoryview(part)
            self._pieces += [
                (share.own(place + at, min(PIECE_BYTES, size - at)), source[at : at + PIECE_BYTES])
                for at in range(0, size, PIECE_BYTES)
            ]
        self._stream.put(pack_table(table), inline)

    def _copy_piece(self) -> None:
        """Copy one piece into the share. The message's table is sent after all pieces."""
        target, source = self._pieces.popleft()
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))

    def _flush(self) -> bool:
        is_flushed = self._stream.flush()
        if self._owes_share and is_flushed:
            self._bring_share()
        if self.wants_write != (self._owes_share or not is_flushed):
            self._changed()
        return is_flushed

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            self._pieces.clear()
            # The callbacks and the session refer to this peer, which may hold much memory.
            self.on_change, self.client = _nothing, None
            if self._has_share:  # before the client can see the end of the stream
                self._shares.give_back()
            self._stream.close()


Lend = Callable[[ClientConnection, Sequence[Any], int], memoryview | None]
"""See ``Stream.lend``."""


class ConnectionManager:
    """All connections. ``ConnectionLimits`` applies to those that are not the owner's."""

    def __init__(
        self,
        limits: ConnectionLimits,
        complaints: RateLimitedLog,
        shares: ClientSegments,
        max_message_bytes: int,
        *,
        hear: Callable[[ClientConnection, WireMessage], None],
        gone: Callable[[Session, str], None],
        now_ms: Callable[[], float],
    ) -> None:
        """Start without connections.

        Args:
            hear: handles a message; it must not raise.
            gone: called with the client whose connection ends, and the cause.
        """
        self._limits = limits
        self._complaints = complaints
        self.shares = shares
        self._max_message_bytes = max_message_bytes
        self._on_message, self._gone, self._now_ms = hear, gone, now_ms
        self.lend: Lend = lambda *_: None
        self.all: set[ClientConnection] = set()
        self.turns: set[ClientConnection] = set()  # peers that may have something to read
        self._selector: selectors.BaseSelector | None = None  # the peers are registered here
        self.resting: list[Listener] = []  # listeners paused because descriptors are short
        self.rests_until_s = math.inf

    def watch(self, selector: selectors.BaseSelector, listeners: Iterable[Listener]) -> None:
        """Watch the listeners, and accept their connections when they can be read."""
        self._selector = selector
        for listener in listeners:
            welcome = functools.partial(self._on_accept, listener)
            selector.register(listener.sock, selectors.EVENT_READ, welcome)

    def unwatch(self, selector: selectors.BaseSelector, listeners: Iterable[Listener]) -> None:
        self._selector = None
        for listener in listeners:
            if listener not in self.resting:
                selector.unregister(listener.sock)
        for peer in self.all:
            selector.unregister(peer)

    def _on_accept(self, listener: Listener) -> None:
        """Accept the connections that wait at a listener."""
        if self._selector is None:
            return
        try:
            for peer in accept(listener, self._max_message_bytes, self.shares):
                self._selector.register(
                    peer, selectors.EVENT_READ, functools.partial(self.turns.add, peer)
                )
                self.all.add(peer)
                peer.receive_into(self.lend)
                if not peer.is_owners:
                    self._limits.add(peer, self._now_ms() / 1000)
                peer.on_change = functools.partial(self._follow, peer)
        except OSError as error:  # descriptors are short, and the listener would stay readable
            _logger.warning("no connection is accepted for %s s: %s", REST_S, error)
            self._selector.unregister(listener.sock)
            self.resting.append(listener)
            self.rests_until_s = self._now_ms() / 1000 + REST_S

    def wake(self) -> None:
        """Resume the paused listeners; the loop calls this at ``rests_until_s``."""
        resting, self.resting, self.rests_until_s = self.resting, [], math.inf
        if self._selector is not None:
            self.watch(self._selector, resting)

    def _follow(self, peer: ClientConnection) -> None:
        """Wait for the peer's socket to be writable, too, while the peer has data to send."""
        if self._selector is not None and peer in self.all:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.wants_write else 0)
            self._selector.modify(peer, events, functools.partial(self.turns.add, peer))

    def turn(self) -> None:
        """Read the messages of each peer in ``turns``."""
        for peer in list(self.turns):
            self.read(peer)
            if not peer.needs_poll:
                self.turns.discard(peer)

    def read(self, peer: ClientConnection) -> None:
        """Read a peer's messages; close it if it violated the protocol or is gone."""
        cause = ""
        try:
            for message in peer.messages():
                if not (peer.is_owners or self._limits.took(peer, self._now_ms() / 1000)):
                    return  # it was hung up: a later read finds its end
                self._on_message(peer, message)
        except EOFError:
            cause = "disconnected"
        except RemoteProtocolError as error:
            self._complaints.add(peer.principal.tenant, error)
            cause = "nonsense"
        if cause:
            if peer.client is not None:
                self._gone(peer.client, cause)
            self.part(peer)

    def part(self, peer: ClientConnection) -> None:
        """Close a peer's connection."""
        if peer in self.all:
            self.all.remove(peer)
            self.turns.discard(peer)
            self._limits.remove(peer)
            if self._selector is not None:
                self._selector.unregister(peer)
        peer.close()


def accept(
    listener: Listener, max_bytes: int, shares: ClientSegments
) -> Iterator[ClientConnection]:
    """Accept a listener's waiting connections; at the owner's socket, only those of this user.
    That socket's folder is closed to other users, but a process may pass them a connection.

    Raises:
        OSError: too few descriptors or too little memory is left.
    """
    for _ in range(BURST_PEERS):
        try:
            sock, _ = listener.sock.accept()
        except OSError as error:
            if error.errno in SHORTAGES and not isinstance(error, BlockingIOError):
                raise  # the other connections wait in the backlog
            return
        if not listener.principal.is_owner:
            keep_alive(sock)
        elif not is_ours(sock):
            sock.close()
            continue
        yield ClientConnection(sock, listener.principal, max_bytes, shares)


def is_ours(sock: socket.socket) -> bool:
    """Return True if the connected process belongs to this user or to root."""
    facts = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(facts)[1] in (os.getuid(), 0)
