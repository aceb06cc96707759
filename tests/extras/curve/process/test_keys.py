"""Admission to a server that requires keys: real sockets, real handshakes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from frontend_rig import DEADLINE_S, FakeScheduler, until
from process_tools import checked_server

import pipeswitch as ps
from pipeswitch.base.config import ServerConfig
from pipeswitch.base.roles import ANYONE
from pipeswitch.client.connection import Connection
from pipeswitch.extras.curve import curve_listener
from pipeswitch.extras.curve.curve_bridge import ZmqLink
from pipeswitch.extras.curve.curve_keys import GATEWAY_KEY, KeyFolder, client_keys, make_pair
from pipeswitch.extras.curve.sockets import make_dealer
from pipeswitch.frontend.transport.listeners import open_listeners
from pipeswitch.gateway.serving.oip import InferRequest
from pipeswitch.gateway.serving.upstream import Upstream
from pipeswitch.scheduler.state.events import InferArrived, Publish
from pipeswitch.wire.frames import MAGIC, RequestHeader, WireTensor, decode_reply, encode_header

X = np.ones((1, 4), np.float32)


def own_address() -> str:
    """Return an address of this machine that other machines can reach, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # connecting a UDP socket sends nothing
        return str(probe.getsockname()[0])


BINDS = ["127.0.0.1", "[::1]", "0.0.0.0", "*"]
STATES = ["nothing", "a server key", "a server key and a client"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("auth", ["auto", "keys"])
@pytest.mark.parametrize("bind", BINDS)
def test_the_listener_opens_only_with_what_it_needs(
    bind: str, auth: str, state: str, tmp_path: Path
) -> None:
    folder = KeyFolder(tmp_path / "keys").open()
    if state != STATES[0]:
        folder.make_server()
    if state == STATES[2]:
        folder.admit("a", make_pair("a", tmp_path)[1])
    config = ServerConfig(
        listen=f"tcp://{bind}:0",
        auth=auth,
        name="t",
        keys_dir=str(folder.path),
        runtime_dir=str(tmp_path / "run"),
        state_dir=str(tmp_path),
    )
    needs_keys = auth == "keys" or bind in BINDS[2:]
    if not needs_keys or state != STATES[0]:
        listeners = open_listeners(config)
        assert listeners.tcp.needs_keys == needs_keys
        is_empty = needs_keys and state == STATES[1]  # the last key may have been revoked
        assert ("no client is admitted" in str(listeners.warnings)) == is_empty
        assert not listeners.ipc.needs_keys
        listeners.close()
    else:
        with pytest.raises(ps.ConfigError, match="needs keys of clients") as caught:
            open_listeners(config)
        assert f"pipeswitch keys --keys-dir {folder.path} server" in caught.value.hint
        assert ("other machines can reach it" in caught.value.message) == (bind in BINDS[2:])


def test_an_address_of_this_machines_own_needs_keys_too(tmp_path: Path) -> None:
    try:
        address = own_address()
    except OSError:
        pytest.skip("this machine has no address but loopback")
    config = ServerConfig(
        listen=f"tcp://{address}:0", runtime_dir=str(tmp_path / "r"), state_dir=str(tmp_path)
    )
    with pytest.raises(ps.ConfigError):
        open_listeners(config)


class Guarded:
    """A server that requires keys, and the keys of its clients."""

    def __init__(self, directory: Path, **server: Any) -> None:
        self.directory = directory
        self.folder = KeyFolder(directory / "keys").open()
        self.server_key = self.folder.make_server().public.decode()
        self.key = self.admit("a")
        self.fake = FakeScheduler(directory, auth="keys", **server)
        self.fake.announce("m")
        self.address = self.fake.listeners.tcp.address

    def admit(self, name: str) -> str:
        secret_file, public = make_pair(name, self.directory)
        self.folder.admit(name, public)
        return str(secret_file)

    def client(self, **options: Any) -> ps.Client:
        options = {"key": self.key, "server_key": self.server_key, **options}
        return ps.Client(options.pop("address", self.address), **options)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    rig = Guarded(tmp_path)
    yield rig
    rig.fake.close()


def test_keys_may_come_from_the_environment(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPESWITCH_KEY", guarded.key)
    monkeypatch.setenv("PIPESWITCH_SERVER_KEY", guarded.server_key)
    with ps.Client(guarded.address) as client:
        assert client.infer("m", X)["y"][0, 0] == 2.0
    with ps.Client(guarded.fake.listeners.ipc.address) as owner:
        assert owner.infer("m", X)["y"][0, 0] == 2.0


def test_a_request_says_who_asks_and_only_the_owner_names_another(guarded: Guarded) -> None:
    """Outside of a cluster, no client may name another caller, whatever the name of its key."""
    with (
        guarded.client(key=guarded.admit(GATEWAY_KEY)) as stranger,
        pytest.raises(ps.PermissionDenied),
    ):
        stranger._ask("infer", model="m", body={"tenant": "b"})
    with guarded.client() as client, ps.Client(guarded.fake.listeners.ipc.address) as owner:
        client.infer("m", X)
        owner.infer("m", X)
        with pytest.raises(ps.PermissionDenied):
            client._ask("infer", model="m", body={"tenant": "b"})
    asyncio.run(_ask_as_gateway(guarded.fake.listeners.ipc.address, "alice", ANYONE, ""))
    events = guarded.fake.wait_for(InferArrived, 5)
    assert [event.origin.caller for event in events] == ["a", "", "alice", ANYONE, ""]


async def _ask_as_gateway(address: str, *tenants: str) -> None:
    x = WireTensor(name="x", dtype="float32", shape=(1, 4), frame=0)
    request = InferRequest(id="", inputs=(x,), frames=[X.tobytes()])
    upstream = Upstream(address)
    try:
        for tenant in tenants:
            await upstream.infer("m", 0, request, tenant)
    finally:
        upstream.close()


def refused(guarded: Guarded, text: str, **options: Any) -> None:
    with guarded.client(timeout_s=60.0, **options) as client:  # so long that no timeout occurs
        with pytest.raises(ps.PermissionDenied, match=text) as caught:
            client.models()
        assert caught.value.hint
    assert guarded.fake.tcp.requests.counts.accepted == 0


def test_a_refusal_that_comes_before_the_hello_is_one_in_words_too(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wait until libzmq has given up a refused connection: its socket then accepts no messages."""
    secret_file, _ = make_pair("stranger", guarded.directory)
    attach = ZmqLink.attach

    def attach_when_refused(link: ZmqLink, poller: Any) -> None:
        attach(link, poller)
        until(lambda: not link.sock.poll(0, zmq.POLLOUT))
        link.sock.setsockopt(zmq.SNDTIMEO, 1000)  # otherwise a send would block for ever

    monkeypatch.setattr(ZmqLink, "attach", attach_when_refused)
    refused(guarded, "does not admit this client's key", key=str(secret_file))


def test_a_client_that_expects_another_server_says_so(guarded: Guarded) -> None:
    _, other = make_pair("other", guarded.directory)
    refused(guarded, "key is another one", server_key=other.decode())
    refused(guarded, "asks for a key", key=None, server_key=None)


def test_a_revoked_key_is_refused_and_its_connection_ends(guarded: Guarded) -> None:
    other_key = guarded.admit("b")
    with guarded.client() as client, guarded.client(key=other_key, timeout_s=60.0) as revoked:
        assert client.infer("m", X)["y"][0, 0] == 2.0  # two keys are admitted, so one will be left
        assert revoked.infer("m", X)["y"][0, 0] == 2.0
        guarded.folder.revoke("b")
        until(lambda: len(guarded.fake.tcp.sessions.clients) == 1)
        with pytest.raises(ps.PermissionDenied, match="does not admit"):
            revoked.infer("m", X)
        assert client.infer("m", X)["y"][0, 0] == 2.0


def test_a_key_admitted_later_needs_no_restart(guarded: Guarded) -> None:
    secret_file, public = make_pair("late", guarded.directory)
    refused(guarded, "does not admit this client's key", key=str(secret_file))
    guarded.folder.admit("late", public)
    with guarded.client(key=str(secret_file)) as client:
        assert client.infer("m", X)["y"][0, 0] == 2.0


def first_record(fake: FakeScheduler, subscribe: Callable[[], Any]) -> Any:
    """Subscribe, publish a record, and return the first record that arrives."""
    records = subscribe()
    fake.post(Publish(topic="switch.m", body={"n": 1}))
    try:
        return next(records, None)
    finally:
        records.close()


def test_events_need_an_admitted_key_too(guarded: Guarded) -> None:
    with guarded.client() as client:
        record = first_record(guarded.fake, lambda: client.events(timeout_s=DEADLINE_S))
        assert record == {"topic": "switch.m", "n": 1}

        connection = client._connection
        connection.another = lambda: Connection(connection.address, 2.0)  # a reader without a key
        with pytest.raises(ps.PermissionDenied, match="asks for a key"):
            client.events(timeout_s=0.5)


def test_a_revoked_readers_events_end(guarded: Guarded) -> None:
    other_key = guarded.admit("b")
    with guarded.client(key=other_key) as revoked:
        records = revoked.events("switch.")
        fake = guarded.fake
        fake.post(Publish(topic="switch.m", body={}))
        assert next(records) == {"topic": "switch.m"}
        guarded.folder.revoke("b")
        with pytest.raises(ps.PermissionDenied, match="does not admit"):
            next(records)
        until(lambda: not fake.tcp.sessions.readers.clients)


def raw_ask(sock: zmq.Socket[bytes], **fields: Any) -> Any:
    header = RequestHeader(**{"v": 1, "id": "1", **fields})
    sock.send_multipart([MAGIC, encode_header(header)])
    assert sock.poll(DEADLINE_S * 1000), fields
    return decode_reply(sock.recv_multipart())


@pytest.fixture
def dealer(guarded: Guarded) -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    """Yield a function that creates a bare ZeroMQ client with a key."""
    context: zmq.Context[Any] = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []

    def make(key: str, routing_id: bytes = b"") -> zmq.Socket[bytes]:
        keys = client_keys(key, guarded.server_key)
        sock = make_dealer(context, 1 << 30, keys)
        sock.setsockopt(zmq.RCVHWM, 1)
        if routing_id:
            sock.setsockopt(zmq.ROUTING_ID, routing_id)
        sock.connect(guarded.address)
        sockets.append(sock)
        return sock

    yield make
    for sock in sockets:
        sock.close(0)
    context.term()


def test_a_session_belongs_to_the_key_that_made_it(guarded: Guarded, dealer: Any) -> None:
    victim, thief = dealer(guarded.key), dealer(guarded.admit("thief"))
    session = raw_ask(victim, op="hello").session
    for op in ("stats", "models"):
        assert raw_ask(thief, op=op, session=session).error.data["reason"] == "unknown_session"
    assert raw_ask(thief, op="hello").session != session
    assert raw_ask(victim, op="stats", session=session).status == "ok"


@pytest.mark.parametrize(
    "case", ["routing id", "no magic", "many parts", "endless parts", "naming"]
)
def test_who_lies_to_the_door_is_hung_up_and_the_others_are_served(
    guarded: Guarded, dealer: Any, case: str
) -> None:
    with guarded.client() as client:
        assert client.infer("m", X)["y"][0, 0] == 2.0
        liar = dealer(guarded.admit("liar"), b"chosen" if case == "routing id" else b"")
        name = RequestHeader(v=1, op="caller", id="1", body={"tenant": "a", "roles": ["code"]})
        liar.send_multipart(
            {
                "routing id": [MAGIC, b"x"],
                "no magic": [b"GET", b"x"],
                "many parts": [MAGIC, *[b"x"] * 80],
                "endless parts": [MAGIC, *[b"x"] * 3000],
                "naming": [MAGIC, encode_header(name)],
            }[case]
        )
        if case == "naming":
            assert liar.poll(DEADLINE_S * 1000)
            assert decode_reply(liar.recv_multipart()).error.type == "PermissionDenied"
            assert raw_ask(liar, op="hello").body["roles"] == client.about()["roles"]
        else:
            until(lambda: guarded.fake.door.connections.hung_up)
        assert client.infer("m", X)["y"][0, 0] == 2.0


def test_nobody_comes_in_when_the_authenticator_is_gone(guarded: Guarded) -> None:
    guarded.fake.door._authenticator.stop()
    with guarded.client(timeout_s=1.0) as client, pytest.raises(ps.PipeSwitchError):
        client.models()
    assert not guarded.fake.tcp.sessions.clients


def test_a_client_that_does_not_read_holds_up_its_own_answers_alone(
    guarded: Guarded, dealer: Any
) -> None:
    deaf = dealer(guarded.key)
    session = raw_ask(deaf, op="hello").session
    header = {"v": 1, "op": "trace", "session": session}
    for number in range(20):  # an answer has 2 MB
        deaf.send_multipart([MAGIC, encode_header(RequestHeader(**header, id=str(number)))])
    with guarded.client() as client:
        for _ in range(20):
            assert client.infer("m", X)["y"][0, 0] == 2.0
    limit_ms = DEADLINE_S * 1000
    heard = {decode_reply(deaf.recv_multipart()).id for _ in range(20) if deaf.poll(limit_ms)}
    assert heard == {str(number) for number in range(20)}


# ---- memory in libzmq -------------------------------------------------------------------------


class Pair:
    """Both ends of a TCP connection; ``caller`` is the listener's view of the connection."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
            self.theirs = socket.create_connection(("127.0.0.1", self.port))
            self.ours, _ = listener.accept()
        number = self.ours.fileno()
        self.caller = curve_listener.Caller(number, curve_listener.inode_of(number, self.port))

    def send(self, size: int) -> None:
        self.theirs.sendall(bytes(size))
        while size:
            size -= len(self.ours.recv(size))


@pytest.fixture
def pair() -> Iterator[Pair]:
    rig = Pair()
    with rig.theirs, rig.ours:
        yield rig


def test_what_the_kernel_received_and_is_no_message_yet_is_held(pair: Pair) -> None:
    pair.send(curve_listener.wire_bytes([bytes(100_000)]))
    assert curve_listener.received_bytes(pair.ours.fileno()) == curve_listener.wire_bytes(
        [bytes(100_000)]
    )
    assert pair.caller.held_bytes(0.0) > 100_000
    pair.caller.taken_bytes += curve_listener.wire_bytes([bytes(100_000)])
    assert pair.caller.held_bytes(0.0) == 0
    pair.send(1_000_000)  # a day's pings have as many bytes
    assert pair.caller.held_bytes(86_400.0) == 0


def test_who_is_hung_up_reads_the_end(pair: Pair) -> None:
    pair.caller.hang_up()
    assert pair.theirs.recv(1) == b""


def test_a_number_that_means_something_else_now_is_left_alone(pair: Pair) -> None:
    number = pair.ours.fileno()
    left, right = socket.socketpair()
    os.dup2(left.fileno(), number)  # the number now means another socket
    assert curve_listener.inode_of(number, pair.port) == 0
    assert pair.caller.held_bytes(0.0) == -1
    pair.caller.hang_up()
    assert right.send(b"x") == 1
    assert left.recv(1) == b"x"
    left.close()
    right.close()


def test_a_number_that_is_no_socket_leaves_no_descriptor(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    wake = os.eventfd(0)
    try:
        before = set(descriptors())
        for number in (folder, wake, 10_000):
            assert curve_listener.inode_of(number, 5555) == 0
            assert curve_listener.received_bytes(number) == 0
        assert set(descriptors()) <= before
    finally:
        os.close(folder)
        os.close(wake)


def test_a_thousand_refusals_leave_nothing(guarded: Guarded) -> None:
    before = set(descriptors())
    address = guarded.address.removeprefix("tcp://").split(":")
    for _ in range(100):
        socks = [socket.create_connection((address[0], int(address[1]))) for _ in range(10)]
        for sock in socks:
            sock.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48))
            sock.close()
    with guarded.client() as client:
        assert client.infer("m", X)["y"][0, 0] == 2.0
    until(lambda: len(guarded.fake.tcp.sessions.connections) == 0)
    try:
        until(lambda: len(set(descriptors()) - before) <= 4)
    except AssertionError:
        raise AssertionError(f"still open: {set(descriptors()) - before}") from None


def descriptors() -> Iterator[tuple[str, str]]:
    """Yield number and target of each descriptor of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield name, os.readlink(f"/proc/self/fd/{name}")


def test_a_door_that_dies_is_opened_again_and_clients_go_on(tmp_path: Path) -> None:
    """Kill the gateway of a server without HTTP, whose gateway only checks keys."""
    folder = KeyFolder(tmp_path / "keys").open()
    options = {"server_key": folder.make_server().public.decode()}
    options["key"], public = make_pair("a", tmp_path)
    folder.admit("a", public, ["operate"])
    with (
        checked_server(args=("--auth", "keys", "--keys-dir", str(folder.path))) as checked,
        checked.running.client(tcp=True, **options) as client,
    ):
        assert not client.about()["is_owner"]
        assert "libzmq" not in Path("/proc", str(checked.pid), "maps").read_text()
        lock = checked.running.state_dir / "gateway.lock"
        first = int(lock.read_text())
        os.kill(first, signal.SIGKILL)
        assert client.models() == []
        assert int(lock.read_text()) != first


def test_a_client_waits_while_its_port_listens_and_nobody_answers_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restart the gateway slowly: the client must wait, because the server keeps the port."""
    guarded, looks = Guarded(tmp_path), 0
    look = Connection._poll

    def counted(connection: Connection) -> None:
        nonlocal looks
        looks += 1
        look(connection)

    monkeypatch.setattr(Connection, "_poll", counted)
    with guarded.client() as client:
        assert client.infer("m", X)["y"][0, 0] == 2.0
        connection = client._connection
        port = int(guarded.address.rpartition(":")[2])
        guarded.fake.close()
        with socket.create_server(("127.0.0.1", port)):  # the kernel accepts the connection
            connection._timeout_s = 0.3
            future = client.submit("m", X)
            until(lambda: looks >= 3 or future.done())
            assert not future.done()
            connection._timeout_s = DEADLINE_S
            until(lambda: connection._poll_at_s > time.monotonic() + 1.0)
        fake = FakeScheduler(tmp_path, auth="keys", listen=guarded.address)
        try:
            fake.announce("m")
            assert future.result(DEADLINE_S)["y"][0, 0] == 2.0
        finally:
            fake.close()
