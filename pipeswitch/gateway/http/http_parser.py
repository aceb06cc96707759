"""HTTP/1.1 of one connection as a state machine: bytes and times go in, actions come out. Pure.

httptools (llhttp) parses requests. This module limits bytes and seconds (docs/adr/0022). The
server (``http_server.py``) owns the socket and the clock, and performs the actions.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import httptools
import msgspec

from ...base.errors import InvalidInput, PipeSwitchError, QueueFull
from ...base.quotas import Claim
from ...base.units import format_bytes
from .http_errors import HeadTooLarge, RequestTimeout, TooLarge, UnknownCoding

MAX_HEADERS: Final = 100
MAX_AHEAD: Final = 16  # limit of one connection's requests that wait for an answer
GROWTH: Final = 2  # maximum bytes of memory for each received byte of a chunked body
CHUNK_OVERHEAD: Final = 8  # limit of framing bytes per byte of a chunked body; small chunks have 5
CODINGS: Final = ("gzip", "x-gzip", "deflate")  # compressions of bodies that Triton's clients use
GRACE_S: Final = 1.0  # a connection that was active this recently is never evicted
ANSWERED_GRACE_S: Final = 10.0  # the same, for a connection that has had an answer
LINGER_S: Final = 2.0  # a refused peer is read for this long, so that it can read the reason
KEPT_HEAD_BYTES: Final = 2 << 10  # limit of a head that is remembered
MAX_DIGITS: Final = 6  # limit of the digits of Content-Length in such a head
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
    is_current: bool = True  # HTTP/1.1; False: HTTP/1.0

    @property
    def coding(self) -> str:
        """Compression of the body."""
        return self.headers.get("content-encoding", "identity").lower()


class HeadRead(msgspec.Struct, frozen=True):
    """Decide whether to answer this request: admit it, or refuse it with the error, if any.

    If it is refused and has a body, perform ``without_body`` instead of the later actions.
    """

    head: Head
    error: PipeSwitchError | None


class NeedBuffer(msgspec.Struct, frozen=True):
    """Call ``use_buffer`` with a buffer of this size, into which the body can be received."""

    size: int


class RequestRead(msgspec.Struct, frozen=True, kw_only=True):
    """Answer this request; its head was in the last ``HeadRead``, or is the known one."""

    body: Any  # a buffer
    path: str
    is_compressed: bool = False
    is_kept: bool = True  # the connection stays open afterwards
    has_body: bool = True  # the answer has a body
    is_chunked: bool = True  # a streamed answer is chunked; False for HTTP/1.0


class RefuseRequest(msgspec.Struct, frozen=True):
    """Answer with this error, unless other answers are pending; nothing more is read."""

    error: PipeSwitchError


class Do(enum.Enum):
    """Actions without parameters."""

    CONTINUE = enum.auto()  # ask the peer to send its body
    PAUSE = enum.auto()  # receive nothing until all requests are answered
    ABORT = enum.auto()  # close the connection at once


Action = HeadRead | NeedBuffer | RequestRead | RefuseRequest | Do

Known = tuple[bytes, bytes, str]
"""A head: its bytes before and after the digits of Content-Length, its path. A request whose head
differs only in these digits is not parsed."""


class HttpParser:
    """State of one connection: what its peer has sent, and since when.

    ``receive`` parses requests while earlier ones are answered. Call ``answered`` when none waits
    for its answer any more, and ``look`` now and then.
    """

    def __init__(self, limits: Limits, now_s: float, peer: str = "") -> None:
        self.peer = peer
        self.since_s = now_s  # start of its current state: idle, head, body or end
        self.is_ending = False  # all further bytes are ignored
        self.is_paused = False  # see ``Do.PAUSE``
        self.known: Known | None = None  # the last head, to recognise a request that repeats it
        self.path = ""  # path of the last request, as far as it was received
        self.rest: Any = None  # unfilled part of the buffer of a body; None: it has no buffer
        self.has_answered = False  # it has answered a complete request
        self._limits = limits
        self._parser: Any = httptools.HttpRequestParser(self)
        self._actions: list[Action] = []
        self._error: PipeSwitchError | None = None  # error in the parsed bytes
        self._now_s = now_s
        self._pending = 0  # requests since all were answered
        self._is_between = True  # the parser has no incomplete request
        self._url = b""
        self._headers: dict[str, str] = {}
        self._head: Head | None = None  # head of the body that is being received
        self._is_kept = False
        self._body: Any = bytearray()
        self._head_bytes = 0  # received bytes of an incomplete head
        self._body_bytes = 0  # bytes of an incomplete body; if chunked, those in memory
        self._marked_bytes = 0  # ``_body_bytes`` when ``since_s`` was set
        self._raw_bytes = 0  # received bytes of a chunked body, with its framing
        self._unread_bytes = 0  # unread bytes of answers at the last ``look``
        self._unread_since_s = 0.0

    @property
    def held_bytes(self) -> int:
        """Number of bytes held for an incomplete request."""
        return self._head_bytes + self._body_bytes

    # ---- bytes ---------------------------------------------------------------------------------

    def repeated(self, data: memoryview) -> RequestRead | None:
        """Return the request if the bytes are exactly one request with the known head.

        This is much faster than ``receive``.
        """
        if self.known is None or self._pending or not self._is_between:
            return None
        (before, behind, path), content = self.known, bytes(data)
        at = len(before)
        end = content.find(b"\r", at, at + MAX_DIGITS + 1)
        digits, start = content[at:end], end + len(behind)
        is_known = content.startswith(before) and content.startswith(behind, end)
        if not is_known or not digits.isdigit() or int(digits) != len(content) - start:
            return None
        if int(digits) > self._limits.body_bytes:
            return None
        self.path, self._pending = path, 1
        return RequestRead(body=content[start:], path=path)

    def receive(self, data: memoryview, now_s: float) -> list[Action]:
        """Parse received bytes, which are not in the buffer of a body."""
        self._actions, self._now_s = [], now_s
        is_first = not self._pending and self._is_between
        if self._head is not None:
            self._raw_bytes += len(data)
        else:
            if not self._head_bytes:
                self.since_s = now_s
            self._head_bytes += len(data)
        self._parse(data)
        if self._error is not None:
            return self._actions + self.refuse(self._error)
        if self._head is not None and self._head.length is not None:
            is_asked = self._actions[-1:] == [Do.CONTINUE]  # sent only if there is a buffer
            self._actions.insert(len(self._actions) - is_asked, NeedBuffer(self._head.length))
        elif is_first and self._is_between and self._pending == 1 and not self.is_ending:
            self._learn(data)
        return self._actions

    def use_buffer(self, buffer: memoryview) -> None:
        """Receive the rest of the body into ``rest``, a part of the buffer; then call ``fill``."""
        size = len(self._body)
        buffer[:size] = self._body
        self._body, self.rest = buffer, buffer[size:]

    def fill(self, nbytes: int) -> list[Action]:
        """Take ``nbytes`` more bytes of the body, which are in ``rest``."""
        self._actions = []
        self.rest = self.rest[nbytes:]
        self._body_bytes += nbytes
        if not len(self.rest):
            self.rest = None
            self._parser = httptools.HttpRequestParser(self)  # the old one expects the body
            self._complete()
        return self._actions + (self.refuse(self._error) if self._error else [])

    def without_body(self, head: Head) -> list[Action]:
        """Stop reading, because the body is not needed; the request is read without it."""
        self.stop()
        self._actions, self._is_kept = [], False
        self._add_request(head, b"")
        return self._actions

    def stop(self) -> None:
        """Drop an incomplete request, and ignore all further bytes."""
        self.is_ending = True
        self.rest = self._head = None
        self._head_bytes = self._body_bytes = 0
        self._body = bytearray()

    def refuse(self, error: PipeSwitchError) -> list[Action]:
        """Stop reading, because of the peer; nothing happens if it is ending."""
        if self.is_ending:
            return []
        self.stop()
        return [RefuseRequest(error)]

    def close(self) -> None:
        """Drop llhttp's parser, which refers to this object."""
        self._parser = None

    def _parse(self, data: memoryview) -> None:
        """Parse bytes; set ``_error`` if they are not a request within the limits."""
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError:
            if self._error is None:  # else the callback raised to stop the parser
                raise
        except httptools.HttpParserError as error:
            self._error = self._error or InvalidInput(
                f"this is not an HTTP request: {error}",
                hint="use HTTP/1.1; gRPC has its own address",
            )
        if self._error is not None or self.is_ending:
            return
        if self._head is None:
            if self._head_bytes > self._limits.head_bytes:
                self._error = _head_too_large(self._limits)
        elif self._head.length is None:
            around = self._raw_bytes - len(self._body)
            if around > self._limits.head_bytes + len(self._body) * CHUNK_OVERHEAD:
                self._error = InvalidInput("the chunks of this body are too small")

    def _feed(self, data: memoryview) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:  # not supported: answer in HTTP/1.1
            if self._head is None:
                self.is_ending = True
                return
            length = self._head.length  # httptools skips the body: another parser reads it
            framing = f"Content-Length: {length}" if length else "Transfer-Encoding: chunked"
            self._parser = httptools.HttpRequestParser(self)
            self._parser.feed_data(f"POST / HTTP/1.1\r\n{framing}\r\n\r\n".encode())
            self._feed(data[error.args[0] :])

    def _learn(self, data: memoryview) -> None:
        """Remember the head of a request that was received complete and alone."""
        request: Any = self._actions[-1]
        size = len(data) - len(request.body)
        is_plain = request == RequestRead(body=request.body, path=request.path)
        if not is_plain or "expect" in self._headers or size > KEPT_HEAD_BYTES:
            return
        head = bytes(data[:size])
        match = _LENGTH.search(head) if head.find(b"\r\n\r\n") == size - 4 else None
        if match is not None and int(match[1]) == len(request.body):
            self.known = head[: match.start(1)], head[match.end(1) :], request.path

    # ---- what llhttp finds ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._head is not None:
            return  # see ``_feed``
        self._is_between = False
        self._url, self.path, self._headers = b"", "", {}

    def on_url(self, url: bytes) -> None:
        if self._head is None:
            self._url += url
            self.path = self._url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is not None:
            return  # a trailer behind the body is ignored
        if len(self._headers) >= MAX_HEADERS:
            self._error = _head_too_large(self._limits)
            return
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
        if key in self._headers:
            if key in ("host", "authorization"):
                self._error = InvalidInput(f"{key} appears twice")
            text = f"{self._headers[key]}, {text}"
        self._headers[key] = text

    def on_headers_complete(self) -> None:
        if self._error is not None or self._head is not None or self.is_ending:
            return
        head = self._read_head()
        error: PipeSwitchError | None = None
        self.path, self.known = head.path, None
        if head.is_current and "host" not in head.headers:
            self._error = InvalidInput("Host is missing")
            return
        if (head.length or 0) > self._limits.body_bytes:
            error = _body_too_large(self._limits)
        elif head.coding not in ("identity", *CODINGS):
            error = UnknownCoding(head.coding)
        self._actions.append(HeadRead(head, error))
        if error is not None and head.length != 0:
            self.stop()
            return
        self._head, self._body, self.since_s = head, bytearray(), self._now_s
        self._head_bytes = self._marked_bytes = self._raw_bytes = 0
        if head.headers.get("expect", "").lower() == "100-continue" and not self._pending:
            self._actions.append(Do.CONTINUE)

    def _read_head(self) -> Head:
        headers = self._headers
        path, _, query = self._url.decode("latin-1").partition("?")
        if path.startswith(("http://", "https://")):  # for a proxy: this host replaces the header
            site = path.split("/", 3)
            headers["host"], path = site[2], "/" + "".join(site[3:])
        is_current = self._parser.get_http_version() == "1.1"
        wish = headers.get("connection", "").lower()
        self._is_kept = "close" not in wish if is_current else "keep-alive" in wish
        is_chunked = "transfer-encoding" in headers
        return Head(
            method=self._parser.get_method().decode("latin-1"),
            path=path,
            query=query,
            headers=headers,
            peer=self.peer,
            length=None if is_chunked else int(headers.get("content-length", 0)),
            is_current=is_current,
        )

    def on_body(self, data: bytes) -> None:
        if self._error is not None or self._head is None:
            return
        if len(self._body) + len(data) > self._limits.body_bytes:
            self._error = _body_too_large(self._limits)
            return
        self._body += data
        self._body_bytes += len(data) * (GROWTH if self._head.length is None else 1)

    def on_message_complete(self) -> None:
        if self._head is not None and self._head.length != 0 and self._parser.should_upgrade():
            return  # the body follows, see ``_feed``
        self._complete()
        if self._error is not None:
            raise self._error  # parse no more of the received bytes, to serve other connections

    def _complete(self) -> None:
        head, self._head = self._head, None
        self._is_between = True
        if self._error is not None or head is None:
            return
        body, self._body, self._body_bytes = self._body, bytearray(), 0
        if self._pending >= MAX_AHEAD:
            text = f"more than {MAX_AHEAD} requests without an answer"
            self._error = QueueFull(text, limit="pipelined")
            return
        self._add_request(head, body)

    def _add_request(self, head: Head, body: Any) -> None:
        if self._pending:
            self.is_paused = True
            self._actions.append(Do.PAUSE)
        self._pending += 1
        self._actions.append(
            RequestRead(
                body=body,
                path=head.path,
                is_compressed=head.coding != "identity",
                is_kept=self._is_kept,
                has_body=head.method != "HEAD",
                is_chunked=head.is_current,
            )
        )

    # ---- time ----------------------------------------------------------------------------------

    def answered(self, now_s: float) -> None:
        """Note that no request waits for its answer any more."""
        self.since_s, self._pending, self.is_paused = now_s, 0, False

    def claim(self, now_s: float) -> Claim | None:
        """Return the connection's claim to stay in a crowd; None if it may not be evicted.

        Connections that have had and read an answer rank highest, then the recently active ones. A
        connection that computes an answer, or was active just now, may not be evicted.
        """
        if self._pending and not self._unread_bytes:
            return None
        is_known = self.has_answered and not self._unread_bytes
        since_s = self._unread_since_s if self._unread_bytes else self.since_s
        if now_s - since_s < (ANSWERED_GRACE_S if is_known else GRACE_S):
            return None
        return is_known, since_s

    def look(self, now_s: float, unread_bytes: int) -> list[Action]:
        """Return the action for a peer that exceeds a time limit.

        Computing an answer has no limit here. Only a peer that does not read the answer is cut off.
        """
        if not unread_bytes or unread_bytes != self._unread_bytes:
            self._unread_bytes, self._unread_since_s = unread_bytes, now_s
        elif now_s - self._unread_since_s > self._limits.unread_s:
            return [Do.ABORT]
        if unread_bytes or self._pending:
            return []
        took_s, limits = now_s - self.since_s, self._limits
        if self._head is not None:
            if took_s > limits.body_look_s:
                received_bytes = self._body_bytes - self._marked_bytes
                if received_bytes < took_s * limits.body_bytes_per_s:
                    return self.refuse(RequestTimeout("the body came too slowly"))
                self.since_s, self._marked_bytes = now_s, self._body_bytes
        elif self._head_bytes:
            if took_s > limits.head_s:
                return self.refuse(RequestTimeout("the head came too slowly"))
        elif took_s > (LINGER_S if self.is_ending else limits.idle_s):
            return [Do.ABORT]
        return []


def _head_too_large(limits: Limits) -> HeadTooLarge:
    return HeadTooLarge(
        f"the head of a request has at most {format_bytes(limits.head_bytes)} and "
        f"{MAX_HEADERS} headers"
    )


def _body_too_large(limits: Limits) -> TooLarge:
    return TooLarge(
        f"a body has at most {format_bytes(limits.body_bytes)} here",
        hint="send less at once (a model: pipeswitch register), or raise [gateway] max_body",
    )
