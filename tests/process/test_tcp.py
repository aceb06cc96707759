"""The frontend with real sockets and the SDK, and a fake scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from frontend_rig import DEADLINE_S, FakeScheduler, assert_balanced, until

import pipeswitch as ps
from pipeswitch.base.config import Config
from pipeswitch.base.worker_thread import WorkerThread
from pipeswitch.client.connection import Connection
from pipeswitch.frontend.frontend import Frontend
from pipeswitch.frontend.transport.connection_limits import SESSIONLESS_BYTES
from pipeswitch.ipc.messages.base import SlabTensor
from pipeswitch.programs.interface.layout import aligned
from pipeswitch.programs.spec import BuildSpec
from pipeswitch.scheduler.state import events as ev
from pipeswitch.wire import frames
from pipeswitch.wire.slabs import SLAB_ALIGN_BYTES
from tests.raw_peer import RawPeer, ask, raw_peer


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeScheduler]:
    scheduler = FakeScheduler(tmp_path_factory.mktemp("s"))
    yield scheduler
    scheduler.close()
    assert_balanced(scheduler.tcp)
    scheduler.tcp.pool.check()


@pytest.fixture(params=["tcp", "ipc"])
def client(request: pytest.FixtureRequest, server: FakeScheduler) -> Iterator[ps.Client]:
    with ps.Client(getattr(server.listeners, request.param).address) as c:
        yield c


# ---- inference ---------------------------------------------------------------------------------


def test_a_call_before_the_clients_thread_runs_shares_its_connection(
    server: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_run = threading.Event()
    run = Connection._run

    def run_later(self: Connection) -> None:
        may_run.wait()
        run(self)

    monkeypatch.setattr(Connection, "_run", run_later)
    with ps.Client(server.listeners.tcp.address) as client:
        try:
            client.stats()
        finally:
            may_run.set()
        first, second = (client._connection.request("ping") for _ in range(2))  # sent by the thread
        assert first.result(DEADLINE_S)
        assert second.result(DEADLINE_S)
        assert len(server.tcp.sessions.clients) == 1


def test_an_answer_comes_back_with_its_bill(server: FakeScheduler, client: ps.Client) -> None:
    server.announce("m")
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    result = client.infer("m", x)
    assert np.array_equal(result["y"], x * 2)
    assert result.timing.switch_ms == 1.5
    assert result.timing.resident is True


def test_a_warm_request_is_so_many_calls_of_the_loops_thread(server: FakeScheduler) -> None:
    """Count the loop thread's calls for a request: at most 64, half as many as they once were."""
    calls = Counter[str]()

    def note(frame: Any, what: str, _: Any) -> None:
        if what == "call" and "/pipeswitch/" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    def profile(noted: Any) -> None:
        done = threading.Event()
        server.tcp.call_soon(lambda: (sys.setprofile(noted), done.set()))  # type: ignore[func-returns-value]
        done.wait(DEADLINE_S)

    server.announce("m")
    x = np.ones((1, 4), dtype=np.float32)
    with ps.Client(server.listeners.ipc.address) as client:
        client.infer("m", x)
        profile(note)
        client.infer("m", x)
        profile(None)
    assert "Inference.infer" in calls
    assert calls.total() <= 64, calls.most_common()


def test_large_payloads_leave_the_pool_empty(server: FakeScheduler, client: ps.Client) -> None:
    server.announce("wide", width=1 << 16)
    x = np.random.default_rng(0).random((1, 1 << 16), dtype=np.float32)
    for _ in range(10):  # 256 KiB each
        assert np.array_equal(client.infer("wide", x=x)["y"], x * 2)
    until(lambda: server.tcp.pool.is_empty)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (np.zeros((1, 5), np.float32), 'm input "x" expects float32[1..8,4], got float32[1,5]'),
        (np.zeros((9, 4), np.float32), 'm input "x" expects float32[1..8,4], got float32[9,4]'),
        (np.zeros((1, 4), np.float64), 'm input "x" expects float32[1..8,4], got float64[1,4]'),
        ({"z": np.zeros((1, 4), np.float32)}, 'm has no input "z"; its inputs are x'),
        ([np.zeros((1, 4), np.float32)] * 2, 'm takes 1 inputs ("x"), got 2'),
    ],
)
def test_a_misfit_is_refused_with_the_signature(
    server: FakeScheduler, client: ps.Client, inputs: Any, text: str
) -> None:
    server.announce("m")
    with pytest.raises(ps.InvalidInput) as caught:
        client.infer("m", inputs)
    assert caught.value.message == text
    assert server.tcp.requests.counts.rejected == 1


