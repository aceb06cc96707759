"""TLS below HTTP, with a place in the count of connections from the first byte on.

asyncio tells of a connection when its handshake has ended. One that stops half-way would hold
a descriptor and a third of a MiB, and count nowhere: six hundred of them shut everybody out.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any, Final, cast

from .http_server import HttpConnection, HttpServer

RECEIVED_BYTES: Final = 64 << 10  # at once: asyncio's 256 KiB are four times as much per connection


def context_of(certificate: str, key: str) -> ssl.SSLContext:
    """Return the TLS context of a certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context


class Secured(SSLProtocol):
    """TLS protocol that ``loop.create_server(ssl=…)`` puts before a connection, with its count."""

    max_size = RECEIVED_BYTES

    def __init__(self, server: HttpServer, context: ssl.SSLContext) -> None:
        self._server = server
        self._connection = HttpConnection(server)
        super().__init__(
            asyncio.get_running_loop(),
            self._connection,
            context,
            cast("Any", None),  # nobody waits for the handshake
            server_side=True,
            ssl_handshake_timeout=round(server.limits.head_s),
        )

    def connection_made(self, transport: Any) -> None:
        if self._connection.enter(transport):
            super().connection_made(transport)
        else:
            transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.leave(self._connection)
        super().connection_lost(exc)
