"""Grid of components and faults; each cell injects a fault into one component of a server."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from pipeswitch.base.errors import PipeSwitchError
from tests.raw_peer import raw_peer

from ..process.tools import kill, until
from .stage import DEVICES, Stage

FIRES_WITHIN_S: Final = 30.0
STOPPED_FOR_S: Final = 0.4  # shorter than the time after which a stopped process counts as dead


@dataclass(frozen=True)
class Cell:
    """Cell of the grid; ``inject`` causes the fault, and returns True if it has happened."""

    component: str
    fault: str
    inject: Callable[[Stage, random.Random], bool]
    ends_controller: bool = False


Find = Callable[[Stage, random.Random], int | None]


# ---- by signal ---------------------------------------------------------------------------------


def _pids(stage: Stage, kind: str, on: str = "", states: tuple[str, ...] = ()) -> list[int]:
    rows = [r for r in stage.checked.rows(kind) if r["pid"] and (not on or r["on"] == on)]
    return [row["pid"] for row in rows if not states or row["state"] in states]


def _pick(stage: Stage, generator: random.Random, *states: str) -> int | None:
    pids = _pids(stage, "worker", states=states)
    return generator.choice(pids) if pids else None


def _of(kind: str, device: str) -> Find:
    """Return a function that finds a process of this kind on this device."""

    def find(stage: Stage, generator: random.Random) -> int | None:
        pids = _pids(stage, kind, device)
        return generator.choice(pids) if pids else None

    return find


def _hit(stage: Stage, generator: random.Random, find: Find, number: int) -> int:
    """Send a signal to the process, or to its successor if it has died; return the pid, or 0."""

    def sent() -> int:
        pid = find(stage, generator)
        return pid if pid is not None and kill(pid, number) else 0

    with contextlib.suppress(AssertionError):
        return until(sent, "a process to signal", FIRES_WITHIN_S)
    return 0


def _signals(find: Find, number: int) -> Any:
    return lambda stage, generator: bool(_hit(stage, generator, find, number))


ACTIVE: Final = ("active", "suspended", "cleaning")


def _active(stage: Stage, generator: random.Random) -> int | None:
    """Return the pid of a worker that computes, or of any worker if none computes."""
    return _pick(stage, generator, *ACTIVE) or _pick(stage, generator)


def _standby(stage: Stage, generator: random.Random) -> int | None:
    return _pick(stage, generator, "standby")


def _fork_server(stage: Stage, _: random.Random) -> int | None:
    with contextlib.suppress(AssertionError, OSError):
        return stage.checked.fork_server_pid()
    return None


def _gateway(stage: Stage, _: random.Random) -> int | None:
    return stage.gateway_pid or None


def _maker(stage: Stage, _: random.Random) -> int | None:
    """Return the pid of the process that preprocesses a model's inputs."""
    return next(iter(_pids(stage, "stage")), None)


def _controller(stage: Stage, _: random.Random) -> int | None:
    return stage.running.pid


def _stop_and_go(find: Find) -> Any:
    """Stop a process for a moment and continue it; it must not count as dead."""

    def inject(stage: Stage, generator: random.Random) -> bool:
        pid = _hit(stage, generator, find, signal.SIGSTOP)
        threading.Event().wait(generator.uniform(0.05, STOPPED_FOR_S))
        return pid > 0 and kill(pid, signal.SIGCONT)

    return inject


# ---- by failpoint ------------------------------------------------------------------------------


def _point(point: str, action: str, provoke: Callable[[Stage], None] | None = None) -> Any:
    """Arm the failpoint, call ``provoke`` if given, and wait until the failpoint has fired."""

    def inject(stage: Stage, _: random.Random) -> bool:
        path = stage.arm(point, action)
        if provoke is not None:
            with contextlib.suppress(PipeSwitchError):
                provoke(stage)
        try:
            until(lambda: not path.exists() or not stage.is_up, point, FIRES_WITHIN_S)
        except AssertionError:
            path.unlink(missing_ok=True)
            return False
        return True

    return inject


def _register(stage: Stage) -> None:
    with stage.client() as client:
        linear = torch.nn.Linear(8, 8)
        client.register("provoked", linear, example_inputs=(torch.zeros(1, 8),))
        client.unregister("provoked")


