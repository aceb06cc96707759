"""Links: each is one connection to a server, over a plain socket.

The link of the server's owner can also pass tensors through shared memory. ``Connection`` says
which thread may use a link. ``extras/curve`` has the link for servers that require keys."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from ..base.errors import PermissionDenied, RemoteProtocolError
from ..wire.frames import INLINE, ZMTP, pack_table
from ..wire.stream import SHARED_BYTES, ShmSegment, Stream, keep_alive

MAX_REPLY_BYTES: Final = 1 << 32  # limit of one frame; high, because a client trusts its server
BURST_MESSAGES: Final = 16
BRING: Final = (
    "key= and server_key=, or PIPESWITCH_KEY and PIPESWITCH_SERVER_KEY; "
    "the server's owner makes them: pipeswitch keys client NAME"
)


class Watcher(Protocol):
    """Waits for descriptors: ``select.poll``, ``zmq.Poller`` (with keys) or an event loop."""

    def register(self, fd: Any, eventmask: int = ..., /) -> None: ...

    def unregister(self, fd: Any, /) -> None: ...


@dataclass(kw_only=True, eq=False)
class ServerLink(ABC):
    """Connection to a server, or an attempt to connect. A new link replaces a broken one."""

    hello_id: str
    session: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    @abstractmethod
    def listened_s(self) -> float:
        """Monotonic time at which a server last listened at the address; 0: never."""

    @abstractmethod
    def attach(self, poller: Watcher) -> None:
        """Let the poller watch the link."""

    @abstractmethod
    def detach(self, poller: Watcher) -> None: ...

    @abstractmethod
    def send(self, parts: Sequence[Any], request_id: str, *, may_share: bool = False) -> None: ...

    @abstractmethod
    def messages(self) -> Iterator[Sequence[Any]]:
        """Yield what has arrived. Raises OSError if the connection is broken."""

    @abstractmethod
    def close(self, linger_ms: int) -> None: ...

    @abstractmethod
    def answered(self, request_id: str) -> None:
        """Release what the link keeps for a request, because its final reply has arrived."""


@dataclass(kw_only=True, eq=False)
class StreamLink(ServerLink):
    """Link over a plain socket. With ``may_share`` it requests shared memory for large tensors."""

    stream: Stream
    may_share: bool
    address: str
    _poller: Watcher | None = None
    _number: int = -1  # file descriptor of the socket
    _is_watched: bool = False  # True: the poller also waits until the socket is writable
    _has_asked: bool = False
    # request id -> number of the message's part -> place in the shared memory
    _places: dict[str, dict[int, int]] = field(default_factory=dict)
    _taken_count: int = 0  # number of the server's parts copied out of the shared memory

    @staticmethod
    def open(address: str, hello_id: str, *, may_share: bool) -> StreamLink:
        """Open a link without waiting. If it cannot connect, ``messages`` raises the error.

        Raises:
            OSError: no server listens at an ``ipc://`` address, or ``address`` is malformed.
        """
        scheme, _, where = address.partition("://")
        target: Any
        if scheme == "ipc":
            sock, target = socket.socket(socket.AF_UNIX), where
        else:
            host, _, port = where.rpartition(":")
            # A name like localhost may have an IPv6 address, too, on which no server listens.
            family = socket.AF_INET6 if "[" in host else socket.AF_INET
            *_, target = socket.getaddrinfo(host.strip("[]"), port, family, socket.SOCK_STREAM)[0]
            sock = socket.socket(family)
            keep_alive(sock)
        try:
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # POLLOUT will report the connection
                sock.connect(target)
        except OSError:
            sock.close()
            raise
        stream = Stream(sock, MAX_REPLY_BYTES, takes_descriptors=may_share)
        _streams.add(stream)
        return StreamLink(stream=stream, may_share=may_share, address=address, hello_id=hello_id)

    @property
    def listened_s(self) -> float:
        return time.monotonic() if self.stream.is_connected else 0.0

    def attach(self, poller: Watcher) -> None:
        self._poller, self._number = poller, self.stream.fileno()
        poller.register(self._number, select.POLLIN)

    def detach(self, poller: Watcher) -> None:
        poller.unregister(self._number)
        self._poller = None

    def send(self, parts: Sequence[Any], request_id: str, *, may_share: bool = False) -> None:
        """Send a message. ``may_share``: large tensors may go through the shared memory."""
        table, inline = [], []
        places = self._places.get(request_id, {})  # places that ``stage`` has reserved
        has_large = may_share and max(map(len, parts)) >= SHARED_BYTES
        if has_large and self.may_share and not places:
            self.stage(parts[2:], request_id)()
            places = self._places.get(request_id, {})
        for number, part in enumerate(parts[1:]):
            place = places.get(number, INLINE)
            table.append((len(part), place))
            if place == INLINE:
                inline.append(part)
        self.stream.put(pack_table(table, self._taken_count), inline)
        self._flush()

    def stage(self, tensors: Sequence[Any], request_id: str) -> Callable[[], None]:
        """Reserve places in the shared memory for large tensors of a request.

        Returns:
            A function that copies the tensors there; call it, in any thread, before sending.
        """
        share, copies = self.stream.share, []
        if not self.may_share:
            return lambda: None
        for number, part in enumerate(tensors, 1):
            if len(part) < SHARED_BYTES:
                continue
            if share is None:
                if not self._has_asked:
                    self._has_asked = True
                    self.stream.put(pack_table(()))
                break
            place = share.place(len(part))
            if place != INLINE:
                self._places.setdefault(request_id, {})[number] = place
                copies.append((share.own(place, len(part)), part))

        def copy() -> None:
            for target, source in copies:
                _copy(target, source)

        return copy

    def _flush(self) -> None:
        """Send as much as the socket takes now; the rest is sent when it is writable."""
        try:
            is_sending = not self.stream.flush()
        except OSError:
            return  # the connection is broken, and ``messages`` will raise the error
        if is_sending != self._is_watched and self._poller is not None:
            events = select.POLLIN | (select.POLLOUT if is_sending else 0)
            self._poller.register(self._number, events)
            self._is_watched = is_sending

    def messages(self) -> Iterator[Sequence[Any]]:
        """Yield the parts of received messages; copy tensors out of the shared memory.

        Raises:
            EOFError: the server is gone.
            RemoteProtocolError: the server sent a malformed message.
            PermissionDenied: the server requires a key.
        """
        if self._is_watched:
            self._flush()
        while True:
            try:
                messages = self.stream.receive(BURST_MESSAGES)
            except RemoteProtocolError as error:
                reason = error.data.get("reason")
                if reason == "magic":
                    raise RemoteProtocolError(
                        f"{self.address} is not a port for this client; perhaps it is that of HTTP "
                        "or gRPC",
                        hint="the tcp:// or ipc:// address that pipeswitch serve printed",
                    ) from None
                if reason != ZMTP:
                    raise
                why = f"{self.address}: the server asks for a key, or is older than this client"
                raise PermissionDenied(why, hint=BRING) from None
            for message in messages:
                for descriptor in message.descriptors:
                    self._adopt(descriptor)
                for number in message.shared:
                    message.parts[number] = self._own(message.parts[number])
                if message.parts:
                    yield message.parts
            if not self.stream.has_more:
                return

    def _adopt(self, descriptor: int) -> None:
        try:
            if self.stream.share is None:
                self.stream.share = ShmSegment(descriptor, is_servers=False)
        except (OSError, ValueError):
            return  # the memory cannot be mapped, so tensors go through the socket
        finally:
            os.close(descriptor)

    def _own(self, part: Any) -> Any:
        """Copy a part out of the shared memory, because the server will overwrite it."""
        import numpy as np

        copied: Any = np.empty(len(part), dtype=np.uint8)
        _copy(copied, part)
        self._taken_count += 1
        return memoryview(copied)

    def answered(self, request_id: str) -> None:
        """Free the shared memory of an answered request, because the server has read it."""
        share = self.stream.share
        for place in self._places.pop(request_id, {}).values():
            if share is not None:  # None: the shared memory ended with the connection
                share.free(place)

    def close(self, linger_ms: int) -> None:
        """Close the link; bytes that the socket does not take at once are lost."""
        self._flush()
        self.stream.close()


def _copy(target: Any, source: Any) -> None:
    """Copy with numpy, which lets other threads run meanwhile."""
    import numpy as np

    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connection in a forked child, which must not keep it open."""
    for stream in list(_streams):
        stream.close()


os.register_at_fork(after_in_child=_close_in_child)
