"""``bench gateway``: HTTP with JSON, compared with other servers.

1, 8 or 64 connections send requests over HTTP with JSON, which all servers speak. A connection
sends its next request when it has received the previous answer. Our server is compared with the
servers in the virtual environment that ``PIPESWITCH_BENCH_RIVALS`` names (``kserve``, ``litserve``,
``ray[serve]``). The servers take turns; while one is measured, the others are stopped."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from pipeswitch.base.quantiles import quantile
from pipeswitch.testing import RunningServer, server

from . import foreign
from .models import SMALL
from .serving import SLICE_ROOM_BYTES
from .setting import Setting, settings
from .trials import Numbers, Run, now_ms, ratio

RIVALS: Final = ("kserve", "litserve", "ray")
CONNECTIONS: Final = (1, 8, 64)
LOAD_S: Final = {SMALL.name: 3.0, "resnet50": 6.0, "bert-base": 6.0}
QUICK_LOAD_S: Final = 1.0
NAMES: Final = {"exact": "pipeswitch", "fast": "pipeswitch, fast"}
DATATYPES: Final = {"float32": "FP32", "int64": "INT64"}
MIN_THROUGHPUT: Final = {SMALL.name: 2.0, "resnet50": 1.7, "bert-base": 1.7}  # ours / a rival's
MAX_P99: Final = 0.5  # limit of our p99 / a rival's p99; only for the small model


def run(bench: Run, models: Sequence[str] = ()) -> None:
    """Measure all servers in turn with each model."""
    for setting in settings(bench, models, tuple(MIN_THROUGHPUT), (SMALL.name,)):
        model = setting.model
        room = 2 * model.room_bytes + SLICE_ROOM_BYTES
        with (
            server(
                arena=str(room),
                host_store=str(room),
                http=True,
                args=("--threads", str(bench.threads)),
            ) as running,
            running.client() as client,
        ):
            for precision in _precisions(model.name):
                client.register(
                    precision,
                    model.source,
                    weights=f"random:{bench.seed}",
                    inputs=model.inputs,
                    precision=precision,
                )
            _loads(bench, running, setting, [*client.show("exact")["inputs"]])
    bench.notes.append("JSON in and out, one example a request; a rival is stopped meanwhile")


def infer_path(model: str) -> str:
    """Return the path for requests to a model in the Open Inference Protocol."""
    return f"/v2/models/{model}/infer"


def _body(inputs: Mapping[str, Any]) -> bytes:
    tensors = [
        {
            "name": name,
            "datatype": DATATYPES[x.dtype.name],
            "shape": x.shape,
            "data": x.flatten().tolist(),
        }
        for name, x in inputs.items()
    ]
    return json.dumps({"inputs": tensors}).encode()


def json_request(inputs: Mapping[str, Any], path: str) -> bytes:
    """Return an HTTP request with these inputs for a server's ``path``."""
    body, kind = _body(inputs), "Content-Type: application/json"
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{kind}\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> tuple[int, bytes]:
    """Send a request over an open connection; return the answer's HTTP status and header bytes."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(head.partition(b"content-length:")[2].partition(b"\r\n")[0]))
    return int(head.split()[1]), head


def infer_message(model: str, x: Any, name: str) -> bytes:
    """Return a ``ModelInferRequest`` with one raw tensor, encoded without a protobuf library."""
    tensor = _field(1, name.encode()) + _field(2, b"FP32")
    tensor += _field(3, b"".join(map(_number, x.shape)))
    return _field(1, model.encode()) + _field(5, tensor) + _field(7, x.tobytes())


def _field(number: int, data: bytes) -> bytes:
    """Return ``data`` encoded as the protobuf field with this number."""
    return _number(number << 3 | 2) + _number(len(data)) + data


def _number(value: int) -> bytes:
    """Return the number encoded as a varint."""
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


@dataclass
class _Server(foreign.Foreign):
    """Our server or a rival, with its address and the URL path of its requests."""

    address: str = ""
    path: str = ""


def _loads(bench: Run, running: RunningServer, setting: Setting, names: Sequence[str]) -> None:
    model, inputs = setting.model.name, dict(zip(names, setting.arrays(), strict=True))
    with contextlib.ExitStack() as stack:
        servers = [
            _Server(NAMES[one], address=running.http_address, path=infer_path(one))
            for one in _precisions(model)
        ]
        rivals = foreign.usable(bench, foreign.RIVALS_FOLDER, RIVALS)
        for name in rivals:
            bench.say(f"{model}, {name}: starting")
            order = setting.order() | {"name": model}
            servers.append(stack.enter_context(_started(name, order, inputs)))
        expected = _output(servers[0], inputs)
        for one in servers[1:]:
            one.signal(signal.SIGCONT)
            np.testing.assert_allclose(_output(one, inputs), expected, rtol=1e-3, atol=1e-4)
            if one.process is not None:
                one.signal(signal.SIGSTOP)
        seconds = LOAD_S[model] if not bench.is_quick else QUICK_LOAD_S
        # An image is 3 MB of JSON: the gateway refuses some of 64 that arrive at once.
        for count in CONNECTIONS if model == SMALL.name else CONNECTIONS[:-1]:
            case = f"{model}, {count} connections"
            bench.say(f"{case}: measuring")

            def load(one: _Server, count: int = count) -> Numbers:
                return asyncio.run(_load(one, json_request(inputs, one.path), count, seconds))

            bench.trial_loop(case, foreign.arms_of(servers, load), bench.rounds(5, 2))
            _findings(bench, model, case, rivals)


def _findings(bench: Run, model: str, case: str, rivals: Sequence[str]) -> None:
    for precision, name in itertools.product(_precisions(model), rivals):
        ours = NAMES[precision]
        is_wanted = model == SMALL.name or (precision == "fast" and case.endswith(" 8 connections"))
        target = {"at_least": MIN_THROUGHPUT[model]} if is_wanted else {}
        share = ratio(*(bench.p50(case, one, "throughput_per_s") for one in (ours, name)))
        bench.find(f"{case}: {ours} / {name}, throughput", share, "", **target)
        share = ratio(*(bench.p50(case, one, "tail_ms") for one in (ours, name)))
        target = {"at_most": MAX_P99} if model == SMALL.name else {}
        bench.find(f"{case}: {ours} / {name}, p99", share, "", **target)


def _precisions(model: str) -> tuple[str, ...]:
    return ("exact",) if model == SMALL.name else tuple(NAMES)


@contextlib.contextmanager
def _started(name: str, order: dict[str, Any], inputs: Mapping[str, Any]) -> Iterator[_Server]:
    """Start a rival, wait until it answers, and stop it with SIGSTOP."""
    port = foreign.free_port()
    order |= {"port": port, "path": [str(Path(__file__).parents[1]), *sys.path[1:]]}
    script = str(Path(__file__).with_name(f"rival_{name}.py"))
    path = "/predict" if name == "litserve" else infer_path(order["name"])
    server = _Server(name, address=f"127.0.0.1:{port}", path=path)
    command = [foreign.python_of(foreign.RIVALS_FOLDER), "-P", script, json.dumps(order)]
    with foreign.started(
        command, lambda _: _output(server, inputs), foreign.environment()
    ) as server.process:
        yield server


def _output(one: _Server, inputs: Mapping[str, Any]) -> Any:
    """Return a server's first output for these inputs."""
    connection = http.client.HTTPConnection(one.address, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", one.path, _body(inputs), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    if answer.status != http.HTTPStatus.OK:
        raise RuntimeError(f"{one.name}: {answer.status} {text[:200]!r}")
    y = json.loads(text)["outputs"][0]
    return np.array(y["data"], np.float32)


async def _load(one: _Server, request: bytes, count: int, seconds: float) -> Numbers:
    """Send requests over ``count`` connections for some seconds, one at a time on each."""
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
