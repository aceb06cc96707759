"""The way to a server that asks for a key: libzmq's, with CURVE. Imported where there is one."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import zmq

from ..wire.keys import ClientKeys
from ..wire.sockets import DONTWAIT, ZERO_COPY_BYTES, is_readable, make_dealer, next_events
from .links import MAX_REPLY_BYTES, Link, Watcher

MAX_EVENTS: Final = 16  # of a connection, at one look
MAX_BROKEN_HANDSHAKES: Final = 3  # in a row: it is not a server that just restarts
BROKEN: Final = "broken"
UNKNOWN_KEY: Final = "the server does not admit this client's key"
NO_KEY: Final = "the server asks for no key"
OTHER_KEY: Final = "its key is not the one given, it asks for none, or it is full"
HINTS: Final = {
    UNKNOWN_KEY: "on the server: pipeswitch keys admit NAME KEY",
    NO_KEY: "leave key and server_key out",
    OTHER_KEY: "on the server: pipeswitch keys server --show",
}
_SHAKEN: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_CUT: Final = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_ENDS: Final = {
    int(zmq.EVENT_DISCONNECTED): BROKEN,
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): UNKNOWN_KEY,
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): NO_KEY,
    _CUT: OTHER_KEY,
}


@dataclass(kw_only=True, eq=False)
class ZmqLink(Link):
    """libzmq connects, and tries again by itself."""

    sock: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    is_shaken: bool = False  # the peer let us in
    cut_count: int = 0  # handshakes that it broke off

    @staticmethod
    def open(context: zmq.Context[Any], address: str, keys: ClientKeys, **hello: Any) -> ZmqLink:
        """
        Raises:
            OSError: it is not an address.
        """
        sock = make_dealer(context, MAX_REPLY_BYTES, keys)
        monitor = sock.get_monitor_socket(_SHAKEN | sum(_ENDS))
        link = ZmqLink(sock=sock, monitor=monitor, **hello)
        # IPv6 only where it is written as a number: else a name that has both, like ``localhost``,
        # would lead to an address the server does not listen on.
        sock.setsockopt(zmq.IPV6, int("[" in address))
        try:
            sock.connect(address)
        except zmq.ZMQError as error:
            link.close(0)
            raise OSError(error.errno, error.strerror) from None
        return link

    def attach(self, poller: Watcher) -> None:
        poller.register(self.sock, select.POLLIN)
        poller.register(self.monitor, select.POLLIN)

    def detach(self, poller: Watcher) -> None:
        poller.unregister(self.sock)
        poller.unregister(self.monitor)

    def send(self, parts: Sequence[Any], request_id: str, *, may_share: bool = False) -> None:
        """Its queue has no limit, so what it does not take finds no connection: libzmq gave the
        refused one up, and ``news`` says why. A send that waited would wait for ever."""
        is_large = any(len(part) >= ZERO_COPY_BYTES for part in parts[2:])
        with contextlib.suppress(zmq.Again):
            self.sock.send_multipart(parts, DONTWAIT, copy=not is_large)

    def has_arrived(self, ready: Container[Any]) -> bool:
        return self.sock in ready

    def has_news(self, ready: Container[Any]) -> bool:
        return self.monitor in ready

    def messages(self) -> Iterator[Sequence[Any]]:
        while is_readable(self.sock):
            frames = self.sock.recv_multipart(DONTWAIT, copy=False)
            yield [frame.buffer for frame in frames]

    def news(self) -> Iterator[str]:
        """How the connection ended:

        1. BROKEN: it is gone. One that never came to be is tried again by libzmq itself;
        2. the others: it asks for no key, or knows ours not, or is not who we expect: waiting
           would not change that.
        """
        for event, _ in next_events(self.monitor, MAX_EVENTS):
            self.is_shaken |= event == _SHAKEN
            self.cut_count += event == _CUT
            is_sure = self.cut_count >= MAX_BROKEN_HANDSHAKES if event == _CUT else True
            end = _ENDS.get(event)
            if end is not None and is_sure and (end != BROKEN or self.is_shaken):
                yield end

    def close(self, linger_ms: int) -> None:
        self.sock.disable_monitor()
        self.monitor.close(0)
        self.sock.close(linger_ms)
