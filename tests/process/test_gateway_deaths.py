"""Deaths of the gateway, deaths of the server behind a gateway, and malicious peers."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from process_tools import Checked, checked_server, eager, kill, mlp, until

pytest.importorskip("httptools", reason="make installs it")

BODY = json.dumps(
    {"inputs": [{"name": "x", "shape": [1, 16], "datatype": "FP32", "data": [1.0] * 16}]}
).encode()
HEAD = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n\r\n"
CALLERS, KILLS = 4, 40


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def ask(sock: socket.socket, request: bytes = HEAD.encode() + BODY) -> tuple[int, bytes]:
    """Send a request; return the status and body of its answer."""
    sock.sendall(request)
    got = b""
    while b"\r\n\r\n" not in got:
        piece = sock.recv(1 << 16)
        if not piece:
            raise ConnectionError("hung up before the answer")
        got += piece
    head, _, body = got.partition(b"\r\n\r\n")
    size = re.search(rb"Content-Length: (\d+)", head)
    while len(body) < int(size[1]):
        piece = sock.recv(1 << 16)
        if not piece:
            raise ConnectionError("hung up within the answer")
        body += piece
    return int(head.split()[1]), body


def ask_once(address: str) -> int:
    """Send a request over a new connection; return its status, or 0 if the connection breaks."""
    with contextlib.suppress(ConnectionError, TimeoutError), connected(address) as sock:
        return ask(sock)[0]
    return 0


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gateway") / "state"


@pytest.fixture(scope="module")
def checked(state: Path) -> Iterator[Checked]:
    """Start a server, which the last test of the file kills."""
    with checked_server(http=True, state_dir=state, settles=False, status=-9) as checked:
        checked.client.register("m", mlp(16, 1, seed=0), example_inputs=(torch.zeros(2, 16),))
        yield checked


def resident_mib(pid: int) -> float:
    text = Path("/proc", str(pid), "status").read_text()
    match = re.search(r"VmRSS:\s+(\d+) kB", text)
    return int(match[1]) / 1024


HOSTILE = (
    b"",  # an idle connection
    b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nA: ",  # an incomplete head
    b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000000\r\n\r\n",
    b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1;",
    b"GET / HTTP/1.1\r\n\r\nGET\r\n\r\n" * 100,  # pipelined garbage
    b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nA: " + bytes([65]) * 60_000,  # a huge, incomplete head
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, 8]) * 100,
    HEAD.encode() + BODY + b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3000,  # unread answers
)


def test_a_crowd_that_means_no_good_costs_a_good_caller_nothing_but_time(checked: Checked) -> None:
    stand(checked, 240)


@pytest.mark.slow
def test_of_a_thousand_from_one_address_half_are_let_in_and_who_has_asked_stays() -> None:
    with checked_server(http=True, settles=False) as checked:
        checked.client.register("m", mlp(16, 1, seed=0), example_inputs=(torch.zeros(2, 16),))
        stand(checked, 1000)


def stand(checked: Checked, count: int) -> None:
    """Check that a good connection works during ``count`` malicious ones, with bounded memory."""
    with contextlib.ExitStack() as stack:
        address, pid = checked.running.http_address, checked.gateway_pid()
        good = stack.enter_context(connected(address))
        assert ask(good)[0] == 200
        before = resident_mib(pid)
        crowd = []
        for number in range(count):
            sock = stack.enter_context(connected(address))
            sock.settimeout(0)
            crowd.append(sock)
            with contextlib.suppress(OSError):
                sock.send(HOSTILE[number % len(HOSTILE)])
        ends_at, answered, largest = time.monotonic() + 3.0, 0, before
        while time.monotonic() < ends_at or answered < 5:
            for number, sock in enumerate(crowd):
                with contextlib.suppress(OSError):
                    is_fast = number % len(HOSTILE) in (2, 3)
                    sock.send(b"x" * (1 << 16 if is_fast else 1))
            assert ask(good)[0] == 200
            answered += 1
            largest = max(largest, resident_mib(pid))
        assert largest - before <= 64, (before, largest)
        assert checked.gateway_pid() == pid


def test_a_port_in_use_is_refused_in_words_when_it_was_asked_for(tmp_path: Path) -> None:
    from pipeswitch.testing import server

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with (
            pytest.raises(RuntimeError, match=re.escape(f"cannot listen on {address}")),
            server(http=True, args=("--http", address), state_dir=tmp_path / "state"),
        ):
            pass


def test_it_dies_and_the_next_one_answers_those_who_came_meanwhile(checked: Checked) -> None:
    address, before = checked.running.http_address, checked.stats()
    first = checked.gateway_pid()
    kill(first)
    assert ask_once(address) == 200
    assert checked.gateway_pid() != first
    assert checked.stats()["worker_restarts"] == before["worker_restarts"]


class Caller(threading.Thread):
    """Thread that sends requests until it is stopped; it reconnects only if a connection breaks."""

    def __init__(self, address: str, expected: list[float]) -> None:
        super().__init__()
        self._address, self._wanted = address, expected
        self.answered = self.broken = 0
        self.error: Exception | None = None
        self.is_over = threading.Event()

    def run(self) -> None:
        try:
            while not self.is_over.is_set():
                try:
                    self._ask_on()
                except ConnectionError:  # try again; a caller fails after 30 s without an answer
                    self.broken += 1
        except Exception as error:
            self.error = error

    def _ask_on(self) -> None:
        with connected(self._address) as sock:
            while not self.is_over.is_set():
                status, body = ask(sock)
                assert status == 200, body
                assert json.loads(body)["outputs"][0]["data"] == self._wanted
                self.answered += 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_again_and_again_under_load_every_call_ends_and_no_answer_is_lost() -> None:
    net = mlp(16, 1, seed=0)
    patient = {"PIPESWITCH_WORKERS__RESTART_BACKOFF": "10ms"}
    with checked_server(http=True, environment=patient) as checked:
        checked.client.register("m", net, example_inputs=(torch.zeros(2, 16),))
        expected = eager(net, torch.ones(1, 16)).reshape(-1).tolist()
        before = checked.settle()
        callers = [Caller(checked.running.http_address, expected) for _ in range(CALLERS)]
        for caller in callers:
            caller.start()
        for _ in range(KILLS):
            known = sum(caller.answered for caller in callers)

            def goes_on(known: int = known) -> bool:  # one answer per caller may be in flight
                return sum(caller.answered for caller in callers) > known + CALLERS or any(
                    caller.error for caller in callers
                )

            until(goes_on, "the next one answers", 120.0)
            kill(checked.gateway_pid())
        for caller in callers:
            caller.is_over.set()
        for caller in callers:
            caller.join()
            assert caller.error is None
        assert all(caller.broken for caller in callers)
        after = checked.settle()  # checks that each request was answered, and resources are free
        answered = sum(caller.answered for caller in callers)
        assert after["inference"]["ok"] - before["inference"]["ok"] >= answered
        assert after["inference"]["error"] == before["inference"]["error"]
        assert after["worker_restarts"] == before["worker_restarts"]


def test_when_the_server_dies_it_says_so_until_the_next_one_takes_over(
    checked: Checked, state: Path
) -> None:
    address, pid = checked.running.http_address, checked.gateway_pid()
    kill(pid, signal.SIGSTOP)  # the server dies before it can notice the stopped gateway
    kill(checked.pid)
    until(lambda: ask_once(address) == 503, "callers are told")
    with connected(address) as sock:
        status, body = ask(sock, b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (status, json.loads(body)["ready"]) == (503, False)
    with checked_server(http=True, state_dir=state, args=("--http", address)) as next_one:
        assert next_one.running.http_address == address
        assert next_one.gateway_pid() != pid
        until(lambda: ask_once(address) == 200, "its model answers again")
        until(lambda: not Path("/proc", str(pid)).exists(), "the one before has left")
