"""Fuzz target: bytes that a client sends through a socket to the real frontend.

If an input's first frame is the magic, the other frames are sent as a message, after a table of
their sizes. Otherwise all frames are sent as raw bytes, as a stranger might do. Then every accepted
request is answered, so that each input finds the frontend in the same state. If the frontend still
has a resource in use, that is an escape.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import tempfile
import weakref
from collections import deque
from pathlib import Path
from typing import Any

from pipeswitch.base.config import Config, ServerConfig
from pipeswitch.base.errors import ServerUnavailable
from pipeswitch.base.roles import ANYONE, OWNER, Principal, Role
from pipeswitch.base.worker_thread import Failed, Work, WorkerThread
from pipeswitch.frontend.frontend import Frontend
from pipeswitch.frontend.transport.connection_manager import ClientConnection, ClientSegments
from pipeswitch.frontend.transport.listeners import Listener
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.ipc.messages.base import ModelName
from pipeswitch.scheduler.state.events import Event, InferArrived, ModelAvailable, Reply
from pipeswitch.wire.frames import (
    INLINE,
    MAGIC,
    RequestHeader,
    WireTensor,
    decode_reply,
    encode_header,
    pack_table,
)
from pipeswitch.wire.stream import Stream

from .target import MSGPACK_FRAMES, Target, join_frames, split_frames
from .worlds import manifest_of

POOL_BYTES = 1 << 20
SESSION = "S" * 32  # placeholder, in an input, for the id of the connection's session
WAITING = "waiting"  # id of a request that has no answer yet
FAMILIAR = bytes([0x57])  # as an input's first frame, it selects the owner's listener
CLOCK_MS = 1e6


def _listener(*, is_owner: bool) -> Listener:
    sock = socket.create_server(("127.0.0.1", 0))
    principal = OWNER if is_owner else Principal(tenant=ANYONE, roles=frozenset(Role))
    return Listener(sock=sock, address="", principal=principal)


class _Connection:
    """Both ends of a connection that has a session."""

    def __init__(self, gate: _Gate, listener: Listener) -> None:
        self._gate = gate
        self.theirs = socket.create_connection(listener.sock.getsockname())
        ours, _ = listener.sock.accept()
        limit = ServerConfig().max_message_bytes
        self._peer = ClientConnection(ours, listener.principal, limit, gate.sessions.peers.shares)
        gate.sessions.peers.all.add(self._peer)
        if not self._peer.is_owners:
            gate.sessions.connections.add(self._peer, CLOCK_MS / 1000)
        self.client = gate.sessions.greet(self._peer)

    def __enter__(self) -> _Connection:
        return self

    def hear(self) -> None:
        """Read everything that has arrived."""
        is_heard = False
        while not is_heard:
            self._gate.sessions.peers.read(self._peer)
            is_heard = self._peer.is_closed or not (
                self._peer.needs_poll or select.select([self._peer], [], [], 0)[0]
            )

    def read_replies(self) -> None:
        """Decode all replies; raise if one does not follow the protocol."""
        stream = Stream(self.theirs, 1 << 30)
        with contextlib.suppress(EOFError):
            while messages := stream.receive(16):
                for message in messages:
                    if message.parts:
                        decode_reply(message.parts[:2])

    def __exit__(self, *_: object) -> None:
        self._gate.sessions.drop(self.client, "the next one begins anew")
        self._gate.sessions.peers.part(self._peer)
        self.theirs.close()


class _IdleLane(WorkerThread):
    """Worker thread that does no work; ``_clean_up`` later reports all its work as failed."""

    def __init__(self) -> None:
        super().__init__("idle")
        self.failures: deque[Failed] = deque()

    def put(self, work: Work, failed: Failed = lambda _: None) -> None:
        self.failures.append(failed)


class _Gate(Frontend):
    """The frontend without threads, files and sockets."""

    def __init__(self) -> None:
        state = Path(tempfile.gettempdir()) / "pipeswitch-fuzz-nowhere"
        config = Config(
            server=ServerConfig(
                state_dir=str(state), runtime_dir=str(state), allow_code=("allowed.*",)
            )
        )
        self.taken: list[Event] = []
        descriptor = sealed_memfd("fuzz-pool", POOL_BYTES)
        super().__init__(config, descriptor, self.taken.append, now_ms=lambda: CLOCK_MS)
        os.close(descriptor)
        self.uploads._writer = self._lane = _IdleLane()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.owner, self.stranger = _listener(is_owner=True), _listener(is_owner=False)
        self.sessions.peers.shares = ClientSegments(0)
        for name in ("m", "resnet-50"):
            model = ModelName(name)
            announced = ModelAvailable(model=model, manifest=manifest_of(), priority=1)
            self.perform(announced)
        for listener in (self.owner, self.stranger):
            weakref.finalize(self, listener.sock.close)

    def hear(self, frames: list[bytes]) -> list[Event]:
        """Send frames through a new connection; return the events that the frontend has created."""
        is_owner = frames[:1] == [FAMILIAR]
        with _Connection(self, self.owner if is_owner else self.stranger) as known:
            header = RequestHeader(v=1, op="infer", id=WAITING, model="m")
            self.requests.accept(known.client, header)
            session = known.client.session.encode()
            frames = frames[1:] if is_owner else frames
            parts = [frame.replace(SESSION.encode(), session) for frame in frames]
            if parts[:1] == [MAGIC]:
                parts[0] = pack_table([(len(part), INLINE) for part in parts[1:]])
            known.theirs.sendall(b"".join(parts))
            known.hear()
            events, self.taken[:] = list(self.taken), []
            self._clean_up()
            known.read_replies()
        if not self.pool.is_empty or self.requests.counts.in_flight:
            raise AssertionError("a request that was answered still holds something")
        return events

    def _clean_up(self) -> None:
        """Fail all queued work, and answer every open request with an error."""
        while self._lane.failures:
            self._lane.failures.popleft()(ServerUnavailable("it is only a test"))
        while self._calls:
            self._calls.popleft()()
        for token in self.requests.tokens():
            self._answer(Reply(token=token, error=ServerUnavailable("it is only a test")))
        os.eventfd_write(self._wake, 1)
        os.eventfd_read(self._wake)


@functools.cache
def _gate() -> _Gate:
    return _Gate()


def run(data: bytes) -> None:
    try:
        events = _gate().hear(split_frames(data))
    except BaseException:
        _gate.cache_clear()  # an escape may leave state that affects the next input
        raise
    for event in events:
        if isinstance(event, InferArrived):
            _check_slabs(event)


def _check_slabs(event: InferArrived) -> None:
    """Check that a request's tensors are inside the pool, and that its inputs do not overlap."""
    position = 0
    for tensor in sorted(event.run.inputs, key=lambda tensor: tensor.offset_bytes):
        if tensor.offset_bytes < position or tensor.size_bytes < 0:
            raise AssertionError("two inputs overlap")
        position = tensor.offset_bytes + tensor.size_bytes
    if max(position, event.run.reply_offset_bytes + event.run.reply_bytes) > POOL_BYTES:
        raise AssertionError("a slab lies outside of the pool")


