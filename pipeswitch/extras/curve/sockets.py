"""ZeroMQ sockets for clients with keys, with limits that are set before a peer can connect.

With libzmq's defaults a peer may declare an 8 GiB message, keep a handshake open for 30 s, and
let 1000 unread messages be stored. No other module calls ``Context.socket``.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any, Final

import zmq

from ...wire.stream import KEEPALIVE_COUNT, KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S
from .curve_keys import ClientKeys, ServerKeys

DONTWAIT: Final = int(zmq.DONTWAIT)  # a plain integer: pyzmq's enums take microseconds at each use
ZERO_COPY_BYTES: Final = 64 << 10  # for smaller parts a copy is cheaper than tracking the message
HEARTBEAT_INTERVAL_MS: Final = 2_000
HEARTBEAT_TIMEOUT_MS: Final = 10_000
HANDSHAKE_LIMIT_MS: Final = 5_000
QUEUED_MESSAGES: Final = 16  # queue limit of the server for each peer, in each direction
BACKLOG_CONNECTIONS: Final = 512
ZAP_DOMAIN: Final = "pipeswitch"  # the domain that our authenticator handles
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_MONITOR_EVENT: Final = Struct("=HI")  # the event, and its value: a descriptor or a reason


def _make_socket(
    context: zmq.Context[Any], kind: int, max_part_bytes: int, queued: int
) -> zmq.Socket[bytes]:
    """Return an unconnected socket with size and queue limits, keep-alive and handshake limit."""
    sock: zmq.Socket[bytes] = context.socket(kind)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.MAXMSGSIZE, max_part_bytes),  # a peer that declares a larger part is disconnected
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
    """Return the server's socket. With ``keys`` the authenticator checks each peer's key; if no
    authenticator answers, no client is admitted (ZAP_ENFORCE_DOMAIN).

    The socket must not send heartbeats. If a connection ends while its bounded queue is full,
    libzmq keeps the connection until the queue is read. If a heartbeat's timer fires meanwhile,
    libzmq aborts the process (stream_engine_base.cpp, ``!_io_error``). Dead peers are found by
    TCP's keep-alive instead, and by the time to live in our clients' heartbeats.
    """
    sock = _make_socket(context, zmq.ROUTER, max_part_bytes, QUEUED_MESSAGES)
    sock.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raise for a gone or slow peer; do not drop messages
    if keys is not None:
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        sock.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return sock


def make_dealer(
    context: zmq.Context[Any], max_part_bytes: int, keys: ClientKeys
) -> zmq.Socket[bytes]:
    """Return a client's socket. Its queues are unlimited: the client limits its requests."""
    sock = _make_socket(context, zmq.DEALER, max_part_bytes, 0)
    for option, value in (
        (zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS),
        (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        (zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS),  # silence after which the server disconnects
        (zmq.RECONNECT_IVL, 50),  # ms; short, to connect soon after the server's start
        (zmq.RECONNECT_IVL_MAX, 500),
        (zmq.CURVE_SERVERKEY, keys.server),  # the key that the server must have
        (zmq.CURVE_PUBLICKEY, keys.public),
        (zmq.CURVE_SECRETKEY, keys.secret),
    ):
        sock.setsockopt(option, value)
    return sock


def is_readable(sock: zmq.Socket[bytes]) -> bool:
    """Return True if a message can be received; this is faster than catching an exception."""
    events: Any = sock.get(_EVENTS)
    return bool(events & _POLLIN)


def next_events(monitor: zmq.Socket[bytes], at_most: int) -> Iterator[tuple[int, int]]:
    """Yield each event and its value (descriptor or reason), faster than pyzmq's function does."""
    for _ in range(at_most):
        if not is_readable(monitor):
            return
        frame = monitor.recv(DONTWAIT)
        monitor.recv(DONTWAIT)  # the address
        event, value = _MONITOR_EVENT.unpack(frame)
        yield event, value
