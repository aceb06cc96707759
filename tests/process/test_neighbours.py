"""Known faults of other servers in bytes and connections, tried on ours (docs/threat-model.md)."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from frontend_rig import DEADLINE_S, FakeScheduler, until

import pipeswitch as ps
from pipeswitch.scheduler.state.events import InferArrived
from pipeswitch.wire.frames import INLINE, WireTensor, decode_reply, pack_table
from tests.process.bombs import pickled
from tests.raw_peer import RawPeer, ask, raw_peer

X = np.ones((1, 4), np.float32)
TENSOR = {"name": "x", "dtype": "float32", "shape": [1, 4], "frame": 0}


def asked(peer: RawPeer, *frames: bytes, **fields: Any) -> Any:
    """Send a request in one piece; return its reply."""
    peer.sock.sendall(as_bytes(*frames, **fields))
    return decode_reply(peer.hear())


def as_bytes(*frames: bytes, **fields: Any) -> bytes:
    """Return the bytes of a request on the wire."""
    parts = [msgspec.msgpack.encode({"v": 1, "id": "1", **fields}), *frames]
    return b"".join([pack_table([(len(part), INLINE) for part in parts]), *parts])


def connected(server: FakeScheduler, timeout_s: float = DEADLINE_S) -> socket.socket:
    host, _, port = server.listeners.tcp.address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=timeout_s)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeScheduler]:
    scheduler = FakeScheduler(tmp_path)
    scheduler.announce("m")
    yield scheduler
    scheduler.close()


@pytest.fixture
def peers(server: FakeScheduler) -> Iterator[list[RawPeer]]:
    raw_peers = [RawPeer(server.listeners.tcp.address) for _ in range(2)]
    yield raw_peers
    for peer in raw_peers:
        peer.close()


def test_shadowmq_a_pickle_in_any_frame_stays_bytes(server: FakeScheduler, tmp_path: Path) -> None:
    target = tmp_path / "unpickled"
    raw = pickled(target)
    with connected(server) as sock:
        sock.sendall(raw)
        assert is_cut(sock)
    with raw_peer(server.listeners.tcp.address) as sock:
        for frames in ([raw], [raw, raw]):
            sock.send(*frames)
        session = ask(sock, op="hello").session
        x = WireTensor(name="x", dtype="float32", shape=(1, 4), frame=0)
        reply = ask(sock, raw, op="infer", model="m", session=session, inputs=(x,))
        assert reply.error.type == "InvalidInput"
        header = {"v": 1, "id": "2", "op": "train", "session": session, "body": {"args": raw}}
        sock.send(msgspec.msgpack.encode(header))
        assert decode_reply(sock.hear()).error.type in ("InvalidInput", "RemoteProtocolError")
    assert not target.exists()
    pickle.loads(raw)  # proves that unpickling would make ``target``
    assert target.exists()


def sizes(pid: int | str = "self") -> tuple[int, int]:
    """Return a process's virtual and resident size in bytes."""
    total, resident = Path("/proc", str(pid), "statm").read_text().split()[:2]
    page = os.sysconf("SC_PAGE_SIZE")
    return int(total) * page, int(resident) * page


def is_cut(sock: socket.socket) -> bool:
    """Return True when the server ends this connection; raise TimeoutError at the deadline."""
    if not sock.gettimeout():  # a timeout of None or 0
        sock.settimeout(DEADLINE_S)
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True  # recv raises TimeoutError otherwise


def test_zeromq_eight_gigabytes_declared_and_ten_bytes_sent_cost_nothing(
    server: FakeScheduler,
) -> None:
    """Declare 8 GiB; in CVE-2026-55646 a server reads a body before it checks its size."""
    with raw_peer(server.listeners.tcp.address) as peer:
        limit = asked(peer, op="hello").body["max_message_bytes"]
    before = sizes()
    for size in (limit + 1, *[8 << 30] * 8):
        with connected(server) as sock:
            sock.sendall(pack_table([(10, INLINE), (size, INLINE)]) + bytes(10))
            assert is_cut(sock)
    virtual, resident = sizes()
    assert virtual - before[0] < 1 << 30
    assert resident - before[1] < 16 << 20
    with ps.Client(server.listeners.tcp.address) as client:
        assert client.infer("m", X)["y"][0, 0] == 2.0


def test_messages_that_never_end_are_cut_when_they_hold_much(tmp_path: Path) -> None:
    server = FakeScheduler(tmp_path, max_message_bytes=64 << 20, pool_bytes=1 << 20)
    peers = [RawPeer(server.listeners.tcp.address) for _ in range(3)]
    try:
        for peer in peers:
            asked(peer, op="hello")
            peer.sock.sendall(pack_table([(10, INLINE), (64 << 20, INLINE)]))
            peer.sock.sendall(bytes(900 << 10))  # two peers may hold this much, three may not
        until(lambda: server.tcp.sessions.connections.hung_up)
        for peer in peers:
            with contextlib.suppress(OSError):  # connection reset, broken pipe, or a full buffer
                for _ in range(1_000):  # 60 MB
                    peer.sock.sendall(bytes(60 << 10))
        until(lambda: server.tcp.sessions.connections.hung_up["unfinished messages"] == 3)
    finally:
        for peer in peers:
            peer.close()
        server.close()


