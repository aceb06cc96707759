"""One connection, many futures: the SDK's I/O.

Who holds the *role* owns the socket and the table of calls: says hello, sends what waits, matches
answers to calls by id, and when the connection breaks opens another one and sends again what is
safe to send again. The background thread holds it while calls are under way. When there are none
it lets go, and a thread that then makes a call and waits for it (``call``) takes the role and
does the I/O itself: two thread switches less for each request.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import zmq

from ..errors import (
    Cancelled,
    InvalidInput,
    PermissionDenied,
    PipeSwitchError,
    RemoteProtocolError,
    ServerUnavailable,
    from_wire,
    no_server,
)
from ..wire.frames import (
    MAGIC,
    VERSION,
    ReplyHeader,
    RequestHeader,
    WireTensor,
    decode_reply,
    encode_header,
)
from ..wire.keys import ClientKeys
from ..wire.local import local_path
from .links import AnyLink, LocalLink, ZmqLink

logger = logging.getLogger(__name__)

MAX_TRIES: Final = 3  # of a safe call over broken connections
BODY_TENSOR: Final = "body"
CLOSE_FLUSH_MS: Final = 200
CLOSE_WAIT_S: Final = 1.0  # for the context: a subscription that a caller still holds keeps it
MAX_WAIT_S: Final = 2_000_000.0  # a poll counts milliseconds in 31 bits; longer is for ever
MAX_BROKEN_HANDSHAKES: Final = 3  # in a row with keys: it is not a server that just restarts
_BROKEN: Final = int(zmq.EVENT_DISCONNECTED)
_SHAKEN: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_UNKNOWN_KEY: Final = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_OTHER_MECHANISM: Final = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_HANDSHAKE_CUT: Final = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_WATCHED: Final = _BROKEN | _SHAKEN | _UNKNOWN_KEY | _OTHER_MECHANISM | _HANDSHAKE_CUT


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A final answer."""

    request_id: str
    body: dict[str, Any]
    timing: dict[str, Any]
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


class _Answer(Future[Any]):
    """A future that refuses to be waited for by the one thread that could fulfil it.

    Callbacks of futures run in the thread that reads the answers, as in any executor.
    """

    def __init__(self, check_thread: Callable[[], None], taken_back: Callable[[], None]) -> None:
        super().__init__()
        self._check_thread = check_thread
        self._taken_back = taken_back

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        if is_cancelled:
            self._taken_back()
        return is_cancelled

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self._check_thread()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._check_thread()
        return super().exception(timeout)


@dataclass(kw_only=True, eq=False)
class _Call:
    header: dict[str, Any]  # RequestHeader's fields but the session
    frames: Sequence[Any]
    is_safe: bool
    future: Future[Any]
    convert: Callable[[Reply], Any]
    on_progress: Callable[[dict[str, Any]], None] | None
    is_sent: bool = False
    tries: int = 0


_ADMIT: Final = "on the server: pipeswitch keys admit NAME KEY"
_BRING: Final = (
    "key= and server_key=, or PIPESWITCH_KEY and PIPESWITCH_SERVER_KEY; "
    "the server's owner makes them: pipeswitch keys client NAME"
)
_EXPECT: Final = "on the server: pipeswitch keys server --show"


