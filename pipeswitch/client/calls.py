"""The calls of one connection; a thread drives them (``connection``), or a loop (``looped``).

Says hello, sends what waits, matches answers to calls by id, and when the connection breaks opens
another one and sends again what is safe to send again. One thread's at a time; never blocks.
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
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from ..errors import (
    InvalidInput,
    PipeSwitchError,
    RemoteProtocolError,
    ServerUnavailable,
    from_wire,
    no_server,
)
from ..wire.bill import Bill
from ..wire.frames import (
    BODY_TENSOR,
    MAGIC,
    VERSION,
    ReplyHeader,
    RequestHeader,
    WireTensor,
    decode_reply,
    encode_header,
)
from .links import StreamLink, Watcher

if TYPE_CHECKING:
    from .keyed import ZmqLink

logger = logging.getLogger(__name__)

AnyLink: TypeAlias = "StreamLink | ZmqLink"

MAX_TRIES: Final = 3  # of a safe call over broken connections
MAX_WAIT_S: Final = 2_000_000.0  # a poll counts milliseconds in 31 bits; longer is for ever


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A final answer."""

    request_id: str
    body: dict[str, Any]
    timing: Bill | None = None  # of an inference
    outputs: tuple[WireTensor, ...]
    frames: Sequence[Any]  # buffers that keep the received message alive


def as_wait_s(timeout_s: float | None) -> float | None:
    """A caller's timeout as what waits can take it; None: for ever.

    Raises:
        InvalidInput: it is not a number.
    """
    if timeout_s is None:
        return None
    try:
        seconds = float(timeout_s)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if math.isnan(seconds):
        raise InvalidInput(f"timeout_s must be a number of seconds, got {timeout_s!r}")
    return seconds if seconds <= MAX_WAIT_S else None


class Call(msgspec.Struct, kw_only=True, eq=False):
    header: dict[str, Any]  # RequestHeader's fields but the session
    future: Any  # of ``Calls._new_future``
    frames: Sequence[Any] = ()
    is_safe: bool = False  # sending it twice does the same as sending it once
    convert: Callable[[Reply], Any] | None = None  # the future's value; None: the final reply
    on_progress: Callable[[dict[str, Any]], None] | None = None  # gets each progress reply's body
    is_sent: bool = False
    tries: int = 0


