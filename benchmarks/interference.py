"""``bench interference``: requests while a job trains (SwitchFlow, figure 6); see README.md."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate
from typing import Any, Final

from pipeswitch.base.quantiles import quantile
from pipeswitch.client.client import Client

from .serving import TWINS, Training, serving
from .setting import Setting, end, read_line, settings, spawn, tell
from .trials import Arm, Numbers, Run, interleave

BATCH: Final = 1024  # with this batch a training step takes 80 ms, like a vision model's on a GPU
STEP_ARGS: Final = ("--batch", str(BATCH))
REQUESTS: Final = 10  # number of requests in a segment, which is one trial of an arm
ROUNDS: Final = 10
QUICK_ROUNDS: Final = 2
LOAD: Final = 0.5  # request rate / highest rate of a device that trains a step before each request
DEFAULT_MODELS: Final = ("resnet18",)
SHARING: Final = {"threads": "threads", "session-slicing": "sessions", "alone": "alone"}


def run(bench: Run, models: Sequence[str] = ()) -> None:
    """Measure each model with its own server, and with its own process of ``sharing.py``."""
    for setting in settings(bench, models, DEFAULT_MODELS, DEFAULT_MODELS):
        _one_model(bench, setting)
    bench.notes.append("latency_ms: from the instant a request was due to its answer")
    bench.notes.append("all but pipeswitch are bound to as many cores as there are threads")


def _one_model(bench: Run, setting: Setting) -> None:
    model = setting.model
    cores = sorted(os.sched_getaffinity(0))[: bench.threads]
    child = spawn("share", setting.order() | {"cores": cores, "batch": BATCH}, module="sharing")
    try:
        times = read_line(child)
        rate_per_s = LOAD * 1000 / (times["request_ms"] + times["step_ms"])
        bench.notes.append(
            f"{model.name}: {rate_per_s:.2f} requests/s of {times['request_ms']:.0f} ms each,"
            f" beside training steps of {times['step_ms']:.0f} ms"
        )
        with serving(model, bench.threads, bench.seed) as (_, client):
            ours = _Ours(client, bench, setting)
            instants = _Instants(bench.seed, rate_per_s)

            def shared(mode: str) -> Numbers:
                tell(child, mode=mode, due_s=instants.next())
                return read_line(child)

            arms = [
                Arm("pipeswitch", lambda: ours.segment(instants.next()), ours.training.run),
                *(
                    Arm(name, partial(shared, mode), ours.training.hold)
                    for name, mode in SHARING.items()
                ),
            ]
            bench.say(f"{model.name}: measuring")
            _take_turns(bench, model.name, arms)
    finally:
        end(child)
    _findings(bench, model.name, [arm.name for arm in arms])


def _take_turns(bench: Run, case: str, arms: Sequence[Arm]) -> None:
    """Run segments of the arms in turns; record each request, and each segment's training speed."""
    for arm, number, numbers in interleave(arms, bench.rounds(ROUNDS, QUICK_ROUNDS), warmup=1):
        for index, latency_ms in enumerate(numbers["latencies_ms"]):
            request = number * REQUESTS + index
            bench.record(case, arm.name, request, {"latency_ms": latency_ms})
        speed = {"steps_per_s": numbers["steps"] / numbers["seconds"]}
        bench.record(case, f"{arm.name}: training", number, speed)


class _Instants:
    """Random times at which a segment's requests are due, in seconds from the segment's start."""

    def __init__(self, seed: int, rate_per_s: float) -> None:
        self._random, self._rate_per_s = random.Random(seed), rate_per_s

    def next(self) -> list[float]:
        gaps = [self._random.expovariate(self._rate_per_s) for _ in range(REQUESTS)]
        return list(accumulate(gaps))


class _Ours:
    """A PipeSwitch server with its training job."""

    def __init__(self, client: Client, bench: Run, setting: Setting) -> None:
        self._client = client
        self._inputs: Any = setting.arrays()
        client.infer(TWINS[0], self._inputs)  # copies the model to the device
        self.training = Training(client, bench.threads, bench.seed, STEP_ARGS)

    def segment(self, due_s: Sequence[float]) -> Numbers:
        """Send each request when it is due, even if earlier ones are not answered yet."""
        began_s, first = time.monotonic(), self._step()
        ended_s: list[float] = [0.0] * len(due_s)
        futures, is_done = [], threading.Semaphore(0)  # ``is_done`` counts finished callbacks

        def keep(index: int, future: Future[Any]) -> None:
            ended_s[index] = time.monotonic()
            is_done.release()

        for index, instant_s in enumerate(due_s):
            time.sleep(max(0.0, began_s + instant_s - time.monotonic()))
            future = self._client.submit(TWINS[0], self._inputs)
            future.add_done_callback(partial(keep, index))
            futures.append(future)
        for future in futures:
            future.result()
            is_done.acquire()
        steps, seconds = self._step() - first, time.monotonic() - began_s
        latencies = [
            (ended - began_s - due) * 1000 for ended, due in zip(ended_s, due_s, strict=True)
        ]
        return {"latencies_ms": latencies, "steps": steps, "seconds": seconds}

    def _step(self) -> int:
        return int(self.training.task.status()["step"])


def _findings(bench: Run, case: str, arms: Sequence[str]) -> None:
    for share, what in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99")):
        values = {arm: bench.p50(case, arm, "latency_ms", share) for arm in arms}
        for arm, value in values.items():
            bench.find(f"{case}: {arm}, {what}", value, "ms")
            if arm not in ("pipeswitch", "alone"):
                bench.find(f"{case}: {arm} / pipeswitch, {what}", value / values["pipeswitch"])
    for arm in arms:
        speeds = bench.values(case, f"{arm}: training", "steps_per_s")
        bench.find(f"{case}: {arm}, training", quantile(speeds, 0.5), "steps/s")
