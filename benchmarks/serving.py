"""Server that is measured: it has twins (copies of a model with other weights) and trains a job."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from pipeswitch.base.quantiles import quantile
from pipeswitch.client.client import Client, Task
from pipeswitch.client.tensors import Result
from pipeswitch.testing import RunningServer, server

from .models import MIB, BenchModel
from .trials import Numbers, nothing, now_ms

TRAIN_ENTRY: Final = "benchmarks.train_script:main"
SLICE_ROOM_BYTES: Final = 40 * MIB  # room for fences and the training job's slice
WAIT_S: Final = 60.0
POLL_S: Final = 0.01
SETTLE_S: Final = 1.0  # time to replace a paused job's worker and to prepare the new worker
STEPS_BETWEEN: Final = 2  # steps after which a started job trains at its usual speed
TWINS: Final = ("twin-a", "twin-b")
SWITCH_INTERVAL_S: Final = 0.0005  # Python's default lets one client's thread block others for 5 ms
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
    precisions: Sequence[str] = (),
) -> Iterator[tuple[RunningServer, Client]]:
    """Start a server with two twins of a model, whose arena has room for ``rooms`` models.

    The twins differ only in their weights. If there is room for one, a request for the absent twin
    is always a cold switch of the same size. With ``are_pinned``, each twin has its own device.
    Each further precision has two more twins, named by ``twins_in``."""
    with (
        server(
            arena=str(rooms * model.room_bytes + slices_bytes),
            host_store=str((2 + 2 * len(precisions)) * (model.room_bytes + slices_bytes)),
            devices=devices,
            args=("--threads", str(threads)),
        ) as running,
        running.client() as client,
    ):
        twins = [(name, form) for form in ("exact", *precisions) for name in twins_in(form)]
        for number, (name, form) in enumerate(twins):
            client.register(
                name,
                model.source,
                weights=f"random:{seed + number % 2}",
                inputs=model.inputs,
                devices=devices[number : number + 1] if are_pinned else (),
                precision=form,
            )
        yield running, client


def twins_in(precision: str) -> tuple[str, str]:
    """Return the names of the twins in a precision."""
    return TWINS if precision == "exact" else (f"{precision}-a", f"{precision}-b")


def ask(client: Client, name: str, inputs: Any, *, is_resident: bool) -> tuple[Result, Numbers]:
    """Send a request; return result and times. Raise if residency was not as ``is_resident``."""
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
    """Return the twins' smallest input, filled with zeros."""
    (shape, _), *_ = client.show(TWINS[0])["inputs"].values()
    return np.zeros([size if isinstance(size, int) else 1 for size in shape], np.float32)


def window(
    running: RunningServer,
    names: Sequence[str],
    inputs: Any,
    seconds: float,
    meanwhile: Callable[[], object] = nothing,
) -> Numbers:
    """Send requests for each name from its own client, for some seconds; wait for the last answers.

    ``meanwhile`` is called when the clients have started.
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
    """Training job in the background, which is started or paused before a trial."""

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
        """Start or resume the job; return after ``steps`` steps, at a random moment of a step."""
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
        time.sleep(self._random.uniform(0.0, 0.05))  # so that requests arrive anywhere in a step

    def hold(self) -> None:
        """Pause the job; return when it has left the device."""
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
