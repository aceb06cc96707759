"""The one place that makes ZeroMQ sockets: every one is capped before it may talk.

libzmq's defaults let one peer declare an 8 GiB message, keep half a handshake for 30 s and have
1000 unread messages stored for it. No other module calls ``Context.socket``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final

import zmq

from .keys import ClientKeys, ServerKeys
from .stream import KEEPALIVE_COUNT, KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S

# Plain numbers: libzmq's enums cost microseconds at each use.
DONTWAIT: Final = int(zmq.DONTWAIT)
MORE: Final = int(zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_MONITOR_EVENT: Final = Struct("=HI")  # what happened, and to which descriptor or why

HEARTBEAT_INTERVAL_MS: Final = 2_000
HEARTBEAT_TIMEOUT_MS: Final = 10_000
HANDSHAKE_LIMIT_MS: Final = 5_000
SEND_QUEUE_MESSAGES: Final = 16  # per peer; what does not fit waits under our own byte budget
RECEIVE_QUEUE_MESSAGES: Final = 16  # per peer
BACKLOG_CONNECTIONS: Final = 512
ZAP_DOMAIN: Final = "pipeswitch"  # what our authenticator answers for


@dataclass(frozen=True, kw_only=True)
class Caps:
    """What a peer may make us hold."""

    max_message_bytes: int  # of one frame; a larger declaration closes the connection
    send_queue: int = SEND_QUEUE_MESSAGES
    receive_queue: int = RECEIVE_QUEUE_MESSAGES


def make_socket(context: zmq.Context[Any], kind: int, caps: Caps) -> zmq.Socket[bytes]:
    """A socket with its caps, keep-alive and handshake limit set; not bound or connected yet.

    libzmq must not send heartbeats from a socket with a bounded receive queue. Its engine keeps
    a connection that ended while that queue was full until it is read, and if the heartbeat's
    timer fires in between, libzmq aborts the process (stream_engine_base.cpp, ``!_io_error``):
    any client could end the server. Dead peers are found by TCP's keep-alive, and by the time
    to live that our clients' own heartbeats carry (``make_dealer``).
    """
    sock: zmq.Socket[bytes] = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, caps.max_message_bytes)
    sock.setsockopt(zmq.SNDHWM, caps.send_queue)
    sock.setsockopt(zmq.RCVHWM, caps.receive_queue)
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_COUNT)
    sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
    sock.setsockopt(zmq.BACKLOG, BACKLOG_CONNECTIONS)
    if kind == zmq.ROUTER:
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a vanished or slow peer is an error, not a loss
    return sock


def make_router(context: zmq.Context[Any], caps: Caps) -> zmq.Socket[bytes]:
    """The server's listener."""
    return make_socket(context, zmq.ROUTER, caps)


def make_dealer(
    context: zmq.Context[Any], caps: Caps, keys: ClientKeys | None = None
) -> zmq.Socket[bytes]:
    """A client's end. Unlimited queues: the client's own code bounds what it submits."""
    sock = make_socket(context, zmq.DEALER, caps)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)  # the server's for us
    sock.setsockopt(zmq.RECONNECT_IVL, 50)  # ms; a server that just starts is found soon
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    if keys is not None:
        present_keys(sock, keys)
    return sock


def connect(sock: zmq.Socket[bytes], address: str) -> None:
    """To an address as ``addresses.full_address`` makes it. ZMQError: it is none.

    IPv6 only where it is written as a number: else a name that has both, like ``localhost``,
    would lead to an address the server does not listen on.
    """
    sock.setsockopt(zmq.IPV6, int("[" in address))
    sock.connect(address)


def require_keys(sock: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """Before binding: each peer is asked for a key, and the authenticator about that key.

    Without an authenticator that answers, no client comes in (ZAP_ENFORCE_DOMAIN).
    """
    sock.setsockopt(zmq.CURVE_SERVER, 1)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    sock.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def present_keys(sock: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Before connecting: who we are, and whom we expect."""
    sock.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
    sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def is_readable(sock: zmq.Socket[bytes]) -> bool:
    """Asked before receiving: the exception of an empty socket costs more than the look."""
    events: Any = sock.get(_EVENTS)
    return bool(events & _POLLIN)


def send_frames(
    sock: zmq.Socket[bytes],
    frames: Sequence[Any],
    flags: int = 0,
    *,
    copy: bool = True,
    track: bool = False,
) -> zmq.MessageTracker | None:
    """One message; ``send_multipart`` without its look at each frame's type.

    Raises:
        zmq.Again: the queue is full (at the first frame, never at a later one).
    """
    *first, last = frames
    if not track:
        for frame in first:
            sock.send(frame, flags | MORE, copy=copy)
        tracker: zmq.MessageTracker | None = sock.send(last, flags, copy=copy)
        return tracker
    return sock.send_multipart(frames, flags, copy=copy, track=track)


def watch_connections(sock: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """A monitor of ``sock``: readable when one of ``events`` happened to a connection."""
    monitor: zmq.Socket[bytes] = sock.get_monitor_socket(events)
    return monitor


def next_events(monitor: zmq.Socket[bytes], at_most: int) -> Iterator[tuple[int, int]]:
    """What happened and its value (a descriptor, or why); cheaper than ``recv_monitor_message``."""
    for _ in range(at_most):
        if not is_readable(monitor):
            return
        frame = monitor.recv(DONTWAIT)
        monitor.recv(DONTWAIT)  # the address
        event, value = _MONITOR_EVENT.unpack(frame)
        yield event, value
