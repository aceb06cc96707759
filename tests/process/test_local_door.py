"""The owner's plain socket: equal answers, memory freed when a client ends, and malicious peers.

The server is the one of ``frontend_rig``: the test's process answers, but the sockets are real.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frontend_rig import FakeScheduler, assert_balanced, until

import pipeswitch as ps
from pipeswitch.base.roles import OWNER
from pipeswitch.client import looped
from pipeswitch.client.links import StreamLink
from pipeswitch.client.tensors import from_reply, to_frames
from pipeswitch.frontend.transport.connection_manager import (
    MAX_SHARES,
    ClientConnection,
    ClientSegments,
)
from pipeswitch.wire.frames import INLINE, MAGIC, RequestHeader, encode_header, pack_table
from pipeswitch.wire.stream import ShmSegment, Stream
from tests.raw_peer import RawPeer

WIDTH = 1 << 15  # numbers in a row of 128 KiB, which is large enough for shared memory
HALF = 1 << 20  # bytes of one half of a client's shared memory


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeScheduler]:
    server_made = started(tmp_path)
    yield server_made
    server_made.close()


def started(folder: Path, **config: Any) -> FakeScheduler:
    scheduler = FakeScheduler(folder, **config)
    scheduler.announce("double", width=WIDTH)
    return scheduler


def rows(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).random((count, WIDTH), dtype=np.float32)


def shares(server: FakeScheduler) -> int:
    return server.tcp.sessions.peers.shares.count


class Raw(RawPeer):
    """Raw peer that has a session and shared memory."""

    def __init__(self, server: FakeScheduler) -> None:
        super().__init__(server.listeners.ipc.address)
        self.session = ""
        self.memory = -1

    def say(
        self, *tensors: Any, places: tuple[int, ...] = (), count: int = 0, **fields: Any
    ) -> None:
        header = self.header(**fields)
        table = [(len(header), INLINE)]
        table += zip(map(len, tensors), places or [INLINE] * len(tensors), strict=True)
        inline = [t for t, (_, place) in zip(tensors, table[1:], strict=True) if place == INLINE]
        self.put(pack_table(table, count), header, *inline)

    def header(self, **fields: Any) -> bytes:
        return encode_header(RequestHeader(v=1, id="1", session=self.session, **fields))

    def greeted(self, *, with_share: bool = True) -> Raw:
        import msgspec

        self.say(op="hello")
        self.session = msgspec.msgpack.decode(self.hear()[1])["session"]
        if with_share:
            self.stream.put(pack_table(()))
            self.stream.flush()
            (self.memory,) = self.next().descriptors
            self.stream.share = ShmSegment(self.memory, is_servers=False)
        return self

    def infer(self, place: int, size: int = 4 * WIDTH, **fields: Any) -> None:
        x = {"name": "", "dtype": "float32", "shape": (size // (4 * WIDTH), WIDTH), "frame": 0}
        inputs: Any = (x,)
        self.say(bytes(size), places=(place,), op="infer", model="double", inputs=inputs, **fields)

    def close(self) -> None:
        super().close()
        if self.memory >= 0:
            os.close(self.memory)

    @property
    def is_cut(self) -> bool:
        try:
            self.stream.receive(100)
        except EOFError:
            return True
        return False


@pytest.fixture
def peer(server: FakeScheduler) -> Iterator[Raw]:
    peer_made = Raw(server)
    yield peer_made
    peer_made.close()


def test_answers_are_the_same_by_every_way_and_the_callers_own(server: FakeScheduler) -> None:
    address = server.listeners.ipc.address
    with ps.Client(address) as ours, ps.Client(address, shared_memory=False) as plain:
        answers = []
        for seed, count in enumerate((1, 8, 3, 1)):  # 8 rows do not fit in the shared memory
            x = rows(count, seed)
            for client in (ours, plain):
                y = client.infer("double", x)["y"]
                answers.append((y, 2 * x))
                assert y.flags.writeable
        futures = [(ours.submit("double", x), 2 * x) for x in (rows(2, seed) for seed in range(6))]
        answers += [(future.result()["y"], expected) for future, expected in futures]
        assert all(
            y.tobytes() == expected.tobytes() for y, expected in answers
        )  # no later answer overwrote them
        assert ours.stats()["shares"] == 1
    until(lambda: not shares(server))
    assert_balanced(server.tcp)


def test_a_small_client_takes_no_share_and_the_last_ones_go_through_the_socket(
    server: FakeScheduler,
) -> None:
    clients = [ps.Client(server.listeners.ipc.address) for _ in range(MAX_SHARES + 1)]
    for client in clients:
        client.stats()
    assert not shares(server)
    for client in clients:
        for seed in range(2):
            assert (client.infer("double", rows(1, seed))["y"] == 2 * rows(1, seed)).all()
    assert shares(server) == MAX_SHARES
    for client in clients:
        client.close()
    until(lambda: not shares(server))


def test_a_server_that_shares_nothing_answers_the_same(tmp_path: Path) -> None:
    server = started(tmp_path, shares=False)
    try:
        with ps.Client(server.listeners.ipc.address) as client:
            for seed in range(3):
                assert (client.infer("double", rows(5, seed))["y"] == 2 * rows(5, seed)).all()
            assert client.stats()["shares"] == 0
    finally:
        server.close()


HOLDER = """
import sys, numpy as np, pipeswitch as ps
client = ps.Client(sys.argv[1])
x = np.ones((1, {width}), dtype=np.float32)
client.infer("double", x)
client.infer("double", x)
print("asked twice", flush=True)
input()
client.infer("double", x)
"""


def test_a_killed_client_frees_its_share_and_its_request(server: FakeScheduler) -> None:
    command = [sys.executable, "-c", HOLDER.format(width=WIDTH), server.listeners.ipc.address]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as child:
        assert child.stdout.readline() == "asked twice\n"
        server.is_holding = True
        child.stdin.write("\n")
        child.stdin.flush()
        until(lambda: server.held)
        assert shares(server) == 1
        os.kill(child.pid, signal.SIGKILL)
        until(lambda: not shares(server) and not server.tcp.sessions.peers.all and not server.held)
    until(lambda: server.tcp.requests.counts.undeliverable == 1)
    assert_balanced(server.tcp)


def test_a_client_goes_on_with_the_next_server(tmp_path: Path) -> None:
    server = started(tmp_path)
    with ps.Client(server.listeners.ipc.address) as client:
        assert (client.infer("double", rows(1))["y"] == 2 * rows(1)).all()
        for _ in range(2):
            server.close()
            server = started(tmp_path)
            try:
                for seed in range(3):
                    assert (client.infer("double", rows(2, seed))["y"] == 2 * rows(2, seed)).all()
                assert isinstance(client._connection._link, StreamLink)
                assert shares(server) == 1
            except BaseException:
                server.close()
                raise
    server.close()


def test_an_event_loop_asks_by_itself_takes_back_and_goes_on_with_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looped, "INLINE_BYTES", 8 * WIDTH)  # larger requests are copied by a thread

    async def scenario(server: FakeScheduler) -> FakeScheduler:
        connection = looped.LoopConnection(server.listeners.ipc.address, 20.0)

        async def is_doubled(count: int) -> bool:
            tensors, frames, _ = to_frames(rows(count))
            result = await connection.ask(
                "infer",
                model="double",
                inputs=tensors,
                frames=frames,
                is_safe=True,
                convert=lambda reply: from_reply("double", False, reply),
            )
            return bool((result["y"] == 2 * rows(count)).all())

        for _ in range(2):
            assert all(await asyncio.gather(*map(is_doubled, (1, 3, 8, 2, 1))))
        server.is_holding = True
        tasks = [asyncio.create_task(is_doubled(count)) for count in (1, 3)]
        await asyncio.to_thread(until, lambda: len(server.held) == 2)
        for task in tasks:
            task.cancel()
        late = asyncio.create_task(is_doubled(4))
        await asyncio.sleep(0)  # lets the thread begin to copy
        late.cancel()
        await asyncio.to_thread(until, lambda: not server.held)
        server.is_holding = False
        assert await is_doubled(8)
        link = connection._link
        assert isinstance(link, StreamLink)
        assert not link._places
        server.close()
        assert_balanced(server.tcp)
        with pytest.raises(ps.ServerUnavailable):
            await is_doubled(1)
        with pytest.raises(ps.ServerUnavailable):
            await connection.ask("ping")
        server = started(tmp_path)
        assert all(await asyncio.gather(*map(is_doubled, (1, 3))))
        waiting = asyncio.ensure_future(connection.ask("infer", model="double"))
        await asyncio.sleep(0)
        connection.close()
        with pytest.raises(ps.Cancelled):
            await waiting
        return server

    asyncio.run(scenario(started(tmp_path))).close()


def test_a_client_that_is_there_before_its_server_gets_the_plain_socket(tmp_path: Path) -> None:
    with ps.Client(f"ipc://{tmp_path}/run/t.sock", timeout_s=20) as client:
        future = client.submit("unknown", rows(1))
        server = started(tmp_path)
        try:
            assert isinstance(future.exception(), ps.ModelNotFound)
            assert isinstance(client._connection._link, StreamLink)
        finally:
            server.close()


def test_a_forked_child_does_not_hold_its_parents_connection_open(server: FakeScheduler) -> None:
    client = ps.Client(server.listeners.ipc.address)
    client.infer("double", rows(1))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.read(read, 1)
        os._exit(0)
    try:
        until(lambda: len(server.tcp.sessions.peers.all) == 1)
        client.close()
        until(lambda: not server.tcp.sessions.peers.all)
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def test_what_a_client_changes_after_it_asked_does_not_count(
    server: FakeScheduler, peer: Raw
) -> None:
    server.is_holding = True
    peer.greeted()
    share = peer.stream.share
    own = share.own(0, 4 * WIDTH)
    own[:] = np.ones(WIDTH, dtype=np.float32).tobytes()
    peer.infer(0)
    until(lambda: server.held)
    own[:] = bytes(4 * WIDTH)
    (request,) = server.held
    server.finish(request)
    (y,) = peer.hear()[2:]
    assert (np.frombuffer(y, dtype=np.float32) == 2).all()


def test_the_share_cannot_shrink_or_grow_under_the_server(peer: Raw) -> None:
    peer.greeted()
    for size in (0, HALF, 4 * HALF):
        with pytest.raises(PermissionError):
            os.ftruncate(peer.memory, size)


def _lie(peer: Raw, what: str) -> None:
    x = 4 * WIDTH
    match what:
        case "a place outside":
            peer.infer(HALF - x + 4096)
        case "a place beyond all":
            peer.infer(INLINE - 1)
        case "a header in the share":
            peer.sock.send(pack_table([(10, 0)]))
        case "parts taken that were not lent":
            peer.say(op="ping", count=1)


@pytest.mark.parametrize(
    "what",
    [
        "a place outside",
        "a place beyond all",
        "a header in the share",
        "parts taken that were not lent",
    ],
)
def test_a_peer_that_lies_is_cut_and_the_others_are_answered(
    server: FakeScheduler, peer: Raw, what: str
) -> None:
    with ps.Client(server.listeners.ipc.address) as other:
        other.infer("double", rows(1))
        peer.greeted()
        assert shares(server) == 2
        _lie(peer, what)
        until(lambda: peer.is_cut)
        assert shares(server) == 1
        assert (other.infer("double", rows(1))["y"] == 2 * rows(1)).all()
        assert other.stats()["malformed"] == 1
    until(lambda: not shares(server))
    assert_balanced(server.tcp)


def test_a_place_without_a_share_cuts_the_peer(server: FakeScheduler, peer: Raw) -> None:
    peer.greeted(with_share=False)
    peer.infer(0)
    until(lambda: peer.is_cut)
    assert_balanced(server.tcp)


def _with_an_answer_that_waits(server: FakeScheduler, peer: Raw) -> Any:
    """Request an answer that is larger than the socket's buffer, and do not read it."""
    peer.greeted(with_share=False)
    x = rows(8)
    inputs: Any = ({"name": "", "dtype": "float32", "shape": x.shape, "frame": 0},)
    header, data = peer.header(op="infer", model="double", inputs=inputs), x.tobytes()
    peer.stream.put(pack_table([(len(header), INLINE), (len(data), INLINE)]), [header, data])
    until(peer.stream.flush)
    until(lambda: any(one.wants_write for one in list(server.tcp.sessions.peers.all)))
    return 2 * x


