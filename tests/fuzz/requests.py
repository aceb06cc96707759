"""What a client can send: the frames of one message through the real frontend.

Only libzmq is not there: a listener's router keeps nothing, and a message's frames say what libzmq
would say of their connection. Every request that is accepted is answered at once afterwards, so
that each input finds the frontend as the first one did; what it then still holds is an escape.
"""

from __future__ import annotations

import functools
import os
import queue
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeswitch.config import Config, ServerConfig
from pipeswitch.errors import ServerUnavailable
from pipeswitch.frontend.clients import Client
from pipeswitch.frontend.frontend import Frontend
from pipeswitch.frontend.intake import ZmqOrigin
from pipeswitch.frontend.listeners import Listener
from pipeswitch.frontend.local import Shares
from pipeswitch.ipc.board import sealed_memfd
from pipeswitch.ipc.messages import ModelName
from pipeswitch.roles import Role
from pipeswitch.scheduler.events import Announce, Answer, Event, InferArrived
from pipeswitch.wire.frames import (
    MAGIC,
    RequestHeader,
    WireTensor,
    decode_reply,
    encode_header,
)

from .target import MSGPACK_FRAMES, Target, join_frames, split_frames
from .worlds import manifest_of

POOL_BYTES = 1 << 20
ROUTE = b"\0\1\2\3\4"  # as libzmq makes them
SESSION = "S" * 32  # stands in an input for the session that the frontend made up
WAITING = "waiting"  # the id of a request that has no answer yet
FAMILIAR = bytes([0x57])  # a first frame of this one byte: through the owner's listener
CLOCK_MS = 1e6


class _Frame:
    """A received frame, as far as the frontend looks at one."""

    def __init__(self, data: bytes) -> None:
        self.buffer = memoryview(data)

    def __len__(self) -> int:
        return len(self.buffer)

    def get(self, option: Any) -> Any:
        return 0x7FFF_FFFF  # a descriptor that is no connection


