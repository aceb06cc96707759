"""HTTP on a transport that records writes: framing, order, and all limits on bytes and time."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httptools", reason="make installs it")

from pipeswitch.base.errors import DeadlineExceeded
from pipeswitch.gateway.http import http_parser, offload
from pipeswitch.gateway.http import http_server as http
from pipeswitch.gateway.http.http_parser import Head, Limits
from pipeswitch.gateway.http.http_server import HttpConnection, HttpServer, Response, json_answer
from tests.fuzz.gateways import Wire

HOST = b"Host: 127.0.0.1\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
LIMITS = Limits(
    head_bytes=2000,
    body_bytes=1000,
    waiting_bytes=2400,
    answer_bytes=15 * http.PIECE_BYTES // 2,
    connections=3,
    connections_per_address=2,
)


class Rig:
    """Server that answers with a request's path and body, at once or when ``gate`` is set."""

    def __init__(self) -> None:
        self.server = HttpServer(self.admit, LIMITS)
        self.heads: list[Head] = []
        self.asked: list[tuple[str, bytes]] = []
        self.cancelled: list[str] = []
        self.gate: asyncio.Event | None = None

    def admit(self, head: Head) -> Callable[[Any], Awaitable[Response]] | Response:
        self.heads.append(head)
        if head.path == "/no":
            return json_answer({"error": "no"}, 404)
        if head.path == "/long":
            return Response(parts=[bytes(http.PIECE_BYTES)] * 3)

        async def work(body: Any) -> Response:
            self.asked.append((head.path, bytes(body)))
            try:
                if self.gate is not None:
                    await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled.append(head.path)
                raise
            return Response(
                parts=[head.path.encode(), b" ", bytes(body)], content_type="text/plain"
            )

        return work

    def connect(self, peer: str = "127.0.0.1") -> tuple[HttpConnection, Wire]:
        wire, connection = Wire(peer), self.server()
        wire.protocol = connection
        connection.connection_made(wire)
        return connection, wire


