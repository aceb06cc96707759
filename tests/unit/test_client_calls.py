"""The client's protocol, with the test's own connections and clock, without sockets or threads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeswitch.base import errors
from pipeswitch.client import calls
from pipeswitch.client.calls import Calls
from pipeswitch.client.links import ServerLink
from pipeswitch.wire.frames import MAGIC, ReplyHeader, encode_header

TIMEOUT_S, RETURN_S = 2.0, 30.0
LOST = errors.RemoteProtocolError("nonsense")


class Clock:
    now_s = 100.0


class Link:
    """Connection of a client; the test acts as the server."""

    def __init__(self, clock: Clock, hello_id: str) -> None:
        self._clock, self.hello_id = clock, hello_id
        self.session, self.facts = "", dict[str, Any]()
        self.is_listened = True
        self.sent: list[Any] = []
        self.inbox: list[Any] = []

    @property
    def listened_s(self) -> float:
        return self._clock.now_s if self.is_listened else 0.0

    def attach(self, _: Any) -> None: ...

    def detach(self, _: Any) -> None: ...

    def close(self, _: int) -> None: ...

    def answered(self, _: str) -> None: ...

    def send(self, parts: Sequence[Any], request_id: str, *, may_share: bool = False) -> None:
        header = calls.msgspec.msgpack.decode(parts[1])
        self.sent.append((header["op"], header.get("deadline_ms")))

    def messages(self) -> Iterator[Any]:
        while self.inbox:
            message = self.inbox.pop(0)
            if isinstance(message, Exception):
                raise message
            yield message


class Face(Calls):
    """Client's calls without I/O. ``listens`` is True if a server listens at the address."""

    def __init__(self, clock: Clock, *, return_s: float = RETURN_S, **options: Any) -> None:
        super().__init__("tcp://there:1", TIMEOUT_S, cast(Any, None), return_s=return_s, **options)
        self.clock, self.listens = clock, True
        self.links: list[Link] = []

    def _end(self, call: calls.Call, value: Any = None, error: Exception | None = None) -> None:
        if error is None:
            call.future.set_result(value)
        else:
            call.future.set_exception(error)

    def _new_link(self, hello_id: str) -> ServerLink:
        if not self.listens:
            raise ConnectionRefusedError
        self.links.append(Link(self.clock, hello_id))
        return cast(ServerLink, self.links[-1])

    # ---- what a test does ----------------------------------------------------------------------

    def ask(self, op: str = "infer", **options: Any) -> Future[Any]:
        call = self._call(op, **options)
        future = call.future = Future[Any]()
        self._begin(call)
        return future

    def arrive(self, *messages: Any) -> None:
        link = self.links[-1]
        link.inbox += messages
        self._receive(cast(ServerLink, link))

    def reply(self, request_id: str, **fields: Any) -> None:
        facts: dict[str, Any] = {"v": 1, "id": request_id, "status": "ok", **fields}
        self.arrive([MAGIC, encode_header(ReplyHeader(**facts))])

    def greet(self) -> None:
        self.reply(self.links[-1].hello_id, session="s")

    def wait(self, seconds: float) -> None:
        until_s = self.clock.now_s + seconds
        while self._poll_at_s <= until_s:
            self.clock.now_s = max(self.clock.now_s, self._poll_at_s)
            self._poll()
        self.clock.now_s = until_s

    @property
    def asked(self) -> list[str]:
        return [op for op, _ in self.links[-1].sent]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


@pytest.fixture
def face(clock: Clock) -> Face:
    return Face(clock)


@pytest.fixture
def lost_face(face: Face) -> Face:
    """Return a client that has lost its connection to a server that still listens."""
    face.ask("ping")
    face.greet()
    face.arrive(EOFError())
    assert face.asked == ["hello"]
    face._calls.clear()
    return face


def error_of(future: Future[Any]) -> type[BaseException]:
    return type(future.exception(0))


@pytest.mark.parametrize("listens", [True, False])
def test_a_first_hello_has_so_long_whoever_listens(face: Face, listens: bool) -> None:
    face.listens = listens
    future = face.ask(deadline_ms=1.0)
    face.wait(TIMEOUT_S - 0.1)
    assert not future.done()
    face.wait(0.2)
    assert error_of(future) is errors.ServerUnavailable
    assert face._poll_at_s == math.inf


def test_an_event_loop_does_not_wait_for_a_server_that_is_not_there(face: Face) -> None:
    face._waits_for_server = False
    face.listens = False
    assert error_of(face.ask()) is errors.ServerUnavailable


def test_a_server_that_comes_in_time_is_found(face: Face) -> None:
    face.listens = False
    future = face.ask()
    face.wait(TIMEOUT_S / 2)
    face.listens = True
    face.wait(0.1)
    face.greet()
    assert face.asked == ["hello", "infer"]
    assert not future.done()
    assert face._poll_at_s == math.inf


def test_a_door_that_is_opened_again_is_waited_for(lost_face: Face) -> None:
    future = lost_face.ask(is_safe=True)
    lost_face.wait(RETURN_S - 1.0)
    lost_face.greet()
    assert lost_face.asked == ["hello", "infer"]
    assert not future.done()


