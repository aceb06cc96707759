"""What others were bitten by, tried here: bytes and connections (docs/threat-model.md)."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from frontend_rig import DEADLINE_S, FakeScheduler, ask, raw_dealer, until

import pipeswitch as ps
from pipeswitch.scheduler.events import InferArrived
from pipeswitch.wire.frames import MAGIC, WireTensor, decode_reply
from tests.process.bombs import pickled

X = np.ones((1, 4), np.float32)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\0" + bytes(31)
READY_BODY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
TENSOR = {"name": "x", "dtype": "float32", "shape": [1, 4], "frame": 0}
READY = bytes([4, len(READY_BODY)]) + READY_BODY


class RawPeer:
    """A peer that speaks ZMTP 3 by hand, so that a message can be cut anywhere."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.sock = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.sendall(GREETING + READY)
        self.session = ""
        self._stream = self.sock.makefile("rb")
        self._stream.read(len(GREETING))
        self._frame()  # the server's READY: before it, our messages would be no messages

    def _frame(self) -> tuple[int, bytes]:
        flags = self._stream.read(1)[0]
        is_long = flags & 2
        size = int.from_bytes(self._stream.read(8 if is_long else 1), "big")
        return flags, self._stream.read(size)

    def ask(self, *frames: bytes, **fields: Any) -> Any:
        """Send a request whole; its reply."""
        self.sock.sendall(as_bytes(*frames, **fields))
        return self.reply()

    def reply(self) -> Any:
        return decode_reply(self.receive())

    def receive(self) -> list[bytes]:
        """The frames of the next message."""
        frames, flags = [], 1
        while flags & 1:
            flags, frame = self._frame()
            frames.append(frame)
        return frames

    def close(self) -> None:
        self._stream.close()
        self.sock.close()


def as_bytes(*frames: bytes, **fields: Any) -> bytes:
    """A request as ZMTP 3 sends it."""
    header = msgspec.msgpack.encode({"v": 1, "id": "1", **fields})
    *first, last = [MAGIC, header, *frames]
    return b"".join(
        bytes([more | 2]) + struct.pack(">Q", len(frame)) + frame
        for more, frame in [*((1, frame) for frame in first), (0, last)]
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeScheduler]:
    found = FakeScheduler(tmp_path)
    found.announce("m")
    yield found
    found.close()


@pytest.fixture
def peers(server: FakeScheduler) -> Iterator[list[RawPeer]]:
    found = [RawPeer(server.listeners.tcp.address) for _ in range(2)]
    yield found
    for peer in found:
        peer.close()


def test_shadowmq_a_pickle_in_any_frame_stays_bytes(server: FakeScheduler, tmp_path: Path) -> None:
    target = tmp_path / "unpickled"
    raw = pickled(target)
    with raw_dealer(server.listeners.tcp.address) as sock:
        for frames in ([raw], [MAGIC, raw], [raw, raw], [MAGIC, raw, raw]):
            sock.send_multipart(frames)
        session = ask(sock, op="hello").session
        x = WireTensor(name="x", dtype="float32", shape=(1, 4), frame=0)
        reply = ask(sock, raw, op="infer", model="m", session=session, inputs=(x,))
        assert reply.error.type == "InvalidInput"
        header = {"v": 1, "id": "2", "op": "train", "session": session, "body": {"args": raw}}
        sock.send_multipart([MAGIC, msgspec.msgpack.encode(header)])
        assert decode_reply(sock.recv_multipart()).error.type in (
            "InvalidInput", "RemoteProtocolError",
        )  # fmt: skip
    assert not target.exists()
    pickle.loads(raw)  # it would have
    assert target.exists()


def sizes(pid: int | str = "self") -> tuple[int, int]:
    """Virtual and resident bytes."""
    total, resident = Path("/proc", str(pid), "statm").read_text().split()[:2]
    page = os.sysconf("SC_PAGE_SIZE")
    return int(total) * page, int(resident) * page


