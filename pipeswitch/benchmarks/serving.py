"""A server under measurement: started for a model, with a training job to preempt."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any, Final

from ..client.client import Client, Task
from ..client.tensors import Result
from ..testing import RunningServer, server
from .models import MIB, BenchModel
from .trials import Numbers, now_ms

TRAIN_ENTRY: Final = "pipeswitch.benchmarks.train_script:main"
SLICE_ROOM_BYTES: Final = 40 * MIB  # arrival words and the training job's slice
WAIT_S: Final = 60.0
POLL_S: Final = 0.01
SETTLE_S: Final = 1.0  # a held job's worker is replaced, and the new one prepares its models
STEPS_BETWEEN: Final = 2  # training is under way again before the next request
TWINS: Final = ("twin-a", "twin-b")
BILL: Final = ("queue_ms", "switch_ms", "copy_ms", "stall_ms", "compute_ms")


@contextlib.contextmanager
def serving(
    model: BenchModel,
    threads: int,
    seed: int,
    *,
    link_gbps: float = 0.0,
    rooms: int = 1,
    devices: tuple[str, ...] = ("cpu",),
) -> Iterator[tuple[RunningServer, Client]]:
    """A server whose arena holds one of two twins of a model, never both (or both: 2 rooms).

    The twins differ in their weights only: asking for the one that is not there is always a cold
    switch, of the same size.
    """
    arena = str(rooms * model.room_bytes + SLICE_ROOM_BYTES)
    store = 2 * model.room_bytes + 64 * MIB
    args = ["--threads", str(threads)]
    if link_gbps:
        args += ["--link-gbps", f"{link_gbps:.6f}"]
    with (
        server(
            arena=str(arena), host_store=str(store), devices=devices, args=tuple(args)
        ) as running,
        running.client() as client,
    ):
        for number, name in enumerate(TWINS):
            weights = f"random:{seed + number}"
            client.register(name, model.source, weights=weights, inputs=model.inputs)
        yield running, client


def ask(client: Client, name: str, inputs: Any, *, is_resident: bool) -> tuple[Result, Numbers]:
    """One request: the client's clock around it, and its bill. Wrong residency is an error."""
    began_ms = now_ms()
    result = client.infer(name, inputs)
    total_ms = now_ms() - began_ms
    timing = result.timing
    if timing.resident != is_resident:
        raise RuntimeError(f"{name} was {'' if timing.resident else 'not '}resident: no such trial")
    bill = {key: getattr(timing, key) for key in BILL}
    more = {"preempted": bool(timing.preempted), "worker": timing.worker}
    return result, {"total_ms": total_ms} | bill | more


class Training:
    """The background job: brought to run, or held, before a trial."""

    def __init__(self, client: Client, threads: int, seed: int, args: tuple[str, ...] = ()) -> None:
        self._random = random.Random(seed)
        options = ["--threads", str(threads), *args]
        self.task: Task = client.train(TRAIN_ENTRY, name="background", args=options)
        self.is_held = False

    def run(self) -> None:
        """Returns when it computes (again), at a random moment of its step."""
        if self.is_held:
            self.task.resume()
            self.is_held = False
        first = -1
        until_s = time.monotonic() + WAIT_S
        while True:
            row = self.task.status()
            if row["state"] == "running":
                first = row["step"] if first < 0 else first
                if row["step"] >= first + STEPS_BETWEEN:
                    break
            self._check(row, until_s)
        time.sleep(self._random.uniform(0.0, 0.05))  # requests do not wait for a step's end

    def hold(self) -> None:
        """Returns when it has left the device."""
        if self.is_held:
            return
        self.task.pause()
        self.is_held = True
        until_s = time.monotonic() + WAIT_S
        while (row := self.task.status())["state"] != "paused":
            self._check(row, until_s)
        time.sleep(SETTLE_S)

    @staticmethod
    def _check(row: dict[str, Any], until_s: float) -> None:
        if row["state"] in ("failed", "done", "cancelled") or time.monotonic() > until_s:
            raise RuntimeError(f"the training job does not do as it is told: {row}")
        time.sleep(POLL_S)
