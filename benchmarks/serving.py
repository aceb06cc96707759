"""A server under measurement: started for a model, with a training job to preempt."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from pipeswitch.client.client import Client, Task
from pipeswitch.client.tensors import Result
from pipeswitch.planning.fit import quantile
from pipeswitch.testing import RunningServer, server

from .models import MIB, BenchModel
from .trials import Numbers, nothing, now_ms

TRAIN_ENTRY: Final = "benchmarks.train_script:main"
SLICE_ROOM_BYTES: Final = 40 * MIB  # fences and the training job's slice
WAIT_S: Final = 60.0
POLL_S: Final = 0.01
SETTLE_S: Final = 1.0  # a held job's worker is replaced, and the new one prepares its models
STEPS_BETWEEN: Final = 2  # training is under way again before the next request
TWINS: Final = ("twin-a", "twin-b")
FAST_TWINS: Final = ("fast-a", "fast-b")
SWITCH_INTERVAL_S: Final = 0.0005  # the clients are threads: one keeps another for no 5 ms
BILL: Final = ("queue_ms", "switch_ms", "copy_ms", "stall_ms", "compute_ms")


@contextlib.contextmanager
def serving(
    model: BenchModel,
    threads: int,
    seed: int,
    *,
    rooms: int = 1,
    devices: tuple[str, ...] = ("cpu",),
    are_pinned: bool = False,
    slices_bytes: int = SLICE_ROOM_BYTES,
    has_fast: bool = False,
) -> Iterator[tuple[RunningServer, Client]]:
    """A server whose arena holds one of two twins of a model, never both (or both: 2 rooms).

    The twins differ in their weights only: asking for the one that is not there is always a cold
    switch, of the same size. Pinned, each is limited to a device of its own. ``has_fast``: there
    are also two twins in precision ``fast``.
    """
    with (
        server(
            arena=str(rooms * model.room_bytes + slices_bytes),
            host_store=str((2 + 2 * has_fast) * (model.room_bytes + slices_bytes)),
            devices=devices,
            args=("--threads", str(threads)),
        ) as running,
        running.client() as client,
    ):
        for number, name in enumerate(TWINS):
            client.register(
                name,
                model.source,
                weights=f"random:{seed + number}",
                inputs=model.inputs,
                devices=devices[number : number + 1] if are_pinned else (),
            )
        for number, name in enumerate(FAST_TWINS if has_fast else ()):
            client.register(
                name,
                model.source,
                weights=f"random:{seed + number}",
                inputs=model.inputs,
                precision="fast",
            )
        yield running, client


def ask(client: Client, name: str, inputs: Any, *, is_resident: bool) -> tuple[Result, Numbers]:
    """Send one request; return the client's time and its bill. Wrong residency is an error."""
    began_ms = now_ms()
    result = client.infer(name, inputs)
    total_ms = now_ms() - began_ms
    timing = result.timing
    if timing.resident != is_resident:
        raise RuntimeError(f"{name} was {'' if timing.resident else 'not '}resident: no such trial")
    bill = {key: getattr(timing, key) for key in BILL}
    more = {"preempted": bool(timing.preempted), "worker": timing.worker}
    return result, {"total_ms": total_ms} | bill | more


def inputs_of(client: Client) -> Any:
    """Zeros of the smallest batch that the twins take."""
    (shape, _), *_ = client.show(TWINS[0])["inputs"].values()
    return np.zeros([size if isinstance(size, int) else 1 for size in shape], np.float32)


def window(
    running: RunningServer,
    names: Sequence[str],
    inputs: Any,
    seconds: float,
    meanwhile: Callable[[], object] = nothing,
) -> Numbers:
    """Each name's client asks until the window is over; the last request is waited for.

    ``meanwhile`` is called once they ask.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    began_ms = now_ms()

    def ask(name: str) -> list[float]:
        times_ms = []
        with running.client() as client:
            while (asked_ms := now_ms()) < began_ms + seconds * 1000:
                client.infer(name, inputs)
                times_ms.append(now_ms() - asked_ms)
        return times_ms

    with ThreadPoolExecutor(len(names)) as pool:
        answers = pool.map(ask, names)
        meanwhile()
        told_ms = [took_ms for times_ms in answers for took_ms in times_ms]
    return {
        "throughput_per_s": len(told_ms) / (now_ms() - began_ms) * 1000,
        "median_ms": quantile(told_ms, 0.5),
        "p99_ms": quantile(told_ms, 0.99),
    }


class Training:
    """The background job: brought to run, or held, before a trial."""

    def __init__(
        self,
        client: Client,
        threads: int,
        seed: int,
        args: tuple[str, ...] = (),
        name: str = "background",
    ) -> None:
        self._random = random.Random(seed)
        options = ["--threads", str(threads), *args]
        self.task: Task = client.train(TRAIN_ENTRY, name=name, args=options)
        self.is_held = False

    def run(self, steps: int = STEPS_BETWEEN) -> None:
        """Return when it has computed some steps (again), at a random moment of its step."""
        if self.is_held:
            self.task.resume()
            self.is_held = False
        first = -1
        until_s = time.monotonic() + WAIT_S
        while True:
            row = self.task.status()
            if row["state"] == "running":
                first = row["step"] if first < 0 else first
                if row["step"] >= first + steps:
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
