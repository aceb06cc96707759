"""Training and inference in one process without PipeSwitch, as a baseline of ``interference``.

``python -m … sharing share ORDER`` reads one segment per line: a mode and the times at which
requests are due. It prints the requests' latencies, and the number of steps trained in the segment.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from . import plain
from .train_script import network
from .trials import now_ms, say

PROBES: Final = 5


class Sessions:
    """Fair lock of the device: threads get it one after the other, in the order of their requests.

    A plain lock would prefer the trainer, which takes it again before a waiting thread wakes.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[object] = deque()

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        ticket = object()
        with self._changed:
            self._line.append(ticket)
            self._changed.wait_for(lambda: self._line[0] is ticket)
        try:
            yield
        finally:
            with self._changed:
                self._line.popleft()
                self._changed.notify_all()


class Trainer:
    """The training that the benchmark's job does, one call per step."""

    def __init__(self, batch: int) -> None:
        self._model, self._x, self._y = network(batch=batch)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-4)
        self.steps = 0

    def step(self) -> None:
        loss: Any = nn.functional.mse_loss(self._model(self._x), self._y)  # untyped in torch
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1

    def run(self, is_over: threading.Event, turn: Callable[[], Any]) -> None:
        """Train until ``is_over`` is set. Each step runs in a context that ``turn`` returns."""
        while not is_over.is_set():
            with turn():
                self.step()


def segment(
    mode: str, due_s: Sequence[float], trainer: Trainer, infer: Callable[[], Any]
) -> dict[str, Any]:
    """Answer requests when they are due, while a thread trains (not in the mode ``alone``)."""
    turn = Sessions().session if mode == "sessions" else contextlib.nullcontext
    is_over = threading.Event()
    thread = threading.Thread(target=trainer.run, args=(is_over, turn))
    first = trainer.steps
    began_s = time.monotonic()
    if mode != "alone":
        thread.start()
    latencies_ms = []
    for instant_s in due_s:
        time.sleep(max(0.0, began_s + instant_s - time.monotonic()))
        with turn():
            infer()
        latencies_ms.append((time.monotonic() - began_s - instant_s) * 1000)
    seconds = time.monotonic() - began_s
    steps = trainer.steps - first
    is_over.set()
    if mode != "alone":
        thread.join()
    return {"latencies_ms": latencies_ms, "steps": steps, "seconds": seconds}


def _inference(order: plain.Order) -> Callable[[], Any]:
    module, inputs = plain.load(order).module, plain.inputs_of(order)

    def infer() -> None:
        with torch.inference_mode():
            module(*inputs)

    return infer


def main() -> None:
    """Run each segment on standard input, on the order's cores, with the server's thread count."""
    order = json.loads(sys.argv[2])
    os.sched_setaffinity(0, order["cores"])
    torch.set_num_threads(order["threads"])
    infer, trainer = _inference(order), Trainer(order["batch"])
    trainer.step()
    say(request_ms=_fastest_ms(infer), step_ms=_fastest_ms(trainer.step))
    for line in sys.stdin:
        message = json.loads(line)
        say(**segment(message["mode"], message["due_s"], trainer, infer))


def _fastest_ms(action: Callable[[], Any]) -> float:
    times_ms = []
    for _ in range(PROBES):
        began_ms = now_ms()
        action()
        times_ms.append(now_ms() - began_ms)
    return min(times_ms)


if __name__ == "__main__":
    main()