def test_an_unknown_model_is_answered_with_the_nearest(
    server: FakeScheduler, client: ps.Client
) -> None:
    server.announce("resnet152")
    with pytest.raises(ps.ModelNotFound) as caught:
        client.infer("resnet125", np.zeros((1, 4), np.float32))
    assert caught.value.message == 'no model "resnet125"; did you mean "resnet152"?'
    assert caught.value.data["nearest"] == "resnet152"


def test_a_full_pool_is_queue_full_with_numbers(server: FakeScheduler, client: ps.Client) -> None:
    server.announce("wide", width=1 << 18)  # 1 MiB in and out; one client may use 6 MiB
    server.is_holding = True
    x = np.zeros((1, 1 << 18), np.float32)
    futures = [client.submit("wide", x) for _ in range(3)]
    with pytest.raises(ps.QueueFull) as caught:
        client.infer("wide", x)
    assert caught.value.data["requested_bytes"] == 2 << 20
    for event in server.wait_for(ev.InferArrived, 3):
        server.finish(event)
    assert all(future.result(DEADLINE_S) for future in futures)


def test_a_cancelled_future_takes_the_request_back(
    server: FakeScheduler, client: ps.Client
) -> None:
    server.announce("m")
    server.is_holding = True
    future = client.submit("m", np.zeros((1, 4), np.float32))
    (arrived,) = server.wait_for(ev.InferArrived)
    assert future.cancel()
    (request,) = server.wait_for(ev.CancelRequest)
    assert request.token == arrived.token
    until(lambda: server.tcp.requests.counts.in_flight == 0)


class HeldCopier(WorkerThread):
    """Copier that waits until the test allows a copy."""

    def __init__(self) -> None:
        super().__init__("held")
        self.held: list[Callable[[], None]] = []

    def put(self, *work: Any) -> None:
        self.held.append(lambda: WorkerThread.put(self, *work))


@pytest.fixture
def held_copier(server: FakeScheduler) -> Iterator[HeldCopier]:
    """Let the test decide when the server copies a large payload, as ``LARGE`` of 2 MiB is."""
    server.announce("wide", width=1 << 18)
    server.tcp.pool.lend = lambda *_: None  # as if the pool had little room
    copier, before = HeldCopier(), server.tcp.inference.copier
    server.tcp.inference.copier = copier
    yield copier
    server.tcp.inference.copier = before
    copier.shutdown()


LARGE = np.zeros((2, 1 << 18), np.float32)


def test_a_large_payload_announces_its_model_before_it_is_copied(
    server: FakeScheduler, client: ps.Client, held_copier: HeldCopier
) -> None:
    future = client.submit("wide", LARGE)
    (hint,) = server.wait_for(ev.PrefetchHint)
    assert hint.model == "wide"
    assert not [event for event in server.seen if isinstance(event, ev.InferArrived)]
    until(lambda: held_copier.held)[0]()
    assert np.array_equal(future.result(DEADLINE_S)["y"], LARGE * 2)


def test_a_request_taken_back_while_it_is_copied_is_answered_once(
    server: FakeScheduler, client: ps.Client, held_copier: HeldCopier
) -> None:
    future = client.submit("wide", LARGE)
    until(lambda: held_copier.held)
    assert future.cancel()
    client.models()  # answered after the earlier cancellation
    held_copier.held[0]()
    until(lambda: server.tcp.requests.counts.in_flight == 0)
    assert server.tcp.requests.counts.error == 1
    assert not [
        event for event in server.seen if isinstance(event, ev.InferArrived | ev.CancelRequest)
    ]


def test_a_client_that_leaves_while_its_payload_is_copied_frees_its_room(
    server: FakeScheduler, held_copier: HeldCopier
) -> None:
    with ps.Client(server.listeners.tcp.address) as client:
        client.submit("wide", LARGE)
        until(lambda: held_copier.held)
    until(lambda: len(server.tcp.sessions.clients) == 0)
    held_copier.held[0]()
    until(lambda: server.tcp.requests.counts.undeliverable == 1)
    until(lambda: server.tcp.pool.is_empty)


WIDTH = (300 << 10) + 3  # 1.2 MiB and 12 bytes: received into the pool, not into whole pages