@contextlib.contextmanager
def rigged() -> Iterator[Rig]:
    """Yield a rig with its own event loop."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield Rig()
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()
        asyncio.set_event_loop(None)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with rigged() as rig_made:
        yield rig_made


def feed(connection: HttpConnection, data: bytes, piece: int = 1 << 20) -> None:
    """Give bytes to a connection in pieces of at most ``piece`` bytes that fit into its buffer."""

    async def run() -> None:
        rest = memoryview(data)
        while len(rest):
            buffer = connection.get_buffer(-1)
            size = min(len(buffer), len(rest), piece)
            buffer[:size] = rest[:size]
            connection.buffer_updated(size)
            rest = rest[size:]
            for _ in range(5):
                await asyncio.sleep(0)

    asyncio.get_event_loop().run_until_complete(run())


def post(path: str, body: bytes, extra: bytes = b"") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n".encode()
    return head + HOST + extra + b"\r\n" + body


def answers(wire: Wire, sent: bytes | None = None) -> list[tuple[int, bytes]]:
    """Return the status and body of each answer on the wire."""
    replies, rest = [], wire.sent if sent is None else sent
    while rest:
        head, _, rest = rest.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        replies.append((int(head.split()[1]), rest[:size]))
        rest = rest[size:]
    return replies


@pytest.mark.parametrize("piece", [3, 1 << 20])
def test_requests_are_read_in_whatever_pieces_they_come(rig: Rig, piece: int) -> None:
    connection, wire = rig.connect()
    chunked = (
        b"POST /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"
        + HOST
        + b"\r\n3\r\nabc\r\n2\r\nde\r\n0\r\nHost: late\r\n\r\n"
    )
    feed(connection, post("/a", b"x" * 700) + chunked + post("/b", b""), piece)
    assert answers(wire) == [(200, b"/a " + b"x" * 700), (200, b"/c abcde"), (200, b"/b ")]
    assert not wire.is_closed
    assert rig.server.shared.waiting.held == 0


def test_a_head_that_comes_again_is_admitted_once_until_callers_may_do_something_else(
    rig: Rig,
) -> None:
    connection, wire = rig.connect()
    for body in (b"1", b"22" * 100, b"\r\n\r\n"):
        feed(connection, post("/a", body))
    assert len(rig.heads) == 1
    feed(connection, post("/a", b"3", b"Authorization: other\r\n"))
    rig.server.admit_anew()
    feed(connection, post("/a", b"3", b"Authorization: other\r\n"))
    assert len(rig.heads) == 3
    assert [len(body) for _, body in answers(wire)] == [4, 203, 7, 4, 4]
    feed(connection, post("/a", b"x" * 1001, b"Authorization: other\r\n"))
    assert answers(wire)[-1][0] == 413


def test_a_head_that_comes_again_is_still_of_a_peer_that_may_have_too_much_held(rig: Rig) -> None:
    connection, wire = rig.connect()
    other, _ = rig.connect()
    feed(connection, post("/a", b"x" * 900))
    rig.gate = asyncio.Event()
    feed(other, post("/b", b"x" * 990) + post("/b", b"x" * 990))
    feed(connection, post("/a", b"x" * 900))
    assert [status for status, _ in answers(wire)] == [200, 429]
    assert wire.has_ended


def test_pipelined_requests_are_answered_in_order_and_no_more_is_read_meanwhile(rig: Rig) -> None:
    connection, wire = rig.connect()
    rig.gate = asyncio.Event()
    feed(connection, post("/1", b"a") + post("/2", b"b"))
    assert (rig.asked, wire.is_reading) == ([("/1", b"a")], False)
    rig.gate.set()
    feed(connection, post("/3", b"c"))
    assert [body for _, body in answers(wire)] == [b"/1 a", b"/2 b", b"/3 c"]
    assert wire.is_reading


def test_a_peer_that_hangs_up_takes_its_requests_back(rig: Rig) -> None:
    connection, wire = rig.connect()
    rig.gate = asyncio.Event()
    feed(connection, post("/1", b"a") + post("/2", b"b"))
    wire.abort()
    asyncio.get_event_loop().run_until_complete(asyncio.sleep(0))
    assert rig.cancelled == ["/1"]
    assert (rig.server.shared.waiting.held, len(rig.server.connections)) == (0, 0)


def test_a_refused_head_ends_the_connection_before_its_body_and_not_without_one(rig: Rig) -> None:
    connection, wire = rig.connect()
    feed(connection, b"GET /no HTTP/1.1\r\n" + HOST + b"\r\n" + post("/a", b"1"))
    assert answers(wire) == [(404, b'{"error":"no"}'), (200, b"/a 1")]
    feed(connection, post("/no", b"x" * 900))
    assert answers(wire)[2][0] == 404
    assert b"Connection: close" in wire.sent
    assert wire.has_ended
    assert rig.server.shared.errors == {"404": 2}


def test_what_cannot_be_read_is_refused_once_and_the_connection_ends(
    rig: Rig,
) -> None:
    connection, wire = rig.connect()
    feed(connection, b"GET / HTTP/1.1\r\nA: " + b"x" * 3000, piece=100)
    ((status, body),) = answers(wire)
    assert status == 431
    assert set(json.loads(body)) == {"error", "code", "hint"}
    assert wire.has_ended
    assert rig.asked == []


def test_a_peer_that_waits_for_leave_to_send_gets_it(rig: Rig) -> None:
    connection, wire = rig.connect()
    feed(connection, post("/a", b"12", b"Expect: 100-continue\r\n")[:-2])
    assert wire.sent == b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize(
    ("coding", "compress"),
    [(b"gzip", gzip.compress), (b"x-gzip", gzip.compress), (b"Deflate", zlib.compress)],
)
@pytest.mark.parametrize("inline_bytes", [http.INLINE_BYTES, 0])
def test_a_compressed_body_is_read_as_what_it_was(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    coding: bytes,
    compress: Callable[[bytes], bytes],
    inline_bytes: int,
) -> None:
    monkeypatch.setattr(http, "INLINE_BYTES", inline_bytes)
    connection, wire = rig.connect()
    header = b"Content-Encoding: " + coding + b"\r\n"
    for body in (b"y" * 900, b""):
        feed(connection, post("/a", compress(body), header))
        asyncio.get_event_loop().run_until_complete(answered(connection))
    assert answers(wire) == [(200, b"/a " + b"y" * 900), (200, b"/a ")]
    assert not wire.is_closed
    assert rig.server.shared.waiting.held == 0


async def answered(connection: HttpConnection) -> None:
    while connection._task is not None:  # until the offload thread has finished
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("coding", "body", "status", "words"),
    [
        (b"br", b"1", 415, "gzip, deflate"),
        (b"gzip, gzip", b"1", 415, "gzip, deflate"),
        (b"gzip", b"plain", 400, "does not match Content-Encoding"),
        (b"gzip", gzip.compress(b"y" * 900)[:-4], 400, "one complete stream"),
        (b"gzip", gzip.compress(b"y") * 2, 400, "one complete stream"),
        (b"gzip", gzip.compress(b"y" * 1001), 413, "more than 1000 B"),
    ],
    # The data contains gzip's time stamp, but all processes must collect the same test names.
    ids=["unknown", "twice", "plain", "cut off", "two streams", "too large"],
)
def test_a_compressed_body_that_is_none_or_too_large_is_refused(
    rig: Rig, coding: bytes, body: bytes, status: int, words: str
) -> None:
    connection, wire = rig.connect()
    feed(connection, post("/a", body, b"Content-Encoding: " + coding + b"\r\n"))
    ((answer_status, reply),) = answers(wire)
    assert (answer_status, words in reply.decode()) == (status, True), reply
    assert (b"Accept-Encoding: gzip, x-gzip, deflate" in wire.sent) == (status == 415)
    assert (rig.asked, rig.server.shared.waiting.held) == ([], 0)


def test_each_path_has_the_form_of_errors_that_its_clients_read(rig: Rig) -> None:
    """Check errors for requests that are refused before the path's own code runs."""
    form = lambda path, error: json_answer({"of": path}, 418)  # noqa: E731
    rig.server = HttpServer(rig.admit, LIMITS, None, form)
    gzipped = b"Content-Encoding: gzip\r\n"
    for request in (
        post("/v1/x", b"b", b"Content-Encoding: zstd\r\n"),
        post("/v1/x", b"not gzip", gzipped),
        post("/v1/x", gzip.compress(b"y" * 2000), gzipped),
        post("http://h/v1/x", bytes(LIMITS.body_bytes + 1)),
        b"POST /v1/x HTTP/1.1\r\nA: " + b"a" * LIMITS.head_bytes,
    ):
        connection, wire = rig.connect()
        feed(connection, b"GET /a HTTP/1.1\r\n" + HOST + b"\r\n")
        feed(connection, request)
        assert answers(wire)[-1] == (418, b'{"of":"/v1/x"}')
        connection.connection_lost(None)


