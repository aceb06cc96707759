"""HTTP/1.1 server on asyncio, which performs the actions of its connections' parsers.

``http_parser.py`` limits one connection, in bytes and seconds; this module limits all together. A
body of known length is received directly into a buffer. A connection answers requests in order.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
import zlib
from asyncio.sslproto import SSLProtocol
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, Final, Protocol, cast

import msgspec
import numpy as np

from ...base.codec import check_memory, encode_json
from ...base.errors import InvalidInput, PipeSwitchError, QueueFull, ServerUnavailable
from ...base.quotas import Places
from ...base.units import format_bytes
from ...client.looped import InlineTask
from . import http_errors, http_parser
from .offload import CROWD, Shared

log = logging.getLogger(__name__)

AGAIN: Final = "send again in a moment"
LOOK_EVERY_S: Final = 0.5  # interval between checks of connections: the precision of time limits
LOOKS: Final = 64  # connections checked in one iteration of the loop
SCRATCH_BYTES: Final = 16 << 10  # maximum received at once, except for bodies of known length
JOIN_BYTES: Final = 64 << 10  # an answer up to this size is written in one call
PIECE_BYTES: Final = 256 << 10  # size of the pieces in which a larger answer is sent
UNREAD_BYTES: Final = 16 << 10  # limit of unread answers, above which no further answer is computed
INLINE_BYTES: Final = 2 << 10  # longest body that the loop itself inflates: to 2 MB, in 2 ms
_scratch = memoryview(bytearray(SCRATCH_BYTES))  # parsed before another connection receives
# nginx defined 499.
_REASONS: Final = {one.value: one.phrase for one in HTTPStatus} | {499: "Client Closed Request"}
EVENT_STREAM: Final = "text/event-stream"
TLS_BYTES: Final = 64 << 10  # receive buffer of a connection with TLS; asyncio's own has 256 KiB


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

Admit = Callable[[http_parser.Head], Work | Response]
"""Function that returns the work for a request, or a refusal, before the body is received."""


Refuse = Callable[[str, PipeSwitchError], Response]
"""Function that returns an error in the form that the clients of a path expect."""


async def answered(work: Work, body: Any, path: str, refuse: Refuse) -> Response:
    """Return the answer to a request; an error becomes a refusal."""
    try:
        return await work(body)
    except PipeSwitchError as error:
        return refuse(path, error)
    except Exception as error:
        log.exception("http=failed")  # without the head, which may have a token
        return refuse(path, http_errors.as_ours(error))


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
        headers.append(("Accept-Encoding", ", ".join(http_parser.CODINGS)))
    return json_answer(http_errors.body_of(error), status.http, headers)


class HttpServer:
    """All connections of one process, and the memory that they hold together."""

    def __init__(
        self,
        admit: Admit,
        limits: http_parser.Limits,
        shared: Shared | None = None,
        refuse: Refuse = lambda path, error: refusal(error),
    ) -> None:
        self.admit, self._refusal = admit, refuse
        self.shared = shared or Shared(limits.waiting_bytes, limits.answer_bytes)
        self.limits = limits
        self.places = Places[HttpConnection](
            limits.connections,
            limits.connections_per_address,
            lambda one, now_s: one.parser.claim(now_s),
        )
        self.connections = self.places.addresses.keys()
        self.unfinished_bytes = 0  # bytes of incomplete heads and bodies

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
            connection.parser.known = None

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

    def make_room(self) -> None:
        """Refuse the largest incomplete requests until the rest fit the limit."""
        while self.unfinished_bytes > self.limits.unfinished_bytes:
            largest = max(self.connections, key=lambda one: one.parser.held_bytes)
            if largest.parser.held_bytes == self.unfinished_bytes:
                return  # a single request may exceed the limit
            largest.refuse(
                QueueFull(
                    "too many bytes of incomplete requests", hint=AGAIN, limit="unfinished_bytes"
                )
            )


class HttpConnection(asyncio.BufferedProtocol):
    """Connection to one peer: its parser and its answers."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self.peer = ""
        self.parser = http_parser.HttpParser(server.limits, time.monotonic())
        self._held_bytes = 0  # the parser's part of the server's ``unfinished_bytes``
        self._transport: Any = None
        self._work: Work | Response = Response()  # work for the last head
        self.queue: deque[tuple[Work | Response, http_parser.RequestRead]] = deque()
        self._task: InlineTask | None = None
        self._streaming: Callable[[bytes], bytes] | None = None  # frames a stream's piece
        self._cut: Callable[[PipeSwitchError], bytes] | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()

    # ---- asyncio's side ------------------------------------------------------------------------

    def enter(self, transport: asyncio.BaseTransport) -> bool:
        """Return True if there is room for this peer."""
        self._transport = transport
        address = transport.get_extra_info("peername")
        self.peer = self.parser.peer = str(address[0]) if isinstance(address, tuple) else ""
        places, now_s = self._server.places, time.monotonic()
        return places.enter(self, self.peer, now_s, HttpConnection.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        is_in = self in self._server.connections or self.enter(transport)  # TLS called it before
        self._transport = transport
        self._transport.set_write_buffer_limits(high=UNREAD_BYTES)
        if not is_in:
            self._transport.write(_bytes_of(_crowded(), is_kept=False))
            self.parser.is_ending = True
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.places.leave(self)
        self._stop_reading()
        self.parser.close()
        if self._task is not None:
            self._task.cancel()
        self._forget_queue()

    def get_buffer(self, sizehint: int) -> memoryview:
        rest = self.parser.rest
        return _scratch if rest is None else rest

    def buffer_updated(self, nbytes: int) -> None:
        parser = self.parser
        if parser.is_ending:
            return
        if parser.rest is not None:
            self._perform(parser.fill(nbytes))
        elif (request := parser.repeated(_scratch[:nbytes])) is None:
            self._perform(parser.receive(_scratch[:nbytes], time.monotonic()))
        else:
            self._queue_up(request)
            self._task = InlineTask(self._answer_all())
            self._task.step()
        if self._server.unfinished_bytes:
            self._server.make_room()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    # ---- the parser's actions ------------------------------------------------------------------

    def _perform(self, actions: Sequence[http_parser.Action]) -> None:
        """Perform actions, up to the first that ends the connection; then answer."""
        for action in actions:
            if not self._do(action):
                break
        held_bytes = self.parser.held_bytes
        self._server.unfinished_bytes += held_bytes - self._held_bytes
        self._held_bytes = held_bytes
        if self.queue and self._task is None:
            self._task = InlineTask(self._answer_all())
            self._task.step()

    def _do(self, action: http_parser.Action) -> bool:
        """Perform an action; False: the connection ends."""
        match action:
            case http_parser.HeadRead():
                return self._admit(action)
            case http_parser.RequestRead():
                return self._queue_up(action)
            case http_parser.NeedBuffer():
                try:
                    self.parser.use_buffer(_untouched(action.size))
                except (MemoryError, OSError):
                    text = "the gateway has no memory for a body of this length"
                    self.refuse(QueueFull(text, hint=AGAIN, limit="memory"))
                    return False
            case http_parser.RefuseRequest():
                self._queue_refusal(self.parser.path, action.error)
            case http_parser.Do.CONTINUE:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            case http_parser.Do.PAUSE:
                self._transport.pause_reading()
            case http_parser.Do.ABORT:
                self.abort()
        return True

    def _admit(self, read: http_parser.HeadRead) -> bool:
        """Decide whether to answer a request; False: it is refused, and its body is not read."""
        head, server = read.head, self._server
        work = server.refuse(head.path, read.error) if read.error else server.admit(head)
        self._work = work
        if not isinstance(work, Response) or head.length == 0:
            return True
        self._perform(self.parser.without_body(head))
        return False

    def _queue_up(self, request: http_parser.RequestRead) -> bool:
        """Queue a request for the last head; False: it is refused."""
        try:
            self._server.shared.waiting.take(self.peer, len(request.body))
        except QueueFull as error:
            self.parser.stop()  # it may have refused later bytes already
            self._queue_refusal(request.path, error)
            return False
        self.queue.append((self._work, request))
        return True

    def _queue_refusal(self, path: str, error: PipeSwitchError) -> None:
        refused = self._server.refuse(path, error)
        if self._task is None and not self.queue:
            self.queue.append(
                (refused, http_parser.RequestRead(body=b"", path=path, is_kept=False))
            )

    def _stop_reading(self) -> None:
        self.parser.stop()
        self._perform(())

    def refuse(self, error: PipeSwitchError) -> None:
        """Stop reading, and answer with the error, unless other answers are pending."""
        self._perform(self.parser.refuse(error))

    # ---- answers -------------------------------------------------------------------------------

    async def _answer_all(self) -> None:
        """Answer every complete request in order; then the task ends."""
        try:
            while self.queue:
                if self._server.places.by_address[self.peer] > CROWD:
                    await self._server.shared.passes.turn(self.peer)
                work, request = self.queue.popleft()
                refuse, path = self._server.refuse, request.path
                try:
                    if isinstance(work, Response):
                        answer = work
                    elif request.is_compressed:
                        answer = await self._inflated(work, request.body, path)
                    else:
                        answer = await answered(work, request.body, path, refuse)
                finally:
                    self._server.shared.waiting.give(self.peer, len(request.body))
                if answer.status >= 400:
                    self._server.shared.errors[str(answer.status)] += 1
                is_kept, has_body = request.is_kept and not self.parser.is_ending, request.has_body
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
                if not is_kept:
                    return
                self.parser.has_answered = True
                if self.queue:
                    await asyncio.sleep(0)  # serve the other connections
                elif self.parser.is_paused:
                    self._transport.resume_reading()
        finally:
            self._task = None
            self._forget_queue()
            self.parser.answered(time.monotonic())

    async def _inflated(self, work: Work, data: Any, path: str) -> Response:
        shared = self._server.shared
        most = min(self._server.limits.body_bytes, shared.waiting.left(self.peer))
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
            self.peer, sum(len(request.body) for _, request in self.queue)
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
            self._stop_reading()
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
        self._stop_reading()
        self.parser.since_s = time.monotonic()
        self._transport.resume_reading()
        if not self._transport.can_write_eof():
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:  # the peer has reset the connection, which asyncio has not seen yet
            self.abort()

    # ---- time limits ---------------------------------------------------------------------------

    def look(self, now_s: float) -> None:
        """Cut off a connection that exceeds a time limit."""
        self._perform(self.parser.look(now_s, self._transport.get_write_buffer_size()))

    def leave(self) -> None:
        """Close the connection after its pending answers; cut a stream, which may never end."""
        self.parser.is_ending = True
        if self._streaming is not None and self._cut is not None:
            error = ServerUnavailable("the server's gateway is stopping", hint="ask again soon")
            self._transport.write(self._streaming(self._cut(error)))
        if self._task is None or self._streaming is not None:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


def context_of(certificate: str, key: str) -> ssl.SSLContext:
    """Return the TLS context of a certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context


class Secured(SSLProtocol):
    """The TLS protocol of ``loop.create_server(ssl=…)``, which counts connections in the handshake.

    asyncio reports a connection only after its handshake. A connection that stops in the handshake
    holds a descriptor and a third of a MiB: without the count, 600 of them would block all others.
    """

    max_size = TLS_BYTES

    def __init__(self, server: HttpServer, context: ssl.SSLContext) -> None:
        self._server = server
        self._connection = HttpConnection(server)
        super().__init__(
            asyncio.get_running_loop(),
            self._connection,
            context,
            cast("Any", None),  # nobody waits for the handshake
            server_side=True,
            ssl_handshake_timeout=round(server.limits.head_s),
        )

    def connection_made(self, transport: Any) -> None:
        if self._connection.enter(transport):
            super().connection_made(transport)
        else:
            transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.places.leave(self._connection)
        super().connection_lost(exc)


def _untouched(size: int) -> memoryview:
    """Return a buffer that takes no memory until bytes arrive, as a peer may send none."""
    if size > INLINE_BYTES:
        check_memory(size, each_bytes=1)
    raw: Any = np.empty(size, np.uint8)
    return memoryview(raw)


def _inflated(data: Any, most: int) -> bytes:
    """Return the inflated body.
    Raises InvalidInput: the body does not match its head; TooLarge: the result exceeds ``most``
    bytes; OSError: memory is short."""
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
    head = _head_of(answer, sum(map(len, answer.parts)), is_kept=is_kept)
    return b"".join([head, *answer.parts]) if has_body else head


def _crowded() -> Response:
    return refusal(ServerUnavailable("too many connections", hint=AGAIN))
