"""``bench devices``: a job moves to another device (SwitchFlow, figure 7); see README.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from pipeswitch.testing import RunningServer

from .models import MIB, MODELS
from .serving import TWINS, Training, inputs_of, serving, window
from .trials import Arm, Numbers, Run, nothing, now_ms, ratio

MODEL: Final = "resnet18"
HOME, AWAY = "cpu:0", "cpu:1"
SIZES: Final = ("--width", "1024", "--layers", "4", "--batch", "64")  # 64 MiB with Adam's state
SLICES_BYTES: Final = 96 * MIB
WINDOW_S: Final = 12.0  # starting the script on the other device takes about 4 s
QUICK_WINDOW_S: Final = 6.0


def run(bench: Run, _: Any = ()) -> None:
    """Measure a server with two devices, each of which serves one of two equal models."""
    with serving(
        MODELS[MODEL],
        1,
        bench.seed,
        devices=(HOME, AWAY),
        are_pinned=True,
        slices_bytes=SLICES_BYTES,
    ) as (running, client):
        inputs = inputs_of(client)
        client.infer(TWINS[0], inputs)
        job = Training(client, 1, bench.seed, SIZES, "job")
        _requests_stay(bench, running, job, inputs)
        job.task.cancel()


def _bring(job: Training, device: str) -> None:
    job.task.move(device)
    job.run()


def _requests_stay(bench: Run, running: RunningServer, job: Training, inputs: Any) -> None:
    """Measure the job's speed and the requests' times, while the job waits or moves away."""
    case, seconds = "requests stay", QUICK_WINDOW_S if bench.is_quick else WINDOW_S

    def measure(meanwhile: Callable[[], Any]) -> Numbers:
        first, began_ms = job.task.status()["step"], now_ms()
        numbers = window(running, TWINS[:1], inputs, seconds, meanwhile)
        steps = job.task.status()["step"] - first
        return numbers | {"trained_per_s": steps * 1000.0 / (now_ms() - began_ms)}

    prepare = partial(_bring, job, HOME)
    arms = [
        Arm("waits", partial(measure, nothing), prepare),
        Arm("moves", partial(measure, partial(job.task.move, AWAY)), prepare),
    ]
    bench.say(f"{case}: measuring")
    bench.trial_loop(case, arms, bench.rounds(10, 2))
    for key, what in (("trained_per_s", "steps a second"), ("median_ms", "a request")):
        waits, moves = (bench.p50(case, arm.name, key) for arm in arms)
        bench.find(f"{case}: {what}, the job moves / waits", ratio(moves, waits))