class _Router:
    """A socket whose peer reads everything. What it sent last is kept, to be read back."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, frame: Any, flags: int = 0, copy: bool = True) -> None:
        self.sent.append(bytes(frame))

    def send_multipart(self, frames: Any, flags: int = 0, copy: bool = True,
                       track: bool = False) -> None:  # fmt: skip
        self.sent += [bytes(frame) for frame in frames]


def _listener(*, is_owner: bool) -> Listener:
    address = "ipc:///owner" if is_owner else "tcp://127.0.0.1:5555"
    router: Any = _Router()
    return Listener(
        router=router, monitor=router, publisher=router, readers=router, address=address,
        events_address=f"{address}6", is_owner=is_owner, roles=frozenset(Role),
    )  # fmt: skip


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
        self._stirred = set()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.owner, self.stranger = _listener(is_owner=True), _listener(is_owner=False)
        listeners: Any = type(
            "Listeners", (), {"tcp": self.stranger, "all": (self.stranger, self.owner)}
        )
        self._listeners = listeners
        door: Any = SimpleNamespace(shares=Shares(0))
        self._door = door
        for name in ("m", "resnet-50"):
            model = ModelName(name)
            announced = Announce(model=model, manifest=manifest_of(), priority=1)
            self.perform(announced)
        self._known: dict[Listener, Client] = {}

    def hear(self, frames: list[bytes]) -> list[Event]:
        """One message; the events that came of it."""
        is_owner = frames[:1] == [FAMILIAR]
        listener = self.owner if is_owner else self.stranger
        client = self._client(listener)
        parts = [
            frame.replace(SESSION.encode(), client.session.encode())
            for frame in (frames[1:] if is_owner else frames)
        ]
        received: list[Any] = [_Frame(ROUTE), *map(_Frame, parts)]
        self._hear_message(listener, received)
        events, self.taken[:] = list(self.taken), []
        self._clean_up(listener)
        return events

    def _client(self, listener: Listener) -> Client:
        """A client that has said hello, with one request that waits."""
        client = self._known.get(listener)
        if client is None or client.is_gone:
            frame: Any = _Frame(ROUTE)
            origin = ZmqOrigin(listener=listener, frame=frame, routing_id=ROUTE)
            client, _ = self._clients.greet(origin)
            self._known[listener] = client
        if WAITING not in client.requests:
            self.requests.accept(client, RequestHeader(v=1, op="infer", id=WAITING, model="m"))
        return client

    def _clean_up(self, listener: Listener) -> None:
        """Answer everything, then see that nothing is held."""
        while True:
            try:
                work: Any = self._uploads._writer._queue.get_nowait()
            except queue.Empty:
                break
            (chunk,) = work.args  # or the session of a client that left
            if not isinstance(chunk, str):
                self._uploads._queued -= 1
                chunk.reply({}, None)
        while self._calls:
            self._calls.popleft()()
        for token in self.requests.tokens():
            self._answer(Answer(token=token, error=ServerUnavailable("it is only a test")))
        router: Any = listener.router
        sent, router.sent = router.sent, []
        for at, frame in enumerate(sent):
            if frame == MAGIC:  # what is answered is of the protocol itself
                decode_reply(sent[at : at + 2])
        for client in self._clients.all():
            if client is not self._known[client.listener]:
                self._drop(client, "said hello")
        if not self._pool.is_empty or self.requests.counts.in_flight:
            raise AssertionError("a request that was answered still holds something")
        os.eventfd_write(self._wake, 1)
        os.eventfd_read(self._wake)


@functools.cache
def _gate() -> _Gate:
    return _Gate()


def run(data: bytes) -> None:
    try:
        events = _gate().hear(split_frames(data))
    except BaseException:
        _gate.cache_clear()  # what escaped may have left something to the next input
        raise
    for event in events:
        if isinstance(event, InferArrived):
            _check_slabs(event)


def _check_slabs(event: InferArrived) -> None:
    """What the worker will read lies in the pool, and not over each other."""
    position = 0
    for tensor in sorted(event.inputs, key=lambda tensor: tensor.offset_bytes):
        if tensor.offset_bytes < position or tensor.size_bytes < 0:
            raise AssertionError("two inputs overlap")
        position = tensor.offset_bytes + tensor.size_bytes
    if max(position, event.reply_offset_bytes + event.reply_bytes) > POOL_BYTES:
        raise AssertionError("a slab lies outside of the pool")


def _message(*tensors: bytes, is_owner: bool = False, **fields: Any) -> bytes:
    header = RequestHeader(**{"v": 1, "id": "1", "session": SESSION, **fields})
    parts = [MAGIC, encode_header(header), *tensors]
    return join_frames([FAMILIAR, *parts] if is_owner else parts)


def seeds() -> list[bytes]:
    """Each verb once as it should be."""
    x = WireTensor(name="x", dtype="float32", shape=(2, 4), frame=0)
    mask = WireTensor(name="mask", dtype="bool", shape=(2, 2), frame=1)
    infer: dict[str, Any] = {"op": "infer", "model": "m", "inputs": (x, mask)}
    digest = "0" * 64
    register = {"source": "torchvision:resnet18", "weights": "random:1", "max_batch": 8,
                "inputs": {"x": [[1, 3, 224, 224], "float32"]}, "pin": True,
                "priority": "high"}  # fmt: skip
    train = {"name": "job", "entry": "allowed.module:main", "args": ["--lr", "1"]}
    plain = [_message(op=op, model="m") for op in
             ("hello", "prefetch", "unregister", "load", "unload", "models", "show", "ps", "jobs",
              "stats", "plan", "ping")]  # fmt: skip
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
        *(_message(op="job", body={"name": "job", "action": action})
          for action in ("show", "pause", "resume", "cancel", "wait", "logs")),
        _message(op="trace", body={"seconds": 1.0}),
        _message(op="profile", model="m", body={"batches": [1, 2]}),
        _message(op="ping", body={"deep": True}),
        _message(op="stop", body={"drain_ms": 10.0}),
        _message(op="infer", v=2, model="m"),
    ]  # fmt: skip


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
