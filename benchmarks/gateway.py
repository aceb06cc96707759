"""``bench gateway``: HTTP with JSON beside other servers.

1, 8 and 64 connections that ask again as soon as they are answered, over HTTP with JSON, which all
servers speak: ours, and those of a folder named by ``PIPESWITCH_BENCH_RIVALS`` (a virtual
environment with ``kserve``, ``litserve`` and ``ray[serve]``), in turns, the others stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from pipeswitch.planning.fit import quantile
from pipeswitch.testing import RunningServer, server

from . import foreign
from .models import BenchModel
from .setting import Setting
from .trials import Numbers, Run, now_ms

SMALL: Final = BenchModel(
    "small", "benchmarks.factories:small_mlp", 1 << 20, {"input": ((1, 64), "float32")}
)
INFER: Final = f"/v2/models/{SMALL.name}/infer"
RIVALS: Final = ("kserve", "litserve", "ray")
CONNECTIONS: Final = (1, 8, 64)
LOAD_S: Final = 3.0
QUICK_LOAD_S: Final = 1.0
MIN_THROUGHPUT: Final = 2.0  # of a rival's
MAX_P99: Final = 0.5  # the same


def run(bench: Run, _: Any = ()) -> None:
    """Load all servers in turns."""
    with (
        tempfile.TemporaryDirectory(prefix="pipeswitch-bench-") as folder,
        server(
            arena="64MiB", host_store="64MiB", http=True, args=("--threads", str(bench.threads))
        ) as running,
        running.client() as client,
    ):
        setting = Setting(SMALL, Path(folder), bench.threads, bench.seed)
        weights = f"random:{bench.seed}"
        client.register(SMALL.name, SMALL.source, weights=weights, inputs=SMALL.inputs)
        _loads(bench, running, setting)
    bench.notes.append("JSON, [1, 64] float32 in, [1, 8] out; a rival is stopped meanwhile")


def _body(x: Any) -> bytes:
    tensor = {"name": "input", "datatype": "FP32", "shape": x.shape, "data": x.flatten().tolist()}
    return json.dumps({"inputs": [tensor]}).encode()


def json_request(x: Any, path: str) -> bytes:
    """Return a request with ``x`` to what a server has at ``path``."""
    body, kind = _body(x), "Content-Type: application/json"
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{kind}\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> tuple[int, bytes]:
    """Send a request over a connection that is kept; return the answer's status and its head."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(head.partition(b"content-length:")[2].partition(b"\r\n")[0]))
    return int(head.split()[1]), head


def infer_message(model: str, x: Any, name: str) -> bytes:
    """Return a ``ModelInferRequest`` with one raw tensor, made without a protobuf library."""
    tensor = _field(1, name.encode()) + _field(2, b"FP32")
    tensor += _field(3, b"".join(map(_number, x.shape)))
    return _field(1, model.encode()) + _field(5, tensor) + _field(7, x.tobytes())


def _field(number: int, data: bytes) -> bytes:
    """Return a protobuf field of bytes."""
    return _number(number << 3 | 2) + _number(len(data)) + data


def _number(value: int) -> bytes:
    """Return a varint."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


@dataclass
class _Server(foreign.Foreign):
    """Ours or a rival, with the request that it understands."""

    address: str = ""
    path: str = ""


def _loads(bench: Run, running: RunningServer, setting: Setting) -> None:
    x = np.random.default_rng(bench.seed).random((1, 64), dtype=np.float32)
    with contextlib.ExitStack() as stack:
        servers = [_Server("pipeswitch", address=running.http_address, path=INFER)]
        for name in foreign.usable(bench, foreign.RIVALS_FOLDER, RIVALS):
            bench.say(f"{name}: starting")
            order = setting.order() | {"name": SMALL.name}
            servers.append(stack.enter_context(_started(name, order, x)))
        wanted = _outputs(servers[0], x)
        for one in servers[1:]:
            one.signal(signal.SIGCONT)
            np.testing.assert_allclose(_outputs(one, x), wanted, rtol=1e-4, atol=1e-5)
            one.signal(signal.SIGSTOP)
        seconds = QUICK_LOAD_S if bench.is_quick else LOAD_S
        for count in CONNECTIONS:
            case = f"{count} connections"
            bench.say(f"{case}: measuring")

            def load(one: _Server, count: int = count) -> Numbers:
                return asyncio.run(_load(one, json_request(x, one.path), count, seconds))

            bench.trial_loop(case, foreign.arms_of(servers, load), bench.rounds(5, 2))
            for name in [one.name for one in servers[1:]]:
                for key, what, target in (
                    ("throughput_per_s", "throughput", {"at_least": MIN_THROUGHPUT}),
                    ("tail_ms", "p99", {"at_most": MAX_P99}),
                ):
                    share = bench.p50(case, "pipeswitch", key) / bench.p50(case, name, key)
                    bench.find(f"{case}: {what} / {name}", share, "", **target)


@contextlib.contextmanager
def _started(name: str, order: dict[str, Any], x: Any) -> Iterator[_Server]:
    """Start a rival that answers, and is stopped."""
    port = foreign.free_port()
    order |= {"port": port, "path": [str(Path(__file__).parents[1]), *sys.path[1:]]}
    script = str(Path(__file__).with_name(f"rival_{name}.py"))
    path = "/predict" if name == "litserve" else INFER
    server = _Server(name, address=f"127.0.0.1:{port}", path=path)
    command = [foreign.python_of(foreign.RIVALS_FOLDER), "-P", script, json.dumps(order)]
    with foreign.started(
        command, lambda _: _outputs(server, x), foreign.environment()
    ) as server.process:
        yield server


def _outputs(one: _Server, x: Any) -> Any:
    connection = http.client.HTTPConnection(one.address, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", one.path, _body(x), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    if answer.status != http.HTTPStatus.OK:
        raise RuntimeError(f"{one.name}: {answer.status} {text[:200]!r}")
    (y,) = json.loads(text)["outputs"]
    return np.array(y["data"], np.float32)


async def _load(one: _Server, request: bytes, count: int, seconds: float) -> Numbers:
    """Ask on each connection again as soon as there is an answer."""
    taken_ms: list[float] = []

    async def caller() -> None:
        host, _, port = one.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.closing(writer):
            while time.monotonic() < until_s:
                began_ms = now_ms()
                status, head = await ask(reader, writer, request)
                if status != http.HTTPStatus.OK:
                    raise RuntimeError(f"{one.name}: {head[:60]!r}")
                taken_ms.append(now_ms() - began_ms)

    began_s = time.monotonic()
    until_s = began_s + seconds
    await asyncio.gather(*(caller() for _ in range(count)))
    return {
        "throughput_per_s": len(taken_ms) / (time.monotonic() - began_s),
        "median_ms": quantile(taken_ms, 0.5),
        "tail_ms": quantile(taken_ms, 0.99),
        "requests": len(taken_ms),
    }
