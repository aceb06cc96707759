"""TLS on a transport that records writes; an unfinished handshake counts as a connection."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("httptools", reason="make installs it")

from pipeswitch.gateway.http.http_server import Secured, context_of
from tests.fuzz.gateways import Wire
from tests.unit.test_gateway_http import LIMITS, Rig, get, rigged

# A key and its certificate for tests, which is valid for a hundred years.
PEM = str(Path(__file__).parents[1] / "fakes" / "localhost.pem")


@pytest.fixture
def rig() -> Iterator[Rig]:
    with rigged() as rig_made:
        yield rig_made


class Caller:
    """Client's end of a connection."""

    def __init__(self, rig: Rig, peer: str = "127.0.0.1") -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing)
        self.wire, self.secured = Wire(peer), Secured(rig.server, context_of(PEM, PEM))
        self.wire.protocol = self.secured
        self._read = 0
        self.secured.connection_made(self.wire)

    def greet(self) -> None:
        """Send the first message of the handshake."""
        with pytest.raises(ssl.SSLWantReadError):
            self.tls.do_handshake()
        self._exchange()

    def ask(self, request: bytes) -> bytes:
        self.greet()
        self.tls.do_handshake()
        self.tls.write(request)
        self._exchange()
        return self.tls.read(1 << 16)

    def _exchange(self) -> None:
        async def run() -> None:
            sent = self._outgoing.read()
            self.secured.get_buffer(len(sent))[: len(sent)] = sent
            self.secured.buffer_updated(len(sent))
            for _ in range(10):
                await asyncio.sleep(0)

        asyncio.get_event_loop().run_until_complete(run())
        self._incoming.write(self.wire.sent[self._read :])
        self._read = len(self.wire.sent)


def test_half_a_handshake_has_a_place_and_no_more_than_its_address_share(rig: Rig) -> None:
    async def connect(peer: str) -> Caller:
        return Caller(rig, peer)

    run = asyncio.get_event_loop().run_until_complete
    half = [run(connect("10.0.0.1")) for _ in range(LIMITS.connections_per_address)]
    half[0].greet()
    assert len(rig.server.connections) == len(half)
    assert run(connect("10.0.0.1")).wire.is_closed, "its address has its share"
    whole = run(connect("10.0.0.2"))
    assert whole.ask(get("/a")).endswith(b"/a ")
    assert len(rig.server.connections) == len(half) + 1
    for caller in [*half, whole]:
        caller.wire.abort()
    asyncio.get_event_loop().run_until_complete(asyncio.sleep(0))
    assert not rig.server.connections
