"""Listener for ZeroMQ clients with keys, which other machines can reach (docs/adr/0039).

libzmq authenticates each client (CURVE, with the allow-list by ZAP). Each client has its own plain
stream to the owner's socket. Its messages are forwarded there unchanged, after a message that names
the client. So the server sees one connection for each client, with the client's name and roles.
Nothing is decoded or decided here. Bytes that crash libzmq crash only this process.

libzmq limits the size of a frame and the number of whole messages, but not the frames of a message
that never ends. So this module counts the bytes that the kernel received on a connection. Bytes
that have not come out of libzmq as a message yet are *held*.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import Any, Final

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ...base.errors import ConfigError, PipeSwitchError, RemoteProtocolError
from ...base.roles import Principal, address_roles, in_order
from ...frontend.transport.connection_limits import ROUND_S, ConnectionLimits, LimitedConnection
from ...gateway.serving.upstream import Upstream
from ...ipc.messages.gateway import GatewaySettings, KeyedSettings
from ...wire.frames import (
    INLINE,
    MAGIC,
    MAX_TENSORS,
    VERSION,
    RequestHeader,
    encode_header,
    pack_table,
)
from ...wire.stream import Stream
from . import sockets
from .curve_keys import GATEWAY_KEY, AllowList, KeyFolder

log = logging.getLogger(__name__)

KEYS_LOOK_S: Final = 1.0  # interval between checks of connected clients against the allow-list
AGAIN_S: Final = 0.005  # pause before the next try to send to a client that does not read
BURST_FRAMES: Final = 256  # frames read in one callback, before answers and HTTP are served
BURST_EVENTS: Final = 32
MAX_WAITING_BYTES: Final = 64 << 20  # bytes not sent to the server yet; above it, no client is read
STREAM_BYTES: Final = 4 << 20  # requested size of the kernel's send buffer
MAX_ANSWER_BYTES: Final = 1 << 32  # limit of one part; the server is trusted
HEARTBEAT_BYTES_PER_S: Final = 128  # allowance for pings and pongs, which are no messages
_ACCEPTED: Final = int(zmq.EVENT_ACCEPTED)
_WATCHED: Final = _ACCEPTED | int(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
_SRCFD: Final = int(zmq.SRCFD)
_ROUTING_ID: Final = re.compile(rb"\0[\s\S]{4}")  # routing ids that libzmq generates
_TCP_INFO_BYTES: Final = 136
_RECEIVED: Final = Struct("=Q")  # tcpi_bytes_received
_RECEIVED_AT: Final = 128  # offset of tcpi_bytes_received in linux/tcp.h
_LONG_FRAME: Final = 255  # ZMTP: a longer frame's header has 9 bytes instead of 2
_CURVE_BYTES: Final = 33  # added to a frame's content: MESSAGE, nonce, flags, MAC


def open_listener(descriptor: int, settings: GatewaySettings) -> CurveListener:
    """Accept clients with keys; in a cluster, gateways of other nodes act as the owner."""
    if settings.keyed is None:
        raise ConfigError("a gateway without settings of keys")
    owners = GATEWAY_KEY if settings.config.cluster else ""
    return CurveListener(descriptor, settings.keyed, settings.address, owners=owners)


class Caller(LimitedConnection):
    """One connection of libzmq and, after its first message, its stream to the server."""

    def __init__(self, fd: int, inode: int) -> None:
        self.fd = fd
        self.inode = inode  # differs for a later connection with the same descriptor number
        self.taken_bytes = 0  # wire bytes of messages that came out of libzmq
        self.routing_id = self.key = b""
        self.principal: Principal | None = None
        self.stream: Stream | None = None
        self.waiting_bytes = 0  # bytes that are not sent to the server yet
        self.is_full = False  # the client did not read an answer, which will be sent again

    def held_bytes(self, now_s: float) -> int:
        if inode_of(self.fd) != self.inode:
            return -1
        received = received_bytes(self.fd) - self.taken_bytes
        return max(0, received - int(HEARTBEAT_BYTES_PER_S * (now_s - self.since_s)))

    def hang_up(self) -> None:
        """Shut a peer's socket down, because libzmq has no call for one peer.

        The descriptor is duplicated before the comparison, so it cannot be reused in between.
        """
        with contextlib.suppress(OSError), socket_of(self.fd) as sock:
            if inode_of(sock.fileno()) == self.inode:
                sock.shutdown(socket.SHUT_RDWR)


class CurveListener:
    """The ROUTER socket, its clients, and their streams. Owned by the loop's thread."""

    def __init__(
        self, descriptor: int, settings: KeyedSettings, address: str, *, owners: str = ""
    ) -> None:
        """Start listening; call this in the running loop.

        Args:
            descriptor: the listening socket, which this object then owns.
            address: address of the owner's socket.
            owners: name of the key whose client acts as the owner; empty: there is none.
        """
        self._owners = owners
        self._path = address.removeprefix("ipc://")
        self._port = int(settings.address.rpartition(":")[2])
        self._upstream = Upstream(address)
        folder = KeyFolder(Path(settings.keys_dir))
        self.allowed = AllowList(folder, address_roles(settings.roles))
        self.connections = ConnectionLimits(
            max_count=settings.max_connections,
            client_bytes=settings.client_bytes,
            total_bytes=2 * settings.client_bytes,
        )
        self._by_fd: dict[int, Caller] = {}
        self._callers: dict[bytes, Caller] = {}  # routing id -> caller with a stream
        self._frames: list[zmq.Frame] = []  # frames of an incomplete message
        self._waiting_bytes = 0
        keys = folder.server()
        if keys is None:
            raise ConfigError(f"{settings.keys_dir} has no key of the server")
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context, log=log)
        self._authenticator.start()  # it must run before a client connects
        self._authenticator.configure_curve_callback(sockets.ZAP_DOMAIN, self.allowed)
        self._router = sockets.make_router(self._context, settings.max_message_bytes, keys)
        self._router.setsockopt(zmq.IPV6, int("[" in settings.address))
        self._router.setsockopt(zmq.USE_FD, descriptor)
        self._monitor = self._router.get_monitor_socket(_WATCHED)
        self._router.bind(settings.address)
        self._loop = asyncio.get_running_loop()
        self._numbers: list[Any] = [sock.get(zmq.FD) for sock in (self._router, self._monitor)]
        for number in self._numbers:
            self._loop.add_reader(number, self._turn)
        looks = ((self._look_at_keys, KEYS_LOOK_S), (self._poll, ROUND_S))
        self._tasks = [self._loop.create_task(_again(look, s)) for look, s in looks]
        self._loop.call_soon(self._turn)

    def close(self) -> None:
        """Close the sockets, the streams and the tasks. Idempotent."""
        if self._router.closed:
            return
        for task in self._tasks:
            task.cancel()
        for caller in list(self._by_fd.values()):
            self._forget(caller)
        for number in self._numbers:
            self._loop.remove_reader(number)
        self._router.disable_monitor()
        self._monitor.close(0)
        self._router.close(0)
        self._authenticator.stop()
        self._context.term()
        self._upstream.close()

    # ---- from clients --------------------------------------------------------------------------

    def _stir(self) -> None:
        """Check the sockets again after use, because each use may consume a signalled change.
        libzmq's descriptor signals only changes (zmq_getsockopt(3), ZMQ_FD)."""
        if sockets.is_readable(self._router) or sockets.is_readable(self._monitor):
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Handle some connection events, and some frames."""
        if self._router.closed:
            return
        for event, fd in sockets.next_events(self._monitor, BURST_EVENTS):
            self._caller_at(fd, is_new=event == _ACCEPTED)
        for _ in range(BURST_FRAMES):
            if self._waiting_bytes > MAX_WAITING_BYTES:
                return  # ``_waited`` continues later
            if not sockets.is_readable(self._router):
                break
            frame: zmq.Frame = self._router.recv(sockets.DONTWAIT, copy=False)
            if len(self._frames) < MAX_TENSORS + 4:  # a longer message is refused below
                self._frames.append(frame)
            if not frame.more:
                frames, self._frames = self._frames, []
                self._hear(frames)
        self._stir()

    def _caller_at(self, fd: int, *, is_new: bool = True) -> Caller | None:
        """Return the caller with this descriptor; create it if its connection is new.

        Drop a former caller with the same descriptor, whose connection has ended.
        """
        inode = inode_of(fd, self._port)
        known = self._by_fd.get(fd)
        if known is not None and known.inode == inode:
            return known
        if known is not None:
            self._forget(known)
        if not inode or not is_new:
            return None
        caller = self._by_fd[fd] = Caller(fd, inode)
        self.connections.add(caller, time.monotonic())
        return caller

    def _hear(self, frames: Sequence[zmq.Frame]) -> None:
        """Forward a whole message to the server on its sender's stream."""
        routing_id, *parts = (frame.buffer for frame in frames)
        caller = self._callers.get(bytes(routing_id)) or self._admit(frames[0])
        if caller is None or caller.is_ended:
            return
        caller.taken_bytes += wire_bytes(parts)
        if not 2 <= len(parts) <= MAX_TENSORS + 2 or bytes(parts[0]) != MAGIC:
            self.connections.end(caller, "nonsense")
        else:
            self._put(caller, parts[1:])

    def _admit(self, first: zmq.Frame) -> Caller | None:
        """Admit a client by its first message, and open a stream to the server for it."""
        try:
            caller, key = self._caller_at(int(first.get(_SRCFD))), str(first.get("User-Id"))
        except (zmq.ZMQError, KeyError):
            return None
        if caller is None or caller.is_ended:
            return None
        caller.routing_id, caller.key = bytes(first.buffer), key.encode()
        caller.principal = self.allowed.standings().get(caller.key)
        if caller.principal is None or not _ROUTING_ID.fullmatch(caller.routing_id):
            self.connections.end(caller, "no key, or a routing id of its own")
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, STREAM_BYTES)
            sock.connect(self._path)
        except OSError:
            sock.close()
            self.connections.end(caller, "the server does not answer")
            return None
        caller.stream = Stream(sock, MAX_ANSWER_BYTES)
        self._callers[caller.routing_id] = caller
        self.connections.on_hello(caller, caller.principal.tenant)
        self._loop.add_reader(sock, self._answers, caller, caller.stream)
        if caller.principal.tenant != self._owners:  # else the stream stays the owner's
            header = RequestHeader(
                v=VERSION, op="caller", id="caller", body=_told(caller.principal)
            )
            self._put(caller, [encode_header(header)])
        return caller

    def _put(self, caller: Caller, parts: Sequence[Any]) -> None:
        if caller.stream is not None:
            sizes = [len(part) for part in parts]
            caller.stream.put(pack_table([(size, INLINE) for size in sizes]), parts)
            caller.waiting_bytes += sum(sizes)
            self._waiting_bytes += sum(sizes)
            self._flush(caller, caller.stream)

    def _flush(self, caller: Caller, stream: Stream) -> None:
        with contextlib.suppress(OSError):  # the stream has ended; its reader will notice
            if not stream.flush():
                self._loop.add_writer(stream.fileno(), self._flush, caller, stream)
                return
            self._loop.remove_writer(stream.fileno())
            self._waited(caller)

    def _waited(self, caller: Caller) -> None:
        """Subtract a caller's waiting bytes, which are sent or lost; resume reading clients."""
        was_full = self._waiting_bytes > MAX_WAITING_BYTES
        self._waiting_bytes -= caller.waiting_bytes
        caller.waiting_bytes = 0
        if was_full:
            self._loop.call_soon(self._turn)

    # ---- from the server -----------------------------------------------------------------------

    def _answers(self, caller: Caller, stream: Stream) -> None:
        """Forward a message that the server sent."""
        try:
            can_send = caller.stream is stream and not caller.is_full
            messages = stream.receive(1) if can_send else []
        except (EOFError, RemoteProtocolError):
            self.connections.end(caller, "the server closed the connection")
            self._part(caller)
            return
        if messages:
            self._send(caller, stream, [caller.routing_id, *messages[0].parts])

    def _send(self, caller: Caller, stream: Stream, frames: list[Any]) -> None:
        """Send to a client. If it does not read, pause only its stream, and try again later."""
        if caller.stream is not stream:
            return
        is_large = any(len(frame) >= sockets.ZERO_COPY_BYTES for frame in frames)
        try:
            self._router.send_multipart(frames, sockets.DONTWAIT, copy=not is_large)
        except zmq.Again:
            caller.is_full = True
            self._loop.remove_reader(stream.fileno())
            self._loop.call_later(AGAIN_S, self._send, caller, stream, frames)
            return
        except zmq.ZMQError:  # EHOSTUNREACH, because of ROUTER_MANDATORY: the client is gone
            self._part(caller)
            return
        finally:
            self._stir()
        if caller.is_full:
            caller.is_full = False
            self._loop.add_reader(stream.fileno(), self._answers, caller, stream)
        if stream.has_more:
            self._loop.call_soon(self._answers, caller, stream)

    # ---- ends ----------------------------------------------------------------------------------

    def _part(self, caller: Caller) -> None:
        """Close a caller's stream, and with it the server's state for the caller."""
        stream, caller.stream = caller.stream, None
        if stream is None:
            return
        self._waited(caller)
        del self._callers[caller.routing_id]
        self._loop.remove_reader(stream.fileno())
        self._loop.remove_writer(stream.fileno())
        stream.close()

    def _forget(self, caller: Caller) -> None:
        self._part(caller)
        self.connections.remove(caller)
        del self._by_fd[caller.fd]

    async def _poll(self) -> None:
        """Check the limits of connections, and drop those that have ended."""
        self.connections.tick(time.monotonic())
        for caller in list(self._by_fd.values()):
            if inode_of(caller.fd) != caller.inode:
                self._forget(caller)
            elif caller.is_ended:
                self._part(caller)

    async def _look_at_keys(self) -> None:
        """End the connections of revoked keys, and report changed roles to the server."""
        standings = self.allowed.standings()
        changed: dict[str, Principal] = {}
        for caller in list(self._callers.values()):
            now = standings.get(caller.key)
            if now is None:
                self.connections.end(caller, "its key was revoked")
                self._part(caller)
            elif now != caller.principal:
                caller.principal = changed[now.tenant] = now
        for principal in changed.values():
            with contextlib.suppress(PipeSwitchError):  # the server and its sessions are gone
                await self._upstream.ask("caller", body=_told(principal))