def _message(*tensors: bytes, is_owner: bool = False, **fields: Any) -> bytes:
    header = RequestHeader(**{"v": 1, "id": "1", "session": SESSION, **fields})
    parts = [MAGIC, encode_header(header), *tensors]
    return join_frames([FAMILIAR, *parts] if is_owner else parts)


def _bytes(*messages: bytes) -> bytes:
    """Return an input that sends these messages, one after the other, as raw bytes."""
    whole = b""
    for message in messages:
        _, *parts = split_frames(message)
        whole += b"".join([pack_table([(len(part), INLINE) for part in parts]), *parts])
    return join_frames([whole[at : at + 0xFFFF] for at in range(0, len(whole), 0xFFFF)])


def seeds() -> list[bytes]:
    """Return a valid message for each verb, then raw bytes; some of these are valid messages."""
    x = WireTensor(name="x", dtype="float32", shape=(2, 4), frame=0)
    mask = WireTensor(name="mask", dtype="bool", shape=(2, 2), frame=1)
    infer: dict[str, Any] = {"op": "infer", "model": "m", "inputs": (x, mask)}
    digest = "0" * 64
    register = {
        "source": "torchvision:resnet18",
        "weights": "random:1",
        "max_batch": 8,
        "inputs": {"x": [[1, 3, 224, 224], "float32"]},
        "pin": True,
        "priority": "high",
    }
    train = {"name": "job", "entry": "allowed.module:main", "args": ["--lr", "1"]}
    plain = [
        _message(op=op, model="m")
        for op in (
            "hello",
            "prefetch",
            "unregister",
            "load",
            "unload",
            "models",
            "show",
            "ps",
            "jobs",
            "stats",
            "plan",
            "ping",
        )
    ]
    return [
        _message(bytes(32), bytes(4), **infer, deadline_ms=100.0, priority="high"),
        *plain,
        _message(op="cancel", body={"id": WAITING}),
        _message(b"chunk", op="put", body={"digest": digest, "size_bytes": 5, "offset_bytes": 0}),
        _message(op="register", model="new", body=register),
        _message(op="register", model="new", body={"source": "put:" + digest}, is_owner=True),
        _message(op="register", model="new", body={"source": "a.b:c"}, is_owner=True),
        _message(op="train", body=train),
        _message(op="train", body={**train, "entry": "/no/such/file.py"}, is_owner=True),
        *(
            _message(op="job", body={"name": "job", "action": action})
            for action in ("show", "pause", "resume", "cancel", "wait", "logs")
        ),
        _message(op="trace", body={"seconds": 1.0}),
        _message(op="events", body={"topics": ["job."]}),
        _message(op="caller", body={"tenant": "a", "roles": ["infer"]}, is_owner=True),
        _message(op="caller", session="", body={"tenant": "a", "roles": ["operate"]}),
        _message(op="regroup", model="m", body={"plan": [0, 2], "cold": False, "trial": 3}),
        _message(op="ping", body={"deep": True}),
        _message(op="stop", body={"drain_ms": 10.0}),
        _message(op="infer", v=2, model="m"),
        _bytes(_message(bytes(32), bytes(4), **infer), _message(op="models"), _message(op="ping")),
        _bytes(_message(op="ps"))[:60],
        join_frames([pack_table([(8, INLINE), (1 << 40, INLINE)])]),
        join_frames([pack_table([(8, INLINE), (8, 0)]), bytes(8)]),
        join_frames([pack_table([])]),
        join_frames([FAMILIAR, pack_table([]), pack_table([(1, INLINE)], 1)]),
        join_frames([b"\xff" + bytes(8) + b"\x7f\x03"]),
    ]


TARGET = Target(
    name="request",
    run=run,
    seeds=seeds,
    codec=MSGPACK_FRAMES,
    words=(
        "PSW1",
        SESSION,
        WAITING,
        "m",
        "infer",
        "put",
        "job",
        "register",
        "float32",
        "bool",
        "bundle",
        "safetensors",
        "put:" + "0" * 64,
        "/etc/passwd",
        "a.bundle",
        "high",
        "offset_bytes",
        "logs",
        "x",
        "mask",
    ),
)
