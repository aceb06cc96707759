"""Limit on the bytes of incomplete gRPC messages, with a share for each address.

gRPC's library reads the sockets itself and hands over whole messages only. The kernel counts the
bytes that a connection received; this module subtracts the messages that its calls have read. If an
address uses up its share, the waiting calls of its connection with the most bytes end.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final
from urllib.parse import unquote

import grpc.aio

from ...base.errors import QueueFull
from ...base.quotas import FairQuota
from ...gateway.http.http_errors import RequestTimeout

LOOK_S: Final = 0.05  # interval between two counts while there are calls
CALL_BYTES: Final = 1024  # headers, pings and window updates around each message
FRAMING: Final = 256  # payload bytes per byte of framing (HTTP/2 and TLS)
TCP_BYTES_RECEIVED: Final = 128  # offset in Linux's struct tcp_info

Arrived = Callable[[Collection[str]], Mapping[str, int]]
"""Function that returns the bytes that this process has read from each connected peer."""


class Arrivals:
    """Connections with calls, and their bytes that no call has read yet. Owned by the loop."""

    def __init__(self, shares: FairQuota, arrived: Arrived) -> None:
        self._shares = shares
        self._arrived = arrived
        self._connections: dict[str, _GrpcConnection] = {}
        self._is_due = False  # ``look`` is scheduled

    @contextmanager
    def call(self, context: grpc.aio.ServicerContext, address: str) -> Iterator[Arriving]:
        """Count a call's bytes until it ends."""
        peer = str(context.peer())
        if (connection := self._connections.get(peer)) is None:
            connection = self._connections[peer] = _GrpcConnection(self._shares, address)
        connection.calls += 1
        self._look_later()
        try:
            yield Arriving(connection, context)
        finally:
            connection.calls -= 1

    def look(self) -> None:
        """Count the received bytes; end calls of addresses that have more than their share."""
        arrived = self._arrived(self._connections.keys())
        for peer, connection in [*self._connections.items()]:
            connection.count(arrived.get(peer))
            if peer not in arrived and not connection.calls:
                del self._connections[peer]
        for largest in sorted(self._connections.values(), key=lambda one: -one.unfinished_bytes):
            if largest.unfinished_bytes and not self._shares.left(largest.address):
                largest.refuse()

    def _look_later(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(LOOK_S, self._look_in_time)

    def _look_in_time(self) -> None:
        self._is_due = False
        self.look()
        if any(one.calls or one.unfinished_bytes for one in self._connections.values()):
            self._look_later()


class _GrpcConnection:
    """One gRPC connection, named by its peer."""

    def __init__(self, shares: FairQuota, address: str) -> None:
        self._shares = shares
        self.address = address
        self.calls = 0
        self.waiting: set[Arriving] = set()
        self.unfinished_bytes = 0  # counted in the share of its address
        self._arrived = 0  # received bytes at the last count
        self._passed = 0  # received bytes that belong to no unfinished message

    def count(self, arrived: int | None) -> None:
        """Update the counts; ``arrived``: bytes received so far, None: the connection has ended."""
        self._arrived = self._passed if arrived is None else arrived
        if not self.calls or self._arrived < self._passed:
            self._passed = self._arrived
        self._hold(self._arrived - self._passed)

    def took(self, size: int) -> None:
        """Subtract a message of this size, which a call has read."""
        self._passed += size + size // FRAMING + CALL_BYTES
        self._hold(max(0, self.unfinished_bytes - size))

    def refuse(self) -> None:
        """End the calls that wait for a message."""
        if self.waiting:
            error = QueueFull(
                f"{self._shares.of(self.address)} bytes of incomplete messages exceed this "
                f"client's share of {self._shares.size}",
                hint="send smaller batches, or fewer at once",
                limit="unfinished_bytes",
            )
            self._passed = self._arrived
            self._hold(0)
            while self.waiting:
                self.waiting.pop().refuse(error)

    def _hold(self, size: int) -> None:
        self._shares.give(self.address, self.unfinished_bytes)
        self._shares.add(self.address, size)
        self.unfinished_bytes = size


class Arriving:
    """Reader of the messages of one call."""

    def __init__(self, connection: _GrpcConnection, context: grpc.aio.ServicerContext) -> None:
        self._connection = connection
        self._context = context
        self._limit = asyncio.timeout(None)
        self._refusal: QueueFull | None = None

    async def next(self, limit_s: float | None = None) -> bytes | None:
        """Return the next message; None at the end.

        Raises:
            QueueFull: unfinished messages of this address exceed its share.
            RequestTimeout: the message takes longer than ``limit_s``.
        """
        waiting = self._connection.waiting
        try:
            async with asyncio.timeout(limit_s) as self._limit:
                waiting.add(self)
                data = await self._context.read()
        except TimeoutError:
            raise self._refusal or RequestTimeout("the message came too slowly") from None
        finally:
            waiting.discard(self)
        if data is grpc.aio.EOF:
            return None
        self._connection.took(len(data))
        return bytes(data)

    def refuse(self, error: QueueFull) -> None:
        """End the wait for a message with this error."""
        if not self._limit.expired():
            self._refusal = error
            self._limit.reschedule(asyncio.get_running_loop().time())


class Sockets:
    """Sockets of one port of this process; a library owns them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._descriptors: set[int] = set()  # connected sockets of the port

    def arrived(self, peers: Collection[str]) -> dict[str, int]:
        """Return the bytes read from each peer, by gRPC's name for it (``ipv4:HOST:PORT``)."""
        counts = self._arrived(self._descriptors)
        if not counts.keys() >= {*map(_place, peers)}:
            counts = self._arrived({*map(int, os.listdir("/proc/self/fd"))})
        return {peer: counts[place] for peer in peers if (place := _place(peer)) in counts}

    def _arrived(self, descriptors: set[int]) -> dict[str, int]:
        counts, self._descriptors = {}, set()
        for descriptor in descriptors:
            # An IPv6 address is the longest; AF_INET would truncate it on a dual-stack socket.
            kind = socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP
            with suppress(OSError):
                one = socket.socket(*kind, descriptor)
                try:
                    own = one.getsockname()
                    if isinstance(own, tuple) and own[1] == self._port:
                        host, port, *_ = one.getpeername()
                        counts[f"{host.removeprefix('::ffff:')}:{port}"] = _received(one)
                        self._descriptors.add(descriptor)
                finally:
                    one.detach()  # the library's descriptor stays open
        return counts


def _place(peer: str) -> str:
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return f"{host.strip('[]')}:{port}"


def _received(one: socket.socket) -> int:
    """Return the bytes that a connection received, less those still unread in the kernel."""
    facts = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_BYTES_RECEIVED + 8)
    (unread,) = struct.unpack("=i", fcntl.ioctl(one.fileno(), termios.FIONREAD, bytes(4)))
    (count,) = struct.unpack_from("=Q", facts, TCP_BYTES_RECEIVED)
    return int(count) - int(unread)