# ---- by clients --------------------------------------------------------------------------------

VICTIM = """
    import sys, torch
    from pipeswitch.client.client import Client
    client = Client(sys.argv[1])
    futures = [client.submit("a", torch.ones(1, 512)) for _ in range(64)]
    print("sent", flush=True)
    for future in futures:
        future.result()
    sys.stdin.read()
"""


def _client_with(number: int) -> Any:
    """Start a client process that sends requests; send it the signal, and kill it in the end."""

    def inject(stage: Stage, _: random.Random) -> bool:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(VICTIM), stage.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdin is not None
        with process.stdout, process.stdin:
            heard = process.stdout.readline()
            process.send_signal(number)
            if number == signal.SIGSTOP:
                threading.Event().wait(STOPPED_FOR_S)
            process.kill()
            process.wait()
        return heard == b"sent\n"

    return inject


def _garbage(stage: Stage, generator: random.Random) -> bool:
    """Send messages that cannot be decoded, then bytes that do not form a message."""
    try:
        with raw_peer(stage.address) as peer:
            for _ in range(20):
                peer.send(*(generator.randbytes(generator.randrange(300)) for _ in range(3)))
        host, _, port = stage.address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as plain:
            plain.sendall(generator.randbytes(4096))
    except OSError:
        return False
    return True


def _to_the_gateway(stage: Stage, data: bytes, waits_s: float) -> bool:
    """Send bytes to the gateway, and do not read the answer."""
    host, _, port = stage.http_address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as plain:
            plain.sendall(data)
            threading.Event().wait(waits_s)
    except OSError:
        return False
    return True


def _garbage_to_the_gateway(stage: Stage, generator: random.Random) -> bool:
    lines = [b"POST /v2/models/a/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"]
    return _to_the_gateway(stage, b"".join([*lines, generator.randbytes(4096)]), 0.05)


def _half_a_request(stage: Stage, _: random.Random) -> bool:
    return _to_the_gateway(stage, b"POST /v2/models/a/infer HTTP/1.1\r\nHost: loc", 0.1)


def _unread_answers(stage: Stage, _: random.Random) -> bool:
    ask = b"GET /v2/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    return _to_the_gateway(stage, ask * 12, 0.2)


def _slow_reader(stage: Stage, _: random.Random) -> bool:
    """Submit many requests from a client that leaves without reading an answer."""
    with stage.client() as client:
        with contextlib.suppress(PipeSwitchError):
            for _ in range(50):
                client.submit("b", torch.zeros(4, 512))
        return True


def _half_a_message(stage: Stage, _: random.Random) -> bool:
    """Connect, send half a message, wait for a moment and disconnect."""
    host, _sep, port = stage.address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as plain:
            plain.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + b"\0" * 20)
            threading.Event().wait(0.1)
    except OSError:
        return False
    return True


# ---- by files ----------------------------------------------------------------------------------


def _damaged_journal(stage: Stage, generator: random.Random) -> bool:
    """Kill the controller and cut off the last bytes of its journal.

    These bytes record a load and an unload, whose loss is harmless; an accepted job must survive.
    """
    with stage.client() as client:
        client.load("probe")
        client.unload("probe")
    kill(stage.running.pid)
    stage.running.process.wait(30)
    for path in (stage.folder / "state").glob("journal*-wal"):
        _scribble(path, generator)
    return True


def _scribble(path: Path, generator: random.Random) -> None:
    """Cut off some bytes at the file's end, as if a write had been interrupted."""
    size = path.stat().st_size
    if size > 64:
        os.truncate(path, size - generator.randrange(1, 32))


# ---- the grid ----------------------------------------------------------------------------------


