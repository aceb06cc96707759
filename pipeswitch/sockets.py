"""The one place that makes ZeroMQ sockets: every one is capped before it may talk.

libzmq's defaults let one peer declare an 8 GiB message, keep half a handshake for 30 s and have
1000 unread messages stored for it (RELIABILITY 2). No other module calls ``Context.socket``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import zmq

HEARTBEAT_INTERVAL_MS: Final = 2_000
HEARTBEAT_TIMEOUT_MS: Final = 10_000
HANDSHAKE_LIMIT_MS: Final = 5_000
SEND_QUEUE_MESSAGES: Final = 16  # per peer; what does not fit waits under our own byte budget
RECEIVE_QUEUE_MESSAGES: Final = 16  # per peer
SUBSCRIBER_QUEUE_MESSAGES: Final = 10_000  # small records; a slow subscriber misses some
BACKLOG_CONNECTIONS: Final = 512


@dataclass(frozen=True, kw_only=True)
class Caps:
    """What a peer may make us hold."""

    max_message_bytes: int  # of one frame; a larger declaration closes the connection
    send_queue: int = SEND_QUEUE_MESSAGES
    receive_queue: int = RECEIVE_QUEUE_MESSAGES


def make_socket(context: zmq.Context[Any], kind: int, caps: Caps) -> zmq.Socket[bytes]:
    """A socket with its caps, heartbeats and handshake limit set; not bound or connected yet."""
    sock: zmq.Socket[bytes] = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, caps.max_message_bytes)
    sock.setsockopt(zmq.SNDHWM, caps.send_queue)
    sock.setsockopt(zmq.RCVHWM, caps.receive_queue)
    sock.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
    sock.setsockopt(zmq.BACKLOG, BACKLOG_CONNECTIONS)
    if kind == zmq.ROUTER:
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a vanished or slow peer is an error, not a loss
    return sock


def make_router(context: zmq.Context[Any], caps: Caps) -> zmq.Socket[bytes]:
    """The server's door."""
    return make_socket(context, zmq.ROUTER, caps)


def make_dealer(context: zmq.Context[Any], caps: Caps) -> zmq.Socket[bytes]:
    """A client's end. Unlimited queues: the client's own code bounds what it submits."""
    sock = make_socket(context, zmq.DEALER, caps)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.RECONNECT_IVL, 50)  # ms; a server that just starts is found soon
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    return sock


def make_publisher(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    """The server's event publisher; what comes in are subscriptions, a few bytes each."""
    caps = Caps(max_message_bytes=4096, send_queue=SUBSCRIBER_QUEUE_MESSAGES)
    return make_socket(context, zmq.XPUB, caps)


def make_subscriber(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    """A client's end of the events."""
    caps = Caps(max_message_bytes=1 << 20, receive_queue=SUBSCRIBER_QUEUE_MESSAGES)
    sock = make_socket(context, zmq.SUB, caps)
    sock.setsockopt(zmq.RECONNECT_IVL, 50)
    return sock


def watch_connections(sock: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """A monitor of ``sock``: readable when one of ``events`` happened to a connection."""
    monitor: zmq.Socket[bytes] = sock.get_monitor_socket(events)
    return monitor
