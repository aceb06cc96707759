"""The one place that makes ZeroMQ sockets, for clients with keys: capped before they may talk.

libzmq's defaults let one peer declare an 8 GiB message, keep half a handshake for 30 s and have
1000 unread messages stored for it. No other module calls ``Context.socket``.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any, Final

import zmq

from .curve_keys import ClientKeys, ServerKeys
from .stream import KEEPALIVE_COUNT, KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S

DONTWAIT: Final = int(zmq.DONTWAIT)  # a plain number: libzmq's enums cost microseconds at each use
ZERO_COPY_BYTES: Final = 64 << 10  # below, a copy is cheaper than tracking the message
HEARTBEAT_INTERVAL_MS: Final = 2_000
HEARTBEAT_TIMEOUT_MS: Final = 10_000
HANDSHAKE_LIMIT_MS: Final = 5_000
QUEUED_MESSAGES: Final = 16  # of each peer of the server, in each direction
BACKLOG_CONNECTIONS: Final = 512
ZAP_DOMAIN: Final = "pipeswitch"  # what our authenticator answers for
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_MONITOR_EVENT: Final = Struct("=HI")  # what happened, and to which descriptor or why


def _make_socket(
    context: zmq.Context[Any], kind: int, max_part_bytes: int, queued: int
) -> zmq.Socket[bytes]:
    """Return an unconnected socket with caps, keep-alive and handshake limit."""
    sock: zmq.Socket[bytes] = context.socket(kind)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.MAXMSGSIZE, max_part_bytes),  # a larger declaration closes the connection
        (zmq.SNDHWM, queued),
        (zmq.RCVHWM, queued),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S),
        (zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S),
        (zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_COUNT),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS),
        (zmq.BACKLOG, BACKLOG_CONNECTIONS),
    ):
        sock.setsockopt(option, value)
    return sock


def make_router(
    context: zmq.Context[Any], max_part_bytes: int, keys: ServerKeys | None = None
) -> zmq.Socket[bytes]:
    """Return the server's socket. With ``keys`` the authenticator decides about each peer's key:
    without an authenticator that answers, no client comes in (ZAP_ENFORCE_DOMAIN).

    It must send no heartbeats: libzmq keeps a connection that ended while its bounded queue was
    full until it is read, and if the heartbeat's timer fires in between, libzmq aborts the process
    (stream_engine_base.cpp, ``!_io_error``). Dead peers are found by TCP's keep-alive, and by the
    time to live that our clients' own heartbeats carry.
    """
    sock = _make_socket(context, zmq.ROUTER, max_part_bytes, QUEUED_MESSAGES)
    sock.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a vanished or slow peer is an error, not a loss
    if keys is not None:
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        sock.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return sock


def make_dealer(
    context: zmq.Context[Any], max_part_bytes: int, keys: ClientKeys
) -> zmq.Socket[bytes]:
    """Return a client's socket. Unlimited queues: the client's own code bounds what it submits."""
    sock = _make_socket(context, zmq.DEALER, max_part_bytes, 0)
    for option, value in (
        (zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS),
        (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        (zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS),  # the server's for us
        (zmq.RECONNECT_IVL, 50),  # ms; a server that just starts is found soon
        (zmq.RECONNECT_IVL_MAX, 500),
        (zmq.CURVE_SERVERKEY, keys.server),  # whom we expect, and who we are
        (zmq.CURVE_PUBLICKEY, keys.public),
        (zmq.CURVE_SECRETKEY, keys.secret),
    ):
        sock.setsockopt(option, value)
    return sock


def is_readable(sock: zmq.Socket[bytes]) -> bool:
    """Asked before receiving: the exception of an empty socket costs more than the look."""
    events: Any = sock.get(_EVENTS)
    return bool(events & _POLLIN)


def next_events(monitor: zmq.Socket[bytes], at_most: int) -> Iterator[tuple[int, int]]:
    """Yield each event and its value (descriptor or reason), faster than pyzmq's own function."""
    for _ in range(at_most):
        if not is_readable(monitor):
            return
        frame = monitor.recv(DONTWAIT)
        monitor.recv(DONTWAIT)  # the address
        event, value = _MONITOR_EVENT.unpack(frame)
        yield event, value