def test_a_large_payload_is_received_into_the_pool(server: FakeScheduler) -> None:
    server.announce("wide", width=WIDTH)
    server.pool[:] = 255  # what earlier requests have left
    server.tcp.pool.fill = None  # nothing is copied
    x = np.random.default_rng(0).random((1, WIDTH), np.float32)
    with ps.Client(server.listeners.tcp.address) as client:
        server.is_holding = True
        future = client.submit("wide", x)
        (event,) = server.wait_for(ev.InferArrived)
        assert server.wait_for(ev.PrefetchHint)  # came when the tensors began to arrive
        (placed,) = event.run.inputs
        end = placed.offset_bytes + placed.size_bytes
        assert not server.pool[end : aligned(end, SLAB_ALIGN_BYTES)].any()
        server.finish(event)
        assert np.array_equal(future.result(DEADLINE_S)["y"], x * 2)
    until(lambda: server.tcp.pool.is_empty)


@pytest.mark.parametrize(
    "what", ["leaves", "shape", "put", "model", "sequence", "version", "order", "no session"]
)
def test_pool_memory_of_what_is_no_request_is_freed(server: FakeScheduler, what: str) -> None:
    """A message that is cut off, or is refused when it has arrived, keeps no slab."""
    server.announce("wide", width=WIDTH)
    lent, lend = [], server.tcp.pool.lend
    server.tcp.pool.lend = lambda *all: lent.append(lend(*all)) or lent[-1]
    with raw_peer(server.listeners.tcp.address) as sock:
        shape = (2, WIDTH) if what == "shape" else (1, WIDTH)
        header: dict[str, Any] = {
            "v": frames.VERSION,
            "id": "1",
            "op": "put" if what == "put" else "infer",
            "model": "narrow" if what == "model" else "wide",
            "session": "" if what == "no session" else ask(sock, op="hello").session,
            "inputs": (
                frames.WireTensor(
                    name="z" if what == "order" else "x", dtype="float32", shape=shape, frame=0
                ),
            ),
            "body": {what: "s"} if what in ("sequence", "version") else {},
        }
        head = frames.encode_header(frames.RequestHeader(**header))
        size = WIDTH * 4
        table = frames.pack_table([(len(head), frames.INLINE), (size, frames.INLINE)])
        sock.sock.send(table + head)
        if what == "leaves":
            sock.sock.send(bytes(size // 2))
            until(lambda: lent)
        elif what != "no session":
            sock.sock.sendall(bytes(size))
            assert frames.decode_reply(sock.hear()).error
    assert bool(lent) == (what in ("leaves", "shape"))
    lent.clear()
    until(lambda: server.tcp.pool.is_empty)


def test_an_output_outside_of_its_slab_is_not_sent(
    server: FakeScheduler, client: ps.Client
) -> None:
    server.announce("m")
    server.is_holding = True
    future = client.submit("m", np.zeros((1, 4), np.float32))
    (event,) = server.wait_for(ev.InferArrived)
    outside = SlabTensor(
        name="y",
        dtype="float32",
        shape=(1, 4),
        offset_bytes=event.run.reply_offset_bytes + (1 << 20),
        size_bytes=16,
    )
    server.post(ev.Reply(token=event.token, outputs=(outside,)))
    with pytest.raises(ps.TaskFailed):
        future.result(DEADLINE_S)


# ---- clients that leave ------------------------------------------------------------------------


def test_a_client_that_leaves_has_its_requests_taken_back(server: FakeScheduler) -> None:
    server.announce("m")
    server.is_holding = True
    with raw_peer(server.listeners.tcp.address) as sock:
        session = ask(sock, op="hello").session
        x = frames.WireTensor(name="x", dtype="float32", shape=(1, 4), frame=0)
        header = frames.RequestHeader(
            v=1, id="2", op="infer", model="m", session=session, inputs=(x,)
        )
        sock.send(frames.encode_header(header), bytes(16))
        server.wait_for(ev.InferArrived)
    server.wait_for(ev.CancelRequest)
    until(lambda: server.tcp.requests.counts.undeliverable == 1)
    assert server.tcp.requests.counts.in_flight == 0


def test_a_session_is_of_its_connection_alone(server: FakeScheduler) -> None:
    with raw_peer(server.listeners.tcp.address) as sock:
        session = ask(sock, op="hello").session
        with raw_peer(server.listeners.tcp.address) as thief:
            assert ask(thief, op="hello").session != session
            reply = ask(thief, op="stats", session=session)
        assert reply.error.data["reason"] == "unknown_session"
        assert ask(sock, op="stats", session=session).status == "ok"


def test_a_reader_that_never_reads_is_dropped(
    server: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeswitch.frontend.transport.send_queue.SLOW_CLIENT_MS", 300.0)
    server.announce("wide", width=1 << 18)
    x = frames.WireTensor(name="x", dtype="float32", shape=(1, 1 << 18), frame=0)
    numbers = itertools.count()

    def send_more(sock: RawPeer, session: str) -> bool:
        header = frames.RequestHeader(
            v=1, id=str(next(numbers)), op="infer", model="wide", session=session, inputs=(x,)
        )
        with contextlib.suppress(OSError):
            if sock.stream.flush():
                sock.send(frames.encode_header(header), bytes(1 << 20))
        return len(server.tcp.sessions.clients) == 0

    with raw_peer(server.listeners.tcp.address, receive_bytes=4096) as sock:
        session = ask(sock, op="hello", id="h").session
        until(lambda: send_more(sock, session))
    with ps.Client(server.listeners.tcp.address) as other:
        assert other.infer("wide", np.ones((1, 1 << 18), np.float32))["y"][0, 0] == 2.0
    until(lambda: server.tcp.requests.counts.in_flight == 0)
    assert server.tcp.requests.counts.undeliverable > 0


# ---- bytes outside the protocol -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"v": 9, "op": "x"}, "version 9"),
        ({"v": 1, "op": "x"}, "no verb"),
        ({"v": 1, "op": "ps", "inputs": [{"name": "x"}]}, "malformed"),
        ({"v": 1, "op": "ps"}, "send hello"),
    ],
)
def test_nonsense_with_an_id_gets_one_typed_error(
    server: FakeScheduler, fields: dict[str, Any], text: str
) -> None:
    with raw_peer(server.listeners.tcp.address) as sock:
        sock.send(msgspec.msgpack.encode({"id": "1", **fields}))
        reply = frames.decode_reply(sock.hear())
    assert (reply.id, reply.status) == ("1", "error")
    assert text in reply.error.message


def test_nonsense_without_an_id_is_counted_and_the_server_goes_on(server: FakeScheduler) -> None:
    with raw_peer(server.listeners.tcp.address) as sock:
        for parts in ([b""], [b"\xc1"], [b"\x80", b""], [b""] * 20):
            sock.send(*parts)
        assert ask(sock, op="ping").body["device"] == "cpu"
    assert server.tcp.sessions.complaints.count == 4


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE",  # a greeting of ZeroMQ
        b"\x01\x00\x05\x01PSW1\x03\x00ab",  # the protocol's first version
        b"PSW1" + b"\xff" * 12,
        frames.pack_table([(frames.MAX_HEADER_BYTES + 1, frames.INLINE)]),
        frames.pack_table(
            [(10, frames.INLINE), (SESSIONLESS_BYTES, frames.INLINE)]
        ),  # this size needs a session
        frames.pack_table([(10, frames.INLINE), (10, 0)]),
        frames.pack_table([]),  # asks to share memory, which only the owner's client may
    ],
)
def test_what_is_no_message_ends_its_connection_and_no_other(
    server: FakeScheduler, client: ps.Client, data: bytes
) -> None:
    server.announce("m")
    with raw_peer(server.listeners.tcp.address) as sock:
        sock.sock.send(data)
        with pytest.raises(EOFError):
            sock.hear()
    x = np.ones((1, 4), np.float32)
    assert np.array_equal(client.infer("m", x)["y"], x * 2)
    assert server.tcp.sessions.complaints.count == 1


