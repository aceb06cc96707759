"""``bench crowd``: a caller of the gateway beside a thousand connections that mean no good.

In turns: the caller alone, and beside a crowd of all kinds in a process of its own (idle, heads and
bodies that are slow, bodies without an end, huge heads, garbage, answers that are not read, HTTP/2
where it is not spoken, calls that are reset). What is cut comes again. The crowd is of one address,
and on this machine: it takes its share of the processors too.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..planning.fit import quantile
from ..testing import server
from .gateway import SMALL, Http, json_request
from .trials import Arm, Numbers, Run, now_ms

COUNT: Final = 1000
TICK_S: Final = 0.5  # each connection of the crowd does something once in so long
SLICES: Final = 25  # of a tick: not all at once
TURN_S: Final = 4.0
QUICK_TURN_S: Final = 1.5
PAUSE_S: Final = 0.003  # the caller's, between two requests
MAX_P99: Final = 2.0  # of the caller's alone
MAX_MORE_MIB: Final = 64.0

_HOST: Final = b"Host: localhost\r\n"
_POST: Final = b"POST /v2/models/small/infer HTTP/1.1\r\n" + _HOST


def run(bench: Run, _: Any = ()) -> None:
    """One case, two arms."""
    with (
        server(arena="64MiB", host_store="64MiB", http=True) as running,
        running.client() as client,
    ):
        client.register(SMALL.name, SMALL.source, weights="random:0", inputs=SMALL.inputs)
        status = Path("/proc", (running.state_dir / "gateway.lock").read_text().strip(), "status")
        command = [sys.executable, "-m", __name__, running.http_address, running.grpc_address]
        pipe = subprocess.PIPE
        with (
            subprocess.Popen([*command, str(COUNT)], stdin=pipe, stdout=pipe, text=True) as crowd,
            Http(running.http_address) as caller,
        ):

            def tell(word: str) -> Callable[[], None]:
                def said() -> None:
                    assert crowd.stdin is not None
                    assert crowd.stdout is not None
                    crowd.stdin.write(f"{word}\n")
                    crowd.stdin.flush()
                    crowd.stdout.readline()

                return said

            def measured() -> Numbers:
                return _measured(caller, QUICK_TURN_S if bench.is_quick else TURN_S, status)

            arms = [Arm(word, measured, tell(word)) for word in ("alone", "crowd")]
            bench.say(f"{COUNT} connections: measuring")
            bench.trial_loop("caller", arms, bench.rounds(8, 3))
            tell("end")()
    p99, memory = (
        [quantile(bench.values("caller", arm, key), 0.5) for arm in ("alone", "crowd")]
        for key in ("tail_ms", "memory_mib")
    )
    bench.find("p99 beside the crowd / alone", p99[1] / p99[0], at_most=MAX_P99)
    bench.find(
        "memory beside the crowd - alone", memory[1] - memory[0], "MiB", at_most=MAX_MORE_MIB
    )
    bench.notes.append(f"the crowd: {COUNT} connections, each does something each {TICK_S} s")


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
