"""``bench crowd``: who uses little beside a thousand connections, and beside a greedy tenant.

A caller of the gateway, in turns alone and beside a crowd of all kinds in a process of its own
(idle, heads and bodies that are slow, bodies without an end, huge heads, garbage, answers that are
not read, HTTP/2 where it is not spoken, calls that are reset). What is cut comes again. The crowd
is of one address.

Then a modest client, with a key and a token of its own, beside 1, 8 and 64 greedy ones of another
tenant (``greedy.py``): it asks once and waits for the answer, each tenth time with JSON, and
registers and unregisters a small model in each turn. Everything runs on this machine's cores, niced
alike: ``greedy_cores`` and ``controller_cores`` say who had them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from pipeswitch.errors import PipeSwitchError
from pipeswitch.planning.fit import quantile
from pipeswitch.testing import RunningServer, server
from pipeswitch.wire.keys import KeyFolder, make_pair

from .gateway import SMALL, Http, json_request
from .greedy import MODELS, Doors, X
from .trials import Arm, Numbers, Run, now_ms

COUNT: Final = 1000
TICK_S: Final = 0.5  # each connection of the crowd does something once in so long
SLICES: Final = 25  # of a tick: not all at once
TURN_S: Final = 4.0
QUICK_TURN_S: Final = 1.5
PAUSE_S: Final = 0.003  # the caller's, between two requests
MAX_P99: Final = 2.0  # of the caller's alone
MAX_MORE_MIB: Final = 64.0
GREEDY: Final = (0, 1, 8, 64)
PROCESSES: Final = 8  # of the greedy ones
MODEST: Final = "modest"
PADDING: Final = "x" * 16  # of a token
TOWER: Final = "benchmarks.factories:tower_24"  # about 2 ms

Child = subprocess.Popen[str]

_HOST: Final = b"Host: localhost\r\n"
_POST: Final = b"POST /v2/models/small/infer HTTP/1.1\r\n" + _HOST


def run(bench: Run, _: Any = ()) -> None:
    """Both cases."""
    _callers(bench)
    _tenants(bench)


def _callers(bench: Run) -> None:
    """One case, two arms."""
    with (
        server(arena="64MiB", host_store="64MiB", http=True) as running,
        running.client() as client,
    ):
        client.register(SMALL.name, SMALL.source, weights="random:0", inputs=SMALL.inputs)
        status = Path("/proc", (running.state_dir / "gateway.lock").read_text().strip(), "status")
        words = (__name__, running.http_address, running.grpc_address, str(COUNT))
        with _child(*words) as crowd, Http(running.http_address) as caller:

            def measured() -> Numbers:
                return _measured(caller, QUICK_TURN_S if bench.is_quick else TURN_S, status)

            arms = [Arm(word, measured, partial(_tell, crowd, word)) for word in ("alone", "crowd")]
            bench.say(f"{COUNT} connections: measuring")
            bench.trial_loop("caller", arms, bench.rounds(8, 3))
            _tell(crowd, "end")
    p99, memory = (
        [quantile(bench.values("caller", arm, key), 0.5) for arm in ("alone", "crowd")]
        for key in ("tail_ms", "memory_mib")
    )
    bench.find("p99 beside the crowd / alone", p99[1] / p99[0], at_most=MAX_P99)
    bench.find(
        "memory beside the crowd - alone", memory[1] - memory[0], "MiB", at_most=MAX_MORE_MIB
    )
    bench.notes.append(f"the crowd: {COUNT} connections, each does something each {TICK_S} s")


def _child(module: str, *words: str) -> Child:
    command, pipe = [sys.executable, "-m", module, *words], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def _tell(child: Child, word: str) -> None:
    """Returns when it is so."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{word}\n")
    child.stdin.flush()
    child.stdout.readline()


def _measured(caller: Http, seconds: float, status: Path) -> Numbers:
    """A turn's requests; the gateway's memory at its end."""
    request = json_request(np.ones((1, 64), np.float32))
    taken_ms, until_ms = [], now_ms() + seconds * 1000
    while now_ms() < until_ms:
        began_ms = now_ms()
        caller.ask(request)
        taken_ms.append(now_ms() - began_ms)
        time.sleep(PAUSE_S)
    resident = re.search(r"VmRSS:\s+(\d+) kB", status.read_text())
    assert resident is not None
    return {
        "median_ms": quantile(taken_ms, 0.5),
        "tail_ms": quantile(taken_ms, 0.99),
        "requests": len(taken_ms),
        "memory_mib": int(resident[1]) / 1024,
    }