def test_a_ping_behind_a_large_answer_is_answered(server: FakeScheduler, peer: Raw) -> None:
    expected = _with_an_answer_that_waits(server, peer)
    peer.say(op="ping")
    peer.say(op="stats")
    answers = [peer.hear() for _ in range(3)]
    assert bytes(answers[0][2]) == expected.tobytes()
    assert b"protocol" in bytes(answers[1][1])
    assert b"malformed" in bytes(answers[2][1])


def test_a_second_hello_does_not_change_what_is_on_its_way(
    server: FakeScheduler, peer: Raw
) -> None:
    expected = _with_an_answer_that_waits(server, peer)
    peer.say(op="hello")
    with ps.Client(server.listeners.ipc.address) as other:
        other.infer("double", rows(8, seed=1))  # would overwrite the answer if it were freed
    assert bytes(peer.hear()[2]) == expected.tobytes()
    assert b"session" in bytes(peer.hear()[1])


def test_a_share_is_brought_when_there_is_room_for_it(server: FakeScheduler) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = ClientConnection(ours, OWNER, 1 << 20, ClientSegments(2 * HALF))
        client = Stream(theirs, 1 << 20, takes_descriptors=True)
        message = pack_table([(1000, INLINE)]) + bytes(1000)
        sent_count = 0
        with contextlib.suppress(BlockingIOError):  # until its unread answers fill the buffers
            while ours.send(message):
                sent_count += 1
        client.put(pack_table(()))
        assert client.flush()
        assert not [*peer.messages()]
        assert peer.wants_write
        for _ in range(sent_count):
            client.receive(1)
        with pytest.raises(BlockingIOError):
            assert ours.recv(1)
        assert not [*peer.messages()]
        (brought,) = client.receive(1)
        (descriptor,) = brought.descriptors
        os.close(descriptor)
        assert not peer.wants_write