def test_pipeswitch_requests_that_arrive_in_turns_byte_by_byte_are_not_mixed_up(
    server: FakeScheduler, peers: list[RawPeer]
) -> None:
    """Alternate the bytes of two clients' requests; the original mixes up their names and data."""
    server.announce("other")
    sessions = [asked(peer, op="hello").session for peer in peers]
    data = [np.full((1, 4), n, np.float32) for n in (1, 2)]
    messages = [
        as_bytes(x.tobytes(), op="infer", model=model, session=session, inputs=[TENSOR])
        for x, model, session in zip(data, ("m", "other"), sessions, strict=True)
    ]
    for cut in range(max(map(len, messages))):
        for peer, message in zip(peers, messages, strict=True):
            peer.sock.sendall(message[cut : cut + 1])
    for peer, x in zip(peers, data, strict=True):
        assert peer.hear()[2] == (2 * x).tobytes()
    models = [event.model for event in server.seen if isinstance(event, InferArrived)]
    assert sorted(models) == ["m", "other"]


@pytest.mark.parametrize("came", [(), (0,), (15,), (17,), (4 << 10,), (16, 16)], ids=str)
def test_pipeswitch_another_number_of_bytes_than_declared_reaches_no_model(
    server: FakeScheduler, peers: list[RawPeer], came: tuple[int, ...]
) -> None:
    """Send another length than declared. The original trusts every declared length up to 4 GiB."""
    session = asked(peers[0], op="hello").session
    frames = [bytes(size) for size in came]
    reply = asked(peers[0], *frames, op="infer", model="m", session=session, inputs=[TENSOR])
    assert reply.error.type in ("InvalidInput", "RemoteProtocolError")
    assert not server.seen


def test_pipeswitch_a_client_that_names_a_model_and_vanishes_holds_nobody_up(
    server: FakeScheduler,
) -> None:
    """Disconnect within a request; the original's scheduler would wait for the rest for ever."""
    with connected(server) as sock:
        sock.sendall(as_bytes(bytes(16), op="infer", model="m", inputs=[TENSOR])[:-10])
    with ps.Client(server.listeners.tcp.address) as client:
        assert client.infer("m", X)["y"][0, 0] == 2.0


FLOODED = """
import socket, sys, time, zmq
from pipeswitch.extras.curve.sockets import make_router
context = zmq.Context()
router = make_router(context, 1 << 20)
port = router.bind_to_random_port("tcp://127.0.0.1")
body = b"\\x05READY\\x0bSocket-Type\\0\\0\\0\\x06DEALER"
peer = socket.create_connection(("127.0.0.1", port))
peer.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00NULL" + bytes(16) + b"\\0" + bytes(31))
peer.sendall(bytes([4, len(body)]) + body)
peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\\1\\0\\0\\0\\0\\0\\0\\0")  # reset at close
heard = b""
while b"READY" not in heard:  # before it, our messages would be no messages
    heard += peer.recv(4096)
peer.settimeout(0.5)
try:
    peer.sendall(b"\\x00\\x01x" * 2_000_000)  # more than anybody takes
except TimeoutError:
    pass
peer.close()
time.sleep(2.5)  # longer than the interval that was
print(len(router.recv_multipart()))
"""


def test_zeromq_a_flood_and_a_reset_do_not_abort_the_server() -> None:
    """Flood and then reset a connection; libzmq 4.3.5 would abort at its next heartbeat."""
    command = [sys.executable, "-c", FLOODED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_triton_a_message_of_very_many_parts_is_refused_by_its_table(
    server: FakeScheduler, peers: list[RawPeer]
) -> None:
    """Declare a million small parts, which crash Triton; another client must still be served."""
    hostile, good = peers
    session = asked(good, op="hello").session
    hostile.sock.sendall(b"PSW1" + (1_000_000).to_bytes(4, "little") + bytes(64 << 10))
    assert is_cut(hostile.sock)
    reply = asked(good, X.tobytes(), op="infer", model="m", session=session, inputs=[TENSOR])
    assert reply.status == "ok"


def a_web_page_posts(*requests: dict[str, Any]) -> bytes:
    """Return the bytes that a browser sends for ``fetch(url, {method: "POST", body})``."""
    body = b"".join(as_bytes(**request) for request in requests)
    lines = f" HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return b"POST /PSW1" + lines + body


def test_ray_a_web_page_on_this_machine_commands_nothing(server: FakeScheduler) -> None:
    """Send commands as a web page's POST, which Ray's open port obeyed (CVE-2025-62593)."""
    with connected(server) as browser:
        browser.sendall(
            a_web_page_posts({"op": "hello"}, {"op": "stop"}, {"op": "train", "session": "x"})
        )
        assert is_cut(browser)
        with ps.Client(server.listeners.tcp.address) as client:
            assert client.infer("m", X)["y"][0, 0] == 2.0
    assert all(isinstance(event, InferArrived) for event in server.seen)


def test_uvicorn_half_a_message_is_cut_however_slowly_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Send a message byte by byte (slow loris); ours must cut it, uvicorn keeps the connection."""
    monkeypatch.setattr("pipeswitch.frontend.transport.connection_limits.HELLO_S", 0.3)
    server = FakeScheduler(tmp_path)
    hello = as_bytes(op="hello", model="m" * 1000)
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        silent = [stack.enter_context(connected(server)) for _ in range(20)]
        for sock in silent:
            sock.sendall(hello[:20])
        slow = stack.enter_context(connected(server, 0.05))
        assert any(is_cut_after(slow, hello[n : n + 1]) for n in range(len(hello)))
        assert all(is_cut(sock) for sock in silent)


def is_cut_after(sock: socket.socket, byte: bytes) -> bool:
    """Send a byte; return True if the connection has ended, or ends within the socket's timeout."""
    try:
        sock.sendall(byte)
        return is_cut(sock)
    except TimeoutError:
        return False
    except ConnectionError:
        return True
