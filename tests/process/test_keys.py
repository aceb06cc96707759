"""Who comes in where keys are asked for: real sockets, real handshakes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from frontend_rig import DEADLINE_S, FakeScheduler, until

import pipeswitch as ps
from pipeswitch.client.links import ZmqLink
from pipeswitch.config import ServerConfig
from pipeswitch.frontend.listeners import open_listeners
from pipeswitch.gateway.oip import InferRequest
from pipeswitch.gateway.upstream import Upstream
from pipeswitch.roles import ANYONE
from pipeswitch.scheduler.events import InferArrived, Publish
from pipeswitch.wire.frames import (
    MAGIC,
    RequestHeader,
    WireTensor,
    decode_reply,
    encode_header,
)
from pipeswitch.wire.keys import KeyFolder, client_keys, make_pair
from pipeswitch.wire.sockets import Caps, make_dealer

X = np.ones((1, 4), np.float32)


def own_address() -> str:
    """An address of this machine that others can reach, where it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
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
        listen=f"tcp://{bind}:0", auth=auth, name="t", keys_dir=str(folder.path),
        runtime_dir=str(tmp_path / "run"), state_dir=str(tmp_path),
    )  # fmt: skip
    needs_keys = auth == "keys" or bind in BINDS[2:]
    context: zmq.Context[Any] = zmq.Context()
    try:
        if not needs_keys or state == STATES[2]:
            listeners = open_listeners(context, config)
            assert (listeners.tcp.allowed is not None) == needs_keys
            assert listeners.ipc.allowed is None
            listeners.close()
        else:
            with pytest.raises(ps.ConfigError, match="needs clients' keys") as caught:
                open_listeners(context, config)
            assert f"pipeswitch keys --keys-dir {folder.path} server" in caught.value.hint
            assert ("other machines can reach it" in caught.value.message) == (bind in BINDS[2:])
    finally:
        context.term()


def test_an_address_of_this_machines_own_needs_keys_too(tmp_path: Path) -> None:
    try:
        address = own_address()
    except OSError:
        pytest.skip("this machine has no address but loopback")
    config = ServerConfig(
        listen=f"tcp://{address}:0", runtime_dir=str(tmp_path / "r"), state_dir=str(tmp_path)
    )
    context: zmq.Context[Any] = zmq.Context()
    with pytest.raises(ps.ConfigError, match="the server has no key"):
        open_listeners(context, config)
    context.term()


class Guarded:
    """A server that asks for keys, and the keys of its clients."""

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
    found = Guarded(tmp_path)
    yield found
    found.fake.close()


def test_an_admitted_client_is_served(guarded: Guarded) -> None:
    with guarded.client() as client:
        assert client.infer("m", X)["y"][0, 0] == 2.0
        assert client.stats()["refused_keys"] == 0


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
    with guarded.client() as client, ps.Client(guarded.fake.listeners.ipc.address) as owner:
        client.infer("m", X)
        owner.infer("m", X)
        with pytest.raises(ps.PermissionDenied, match="only the server's owner"):
            client._ask("infer", model="m", body={"tenant": "b"})
    asyncio.run(_ask_as_gateway(guarded.fake.listeners.ipc.address, "alice", ANYONE, ""))
    asked = guarded.fake.wait_for(InferArrived, 5)
    assert [event.caller for event in asked] == ["a", "", "alice", ANYONE, ""]


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
    with guarded.client(timeout_s=60.0, **options) as client:  # not because time ran out
        with pytest.raises(ps.PermissionDenied, match=text) as caught:
            client.models()
        assert caught.value.hint
    assert guarded.fake.tcp.requests.counts.accepted == 0


def test_an_unknown_key_is_refused_in_words(guarded: Guarded) -> None:
    secret_file, _ = make_pair("stranger", guarded.directory)
    refused(guarded, "does not admit this client's key", key=str(secret_file))
    with guarded.client() as client:
        assert client.stats()["refused_keys"] >= 1


