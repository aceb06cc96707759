"""Greedy clients of one tenant, in a process of their own (``bench crowd``).

Standard input says how many of all of them act from now on. Each is of one kind, in turns: open
requests, JSON, gRPC, requests that are taken back, registrations, uploads that only promise bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from pipeswitch.client.client import Client
from pipeswitch.errors import PipeSwitchError

from .gateway import Http, grpc_caller, json_request

MODELS: Final = ("greedy-a", "greedy-b", "greedy-c")
X: Final = np.ones((1, 512), np.float32)
OPEN: Final = 64  # requests of one client
KINDS: Final = 6
PROMISED_BYTES: Final = 64 << 20
PAUSE_S: Final = 0.002  # after a refusal: who asks again at once measures its own processor
Ask = Callable[[], object]


@dataclass(frozen=True)
class Doors:
    """Where a tenant comes in, and what with."""

    tcp: str
    http: str
    grpc: str
    key: str
    server_key: str
    token: str
    bundle: str  # a small model

    def client(self) -> Client:
        return Client(self.tcp, key=self.key, server_key=self.server_key)

    def json(self, model: str) -> bytes:
        """A request made before."""
        request = json_request(X, f"/v2/models/{model}/infer")
        line = f"\r\nAuthorization: Bearer {self.token}\r\n\r\n".encode()
        return request.replace(b"\r\n\r\n", line, 1)


@contextlib.contextmanager
def _asks(doors: Doors, number: int) -> Iterator[Ask]:
    """What this one does again and again."""
    kind, model = number % KINDS, MODELS[number // KINDS % len(MODELS)]
    waiting: deque[Future[Any]] = deque()
    files = itertools.count(number, 1000)

    def keep_open() -> None:
        waiting.append(client.submit(model, X))
        if len(waiting) >= OPEN:
            waiting.popleft().result()

    def take_back() -> None:
        for future in [client.submit(model, X) for _ in range(OPEN)]:
            future.cancel()
        client.infer(model, X)

    def register() -> None:
        client.register(f"greedy-{number}", doors.bundle)
        client.unregister(f"greedy-{number}")

    def promise() -> None:
        digest = hashlib.sha256(str(next(files)).encode()).hexdigest()
        body = {"digest": digest, "size_bytes": PROMISED_BYTES, "offset_bytes": 0, "kind": "bundle"}
        client._connection.call("put", body=body)

    if kind == 1:
        with Http(doors.http) as caller:
            yield partial(caller.ask, doors.json(model))
    elif kind == 2:
        with grpc_caller(doors.grpc, model, X, "input", doors.token) as ask:
            yield ask
    else:
        with doors.client() as client:
            yield {0: keep_open, 3: take_back, 4: register, 5: promise}[kind]


def main() -> None:
    """``NUMBER STEP DOORS``: of all greedy ones these are NUMBER, NUMBER + STEP, …"""
    first, step, doors = int(sys.argv[1]), int(sys.argv[2]), Doors(**json.loads(sys.argv[3]))
    turn = 0

    def greedy(number: int, mine: int) -> None:
        while turn == mine:
            with contextlib.suppress(Exception), _asks(doors, number) as ask:  # cut, it comes again
                while turn == mine:
                    try:
                        ask()
                    except PipeSwitchError:
                        time.sleep(PAUSE_S)
            time.sleep(PAUSE_S)

    threads: list[threading.Thread] = []
    for line in sys.stdin:
        turn += 1
        for thread in threads:
            thread.join()
        numbers = range(first, int(line), step)
        threads = [threading.Thread(target=greedy, args=(one, turn)) for one in numbers]
        for thread in threads:
            thread.start()
        sys.stdout.write("so\n")
        sys.stdout.flush()
    turn += 1


if __name__ == "__main__":
    main()
