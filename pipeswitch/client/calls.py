"""Protocol of one connection: hello, table of calls, retries, and a new link when one breaks.

Two subclasses do the I/O: ``connection`` for threads and ``looped`` for an event loop. They call
``_receive`` when the link can be read, and ``_poll`` at the time ``_poll_at_s``. Only one thread at
a time may use the object, and no method blocks.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from typing import Any, ClassVar, Final

import msgspec

from ..base import errors
from ..base.codec import UNREADABLE
from ..wire.addresses import no_server
from ..wire.frames import (
    BODY_TENSOR,
    MAGIC,
    VERSION,
    ReplyHeader,
    RequestHeader,
    WireTensor,
    decode_reply,
    encoder,
)
from ..wire.request_timing import RequestTiming
from .links import BRING, ServerLink, StreamLink, Watcher

logger = logging.getLogger(__name__)

AGAIN_S: Final = 0.05  # interval of attempts to connect while nobody listens
MIN_DEADLINE_MS: Final = 0.001  # sent for a call whose deadline passed while it waited
MAX_TRIES: Final = 3  # maximum number of times that a safe call is sent while connections break
RETURN_S: Final = 30.0  # how long a request waits for a server that listens but does not answer
MAX_WAIT_S: Final = 2_000_000.0  # longest wait in seconds, because a poll takes its ms as 31 bits


class FinalReply(msgspec.Struct, frozen=True, kw_only=True):
    """Final reply to a request."""

    request_id: str
    body: dict[str, Any]
    timing: RequestTiming | None = None  # None if the request was not an inference
    outputs: tuple[WireTensor, ...]
    frames: Sequence[Any]  # buffers that keep the received message alive


def as_wait_s(timeout_s: float | None) -> float | None:
    """Return a caller's timeout in seconds. None, or more than ``MAX_WAIT_S``, becomes None.

    Raises:
        InvalidInput: the timeout is not a number.
    """
    if timeout_s is None:
        return None
    try:
        seconds = float(timeout_s)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if math.isnan(seconds):
        raise errors.InvalidInput(f"timeout_s must be a number of seconds, got {timeout_s!r}")
    return seconds if seconds <= MAX_WAIT_S else None


class Call(msgspec.Struct, kw_only=True, eq=False):
    """Request that waits for its answer."""

    header: dict[str, Any]  # fields of RequestHeader, without the session
    future: Any = None  # of the subclass's kind; None: the next three fields have the outcome
    is_over: bool = False
    value: Any = None
    error: Exception | None = None
    frames: Sequence[Any] = ()
    is_safe: bool = False  # sending it twice has the effect of sending it once
    convert: Callable[[FinalReply], Any] | None = None  # converts the final reply to the value
    on_progress: Callable[[dict[str, Any]], None] | None = None  # gets bodies of progress replies
    is_sent: bool = False
    tries: int = 0
    until_s: float = math.inf  # deadline on the monotonic clock


class Calls:
    """Unanswered calls, and the link that carries them."""

    _waits_for_server = True  # True: retry while no server listens at the address
    has_keys: ClassVar = False  # True: the client proves a key

    def __init__(
        self,
        address: str,
        timeout_s: float,
        watcher: Watcher,
        *,
        shared_memory: bool = True,
        return_s: float = 0.0,
    ) -> None:
        """Args:
        timeout_s: how long a server may take to answer the first hello.
        watcher: reports when the link can be read or written.
        shared_memory: use shared memory with an ``ipc://`` server.
        return_s: how long to wait, after a connection broke, for a server that listens but does
            not answer; ``timeout_s``, if that is longer.
        """
        self._return_s = return_s
        self._may_share = shared_memory and address.startswith("ipc://")
        wait_s = as_wait_s(timeout_s)
        self._timeout_s = MAX_WAIT_S if wait_s is None else wait_s
        self.address = address
        self._watcher = watcher
        self._calls: dict[str, Call] = {}  # request id -> call, oldest first
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._link: ServerLink | None = None
        self._was_connected = False  # a server has answered hello
        self._began_s = 0.0  # start of the current search for a server
        self._listened_s = 0.0  # last time in this search at which a server listened
        self._poll_at_s = math.inf  # time at which ``_poll`` is due; inf: no search is under way

    # ---- overridden by the subclasses ----------------------------------------------------------

    def _end(self, call: Call, value: Any = None, error: Exception | None = None) -> None:
        """Report the end of a call to its caller, unless the caller cancelled it."""
        raise NotImplementedError

    def _new_link(self, hello_id: str) -> ServerLink:
        return StreamLink.open(self.address, hello_id, may_share=self._may_share)

    def _due(self, at_s: float) -> None:
        self._poll_at_s = at_s

    # ---- one call ------------------------------------------------------------------------------

    def _call(
        self,
        op: str,
        *,
        model: str = "",
        body: dict[str, Any] | None = None,
        inputs: tuple[WireTensor, ...] = (),
        deadline_ms: float | None = None,
        priority: str = "",
        **options: Any,
    ) -> Call:
        """Return an unsent call without a future; ``options`` are fields of ``Call``."""
        header = self._header(op, model, body)
        header |= {"inputs": inputs, "deadline_ms": deadline_ms, "priority": priority}
        if deadline_ms is not None:
            options["until_s"] = time.monotonic() + deadline_ms / 1000.0
        return Call(header=header, **options)

    def _header(self, op: str, model: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            model.encode()
        except (AttributeError, UnicodeEncodeError):
            raise errors.InvalidInput(f"{model!r:.80} is not a name") from None
        request_id = f"{self._prefix}-{next(self._numbers)}"
        return {"v": VERSION, "op": op, "id": request_id, "model": model, "body": body or {}}

    def _begin(self, call: Call) -> None:
        if call.future is not None and call.future.cancelled():
            return
        self._calls[call.header["id"]] = call
        if self._link is None:
            if self._poll_at_s == math.inf:
                self._open()
        elif self._link.session:
            self._send(self._link, call)
        elif (at_s := max(call.until_s, self._began_s + self._timeout_s)) < self._poll_at_s:
            self._due(at_s)

    def _send(self, link: ServerLink, call: Call) -> None:
        """Send a call. If it is too large, fail it, because the server would disconnect."""
        size_bytes, limit_bytes = sum(map(len, call.frames)), link.facts.get("max_message_bytes")
        if isinstance(limit_bytes, int) and size_bytes > limit_bytes:
            text = f"{call.header['op']}: {size_bytes} bytes exceed the limit of {limit_bytes}"
            self._fail(
                call, errors.InvalidInput(text, hint="raise the server's [server] max_message")
            )
            return
        call.is_sent = True
        try:
            self._transmit(link, call.header, call.frames)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            op = call.header["op"]
            self._fail(call, errors.InvalidInput(f"{op}: an argument cannot be sent: {error}"))

    @staticmethod
    def _transmit(link: ServerLink, fields: dict[str, Any], frames: Sequence[Any]) -> None:
        header = RequestHeader(**fields, session=link.session)
        encoder.encode_into(header, packed := bytearray())  # as ``encode_header`` does
        parts = [MAGIC, bytes(packed), *frames]
        link.send(parts, header.id, may_share=header.op == "infer")

    def _cancel(self, request_id: str) -> None:
        """Drop a call and its later reply, and cancel its request on the server."""
        call = self._calls.pop(request_id, None)
        if call is not None and call.is_sent:
            self._tell(self._header("cancel", "", {"id": request_id}))

    def _tell(self, header: dict[str, Any]) -> None:
        """Send a request that gets no reply; drop it if there is no connection."""
        if self._link is not None and self._link.session:
            self._transmit(self._link, header, ())

    def _fail(self, call: Call, error: errors.PipeSwitchError) -> None:
        self._calls.pop(call.header["id"], None)
        error.request_id = call.header["id"]
        with contextlib.suppress(InvalidStateError):
            self._end(call, error=error)

    def _fail_all(self, error: errors.PipeSwitchError, linger_ms: int = 0) -> None:
        """Close the link, and fail each call with its own copy of the error."""
        self._shut(linger_ms)
        for call in list(self._calls.values()):
            self._fail(
                call, errors.from_wire(type(error).__name__, error.message, error.hint, error.data)
            )

    # ---- the link --------------------------------------------------------------------------------

    def _open(self) -> None:
        """Begin the search for a server."""
        self._began_s = self._listened_s = time.monotonic()
        self._connect()

    def _connect(self) -> None:
        """Open a new link and send hello."""
        try:
            link = self._new_link(f"{self._prefix}-hello-{next(self._numbers)}")
        except (OSError, UnicodeError):  # UnicodeError: such as two dots in a machine's name
            self._absent()
            return
        self._link = link
        link.attach(self._watcher)
        self._transmit(link, {"v": VERSION, "op": "hello", "id": link.hello_id}, ())
        self._due(self._began_s + self._timeout_s)

    def _absent(self) -> None:
        """Schedule another attempt, as no server listens; if the search is over, fail all calls."""
        if self._waits_for_server and time.monotonic() < self._gives_up_at_s():
            self._due(time.monotonic() + AGAIN_S)
        else:
            self._fail_all(_no_server(self))

    def _gives_up_at_s(self) -> float:
        """Return the time on the monotonic clock at which the search ends.

        The first search ends ``timeout_s`` after it began. A later search ends ``timeout_s`` after
        a server last listened, because a server that listens is only restarting its gateway. It
        ends at the latest ``return_s`` (or ``timeout_s``, if that is longer) after it began.
        """
        if not self._was_connected:
            return self._began_s + self._timeout_s
        if self._link is not None:
            self._listened_s = max(self._listened_s, self._link.listened_s)
        latest_s = self._began_s + max(self._timeout_s, self._return_s)
        return min(self._listened_s + self._timeout_s, latest_s)

    def _poll(self) -> None:
        """Continue the search; after ``timeout_s``, fail the calls whose deadline has passed."""
        now_s, gives_up_at_s = time.monotonic(), self._gives_up_at_s()
        if now_s >= gives_up_at_s:
            self._fail_all(_no_server(self))
            return
        if now_s >= self._began_s + self._timeout_s:
            for call in [call for call in self._calls.values() if call.until_s <= now_s]:
                self._fail(call, errors.DeadlineExceeded(f"no server answers at {self.address}"))
        if self._link is None:
            self._connect()
        else:
            self._due(min([gives_up_at_s, *(call.until_s for call in self._calls.values())]))

    def _shut(self, linger_ms: int = 0) -> None:
        link, self._link = self._link, None
        self._poll_at_s = math.inf
        if link is not None:
            self._listened_s = max(self._listened_s, link.listened_s)
            link.detach(self._watcher)
            link.close(linger_ms)

    def _guard(self, action: Callable[..., None], *args: Any) -> None:
        """Run ``action``; if it raises, fail all calls with an error.

        If the error ended the thread instead, these calls and all later ones would wait for ever.
        """
        try:
            action(*args)
        except Exception as error:
            logger.exception("client=%s failed", self.address)
            reason = f"the connection to {self.address} failed: {type(error).__name__}: {error}"
            self._fail_all(errors.PipeSwitchError(reason))

    def _broken(self, *, was_forgotten: bool = False) -> None:
        """Send the calls again over a new link. Calls that were sent and are unsafe to repeat, or
        were sent ``MAX_TRIES`` times, fail. If ``was_forgotten``, all are safe to repeat."""
        link = self._link
        self._shut()
        if link is not None and not link.session:
            self._absent()
            return
        for call in list(self._calls.values()):
            call.tries += call.is_sent
            is_unsafe = not call.is_safe and not was_forgotten
            if call.is_sent and (is_unsafe or call.tries >= MAX_TRIES):
                self._fail(
                    call,
                    errors.ServerUnavailable(
                        f"the server at {self.address} closed the connection before it answered",
                        hint="the request may have been carried out: check before you repeat it",
                    ),
                )
            call.is_sent = False
        self._open()

    # ---- what arrives ----------------------------------------------------------------------------

    def _receive(self, link: ServerLink) -> None:
        try:
            for parts in link.messages():
                header = decode_reply(parts)
                if not header.more:
                    link.answered(header.id)
                if header.id == link.hello_id:
                    self._greeted(link, header)
                else:
                    self._answered(header, parts[2:])
                if self._link is not link:
                    return
        except errors.PipeSwitchError as error:
            self._fail_all(error)
        except EOFError:
            self._broken()

    def _greeted(self, link: ServerLink, header: ReplyHeader) -> None:
        if header.error is not None:
            self._fail_all(_error(header))
            return
        link.session, link.facts = header.session, header.body
        self._poll_at_s, self._was_connected = math.inf, True
        now_s = time.monotonic()
        for call in list(self._calls.values()):
            if call.is_sent:
                continue
            if call.until_s < math.inf and now_s > self._began_s + self._timeout_s:
                call.header["deadline_ms"] = max((call.until_s - now_s) * 1000.0, MIN_DEADLINE_MS)
            self._send(link, call)

    def _answered(self, header: ReplyHeader, frames: Sequence[Any]) -> None:
        call = self._calls.get(header.id)
        if call is None:
            return
        if header.more:
            self._progressed(call, header.body)
            return
        if header.error is not None:
            error = _error(header)
            if error.data.get("reason") == "unknown_session":
                self._broken(was_forgotten=True)  # the server has restarted
            else:
                self._fail(call, error)
            return
        del self._calls[header.id]
        try:
            reply = _reply(header, frames)
            value = reply if call.convert is None else call.convert(reply)
        except Exception as error:  # a malformed reply, or an error in the caller's ``convert``
            self._end(call, error=error)
        else:
            self._end(call, value)

    def _progressed(self, call: Call, body: dict[str, Any]) -> None:
        """Pass progress to the caller; if its callback raises, only this call fails."""
        call.tries = 0
        try:
            if call.on_progress is not None:
                call.on_progress(body)
        except Exception as error:
            del self._calls[call.header["id"]]
            self._end(call, error=error)


def _no_server(calls: Calls) -> errors.ServerUnavailable:
    """Return the error at the end of a search.

    A server with keys may close the connection before a client without a key gets the reason.
    """
    link = calls._link
    listened_s = max(calls._listened_s, link.listened_s if link is not None else 0.0)
    is_silent = listened_s > calls._began_s and calls.address.startswith("tcp://")
    if calls.has_keys or not is_silent:
        return no_server(calls.address)
    why = "if it requires keys, it ignores clients without one"
    return errors.ServerUnavailable(f"{calls.address} does not answer: {why}", hint=BRING)


def _error(header: ReplyHeader) -> errors.PipeSwitchError:
    error = header.error
    if error is None:
        return errors.RemoteProtocolError("the server reported an error without a name")
    return errors.from_wire(error.type, error.message, error.hint, error.data, header.id)


def _reply(header: ReplyHeader, frames: Sequence[Any]) -> FinalReply:
    body = header.body
    outputs = header.outputs
    if len(outputs) == 1 and not body and outputs[0].name == BODY_TENSOR and not header.timing:
        body, outputs = _large_body(frames[outputs[0].frame]), ()
    return FinalReply(
        request_id=header.id, body=body, timing=header.timing, outputs=outputs, frames=frames
    )


def _large_body(data: Any) -> dict[str, Any]:
    """Return a body that was sent as a tensor because it did not fit into a header."""
    try:
        return msgspec.msgpack.decode(data, type=dict[str, Any])
    except UNREADABLE as error:
        raise errors.RemoteProtocolError(f"malformed body: {error}") from None