class Connection:
    """One client's connection. ``request`` and ``call`` may be called from any thread."""

    def __init__(
        self,
        address: str,
        timeout_s: float,
        keys: ClientKeys | None = None,
        *,
        shared_memory: bool = True,
    ) -> None:
        """``shared_memory``: an ``ipc://`` server is spoken to by its plain socket."""
        path = address.removeprefix("ipc://")
        self._local = local_path(path) if shared_memory and path != address else None
        wait_s = as_wait_s(timeout_s)
        self._timeout_s = MAX_WAIT_S if wait_s is None else wait_s
        self.address = address
        self.keys = keys
        self.context: zmq.Context[Any] = zmq.Context()
        self._pid = os.getpid()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._posts: deque[Callable[[], None]] = deque()
        self._calls: dict[str, _Call] = {}  # by request id, oldest first
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._link: AnyLink | None = None
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._is_closing = False
        self._lock = threading.Lock()  # of _is_closing against late posts
        self._role = threading.Lock()  # its holder owns socket, link, poller and calls
        self._holder = 0  # the thread that has it
        self._needed = threading.Event()  # the background thread must take the role
        self._thread = threading.Thread(target=self._run, name="pipeswitch-client", daemon=True)
        # The context waits for its last socket, and a subscription is its reader's to close.
        self._ending = threading.Thread(
            target=self.context.term, name="pipeswitch-client-end", daemon=True
        )
        self._thread.start()

    # ---- any thread ----------------------------------------------------------------------------

    def request(
        self,
        op: str,
        *,
        model: str = "",
        body: dict[str, Any] | None = None,
        inputs: tuple[WireTensor, ...] = (),
        frames: Sequence[Any] = (),
        deadline_ms: float | None = None,
        priority: str = "",
        is_safe: bool = False,
        convert: Callable[[Reply], Any] = lambda reply: reply,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
        is_quiet: bool = False,
    ) -> Future[Any]:
        """Send a request; its future gets ``convert(reply)`` or an error of errors.py.

        Args:
            is_safe: sending it twice does the same as sending it once.
            convert: called with the final reply by the thread that does the I/O.
            on_progress: likewise, with each progress reply's body.
            is_quiet: no thread needs to be woken: the caller holds the role.
        """
        call = self._call(
            op, model, body, inputs, frames, deadline_ms, priority, is_safe, convert, on_progress
        )
        self._post(lambda: self._begin(call), is_quiet=is_quiet)
        return call.future

    def call(self, op: str, **options: Any) -> Any:
        """``request`` and its result; the calling thread does the I/O when no other does.

        Raises:
            PipeSwitchError: what the future would have raised.
        """
        self._check_process()
        self._check_thread()
        if not self._role.acquire(blocking=False):
            return self.request(op, **options).result()
        self._holder = threading.get_ident()
        try:
            future = self.request(op, is_quiet=True, **options)
            while not future.done() and not self._is_closing:
                self._guard(self._turn)
        finally:
            self._holder = 0
            self._role.release()
            if not self._is_idle or self._is_closing:
                self._needed.set()  # others' calls are under way: back to the thread
        return future.result()

    def _call(
        self,
        op: str,
        model: str,
        body: dict[str, Any] | None,
        inputs: tuple[WireTensor, ...],
        frames: Sequence[Any],
        deadline_ms: float | None,
        priority: str,
        is_safe: bool,
        convert: Callable[[Reply], Any],
        on_progress: Callable[[dict[str, Any]], None] | None,
    ) -> _Call:
        self._check_process()
        header = self._header(op, model, body)
        header |= {"inputs": inputs, "deadline_ms": deadline_ms, "priority": priority}
        return _Call(
            header=header,
            frames=frames,
            is_safe=is_safe,
            future=_Answer(self._check_thread, lambda: self._taken_back(header["id"])),
            convert=convert,
            on_progress=on_progress,
        )

    def _check_process(self) -> None:
        """Threads do not survive a fork: none would ever read the answer."""
        if os.getpid() != self._pid:
            raise ServerUnavailable(
                "this client belongs to the process that made it",
                hint="make a new pipeswitch.Client() after the fork",
            )

    def _check_thread(self) -> None:
        """The thread that reads the answers cannot wait for one: no other would read it."""
        if self._holder == threading.get_ident():
            raise InvalidInput(
                "a callback runs in the thread that reads this client's answers: it cannot wait "
                "for one",
                hint="submit there and wait elsewhere, or use another Client",
            )

    def notify(self, op: str, *, model: str = "") -> None:
        """Send something that has no answer; forgotten when there is no connection."""
        self._check_process()
        header = self._header(op, model, None)

        def send() -> None:
            if self._link is not None and self._link.session:
                self._transmit(self._link, header, ())

        self._post(send)

    def close(self) -> None:
        """Stop the thread; calls without an answer end in Cancelled. Idempotent.

        Subscriptions end too, at their next look; who holds one without looking does not hold
        this up. From a future's callback it returns at once, and the rest follows.
        """
        if os.getpid() != self._pid:
            return  # the socket and its thread are the parent's
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._rouse()
        if self._holder == threading.get_ident():
            return
        self._thread.join()
        self._ending.join(CLOSE_WAIT_S)

    def _header(self, op: str, model: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            model.encode()
        except (AttributeError, UnicodeEncodeError):
            raise InvalidInput(f"{model!r:.80} is not a name") from None
        request_id = f"{self._prefix}-{next(self._numbers)}"
        return {"v": VERSION, "op": op, "id": request_id, "model": model, "body": body or {}}

    def _post(self, action: Callable[[], None], *, is_quiet: bool = False) -> None:
        with self._lock:
            if self._is_closing:
                raise Cancelled("this client is closed")
            self._posts.append(action)
            if not is_quiet:
                self._rouse()

    def _rouse(self) -> None:
        """Wake the poller; without one, the I/O thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)
        self._needed.set()

    def _taken_back(self, request_id: str) -> None:
        with contextlib.suppress(Cancelled):
            self._post(lambda: self._cancel(request_id))

    # ---- who holds the role --------------------------------------------------------------------

    def _run(self) -> None:
        """The background thread: hello at once, then I/O whenever calls are under way."""
        with self._holding():
            if self._link is None:  # else a caller was here first
                self._guard(self._open)
        while True:
            with self._holding():
                while not self._is_idle and not (self._is_closing and not self._posts):
                    self._guard(self._turn)
                if self._is_closing:
                    break
            self._needed.wait()
            self._needed.clear()
        with self._holding():
            for call in list(self._calls.values()):
                self._fail(call, Cancelled("the client was closed"))
            self._shut(CLOSE_FLUSH_MS)
        with self._lock:  # who closes us has written to it
            os.close(self._wake)
        self._ending.start()

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        with self._role:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = 0

    def _guard(self, action: Callable[[], None]) -> None:
        """Whatever goes wrong here ends the calls with an error.

        A thread that ended instead would leave them, and all later ones, waiting for ever.
        """
        try:
            action()
        except Exception as error:
            logger.exception("client=%s failed", self.address)
            self._shut()
            reason = f"the connection to {self.address} failed: {type(error).__name__}: {error}"
            self._fail_all(lambda: PipeSwitchError(reason))

    @property
    def _is_idle(self) -> bool:
        """Nothing to send, nothing to wait for: neither an answer nor the hello's."""
        is_settled = self._link is None or bool(self._link.session)
        return is_settled and not self._calls and not self._posts

    def _turn(self) -> None:
        """One round of I/O by the role's holder; blocks until something happens.

        What has arrived is taken before a broken connection is noticed, and that before
        anything is sent: a call must not go out on a connection that is known to be dead.
        """
        link = self._link
        ready = dict(self._poller.poll(0 if self._posts else self._poll_ms()))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if link is not None and link.has_arrived(ready):
            self._receive(link)
        if self._link is link and link is not None and link.has_news(ready):
            self._watch(link)
        link = self._link
        if link is not None and not link.session and time.monotonic() > link.hello_until_s:
            self._unavailable()
        while self._posts:
            self._posts.popleft()()

    def _poll_ms(self) -> int | None:
        if self._link is None or self._link.session:
            return None
        return max(0, round((self._link.hello_until_s - time.monotonic()) * 1000)) + 1

    def _open(self, hello_until_s: float | None = None) -> None:
        """A new link and its hello. The time to answer starts now, unless it has before.

        Where no server listens at the plain socket now, libzmq waits for one.
        """
        hello: dict[str, Any] = {
            "hello_id": f"{self._prefix}-hello-{next(self._numbers)}",
            "hello_until_s": hello_until_s or time.monotonic() + self._timeout_s,
        }
        link: AnyLink | None = self._open_local(hello)
        try:
            link = link or ZmqLink.open(self.context, self.address, self.keys, _WATCHED, **hello)
        except zmq.ZMQError as error:
            reason = error.strerror
            self._fail_all(
                lambda: ServerUnavailable(
                    f"{self.address!r} is not an address: {reason}",
                    hint="PIPESWITCH_HOST=tcp://127.0.0.1:5555",
                )
            )
            return
        self._greet(link)

    def _open_local(self, hello: dict[str, Any]) -> LocalLink | None:
        if self._local is None:
            return None
        try:
            return LocalLink.open(self._local, **hello)
        except OSError:
            return None

    def _greet(self, link: AnyLink) -> None:
        self._link = link
        link.attach(self._poller)
        self._transmit(link, {"v": VERSION, "op": "hello", "id": link.hello_id}, ())

    def _shut(self, linger_ms: int = 0) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.detach(self._poller)
            link.close(linger_ms)

    def _watch(self, link: AnyLink) -> None:
        """What became of the connection:

        1. the peer let us in;
        2. it asks for a key that we do not have, or knows ours not, or is not who we expect:
           waiting would not change that;
        3. it is gone: with a session, or before its hello was answered, a new one is opened.
           One that never came to be is tried again by libzmq itself.
        """
        for event, _ in link.news():
            if event == _SHAKEN:
                link.is_shaken = True
            elif event == _UNKNOWN_KEY:
                self._refused("the server does not admit this client's key", _ADMIT)
            elif event == _OTHER_MECHANISM and self.keys is None:
                self._refused("the server asks for a key", _BRING)
            elif event == _OTHER_MECHANISM:
                self._refused("the server asks for no key", "leave key and server_key out")
            elif event == _HANDSHAKE_CUT and self.keys is not None:
                link.cut_count += 1
                if link.cut_count >= MAX_BROKEN_HANDSHAKES:
                    self._refused("its key is not the one given, or it is full", _EXPECT)
            elif event == _BROKEN and link.is_shaken:
                self._broken()
            if self._link is not link:
                return  # thrown away, its monitor too

    def _refused(self, text: str, hint: str) -> None:
        self._shut()
        self._fail_all(lambda: PermissionDenied(f"{self.address}: {text}", hint=hint))

    def _broken(self) -> None:
        """The connection is gone: what may not be sent twice fails, the rest goes out again."""
        link = self._link
        hello_until_s = link.hello_until_s if link is not None and not link.session else None
        self._shut()
        for call in list(self._calls.values()):
            call.tries += call.is_sent
            if call.is_sent and (not call.is_safe or call.tries >= MAX_TRIES):
                self._fail(
                    call,
                    ServerUnavailable(
                        f"the server at {self.address} went away before it answered",
                        hint="whether it was carried out is not known: look before sending again",
                    ),
                )
            call.is_sent = False
        self._open(hello_until_s)

    def _unavailable(self) -> None:
        self._shut()
        self._fail_all(lambda: no_server(self.address))

    def _begin(self, call: _Call) -> None:
        if call.future.cancelled():
            return
        self._calls[call.header["id"]] = call
        if self._link is None:
            self._open()
        elif self._link.session:
            self._send(self._link, call)

    def _send(self, link: AnyLink, call: _Call) -> None:
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
            refusal = error
            self._fail_all(lambda: refusal)
            self._shut()
        except EOFError:
            self._broken()

    def _greeted(self, link: AnyLink, header: ReplyHeader) -> None:
        if header.error is not None:
            refusal = _error(header)
            self._shut()
            self._fail_all(lambda: refusal)
            return
        better = (
            None
            if link.is_local
            else self._open_local({"hello_id": link.hello_id, "hello_until_s": link.hello_until_s})
        )
        if better is not None:  # the server came after us
            self._shut()
            self._greet(better)
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
            call.future.set_result(call.convert(_reply(header, frames)))
        except Exception as error:  # a bad reply, or the caller's own convert
            call.future.set_exception(error)

    def _progressed(self, call: _Call, body: dict[str, Any]) -> None:
        """Tell the caller; an error of its callback is its answer, and no one else's."""
        try:
            if call.on_progress is not None:
                call.on_progress(body)
        except Exception as error:
            del self._calls[call.header["id"]]
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(error)

    def _greet_again(self) -> None:
        for call in self._calls.values():
            call.tries += 1
            call.is_sent = False
        for call in [c for c in self._calls.values() if c.tries > MAX_TRIES]:
            self._fail(call, ServerUnavailable(f"the server at {self.address} keeps forgetting us"))
        self._shut()
        self._open()

    def _fail(self, call: _Call, error: PipeSwitchError) -> None:
        self._calls.pop(call.header["id"], None)
        error.request_id = call.header["id"]
        with contextlib.suppress(InvalidStateError):
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(error)

    def _fail_all(self, make: Callable[[], PipeSwitchError]) -> None:
        for call in list(self._calls.values()):
            self._fail(call, make())


def _error(header: ReplyHeader) -> PipeSwitchError:
    error = header.error
    assert error is not None
    return from_wire(error.type, error.message, error.hint, error.data, header.id)


def _reply(header: ReplyHeader, frames: Sequence[Any]) -> Reply:
    body = header.body
    outputs = header.outputs
    if len(outputs) == 1 and not body and outputs[0].name == BODY_TENSOR and not header.timing:
        body, outputs = _large_body(frames[outputs[0].frame]), ()
    return Reply(
        request_id=header.id,
        body=body,
        timing=header.timing or {},
        outputs=outputs,
        frames=frames,
    )


def _large_body(data: Any) -> dict[str, Any]:
    """A body that did not fit into a header."""
    try:
        return msgspec.msgpack.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed body: {error}") from None