# ---- tenants -----------------------------------------------------------------------------------


def _tenants(bench: Run) -> None:
    """A modest one's requests, alone and beside greedy ones of another."""
    seconds = QUICK_TURN_S if bench.is_quick else TURN_S
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pipeswitch-bench-")))
        running, modest, greedy = stack.enter_context(_two_tenants(folder))
        words = f"{__package__}.greedy", str(PROCESSES), json.dumps(dataclasses.asdict(greedy))
        crowd = [
            stack.enter_context(_child(words[0], str(number), *words[1:]))
            for number in range(PROCESSES)
        ]

        def tell(count: int) -> None:
            for child in crowd:
                _tell(child, str(count))

        def measured() -> Numbers:
            return _beside(modest, seconds, [child.pid for child in crowd], running.process.pid)

        arms = [Arm(f"beside {count}", measured, partial(tell, count)) for count in GREEDY]
        bench.say("a modest client beside greedy ones: measuring")
        bench.trial_loop("tenants", arms, bench.rounds(6, 2))
        tell(0)
    found = {
        key: [quantile(bench.values("tenants", arm.name, key), 0.5) for arm in arms]
        for key in ("answers_per_s", "tail_ms")
    }
    for arm, rate, p99_ms in zip(arms, *found.values(), strict=True):
        share, refused = (
            rate / found["answers_per_s"][0],
            bench.values("tenants", arm.name, "refused"),
        )
        bench.find(f"modest {arm.name}: answers a second, of those alone", share)
        bench.find(f"modest {arm.name}: p99", p99_ms, "ms")
        bench.find(f"modest {arm.name}: refused", sum(refused), at_most=0.0)


@contextlib.contextmanager
def _two_tenants(folder: Path) -> Iterator[tuple[RunningServer, Doors, Doors]]:
    """A server; how a modest client comes in, and how greedy ones do."""
    names, roles = ("modest", "greedy"), ("infer", "register")
    keys = KeyFolder(folder / "keys").open()
    server_key = keys.make_server().public.decode()
    secrets = {}
    for name in names:
        secrets[name], public = make_pair(name, folder)
        keys.admit(name, public, roles)
    (tokens := folder / "tokens").touch(0o600)
    tokens.write_text("".join(f"{name} {name}-{PADDING} infer\n" for name in names))
    flags = ("--auth", "keys", "--keys-dir", str(keys.path), "--gateway-tokens", str(tokens))
    with (
        server(arena="160MiB", host_store="512MiB", http=True, args=flags) as running,
        running.client() as client,
    ):
        for name in (MODEST, *MODELS):
            client.register(name, TOWER, weights="random:0", inputs={"input": (X.shape, "float32")})
        row = client.register(SMALL.name, SMALL.source, weights="random:0", inputs=SMALL.inputs)
        bundle = running.state_dir / "models" / row["digest"] / "program.bundle"
        modest, greedy = (
            Doors(running.tcp_address, running.http_address, running.grpc_address,
                  str(secrets[name]), server_key, f"{name}-{PADDING}", str(bundle))
            for name in names
        )  # fmt: skip
        yield running, modest, greedy


def _beside(doors: Doors, seconds: float, crowd: Sequence[int], controller: int) -> Numbers:
    """A turn of the modest one: a registration, then requests one after the other."""
    request = doors.json(MODEST)
    taken: dict[str, list[float]] = defaultdict(list)
    refused: Counter[str] = Counter()

    def ask(what: str, asks: Callable[[], object]) -> None:
        began_ms = now_ms()
        try:
            asks()
        except (PipeSwitchError, RuntimeError, OSError) as error:
            refused[f"{what} {type(error).__name__}: {str(error)[:100]}"] += 1
        else:
            taken[what].append(now_ms() - began_ms)

    with doors.client() as client, Http(doors.http) as caller:
        time.sleep(TICK_S)  # the crowd has begun
        ask("register", lambda: client.register("modest-small", doors.bundle))
        ask("unregister", lambda: client.unregister("modest-small"))
        began_ms, greedy_s, controller_s = now_ms(), _used_s(crowd), _used_s([controller])
        for number in itertools.count(1):
            if number % 10:
                ask("request", lambda: client.infer(MODEST, X))
            else:
                ask("request", lambda: caller.ask(request))
            if now_ms() - began_ms > seconds * 1000:
                break
            time.sleep(PAUSE_S)
    took_s = (now_ms() - began_ms) / 1000
    answers_ms = taken["request"] or [took_s * 1000]
    return {
        "answers_per_s": len(taken["request"]) / took_s,
        "median_ms": quantile(answers_ms, 0.5),
        "tail_ms": quantile(answers_ms, 0.99),
        "register_ms": max(taken["register"], default=None),
        "refused": refused.total(),
        "refusals": dict(refused),
        "greedy_cores": (_used_s(crowd) - greedy_s) / took_s,
        "controller_cores": (_used_s([controller]) - controller_s) / took_s,
    }


