"""Malicious peers and one good client, whose answers may come later, but must not be lost.

The attackers run in their own process, and memory must stay bounded. Every 0.1 s, each connection
does one more bad thing. A closed connection is opened again, unless the test forbids it. The long
run prints figures: ``pytest -m soak tests/process/test_hostile.py -s``."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_tools import Checked, checked_server, mlp, until

import pipeswitch as ps
from pipeswitch.extras.curve.curve_keys import KeyFolder, make_pair
from tests.process.figures import publishing, say

X = np.ones((1, 64), np.float32)
KINDS = ("idle", "half", "endless", "deaf", "giant")

ATTACKERS = r"""
import json, random, selectors, socket, struct, sys, time
address, count, kinds = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3]), sys.argv[4].split(",")
comes_again, with_keys = sys.argv[5] == "again", sys.argv[6] == "keys"
def table(*sizes):
    return b"PSW1" + struct.pack("<IQ", len(sizes), 0) + b"".join(
        struct.pack("<QQ", size, 2**64 - 1) for size in sizes)

PING = bytes([0x84, 0xA1, 0x76, 1, 0xA2]) + b"op" + b"\xa4ping\xa2id\xa11\xa7session\xa0"
HELLO = PING.replace(b"\xa4ping", b"\xa5hello")
if with_keys:
    BEGIN = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00NULL" + bytes(16) + b"\0" + bytes(31)
    READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    BEGIN += bytes([4, len(READY)]) + READY
    MORE = b"\x03" + struct.pack(">Q", 64 << 10) + bytes(64 << 10)   # a part, and more will come
    GIANT = b"\x02" + struct.pack(">Q", 8 << 30) + bytes(10)         # 8 GiB, of which ten bytes
    DEAF = (b"\x01\x04PSW1" + bytes([0, len(PING)]) + PING) * 40     # questions; no answer is read
else:
    BEGIN = table(len(HELLO)) + HELLO + table(10, 60 << 20) + bytes(10)  # a message that never ends
    MORE = bytes(64 << 10)
    GIANT = table(10, 8 << 30) + bytes(10)
    DEAF = (table(len(PING)) + PING) * 40

class Peer:
    def __init__(self, kind):
        self.kind, self.sock, self.is_over = kind, None, False

    def act(self):
        if self.is_over:
            return 0
        if self.sock is None:
            self.sock = socket.socket()
            self.sock.setblocking(False)
            self.sock.connect_ex(address)
            self.left = {"idle": b"", "half": BEGIN[:20], "endless": BEGIN}.get(
                self.kind, BEGIN if with_keys else b"")
            if self.kind == "deaf":
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            return 0
        more = {"endless": MORE, "giant": GIANT, "deaf": DEAF}.get(self.kind, b"")
        try:
            if self.kind != "deaf":
                while self.sock.recv(4096) != b"":
                    pass
                raise ConnectionResetError
        except BlockingIOError:
            pass
        except OSError:
            return self.again()
        self.left = self.left or more
        try:
            self.left = self.left[self.sock.send(self.left):] if self.left else b""
        except BlockingIOError:
            pass
        except OSError:
            return self.again()
        return 0

    def again(self):
        self.sock.close()
        self.sock, self.is_over = None, not comes_again
        return 1

peers = [Peer(kinds[n % len(kinds)]) for n in range(count)]
ended, round_number = 0, 0
print("ready", flush=True)
idle = selectors.DefaultSelector()
idle.register(sys.stdin, selectors.EVENT_READ)
while not idle.select(0.1):   # the end of our input is the end of the attack
    ended += sum(peer.act() for peer in peers)
