"""HTTP/1.1 server on asyncio, with limits on the memory and time that a peer may use.

httptools (llhttp) parses requests. This module adds limits in bytes and seconds (docs/adr/0022): on
heads, bodies, connections, and all bodies together. No server library has all of these. A body of
known length is received directly into a buffer. A connection answers requests in order.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import zlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Protocol

import httptools
import msgspec
import numpy as np

from ...base.codec import check_memory, encode_json
from ...base.errors import InvalidInput, PipeSwitchError, QueueFull, ServerUnavailable
from ...base.units import format_bytes
from ...client.looped import InlineTask
from . import http_errors
from .offload import CROWD, Shared

log = logging.getLogger(__name__)

AGAIN: Final = "send again in a moment"
LOOK_EVERY_S: Final = 0.5  # interval between checks of connections: the precision of time limits
LOOKS: Final = 64  # connections checked in one iteration of the loop
SCRATCH_BYTES: Final = 16 << 10  # maximum received at once, except for bodies of known length
JOIN_BYTES: Final = 64 << 10  # an answer up to this size is written in one call
PIECE_BYTES: Final = 256 << 10  # size of the pieces in which a larger answer is sent
MAX_HEADERS: Final = 100
UNREAD_BYTES: Final = 16 << 10  # limit of unread answers, above which no further answer is computed
MAX_AHEAD: Final = 16  # limit of one connection's requests that wait for an answer
GROWTH: Final = 2  # maximum bytes of memory for each received byte of a chunked body
CHUNK_OVERHEAD: Final = 8  # limit of framing bytes per byte of a chunked body; small chunks have 5
CODINGS: Final = ("gzip", "x-gzip", "deflate")  # compressions of bodies that Triton's clients use
INLINE_BYTES: Final = 2 << 10  # longest body that the loop itself inflates: to 2 MB, in 2 ms
GRACE_S: Final = 1.0  # a connection that was active this recently is never evicted
ANSWERED_GRACE_S: Final = 10.0  # the same, for a connection that has had an answer
CLAIMS_S: Final = 0.05  # minimum time between comparisons of all connections; one takes 1 ms
LINGER_S: Final = 2.0  # a refused peer is read for this long, so that it can read the reason
_scratch = memoryview(bytearray(SCRATCH_BYTES))  # parsed before another connection receives
KEPT_HEAD_BYTES: Final = 2 << 10  # limit of a head that is remembered
MAX_DIGITS: Final = 6  # limit of the digits of Content-Length in such a head
# nginx defined 499.
_REASONS: Final = {one.value: one.phrase for one in HTTPStatus} | {499: "Client Closed Request"}
EVENT_STREAM: Final = "text/event-stream"
_LENGTH: Final = re.compile(rb"\r\nContent-Length: ?([0-9]+)\r\n", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on what the gateway holds for one peer, and for all together."""

    head_bytes: int = 64 << 10
    head_s: float = 10.0  # from the connection's start, or the head's first byte, to the head's end
    idle_s: float = 75.0  # time between two requests
    body_bytes: int = 64 << 20  # body of one request
    body_bytes_per_s: int = 4 << 10  # a slower body is cut off
    body_look_s: float = 10.0  # time over which a body's speed is measured
    waiting_bytes: int = 256 << 20  # complete bodies that wait for their answer
    answer_bytes: int = 256 << 20  # long answers that peers have not read yet
    unread_s: float = 30.0  # limit of the time in which a peer reads nothing of its answer
    connections: int = 1024
    connections_per_address: int = 512

    @property
    def unfinished_bytes(self) -> int:
        """Limit for all incomplete requests together. With overhead, they take ``body_bytes``."""
        return self.body_bytes * 3 // 4


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """A request before its body."""

    method: str
    path: str  # as received, with percent-encoding
    query: str
    headers: Mapping[str, str]  # names in lower case; repeated ones joined by a comma
    peer: str
    length: int | None  # bytes of the body; None: chunked

    @property
    def coding(self) -> str:
        """Compression of the body."""
        return self.headers.get("content-encoding", "identity").lower()


Claim = tuple[bool, float]
"""Rank of a connection in a crowd, see ``HttpConnection.claim``; the lowest is evicted first."""