def test_the_wait_for_a_door_ends(lost_face: Face) -> None:
    future = lost_face.ask()
    lost_face.wait(RETURN_S - 0.1)
    assert not future.done()
    lost_face.wait(0.2)
    assert error_of(future) is errors.ServerUnavailable


def test_a_server_that_is_gone_is_not_waited_for_so_long(lost_face: Face) -> None:
    future = lost_face.ask()
    lost_face.wait(10.0)
    lost_face.links[-1].is_listened = lost_face.listens = False
    lost_face.arrive(EOFError())
    lost_face.wait(TIMEOUT_S - 0.1)
    assert not future.done()
    lost_face.wait(0.2)
    assert error_of(future) is errors.ServerUnavailable


def test_a_link_that_reaches_nobody_is_not_waited_for_so_long(lost_face: Face) -> None:
    """Reconnect to a machine that is off: it neither refuses nor answers the connection."""
    lost_face.links[-1].is_listened = False
    future = lost_face.ask()
    lost_face.wait(TIMEOUT_S + 0.1)
    assert error_of(future) is errors.ServerUnavailable


def test_a_moment_without_a_connection_does_not_end_the_wait(lost_face: Face) -> None:
    """Like libzmq, the client ends a handshake that gets no answer, and connects again."""
    future = lost_face.ask()
    lost_face.wait(5.0)
    lost_face.arrive(EOFError())
    assert len(lost_face.links) == 2
    lost_face.wait(1.0)
    assert len(lost_face.links) == 3
    lost_face.greet()
    assert lost_face.asked == ["hello", "infer"]
    assert not future.done()


def test_a_cluster_goes_to_another_node_at_once(clock: Clock) -> None:
    face = Face(clock, return_s=0.0)
    face.ask("ping")
    face.greet()
    face.arrive(EOFError())
    future = face.ask()
    face.wait(TIMEOUT_S + 0.1)
    assert error_of(future) is errors.ServerUnavailable


def test_a_deadline_ends_a_calls_wait_and_no_other_calls(lost_face: Face) -> None:
    first, short, other = (
        lost_face.ask(deadline_ms=4_000.0),
        lost_face.ask(deadline_ms=1.0),
        lost_face.ask(),
    )
    lost_face.wait(TIMEOUT_S - 0.1)
    assert not short.done()
    lost_face.wait(0.2)
    assert error_of(short) is errors.DeadlineExceeded
    late = lost_face.ask(deadline_ms=500.0)
    lost_face.wait(0.6)
    assert error_of(late) is errors.DeadlineExceeded
    lost_face.wait(4.0)
    assert error_of(first) is errors.DeadlineExceeded
    assert not other.done()
    lost_face.greet()
    assert lost_face.asked == ["hello", "infer"]


def test_a_call_that_waited_has_what_is_left_of_its_deadline(lost_face: Face) -> None:
    lost_face.ask(deadline_ms=20_000.0)
    lost_face.wait(15.0)
    lost_face.greet()
    assert lost_face.links[-1].sent[-1] == ("infer", pytest.approx(5_000.0))


def test_a_break_fails_what_may_not_be_sent_twice_and_sends_the_rest_again(face: Face) -> None:
    face.ask("ping")
    face.greet()
    unsafe, safe = face.ask("train"), face.ask(is_safe=True)
    face.arrive(EOFError())
    assert error_of(unsafe) is errors.ServerUnavailable
    face.ask("jobs")
    for _ in range(calls.MAX_TRIES - 2):
        face.greet()
        face.arrive(EOFError())
    face.greet()
    assert face.asked == ["hello", "infer"]
    face.arrive(EOFError())
    assert error_of(safe) is errors.ServerUnavailable


def test_a_server_that_forgot_the_client_carried_nothing_out(face: Face) -> None:
    unsafe = face.ask("train")
    face.greet()
    for _ in range(calls.MAX_TRIES - 1):
        (request_id,) = face._calls
        unknown = {
            "type": "ServerUnavailable",
            "message": "",
            "hint": "",
            "data": {"reason": "unknown_session"},
        }
        face.reply(request_id, status="error", error=unknown)
        face.greet()
        assert face.asked == ["hello", "train"]
    assert not unsafe.done()
    face.reply(request_id, status="error", error=unknown)
    assert error_of(unsafe) is errors.ServerUnavailable


@pytest.mark.parametrize("error", [LOST, errors.PermissionDenied("no", hint="key=", reason="x")])
def test_each_call_ends_with_an_error_of_its_own(face: Face, error: errors.PipeSwitchError) -> None:
    futures = [face.ask() for _ in range(2)]
    face.arrive(error)
    errors_seen = [cast(errors.PipeSwitchError, future.exception(0)) for future in futures]
    assert len({id(one) for one in errors_seen} | {id(error)}) == 3
    assert {one.request_id for one in errors_seen} == {f"{face._prefix}-1", f"{face._prefix}-3"}
    assert all(type(one) is type(error) and one.data == error.data for one in errors_seen)
    assert not face._calls
    assert face._poll_at_s == math.inf