print(json.dumps({"ended": ended}), flush=True)
"""


@contextlib.contextmanager
def attacked(
    address: str,
    count: int,
    kinds: tuple[str, ...] = KINDS,
    *,
    comes_again: bool = True,
    with_keys: bool = False,
) -> Iterator[dict[str, int]]:
    """Keep ``count`` malicious connections open during the block; yield a dictionary that has
    ``ended`` afterwards, the number of connections that the server has closed."""
    host, port = address.removeprefix("tcp://").split(":")
    figures: dict[str, int] = {}
    how_often = "again" if comes_again else "once"
    command = [
        sys.executable,
        "-c",
        ATTACKERS,
        host,
        port,
        str(count),
        ",".join(kinds),
        how_often,
        "keys" if with_keys else "open",
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.nice(10),
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield figures
        process.stdin.close()
        figures.update(json.loads(process.stdout.readline()))
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Rss:
    """Monitor of a process's largest resident size, in bytes, while the block runs."""

    def __init__(self, pid: int) -> None:
        self._path = Path("/proc", str(pid), "statm")
        self.first_bytes = self.now_bytes()
        self.max_bytes = self.first_bytes
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def now_bytes(self) -> int:
        return int(self._path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _run(self) -> None:
        while not self._done.wait(0.02):
            self.max_bytes = max(self.max_bytes, self.now_bytes())

    def __enter__(self) -> Rss:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def growth_mib(self) -> float:
        return (self.max_bytes - self.first_bytes) / (1 << 20)


def ask_for(client: ps.Client, seconds: float) -> list[float]:
    """Send requests one after the other, all of which must be answered; return latencies in ms."""
    times_ms = []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        begin_s = time.perf_counter()
        assert client.infer("small", X)["y"].shape == (1, 64)
        times_ms.append((time.perf_counter() - begin_s) * 1000)
    return times_ms


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


@contextlib.contextmanager
def good_client(folder: Path, *, with_keys: bool) -> Iterator[tuple[Checked, ps.Client]]:
    args: tuple[str, ...] = ()
    options: dict[str, Any] = {}
    if with_keys:
        keys = KeyFolder(folder / "keys").open()
        options["server_key"] = keys.make_server().public.decode()
        options["key"], public = make_pair("good", folder)
        keys.admit("good", public)
        args = ("--auth", "keys", "--keys-dir", str(keys.path))
    with checked_server(arena="64MiB", args=args) as checked:
        checked.client.register("small", mlp(64, 2, 1), example_inputs=(torch.zeros(1, 64),))
        with checked.running.client(tcp=True, **options) as client:
            yield checked, client


def measure(
    checked: Checked,
    client: ps.Client,
    count: int,
    seconds: float,
    kinds: tuple[str, ...] = KINDS,
    *,
    comes_again: bool = True,
    with_keys: bool = False,
) -> dict[str, Any]:
    """Return the good client's latencies without and during an attack, and the growth of RSS."""
    ask_for(client, min(seconds, 2.0))
    quiet = ask_for(client, seconds)
    address = checked.running.tcp_address
    attack_of = attacked(address, count, kinds, comes_again=comes_again, with_keys=with_keys)
    with Rss(checked.pid) as rss, attack_of as attack:
        under_attack = ask_for(client, seconds)
    stats = checked.stats()
    return {
        "connections": count,
        "quiet_p50_ms": round(sorted(quiet)[len(quiet) // 2], 3),
        "quiet_p99_ms": round(p99(quiet), 3),
        "attacked_p50_ms": round(sorted(under_attack)[len(under_attack) // 2], 3),
        "attacked_p99_ms": round(p99(under_attack), 3),
        "answers": len(under_attack),
        "rss_growth_mib": round(rss.growth_mib, 1),
        "cut": attack["ended"],
        "hung_up": stats["hung_up"],
    }


@pytest.mark.parametrize(
    "with_keys",
    [pytest.param(False, id="open"), pytest.param(True, marks=pytest.mark.soak, id="keys")],
)
def test_two_hundred_hostile_connections_cost_no_answer_and_little_memory(
    with_keys: bool, tmp_path: Path
) -> None:
    with good_client(tmp_path, with_keys=with_keys) as (checked, client):
        figures = measure(checked, client, 200, 5.0, with_keys=with_keys)
        assert figures["answers"] > 0
        assert figures["cut"] > 0
        assert figures["rss_growth_mib"] < 64, figures
        until(lambda: checked.stats()["connections"] <= 4, "they are forgotten")


@pytest.mark.soak
@pytest.mark.parametrize("kinds", [KINDS, *((kind,) for kind in KINDS)], ids="+".join)
@pytest.mark.parametrize("with_keys", [False, True], ids=["open", "keys"])
def test_a_thousand_hostile_connections(
    with_keys: bool, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    limit_mib = 64 if with_keys else 256
    name = f"hostile_{'keys' if with_keys else 'open'}_{'all' if kinds == KINDS else kinds[0]}"
    with publishing(name) as figures:
        figures.update(keys=with_keys, kinds=kinds, rss_limit_mib=limit_mib)
        with good_client(tmp_path, with_keys=with_keys) as (checked, client):
            figures.update(measure(checked, client, 1000, 15.0, kinds, with_keys=with_keys))
        say(json.dumps(figures))
        assert figures["rss_growth_mib"] < limit_mib, figures


@pytest.mark.soak
@pytest.mark.parametrize("with_keys", [False, True], ids=["open", "keys"])
def test_a_thousand_hostile_connections_that_come_once(with_keys: bool, tmp_path: Path) -> None:
    """Do not reconnect, because reconnects would cost more than what the connections send."""
    limit_mib = 64 if with_keys else 256
    with publishing(f"hostile_{'keys' if with_keys else 'open'}_once") as figures:
        figures.update(keys=with_keys, kinds=KINDS, rss_limit_mib=limit_mib)
        with good_client(tmp_path, with_keys=with_keys) as (checked, client):
            figures.update(
                measure(checked, client, 1000, 15.0, comes_again=False, with_keys=with_keys)
            )
        say(json.dumps(figures))
        assert figures["rss_growth_mib"] < limit_mib, figures