def _used_s(pids: Sequence[int]) -> float:
    """Processor time of these processes so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


# ---- the crowd, in a process of its own -------------------------------------------------------


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One of HTTP/2."""
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


def _resets(first: int) -> bytes:
    """Ten calls of gRPC, each taken back at once."""
    fields = {
        b":method": b"POST", b":scheme": b"http", b":authority": b"localhost",
        b":path": b"/inference.GRPCInferenceService/ServerLive", b"te": b"trailers",
        b"content-type": b"application/grpc",
    }  # fmt: skip
    head = b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in fields.items()
    )
    streams = range(first, first + 20, 2)
    return b"".join(_frame(1, 4, s, head) + _frame(3, 0, s, b"\0\0\0\x08") for s in streams)


_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0)
_KINDS: Final[tuple[tuple[bytes, bytes, bool], ...]] = (  # at first, each tick, whether it reads
    (b"", b"", True),
    (_POST + b"A: ", b"x", True),
    (_POST + b"Content-Length: 60000000\r\n\r\n", b"x" * 100, True),
    (_POST + b"Content-Length: 60000000\r\n\r\n", b"x" * 65536, True),
    (_POST + b"Transfer-Encoding: chunked\r\n\r\n", b"4000\r\n" + b"x" * 0x4000 + b"\r\n", True),
    (_POST + b"A: " + b"x" * 60_000, b"x", True),
    (b"GET / HTTP/1.1\r\n\r\nGET\r\n\r\n" * 100, b"G\r\n", True),
    ((b"GET /v2 HTTP/1.1\r\n" + _HOST + b"\r\n") * 300, b"", False),
    (_PREFACE, _resets(1), True),
)


class _One:
    """A connection that comes again when it is cut; its last kind speaks to gRPC."""

    def __init__(self, number: int, http: str, grpc: str) -> None:
        self._opening, self._more, self._reads = _KINDS[number % len(_KINDS)]
        self._is_grpc = number % len(_KINDS) == len(_KINDS) - 1 and number % 2 == 0
        host, _, port = (grpc if self._is_grpc else http).rpartition(":")
        self._address = host, int(port)
        self._socket: socket.socket | None = None
        self._unsent = b""  # of the opening
        self._stream = 1

    def act(self) -> None:
        """Connect, or send on and read what there is."""
        try:
            if self._socket is None:
                self._socket, self._unsent, self._stream = socket.socket(), self._opening, 1
                self._socket.settimeout(0)
                self._socket.connect(self._address)
            if self._unsent:
                self._socket.send(self._unsent)
                self._unsent = b""
            elif self._is_grpc:
                self._more, self._stream = _resets(self._stream), self._stream + 20
                self._socket.send(self._more)
            elif self._more:
                self._socket.send(self._more)
            if self._reads and not self._socket.recv(1 << 16):
                self.end()
        except BlockingIOError:
            return
        except OSError:
            self.end()

    def end(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def crowd(http: str, grpc: str, count: int) -> None:
    """``crowd``, ``alone`` or ``end`` on standard input; answered when it is so."""
    ones = [_One(number, http, grpc) for number in range(count)]
    word, turn = "alone", 0
    while word != "end":
        waits_s = TICK_S / SLICES if word == "crowd" else None
        if select.select([sys.stdin], [], [], waits_s)[0]:
            word = sys.stdin.readline().strip() or "end"
            for one in ones:
                one.act() if word == "crowd" else one.end()
            sys.stdout.write("so\n")
            sys.stdout.flush()
        elif word == "crowd":
            turn += 1
            for one in ones[turn % SLICES :: SLICES]:
                one.act()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        crowd(sys.argv[1], sys.argv[2], int(sys.argv[3]))
