"""The way to a server that asks for a key: libzmq's, with CURVE. Imported where there is one."""

from __future__ import annotations

import contextlib
import math
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import zmq

from ..base.errors import PermissionDenied
from ..wire import sockets
from ..wire.curve_keys import ClientKeys
from .links import MAX_REPLY_BYTES, ServerLink, Watcher

MAX_EVENTS: Final = 16  # of a connection, at one look
MAX_BROKEN_HANDSHAKES: Final = 3  # in a row: it is not a server that just restarts
_CUT_S: Final = 0.9 * sockets.HANDSHAKE_LIMIT_MS / 1000.0
_CONNECTED: Final = int(zmq.EVENT_CONNECTED)
_SHAKEN: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_ENDED: Final = int(zmq.EVENT_DISCONNECTED)
_CUT: Final = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
REFUSALS: Final = {
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): (
        "the server does not admit this client's key",
        "on the server: pipeswitch keys admit NAME KEY",
    ),
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): (
        "the server needs no key",
        "leave key and server_key out",
    ),
    _CUT: (
        "its key is another one, it needs no key, or it has too many connections",
        "on the server: pipeswitch keys server --show",
    ),
}


@dataclass(kw_only=True, eq=False)
class ZmqLink(ServerLink):
    """libzmq connects, and tries again by itself."""

    sock: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    address: str
    connected_s: float = math.inf  # when the current connection began; inf: there is none
    left_s: float = 0.0  # when the last one ended
    is_shaken: bool = False  # the peer let us in
    cut_count: int = 0  # handshakes that it broke off

    @staticmethod
    def open(context: zmq.Context[Any], address: str, hello_id: str, keys: ClientKeys) -> ZmqLink:
        """Open the link; raise OSError if it is not an address."""
        sock = sockets.make_dealer(context, MAX_REPLY_BYTES, keys)
        monitor = sock.get_monitor_socket(_CONNECTED | _SHAKEN | _ENDED | sum(REFUSALS))
        link = ZmqLink(sock=sock, monitor=monitor, address=address, hello_id=hello_id)
        # IPv6 only where it is written as a number: else a name that has both, like ``localhost``,
        # would lead to an address the server does not listen on.
        sock.setsockopt(zmq.IPV6, int("[" in address))
        try:
            sock.connect(address)
        except zmq.ZMQError as error:
            link.close(0)
            raise OSError(error.errno, error.strerror) from None
        return link

    @property
    def listened_s(self) -> float:
        return self.left_s if self.connected_s == math.inf else time.monotonic()

    def attach(self, poller: Watcher) -> None:
        poller.register(self.sock, select.POLLIN)
        poller.register(self.monitor, select.POLLIN)

    def detach(self, poller: Watcher) -> None:
        poller.unregister(self.sock)
        poller.unregister(self.monitor)

    def send(self, parts: Sequence[Any], request_id: str, *, may_share: bool = False) -> None:
        """Send without waiting. The queue has no limit, so a refusal means that libzmq gave up the
        connection: ``messages`` raises the reason, and a blocking send would never return."""
        is_large = any(len(part) >= sockets.ZERO_COPY_BYTES for part in parts[2:])
        with contextlib.suppress(zmq.Again):
            self.sock.send_multipart(parts, sockets.DONTWAIT, copy=not is_large)

    def messages(self) -> Iterator[Sequence[Any]]:
        """Yield messages as a ``StreamLink`` does; they come before the error of a lost connection.

        If a connection was never made, libzmq retries by itself. A refusal ends the link, since
        waiting would not help.
        """
        while sockets.is_readable(self.sock):
            frames = self.sock.recv_multipart(sockets.DONTWAIT, copy=False)
            yield [frame.buffer for frame in frames]
        for event, _ in sockets.next_events(self.monitor, MAX_EVENTS):
            now_s = time.monotonic()
            self.is_shaken |= event == _SHAKEN
            # libzmq ends an unanswered handshake itself; the server did not cut it
            self.cut_count += event == _CUT and now_s - self.connected_s < _CUT_S
            if event == _CONNECTED:
                self.connected_s = now_s
            elif event == _ENDED:
                self.connected_s, self.left_s = math.inf, now_s
                if self.is_shaken:
                    raise EOFError
            if event in REFUSALS and (event != _CUT or self.cut_count >= MAX_BROKEN_HANDSHAKES):
                text, hint = REFUSALS[event]
                raise PermissionDenied(f"{self.address}: {text}", hint=hint)

    def close(self, linger_ms: int) -> None:
        self.sock.disable_monitor()
        self.monitor.close(0)
        self.sock.close(linger_ms)
