"""A plain stream socket, at both ends: whole messages, and memory that both share.

It carries a message's parts behind a table of their sizes (docs/protocol.md), over TCP or the
owner's unix socket. The latter passes descriptors, so there can be a share: a sealed memfd of two
halves, one that the client writes and one that the server does. A tensor of SHARED_BYTES or more
goes there when there is room, and through the socket otherwise.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ..base.errors import RemoteProtocolError
from . import frames
from .slabs import SlabPool

SHARED_BYTES: Final = 64 << 10  # below, a copy through the socket costs as little
FIRST_READ_BYTES: Final = 4 << 10  # a table has 1,056 at most; more once so much has come
READ_BYTES: Final = 64 << 10  # at a time, of messages that are not known yet
LARGE_READ_BYTES: Final = 1 << 20  # at a time, of large parts: others have their turn then
KEEPALIVE_IDLE_S: Final = 10  # of TCP: then a probe every KEEPALIVE_INTERVAL_S
KEEPALIVE_INTERVAL_S: Final = 5
KEEPALIVE_COUNT: Final = 4  # unanswered ones, and the connection is gone
UNACKNOWLEDGED_MS: Final = 30_000  # so long, and it is gone too
_CONTROL_BYTES: Final = socket.CMSG_SPACE(4)
_CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)
ALIGN_BYTES: Final = 64  # where a part begins in its message's buffer
MAX_BUFFERS: Final = 1024  # in one call; the kernel refuses more (UIO_MAXIOV)


class WireMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One that has come whole."""

    parts: list[Any]  # buffers, as of a ZeroMQ message: magic, header, tensors; none: see Share
    size_bytes: int  # through the socket
    taken_count: int
    shared: frozenset[int]  # which parts lie in the share, where the peer can still change them
    descriptors: tuple[int, ...] = ()


class ShmSegment:
    """Memory of a local client and the server, by one of the two.

    ``place`` and ``free`` are of one's own half; ``find`` is of the other's.
    """

    def __init__(self, descriptor: int, *, is_servers: bool) -> None:
        """Map it; the descriptor stays the caller's.

        Raises:
            OSError, ValueError: it cannot be mapped.
        """
        memory = memoryview(mmap.mmap(descriptor, 0))
        half = len(memory) // 2
        clients, servers = memory[:half], memory[half : 2 * half]
        self._own, self._others = (servers, clients) if is_servers else (clients, servers)
        self._slabs = SlabPool(half)

    def place(self, size_bytes: int) -> int:
        """Room for a part in the own half; INLINE: there is none."""
        offset = self._slabs.take(size_bytes)
        return frames.INLINE if offset is None else offset

    def own(self, place: int, size_bytes: int) -> memoryview:
        """Return a view of the own share, for writing."""
        return self._own[place : place + size_bytes]

    def free(self, place: int) -> None:
        """Free a part that the peer has taken. KeyError: it was free."""
        self._slabs.free(place)

    def find(self, place: int, size_bytes: int) -> memoryview:
        """Return a part of the peer's.

        Raises:
            RemoteProtocolError: it lies outside of the peer's half.
        """
        if place + size_bytes > len(self._others):
            raise RemoteProtocolError(f"{size_bytes} bytes at {place} are not in the shared memory")
        return self._others[place : place + size_bytes]


