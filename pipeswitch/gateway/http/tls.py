"""TLS for the HTTP server, with connections counted before their handshake.

asyncio reports a connection only after its handshake. A connection that stops in the handshake
holds a descriptor and a third of a MiB: without the count, 600 of them would block all others.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any, Final, cast

from .http_server import HttpConnection, HttpServer

RECEIVED_BYTES: Final = 64 << 10  # receive buffer of a connection; asyncio's own has 256 KiB


def context_of(certificate: str, key: str) -> ssl.SSLContext:
    """Return the TLS context of a certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context


class Secured(SSLProtocol):
    """The TLS protocol of ``loop.create_server(ssl=…)``, which also counts the connection."""

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
