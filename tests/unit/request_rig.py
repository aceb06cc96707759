"""Measurement of how many Python calls a request to a resident model takes in each process.

The gateway's loop, the SDK's client and the worker are real. Each is measured alone, and simple
stand-ins replace the processes that it talks to.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mode
from types import FrameType
from typing import Any

import numpy as np

from pipeswitch.base.roles import DEFAULT_ROLES
from pipeswitch.client.client import Client
from pipeswitch.ipc.channel import channel_pair
from pipeswitch.ipc.control_page import BOARD_BYTES, Board, new_doorbell, sealed_memfd
from pipeswitch.ipc.messages.base import Exit, ResourceLimits, SlabTensor
from pipeswitch.ipc.messages.run import Run
from pipeswitch.ipc.messages.worker import InferenceDone, RunInference, WorkerSettings
from pipeswitch.programs.graphs.bundle import Graph, Node
from pipeswitch.programs.interface.layout import GroupSpec, Manifest, ValueSpec
from pipeswitch.wire import frames
from pipeswitch.wire.stream import Stream
from pipeswitch.workers.main import WorkerProcess
from tests.unit.manifests import plain_manifest, plain_tensor

COLUMNS = 64
BILL: dict[str, Any] = {
    "queue_ms": 0.01,
    "switch_ms": 0.25,
    "copy_ms": 0.0,
    "stall_ms": 0.0,
    "compute_ms": 0.1,
    "total_ms": 0.5,
    "resident": True,
    "preempted": "",
    "worker": 0,
    "op_id": 5,
    "version": 1,
    "batch": 1,
    "batched": 1,
}
REQUESTS = 10


class Counted:
    """Counter of one thread's calls, from each call of the function ``name`` to the next."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls = 0
        self._at: list[int] = []

    def note(self, frame: FrameType, what: str, _: Any) -> None:
        if what == "call":
            self._calls += 1
            if frame.f_code.co_name == self._name:
                self._at.append(self._calls)

    def watch(self, work: Callable[[], object]) -> None:
        """Do some work, and count this thread's calls during it."""
        before = sys.getprofile()
        sys.setprofile(self.note)
        try:
            work()
        finally:
            sys.setprofile(before)

    @property
    def of_each(self) -> int:
        """Most frequent number of calls per request."""
        assert len(self._at) == REQUESTS
        return mode(after - before for before, after in pairwise(self._at))


@contextmanager
def answering(path: Path) -> Iterator[str]:
    """Run a server that answers each request with eight numbers; yield its address."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    thread = threading.Thread(target=_answer_one, args=(listener,), daemon=True)
    thread.start()
    yield f"ipc://{path}"
    thread.join()
    listener.close()


def _answer_one(listener: socket.socket) -> None:
    sock, _ = listener.accept()
    stream, outputs = Stream(sock, 1 << 20), np.ones((1, 8), np.float32).tobytes()
    y = frames.WireTensor(name="y", dtype="float32", shape=(1, 8), frame=0)
    while True:
        select.select([sock], [], [])
        try:
            messages = stream.receive(1)
        except EOFError:
            stream.close()
            return
        for message in messages:
            header = frames.decode_request(message.parts)
            facts: dict[str, Any] = {"v": 1, "id": header.id, "status": "ok", "session": "s"}
            parts = [frames.encode_header(frames.ReplyHeader(**facts))]
            if header.op == "infer":
                parts = [
                    frames.encode_header(frames.ReplyHeader(**facts, timing=BILL, outputs=(y,))),
                    outputs,
                ]
            stream.put(frames.pack_table([(len(part), frames.INLINE) for part in parts]), parts)
            stream.flush()


def gateways_calls(folder: Path) -> int:
    """Return the calls of the gateway's loop per JSON request of 64 numbers on open connections."""
    with answering(folder / "server") as address:
        ours, theirs = socket.socketpair()
        loop, spent = asyncio.new_event_loop(), Counted("buffer_updated")
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        upstream = asyncio.run_coroutine_threadsafe(_gateway(address, theirs), loop).result()
        body = json.dumps(
            {
                "inputs": [
                    {
                        "name": "x",
                        "shape": [1, COLUMNS],
                        "datatype": "FP32",
                        "data": [one / 7 for one in range(COLUMNS)],
                    }
                ]
            }
        )
        head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}"
        request = f"{head}\r\n\r\n{body}".encode()

        def ask() -> None:
            ours.sendall(request)
            assert ours.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")

        def on_loop(what: Callable[[], None]) -> None:
            done = threading.Event()
            loop.call_soon_threadsafe(lambda: (what(), done.set()))
            done.wait()

        ask()
        on_loop(lambda: sys.setprofile(spent.note))
        for _ in range(REQUESTS):
            ask()
        on_loop(lambda: sys.setprofile(None))
        on_loop(upstream.close)
        ours.close()
        on_loop(lambda: None)  # lets the loop see the closed socket
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    return spent.of_each