def test_only_an_inference_may_name_a_place(server: FakeScheduler, peer: Raw) -> None:
    peer.greeted()
    peer.say(bytes(100), places=(0,), op="put", body={"digest": "0" * 64})
    assert b"only an inference" in bytes(peer.hear()[1])


def test_descriptors_that_a_peer_sends_are_closed(server: FakeScheduler, peer: Raw) -> None:
    peer.greeted()
    before = descriptors_of(peer.memory)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [peer.memory] * 50))]
    header = encode_header(RequestHeader(v=1, op="ping", id="1"))
    peer.sock.sendmsg([pack_table([(len(header), INLINE)]) + header], rights)
    assert peer.hear()[0] == MAGIC
    assert descriptors_of(peer.memory) <= before  # the server closes its own after the greeting


def descriptors_of(memory: int) -> int:
    """Return the number of this process's descriptors of one file; other descriptors may change."""
    file, count = os.fstat(memory), 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor
            count += os.path.samestat(os.stat(f"/proc/self/fd/{name}"), file)
    return count


def test_a_client_that_could_not_map_its_share_is_answered_through_the_socket(
    server: FakeScheduler, peer: Raw
) -> None:
    peer.greeted()
    peer.stream.share = None
    x: Any = ({"name": "", "dtype": "float32", "shape": (1, WIDTH), "frame": 0},)
    peer.say(bytes(4 * WIDTH), op="infer", model="double", inputs=x)
    assert bytes(peer.hear()[2]) == bytes(4 * WIDTH)


STRANGER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
print(len(sock.recv(1)))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_hung_up_though_the_folder_lets_it_in(server: FakeScheduler) -> None:
    path = Path(server.listeners.ipc.address.removeprefix("ipc://"))
    path.chmod(0o777)
    for folder in list(path.parents)[:-1]:
        folder.chmod(folder.stat().st_mode | 0o055)
    command = [sys.executable, "-c", STRANGER, str(path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0\n"
    assert not server.tcp.sessions.peers.all