def grid() -> list[Cell]:
    """Return all cells of the grid; a combination without a cell is impossible.

    A failpoint fires on the device that reaches it first.
    """
    first, second = DEVICES
    cells = [
        Cell("client", "kill -9", _client_with(signal.SIGKILL)),
        Cell("client", "SIGSTOP", _client_with(signal.SIGSTOP)),
        Cell("client", "hang", _half_a_message),
        Cell("client", "garbage in", _garbage),
        Cell("client", "slow peer", _slow_reader),
        Cell("controller", "kill -9", _signals(_controller, signal.SIGKILL), ends_controller=True),
        Cell("controller", "SIGSTOP", _stop_and_go(_controller)),
        Cell("controller", "exception", _point("frontend.message", "error"), ends_controller=True),
        Cell("controller", "hang", _point("controller.event", "delay 700")),
        Cell("controller", "OOM", _point("frontend.message", "memory"), ends_controller=True),
        Cell("controller", "ENOSPC", _point("journal.write", "disk", _register)),
        Cell("controller", "garbage in", _point("worker.send", "garbage")),
        Cell("controller", "slow peer", _point("worker.send", "delay 700")),
        Cell("gateway", "kill -9", _signals(_gateway, signal.SIGKILL)),
        Cell("gateway", "SIGSTOP", _stop_and_go(_gateway)),
        Cell("gateway", "garbage in", _garbage_to_the_gateway),
        Cell("gateway", "hang", _half_a_request),
        Cell("gateway", "slow peer", _unread_answers),
        Cell("fork server", "kill -9", _signals(_fork_server, signal.SIGKILL)),
        Cell("fork server", "SIGSTOP", _signals(_fork_server, signal.SIGSTOP)),
        Cell("daemon", "kill -9", _signals(_of("daemon", first), signal.SIGKILL)),
        Cell("daemon", "SIGSTOP", _signals(_of("daemon", first), signal.SIGSTOP)),
        Cell("daemon", "exception", _point("daemon.transmit.group", "error")),
        Cell("daemon", "hang", _point("daemon.transmit.group", "delay 1500")),
        Cell("daemon", "OOM", _point("daemon.transmit.begin", "memory")),
        Cell("daemon", "ENOSPC", _point("persist.image.write", "disk")),
        Cell("daemon", "garbage in", _point("controller.send.daemon", "garbage")),
        Cell("daemon", "slow peer", _point("daemon.message", "delay 700")),
        Cell("device 2 daemon", "kill -9", _signals(_of("daemon", second), signal.SIGKILL)),
        Cell("device 2 daemon", "SIGSTOP", _signals(_of("daemon", second), signal.SIGSTOP)),
        Cell("device 2 worker", "kill -9", _signals(_of("worker", second), signal.SIGKILL)),
        Cell("device 2 worker", "SIGSTOP", _signals(_of("worker", second), signal.SIGSTOP)),
        Cell("active worker", "kill -9", _signals(_active, signal.SIGKILL)),
        Cell("active worker", "SIGSTOP", _signals(_active, signal.SIGSTOP)),
        Cell("active worker", "exception", _point("worker.infer.group", "error")),
        Cell("active worker", "hang", _point("worker.infer.group", "delay 1500")),
        Cell("active worker", "OOM", _point("worker.infer.outputs", "memory")),
        Cell("active worker", "ENOSPC", _point("worker.infer.outputs", "disk")),
        Cell("active worker", "garbage in", _point("controller.send.worker", "garbage")),
        Cell("active worker", "slow peer", _point("worker.infer.received", "delay 700")),
        Cell("standby worker", "kill -9", _signals(_standby, signal.SIGKILL)),
        Cell("standby worker", "SIGSTOP", _signals(_standby, signal.SIGSTOP)),
        Cell("standby worker", "exception", _point("worker.prepare", "error", _register)),
        Cell("standby worker", "hang", _point("worker.prepare", "delay 1500", _register)),
        Cell("standby worker", "OOM", _point("worker.prepare", "memory", _register)),
        Cell("stage", "kill -9", _signals(_maker, signal.SIGKILL)),
        Cell("stage", "SIGSTOP", _signals(_maker, signal.SIGSTOP)),
        Cell("stage", "exception", _point("stage.call", "error")),
        Cell("stage", "hang", _point("stage.done", "delay 1500")),
        Cell("stage", "OOM", _point("stage.call", "memory")),
        Cell("stage", "garbage in", _point("controller.send.stage", "garbage")),
        Cell("store / journal", "exception", _point("daemon.store.read", "error", _register)),
        Cell("store / journal", "ENOSPC", _point("build.write", "disk", _register)),
        Cell("store / journal", "garbage in", _damaged_journal, ends_controller=True),
        Cell("store / journal", "slow peer", _point("journal.write", "delay 300", _register)),
    ]
    return cells