class BodyStream(Protocol):
    """A body that is produced in pieces. It holds its resources until ``close``."""

    async def next(self) -> bytes:
        """Return the next piece, b"" at the end; called when the peer has read the earlier ones."""
        ...

    def close(self) -> None: ...


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """HTTP response."""

    status: int = 200
    parts: Sequence[Any] = ()  # buffers of the body, in order
    content_type: str = "application/json"
    headers: Sequence[tuple[str, str]] = ()
    stream: BodyStream | None = None  # used instead of ``parts``; the connection ends after it
    cut: Callable[[PipeSwitchError], bytes] | None = None  # returns a cut stream's last piece


Work = Callable[[Any], Awaitable[Response]]
"""Function that answers a request, given its body; see ``answered``. It may be called again for a
later request with the same head. It is cancelled when the peer hangs up."""

Admit = Callable[[Head], Work | Response]
"""Function that returns the work for a request, or a refusal, before the body is received."""


Refuse = Callable[[str, PipeSwitchError], Response]
"""Function that returns an error in the form that the clients of a path expect."""


async def answered(work: Work, body: Any, path: str = "", refuse: Refuse | None = None) -> Response:
    """Return the answer to a request; an error becomes a refusal."""
    try:
        return await work(body)
    except PipeSwitchError as error:
        return refuse(path, error) if refuse else refusal(error)
    except Exception as error:
        log.exception("http=failed")  # without the head, which may have a token
        return (
            refuse(path, http_errors.as_ours(error))
            if refuse
            else refusal(http_errors.as_ours(error))
        )


def json_answer(value: Any, status: int = 200, headers: Sequence[tuple[str, str]] = ()) -> Response:
    """Return a response with a JSON body."""
    return Response(status=status, parts=[encode_json(value)], headers=headers)


def refusal(error: PipeSwitchError) -> Response:
    """Return an error's answer in our own form: ``{"error", "code", "hint"}``."""
    status = http_errors.status_of(error)
    headers = []
    # A request whose deadline cannot be met now may succeed later.
    if status.may_retry or "predicted_ms" in error.data:
        headers.append(("Retry-After", str(http_errors.RETRY_AFTER_S)))
    if isinstance(error, http_errors.Unauthenticated):
        headers.append(("WWW-Authenticate", "Bearer"))
    if isinstance(error, http_errors.MethodNotAllowed):
        headers.append(("Allow", error.allow))
    if isinstance(error, http_errors.UnknownCoding):
        headers.append(("Accept-Encoding", ", ".join(CODINGS)))
    return json_answer(http_errors.body_of(error), status.http, headers)


