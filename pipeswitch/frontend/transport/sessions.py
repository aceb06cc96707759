"""Sessions: clients from their hello until they are gone, and their messages."""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...base.config import ServerConfig
from ...base.errors import InvalidInput, PermissionDenied, RemoteProtocolError
from ...base.roles import Principal, address_roles
from ...wire.frames import RequestHeader
from ...wire.stream import WireMessage
from ..intake.request_log import RateLimitedLog
from ..intake.validation import Body
from .clients import Session
from .connection_limits import ConnectionLimits
from .connection_manager import ClientConnection, ClientSegments, ConnectionManager
from .replies import reply_frames
from .send_queue import EventSubscribers, SendQueue

_logger = logging.getLogger(__name__)

STOP_LOOK_MS: Final = 2.0
SLOW: Final = "slow or gone"  # the cause if the send queue drops a client


class Sessions:
    """All clients, their connections and the outgoing messages."""

    def __init__(
        self,
        config: ServerConfig,
        shares: ClientSegments,
        pool_share_bytes: int,
        *,
        hear: Callable[[ClientConnection, WireMessage], None],
        ended: Callable[[Session], None],
        now_ms: Callable[[], float],
    ) -> None:
        """Start without clients.

        Args:
            pool_share_bytes: one client's part of the request pool.
            hear: handles a message; it must not raise.
            ended: called with a client that is gone.
        """
        self._ended, self._now_ms = ended, now_ms
        self.clients: dict[str, Session] = {}  # session id -> client
        self.complaints = RateLimitedLog(now_ms)
        self.slow_count = 0  # clients that the send queue dropped
        self.connections = ConnectionLimits(
            max_count=config.max_connections,
            client_bytes=config.pool_bytes,  # more than a client's requests can ever need
            total_bytes=2 * config.pool_bytes,
        )
        self.peers = ConnectionManager(
            self.connections,
            self.complaints,
            shares,
            config.max_message_bytes,
            hear=hear,
            gone=self.drop,
            now_ms=now_ms,
        )
        budget_bytes = max(pool_share_bytes, config.max_message_bytes)
        self.outbox = SendQueue(budget_bytes, now_ms, lambda client: self.drop(client, SLOW))
        self.readers = EventSubscribers(self.outbox)

    def greet(self, peer: ClientConnection) -> Session:
        """Open and return the session of a connection that says hello.

        Raises:
            RemoteProtocolError: the connection already has a session.
        """
        if peer.client is not None:
            # An answer may be half sent: the rest lies in pool memory that a second hello frees.
            raise RemoteProtocolError(
                "this connection already has a session", hint="open another one"
            )
        client = Session(peer=peer, principal=peer.principal)
        self.clients[client.session] = client
        peer.on_hello(client)
        if not peer.is_owners:
            self.connections.on_hello(peer, client.principal.tenant)
        return client

    def change_caller(self, client: Session, header: RequestHeader, _: Sequence[Any]) -> None:
        """Handle the verb ``caller``: set the roles of a client for whom the gateway connected."""
        caller = caller_of(client.principal, header)
        for peer in self.peers.all:
            if peer.is_owners and peer.principal.tenant == caller.tenant:
                peer.principal = caller
                if peer.client is not None:
                    peer.client.principal = caller
        self.outbox.reply(client, header.id)

    def reply_now(self, peer: ClientConnection, request_id: str, **fields: Any) -> None:
        """Reply to a connection, with a session or without.

        While another message is being sent, a session's reply waits; other replies are dropped.
        """
        if peer.client is not None and not peer.client.is_gone:
            self.outbox.reply(peer.client, request_id, **fields)
        else:
            peer.send_now(reply_frames(request_id, **fields))

    def drop(self, client: Session, cause: str) -> None:
        """Remove a client that is gone, or is to be closed. Idempotent."""
        if client.is_gone:
            return
        client.is_gone = True  # late answers to it are undeliverable from now on
        del self.clients[client.session]
        self.readers.clients.discard(client)
        self.outbox.remove(client)
        if cause == SLOW:
            if isinstance(client.peer, ClientConnection):
                self.peers.part(client.peer)
            self.slow_count += 1
        level = logging.WARNING if cause == SLOW else logging.DEBUG
        text = "client=%s gone cause=%s waiting=%d"
        _logger.log(level, text, client.session[:8], cause, len(client.requests))
        self._ended(client)

    def finish(self, limit_ms: float) -> None:
        """Send the waiting messages for at most ``limit_ms``, and drop the rest. Blocks."""
        until_ms = self._now_ms() + limit_ms
        while self.outbox.backlogged and self._now_ms() < until_ms:
            self.outbox.sweep()
            waiting = select.poll()
            for peer in self.peers.all:
                if peer.wants_write:
                    waiting.register(peer, select.POLLOUT)
            waiting.poll(STOP_LOOK_MS)
        for client in self.clients.values():
            self.outbox.remove(client)


def caller_of(principal: Principal, header: RequestHeader) -> Principal:
    """Return the principal that a ``caller`` request of the owner's process names.

    Raises:
        PermissionDenied: the sender is not the owner.
    """
    if not principal.is_owner:
        raise PermissionDenied("only the owner's socket may name another caller")
    body = Body("caller", header.body)
    tenant, roles = body.text("tenant"), address_roles(body.texts("roles"))
    body.done()
    if not tenant:
        raise InvalidInput("caller: tenant must not be empty")
    return Principal(tenant=tenant, roles=roles)