def test_a_refusal_that_comes_before_the_hello_is_one_in_words_too(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq gives a refused connection up: from then on the socket takes nothing more."""
    secret_file, _ = make_pair("stranger", guarded.directory)
    attach = ZmqLink.attach

    def attach_when_refused(link: ZmqLink, poller: Any) -> None:
        attach(link, poller)
        until(lambda: not link.sock.poll(0, zmq.POLLOUT))
        link.sock.setsockopt(zmq.SNDTIMEO, 1000)  # where a send would block for ever

    monkeypatch.setattr(ZmqLink, "attach", attach_when_refused)
    refused(guarded, "does not admit this client's key", key=str(secret_file))


def test_no_key_is_refused_in_words(guarded: Guarded) -> None:
    refused(guarded, "asks for a key", key=None, server_key=None)


def test_a_client_that_expects_another_server_says_so(guarded: Guarded) -> None:
    _, other = make_pair("other", guarded.directory)
    refused(guarded, "key is not the one given", server_key=other.decode())


def test_a_revoked_key_is_refused_and_its_connection_ends(guarded: Guarded) -> None:
    other_key = guarded.admit("b")
    with guarded.client() as client, guarded.client(key=other_key, timeout_s=60.0) as revoked:
        assert client.infer("m", X)["y"][0, 0] == 2.0  # both are in, so one is left at the end
        assert revoked.infer("m", X)["y"][0, 0] == 2.0
        guarded.folder.revoke("b")
        until(lambda: len(guarded.fake.tcp._clients) == 1)
        with pytest.raises(ps.PermissionDenied, match="does not admit"):
            revoked.infer("m", X)
        assert client.infer("m", X)["y"][0, 0] == 2.0


def test_a_key_admitted_later_needs_no_restart(guarded: Guarded) -> None:
    secret_file, public = make_pair("late", guarded.directory)
    refused(guarded, "does not admit", key=str(secret_file))
    guarded.folder.admit("late", public)
    with guarded.client(key=str(secret_file)) as client:
        assert client.infer("m", X)["y"][0, 0] == 2.0


def test_the_owners_listener_asks_for_no_key(guarded: Guarded) -> None:
    with ps.Client(guarded.fake.listeners.ipc.address) as owner:
        assert owner.infer("m", X)["y"][0, 0] == 2.0
        record = first_record(guarded.fake, lambda: owner.events("switch.", timeout_s=DEADLINE_S))
    assert record == {"topic": "switch.m", "n": 1}


def first_record(fake: FakeScheduler, subscribe: Callable[[], Any]) -> Any:
    """What a subscription gets, once it is made."""
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

        client._connection.keys = None  # a reader without a key
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
        assert not fake.tcp._readers


def test_a_session_belongs_to_the_key_that_made_it(guarded: Guarded) -> None:
    """Who learns another's session, and takes the routing id, still has another key."""
    context: zmq.Context[Any] = zmq.Context()
    caps = Caps(max_message_bytes=1 << 20)
    keys = client_keys(guarded.key, guarded.server_key)
    thief_keys = client_keys(guarded.admit("thief"), guarded.server_key)

    def ask(sock: zmq.Socket[bytes], **fields: Any) -> Any:
        tensors = [X.tobytes()] if fields.get("inputs") else []
        header = RequestHeader(**{"v": 1, "id": "1", **fields})
        sock.send_multipart([MAGIC, encode_header(header), *tensors])
        assert sock.poll(DEADLINE_S * 1000), fields
        return decode_reply(sock.recv_multipart())

    victim = make_dealer(context, caps, keys)
    victim.connect(guarded.address)
    session = ask(victim, op="hello").session
    routing_id = guarded.fake.tcp._clients.all()[0].routing_id
    victim.close(0)
    until(lambda: not guarded.fake.tcp._clients.all())
    guarded.fake.tcp._clients._by_session[session] = _ghost(guarded, routing_id, session)
    thief = make_dealer(context, caps, thief_keys)
    thief.setsockopt(zmq.ROUTING_ID, routing_id)
    thief.connect(guarded.address)
    x = WireTensor(name="x", dtype="float32", shape=(1, 4), frame=0)
    reply = ask(thief, op="infer", model="m", session=session, inputs=(x,))
    assert reply.error.data["reason"] == "unknown_session"
    assert not [e for e in guarded.fake.seen if isinstance(e, InferArrived)]
    del guarded.fake.tcp._clients._by_session[session]
    thief.close(0)
    context.term()


def _ghost(guarded: Guarded, routing_id: bytes, session: str) -> Any:
    """The victim's session as it is while its connection's end has not been noticed."""
    from pipeswitch.frontend.clients import Client

    public = guarded.folder.clients()["a"].decode()
    return Client(
        listener=guarded.fake.listeners.tcp, routing_id=routing_id, session=session, fd=0, inode=0,
        standing=guarded.fake.listeners.tcp.standing(public), user_id=public,
    )  # fmt: skip


def test_nobody_comes_in_when_the_authenticator_is_gone(guarded: Guarded) -> None:
    authenticator = guarded.fake.listeners._authenticator
    authenticator.stop()
    with guarded.client(timeout_s=1.0) as client, pytest.raises(ps.PipeSwitchError):
        client.models()
    assert not guarded.fake.tcp._clients.all()


def test_every_interface_with_keys_serves_with_its_events(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, listen="tcp://0.0.0.0:0")
    try:
        port = guarded.address.rpartition(":")[2]
        with guarded.client(address=f"tcp://127.0.0.1:{port}") as client:
            assert client.infer("m", X)["y"][0, 0] == 2.0
            record = first_record(guarded.fake, lambda: client.events(timeout_s=DEADLINE_S))
            assert record == {"topic": "switch.m", "n": 1}
    finally:
        guarded.fake.close()


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
    until(lambda: len(guarded.fake.tcp._intake.connections) == 0)
    try:
        until(lambda: len(set(descriptors()) - before) <= 4)
    except AssertionError:
        raise AssertionError(f"still open: {set(descriptors()) - before}") from None


def descriptors() -> Iterator[tuple[str, str]]:
    """This process's, and what each one is."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield name, os.readlink(f"/proc/self/fd/{name}")
