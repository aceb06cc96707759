"""Stream connection of client and server, for both sides: whole messages, and shared memory.

A message is a table of its parts' sizes, then the parts (docs/protocol.md), over TCP or the owner's
unix socket. A unix socket can pass descriptors, so both sides can have a share: a sealed memfd with
a half that the client writes and a half that the server writes. A tensor of SHARED_BYTES or more
is put into the share if there is space, else sent through the socket.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from ..base.errors import RemoteProtocolError
from . import frames
from .slabs import SlabPool

SHARED_BYTES: Final = 64 << 10  # for smaller parts a copy through the socket is as fast
FIRST_READ_BYTES: Final = 4 << 10  # first size of the buffer; a table has at most 1,056 bytes
READ_BYTES: Final = 64 << 10  # limit of one read if the message's table is not known yet
LARGE_READ_BYTES: Final = 1 << 20  # limit of one read of parts, so that other connections can run
KEEPALIVE_IDLE_S: Final = 10  # TCP sends the first probe after this silence
KEEPALIVE_INTERVAL_S: Final = 5
KEEPALIVE_COUNT: Final = 4  # unanswered probes that end the connection
UNACKNOWLEDGED_MS: Final = 30_000  # unacknowledged data of this age ends the connection
_CONTROL_BYTES: Final = socket.CMSG_SPACE(4)
_CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)
ALIGN_BYTES: Final = 512  # of parts in their message's buffer, as for tensors in the request pool
MAX_BUFFERS: Final = 1024  # the kernel refuses more buffers in one call (UIO_MAXIOV)


class WireMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that has arrived as a whole."""

    parts: list[Any]  # buffers: magic, header, tensors; empty: a request for a share, or a share
    size_bytes: int  # bytes that came through the socket
    taken_count: int
    shared: frozenset[int]  # indices of parts in the share, where the peer can still change them
    descriptors: tuple[int, ...] = ()


class ShmSegment:
    """One side's view of the share of a local client and the server.

    ``place``, ``own`` and ``free`` use this side's half; ``find`` uses the peer's half.
    """

    def __init__(self, descriptor: int, *, is_servers: bool) -> None:
        """Map the share; the caller keeps the descriptor.

        Raises:
            OSError, ValueError: the descriptor cannot be mapped.
        """
        memory = memoryview(mmap.mmap(descriptor, 0))
        half = len(memory) // 2
        clients, servers = memory[:half], memory[half : 2 * half]
        self._own, self._others = (servers, clients) if is_servers else (clients, servers)
        self._slabs = SlabPool(half)

    def place(self, size_bytes: int) -> int:
        """Allocate a part in this side's half; return its place, or INLINE if there is no space."""
        offset = self._slabs.take(size_bytes)
        return frames.INLINE if offset is None else offset

    def own(self, place: int, size_bytes: int) -> memoryview:
        """Return a writable view of a range in this side's half."""
        return self._own[place : place + size_bytes]

    def free(self, place: int) -> None:
        """Free a part that the peer has taken; raise KeyError if it is free already."""
        self._slabs.free(place)

    def find(self, place: int, size_bytes: int) -> memoryview:
        """Return a part in the peer's half, which the peer can still change.

        Raises:
            RemoteProtocolError: the range is outside of the peer's half.
        """
        if place + size_bytes > len(self._others):
            raise RemoteProtocolError(f"{size_bytes} bytes at {place} are not in the shared memory")
        return self._others[place : place + size_bytes]


