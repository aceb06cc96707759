"""ZeroMQ with keys: where other machines can reach the server's TCP address (docs/adr/0038).

libzmq proves who a client is (CURVE, and the allow-list by ZAP); what it sends goes on, part for
part, by a plain stream of its own to the owner's socket, where it is named first. So the server
sees a connection for each client, with that one's name and roles, and decides as for any other;
nothing is decided or understood here. What bytes may do to libzmq, they do to this process.

libzmq's caps bound one frame and the count of whole messages, but not a message that never ends.
The kernel counts what it received on each connection: what did not come out as a message is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import Struct
from typing import Any, Final

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ..errors import PipeSwitchError, RemoteProtocolError
from ..frontend.connections import ROUND_S, Connection, Connections
from ..ipc.messages import KeyedSettings
from ..roles import Standing, in_order, parse_roles
from ..wire.frames import (
    INLINE,
    MAGIC,
    MAX_TENSORS,
    VERSION,
    RequestHeader,
    encode_header,
    pack_table,
)
from ..wire.keys import AllowList, KeyFolder
from ..wire.sockets import (
    DONTWAIT,
    ZAP_DOMAIN,
    Caps,
    is_readable,
    make_router,
    next_events,
    require_keys,
    send_frames,
    watch_connections,
)
from ..wire.stream import Stream
from .upstream import Upstream

log = logging.getLogger(__name__)

KEYS_LOOK_S: Final = 1.0  # between looks at the allow-list, for clients that are in already
AGAIN_S: Final = 0.005  # until a client that does not read is tried again
BURST_MESSAGES: Final = 16  # in one turn, before the answers and HTTP get theirs
BURST_PARTS: Final = 1_000  # of one message: libzmq bounds neither their number nor their memory
BURST_EVENTS: Final = 32
MAX_WAITING_BYTES: Final = 64 << 20  # for the server to read: then no more is taken from clients
MAX_ANSWER_BYTES: Final = 1 << 32  # of one part; the server is trusted
ZERO_COPY_BYTES: Final = 64 << 10
HEARTBEAT_BYTES_PER_S: Final = 128  # pings and pongs come out as no message
REVOKED: Final = "a key was revoked"
_WATCHED: Final = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
_ACCEPTED: Final = int(zmq.EVENT_ACCEPTED)
_SRCFD: Final = int(zmq.SRCFD)
_ROUTING_ID: Final = re.compile(rb"\0[\s\S]{4}")  # as libzmq makes them itself
_TCP_INFO_BYTES: Final = 136
_RECEIVED: Final = Struct("=Q")  # tcpi_bytes_received
_RECEIVED_AT: Final = 128  # its offset in linux/tcp.h
_LONG_FRAME: Final = 255  # ZMTP: a longer frame's header has 9 bytes instead of 2
_CURVE_BYTES: Final = 33  # around a frame's content: MESSAGE, nonce, flags, MAC


class Caller(Connection):
    """One connection of libzmq's and, once it has sent a message, its stream to the server."""

    def __init__(self, fd: int, inode: int) -> None:
        self.fd = fd
        self.inode = inode  # tells it from a later connection with the same descriptor number
        self.taken_bytes = 0  # on the wire, of messages that came out
        self.routing_id = b""
        self.key = b""
        self.standing = Standing(tenant="?", roles=frozenset())
        self.stream: Stream | None = None
        self.parked: list[Any] = []  # an answer that libzmq does not take yet
        self.waiting_bytes = 0  # for the server to read

    def held_bytes(self, now_s: float) -> int:
        if socket_inode(self.fd) != self.inode:
            return -1
        received = received_bytes(self.fd) - self.taken_bytes
        return max(0, received - int(HEARTBEAT_BYTES_PER_S * (now_s - self.since_s)))

    def hang_up(self) -> None:
        """libzmq has no call for one peer, so its socket is shut down.

        The descriptor is duplicated first, then compared: it cannot become another one between.
        """
        with contextlib.suppress(OSError):
            duplicate = os.dup(self.fd)
            with socket.socket(fileno=duplicate) as sock:
                if os.fstat(duplicate).st_ino == self.inode:
                    sock.shutdown(socket.SHUT_RDWR)