class Calls:
    """Calls without an answer and the link they go by. A subclass drives it."""

    def __init__(
        self, address: str, timeout_s: float, watcher: Watcher, *, shared_memory: bool = True
    ) -> None:
        """
        Args:
            timeout_s: how long a server may take to answer the first hello.
            watcher: what tells when there is something to read or write.
            shared_memory: with an ``ipc://`` server.
        """
        self._may_share = shared_memory and address.startswith("ipc://")
        wait_s = as_wait_s(timeout_s)
        self._timeout_s = MAX_WAIT_S if wait_s is None else wait_s
        self.address = address
        self._watcher = watcher
        self._calls: dict[str, Call] = {}  # by request id, oldest first
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._link: AnyLink | None = None
        self._waits_until_s = 0.0  # for a server that is not there; 0: no longer

    # ---- what a driver has of its own ----------------------------------------------------------

    def _new_future(self, request_id: str) -> Any:
        """What a caller waits for: a future of whichever kind; cancelled, it calls ``_cancel``."""
        raise NotImplementedError

    def _absent(self, hello_until_s: float) -> None:
        """No server listens now; it may be waited for until then."""
        raise NotImplementedError

    def _explained(self, error: RemoteProtocolError) -> PipeSwitchError:
        """The server sent nonsense: what its calls fail with."""
        return error

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
        future: Any = None,
        **options: Any,
    ) -> Call:
        """Return a call that is not sent yet. ``options`` are fields of ``Call``; no ``future``: a
        new one."""
        header = self._header(op, model, body)
        header |= {"inputs": inputs, "deadline_ms": deadline_ms, "priority": priority}
        future = self._new_future(header["id"]) if future is None else future
        return Call(header=header, future=future, **options)

    def _header(self, op: str, model: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            model.encode()
        except (AttributeError, UnicodeEncodeError):
            raise InvalidInput(f"{model!r:.80} is not a name") from None
        request_id = f"{self._prefix}-{next(self._numbers)}"
        return {"v": VERSION, "op": op, "id": request_id, "model": model, "body": body or {}}

    def _begin(self, call: Call) -> None:
        if call.future.cancelled():
            return
        self._calls[call.header["id"]] = call
        if self._link is None:
            if not self._waits_until_s:
                self._open()
        elif self._link.session:
            self._send(self._link, call)

    def _send(self, link: AnyLink, call: Call) -> None:
        """Not a frame that the server cuts the connection at, and with it all that is under way."""
        size_bytes, limit_bytes = sum(map(len, call.frames)), link.facts.get("max_message_bytes")
        if isinstance(limit_bytes, int) and size_bytes > limit_bytes:
            text = f"{call.header['op']}: {size_bytes} bytes are over the limit of {limit_bytes}"
            self._fail(call, InvalidInput(text, hint="raise the server's [server] max_message"))
            return
        call.is_sent = True
        try:
            self._transmit(link, call.header, call.frames)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            op = call.header["op"]
            self._fail(call, InvalidInput(f"{op}: what was given cannot be sent: {error}"))

    @staticmethod
    def _transmit(link: AnyLink, fields: dict[str, Any], frames: Sequence[Any]) -> None:
        header = RequestHeader(**fields, session=link.session)
        parts = [MAGIC, encode_header(header), *frames]
        link.send(parts, header.id, may_share=header.op == "infer")

    def _cancel(self, request_id: str) -> None:
        """The caller took it back: tell the server; its answer will find no caller."""
        call = self._calls.pop(request_id, None)
        if call is None or not call.is_sent:
            return
        if self._link is not None and self._link.session:
            header = self._header("cancel", "", {"id": request_id})
            self._transmit(self._link, header, ())

    def _fail(self, call: Call, error: PipeSwitchError) -> None:
        self._calls.pop(call.header["id"], None)
        error.request_id = call.header["id"]
        with contextlib.suppress(InvalidStateError):
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(error)

    def _fail_all(self, make: Callable[[], PipeSwitchError], linger_ms: int = 0) -> None:
        self._shut(linger_ms)  # the link ends with them
        for call in list(self._calls.values()):
            self._fail(call, make())

    # ---- the link --------------------------------------------------------------------------------

    def _open(self, hello_until_s: float | None = None) -> None:
        """A new link and its hello. The time to answer starts now, unless it has before."""
        hello: dict[str, Any] = {
            "hello_id": f"{self._prefix}-hello-{next(self._numbers)}",
            "hello_until_s": hello_until_s or time.monotonic() + self._timeout_s,
        }
        try:
            link = self._connect(hello)
        except OSError:
            self._absent(hello["hello_until_s"])
            return
        self._greet(link)

    def _connect(self, hello: dict[str, Any]) -> AnyLink:
        """Raises OSError: no server listens there now."""
        return StreamLink.open(self.address, may_share=self._may_share, **hello)

    def _greet(self, link: AnyLink) -> None:
        self._link = link
        link.attach(self._watcher)
        self._transmit(link, {"v": VERSION, "op": "hello", "id": link.hello_id}, ())

    def _shut(self, linger_ms: int = 0) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.detach(self._watcher)
            link.close(linger_ms)

    def _guard(self, action: Callable[..., None], *args: Any) -> None:
        """Whatever goes wrong here ends the calls with an error.

        A thread that ended instead would leave them, and all later ones, waiting for ever.
        """
        try:
            action(*args)
        except Exception as error:
            logger.exception("client=%s failed", self.address)
            reason = f"the connection to {self.address} failed: {type(error).__name__}: {error}"
            self._fail_all(lambda: PipeSwitchError(reason))

    def _broken(self) -> None:
        """The connection is gone: what may not be sent twice fails, the rest goes out again."""
        link = self._link
        hello_until_s = link.hello_until_s if link is not None and not link.session else None
        self._shut()
        if hello_until_s is not None:
            self._absent(hello_until_s)
            return
        for call in list(self._calls.values()):
            call.tries += call.is_sent
            if call.is_sent and (not call.is_safe or call.tries >= MAX_TRIES):
                self._fail(
                    call,
                    ServerUnavailable(
                        f"the server at {self.address} went away before it answered",
                        hint="it may have been carried out: check before you send it again",
                    ),
                )
            call.is_sent = False
        self._open()

    def _greet_again(self) -> None:
        for call in self._calls.values():
            call.tries += 1
            call.is_sent = False
        for call in [c for c in self._calls.values() if c.tries > MAX_TRIES]:
            self._fail(call, ServerUnavailable(f"the server at {self.address} keeps forgetting us"))
        self._shut()
        self._open()

    def _unavailable(self) -> None:
        self._fail_all(lambda: no_server(self.address))

    # ---- what arrives ----------------------------------------------------------------------------

    def _receive(self, link: AnyLink) -> None:
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
        except RemoteProtocolError as error:
            refusal = self._explained(error)
            self._fail_all(lambda: refusal)
        except EOFError:
            self._broken()

    def _greeted(self, link: AnyLink, header: ReplyHeader) -> None:
        if header.error is not None:
            refusal = _error(header)
            self._fail_all(lambda: refusal)
            return
        link.session, link.facts = header.session, header.body
        for call in list(self._calls.values()):
            if not call.is_sent:
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
                self._greet_again()  # the server was restarted; nothing was carried out
            else:
                self._fail(call, error)
            return
        del self._calls[header.id]
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            reply = _reply(header, frames)
            call.future.set_result(reply if call.convert is None else call.convert(reply))
        except Exception as error:  # a bad reply, or the caller's own convert
            call.future.set_exception(error)

    def _progressed(self, call: Call, body: dict[str, Any]) -> None:
        """Tell the caller; an error of its callback is its answer, and no one else's."""
        call.tries = 0
        try:
            if call.on_progress is not None:
                call.on_progress(body)
        except Exception as error:
            del self._calls[call.header["id"]]
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(error)


def _error(header: ReplyHeader) -> PipeSwitchError:
    error = header.error
    if error is None:
        return RemoteProtocolError("the server reported an error without a name")
    return from_wire(error.type, error.message, error.hint, error.data, header.id)


def _reply(header: ReplyHeader, frames: Sequence[Any]) -> Reply:
    body = header.body
    outputs = header.outputs
    if len(outputs) == 1 and not body and outputs[0].name == BODY_TENSOR and not header.timing:
        body, outputs = _large_body(frames[outputs[0].frame]), ()
    return Reply(
        request_id=header.id, body=body, timing=header.timing, outputs=outputs, frames=frames
    )


def _large_body(data: Any) -> dict[str, Any]:
    """A body that did not fit into a header."""
    try:
        return msgspec.msgpack.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed body: {error}") from None