async def _again(look: Callable[[], Any], pause_s: float) -> None:
    while True:
        await asyncio.sleep(pause_s)
        try:
            await look()
        except Exception:  # a bug: limits and revoked keys still count
            log.exception("a check of the connections failed")


def _told(principal: Principal) -> dict[str, Any]:
    return {"tenant": principal.tenant, "roles": in_order(principal.roles)}


def inode_of(fd: int, port: int = 0) -> int:
    """Return the inode of the socket with a descriptor number; 0 if there is none.
    The result is also 0 if the socket's own port is not ``port`` (0: any port).

    A number may be reused at once after its connection ends. Callers may later shut down the socket
    with this inode, so it must not be another socket of this process.
    """
    try:
        inode = os.fstat(fd).st_ino
        if not port:
            return inode
        with socket_of(fd) as sock:
            is_ours = os.fstat(sock.fileno()).st_ino == inode and sock.getsockname()[1] == port
            return inode if is_ours else 0
    except (OSError, IndexError):
        return 0


@contextlib.contextmanager
def socket_of(fd: int) -> Iterator[socket.socket]:
    """Yield a duplicate, which stays valid if the number is reused. OSError: not a socket."""
    duplicate = os.dup(fd)
    try:
        sock = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
    with sock:
        yield sock


def received_bytes(fd: int) -> int:
    """Return the bytes that the kernel has received on a TCP connection; 0 if unknown."""
    try:
        with socket_of(fd) as sock:
            facts = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0
    received: int = _RECEIVED.unpack_from(facts, _RECEIVED_AT)[0] if len(facts) > 128 else 0
    return received


def wire_bytes(frames: Sequence[Any]) -> int:
    """Return the size on the wire of an encrypted message with these frames."""
    sizes = [len(frame) + _CURVE_BYTES for frame in frames]
    return sum([size + (9 if size > _LONG_FRAME else 2) for size in sizes])