SHAPES = [
    (-1, 4),
    (1 << 62, 1 << 62),
    ((1 << 63) - 1,),
    (1,) * 40,
    (0, 4),
    (2, 4),
    (1, 3),
    (),
    (1, 4, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_hostile_shapes_are_refused(server: FakeScheduler, shape: tuple[int, ...]) -> None:
    server.announce("m")
    with raw_peer(server.listeners.tcp.address) as sock:
        session = ask(sock, op="hello").session
        x = frames.WireTensor(name="x", dtype="float32", shape=shape, frame=0)
        reply = ask(sock, bytes(16), op="infer", model="m", session=session, inputs=(x,))
    assert reply.error.type == "InvalidInput"


# ---- other verbs -------------------------------------------------------------------------------


def test_a_large_listing_arrives_whole(client: ps.Client) -> None:
    assert len(client.trace()["traceEvents"]) == 20_000


def test_registration_reports_progress_and_ends(server: FakeScheduler, client: ps.Client) -> None:
    stages: list[tuple[str, float]] = []
    client.register(
        "net",
        "torchvision:resnet18",
        weights="random:0",
        inputs={"x": ((1, 4), "float32")},
        progress=lambda stage, fraction: stages.append((stage, fraction)),
    )
    assert stages == [("export", 0.5)]
    (request,) = server.wait_for(ev.RegisterModelRequest)
    spec = msgspec.msgpack.decode(request.spec, type=BuildSpec)
    assert spec.inputs == {"x": ((1, 4), "float32")}
    assert not spec.allow_module_mode


def test_an_upload_arrives_whole_and_is_found_by_its_digest(
    server: FakeScheduler, client: ps.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.tcp.uploads, "unpin", lambda names: None)  # would remove the file
    size = (9 << 20) + 17
    head = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    data = len(head).to_bytes(8, "little") + head + os.urandom(size)
    (tmp_path / "net.bundle").write_bytes(data)
    client.register("net", tmp_path / "net.bundle")
    (request,) = server.wait_for(ev.RegisterModelRequest)
    stored = Path(msgspec.msgpack.decode(request.spec, type=BuildSpec).source)
    assert stored.read_bytes() == data
    assert stored.parent == Path(server.config.server.state_dir, "uploads")
    client.register("net", tmp_path / "net.bundle")  # the server has the file, so nothing is sent


def test_code_comes_through_the_owners_listener_only(server: FakeScheduler, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    with ps.Client(server.listeners.tcp.address) as stranger:
        with pytest.raises(ps.PermissionDenied) as caught:
            stranger.register("m", "pkg.models:make")
        assert "--allow-code 'pkg.models'" in caught.value.hint
        with pytest.raises(ps.PermissionDenied):
            stranger.train(script)
        with pytest.raises(ps.PermissionDenied):
            stranger._ask("register", model="m", body={"source": "/etc/passwd.bundle"})
    with ps.Client(server.listeners.ipc.address) as owner:
        owner.register("m", "pkg.models:make")
        assert owner.train(script, args=["--lr", "1"]).name == "train"
    (request,) = server.wait_for(ev.TrainRequest)
    assert request.spec.entry == str(script)


def test_logs_are_paged_at_characters(server: FakeScheduler, client: ps.Client) -> None:
    logs = Path(server.config.server.state_dir, "logs")
    logs.mkdir(parents=True)
    text = "schön ✔ 🚀\n" * 40_000
    (logs / "job-j.log").write_text(text, "utf-8")
    assert "".join(client.task("j").logs()) == text
    assert "".join(client.task("j").logs(follow=True)) == text
    with pytest.raises(ps.ModelNotFound):
        list(client.task("absent").logs())


def first_event(server: FakeScheduler, client: ps.Client) -> dict[str, Any]:
    """Publish two topics; return the first event of the topic ``switch.``."""
    events = client.events("switch.", timeout_s=DEADLINE_S)
    server.post(ev.Publish(topic="job.step", body={"n": 1}))
    server.post(ev.Publish(topic="switch.m", body={"n": 2}))
    event = next(events)
    events.close()  # type: ignore[attr-defined]
    return event


def test_events_go_on_with_the_next_server_and_end_with_the_client(tmp_path: Path) -> None:
    first = FakeScheduler(tmp_path)
    client = ps.Client(first.listeners.ipc.address, timeout_s=DEADLINE_S)
    events = client.events("switch.")
    first.close()
    second = FakeScheduler(tmp_path)
    try:
        until(lambda: second.tcp.sessions.readers.clients)
        second.post(ev.Publish(topic="switch.m", body={"n": 2}))
        assert next(events) == {"topic": "switch.m", "n": 2}
        client.close()
        assert next(events, None) is None
        until(lambda: not second.tcp.sessions.readers.clients)
    finally:
        second.close()


def test_who_does_not_read_events_misses_some_and_holds_up_nothing(server: FakeScheduler) -> None:
    with raw_peer(server.listeners.tcp.address, receive_bytes=4096) as deaf:
        session = ask(deaf, op="hello").session
        assert ask(deaf, op="events", id="e", session=session).more
        for number in range(40):
            server.post(ev.Publish(topic="job.t", body={"text": "x" * 200_000, "n": number}))
        (client,) = server.tcp.sessions.readers.clients
        assert client.unsent_bytes < 2 << 20
        server.post(ev.Publish(topic="job.t", body={"n": "missed"}))
        names = [frames.decode_reply(deaf.hear()).body["n"]]
        while names[-1] != "last":
            server.post(ev.Publish(topic="job.t", body={"n": "last"}))
            names.append(frames.decode_reply(deaf.hear()).body["n"])
        assert 4 < len(set(names)) < 40
        assert "missed" not in names
        header = frames.RequestHeader(v=1, id="c", op="cancel", session=session, body={"id": "e"})
        deaf.send(frames.encode_header(header))
        until(lambda: not frames.decode_reply(deaf.hear()).more)
        assert frames.decode_reply(deaf.hear()).body == {"found": True}
        server.post(ev.Publish(topic="job.t", body={}))
        assert ask(deaf, op="ping").id == "1"


def test_a_subscription_that_is_never_looked_at_is_closed(client: ps.Client) -> None:
    client.events("switch.")  # if a socket stayed open, a warning would fail the test


def test_events_reach_subscribers_of_their_topic(server: FakeScheduler, client: ps.Client) -> None:
    assert first_event(server, client) == {"topic": "switch.m", "n": 2}


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_an_ipv6_address_is_reached_as_it_is_written_and_its_events_too(tmp_path: Path) -> None:
    scheduler = FakeScheduler(tmp_path, listen="tcp://[::1]:0")
    try:
        scheduler.announce("m")
        address = scheduler.listeners.tcp.address
        for written in (address, address.removeprefix("tcp://")):
            with ps.Client(written) as client:
                assert client.address == address
                x = np.ones((1, 4), np.float32)
                assert np.array_equal(client.infer("m", x)["y"], 2 * x)
                assert first_event(scheduler, client) == {"topic": "switch.m", "n": 2}
    finally:
        scheduler.close()


def test_the_async_client_has_the_same_answers(server: FakeScheduler) -> None:
    server.announce("m")

    async def scenario() -> None:
        async with ps.AsyncClient(server.listeners.tcp.address) as c:
            x = np.ones((1, 4), np.float32)
            results = await asyncio.gather(*(c.infer("m", x) for _ in range(10)))
            assert all(np.array_equal(r["y"], x * 2) for r in results)
            assert (await c.stats())["inference"]["ok"] == 10

    asyncio.run(scenario())


# ---- start and stop ----------------------------------------------------------------------------


def test_nobody_at_the_address_is_server_unavailable() -> None:
    with (
        ps.Client("tcp://127.0.0.1:1", timeout_s=0.2) as c,
        pytest.raises(ps.ServerUnavailable) as caught,
    ):
        c.ps()
    assert caught.value.hint == "start one: pipeswitch serve --listen tcp://127.0.0.1:1"


def test_a_server_that_never_answers_may_need_a_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with (
            ps.Client(address, timeout_s=0.5) as c,
            pytest.raises(ps.ServerUnavailable, match="if it requires keys") as caught,
        ):
            c.ps()
    assert "PIPESWITCH_KEY" in caught.value.hint


def test_a_port_in_use_is_named(server: FakeScheduler, tmp_path: Path) -> None:
    used = msgspec.structs.replace(
        server.config.server,
        listen=server.listeners.tcp.address,
        runtime_dir=str(tmp_path / "other"),
        state_dir=str(tmp_path),
    )
    frontend = Frontend(Config(server=used), server.pool_descriptor, lambda event: None)
    with pytest.raises(ps.PipeSwitchError, match="is in use") as caught:
        frontend.open()
    assert server.listeners.tcp.address in caught.value.message
    assert caught.value.exit_code == 1


def test_a_folder_others_may_enter_is_refused(server: FakeScheduler, tmp_path: Path) -> None:
    loose = tmp_path / "loose"
    loose.mkdir(mode=0o755)
    config = msgspec.structs.replace(server.config.server, runtime_dir=str(loose))
    with pytest.raises(ps.ConfigError, match="0700"):
        Frontend(Config(server=config), server.pool_descriptor, lambda event: None).open()


def test_waiting_requests_are_answered_when_the_server_stops(tmp_path: Path) -> None:
    scheduler = FakeScheduler(tmp_path)
    scheduler.announce("m")
    scheduler.is_holding = True
    with ps.Client(scheduler.listeners.tcp.address, timeout_s=1.0) as c:
        future = c.submit("m", np.zeros((1, 4), np.float32))
        scheduler.wait_for(ev.InferArrived)
        scheduler.close()
        with pytest.raises(ps.ServerUnavailable):
            future.result(DEADLINE_S)
    assert_balanced(scheduler.tcp)
