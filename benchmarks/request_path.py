"""``bench request-path``: time of a request without its computation, by payload size.

The model is on the device and reads one number of its input. Our server is compared with a bare
ZeroMQ server, which only copies the payload into shared memory and sends a reply of our reply's
size. Both are measured over TCP and locally: our server over the owner's socket, ZeroMQ over ipc.
"""

from __future__ import annotations

import functools
import mmap
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import zmq

from pipeswitch.client.client import Client
from pipeswitch.testing import server
from pipeswitch.wire.frames import ReplyHeader, WireTensor, encode_header
from pipeswitch.wire.request_timing import PARTS, RequestTiming

from .trials import Arm, Numbers, Run, now_ms

SOURCE: Final = "benchmarks.factories:first_column"
SIZES: Final = {
    "1KB": 1 << 10,
    "16KB": 16 << 10,
    "64KB": 64 << 10,
    "256KB": 256 << 10,
    "1MB": 1 << 20,
    "4.8MB": 8 * 3 * 224 * 224 * 4,
    "16MB": 16 << 20,
    "64MB": 64 << 20,
}
QUICK_SIZES: Final = ("1KB", "64KB", "1MB", "4.8MB", "64MB")
ROUNDS: Final = 200
QUICK_ROUNDS: Final = 40
LARGE_BYTES: Final = 1 << 20
RESIDENCY: Final = ("", "-local")
MAX_RATIO: Final = 1.25  # limit over TCP, from LARGE_BYTES up: our time / the bare server's
MAX_MORE_MS: Final = 0.3  # limit over TCP, below LARGE_BYTES: our time - the bare server's
LOCAL_MORE_MS: Final = 0.1  # limit locally, below LARGE_BYTES: our time - the bare server's
LOCAL_RATIO: Final = {"16MB": 0.5}  # limits locally, from LARGE_BYTES up; 1.0 for other sizes

Dealer = zmq.Socket[bytes]


def run(bench: Run, _: Any = ()) -> None:
    """Measure all payload sizes, on our server and on the bare server in turns."""
    sizes = {name: SIZES[name] for name in (QUICK_SIZES if bench.is_quick else SIZES)}
    bench.say("starting both servers")
    args = ("--threads", str(bench.threads))
    with server(arena="64MiB", host_store="64MiB", args=args) as running, running.client() as owner:
        for name, size in sizes.items():
            inputs = {"x": ((1, size // 4), "float32")}
            owner.register(_model(name), SOURCE, weights="random:0", inputs=inputs)
        with running.client(tcp=True) as client, bare_server(max(sizes.values())) as bare:
            for name, size in sizes.items():
                bench.say(f"{name}: measuring")
                _one_size(bench, name, size, (client, owner), bare)
    bench.notes.append("path_ms of pipeswitch: the client's clock minus compute_ms of the bill")
    bench.notes.append("-local: the owner's plain socket with its shared memory; bare: ipc")


def _model(size: str) -> str:
    return f"path-{size.lower()}"


def _one_size(
    bench: Run, name: str, size: int, clients: tuple[Client, Client], bare: Sequence[Dealer]
) -> None:
    payload = np.ones((1, size // 4), dtype=np.float32)
    raw = memoryview(payload.reshape(-1).view(np.uint8))  # type: ignore[arg-type]

    def through_us(client: Client) -> Numbers:
        began_ms = now_ms()
        timing = client.infer(_model(name), payload).timing
        total_ms = now_ms() - began_ms
        return {
            "path_ms": total_ms - timing.compute_ms,
            "total_ms": total_ms,
            "compute_ms": timing.compute_ms,
            "switch_ms": timing.switch_ms,
            "server_ms": timing.total_ms,
        }

    def through_bare(dealer: Dealer) -> Numbers:
        began_ms = now_ms()
        dealer.send_multipart([b"\0" * 200, raw], copy=size < 65536)
        dealer.recv_multipart(copy=False)
        return {"path_ms": now_ms() - began_ms}

    rounds = bench.rounds(ROUNDS, QUICK_ROUNDS)
    arms = [
        arm
        for place, client, dealer in zip(RESIDENCY, clients, bare, strict=True)
        for arm in (
            Arm(f"pipeswitch{place}", functools.partial(through_us, client)),
            Arm(f"bare-zeromq{place}", functools.partial(through_bare, dealer)),
        )
    ]
    bench.trial_loop(name, arms, rounds, warmup=10)
    for place in RESIDENCY:
        _judge(bench, name, size, place)


def _judge(bench: Run, name: str, size: int, place: str) -> None:
    ours = bench.values(name, f"pipeswitch{place}", "path_ms")
    theirs = bench.values(name, f"bare-zeromq{place}", "path_ms")
    for what, of in (("p50", statistics.median), ("minimums", min)):
        if size >= LARGE_BYTES:
            at_most = LOCAL_RATIO.get(name, 1.0) if place else MAX_RATIO
            share = of(ours) / of(theirs)
            bench.find(f"{name}: path / bare{place}, {what}", share, at_most=at_most)
        else:
            at_most = LOCAL_MORE_MS if place else MAX_MORE_MS
            more_ms = of(ours) - of(theirs)
            bench.find(f"{name}: path - bare{place}, {what}", more_ms, "ms", at_most=at_most)


@contextmanager
def bare_server(largest_bytes: int) -> Iterator[list[Dealer]]:
    """Start the bare server in a process; yield two connections to it: over TCP and over ipc."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "benchmarks.request_path",
        str(_reply_bytes()),
        str(largest_bytes),
    ]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    context: zmq.Context[Any] = zmq.Context()
    try:
        assert child.stdout is not None
        dealers = []
        for address in child.stdout.readline().split():
            dealers.append(context.socket(zmq.DEALER))
            dealers[-1].connect(address)
        yield dealers
    finally:
        context.destroy(0)
        child.communicate("")


def _reply_bytes() -> int:
    """Return the size in bytes of our reply's header with all times of a request."""
    timing = RequestTiming(**dict.fromkeys(PARTS, 1.5), resident=True, worker=0, op_id=1000)  # type: ignore[arg-type]
    output = WireTensor(name="y", dtype="float32", shape=(1,), frame=0)
    header = ReplyHeader(
        v=1, id="00000000-1", status="ok", session="0" * 32, timing=timing, outputs=(output,)
    )
    return len(encode_header(header))


def serve_bare() -> None:
    """Print the TCP and the ipc address, and serve until standard input is closed.

    The bare server only does the work that every server must do: receive, copy the payload into
    memory that a computing process could share, send a header and an output.
    """
    reply_bytes, pool_bytes = int(sys.argv[1]), int(sys.argv[2])
    descriptor = os.memfd_create("bare", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, pool_bytes)
    pool = np.frombuffer(mmap.mmap(descriptor, pool_bytes), dtype=np.uint8)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    local = f"ipc://@pipeswitch-bare-{os.getpid()}"  # an abstract address needs no file
    router.bind(local)
    sys.stdout.write(f"tcp://127.0.0.1:{port} {local}\n")
    sys.stdout.flush()
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    reply = b"\0" * reply_bytes
    while True:
        ready = dict(poller.poll())
        if sys.stdin.fileno() in ready:
            break
        identity, _header, payload = router.recv_multipart(copy=False)
        source = np.frombuffer(payload.buffer, dtype=np.uint8)
        np.copyto(pool[: len(source)], source)
        router.send_multipart([bytes(identity.buffer), b"PSW1", reply, b"\0\0\0\0"])
    context.destroy(0)


if __name__ == "__main__":
    serve_bare()