class Stream:
    """One end of a connection. Never blocks; one thread's at a time."""

    def __init__(
        self, sock: socket.socket, max_part_bytes: int, *, takes_descriptors: bool = False
    ) -> None:
        """Read from ``sock``; without ``takes_descriptors`` the kernel closes descriptors."""
        sock.setblocking(False)
        self._socket = sock
        self._max_part_bytes = max_part_bytes
        self._takes_descriptors = takes_descriptors
        # Of a message:
        self.max_bytes = frames.MAX_HEADER_BYTES + frames.MAX_TENSORS * max_part_bytes
        self.share: ShmSegment | None = None
        self._buffer = bytearray(FIRST_READ_BYTES)
        self._start = self._end = 0  # what of it is not parsed yet
        self._message: WireMessage | None = None  # whose parts are being read
        self._unread: deque[memoryview] = deque()  # what is still to come of it
        self._descriptors: tuple[int, ...] = ()
        self._unsent: list[Any] = []
        self.has_more = False  # a whole message may have come that was not returned yet

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Idempotent. Parts that were handed out keep the share's mapping."""
        self._socket.close()
        self.share = None

    @property
    def is_connected(self) -> bool:
        """The other end took the connection, and it has not been reset."""
        try:
            self._socket.getpeername()
        except OSError:
            return False
        return True

    def hang_up(self) -> None:
        """Both ends read its end; what came before is read first."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def held_bytes(self) -> int:
        """Number of bytes held of a message that has arrived in part."""
        begun = self._message.size_bytes if self._message is not None else 0
        return begun - sum(map(len, self._unread)) + self._end - self._start

    # ---- out -----------------------------------------------------------------------------------

    @property
    def is_sending(self) -> bool:
        """Something waits until the socket is writable."""
        return bool(self._unsent)

    def put(self, table: bytes, inline: Sequence[Any] = ()) -> None:
        """Add a message to what leaves with ``flush``; its buffers must not change until then."""
        self._unsent.append(table)
        self._unsent += filter(len, inline)

    def bring(self, descriptor: int) -> None:
        """Send a share, or that there is none (-1), while nothing else waits. It stays open here.

        Raises:
            OSError: the peer is gone, or does not read.
        """
        packed = array.array("i", [descriptor] if descriptor >= 0 else []).tobytes()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if packed else []
        self._socket.sendmsg([frames.pack_table(())], rights, socket.MSG_NOSIGNAL)

    def flush(self) -> bool:
        """Send what there is; False: some of it has to wait until the socket is writable.

        Raises:
            OSError: the peer is gone.
        """
        while self._unsent:
            try:
                sent = self._socket.sendmsg(self._unsent[:MAX_BUFFERS], (), _NO_SIGNAL)
            except BlockingIOError:
                return False
            gone = 0
            for part in self._unsent:
                if sent < (size := len(part)):
                    break
                sent -= size
                gone += 1
            del self._unsent[:gone]
            if sent:
                self._unsent[0] = memoryview(self._unsent[0])[sent:]
        return True

    # ---- in ------------------------------------------------------------------------------------

    def receive(self, at_most: int) -> list[WireMessage]:
        """Read without waiting; whole messages that have come.

        Raises:
            EOFError: the peer is gone.
            RemoteProtocolError: it sent what is no message: nothing can be read after that.
        """
        has_some = self._message is not None or self._end > self._start
        messages = self._parse(at_most) if has_some else []
        if not messages:  # else the end of the connection would hide them
            is_begun = bool(self._unread)
            self._read()
            messages = self._parse(at_most)
            if self._unread and not is_begun:
                self._read()  # more of it has come than a table has room for
                messages += self._parse(at_most - len(messages))
        self.has_more = len(messages) == at_most
        return messages

    def _read(self) -> None:
        try:
            size = self._read_parts() if self._unread else self._read_some()
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            raise EOFError("the peer is gone")

    def _read_parts(self) -> int:
        """Receive parts of a message whose table is known, up to LARGE_READ_BYTES.

        A window that this opens is filled again while it is read.
        """
        total = 0
        while self._unread and total < LARGE_READ_BYTES:
            target = self._unread[0]
            try:
                size = self._socket.recv_into(target)
            except BlockingIOError:
                if not total:
                    raise
                break
            if not size:
                break  # what has come is not whole: the next read says that it ended
            total += size
            self._unread[0] = target[size:]
            if not self._unread[0]:
                self._unread.popleft()
        return total

    def _read_some(self) -> int:
        """Receive into the buffer, which has enough free space."""
        if self._start:
            unread = self._buffer[self._start : self._end]
            self._buffer[: len(unread)] = unread
            self._start, self._end = 0, len(unread)
        if self._end > len(self._buffer) // 2 and len(self._buffer) < READ_BYTES:
            self._buffer += bytes(READ_BYTES - len(self._buffer))
        target = memoryview(self._buffer)[self._end :]
        if not self._takes_descriptors:
            size = self._socket.recv_into(target)
        else:
            size, control, _, _ = self._socket.recvmsg_into(
                [target], _CONTROL_BYTES, _CLOSE_ON_EXEC
            )
            for level, kind, payload in control:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    self._descriptors = (*self._descriptors, *array.array("i", payload))
        self._end += size
        return size

    def _parse(self, at_most: int) -> list[WireMessage]:
        messages: list[WireMessage] = []
        while len(messages) < at_most and not self._unread:
            if self._message is not None:
                messages.append(self._message)
                self._message = None
                continue
            if self._start == self._end:
                break
            with memoryview(self._buffer) as buffer:
                table = frames.read_table(buffer[self._start : self._end], self._max_part_bytes)
                if table is None:
                    break
                self._start += table[0]
                self._message = self._begin(table, buffer)
        return messages

    def _begin(self, table: frames.Table, buffer: memoryview) -> WireMessage:
        """Begin a message; its parts that come through the socket are views of one buffer.

        Raises:
            RemoteProtocolError: the parts are too large together, or a place is not in the share.
        """
        table_bytes, taken_count, places = table
        size_bytes = body_bytes = 0
        for size, place in places:
            if place == frames.INLINE:
                size_bytes += size
                body_bytes += size + -size % ALIGN_BYTES
        if size_bytes > self.max_bytes:
            raise RemoteProtocolError(f"a message of {size_bytes} bytes is over {self.max_bytes}")
        body = memoryview(bytearray(body_bytes)) if body_bytes <= READ_BYTES else _pages(body_bytes)
        parts: list[Any] = [frames.MAGIC] if places else []
        shared, at = set(), 0
        for size, place in places:
            if place != frames.INLINE:
                if self.share is None:
                    raise RemoteProtocolError("there is no shared memory for a part")
                shared.add(len(parts))
                parts.append(self.share.find(place, size))
                continue
            here = min(size, self._end - self._start)
            part = body[at : at + size]
            part[:here] = buffer[self._start : self._start + here]
            parts.append(part)
            if here < size:
                self._unread.append(part[here:])
            self._start += here
            at += size + -size % ALIGN_BYTES
        descriptors, self._descriptors = self._descriptors, ()
        return WireMessage(
            parts=parts,
            size_bytes=table_bytes + size_bytes,
            taken_count=taken_count,
            shared=frozenset(shared),
            descriptors=descriptors,
        )


def keep_alive(sock: socket.socket) -> None:
    """Configure a TCP connection: send at once, and notice a machine that is gone."""
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS),
    ):
        sock.setsockopt(level, option, value)


def _pages(size_bytes: int) -> memoryview:
    """Memory that is taken as it is written: a table alone costs none, and no time to clear it.

    The allocator's, not the kernel's: what the last message left is taken again.

    Raises:
        RemoteProtocolError: there is not that much.
    """
    import numpy as np

    try:
        memory: Any = np.empty(size_bytes, dtype=np.uint8)
    except (MemoryError, ValueError):
        raise RemoteProtocolError(f"no memory for {size_bytes} bytes") from None
    return memoryview(memory)
