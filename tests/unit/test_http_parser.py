"""The HTTP parser: bytes and times go in, actions come out. No socket, no loop, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httptools", reason="make installs it")

from pipeswitch.gateway.http import http_parser
from pipeswitch.gateway.http.http_errors import status_of
from pipeswitch.gateway.http.http_parser import (
    Do,
    Head,
    HeadRead,
    HttpParser,
    Limits,
    NeedBuffer,
    RefuseRequest,
    RequestRead,
)

HOST = b"Host: 127.0.0.1\r\n"
LIMITS = Limits(head_bytes=2000, body_bytes=1000)
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


class Peer:
    """Driver that sends bytes to a parser, and collects the actions."""

    def __init__(self, *, with_buffers: bool = True) -> None:
        self.parser = HttpParser(LIMITS, 0.0)
        self.actions: list[Any] = []
        self._with_buffers = with_buffers

    def send(self, data: bytes, now_s: float = 0.0, piece: int = 1 << 20) -> list[Any]:
        """Return the new actions, except ``NeedBuffer``, which depends on the pieces."""
        count = len(self.actions)
        for start in range(0, len(data), piece):
            self._send(data[start : start + piece], now_s)
        return self.actions[count:]

    def _send(self, data: bytes, now_s: float) -> None:
        while data and not self.parser.is_ending:
            rest = self.parser.rest
            size = len(data) if rest is None else min(len(data), len(rest))
            if rest is None:
                actions = self.parser.receive(memoryview(data), now_s)
            else:
                rest[:size] = data[:size]
                actions = self.parser.fill(size)
            data = data[size:]
            for action in actions:
                if not isinstance(action, NeedBuffer):
                    self.actions.append(action)
                elif self._with_buffers:
                    self.parser.use_buffer(memoryview(bytearray(action.size)))

    @property
    def heads(self) -> list[Head]:
        return [one.head for one in self.actions if isinstance(one, HeadRead)]

    @property
    def requests(self) -> list[tuple[str, bytes]]:
        return [(one.path, bytes(one.body)) for one in self.actions if isinstance(one, RequestRead)]

    @property
    def statuses(self) -> list[int]:
        """HTTP statuses of the refusals."""
        errors = [one.error for one in self.actions if isinstance(one, HeadRead | RefuseRequest)]
        return [status_of(error).http for error in errors if error is not None]


@pytest.fixture
def peer() -> Peer:
    return Peer()


def post(path: str, body: bytes = b"", extra: bytes = b"") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n".encode()
    return head + HOST + extra + b"\r\n" + body


def chunked(path: str, *chunks: bytes, extra: bytes = b"", trailer: bytes = b"") -> bytes:
    head = f"POST {path} HTTP/1.1\r\n".encode() + CHUNKED + HOST + extra + b"\r\n"
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + body + b"0\r\n" + trailer + b"\r\n"


TEN = (
    b"GET / HTTP/1.1\r\n" + HOST + b"\r\n",
    post("/a", b"x" * 70),
    post("/b", b"12", b"Expect: 100-continue\r\n"),
    chunked("/c", b"abc", b"de", trailer=b"Host: late\r\n"),
    b"HEAD /d?e=f%20g HTTP/1.1\r\n" + HOST + b"A: 1\r\na: 2\r\n\r\n",
    post("/h", b"\r\n\r\n", OFFER),
    chunked("/i", b"fg", extra=OFFER),
    b"GET /j HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"GET http://127.0.0.1:8/k/l?m HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    post("/n", b"zip", b"Content-Encoding: gzip\r\nConnection: close\r\n"),
)
WHOLE = b"".join(TEN)


def in_pieces(cuts: Iterable[int], *, with_buffers: bool = True) -> list[Any]:
    peer = Peer(with_buffers=with_buffers)
    for start, end in pairwise([0, *sorted(set(cuts)), len(WHOLE)]):
        peer.send(WHOLE[start:end])
    return peer.actions


def test_ten_requests_of_all_kinds_are_read() -> None:
    actions = in_pieces([])
    reads = [action for action in actions if isinstance(action, RequestRead)]
    assert [(one.path, bytes(one.body)) for one in reads] == [
        ("/", b""),
        ("/a", b"x" * 70),
        ("/b", b"12"),
        ("/c", b"abcde"),
        ("/d", b""),
        ("/h", b"\r\n\r\n"),
        ("/i", b"fg"),
        ("/j", b""),
        ("/k/l", b""),
        ("/n", b"zip"),
    ]
    assert [one.path for one in reads if not one.is_kept] == ["/n"]
    assert [one.path for one in reads if not one.has_body] == ["/d"]
    assert [one.path for one in reads if not one.is_chunked] == ["/j"]
    assert [one.path for one in reads if one.is_compressed] == ["/n"]
    heads = {one.head.path: one.head for one in actions if isinstance(one, HeadRead)}
    assert (heads["/d"].query, heads["/d"].headers["a"]) == ("e=f%20g", "1, 2")
    assert heads["/k/l"].headers["host"] == "127.0.0.1:8"
    assert heads["/c"].headers["host"] == "127.0.0.1"  # trailers are ignored


@pytest.mark.parametrize("with_buffers", [True, False])
def test_a_cut_at_any_byte_gives_equal_actions(with_buffers: bool) -> None:
    whole = in_pieces([])
    assert in_pieces(range(1, len(WHOLE)), with_buffers=with_buffers) == whole
    for cut in range(1, len(WHOLE)):
        assert in_pieces([cut], with_buffers=with_buffers) == whole


@given(st.sets(st.integers(1, len(WHOLE) - 1), max_size=12))
def test_any_cuts_give_equal_actions(cuts: set[int]) -> None:
    assert in_pieces(cuts) == in_pieces([])


def test_only_the_first_pipelined_request_may_be_asked_for_its_body(peer: Peer) -> None:
    late = post("/a", b"12", b"Expect: 100-continue\r\n")[:-2]
    assert peer.send(late)[-1] == Do.CONTINUE
    assert peer.send(b"12" + late)[-1] is not Do.CONTINUE
    peer.send(b"12")
    assert peer.actions[-2] == Do.PAUSE
    peer.parser.answered(1.0)
    assert peer.send(late)[-1] == Do.CONTINUE


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # without Host
        (b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (post("/", b"", CHUNKED), 400),
        (b"GET /" + b"x" * 3000, 431),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 3000, 431),
        (b"GET / HTTP/1.1\r\n" + b"A%d: 1\r\n" * 101 % tuple(range(101)) + b"\r\n", 431),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 99999999999999999999\r\n\r\n", 400),
        (post("/", b"x", b"Content-Encoding: br\r\n"), 415),
        (chunked("/", *[b"x" * 500] * 3), 413),
        (chunked("/", trailer=b"A: " + b"x" * 5000), 400),
        (b"POST / HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n1;" + b"x" * 5000, 400),
    ],
)
def test_what_cannot_be_read_is_refused_once(peer: Peer, data: bytes, status: int) -> None:
    peer.send(data + b"\r\nGET / HTTP/1.1\r\n\r\n", piece=100)
    assert (peer.statuses, peer.requests) == ([status], [])
    assert peer.parser.is_ending
    assert peer.parser.held_bytes == 0


def test_a_refused_request_without_a_body_keeps_the_connection(peer: Peer) -> None:
    peer.send(post("/a", b"", b"Content-Encoding: br\r\n") + post("/b"))
    assert (peer.statuses, peer.requests) == ([415], [("/a", b""), ("/b", b"")])
    head = peer.send(post("/c", b"12")[:-1])[-1].head
    pause, request = peer.parser.without_body(head)
    assert (pause, request.path, request.is_kept) == (Do.PAUSE, "/c", False)
    assert not peer.send(b"2" + post("/d"))


def test_a_peer_that_sends_many_requests_ahead_is_not_parsed_to_the_end(peer: Peer) -> None:
    peer.send(post("/a") * (http_parser.MAX_AHEAD + 10))
    assert len(peer.requests) == http_parser.MAX_AHEAD
    assert peer.statuses == [429]


def test_an_upgrade_without_a_body_is_read_and_ends_the_connection(peer: Peer) -> None:
    peer.send(b"GET /a HTTP/1.1\r\n" + HOST + OFFER + b"\r\n")
    assert (peer.requests, peer.parser.is_ending) == ([("/a", b"")], True)


def test_an_early_close_drops_what_is_incomplete(peer: Peer) -> None:
    for data in (b"GET / HT", post("/", b"12")[:-1], chunked("/", b"12")[:-7]):
        peer = Peer()
        peer.send(data)
        assert peer.parser.held_bytes > 0
        peer.parser.stop()
        peer.parser.close()
        assert (peer.parser.held_bytes, peer.requests) == (0, [])


def repeated(peer: Peer, data: bytes) -> RequestRead | None:
    return peer.parser.repeated(memoryview(data))


def test_a_known_head_with_another_length_is_not_parsed(peer: Peer) -> None:
    assert repeated(peer, post("/a", b"1")) is None
    peer.send(post("/a", b"1"))
    assert repeated(peer, post("/a", b"22")) is None  # the first one waits for its answer
    peer.parser.answered(1.0)
    for body in (b"22" * 100, b"\r\n\r\n", b""):
        assert repeated(peer, post("/a", body)) == RequestRead(body=body, path="/a")
        peer.parser.answered(1.0)
    for other in (
        post("/b", b"1"),
        post("/a", b"1", b"A: 1\r\n"),
        post("/a", b"1") + b"\r\n",
        b"\r\n" + post("/a", b"1"),
        post("/a", b"1").replace(b"Content-Length: ", b"content-length:  0", 1),
        post("/a", b"1").replace(b"POST", b"PUT", 1),
        post("/a", b"1")[:-1],
        post("/a", b"1" * 1001),
    ):
        assert repeated(peer, other) is None


@pytest.mark.parametrize(
    "data",
    [
        post("/a", b"1") * 2,
        post("/a", b"1", b"Expect: 100-continue\r\n"),
        post("/a", b"1", b"Content-Encoding: gzip\r\n"),
        post("/a", b"1", b"Connection: close\r\n"),
        post("/a", b"1", b"A: " + b"x" * 1990 + b"\r\n" + b"B: " + b"x" * 100 + b"\r\n"),
        post("/a", b"1").replace(b"POST", b"HEAD"),
        post("/a", b"1", b"Connection: keep-alive\r\n").replace(b"1.1", b"1.0"),
        chunked("/a", b"1"),
    ],
)
def test_a_head_that_is_not_plain_or_alone_is_not_remembered(peer: Peer, data: bytes) -> None:
    peer.send(data)
    assert peer.requests
    assert peer.parser.known is None


@pytest.mark.parametrize(
    ("sent", "limit_s"),
    [(b"GET / HT", LIMITS.head_s), (post("/", b"x" * 900)[:-500], LIMITS.body_look_s)],
)
def test_a_slow_head_or_body_is_refused(peer: Peer, sent: bytes, limit_s: float) -> None:
    peer.send(sent, 5.0)
    assert not peer.parser.look(5.0 + limit_s - 0.1, 0)
    peer.actions += peer.parser.look(5.0 + limit_s + 0.1, 0)
    assert peer.statuses == [408]
    peer.parser.answered(20.0)
    lingers_until_s = 20.0 + http_parser.LINGER_S
    assert not peer.parser.look(lingers_until_s - 0.1, 0)
    assert peer.parser.look(lingers_until_s + 0.1, 0) == [Do.ABORT]


def test_a_body_that_is_fast_enough_in_each_period_stays(peer: Peer) -> None:
    peer.parser = HttpParser(Limits(body_look_s=10.0, body_bytes_per_s=10), 0.0)
    peer.send(post("/", b"x" * 500)[:-500])
    for now_s in (10.1, 20.2, 30.3):
        peer.send(b"x" * 120, now_s)
        assert not peer.parser.look(now_s, 0)
    peer.send(b"x" * 20, 35.0)
    assert isinstance(peer.parser.look(40.4, 0)[0], RefuseRequest)


def test_an_idle_connection_ends_after_its_last_answer(peer: Peer) -> None:
    peer.send(post("/"), 1.0)
    assert not peer.parser.look(1000.0, 0)  # it still computes the answer
    peer.parser.answered(1050.0)
    assert not peer.parser.look(1050.0 + LIMITS.idle_s - 0.1, 0)
    assert peer.parser.look(1050.0 + LIMITS.idle_s + 0.1, 0) == [Do.ABORT]


def test_only_an_answer_of_which_nothing_is_read_ends_the_connection(peer: Peer) -> None:
    for now_s, unread_bytes in ((1000.0, 4000), (1029.0, 3000), (1058.0, 3000)):
        assert not peer.parser.look(now_s, unread_bytes)
    assert peer.parser.look(1060.0, 3000) == [Do.ABORT]


def test_the_claims_of_connections_in_a_crowd(peer: Peer) -> None:
    claim = peer.parser.claim
    assert claim(http_parser.GRACE_S - 0.1) is None
    assert claim(60.0) == (False, 0.0)
    peer.parser.has_answered = True
    assert claim(http_parser.ANSWERED_GRACE_S - 0.1) is None
    assert claim(60.0) == (True, 0.0)
    peer.send(post("/a"))
    assert claim(60.0) is None
    peer.parser.look(20.0, 100)
    assert claim(60.0) == (False, 20.0)