class HttpServer:
    """All connections of one process, and the memory that they hold together."""

    def __init__(
        self,
        admit: Admit,
        limits: Limits,
        shared: Shared | None = None,
        refuse: Refuse = lambda path, error: refusal(error),
    ) -> None:
        self.admit, self._refusal = admit, refuse
        self.shared = shared or Shared(limits.waiting_bytes, limits.answer_bytes)
        self.limits = limits
        self.connections: set[HttpConnection] = set()
        self.unfinished_bytes = 0  # bytes of incomplete heads and bodies
        self.by_peer: Counter[str] = Counter()  # number of connections by address
        # Address (None: all) -> time of a comparison, and candidates; the last is evicted first.
        self._claims: dict[str | None, tuple[float, list[tuple[Claim, HttpConnection]]]] = {}

    def refuse(self, path: str, error: PipeSwitchError) -> Response:
        """Return an error in the form of the path's clients, and count it if it is QueueFull."""
        self.shared.queue_full_count += isinstance(error, QueueFull)
        return self._refusal(path, error)

    def __call__(self) -> HttpConnection:
        """Return the protocol of one more connection, for ``loop.create_server``."""
        return HttpConnection(self)

    def admit_anew(self) -> None:
        """Forget all known heads, because the callers' permissions changed."""
        for connection in self.connections:
            connection.reading.known = None

    async def watch(self) -> None:
        """Check all connections forever, and cut off those that take too long."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now = time.monotonic()
            for number, connection in enumerate(list(self.connections), 1):
                if connection in self.connections:
                    connection.look(now)
                if not number % LOOKS:
                    await asyncio.sleep(0)  # serve requests in between

    async def drain(self, timeout_s: float) -> None:
        """Close idle connections now, and the others after their answers or ``timeout_s``."""
        ends_at = time.monotonic() + timeout_s
        for connection in list(self.connections):
            connection.leave()
        while self.connections and time.monotonic() < ends_at:
            await asyncio.sleep(LOOK_EVERY_S / 10)
        for connection in list(self.connections):
            connection.abort()

    def enter(self, connection: HttpConnection) -> bool:
        """Return True if there is room; if needed, evict the connection with the weakest claim."""
        peer = connection.peer
        is_crowded = self.by_peer[peer] >= self.limits.connections_per_address
        if is_crowded or len(self.connections) >= self.limits.connections:
            least = self._least(peer if is_crowded else None)
            if least is None:
                return False
            self.leave(least)  # at once: others may arrive before asyncio reports its end
            least.abort()
        self.connections.add(connection)
        self.by_peer[peer] += 1
        return True

    def _least(self, peer: str | None) -> HttpConnection | None:
        """Return the evictable connection with the weakest claim, of ``peer`` or, if None, of all.

        Comparing all connections for each new one of a crowd would take too long. So the candidates
        of a comparison that had no answer, which are evicted first, are kept for the next calls.
        """
        now_s = time.monotonic()
        looked_at_s, strangers = self._claims.get(peer, (-CLAIMS_S, []))
        while strangers:
            claim, other = strangers.pop()
            if other in self.connections and other.claim(now_s) == claim:  # not active since
                return other
        if now_s - looked_at_s < CLAIMS_S:
            return None
        idle = [
            (now, other)
            for other in self.connections
            if peer in (None, other.peer) and (now := other.claim(now_s)) is not None
        ]
        idle.sort(key=lambda one: one[0], reverse=True)
        least = idle.pop()[1] if idle else None
        recent = {key: one for key, one in self._claims.items() if now_s - one[0] < CLAIMS_S}
        self._claims = recent | {peer: (now_s, [one for one in idle if not one[0][0]])}
        return least

    def leave(self, connection: HttpConnection) -> None:
        if connection in self.connections:
            self.connections.discard(connection)
            self.by_peer[connection.peer] -= 1
            if not self.by_peer[connection.peer]:
                del self.by_peer[connection.peer]

    def make_room(self) -> None:
        """Refuse the largest incomplete requests until the rest fit the limit."""
        while self.unfinished_bytes > self.limits.unfinished_bytes:
            largest = max(self.connections, key=lambda one: one.reading.held_bytes)
            if largest.reading.held_bytes == self.unfinished_bytes:
                return  # a single request may exceed the limit
            largest.refuse(
                QueueFull(
                    "too many bytes of incomplete requests", hint=AGAIN, limit="unfinished_bytes"
                )
            )


class _WholeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A complete request."""

    work: Work | Response
    body: Any  # a buffer
    is_compressed: bool
    is_kept: bool  # the connection stays open afterwards
    has_body: bool  # the answer has a body
    is_chunked: bool = True  # a streamed answer is chunked; False for HTTP/1.0
    path: str


Known = tuple[bytes, bytes, Work, str]
"""An admitted head: its bytes before and after the digits of Content-Length, its work, its path. A
request whose head differs only in these digits is not parsed."""