async def _gateway(address: str, sock: socket.socket) -> Any:
    from pipeswitch.gateway.http.http_parser import Limits
    from pipeswitch.gateway.http.http_server import HttpServer
    from pipeswitch.gateway.http.offload import OffloadThread
    from pipeswitch.gateway.rest import inference_door
    from pipeswitch.gateway.router import Router
    from pipeswitch.gateway.serving.auth import Authenticator
    from pipeswitch.gateway.serving.service import Service
    from pipeswitch.gateway.serving.upstream import Upstream

    upstream = Upstream(address)
    callers = Authenticator(
        roles=DEFAULT_ROLES, tokens={}, needs_token=False, hosts=frozenset({"127.0.0.1"})
    )
    door = inference_door(Service(upstream), OffloadThread())
    server = HttpServer(Router(callers, [door]), Limits())
    await asyncio.get_running_loop().connect_accepted_socket(server, sock)
    return upstream


def clients_calls(folder: Path) -> int:
    """Return the calls per request of the thread that calls ``infer`` with an array."""
    x = np.ones((1, COLUMNS), np.float32)
    with answering(folder / "server") as address, Client(address, shared_memory=False) as client:

        def ask() -> None:
            for _ in range(REQUESTS):
                assert client.infer("m", x)["y"].shape == (1, 8)

        ask()
        with client._connection._role:  # waits until the client's thread has released the lock
            spent = Counted("infer")
        spent.watch(ask)
        return spent.of_each


def workers_calls() -> int:
    """Return the calls per request of a worker's main thread; the model has two resident groups."""
    page = 1 << 12
    control_page, models, work, pool = (
        sealed_memfd(name, size)
        for name, size in (("b", BOARD_BYTES), ("m", 16 * page), ("w", page), ("p", 16 * page))
    )
    task, ours = channel_pair()
    control, others = channel_pair()
    doorbell = new_doorbell()
    settings = WorkerSettings(
        slot=0,
        device="cpu",
        limits=ResourceLimits(
            arena_bytes=16 * page, fence_count=16, pool_bytes=16 * page, doorbell_count=1
        ),
    )
    worker = WorkerProcess(settings, task, control, control_page, [doorbell])
    worker.map_memory([pool, models, work])
    worker._programs._read["m"] = ("d", *_two_groups())
    x = SlabTensor(name="x", dtype="float32", shape=(1, 4), offset_bytes=0, size_bytes=16)
    order = RunInference(
        op_id=1,
        model="m",
        digest="d",
        directory="",
        arena_offset_bytes=page,
        first_fence=2,
        residency_id=7,
        runs=(Run(request_id="r", inputs=(x,), reply_offset_bytes=page, reply_bytes=64),),
    )
    os.pwrite(models, (7).to_bytes(4, "little") * 2, 4 * order.first_fence)
    Board(control_page).write_turn(order.op_id)

    for _ in range(REQUESTS):
        ours.send(order)
    ours.send(Exit())
    spent = Counted("infer")
    spent.watch(worker.serve)
    for _ in range(REQUESTS):
        received = ours.receive()
        assert received is not None
        assert isinstance(received[0], InferenceDone)
    for channel in (task, ours, control, others):
        channel.close()
    for descriptor in (control_page, models, work, pool, doorbell):
        os.close(descriptor)
    return spent.of_each


def _two_groups() -> tuple[Manifest, Graph]:
    """Return the manifest and graph of two additions, each with its own weight."""
    value = ValueSpec(name="x", dtype="float32", shape=(1, 4))
    nodes = [
        Node("aten.add.Tensor", ({"v": last}, {"v": weight}), {})
        for last, weight in ((0, 1), (3, 2))
    ]
    output = ValueSpec(name="y", dtype="float32", shape=(1, 4))
    graph = Graph(
        version=2,
        inputs=(value,),
        weights=("a", "b"),
        nodes=tuple(nodes),
        results=(4,),
        outputs=(output,),
    )
    tensors = tuple(
        plain_tensor(name, (4,), 64 * number) for number, name in enumerate(graph.weights)
    )
    groups = tuple(
        GroupSpec(
            offset_bytes=64 * number,
            size_bytes=16,
            tensors=(number,),
            first_node=number,
            end_node=number + 1,
            label="",
        )
        for number in range(2)
    )
    manifest = plain_manifest(
        total_bytes=128,
        tensors=tensors,
        groups=groups,
        inputs=graph.inputs,
        outputs=graph.outputs,
        extra={"is_whole": True},
    )
    return manifest, graph
