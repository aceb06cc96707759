"""Fuzz target: bytes that a peer of the gateway sends on one HTTP connection, piece by piece.

The gateway is complete (llhttp, the connection with its limits, the paths, the callers, the
protocols' bodies), but without a socket and without a server. Each frame of an input arrives as one
piece. Then the peer waits for ever, or hangs up. Escapes are an answer of 500, a line that the peer
has added to an answer's HTTP head, an exceeded limit, and a resource that is in use at the end.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import re
from collections import Counter, defaultdict
from typing import Any

from pipeswitch.base.errors import InvalidInput, ModelNotFound
from pipeswitch.base.roles import Principal, Role
from pipeswitch.extras.page.event_stream import EventLog
from pipeswitch.gateway.doors import DoorContext, open_doors
from pipeswitch.gateway.http import http_server as http
from pipeswitch.gateway.http.http_parser import Head, Limits
from pipeswitch.gateway.http.offload import OffloadThread
from pipeswitch.gateway.router import Router
from pipeswitch.gateway.serving.auth import Authenticator
from pipeswitch.gateway.serving.oip import InferRequest, Output
from pipeswitch.gateway.serving.service import Service

from .target import Codec, Target, join_frames, split_frames

PEER = "127.0.0.1"
TOKEN = "the-token-of-an-operator"
LIMITS = Limits(head_bytes=1500, body_bytes=1200, waiting_bytes=2400)
TURNS = 6  # iterations of the event loop after each piece, which are enough for a stream to end
MAX_TURNS = 400  # iterations for which the peer waits for a connection that has stopped reading
LATE_S = 1e6  # a time that is longer than all limits
HANGS_UP = b"\0"  # a frame of this byte closes the peer's connection
HEAD_LINE = re.compile(rb"HTTP/1\.1 \d{3} [ -~]+|[\w-]+: [\t -~\x80-\xff]*")
ROW: dict[str, Any] = {
    "name": "m",
    "version": 1,
    "versions": [1],
    "state": "ready",
    "batch": [1, 8],
    "batching": None,
    "inputs": {"x": [["batch", 4], "float32"]},
    "outputs": {"y": [["batch", 4], "float32"]},
    "current": True,
    "share": 0,
}


class Upstream:
    """Server with one model, which answers with its inputs."""

    async def infer(
        self, model: str, version: int, request: InferRequest, tenant: str, address: str, trace: str
    ) -> tuple[list[Output], dict[str, Any]]:
        self._know(model)
        outputs = [
            Output(name=one.name, dtype=one.dtype, shape=one.shape, data=request.frames[one.frame])
            for one in request.inputs
        ]
        return outputs, {"total_ms": 1.0, "compute_ms": 0.5, "version": version or 1}

    async def show(self, model: str, version: int = 0) -> dict[str, Any]:
        self._know(model)
        return ROW

    async def ask(self, op: str, model: str = "", **_: Any) -> dict[str, Any]:
        if op == "generation":
            self._know(model)
            raise InvalidInput("it generates no text")
        if op == "stats":
            names = ("dispatches", "device_s", "tenant_s", "sequences_by_model")
            return defaultdict(int, {"inference": Counter[str](), **{name: {} for name in names}})
        return {"models": [ROW], "jobs": [], "rows": [], "ready": True, "trace": {}, "model": model}

    async def job(self, name: str, action: str, **_: Any) -> dict[str, Any]:
        job = {"name": name, "state": "done"}
        return {"job": job, "text": "", "end_bytes": 0, "offset_bytes": 0}

    async def upload(self, data: memoryview, kind: str, tenant: str) -> str:
        return f"put:{kind}"

    async def follow(self, take: Any) -> None: ...

    def _know(self, model: str) -> None:
        if model != "m":
            raise ModelNotFound(f'no model "{model[:80]}"')


class Wire(asyncio.Transport):
    """Transport that collects the written bytes in a list."""

    def __init__(self, peer: str) -> None:
        super().__init__({"peername": (peer, 1)})
        self.written: list[bytes] = []
        self.is_reading, self.is_closed, self.has_ended = True, False, False
        self.unread = 0
        self.protocol: http.HttpConnection | None = None

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.written.append(bytes(data))

    @property
    def sent(self) -> bytes:
        return b"".join(self.written)

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_ended = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.unread

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            assert self.protocol is not None
            self.protocol.connection_lost(None)


class _Gate:
    """Gateway that handles all inputs, each on its own connection."""

    def __init__(self) -> None:
        upstream: Any = Upstream()
        self.loop = asyncio.new_event_loop()
        atexit.register(self.loop.close)
        self.feed = EventLog()
        operator = Principal(tenant="o", roles=frozenset(Role))
        callers = Authenticator(
            roles=[Role.INFER, Role.URGENT],
            tokens={TOKEN: operator},
            needs_token=False,
            hosts=frozenset({PEER}),
        )
        self.service = Service(upstream)
        context = DoorContext(service=self.service, upstream=upstream, aside=OffloadThread())
        self._router = Router(callers, open_doors(context))
        self.server = http.HttpServer(self._admit, LIMITS, refuse=self._router.refuse)
        self.statuses: list[int] = []
        self.escaped: list[str] = []

    def _admit(self, head: Head) -> http.Work | http.Response:
        work = self._router(head)
        if isinstance(work, http.Response):
            return self._checked(head, work)

        async def run(body: Any) -> http.Response:
            return self._checked(
                head, await http.answered(work, body, head.path, self._router.refuse)
            )

        return run

    def _checked(self, head: Head, answer: http.Response) -> http.Response:
        self.statuses.append(answer.status)
        if answer.status >= 400:
            body = json.loads(b"".join(answer.parts))
            if f"{head.path}/".startswith("/v1/"):
                body = body["error"] if set(body) == {"error"} else {}
                keys = {"message", "type", "param", "code"}
            else:
                keys = {"error", "code", "hint", *({"limit"} & set(body))}
            if set(body) != keys:
                self.escaped.append(f"{head.method} {head.path}: {body}")
        return answer

    async def hear(self, frames: list[bytes]) -> list[bytes]:
        """Feed frames to a new connection until it ends; return the bytes that it wrote."""
        self.statuses.clear()
        wire, connection = Wire(PEER), self.server()
        wire.protocol = connection
        connection.connection_made(wire)
        for frame in frames:
            if frame == HANGS_UP:
                wire.abort()
                break
            await self._feed(connection, wire, frame)
        for _ in range(3):  # time limits of a late head or body, of an unread answer, of lingering
            if not wire.is_closed:
                connection.look(connection.parser.since_s + LATE_S)
                await _turns(TURNS)
        if not wire.is_closed and connection._task is None:
            self.escaped.append("a connection that does nothing stays")
        wire.abort()
        await _turns(TURNS)
        self._check(wire.written)
        return wire.written

    async def _feed(self, connection: http.HttpConnection, wire: Wire, frame: bytes) -> None:
        rest = memoryview(frame)
        while len(rest) and not wire.is_closed:
            for _ in range(MAX_TURNS):
                if wire.is_reading or wire.is_closed:
                    break
                await asyncio.sleep(0)
            if not wire.is_reading or wire.is_closed:
                return  # the gateway reads no more from this connection
            buffer = connection.get_buffer(-1)
            size = min(len(buffer), len(rest))
            buffer[:size] = rest[:size]
            connection.buffer_updated(size)
            rest = rest[size:]
            byte_counts = connection.parser.held_bytes, self.server.shared.waiting.held
            if byte_counts[0] > LIMITS.body_bytes or byte_counts[1] > LIMITS.waiting_bytes:
                self.escaped.append(f"it holds {byte_counts} bytes")
            await _turns(TURNS)

    def _check(self, written: list[bytes]) -> None:
        heads = [
            data.partition(b"\r\n\r\n")[0] for data in written if data.startswith(b"HTTP/1.1 ")
        ]
        for head in heads:
            for line in head.split(b"\r\n"):
                if not HEAD_LINE.fullmatch(line):
                    self.escaped.append(f"a line of a head: {line!r}")
            if head.startswith(b"HTTP/1.1 500"):
                self.escaped.append("an answer of 500")
        byte_counts = self.server.unfinished_bytes, self.server.shared.waiting.held
        if byte_counts != (0, 0) or self.server.connections or self.feed._readers:
            self.escaped.append(f"it still holds {byte_counts} bytes, or a place")
        tasks = asyncio.all_tasks(self.loop) - {asyncio.current_task(self.loop)}
        if tasks:
            self.escaped.append(f"tasks that go on: {tasks}")
        if self.escaped:
            raise AssertionError("; ".join(self.escaped))


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@functools.cache
def _gate() -> _Gate:
    return _Gate()


def run(data: bytes) -> None:
    gate = _gate()
    gate.escaped.clear()
    try:
        gate.loop.run_until_complete(gate.hear(split_frames(data)))
    except BaseException:
        _gate.cache_clear()  # an escape may leave state that affects the next input
        raise


def request(line: str, body: bytes = b"", *headers: str, token: str = "") -> bytes:
    lines = [line + " HTTP/1.1", f"Host: {PEER}:8000", *headers]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def _chunked(line: str, *chunks: bytes) -> bytes:
    head = request(line, b"", "Transfer-Encoding: chunked")
    return head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


def seeds() -> list[bytes]:
    """Return valid inputs, which have each kind of path, body and framing."""
    x = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2.5, -3, 1e9]}
    ask = {"id": "7", "inputs": [x], "parameters": {"priority": 1, "timeout": 10_000_000}}
    body = json.dumps(ask).encode()
    raw = {
        "inputs": [{**x, "parameters": {"binary_data_size": 16}}],
        "outputs": [{"name": "x", "parameters": {"binary_data": True}}],
    }
    raw["inputs"][0].pop("data")
    head = json.dumps(raw).encode()
    length = f"Inference-Header-Content-Length: {len(head)}"
    infer = "POST /v2/models/m/infer"
    source = b'{"source": "torchvision:resnet18", "weights": "random:1", "max_batch": 8}'
    gets = (
        "",
        "/health/live",
        "/health/ready",
        "/models",
        "/models/stats",
        "/models/m",
        "/models/m/ready",
        "/models/m/config",
        "/models/m/versions/1/stats",
        "/no/such",
    )
    return [
        join_frames([request(infer, body)] * 3),
        join_frames([request(infer, head + bytes(16), length)]),
        join_frames([request(infer, bytes(16), "Inference-Header-Content-Length: 0")]),
        join_frames([_chunked(infer, body[:30], body[30:])]),
        join_frames([request(infer, body), request(infer, body)[:70], request(infer, body)[70:]]),
        join_frames([request("GET /v2") * 3, HANGS_UP]),
        join_frames([request(f"GET /v2{path}") for path in gets]),
        join_frames([request("POST /v2/repository/index", b'{"ready": true}')]),
        join_frames([request("POST /v2/repository/models/m/load", b"{}", token=TOKEN)]),
        join_frames([request("HEAD /ui"), request("GET /metrics", token=TOKEN)]),
        join_frames(
            [request("POST /api/models/n", source, "Content-Type: application/json", token=TOKEN)]
        ),
        join_frames(
            [
                request(
                    "POST /api/models/n?pin=true",
                    b"bundle",
                    "Content-Type: application/octet-stream",
                    token=TOKEN,
                )
            ]
        ),
        join_frames([request("GET /api/jobs/j/logs?follow=true&offset=-5", token=TOKEN)]),
        join_frames(
            [request("GET /api/events?topics=job.", b"", "Last-Event-ID: a-1", token=TOKEN)]
        ),
        join_frames([request("DELETE /api/models/m", token=TOKEN), request("GET /api/ps")]),
        join_frames([request("POST /v2/models/m/infer", body, "Expect: 100-continue")]),
        join_frames(
            [
                request(
                    "POST /v1/chat/completions",
                    b'{"model": "m", "messages": [{"role": '
                    b'"user", "content": [{"text": "a"}]}], "stop": ["b"], "n": 1}',
                )
            ]
        ),
        join_frames(
            [
                request("POST /v1/completions", b'{"model": "m", "prompt": [[1, 2]]}'),
                request("POST /v2/models/m/generate", b'{"text_input": "a"}'),
            ]
        ),
        join_frames([b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", b"x"]),
    ]


TARGET = Target(
    name="gateway",
    run=run,
    seeds=seeds,
    codec=Codec(
        split=split_frames,
        join=join_frames,
        decode=lambda frame: frame.decode("latin-1").split("\r\n"),
        encode=lambda lines: "\r\n".join(map(str, lines)).encode("latin-1"),
    ),
    words=(
        "GET /v2 HTTP/1.1",
        "POST /v2/models/m/infer HTTP/1.1",
        f"Host: {PEER}",
        "Content-Length: 0",
        "Content-Length: 99999999999999999999",
        "Transfer-Encoding: chunked",
        "Transfer-Encoding: gzip, chunked",
        "Connection: close",
        "Connection: upgrade",
        "Upgrade: h2c",
        "Expect: 100-continue",
        "Inference-Header-Content-Length: 5",
        f"Authorization: Bearer {TOKEN}",
        "Origin: http://evil",
        "ffffffffffffffff",
        '{"inputs": []}',
        "",
    ),
)
