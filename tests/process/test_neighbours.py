"""What other serving systems were bitten by, tried here (docs/threat-model.md lists them all)."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import stat
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
from hypothesis import given
from hypothesis import strategies as st
from process_tools import checked_server

import pipeswitch as ps
from pipeswitch.controller.admission import check_name
from pipeswitch.programs.bundle import Graph, Node, check_graph
from pipeswitch.programs.layout import ValueSpec
from pipeswitch.wire import MAGIC, WireTensor, decode_reply

X = np.ones((1, 4), np.float32)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\0" + bytes(31)
READY_BODY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
READY = bytes([4, len(READY_BODY)]) + READY_BODY


class Bomb:
    """Whoever unpickles it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeScheduler]:
    found = FakeScheduler(tmp_path)
    found.announce("m")
    yield found
    found.close()


def test_shadowmq_a_pickle_in_any_frame_stays_bytes(server: FakeScheduler, tmp_path: Path) -> None:
    target = tmp_path / "unpickled"
    pickled = pickle.dumps(Bomb(target))
    with raw_dealer(server.doors.tcp.address) as sock:
        for frames in ([pickled], [MAGIC, pickled], [pickled, pickled], [MAGIC, pickled, pickled]):
            sock.send_multipart(frames)
        session = ask(sock, op="hello").session
        x = WireTensor(name="x", dtype="float32", shape=(1, 4), frame=0)
        reply = ask(sock, pickled, op="infer", model="m", session=session, inputs=(x,))
        assert reply.error.type == "InvalidInput"
        header = {"v": 1, "id": "2", "op": "train", "session": session, "body": {"args": pickled}}
        sock.send_multipart([MAGIC, msgspec.msgpack.encode(header)])
        assert decode_reply(sock.recv_multipart()).error.type in (
            "InvalidInput", "RemoteProtocolError",
        )  # fmt: skip
    assert not target.exists()
    pickle.loads(pickled)  # it would have
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
    host, port = server.doors.tcp.address.removeprefix("tcp://").split(":")
    before = sizes()
    for _ in range(8):
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as sock:
            sock.sendall(GREETING + READY + b"\x02" + struct.pack(">Q", 8 << 30) + bytes(10))
            assert is_cut(sock)
    virtual, resident = sizes()
    assert virtual - before[0] < 1 << 30
    assert resident - before[1] < 16 << 20
    with ps.Client(server.doors.tcp.address) as client:
        assert client.infer("m", X)["y"][0, 0] == 2.0


def test_zeromq_a_message_that_never_ends_is_cut(server: FakeScheduler) -> None:
    host, port = server.doors.tcp.address.removeprefix("tcp://").split(":")
    part = b"\x03" + struct.pack(">Q", 16 << 10) + bytes(16 << 10)  # and more will come
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as sock:
        sock.sendall(GREETING + READY)
        heard = b""
        while b"READY" not in heard:  # before it, our messages would be no messages
            heard += sock.recv(4096)
        sock.settimeout(1.0)
        with contextlib.suppress(OSError):  # reset, broken pipe, or nobody takes any more
            for _ in range(10_000):  # 160 MB
                sock.sendall(part)
        until(lambda: server.tcp._peers.hung_up)
    assert server.tcp._peers.hung_up == {"unfinished messages": 1}


def test_pipeswitch_a_client_that_names_a_model_and_vanishes_holds_nobody_up(
    server: FakeScheduler,
) -> None:
    """In the original, the scheduler then waits for that client's data for ever."""
    host, port = server.doors.tcp.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as sock:
        sock.sendall(GREETING + READY + b"\x01\x04PSW1")
    with ps.Client(server.doors.tcp.address) as client:
        assert client.infer("m", X)["y"][0, 0] == 2.0


@given(st.text(max_size=80))
def test_triton_a_name_never_leads_out_of_its_folder(name: str) -> None:
    try:
        accepted = check_name(name, "model")
    except ps.InvalidInput:
        return
    inside = Path("/store", accepted)
    assert Path(os.path.normpath(inside)) == inside
    assert inside.parent == Path("/store")
    assert not accepted.startswith(".")


@pytest.mark.parametrize("key", ["if", "x=1, y", "__import__('os')", "a.b", "é", "", "None"])
def test_torch_a_bundles_words_never_become_code_of_its_own(key: str) -> None:
    """torch.export's own loader evaluates text of the file; ours makes source of checked words."""
    value = ValueSpec(name="x", dtype="float32", shape=(1, 4))
    graph = Graph(
        version=1,
        inputs=(value,),
        weights=(),
        nodes=(Node("aten.relu.default", ({"v": 0},), {key: 1}),),
        results=(1,),
        outputs=(value,),
        batch_max=1,
    )
    with pytest.raises(ps.RegistrationRefused, match="is not an argument's name"):
        check_graph(graph)


def test_a_clients_text_starts_no_line_of_its_own_in_the_log(
    server: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    text = "x\nERROR forged\r\x1b[2J"
    with caplog.at_level(logging.DEBUG, "pipeswitch"), raw_dealer(server.doors.tcp.address) as sock:
        for op in (text, "infer", "show"):
            header = {"v": 1, "id": "1", "op": op, "model": text, "session": text}
            sock.send_multipart([MAGIC, msgspec.msgpack.encode(header)])
            assert decode_reply(sock.recv_multipart()).error is not None
        session = ask(sock, op="hello").session
        assert ask(sock, op="show", id="2", model=text, session=session) is not None
        assert ask(sock, op="infer", id="3", model=text, session=session).error is not None
    assert caplog.records
    assert not [r for r in caplog.records if {"\n", "\r", "\x1b"} & set(r.getMessage())]


def test_what_the_server_writes_is_its_owners_alone(tmp_path: Path) -> None:
    """Whatever the umask is: models, logs, journal and both sockets."""
    state = tmp_path / "state"
    before = os.umask(0)
    try:
        with checked_server(arena="64MiB", state_dir=state) as checked:
            door = Path(checked.running.ipc_address.removeprefix("ipc://"))
            for folder in (state, door.parent):
                assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
            assert door.is_socket()
    finally:
        os.umask(before)


FLOODED = """
import socket, sys, time, zmq
from pipeswitch.sockets import Caps, make_router
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
