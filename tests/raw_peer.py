"""A client of a plain stream that says what it likes."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

from pipeswitch.wire import frames
from pipeswitch.wire.stream import Stream, WireMessage

DEADLINE_S = 30.0


class RawPeer:
    """Blocks until what it sends has left, and until what it waits for has come."""

    def __init__(self, address: str, receive_bytes: int = 0) -> None:
        """``receive_bytes``: of the kernel's buffer."""
        scheme, _, where = address.partition("://")
        is_local = scheme == "ipc"
        self.sock = socket.socket(socket.AF_UNIX if is_local else socket.AF_INET)
        if receive_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        host, _, port = where.rpartition(":")
        try:
            self.sock.connect(where if is_local else (host, int(port)))
        except OSError:  # no server is there
            self.sock.close()
            raise
        self.stream = Stream(self.sock, 1 << 30, takes_descriptors=is_local)

    def send(self, *parts: Any) -> None:
        """A header and tensors."""
        self.put(frames.pack_table([(len(part), frames.INLINE) for part in parts]), *parts)

    def put(self, table: bytes, *parts: Any) -> None:
        self.stream.put(table, parts)
        give_up_at_s = time.monotonic() + DEADLINE_S
        while not self.stream.flush():
            assert time.monotonic() < give_up_at_s, "the server does not read"
            select.select([], [self.sock], [], 0.1)

    def next_message(self, within_s: float = DEADLINE_S) -> WireMessage | None:
        """None: none came. EOFError: it was cut."""
        give_up_at_s = time.monotonic() + within_s
        while True:
            if messages := self.stream.receive(1):
                return messages[0]
            left_s = give_up_at_s - time.monotonic()
            if (
                not self.stream.has_more
                and not select.select([self.sock], [], [], max(0, left_s))[0]
            ):
                return None

    def next(self) -> WireMessage:
        """EOFError: it was cut."""
        message = self.next_message()
        assert message is not None, "nothing came"
        return message

    def hear(self) -> list[Any]:
        """The parts of ``next``."""
        return self.next().parts

    def close(self) -> None:
        self.stream.close()


@contextlib.contextmanager
def raw_peer(address: str, receive_bytes: int = 0) -> Iterator[RawPeer]:
    peer = RawPeer(address, receive_bytes)
    try:
        yield peer
    finally:
        peer.close()


def ask(peer: RawPeer, *tensors: bytes, **fields: Any) -> Any:
    """Send a request; the next reply's header."""
    peer.send(frames.encode_header(frames.RequestHeader(**{"v": 1, "id": "1", **fields})), *tensors)
    return frames.decode_reply(peer.hear())