class Stream:
    """One end of a connection. It never blocks, and only one thread at a time may use it."""

    def __init__(
        self, sock: socket.socket, max_part_bytes: int, *, takes_descriptors: bool = False
    ) -> None:
        """``takes_descriptors``: receive descriptors; otherwise the kernel closes them."""
        sock.setblocking(False)
        self._socket = sock
        self._max_part_bytes = max_part_bytes
        self._takes_descriptors = takes_descriptors
        self.max_bytes = frames.MAX_HEADER_BYTES + frames.MAX_TENSORS * max_part_bytes
        self.share: ShmSegment | None = None
        # Returns memory for the tensors of a large message, or None. Gets the message's frames, in
        # which the tensors are empty, and the number of bytes.
        self.lend: Callable[[Sequence[Any], int], memoryview | None] = lambda *_: None
        self._buffer = bytearray(FIRST_READ_BYTES)
        self._start = self._end = 0  # range of the buffer that is not parsed yet
        self._message: WireMessage | None = None  # the message whose parts are being read
        self._unread: deque[memoryview] = deque()  # space for its bytes that have not arrived
        self._descriptors: tuple[int, ...] = ()
        self._unsent: list[Any] = []
        self.has_more = False  # True if ``receive`` may have a whole message that it did not return

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket. Idempotent. Parts of received messages keep the share's mapping."""
        self._socket.close()
        self.share = self._message = None
        self._unread.clear()  # these and ``lend`` may hold memory of others
        self.lend = lambda *_: None

    @property
    def is_connected(self) -> bool:
        """True if the connection was established and has not been reset."""
        try:
            self._socket.getpeername()
        except OSError:
            return False
        return True

    def hang_up(self) -> None:
        """Shut the connection down. Both ends read earlier data, then the end of the stream."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def held_bytes(self) -> int:
        """Bytes in memory of a message that has arrived only in part."""
        begun = self._message.size_bytes if self._message is not None else 0
        return begun - sum(map(len, self._unread)) + self._end - self._start

    # ---- out -----------------------------------------------------------------------------------

    @property
    def is_sending(self) -> bool:
        """True if data waits until the socket is writable."""
        return bool(self._unsent)

    def put(self, table: bytes, inline: Sequence[Any] = ()) -> None:
        """Queue a message for ``flush``; its buffers must not change until it is sent."""
        self._unsent.append(table)
        self._unsent += filter(len, inline)

    def bring(self, descriptor: int) -> None:
        """Send a share; -1: answer that there is none. No other data may wait to be sent.

        Raises:
            OSError: the peer is gone, or does not read.
        """
        packed = array.array("i", [descriptor] if descriptor >= 0 else []).tobytes()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if packed else []
        self._socket.sendmsg([frames.pack_table(())], rights, socket.MSG_NOSIGNAL)

    def flush(self) -> bool:
        """Send queued data; return False if a part has to wait until the socket is writable.

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
        """Read without waiting; return up to ``at_most`` messages that have arrived as a whole.

        Raises:
            EOFError: the peer is gone.
            RemoteProtocolError: the data is not a message; the stream cannot be read any more.
        """
        has_some = self._message is not None or self._end > self._start
        messages = self._parse(at_most) if has_some else []
        if not messages:  # return buffered messages first: reading may raise EOFError
            is_begun = bool(self._unread)
            self._read()
            messages = self._parse(at_most)
            if self._unread and not is_begun:
                self._read()  # parts that did not fit into the buffer may have arrived too
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

        Several reads are worthwhile: each one opens TCP's window, which the peer fills meanwhile.
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
                break  # the stream has ended within a message; the next read raises EOFError
            total += size
            self._unread[0] = target[size:]
            if not self._unread[0]:
                self._unread.popleft()
        return total

    def _read_some(self) -> int:
        """Receive into the buffer, after making space in it; return the number of bytes."""
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
        """Begin a message; parts that come through the socket are views of one buffer.
        Raises RemoteProtocolError: the message is too large, or a place is not in the share."""
        table_bytes, taken_count, places = table
        size_bytes = body_bytes = 0
        for size, place in places:
            if place == frames.INLINE:
                size_bytes += size
                body_bytes += size + -size % ALIGN_BYTES
        if size_bytes > self.max_bytes:
            raise RemoteProtocolError(f"a message of {size_bytes} bytes is over {self.max_bytes}")
        if body_bytes <= READ_BYTES:
            body, head_bytes = memoryview(bytearray(body_bytes)), 0
        else:
            body, head_bytes = self._large_body(places, body_bytes, buffer)
        parts: list[Any] = [frames.MAGIC] if places else []
        shared, at = set(), -head_bytes
        for size, place in places:
            if place != frames.INLINE:
                if self.share is None:
                    raise RemoteProtocolError("there is no shared memory for a part")
                shared.add(len(parts))
                parts.append(self.share.find(place, size))
                continue
            here = min(size, self._end - self._start)
            part = body[at : at + size] if at >= 0 else memoryview(bytearray(size))
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

    def _large_body(
        self, places: Sequence[tuple[int, int]], body_bytes: int, buffer: memoryview
    ) -> tuple[memoryview, int]:
        """Return memory for all parts, and 0; or lent memory for the tensors, and the size of the
        header, which is received elsewhere."""
        head = places[0][0]
        head_bytes = head + -head % ALIGN_BYTES
        if head <= self._end - self._start and all(place == frames.INLINE for _, place in places):
            header = buffer[self._start : self._start + head]
            begun = [frames.MAGIC, header, *([b""] * (len(places) - 1))]
            if (lent := self.lend(begun, body_bytes - head_bytes)) is not None:
                return lent, head_bytes
        return _pages(body_bytes), 0


def keep_alive(sock: socket.socket) -> None:
    """Configure a TCP connection to send at once and to detect a dead peer."""
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
    """Return uninitialised memory, whose pages are allocated when they are written.

    A peer that only announces parts thus costs no memory. The C allocator reuses earlier memory.

    Raises:
        RemoteProtocolError: there is not enough memory.
    """
    import numpy as np

    try:
        memory: Any = np.empty(size_bytes, dtype=np.uint8)
    except (MemoryError, ValueError):
        raise RemoteProtocolError(f"no memory for {size_bytes} bytes") from None
    return memoryview(memory)
