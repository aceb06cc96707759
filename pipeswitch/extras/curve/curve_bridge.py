"""Link to a server that requires keys, over libzmq with CURVE. Imported only with keys."""

from __future__ import annotations

import contextlib
import math
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import zmq

from ...base.errors import PermissionDenied
from ...client.calls import RETURN_S
from ...client.connection import Connection
from ...client.links import MAX_REPLY_BYTES, ServerLink, Watcher
from . import sockets
from .curve_keys import ClientKeys, client_keys

MAX_EVENTS: Final = 16  # maximum number of connection events that are read at once
MAX_BROKEN_HANDSHAKES: Final = 3  # in a row; a restarting server breaks off fewer handshakes
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
    """Link over a libzmq socket, which connects and reconnects on its own."""

    sock: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    address: str
    connected_s: float = math.inf  # start of the current connection; inf: none
    left_s: float = 0.0  # end of the last connection
    is_shaken: bool = False  # the server has accepted the handshake
    cut_count: int = 0  # handshakes that the server broke off

    @staticmethod
    def open(context: zmq.Context[Any], address: str, hello_id: str, keys: ClientKeys) -> ZmqLink:
        """Open the link; raise OSError if ``address`` is malformed."""
        sock = sockets.make_dealer(context, MAX_REPLY_BYTES, keys)
        monitor = sock.get_monitor_socket(_CONNECTED | _SHAKEN | _ENDED | sum(REFUSALS))
        link = ZmqLink(sock=sock, monitor=monitor, address=address, hello_id=hello_id)
        # Use IPv6 only for numeric IPv6 addresses. A name like ``localhost`` may also have an IPv6
        # address, on which the server does not listen.
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
        """Send without waiting. The queue has no limit, so a refusal means that libzmq has given up
        the connection. ``messages`` then raises the reason; a blocking send would never return."""
        is_large = any(len(part) >= sockets.ZERO_COPY_BYTES for part in parts[2:])
        with contextlib.suppress(zmq.Again):
            self.sock.send_multipart(parts, sockets.DONTWAIT, copy=not is_large)

    def messages(self) -> Iterator[Sequence[Any]]:
        """Yield messages, like ``StreamLink``; then raise an error if the connection is lost.

        If a connection was never made, libzmq retries on its own. A refusal ends the link, because
        a retry would be refused, too.
        """
        while sockets.is_readable(self.sock):
            frames = self.sock.recv_multipart(sockets.DONTWAIT, copy=False)
            yield [frame.buffer for frame in frames]
        for event, _ in sockets.next_events(self.monitor, MAX_EVENTS):
            now_s = time.monotonic()
            self.is_shaken |= event == _SHAKEN
            # A handshake that times out is ended by libzmq itself, not broken off by the server.
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

    def answered(self, request_id: str) -> None:
        """Release nothing, because libzmq owns what it sends."""

    def close(self, linger_ms: int) -> None:
        self.sock.disable_monitor()
        self.monitor.close(0)
        self.sock.close(linger_ms)


class CurveConnection(Connection):
    """Connection to a server that requires keys."""

    has_keys = True

    def __init__(
        self, address: str, timeout_s: float, keys: ClientKeys, *, return_s: float = 0.0
    ) -> None:
        self._keys, self._context = keys, zmq.Context()
        super().__init__(address, timeout_s, poller=zmq.Poller(), return_s=return_s)

    def another(self) -> CurveConnection:
        return CurveConnection(self.address, self._timeout_s, self._keys, return_s=self._return_s)

    def _new_link(self, hello_id: str) -> ZmqLink:
        return ZmqLink.open(self._context, self.address, hello_id, self._keys)

    def _run(self) -> None:
        super()._run()
        self._context.term()


def connect(address: str, timeout_s: float, key: str, server_key: str) -> CurveConnection:
    """Return a connection with the keys in these files.

    Raises:
        ConfigError, InvalidInput: like ``client_keys``.
    """
    return CurveConnection(address, timeout_s, client_keys(key, server_key), return_s=RETURN_S)
