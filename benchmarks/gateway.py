"""``bench gateway``: HTTP with JSON beside other servers.

1, 8 and 64 connections that ask again as soon as they are answered, over HTTP with JSON, which all
servers speak: ours, and those of a folder named by ``PIPESWITCH_BENCH_RIVALS`` (a virtual
environment with ``kserve``, ``litserve`` and ``ray[serve]``), in turns, the others stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import signal
import socket
import subprocess
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

from .foreign import RIVALS_FOLDER, environment, family, free_port, python_of, send, started, usable
from .models import BenchModel
from .setting import Setting
from .trials import Arm, Numbers, Run, now_ms

SMALL: Final = BenchModel(
    "small", "benchmarks.factories:small_mlp", 1 << 20, {"input": ((1, 64), "float32")}
)
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


# ---- requests ----------------------------------------------------------------------------------


def json_request(x: Any, path: str = f"/v2/models/{SMALL.name}/infer") -> bytes:
    """``x`` to the small model, or to what a server has at ``path``."""
    tensor = {"name": "input", "datatype": "FP32", "shape": x.shape, "data": x.flatten().tolist()}
    body = json.dumps({"inputs": [tensor]}).encode()
    return post(path, body, "Content-Type: application/json\r\n")


def post(path: str, body: bytes, lines: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
    return head.encode() + body


class Http:
    """A connection that is kept; one request at a time."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answer = self._socket.makefile("rb")

    def __enter__(self) -> Http:
        return self

    def __exit__(self, *_: object) -> None:
        self._answer.close()
        self._socket.close()

    def ask(self, request: bytes) -> bytes:
        """The body of the answer."""
        self._socket.sendall(request)
        status = self._answer.readline()
        size = 0
        while (line := self._answer.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        body = self._answer.read(size)
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r} {body[:200]!r}")
        return body


def infer_message(model: str, x: Any, name: str = "x", timeout_us: int = 0) -> bytes:
    """A ``ModelInferRequest`` with one raw tensor, without a protobuf library between."""
    tensor = _field(1, name.encode()) + _field(2, b"FP32")
    tensor += _field(3, b"".join(map(_number, x.shape)))
    timeout = _field(1, b"timeout") + _field(2, b"\x10" + _number(timeout_us))
    tensor = _field(4, timeout) + _field(5, tensor) + _field(7, x.tobytes())
    return _field(1, model.encode()) + tensor


def _field(number: int, data: bytes) -> bytes:
    """A protobuf field of bytes."""
    return _number(number << 3 | 2) + _number(len(data)) + data


def _number(value: int) -> bytes:
    """A varint."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


# ---- loads -------------------------------------------------------------------------------------


@dataclass
class _Rival:
    """Another server; its processes stand still while it is not measured."""

    name: str
    address: str
    request: bytes
    process: subprocess.Popen[str] | None = None

    def signal(self, number: int) -> None:
        if self.process is not None:
            send(family(self.process.pid), number)


def _loads(bench: Run, running: RunningServer, setting: Setting) -> None:
    x = np.random.default_rng(bench.seed).random((1, 64), dtype=np.float32)
    v2, lit = json_request(x), json_request(x, "/predict")
    with contextlib.ExitStack() as stack:
        servers = [_Rival("pipeswitch", running.http_address, v2)]
        for name in usable(bench, RIVALS_FOLDER, RIVALS):
            bench.say(f"{name}: starting")
            order = setting.order() | {"name": SMALL.name}
            request = lit if name == "litserve" else v2
            servers.append(stack.enter_context(_started(name, order, request)))
        wanted = _outputs(servers[0])
        for one in servers[1:]:
            one.signal(signal.SIGCONT)
            np.testing.assert_allclose(_outputs(one), wanted, rtol=1e-4, atol=1e-5)
            one.signal(signal.SIGSTOP)
        seconds = QUICK_LOAD_S if bench.is_quick else LOAD_S
        for count in CONNECTIONS:
            case = f"{count} connections"
            bench.say(f"{case}: measuring")
            arms = [
                Arm(
                    one.name,
                    functools.partial(_load, one, count, seconds),
                    functools.partial(_only, one, servers),
                )
                for one in servers
            ]
            bench.trial_loop(case, arms, bench.rounds(5, 2))
            _judge(bench, case, [one.name for one in servers])


@contextlib.contextmanager
def _started(name: str, order: dict[str, Any], request: bytes) -> Iterator[_Rival]:
    """Start a rival that answers, and is stopped."""
    port = free_port()
    order |= {"port": port, "path": [str(Path(__file__).parents[1]), *sys.path[1:]]}
    script = str(Path(__file__).with_name("rivals.py"))
    rival = _Rival(name, f"127.0.0.1:{port}", request)
    command = [python_of(RIVALS_FOLDER), "-P", script, name, json.dumps(order)]
    with started(command, lambda _: _outputs(rival), environment()) as rival.process:
        yield rival


def _outputs(one: _Rival) -> Any:
    with Http(one.address) as http:
        return np.array(json.loads(http.ask(one.request))["outputs"][0]["data"], np.float32)


def _only(chosen: _Rival, servers: list[_Rival]) -> None:
    for one in servers:
        one.signal(signal.SIGCONT if one is chosen else signal.SIGSTOP)


def _load(one: _Rival, count: int, seconds: float) -> Numbers:
    return asyncio.run(_ask_for(one, count, seconds))


async def _ask_for(one: _Rival, count: int, seconds: float) -> Numbers:
    until_s = time.monotonic() + seconds
    taken_ms: list[float] = []
    began_s = time.monotonic()
    await asyncio.gather(*(_caller(one, until_s, taken_ms) for _ in range(count)))
    elapsed_s = time.monotonic() - began_s
    return {
        "throughput_per_s": len(taken_ms) / elapsed_s,
        "median_ms": quantile(taken_ms, 0.5),
        "tail_ms": quantile(taken_ms, 0.99),
        "requests": len(taken_ms),
    }


async def _caller(one: _Rival, until_s: float, taken_ms: list[float]) -> None:
    """Ask again as soon as there is an answer."""
    host, _, port = one.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        while time.monotonic() < until_s:
            began_ms = now_ms()
            writer.write(one.request)
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(size)
            if b" 200 " not in head[:16]:
                raise RuntimeError(f"{one.name}: {head[:60]!r}")
            taken_ms.append(now_ms() - began_ms)
    finally:
        writer.close()


def _judge(bench: Run, case: str, names: list[str]) -> None:
    def p50(name: str, key: str) -> float:
        return bench.p50(case, name, key)

    for name in names[1:]:
        faster = p50("pipeswitch", "throughput_per_s") / p50(name, "throughput_per_s")
        bench.find(f"{case}: throughput / {name}", faster, at_least=MIN_THROUGHPUT)
        tail = p50("pipeswitch", "tail_ms") / p50(name, "tail_ms")
        bench.find(f"{case}: p99 / {name}", tail, at_most=MAX_P99)