class KeyedDoor:
    """The ROUTER, its clients, and a stream for each. Owned by the loop's thread."""

    def __init__(self, descriptor: int, settings: KeyedSettings, address: str) -> None:
        """
        Args:
            descriptor: of the socket that listens; this one's from now on.
            address: of the owner's socket.
        """
        self._settings = settings
        self._path = address.removeprefix("ipc://")
        self._port = int(settings.address.rpartition(":")[2])
        self._upstream = Upstream(address)
        folder = KeyFolder(Path(settings.keys_dir))
        self.allowed = AllowList(folder, parse_roles(settings.roles))
        self.connections = Connections(
            max_count=settings.max_connections,
            client_bytes=settings.client_bytes,
            total_bytes=2 * settings.client_bytes,
        )
        self._by_fd: dict[int, Caller] = {}
        self._callers: dict[bytes, Caller] = {}  # by routing id: those with a stream
        self._begun: list[zmq.Frame] = []  # a message of too many parts, still being read
        self._waiting_bytes = 0
        self._is_stirred = False
        self._tasks: list[asyncio.Task[None]] = []
        keys = folder.server()
        if keys is None:
            raise RemoteProtocolError("the server has no key")
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context, log=log)
        self._authenticator.start()  # it must answer before a client can ask
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, self.allowed)
        self._router = make_router(
            self._context, Caps(max_message_bytes=settings.max_message_bytes)
        )
        self._router.setsockopt(zmq.IPV6, int("[" in settings.address))
        require_keys(self._router, keys)
        self._router.setsockopt(zmq.USE_FD, descriptor)
        self._monitor = watch_connections(self._router, _WATCHED)
        self._router.bind(settings.address)
        self._numbers: list[Any] = [sock.get(zmq.FD) for sock in (self._router, self._monitor)]

    def open(self) -> None:
        """Within the running loop."""
        self._loop = asyncio.get_running_loop()
        for number in self._numbers:
            self._loop.add_reader(number, self._stir)
        for look, pause_s in ((self._look_at_keys, KEYS_LOOK_S), (self._look, ROUND_S)):
            self._tasks.append(self._loop.create_task(_again(look, pause_s)))
        self._stir()

    def close(self) -> None:
        """Idempotent."""
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
        """A descriptor of libzmq's tells of a *change*, and any use of its socket may swallow that:
        what was used is looked at again (zmq_getsockopt(3), ZMQ_FD)."""
        if not self._is_stirred:
            self._is_stirred = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_stirred = False
        if self._router.closed:
            return
        for event, fd in next_events(self._monitor, BURST_EVENTS):
            self._note(event, fd)
        for _ in range(BURST_MESSAGES):
            if self._waiting_bytes > MAX_WAITING_BYTES or not is_readable(self._router):
                break
            frames = self._next_message()
            if frames is not None:
                self._hear(frames)
        has_more = self._waiting_bytes <= MAX_WAITING_BYTES and is_readable(self._router)
        if has_more or is_readable(self._monitor):
            self._stir()

    def _note(self, event: int, fd: int) -> None:
        """A connection came, or one with this number went, which may be an earlier one."""
        known = self._by_fd.get(fd)
        if known is not None and socket_inode(fd) != known.inode:
            self._forget(known)
        if event == _ACCEPTED:
            self._caller_at(fd)

    def _caller_at(self, fd: int) -> Caller | None:
        """The news of a connection may come after its first message."""
        inode = connection_inode(fd, self._port)
        known = self._by_fd.get(fd)
        if known is not None and known.inode == inode:
            return known
        if known is not None:
            self._forget(known)
        if not inode:
            return None  # it has ended already
        caller = self._by_fd[fd] = Caller(fd, inode)
        self.connections.add(caller, time.monotonic())
        return caller

    def _next_message(self) -> list[zmq.Frame] | None:
        """None: it has too many parts; they are dropped as they come, a burst at a time."""
        frames = self._begun or [_next_frame(self._router)]
        is_new = not self._begun
        for _ in range(BURST_PARTS):
            if not frames[-1].more:
                break
            frame = _next_frame(self._router)  # a message comes whole
            if len(frames) < MAX_TENSORS + 4:
                frames.append(frame)
            else:
                frames[-1] = frame  # too many: only the last one's `more` matters now
        if frames[-1].more:
            self._begun = frames
            caller = self._caller_at(_descriptor(frames[0])) if is_new else None
            if caller is not None:  # once: its number may be another's by and by
                self.connections.end(caller, "too many parts")
            return None
        was_begun, self._begun = bool(self._begun), []
        return None if was_begun else frames

    def _hear(self, frames: Sequence[zmq.Frame]) -> None:
        """A whole message: to the server, by its sender's stream."""
        routing_id = bytes(frames[0].buffer)
        caller = self._callers.get(routing_id) or self._admit(routing_id, frames[0])
        if caller is None or caller.is_ended or caller.stream is None:
            return
        parts = [frame.buffer for frame in frames[1:]]
        caller.taken_bytes += wire_bytes(parts)
        if len(parts) < 2 or len(parts) > MAX_TENSORS + 2 or bytes(parts[0]) != MAGIC:
            self.connections.end(caller, "nonsense")
            return
        self._put(caller, parts[1:])

    def _admit(self, routing_id: bytes, frame: zmq.Frame) -> Caller | None:
        """A client's first message: who it is, and a stream to the server for it."""
        caller = self._caller_at(_descriptor(frame))
        if caller is None or caller.is_ended:
            return None
        try:
            caller.key = str(frame.get("User-Id")).encode()
        except (zmq.ZMQError, KeyError):
            caller.key = b""
        standing = self.allowed.standings().get(caller.key)
        if standing is None or not _ROUTING_ID.fullmatch(routing_id):
            self.connections.end(
                caller, "no key" if standing is None else "a routing id of its own"
            )
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(self._path)
        except OSError as error:
            sock.close()
            log.warning("client=%s refused cause=%r", standing.tenant, error.strerror)
            self.connections.end(caller, "no server")
            return None
        caller.stream = Stream(sock, MAX_ANSWER_BYTES)
        caller.standing = standing
        caller.routing_id = routing_id
        self._callers[routing_id] = caller
        self.connections.greeted(caller, standing.tenant)
        self._loop.add_reader(sock, self._answers, caller)
        header = RequestHeader(v=VERSION, op="caller", id="caller", body=_told(standing))
        self._put(caller, [encode_header(header)])
        return caller

    def _put(self, caller: Caller, parts: Sequence[Any]) -> None:
        stream = caller.stream
        if stream is None:
            return
        stream.put(pack_table([(len(part), INLINE) for part in parts]), parts)
        size_bytes = sum(map(len, parts))
        caller.waiting_bytes += size_bytes
        self._waiting_bytes += size_bytes
        self._flush(caller)

    def _flush(self, caller: Caller) -> None:
        stream = caller.stream
        if stream is None:
            return
        try:
            is_flushed = stream.flush()
        except OSError:
            return  # it is gone: to read it says so
        if is_flushed:
            self._waiting_bytes -= caller.waiting_bytes
            caller.waiting_bytes = 0
            self._loop.remove_writer(stream.fileno())
            self._stir()
        else:
            self._loop.add_writer(stream.fileno(), self._flush, caller)

    # ---- from the server -----------------------------------------------------------------------

    def _answers(self, caller: Caller) -> None:
        stream = caller.stream
        if stream is None or caller.parked:
            return
        try:
            messages = stream.receive(1)
        except (EOFError, RemoteProtocolError):
            self.connections.end(caller, "the server hung up")
            self._part(caller)
            return
        for message in messages:
            caller.parked = [caller.routing_id, *message.parts]
            self._send(caller)
        if stream.has_more and not caller.parked:
            self._loop.call_soon(self._answers, caller)

    def _send(self, caller: Caller) -> None:
        """What was parked. A client that does not read holds up its own stream alone."""
        if caller.stream is None or self._router.closed:
            return
        is_large = any(len(part) >= ZERO_COPY_BYTES for part in caller.parked)
        try:
            send_frames(self._router, caller.parked, DONTWAIT, copy=not is_large)
        except zmq.Again:
            self._loop.remove_reader(caller.stream.fileno())
            self._loop.call_later(AGAIN_S, self._resume, caller)
            return
        except zmq.ZMQError:  # EHOSTUNREACH: ROUTER_MANDATORY tells us
            self._part(caller)
            return
        caller.parked = []
        self._stir()

    def _resume(self, caller: Caller) -> None:
        if caller.stream is not None:
            self._send(caller)
        if caller.stream is not None and not caller.parked:
            self._loop.add_reader(caller.stream.fileno(), self._answers, caller)
            self._answers(caller)

    # ---- ends ----------------------------------------------------------------------------------

    def _part(self, caller: Caller) -> None:
        """Its stream ends, and with it what the server has of it."""
        stream, caller.stream = caller.stream, None
        if stream is None:
            return
        self._waiting_bytes -= caller.waiting_bytes
        caller.waiting_bytes = 0
        self._callers.pop(caller.routing_id, None)
        self._loop.remove_reader(stream.fileno())
        self._loop.remove_writer(stream.fileno())
        stream.close()
        self._stir()

    def _forget(self, caller: Caller) -> None:
        """Its connection has ended."""
        self._part(caller)
        self.connections.remove(caller)
        if self._by_fd.get(caller.fd) is caller:
            del self._by_fd[caller.fd]

    async def _look(self) -> None:
        """At what connections hold, and at those that ended unnoticed."""
        self.connections.tick(time.monotonic())
        for caller in [one for one in self._by_fd.values() if one.is_ended]:
            self._part(caller)
            if socket_inode(caller.fd) != caller.inode:
                self._forget(caller)

    async def _look_at_keys(self) -> None:
        """A key that was revoked ends its connections; roles that changed are told."""
        standings = self.allowed.standings()
        changed: dict[str, Standing] = {}
        for caller in list(self._callers.values()):
            now = standings.get(caller.key)
            if now is None:
                self.connections.end(caller, REVOKED)
                self._part(caller)
            elif now != caller.standing:
                caller.standing = changed[now.tenant] = now
        for standing in changed.values():
            with contextlib.suppress(PipeSwitchError):  # it is gone, and so are they
                await self._upstream.ask("caller", body=_told(standing))