class _Reading:
    """Receiver of the next request, while earlier ones are answered: its head, then its body."""

    def __init__(self, connection: HttpConnection, server: HttpServer) -> None:
        self._connection, self._server, self._limits = connection, server, server.limits
        self._parser: Any = httptools.HttpRequestParser(self)
        self._is_between = True  # the parser has no incomplete request
        self.known: Known | None = None  # the last head, to recognise a request that repeats it
        self._url = b""
        self.path = ""  # path in ``_url``, after parsing
        self._headers: dict[str, str] = {}
        self.head_bytes = 0  # received bytes of an incomplete head
        self.head: Head | None = None  # head of the body that is being received
        self._work: Work | Response | None = None  # work for this head
        self._body: Any = bytearray()
        self.received_bytes = 0  # bytes of an incomplete body; if chunked, those in memory
        self.marked_bytes = 0  # ``received_bytes`` when the connection's ``since_s`` was set
        self._raw_bytes = 0  # received bytes of a chunked body, with its framing
        self.rest: memoryview | None = None  # unfilled part of a body of known length
        self.is_kept = False
        self.is_current = True  # the request is HTTP/1.1
        self.error: PipeSwitchError | None = None  # error in the parsed bytes

    def close(self) -> None:
        """Drop the parser, which refers to this object."""
        self._parser = None

    def take(self, nbytes: int, *, is_next: bool) -> None:
        """Parse ``nbytes`` received bytes; ``is_next``: no earlier request waits for its answer."""
        if self.rest is None:
            is_next = is_next and self._is_between
            self._parse(_scratch[:nbytes])
            queue = self._connection.queue
            if is_next and self._is_between and len(queue) == 1:
                self._learn(nbytes, queue[0])
        else:
            self.rest = self.rest[nbytes:]
            self._receive(nbytes)
            if not len(self.rest):
                self.rest = None
                self._parser = httptools.HttpRequestParser(self)  # the old one expects the body
                self.on_message_complete()

    def clear(self) -> None:
        self.rest = self.head = None
        self._forget_head()
        self._forget_body()

    def _parse(self, data: memoryview) -> None:
        if self.head is None:
            if not self.head_bytes:
                self._connection.since_s = time.monotonic()
            self.head_bytes += len(data)
            self._server.unfinished_bytes += len(data)
        else:
            self._raw_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError:
            if self.error is None:  # else the callback raised to stop the parser
                log.exception("http=%s", self._connection.peer)
                self.error = PipeSwitchError("the gateway failed to read this request")
        except httptools.HttpParserError as error:
            self.error = self.error or InvalidInput(
                f"this is not an HTTP request: {error}",
                hint="use HTTP/1.1; gRPC has its own address",
            )
        if self.error is not None:
            return
        head = self.head
        if head is None:
            if self.head_bytes > self._limits.head_bytes:
                self.error = _head_too_large(self._limits)
        elif head.length is None:
            around = self._raw_bytes - len(self._body)
            if around > self._limits.head_bytes + len(self._body) * CHUNK_OVERHEAD:
                self.error = InvalidInput("the chunks of this body are too small")
        else:
            self.rest = self._body[self.received_bytes :]

    def _feed(self, data: memoryview) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:  # not supported: answer in HTTP/1.1
            if self.head is None:
                self._connection.is_ending = True
                return
            length = self.head.length  # httptools skips the body: another parser reads it
            framing = f"Content-Length: {length}" if length else "Transfer-Encoding: chunked"
            self._parser = httptools.HttpRequestParser(self)
            self._parser.feed_data(f"POST / HTTP/1.1\r\n{framing}\r\n\r\n".encode())
            self._feed(data[error.args[0] :])

    def repeats(self, nbytes: int, before: bytes, behind: bytes, work: Work, path: str) -> bool:
        """Queue a message if it is exactly one request with the known head; return True if so."""
        if not self._is_between:
            return False
        data, at = bytes(_scratch[:nbytes]), len(before)
        end = data.find(b"\r", at, at + MAX_DIGITS + 1)
        digits, start = data[at:end], end + len(behind)
        is_known = data.startswith(before) and data.startswith(behind, end) and digits.isdigit()
        if not is_known or int(digits) != nbytes - start or int(digits) > self._limits.body_bytes:
            return False
        self.path = path
        self._connection.queue_up(work, data[start:])
        return True

    def _learn(self, nbytes: int, request: _WholeRequest) -> None:
        """Remember the head of a request that arrived complete and alone."""
        self.known, size = None, nbytes - len(request.body)
        if isinstance(request.work, Response) or request.is_compressed or not request.is_kept:
            return
        if not request.is_chunked:
            return  # HTTP/1.0
        is_plain = request.has_body and "expect" not in self._headers and size <= KEPT_HEAD_BYTES
        head = bytes(_scratch[:size]) if is_plain else b""
        match = _LENGTH.search(head) if head.find(b"\r\n\r\n") == size - 4 else None
        if match is not None and int(match[1]) == len(request.body):
            self.known = head[: match.start(1)], head[match.end(1) :], request.work, request.path

    def on_message_begin(self) -> None:
        if self.head is not None:
            return  # see ``_feed``
        self._is_between = False
        self._url, self.path, self._headers = b"", "", {}

    def on_url(self, url: bytes) -> None:
        if self.head is None:
            self._url += url
            self.path = self._url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head is not None:
            return  # a trailer behind the body is ignored
        if len(self._headers) >= MAX_HEADERS:
            self.error = _head_too_large(self._limits)
            return
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
        if key in self._headers:
            if key in ("host", "authorization"):
                self.error = InvalidInput(f"{key} appears twice")
            text = f"{self._headers[key]}, {text}"
        self._headers[key] = text

    def on_headers_complete(self) -> None:
        if self.error is not None or self.head is not None:
            return
        headers = self._headers
        path, _, query = self._url.decode("latin-1").partition("?")
        if path.startswith(("http://", "https://")):  # for a proxy: this host replaces the header
            site = path.split("/", 3)
            headers["host"], path = site[2], "/" + "".join(site[3:])
        self.path = path
        is_current = self.is_current = self._parser.get_http_version() == "1.1"
        wish = headers.get("connection", "").lower()
        self.is_kept = "close" not in wish if is_current else "keep-alive" in wish
        length = None if "transfer-encoding" in headers else int(headers.get("content-length", 0))
        head = Head(
            method=self._parser.get_method().decode("latin-1"),
            path=path,
            query=query,
            headers=headers,
            peer=self._connection.peer,
            length=length,
        )
        if is_current and "host" not in headers:
            self.error = InvalidInput("Host is missing")
            return
        self._work = self._server.admit(head)
        if head.coding not in ("identity", *CODINGS):
            self._work = self._server.refuse(path, http_errors.UnknownCoding(head.coding))
        if (length or 0) > self._limits.body_bytes:
            self._work = self._server.refuse(path, _body_too_large(self._limits))
        if isinstance(self._work, Response) and length != 0:
            self.is_kept = False
            self._connection.queue_up(self._work, bytearray(), head)
            self._connection.stop_reading()  # the body is not needed
            return
        try:
            self._body = bytearray() if length is None else _untouched(length)
        except (MemoryError, OSError):
            self.error = QueueFull(
                "the gateway has no memory for a body of this length",
                hint="send again in a moment",
                limit="memory",
            )
            return
        self.head = head
        self._forget_head()
        self.marked_bytes = self._raw_bytes = 0
        self._connection.since_s = time.monotonic()
        if headers.get("expect", "").lower() == "100-continue":
            self._connection.ask_for_body()

    def on_body(self, data: bytes) -> None:
        if self.error is not None or self.head is None:
            return
        if self.head.length is not None:
            self._body[self.received_bytes : self.received_bytes + len(data)] = data
            self._receive(len(data))
        elif len(self._body) + len(data) > self._limits.body_bytes:
            self.error = _body_too_large(self._limits)
            return
        else:
            self._body += data
            self._receive(GROWTH * len(data))

    def on_message_complete(self) -> None:
        if self.head is not None and self.head.length != 0 and self._parser.should_upgrade():
            return  # the body follows, see ``_feed``
        head, self.head = self.head, None
        self._is_between = True
        if self.error is not None or head is None:
            return
        body = self._body
        self._forget_body()
        if len(self._connection.queue) >= MAX_AHEAD:
            self.error = QueueFull(
                f"more than {MAX_AHEAD} requests without an answer", limit="pipelined"
            )
            raise self.error  # parse no more of the received bytes, to serve other connections
        if self._work is not None:
            self._connection.queue_up(self._work, body, head)

    def _receive(self, size: int) -> None:
        self.received_bytes += size
        self._server.unfinished_bytes += size

    @property
    def held_bytes(self) -> int:
        """Number of bytes held for an incomplete request."""
        return self.head_bytes + self.received_bytes

    def _forget_head(self) -> None:
        self._server.unfinished_bytes -= self.head_bytes
        self.head_bytes = 0

    def _forget_body(self) -> None:
        self._server.unfinished_bytes -= self.received_bytes
        self.received_bytes = 0
        self._body = bytearray()


