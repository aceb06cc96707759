"""``bench devices``: independent models on two cpu devices against one.

Two clients ask back to back, each for its own model, for a while; each device computes with one
thread. Arms, in turns: *two devices* (a model on each), *one device* (both share it, both fit),
*alone* (one client, which has the one device to itself).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from ..client.client import Client
from ..planning.fit import quantile
from ..testing import RunningServer
from .models import MODELS, BenchModel
from .serving import TWINS, serving
from .trials import Arm, Numbers, Run

WINDOW_S: Final = 3.0
LEAST_GAIN: Final = 1.8  # in throughput, of two devices over one
MOST_P99: Final = 1.1  # of a request's time beside another device's, over that alone
DEFAULT_MODELS: Final = ("resnet18", "resnet50")
QUICK_MODELS: Final = ("mobilenet_v2",)
DEVICES: Final = {"one device": ("cpu",), "two devices": ("cpu:0", "cpu:1")}


def run(bench: Run, models: Sequence[str]) -> None:
    """Each model as a pair of twins."""
    for name in bench.usable(models or (QUICK_MODELS if bench.is_quick else DEFAULT_MODELS)):
        _one_model(bench, MODELS[name])
    bench.notes.append(f"devices: {WINDOW_S:g} s a trial, one compute thread for each device")


def _one_model(bench: Run, model: BenchModel) -> None:
    arms = []
    with contextlib.ExitStack() as stack:
        for arm, devices in DEVICES.items():
            entered = serving(model, 1, bench.seed, rooms=2, devices=devices)
            running, client = stack.enter_context(entered)
            inputs = inputs_of(client)
            arms.append(Arm(arm, partial(window, running, TWINS, inputs)))
            if len(devices) == 1:
                arms.append(Arm("alone", partial(window, running, TWINS[:1], inputs)))
        bench.say(f"{model.name}: measuring")
        bench.trial_loop(model.name, arms, bench.rounds(10, 3))
    p50 = {
        (arm.name, key): quantile(bench.values(model.name, arm.name, key), 0.5)
        for arm in arms
        for key in ("throughput_per_s", "p99_ms")
    }
    gain = p50["two devices", "throughput_per_s"] / p50["one device", "throughput_per_s"]
    bench.find(f"{model.name}: requests a second, two devices / one", gain, at_least=LEAST_GAIN)
    beside = p50["two devices", "p99_ms"] / p50["alone", "p99_ms"]
    bench.find(f"{model.name}: p99 beside the other device / alone", beside, at_most=MOST_P99)


def inputs_of(client: Client) -> Any:
    """Zeros of the smallest batch that the twins take."""
    (shape, _), *_ = client.show(TWINS[0])["inputs"].values()
    return np.zeros([size if isinstance(size, int) else 1 for size in shape], np.float32)


def window(
    running: RunningServer, names: Sequence[str], inputs: Any, seconds: float = WINDOW_S
) -> Numbers:
    """Each name's client asks until the window is over; the last request is waited for."""
    totals_ms: list[float] = []
    devices: set[str] = set()
    failures: list[Exception] = []

    def ask(name: str) -> None:
        try:
            with running.client() as client:
                while time.monotonic() - began_s < seconds:
                    asked_s = time.monotonic()
                    timing = client.infer(name, inputs).timing
                    totals_ms.append((time.monotonic() - asked_s) * 1000.0)
                    devices.add(timing.extra.get("device", "cpu"))
        except Exception as error:
            failures.append(error)

    began_s = time.monotonic()
    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return {
        "throughput_per_s": len(totals_ms) / (time.monotonic() - began_s),
        "median_ms": quantile(totals_ms, 0.5),
        "p99_ms": quantile(totals_ms, 0.99),
        "devices": len(devices),
    }
