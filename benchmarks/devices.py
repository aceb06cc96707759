"""``bench devices``: jobs that go to another device (SwitchFlow, figure 7, and its table 1 for a
training job). README.md has the cases."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from pipeswitch.client.client import Client
from pipeswitch.planning.fit import quantile
from pipeswitch.testing import RunningServer

from .lane import mapping
from .models import MIB, MODELS
from .serving import TWINS, Training, inputs_of, serving, window
from .state import MAX_OVER_PLAIN
from .trials import Arm, Numbers, Run, nothing, now_ms, ratio

MODEL: Final = "resnet18"
HOME, AWAY = "cpu:0", "cpu:1"
FEW: Final = ("--width", "1024", "--layers", "4", "--batch", "64")  # 64 MiB with Adam's state
MANY: Final = ("--width", "128", "--layers", "256", "--batch", "64")  # as many bytes, 64 x tensors
SLICES_BYTES: Final = 192 * MIB  # both jobs' on one device
EVENT_S: Final = 10.0
WINDOW_S: Final = 3.0
QUICK_WINDOW_S: Final = 1.5
ROUNDS: Final = 50
QUICK_ROUNDS: Final = 3


def run(bench: Run, _: Any = ()) -> None:
    """Both cases, on two devices; each may serve one of the twins."""
    with serving(
        MODELS[MODEL], 1, bench.seed, devices=(HOME, AWAY), are_pinned=True,
        slices_bytes=SLICES_BYTES,
    ) as (running, client):  # fmt: skip
        inputs = inputs_of(client)
        client.infer(TWINS[0], inputs)
        few = Training(client, 1, bench.seed, FEW, "few-tensors")
        _requests_stay(bench, running, few, inputs)
        many = Training(client, 1, bench.seed, MANY, "many-tensors")
        _state(bench, client, few, many)
        for job in (few, many):
            job.task.cancel()


def _bring(jobs: Sequence[Training], device: str) -> None:
    """The last of the jobs trains on that device, the others where they are."""
    jobs[-1].task.move(device)
    for job in jobs:
        job.run()


def _requests_stay(bench: Run, running: RunningServer, job: Training, inputs: Any) -> None:
    """What the job gets done, and the requests beside it."""
    case, seconds = "requests stay", QUICK_WINDOW_S if bench.is_quick else WINDOW_S

    def held(meanwhile: Callable[[], Any]) -> Numbers:
        first, began_ms = job.task.status()["step"], now_ms()
        found = window(running, TWINS[:1], inputs, seconds, meanwhile)
        steps = job.task.status()["step"] - first
        return found | {"trained_per_s": steps * 1000.0 / (now_ms() - began_ms)}

    prepare = partial(_bring, [job], HOME)
    arms = [
        Arm("waits", partial(held, nothing), prepare),
        Arm("moves", partial(held, partial(job.task.move, AWAY)), prepare),
    ]
    bench.say(f"{case}: measuring")
    bench.trial_loop(case, arms, bench.rounds(10, 2))
    for key, what in (("trained_per_s", "steps a second"), ("median_ms", "a request")):
        waits, moves = (bench.p50(case, arm.name, key) for arm in arms)
        bench.find(f"{case}: {what}, the job moves / waits", ratio(moves, waits))


def _state(bench: Run, client: Client, few: Training, many: Training) -> None:
    """Table 1, of jobs: ``transfer_ms`` is the copy alone."""
    places = itertools.cycle((HOME, AWAY))
    moved = client.events("job.moved", timeout_s=EVENT_S)

    def move(job: Training) -> Numbers:
        began_ms, before = now_ms(), job.task.status()["moves"]
        while job.task.move(next(places))["moves"] == before:
            pass  # it was there already
        move_ms = now_ms() - began_ms
        record = next((one for one in moved if one["job"] == job.task.name), None)
        if record is None:
            raise RuntimeError(f"{job.task.name} left its process behind: {job.task.status()}")
        return {"move_ms": move_ms, "transfer_ms": record["copy_ms"], "bytes": record["bytes"]}

    _bring([few, many], AWAY)
    size_bytes = move(few)["bytes"]
    source = mapping(size_bytes)
    source[:] = 1

    def plain_copy() -> Numbers:
        """To memory that is new, as the job's is: its pages are made meanwhile."""
        target, began_ms = mapping(size_bytes), now_ms()
        np.copyto(target, source)
        return {"transfer_ms": now_ms() - began_ms}

    case = f"{size_bytes / MIB:.0f} MiB of a job"
    arms = [
        Arm("few tensors", partial(move, few), few.run),
        Arm("many tensors", partial(move, many), many.run),
        Arm("plain-copy", plain_copy),
    ]
    bench.say(f"{case}: measuring")
    bench.trial_loop(case, arms, bench.rounds(ROUNDS, QUICK_ROUNDS))
    per_mib = {}
    for arm in arms:
        times_ms = bench.values(case, arm.name, "transfer_ms")
        per_mib[arm.name] = quantile(times_ms, 0.5) * MIB / size_bytes
        bench.find(f"{case}: {arm.name}, p50 per MiB", per_mib[arm.name], "ms/MiB")
    for other in ("few tensors", "plain-copy"):
        share = per_mib["many tensors"] / per_mib[other]
        bench.find(f"{case}: many tensors / {other}", share, at_most=MAX_OVER_PLAIN)