def test_what_is_inflated_counts_among_the_bodies_that_wait(rig: Rig) -> None:
    """Send two compressed bodies that fit; after inflating the first, the second has no room."""
    rig.gate = asyncio.Event()
    connections = [rig.connect() for _ in range(2)]
    for connection, _ in connections:
        feed(connection, post("/a", gzip.compress(b"y" * 900), b"Content-Encoding: gzip\r\n"))
    assert answers(connections[1][1])[0][0] == 413
    rig.gate.set()
    asyncio.get_event_loop().run_until_complete(answered(connections[0][0]))
    assert answers(connections[0][1]) == [(200, b"/a " + b"y" * 900)]
    assert rig.server.shared.waiting.held == 0


def test_a_peer_that_resets_while_it_is_refused_leaves_nothing_behind(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reset() -> None:
        raise OSError(107, "Transport endpoint is not connected")

    connection, wire = rig.connect()
    monkeypatch.setattr(wire, "write_eof", reset)
    feed(connection, b"nonsense\r\n\r\n")
    assert answers(wire)[0][0] == 400
    assert wire.is_closed
    assert not asyncio.all_tasks(asyncio.get_event_loop())


def test_head_gets_the_head_alone(rig: Rig) -> None:
    connection, wire = rig.connect()
    feed(connection, b"HEAD /a HTTP/1.1\r\n" + HOST + b"\r\n")
    assert wire.sent.endswith(b"\r\n\r\n")
    assert b"Content-Length: 3" in wire.sent


def look(connection: HttpConnection, after_s: float) -> None:
    """Run the server's check as if the connection's current phase had begun ``after_s`` s ago."""

    async def run() -> None:
        connection.look(connection.parser.since_s + after_s)
        await asyncio.sleep(0)

    asyncio.get_event_loop().run_until_complete(run())


def test_a_slow_body_is_refused_and_then_cut_off(rig: Rig) -> None:
    connection, wire = rig.connect()
    feed(connection, post("/", b"x" * 900)[:-500])
    look(connection, LIMITS.body_look_s - 0.1)
    assert (wire.sent, wire.is_closed) == (b"", False)
    look(connection, LIMITS.body_look_s + 0.1)
    assert answers(wire)[0][0] == 408
    assert rig.server.unfinished_bytes == 0
    look(connection, http_parser.LINGER_S + 0.1)
    assert wire.is_closed  # even if the peer does not close the connection


def test_a_crowded_server_gives_up_the_longest_idle_connection_and_no_busy_one(rig: Rig) -> None:
    rig.gate = asyncio.Event()
    busy, busy_wire = rig.connect("10.0.0.1")
    feed(busy, post("/1", b"a"))
    idle, idle_wire = rig.connect("10.0.0.1")
    idle.parser.since_s -= 10
    newer, newer_wire = rig.connect("10.0.0.1")  # this address's third connection
    assert (busy_wire.is_closed, idle_wire.is_closed, newer_wire.is_closed) == (False, True, False)
    feed(newer, post("/2", b"b"))
    _, refused = rig.connect("10.0.0.1")
    assert (answers(refused)[0][0], refused.is_closed) == (503, True)
    _, other = rig.connect("10.0.0.2")
    assert not other.is_closed
    assert len(rig.server.connections) == LIMITS.connections


def test_unfinished_bodies_together_are_bounded_and_the_largest_goes_first(rig: Rig) -> None:
    large, large_wire = rig.connect("10.0.0.1")
    feed(large, post("/l", b"x" * 1000)[:-100])
    small, small_wire = rig.connect("10.0.0.2")
    feed(small, post("/s", b"x" * 300)[:-100])
    assert answers(large_wire)[0][0] == 429
    assert b"Retry-After: 1" in large_wire.sent
    assert rig.server.shared.queue_full_count == 1
    feed(small, b"x" * 100)
    assert answers(small_wire)[0][0] == 200


def test_a_head_that_is_not_whole_counts_among_them(rig: Rig) -> None:
    large, large_wire = rig.connect("10.0.0.1")
    feed(large, b"GET / HTTP/1.1\r\nA: " + b"x" * 900)
    assert large_wire.sent == b""  # accepted, because there is no other connection
    small, _ = rig.connect("10.0.0.2")
    feed(small, post("/s", b"x" * 300)[:-100])
    assert answers(large_wire)[0][0] == 429
    assert rig.server.unfinished_bytes == 200


def test_requests_of_a_crowded_address_take_turns_and_others_go_first(rig: Rig) -> None:
    rig.server = HttpServer(rig.admit, Limits())
    crowd = [rig.connect("10.0.0.1")[0] for _ in range(3 * http.CROWD)]
    others = [rig.connect("10.0.0.2")[0] for _ in range(http.CROWD)]
    begun = []

    async def run() -> None:
        for connection in (*crowd, *others):
            path = "/crowd" if connection in crowd else "/other"
            data = post(path, b"x")
            connection.get_buffer(-1)[: len(data)] = data
            connection.buffer_updated(len(data))
        crowd[-1].connection_lost(None)  # the peer closes before the request's turn
        for _ in range(3 * http.CROWD):
            begun.append(len(rig.asked))
            await asyncio.sleep(0)

    asyncio.get_event_loop().run_until_complete(run())
    paths = [path for path, _ in rig.asked]
    assert paths == ["/other"] * len(others) + ["/crowd"] * (len(crowd) - 1)
    assert begun[0] == len(others)
    assert max(after - before for before, after in pairwise(begun)) == offload.PASS_REQUESTS
    assert rig.server.shared.waiting.held == 0


@pytest.mark.parametrize("held", [0, 2400])
@pytest.mark.parametrize("body", [b"", b"x" * 10])
@pytest.mark.parametrize(
    "later",
    [
        post("/b", b"x" * 1001),
        post("/b", b"x" * 1001)[:-1000],
        b"GET /b HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"CONNECT /no HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n1\r\nx\r\n0\r\n\r\n",
    ],
)
def test_a_request_is_answered_even_if_later_bytes_end_the_connection(
    rig: Rig, held: int, body: bytes, later: bytes
) -> None:
    connection, wire = rig.connect()
    rig.server.shared.waiting.add("other", held)
    feed(connection, post("/a", body) + later)
    status = 429 if held and body else 200
    assert answers(wire)[0][0] == status
    assert wire.has_ended
    connection.look(time.monotonic() + 100)
    assert wire.is_closed
    assert rig.server.shared.waiting.held == held


def test_a_body_that_memory_is_too_short_to_inflate_is_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inflated(data: Any, most: int) -> bytes:
        raise MemoryError

    monkeypatch.setattr(http, "_inflated", inflated)
    connection, wire = rig.connect()
    feed(connection, post("/", b"x", b"Content-Encoding: gzip\r\n"))
    assert [status for status, _ in answers(wire)] == [429]
    assert rig.server.shared.waiting.held == 0


def test_a_body_whose_length_memory_is_too_short_for_is_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untouched(size: int) -> memoryview:
        raise MemoryError

    monkeypatch.setattr(http, "_untouched", untouched)
    connection, wire = rig.connect()
    feed(connection, post("/", b"xy", b"Expect: 100-continue\r\n")[:-2])  # and it is not sent
    assert [status for status, _ in answers(wire)] == [429]
    assert rig.server.shared.waiting.held == rig.server.unfinished_bytes == 0


def test_of_whole_bodies_that_wait_each_address_has_its_share(rig: Rig) -> None:
    rig.gate = asyncio.Event()
    for peer, status in (("10.0.0.1", None), ("10.0.0.1", 429), ("10.0.0.2", None)):
        connection, wire = rig.connect(peer)
        feed(connection, post("/", b"x" * 1000))
        assert [answer_status for answer_status, _ in answers(wire)] == ([status] if status else [])
    assert (rig.server.shared.waiting.held, rig.server.shared.queue_full_count) == (2000, 1)


def test_a_long_answer_leaves_as_it_is_read_and_unread_ones_have_their_share(rig: Rig) -> None:
    wires = []
    for peer in ("10.0.0.1", "10.0.0.1", "10.0.0.2"):
        connection, wire = rig.connect(peer)
        connection.pause_writing()  # as if the peer read nothing
        feed(connection, b"GET /long HTTP/1.1\r\n" + HOST + b"\r\n")
        wires.append((connection, wire))
    (reader, wire), (_, refused), (_, other) = wires
    assert answers(refused)[0][0] == 429
    assert all(http.PIECE_BYTES < len(one.sent) < 2 * http.PIECE_BYTES for one in (wire, other))
    assert rig.server.shared.answers.held == 6 * http.PIECE_BYTES
    reader.resume_writing()
    feed(reader, b"GET /no HTTP/1.1\r\n" + HOST + b"\r\n")
    status, body = answers(wire)[0]
    assert (status, len(body)) == (200, 3 * http.PIECE_BYTES)
    other.abort()
    feed(reader, b"")
    asyncio.get_event_loop().run_until_complete(asyncio.sleep(0))
    assert rig.server.shared.answers.held == 0


PIECES = st.sampled_from(
    [
        post("/a", b"12"),
        post("/no", b""),
        HOST,
        b"GET / HTTP/1.1\r\n",
        b"\r\n",
        b"0\r\n\r\n",
        b"POST /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST + b"\r\n",
        b"5\r\nabcde\r\n",
        b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
        b"Content-Length: 7\r\n",
        b"PRI * HTTP/2.0",
        b"Expect: 100-continue\r\n",
        b"HTTP/1.0\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n",
        b"\x16\x03\x01",
    ]
)


@given(st.lists(PIECES | st.binary(max_size=20), max_size=12), st.integers(1, 200))
def test_whatever_comes_every_answer_is_whole_and_nothing_is_held_afterwards(
    pieces: list[bytes], piece: int
) -> None:
    with rigged() as rig:
        connection, wire = rig.connect()
        feed(connection, b"".join(pieces), piece)
        sent = wire.sent.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        for status, body in answers(wire, sent):
            assert status in (200, 400, 404, 413, 429, 431)
            assert status == 200 or json.loads(body)["error"]
        wire.abort()
        assert (rig.server.shared.waiting.held, rig.server.unfinished_bytes) == (0, 0)
        assert not rig.server.connections


class Pieces:
    """Stream whose pieces come from a test."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self.is_closed = False

    async def next(self) -> bytes:
        piece = await self.queue.get()
        if isinstance(piece, Exception):
            raise piece
        return piece

    def close(self) -> None:
        self.is_closed = True


def streaming(rig: Rig, pieces: Pieces) -> None:
    rig.server.admit = lambda head: Response(content_type="text/event-stream", stream=pieces)


def get(path: str = "/s", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\n".encode() + HOST + b"\r\n"


def turns() -> None:
    async def run() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    asyncio.get_event_loop().run_until_complete(run())


def test_a_stream_comes_piece_by_piece_and_its_end_is_the_connections(rig: Rig) -> None:
    pieces = Pieces()
    streaming(rig, pieces)
    connection, wire = rig.connect()
    feed(connection, get())
    head, _, body = wire.sent.partition(b"\r\n\r\n")
    assert b"Connection: close" in head
    assert b"Content-Length" not in head
    assert b"Transfer-Encoding: chunked" in head
    assert (body, wire.is_reading) == (b"", True)
    for piece in (b"one ", b"two"):
        pieces.queue.put_nowait(piece)
    turns()
    assert wire.sent.endswith(b"4\r\none \r\n3\r\ntwo\r\n")
    assert not wire.has_ended
    pieces.queue.put_nowait(b"")
    turns()
    assert (wire.has_ended, pieces.is_closed) == (True, True)
    assert wire.sent.endswith(b"two\r\n0\r\n\r\n")


@pytest.mark.parametrize("head", [get(), get().replace(b"1.1", b"1.0")])
def test_a_stream_that_fails_or_must_leave_has_no_last_chunk(rig: Rig, head: bytes) -> None:
    """The client must notice that the stream is incomplete. HTTP/1.0 never has chunks."""
    is_chunked = b"1.1" in head
    for error in (RuntimeError("a bug"), None):
        pieces = Pieces()
        rig.server.admit = lambda head, pieces=pieces: Response(
            stream=pieces, cut=lambda failure: f"cut: {failure.message}".encode()
        )
        connection, wire = rig.connect()
        feed(connection, head)
        pieces.queue.put_nowait(b"one")
        turns()
        if error is None:
            connection.leave()
        else:
            pieces.queue.put_nowait(error)
        turns()
        body = wire.sent.partition(b"\r\n\r\n")[2]
        assert body.startswith(b"3\r\none\r\n" if is_chunked else b"one")
        assert (b"cut: " in body) is (error is None)
        assert b"\r\n0\r\n" not in body
        assert (wire.is_closed, pieces.is_closed) == (True, True)


def test_a_stream_waits_for_a_peer_that_does_not_read_and_cuts_it_off(rig: Rig) -> None:
    pieces = Pieces()
    streaming(rig, pieces)
    connection, wire = rig.connect()
    feed(connection, get())
    connection.pause_writing()
    for _ in range(3):
        pieces.queue.put_nowait(b"x")
    turns()
    assert wire.sent.count(b"x") - wire.sent.partition(b"\r\n\r\n")[0].count(b"x") == 1
    wire.unread = 1000
    connection.look(10.0)
    connection.look(39.0)
    assert not wire.is_closed
    connection.look(41.0)
    turns()
    assert (wire.is_closed, pieces.is_closed) == (True, True)


def test_a_stream_whose_peer_hangs_up_or_that_must_leave_is_closed(rig: Rig) -> None:
    for end in (lambda wire, connection: wire.abort(), lambda wire, connection: connection.leave()):
        pieces = Pieces()
        streaming(rig, pieces)
        connection, wire = rig.connect()
        feed(connection, get() + b"GARBAGE that is not parsed")
        end(wire, connection)
        turns()
        assert (wire.is_closed, pieces.is_closed) == (True, True)
    assert (len(rig.server.connections), rig.server.unfinished_bytes) == (0, 0)


def test_who_asks_for_the_head_of_a_stream_gets_that_alone(rig: Rig) -> None:
    pieces = Pieces()
    streaming(rig, pieces)
    connection, wire = rig.connect()
    feed(connection, get(method="HEAD"))
    assert wire.sent.endswith(b"\r\n\r\n")
    assert (wire.has_ended, pieces.is_closed) == (True, True)


def test_a_deadline_that_could_not_be_met_may_be_asked_for_again() -> None:
    for error, is_told in (
        (DeadlineExceeded("too late", predicted_ms=9.0), True),
        (DeadlineExceeded("it passed in the queue", waited_ms=9.0), False),
    ):
        answer = http.refusal(error)
        assert (answer.status, "Retry-After" in dict(answer.headers)) == (504, is_told)
