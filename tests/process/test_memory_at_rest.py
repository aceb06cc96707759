"""Memory at rest after abuse: with twice as many repetitions, no more memory is in use."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import numpy as np
import process_tools as tools
import psutil
import pytest
import torch

from pipeswitch.wire.frames import INLINE, pack_table

MIB = 1 << 20
MAX_GROWTH_BYTES = 16 * MIB
HALF = pack_table([(40 * MIB, INLINE)]) + bytes(32 * MIB)
BODY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,64],"data":[%s]}]}'
PARTS, ONES = BODY % (b"[]," * 300_000 + b"[]"), BODY % (b"1," * 63 + b"1")


def sent(family: int, address: object, data: bytes, reads: int = 0) -> None:
    """Send data, read the first ``reads`` bytes of an answer, and disconnect."""
    with socket.socket(family) as sock, contextlib.suppress(BrokenPipeError):  # if it is refused
        sock.settimeout(60)
        sock.connect(address)
        sock.sendall(data)
        assert not reads or sock.recv(reads)


def post(checked: tools.Checked, body: bytes) -> None:
    host, _, port = checked.running.http_address.rpartition(":")
    head = b"POST /v2/models/wide/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    sent(socket.AF_INET, (host, int(port)), head % len(body) + body, 9)


ABUSES: dict[str, Callable[[tools.Checked], object]] = {
    "answers of 16 MiB": lambda c: c.client.infer("wide", np.ones((1, 64), np.float32)),
    "answers that are not read": lambda c: post(c, ONES),
    "JSON of many parts": lambda c: post(c, PARTS),
    "half a message": lambda c: sent(socket.AF_UNIX, c.running.ipc_address[6:], HALF),
}


class Wide(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x + number for number in range(64)], 1).repeat(1, 1024)


@pytest.fixture(scope="module")
def running() -> Iterator[tools.Checked]:
    args = ("--gateway-roles", "infer")
    with tools.checked_server(arena="64MiB", http=True, args=args) as checked:
        checked.client.register("wide", Wide(), example_inputs=(torch.zeros(1, 64),))
        for abuse in ABUSES.values():
            abuse(checked)  # so that imports and caches do not count later
        yield checked


@pytest.mark.parametrize("name", ABUSES)
def test_what_was_done_twice_as_often_holds_no_more(running: tools.Checked, name: str) -> None:
    server = psutil.Process(running.pid)
    pids = [running.pid, *(one.pid for one in server.children(recursive=True))]
    before = {pid: tools.private_bytes(pid) for pid in pids}
    for count in (4, 8):
        for _ in range(count):
            ABUSES[name](running)
        most = {pid: size + MAX_GROWTH_BYTES for pid, size in before.items()}
        tools.until(
            lambda most=most: all(tools.private_bytes(pid) <= n for pid, n in most.items()),
            f"all is given back after {count}",
        )
