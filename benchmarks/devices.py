"""``bench devices``: independent models on several cpu devices against one.

Clients ask back to back, each for its own model, for a while; each device computes with one thread.
Arms, in turns: *one device* (two models share it, both fit), *alone* (one client, which has that
device to itself), *two devices*, *four devices* (as many models, of equal size), and two devices
under the other placements (``spread``, ``pack``; not with ``--quick``). Case *… a death*: a model
on each of two devices; in the arm *a death* the second one's memory daemon is killed meanwhile, and
what is told is of the first one's requests. Jobs that go from device to device: ``moving.py``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from pipeswitch.client.client import Client
from pipeswitch.machine import cpu_count
from pipeswitch.planning.fit import quantile
from pipeswitch.testing import RunningServer

from . import moving
from .models import MODELS, BenchModel
from .serving import POLL_S, TWINS, WAIT_S, inputs_of, serving, window
from .trials import Arm, Numbers, Run, nothing

WINDOW_S: Final = 3.0
QUICK_WINDOW_S: Final = 1.5
KILL_AFTER_S: Final = 0.3
LEAST_GAIN: Final = 1.8  # in throughput, of several devices over one
MOST_P99: Final = 1.1  # of a request's time beside another device's, over that alone
MOST_MORE_MS: Final = 20.0  # for the worst request of a device beside another one's death
DEFAULT_MODELS: Final = ("resnet18", "resnet50")
QUICK_MODELS: Final = ("mobilenet_v2",)
QUADRUPLETS: Final = (*TWINS, "twin-c", "twin-d")
TWO, FOUR = ("cpu:0", "cpu:1"), ("cpu:0", "cpu:1", "cpu:2", "cpu:3")


@dataclass(frozen=True)
class Served:
    """A server's devices, its models and how their requests are placed."""

    devices: tuple[str, ...]
    names: tuple[str, ...] = TWINS
    placement: str = "least-finish"


SERVERS: Final = {
    "one device": Served(("cpu",)),
    "two devices": Served(TWO),
    "four devices": Served(FOUR, QUADRUPLETS),
    "two devices, spread": Served(TWO, placement="spread"),
    "two devices, pack": Served(TWO, placement="pack"),
}
JUDGED: Final = ("two devices", "four devices")  # the others are told only
QUICK: Final = ("one device", *JUDGED)


def run(bench: Run, models: Sequence[str]) -> None:
    """Each model with as many equal ones; then a death, and jobs that move."""
    seconds = QUICK_WINDOW_S if bench.is_quick else WINDOW_S
    for name in bench.usable(models or (QUICK_MODELS if bench.is_quick else DEFAULT_MODELS)):
        _one_model(bench, MODELS[name], seconds)
    with moving.served(bench) as (running, client):
        _a_death(bench, running, client, seconds)
        moving.measure(bench, running, client)
    bench.notes.append(f"devices: {seconds:g} s a trial, one compute thread for each device")
    bench.notes.append("p99_ms: of a trial, of the device where it is worst; no target for more "
                       "devices than cores")  # fmt: skip


def _one_model(bench: Run, model: BenchModel, seconds: float) -> None:
    arms = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="pipeswitch-bench-")))
        serve = partial(serving, model, 1, bench.seed, rooms=2, names=QUADRUPLETS)
        bench.say(f"{model.name}: registering")
        with serve(state_dir=folder / "prepared"):
            pass
        served_by = {name: SERVERS[name] for name in (QUICK if bench.is_quick else SERVERS)}
        for arm, served in served_by.items():
            bench.say(f"{model.name}: {arm}")
            shutil.copytree(folder / "prepared", folder / arm)
            running, client = stack.enter_context(
                serve(state_dir=folder / arm, devices=served.devices, placement=served.placement)
            )
            ask = partial(window, running, inputs=inputs_of(client), seconds=seconds)
            arms.append(Arm(arm, partial(ask, served.names)))
            if len(served.devices) == 1:
                arms.append(Arm("alone", partial(ask, served.names[:1])))
        bench.say(f"{model.name}: measuring")
        bench.trial_loop(model.name, arms, bench.rounds(10, 3))
    p50 = {
        (arm.name, key): quantile(bench.values(model.name, arm.name, key), 0.5)
        for arm in arms
        for key in ("throughput_per_s", "p99_ms")
    }
    for arm in list(served_by)[1:]:
        gain = p50[arm, "throughput_per_s"] / p50["one device", "throughput_per_s"]
        beside = p50[arm, "p99_ms"] / p50["alone", "p99_ms"]
        least = LEAST_GAIN if arm in JUDGED else None
        most = MOST_P99 if least and len(SERVERS[arm].devices) <= cpu_count() else None
        bench.find(f"{model.name}: requests a second, {arm} / one device", gain, at_least=least)
        bench.find(f"{model.name}: p99, {arm} / alone", beside, at_most=most)


def _a_death(bench: Run, running: RunningServer, client: Client, seconds: float) -> None:
    """Of a device that computes; the other one's requests are told."""
    case, inputs = f"{moving.MODEL}: a death", inputs_of(client)

    def prepare() -> None:
        until_s = time.monotonic() + WAIT_S
        while not all(row["ready"] for row in client.stats()["devices"]):
            if time.monotonic() > until_s:
                raise RuntimeError(f"a device does not come back: {client.stats()['devices']}")
            time.sleep(POLL_S)
        for name in TWINS:
            client.infer(name, inputs)

    def kill() -> None:
        time.sleep(KILL_AFTER_S)
        rows = [row for row in client.ps() if (row["kind"], row["on"]) == ("daemon", TWO[1])]
        os.kill(rows[0]["pid"], signal.SIGKILL)

    def beside(meanwhile: Callable[[], None]) -> Numbers:
        found = window(running, TWINS, inputs, seconds, meanwhile)
        return {key: found[f"first_{key}"] for key in ("p50_ms", "worst_ms")}

    arms = [
        Arm("none", partial(beside, nothing), prepare),
        Arm("a death", partial(beside, kill), prepare),
    ]
    bench.say(f"{case}: measuring")
    bench.trial_loop(case, arms, bench.rounds(10, 2))
    for key, most in (("p50_ms", None), ("worst_ms", MOST_MORE_MS)):
        none, death = (quantile(bench.values(case, arm.name, key), 0.5) for arm in arms)
        what = f"{case}, {key.removesuffix('_ms')} of the other device's requests: more"
        bench.find(what, death - none, "ms", at_most=most)