async def _again(look: Callable[[], Any], pause_s: float) -> None:
    while True:
        await asyncio.sleep(pause_s)
        await look()


def _told(standing: Standing) -> dict[str, Any]:
    return {"tenant": standing.tenant, "roles": in_order(standing.roles)}


def _next_frame(router: zmq.Socket[bytes]) -> zmq.Frame:
    frame: zmq.Frame = router.recv(DONTWAIT, copy=False)
    return frame


def _descriptor(routing_frame: zmq.Frame) -> int:
    """Of the connection a message came by; -1 where libzmq does not know it."""
    try:
        return int(routing_frame.get(_SRCFD))
    except zmq.ZMQError:
        return -1


def socket_inode(fd: int) -> int:
    """The identity of the socket behind a descriptor number; 0 when there is none."""
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return 0


def connection_inode(fd: int, port: int) -> int:
    """The identity of a connection to this port; 0 when the number means something else by now.

    A number is reused at once after its connection ends, and what is looked at here may be hung
    up later: it must be a connection of this port, and never anything else of this process.
    """
    with contextlib.suppress(OSError), os.fdopen(os.dup(fd), "rb", buffering=0) as held:
        sock = socket.socket(fileno=held.fileno())
        try:
            name = sock.getsockname()
            if not isinstance(name, str) and name[1] == port:
                return os.fstat(held.fileno()).st_ino
        finally:
            sock.detach()
    return 0


def received_bytes(fd: int) -> int:
    """What the kernel has received on a TCP connection; 0 when it does not say."""
    sock = None
    try:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=fd)
        facts = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0
    finally:
        if sock is not None:
            sock.detach()  # it is libzmq's
    received: int = _RECEIVED.unpack_from(facts, _RECEIVED_AT)[0] if len(facts) > 128 else 0
    return received


def wire_bytes(frames: Sequence[Any]) -> int:
    """What a message of these frames was on the wire, with keys."""
    total = 0
    for frame in frames:
        size = len(frame) + _CURVE_BYTES
        total += size + (9 if size > _LONG_FRAME else 2)
    return total