def is_cut(sock: socket.socket) -> bool:
    """Whether the server ends this connection, within its deadline."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True  # TimeoutError otherwise


def test_zeromq_eight_gigabytes_declared_and_ten_bytes_sent_cost_nothing(
    server: FakeScheduler,
) -> None:
    host, port = server.listeners.tcp.address.removeprefix("tcp://").split(":")
    before = sizes()
    for _ in range(8):
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as sock:
            sock.sendall(GREETING + READY + b"\x02" + struct.pack(">Q", 8 << 30) + bytes(10))
            assert is_cut(sock)
    virtual, resident = sizes()
    assert virtual - before[0] < 1 << 30
    assert resident - before[1] < 16 << 20
    with ps.Client(server.listeners.tcp.address) as client:
        assert client.infer("m", X)["y"][0, 0] == 2.0


def test_zeromq_a_message_that_never_ends_is_cut(server: FakeScheduler) -> None:
    host, port = server.listeners.tcp.address.removeprefix("tcp://").split(":")
    part = b"\x03" + struct.pack(">Q", 16 << 10) + bytes(16 << 10)  # and more will come
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as sock:
        sock.sendall(GREETING + READY)
        heard = b""
        while b"READY" not in heard:  # before it, our messages would be no messages
            heard += sock.recv(4096)
        sock.settimeout(1.0)
        with contextlib.suppress(OSError):  # reset, broken pipe, or no end takes any more
            for _ in range(10_000):  # 160 MB
                sock.sendall(part)
        until(lambda: server.tcp._intake.connections.hung_up)
    assert server.tcp._intake.connections.hung_up == {"unfinished messages": 1}


def test_pipeswitch_requests_that_arrive_in_turns_byte_by_byte_are_not_mixed_up(
    server: FakeScheduler, peers: list[RawPeer]
) -> None:
    """In the original, names and data of two clients meet in two queues."""
    server.announce("other")
    sessions = [peer.ask(op="hello").session for peer in peers]
    data = [np.full((1, 4), n, np.float32) for n in (1, 2)]
    messages = [
        as_bytes(x.tobytes(), op="infer", model=model, session=session, inputs=[TENSOR])
        for x, model, session in zip(data, ("m", "other"), sessions, strict=True)
    ]
    for cut in range(max(map(len, messages))):
        for peer, message in zip(peers, messages, strict=True):
            peer.sock.sendall(message[cut : cut + 1])
    for peer, x in zip(peers, data, strict=True):
        assert peer.receive()[2] == (2 * x).tobytes()
    seen = [event.model for event in server.seen if isinstance(event, InferArrived)]
    assert sorted(seen) == ["m", "other"]


@pytest.mark.parametrize("came", [(), (0,), (15,), (17,), (4 << 10,), (16, 16)], ids=str)
def test_pipeswitch_another_number_of_bytes_than_declared_reaches_no_model(
    server: FakeScheduler, peers: list[RawPeer], came: tuple[int, ...]
) -> None:
    """The original asks a client for a length, up to 4 GiB, and does not look how much it read."""
    session = peers[0].ask(op="hello").session
    frames = [bytes(size) for size in came]
    reply = peers[0].ask(*frames, op="infer", model="m", session=session, inputs=[TENSOR])
    assert reply.error.type in ("InvalidInput", "RemoteProtocolError")
    assert not server.seen


def test_pipeswitch_a_client_that_names_a_model_and_vanishes_holds_nobody_up(
    server: FakeScheduler,
) -> None:
    """In the original, the scheduler then waits for that client's data for ever."""
    host, port = server.listeners.tcp.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as sock:
        sock.sendall(GREETING + READY + b"\x01\x04PSW1")
    with ps.Client(server.listeners.tcp.address) as client:
        assert client.infer("m", X)["y"][0, 0] == 2.0