class HttpConnection(asyncio.BufferedProtocol):
    """Connection to one peer: its answers, and the time limits of each wait."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._limits = server.limits
        self.peer = ""
        self.since_s = time.monotonic()  # start of its current state: idle, head, body or end
        self.reading = _Reading(self, server)
        self._transport: Any = None
        self.is_ending = False  # all further bytes are ignored
        self.queue: deque[_WholeRequest] = deque()
        self._task: InlineTask | None = None
        self._streaming: Callable[[bytes], bytes] | None = None  # frames a stream's piece
        self._cut: Callable[[PipeSwitchError], bytes] | None = None
        self._has_answered = False  # it has answered a complete request
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._unread_bytes = 0  # unread bytes of answers at the last check
        self._unread_since_s = 0.0

    # ---- asyncio's side ------------------------------------------------------------------------

    def enter(self, transport: asyncio.BaseTransport) -> bool:
        """Return True if there is room for this peer."""
        self._transport = transport
        address = transport.get_extra_info("peername")
        self.peer = str(address[0]) if isinstance(address, tuple) else ""
        return self._server.enter(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        is_in = self in self._server.connections or self.enter(transport)  # TLS called it before
        self._transport = transport
        self._transport.set_write_buffer_limits(high=UNREAD_BYTES)
        if not is_in:
            self._transport.write(_bytes_of(_crowded(), is_kept=False))
            self.is_ending = True
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.leave(self)
        self.stop_reading()
        self.reading.close()
        if self._task is not None:
            self._task.cancel()
        self._forget_queue()

    def get_buffer(self, sizehint: int) -> memoryview:
        rest = self.reading.rest
        return _scratch if rest is None else rest

    def buffer_updated(self, nbytes: int) -> None:
        if self.is_ending:
            return
        reading, is_next = self.reading, self._task is None
        if not (is_next and reading.known is not None and reading.repeats(nbytes, *reading.known)):
            reading.take(nbytes, is_next=is_next)
        if reading.error is not None:
            self.refuse(reading.error)
        elif self._server.unfinished_bytes:
            self._server.make_room()
        if self.queue and self._task is None:
            self._task = InlineTask(self._answer_all())
            self._task.step()

    def eof_received(self) -> bool:
        return False  # a peer that closed its side has hung up: cancel its request

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    # ---- answers -------------------------------------------------------------------------------

    def stop_reading(self) -> None:
        """Drop an incomplete request, and ignore all further bytes."""
        self.is_ending = True
        self.reading.clear()

    def ask_for_body(self) -> None:
        """Ask the peer to send its body, unless another answer is pending."""
        if self._task is None and not self.queue:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def refuse(self, error: PipeSwitchError) -> None:
        """Stop reading, and answer with the error, unless other answers are pending."""
        if not self.is_ending:
            self.stop_reading()
            refused = self._server.refuse(self.reading.path, error)
            if self._task is None and not self.queue:
                self._task = InlineTask(self._end_with(refused))
                self._task.step()

    def queue_up(self, work: Work | Response, body: Any, head: Head | None = None) -> None:
        """Queue a parsed request; ``head`` is None for a known head."""
        try:
            self._server.shared.waiting.take(self.peer, len(body))
        except QueueFull as error:
            self.reading.error = error
            return
        request = _WholeRequest(
            work=work,
            body=body,
            is_compressed=head is not None and head.coding != "identity",
            is_kept=head is None or self.reading.is_kept,
            has_body=head is None or head.method != "HEAD",
            is_chunked=head is None or self.reading.is_current,
            path=self.reading.path,
        )
        if self._task is not None or self.queue:
            self._transport.pause_reading()  # until the queue is answered
        self.queue.append(request)

    async def _end_with(self, answer: Response) -> None:
        try:
            await self._write(answer, is_kept=False)
        finally:
            self._task = None

    async def _answer_all(self) -> None:
        """Answer every complete request in order; then the task ends."""
        try:
            while self.queue:
                if self._server.by_peer[self.peer] > CROWD:
                    await self._server.shared.passes.turn(self.peer)
                request = self.queue.popleft()
                refuse, path = self._server.refuse, request.path
                try:
                    if isinstance(request.work, Response):
                        answer = request.work
                    elif request.is_compressed:
                        answer = await self._inflated(request.work, request.body, path)
                    else:
                        answer = await answered(request.work, request.body, path, refuse)
                finally:
                    self._server.shared.waiting.give(self.peer, len(request.body))
                is_kept, has_body = request.is_kept and not self.is_ending, request.has_body
                frame = _chunk if request.is_chunked else bytes
                del request  # free its body before the answer is sent
                if answer.stream is not None:
                    writing = self._write_stream(
                        answer, answer.stream, frame=frame, has_body=has_body
                    )
                    try:
                        await asyncio.create_task(writing)  # asyncio's timeouts need a task
                    finally:
                        answer.stream.close()
                    return
                await self._write(answer, path, is_kept=is_kept, has_body=has_body)
                self._has_answered = True
                if not is_kept:
                    return
                if self.queue:
                    await asyncio.sleep(0)  # serve the other connections
                else:
                    self._transport.resume_reading()
        finally:
            self._task = None
            self._forget_queue()
            self.since_s = time.monotonic()

    async def _inflated(self, work: Work, data: Any, path: str) -> Response:
        shared = self._server.shared
        most = min(self._limits.body_bytes, shared.waiting.left(self.peer))
        try:
            if len(data) <= INLINE_BYTES:
                body = _inflated(data, most)
            else:
                # The result may be large: one body is inflated at a time, others stay compressed.
                body = await shared.aside.run(self.peer, _inflated, data, most)
            shared.waiting.take(self.peer, len(body))
        except PipeSwitchError as error:
            return self._server.refuse(path, error)
        except (MemoryError, OSError):
            short = QueueFull("no memory for the decoded body", hint=AGAIN, limit="memory")
            return self._server.refuse(path, short)
        try:
            return await answered(work, body, path, self._server.refuse)
        finally:
            shared.waiting.give(self.peer, len(body))

    def _forget_queue(self) -> None:
        self._server.shared.waiting.give(
            self.peer, sum(len(request.body) for request in self.queue)
        )
        self.queue.clear()

    async def _write(
        self, answer: Response, path: str = "", *, is_kept: bool, has_body: bool = True
    ) -> None:
        size = sum(map(len, answer.parts)) if has_body else 0
        if size <= JOIN_BYTES:
            self._transport.write(_bytes_of(answer, is_kept=is_kept, has_body=has_body))
            await self._can_write.wait()
        else:
            await self._write_long(answer, size, path, is_kept=is_kept)
        if not is_kept:
            self._end()

    async def _write_long(self, answer: Response, size: int, path: str, *, is_kept: bool) -> None:
        """Write an answer in pieces, each when the peer has read the earlier ones."""
        try:
            self._server.shared.answers.take(self.peer, size)
        except QueueFull as error:
            await self._write(self._server.refuse(path, error), is_kept=is_kept)
            return
        try:
            self._transport.write(_head_of(answer, size, is_kept=is_kept))
            for part in answer.parts:
                whole = memoryview(part)
                for start in range(0, len(whole), PIECE_BYTES):
                    self._transport.write(whole[start : start + PIECE_BYTES])
                    await self._can_write.wait()
        finally:
            self._server.shared.answers.give(self.peer, size)

    async def _write_stream(
        self,
        answer: Response,
        stream: BodyStream,
        *,
        frame: Callable[[bytes], bytes],
        has_body: bool,
    ) -> None:
        """Write the head, then each piece when the peer has read the earlier ones.

        The last chunk is empty, which distinguishes the end from a cut.
        """
        try:
            self._streaming, self._cut = frame if has_body else None, answer.cut
            self.stop_reading()
            self._transport.resume_reading()  # else a peer that hangs up would not be noticed
            self._transport.write(_head_of(answer, None, is_kept=False, is_chunked=frame is _chunk))
            while has_body and (piece := await stream.next()):
                self._transport.write(frame(piece))
                await self._can_write.wait()
        except Exception:
            log.exception("http=%s stream failed", self.peer)
            self._transport.close()  # without the last chunk
            return
        finally:
            self._streaming = None
        if has_body:
            self._transport.write(frame(b""))
        self._end()

    def _end(self) -> None:
        """Send no more answers, but read for LINGER_S, so that the peer can read the last one."""
        self.stop_reading()
        self.since_s = time.monotonic()
        self._transport.resume_reading()
        if not self._transport.can_write_eof():
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:  # the peer has reset the connection, which asyncio has not seen yet
            self.abort()

    # ---- time limits ---------------------------------------------------------------------------

    def claim(self, now_s: float) -> Claim | None:
        """Return the connection's claim to stay in a crowd; None if it may not be evicted.

        Connections that have had and read an answer rank highest, then the recently active ones. A
        connection that computes an answer, or was active just now, may not be evicted.
        """
        if self._task is not None and not self._unread_bytes:
            return None
        is_known = self._has_answered and not self._unread_bytes
        since_s = self._unread_since_s if self._unread_bytes else self.since_s
        if now_s - since_s < (ANSWERED_GRACE_S if is_known else GRACE_S):
            return None
        return is_known, since_s

    def look(self, now_s: float) -> None:
        """Cut off a connection that exceeds a time limit.

        Computing an answer has no limit here. Only a peer that does not read the answer is cut off.
        """
        unread = self._transport.get_write_buffer_size()
        if not unread or unread != self._unread_bytes:
            self._unread_bytes, self._unread_since_s = unread, now_s
        elif now_s - self._unread_since_s > self._limits.unread_s:
            self.abort()
            return
        if unread or self._task is not None:
            return
        took_s = now_s - self.since_s
        if self.is_ending:
            if took_s > LINGER_S:
                self.abort()
        elif self.reading.head is not None:
            if took_s > self._limits.body_look_s:
                came = self.reading.received_bytes - self.reading.marked_bytes
                if came < took_s * self._limits.body_bytes_per_s:
                    self.refuse(http_errors.RequestTimeout("the body came too slowly"))
                self.since_s, self.reading.marked_bytes = now_s, self.reading.received_bytes
        elif self.reading.head_bytes:
            if took_s > self._limits.head_s:
                self.refuse(http_errors.RequestTimeout("the head came too slowly"))
        elif took_s > self._limits.idle_s:
            self.abort()

    def leave(self) -> None:
        """Close the connection after its pending answers; cut a stream, which may never end."""
        self.is_ending = True
        if self._streaming is not None and self._cut is not None:
            error = ServerUnavailable("the server's gateway is stopping", hint="ask again soon")
            self._transport.write(self._streaming(self._cut(error)))
        if self._task is None or self._streaming is not None:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


def _untouched(size: int) -> memoryview:
    """Return a buffer that takes no memory until bytes arrive, as a peer may send none."""
    if size > INLINE_BYTES:
        check_memory(size, each_bytes=1)
    raw: Any = np.empty(size, np.uint8)
    return memoryview(raw)


def _inflated(data: Any, most: int) -> bytes:
    """Return the inflated body.

    Raises:
        InvalidInput: the body does not match its head.
        TooLarge: the result exceeds ``most`` bytes.
        OSError: memory is short.
    """
    if len(data) > INLINE_BYTES:
        check_memory(most, each_bytes=2)  # the pieces, and their concatenation
    inflater = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or deflate, by the first bytes
    try:
        body = inflater.decompress(data, most + 1)
    except zlib.error as error:
        raise InvalidInput(f"the body does not match Content-Encoding: {error}") from None
    if len(body) > most:
        raise http_errors.TooLarge(
            f"the decoded body has more than {format_bytes(most)}, the free memory",
            hint="send smaller batches, or fewer at once",
        )
    if not inflater.eof or inflater.unused_data:
        raise InvalidInput("the body is not one complete stream, as Content-Encoding says")
    return body


def _chunk(piece: bytes) -> bytes:
    """Frame a piece of a body as an HTTP/1.1 chunk; an empty piece is the end."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def _head_of(
    answer: Response, size: int | None, *, is_kept: bool, is_chunked: bool = False
) -> bytes:
    """Return an answer's head. ``size``: bytes of the body; None: chunked, or until it closes."""
    lines = [
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}",
        f"Content-Type: {answer.content_type}",
        *([] if size is None else [f"Content-Length: {size}"]),
        *(["Transfer-Encoding: chunked"] if is_chunked else []),
        *[f"{name}: {value}" for name, value in answer.headers],
        f"Connection: {'keep-alive' if is_kept else 'close'}\r\n\r\n",  # HTTP/1.0 needs it
    ]
    return "\r\n".join(lines).encode("latin-1")


def _bytes_of(answer: Response, *, is_kept: bool, has_body: bool = True) -> bytes:
    """Return all bytes of a short answer."""
    head = _head_of(answer, sum(map(len, answer.parts)), is_kept=is_kept)
    return b"".join([head, *answer.parts]) if has_body else head


def _crowded() -> Response:
    return refusal(ServerUnavailable("too many connections", hint=AGAIN))


def _head_too_large(limits: Limits) -> http_errors.HeadTooLarge:
    return http_errors.HeadTooLarge(
        f"the head of a request has at most {format_bytes(limits.head_bytes)} and "
        f"{MAX_HEADERS} headers"
    )


def _body_too_large(limits: Limits) -> http_errors.TooLarge:
    return http_errors.TooLarge(
        f"a body has at most {format_bytes(limits.body_bytes)} here",
        hint="send less at once (a model: pipeswitch register), or raise [gateway] max_body",
    )