FLOODED = """
import socket, sys, time, zmq
from pipeswitch.wire.sockets import Caps, make_router
context = zmq.Context()
router = make_router(context, Caps(max_message_bytes=1 << 20))
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
    """libzmq 4.3.5 aborts where a heartbeat is due on a connection that ended unread."""
    command = [sys.executable, "-c", FLOODED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_zeromq_one_byte_more_than_allowed_is_cut_before_it_is_sent(server: FakeScheduler) -> None:
    """CVE-2026-55646: a body is read first, and its size looked at afterwards."""
    peer = RawPeer(server.listeners.tcp.address)
    limit = peer.ask(op="ping").body["max_message_bytes"]
    peer.sock.sendall(b"\x02" + struct.pack(">Q", limit + 1) + bytes(10))
    assert is_cut(peer.sock)
    peer.close()


def test_triton_a_message_of_very_many_parts_holds_nobody_up(
    server: FakeScheduler, peers: list[RawPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton, very many small chunks of one request end the server."""
    hostile, good = peers
    for peer in peers:
        peer.session = peer.ask(op="hello").session
    turns = itertools.count()
    step = server.tcp.step
    monkeypatch.setattr(server.tcp, "step", lambda: (next(turns), step()))
    hostile.sock.sendall(b"\x01\x00" * 200_000 + b"\x00\x00")
    assert is_cut(hostile.sock)
    x = X.tobytes()
    reply = good.ask(x, op="infer", model="m", session=good.session, inputs=[TENSOR])
    assert reply.status == "ok"
    assert next(turns) > 200  # of the loop, while that one message was read
    assert server.tcp._intake.connections.hung_up == {"too many parts": 1}


def a_web_page_posts(*requests: dict[str, Any]) -> bytes:
    """What a browser sends for ``fetch(url, {method: "POST", body})``.

    To libzmq the ``P`` is the length of a ZMTP 1 frame. The address is chosen so that another
    frame ends where the headers do, and the body holds whole messages.
    """
    body = b""
    for request in requests:
        header = msgspec.msgpack.encode({"v": 1, "id": "1", **request})
        for more, frame in ((1, MAGIC), (0, header)):
            body += bytes([1 + len(frame), more]) + frame
    lines = f" HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    first = b"POST /".ljust(1 + ord("P"), b"A")
    return first + b"~" + b"B" * (ord("~") - len(lines)) + lines + body


def test_ray_a_web_page_on_this_machine_commands_nothing(server: FakeScheduler) -> None:
    """CVE-2025-62593: a page in a local browser talks to a port that asks for nothing."""
    host, _, port = server.listeners.tcp.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as browser:
        browser.sendall(
            a_web_page_posts({"op": "hello"}, {"op": "stop"}, {"op": "train", "session": "x"})
        )
        until(lambda: server.tcp._intake.malformed_count >= 2)
        with ps.Client(server.listeners.tcp.address) as client:
            assert client.infer("m", X)["y"][0, 0] == 2.0
    assert all(isinstance(event, InferArrived) for event in server.seen)


def test_uvicorn_half_a_handshake_is_cut_however_slowly_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow loris: uvicorn keeps connections whose headers never end."""
    monkeypatch.setattr("pipeswitch.wire.sockets.HANDSHAKE_LIMIT_MS", 300)
    server = FakeScheduler(tmp_path)
    host, _, port = server.listeners.tcp.address.removeprefix("tcp://").rpartition(":")
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=DEADLINE_S))
            for _ in range(20)
        ]
        for sock in silent:
            sock.sendall(GREETING[:20])
        slow = stack.enter_context(socket.create_connection((host, int(port)), timeout=0.05))
        assert any(is_cut_after(slow, GREETING[n : n + 1]) for n in range(len(GREETING)))
        assert all(is_cut(sock) for sock in silent)


def is_cut_after(sock: socket.socket, byte: bytes) -> bool:
    """Whether the connection had ended when this was sent, or ends within its timeout."""
    try:
        sock.sendall(byte)
        return is_cut(sock)
    except TimeoutError:
        return False
    except ConnectionError:
        return True
