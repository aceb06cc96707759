"""``bench throughput``: throughput if models are switched in cycles (PipeSwitch, figure 6).

README.md describes the arms. No job trains.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from pipeswitch.base.quantiles import quantile
from pipeswitch.client.client import Client

from .baselines import ReadyModel, StopAndStart
from .rival import Rival
from .serving import TWINS, ask, serving
from .setting import Setting, settings
from .trials import Arm, Numbers, Run

CYCLES: Final = {30.0: 1, 10.0: 1, 5.0: 1, 2.0: 2, 1.0: 6, 0.1: 20}  # cycle in s -> rounds
QUICK_CYCLES: Final = {1.0: 2, 0.1: 5}
RESTART_CYCLES_S: Final = (30.0, 10.0, 5.0)  # shorter cycles end before stop-and-start has started
MIN_SHARE: Final = {1.0: 0.98, 0.1: 0.90}  # cycle in s -> limit of our / ready's throughput, on cpu
DEFAULT_MODELS: Final = ("resnet152",)
QUICK_MODELS: Final = ("mlp",)

Ask = Callable[[], Numbers]


def run(bench: Run, models: Sequence[str]) -> None:
    """Measure each model with all lengths of a cycle."""
    for setting in settings(bench, models, DEFAULT_MODELS, QUICK_MODELS):
        _one_model(bench, setting)
    bench.notes.append("throughput: requests of a cycle over the time until its last has ended")
    bench.notes.append("a cycle shorter than a request holds one request")


def cycle(length_s: float, first: Ask, then: Ask) -> Numbers:
    """Send requests for ``length_s`` seconds, and wait for the last answer; return its numbers.

    ``first`` sends the cycle's first request, and ``then`` each later one."""
    began_s = time.monotonic()
    totals_ms = [float(first()["total_ms"])]
    while time.monotonic() - began_s < length_s:
        totals_ms.append(float(then()["total_ms"]))
    elapsed_s = time.monotonic() - began_s
    return {
        "throughput_per_s": len(totals_ms) / elapsed_s,
        "first_ms": totals_ms[0],
        "median_ms": quantile(totals_ms, 0.5),
        "longest_ms": max(totals_ms),
        "requests": len(totals_ms),
    }


class _Server:
    """Our server, which switches to the other of two twins in each cycle."""

    def __init__(self, client: Client, inputs: Any, *, is_cold: bool) -> None:
        self._client, self._inputs, self._is_cold = client, inputs, is_cold
        self._here = 1
        for name in TWINS:
            client.infer(name, inputs)  # in the arm both-fit, both twins stay on the device

    def cycle(self, length_s: float) -> Numbers:
        self._here = 1 - self._here
        return cycle(length_s, lambda: self._ask(not self._is_cold), lambda: self._ask(True))

    def _ask(self, is_resident: bool) -> Numbers:
        name = TWINS[self._here]
        return ask(self._client, name, self._inputs, is_resident=is_resident)[1]


def _one_model(bench: Run, setting: Setting) -> None:
    model, inputs = setting.model, setting.arrays()
    with contextlib.ExitStack() as stack:
        ready, rival, restart = ReadyModel(setting), Rival(setting), StopAndStart(setting)
        for baseline in (ready, rival, restart):
            stack.callback(baseline.close)
        ours = {}
        for arm, rooms in (("cold", 1), ("both-fit", 2)):
            entered = serving(model, bench.threads, bench.seed, rooms=rooms)
            _, client = stack.enter_context(entered)
            ours[arm] = _Server(client, inputs, is_cold=rooms == 1)
        for length_s, rounds in (QUICK_CYCLES if bench.is_quick else CYCLES).items():
            case = f"{model.name}, {length_s:g} s"
            bench.say(f"{case}: measuring")
            arms = [
                *(Arm(name, partial(server.cycle, length_s)) for name, server in ours.items()),
                _arm(ready.name, length_s, ready.measure),
                _arm(rival.name, length_s, rival.measure),
            ]
            if length_s in RESTART_CYCLES_S or bench.is_quick:
                arms.append(_arm(restart.name, length_s, restart.measure, restart.again, rounds))
            bench.trial_loop(case, arms, bench.rounds(rounds, rounds), warmup=0)
            restart.close()
            _findings(bench, case, length_s, [arm.name for arm in arms])


def _arm(name: str, length_s: float, first: Ask, then: Ask | None = None, every: int = 1) -> Arm:
    return Arm(name, lambda: cycle(length_s, first, then or first), every=every)


def _findings(bench: Run, case: str, length_s: float, arms: Sequence[str]) -> None:
    ready = bench.p50(case, "ready", "throughput_per_s")
    bench.find(f"{case}: ready, p50", ready, "requests/s")
    for arm in arms:
        if arm == "ready":
            continue
        share = bench.p50(case, arm, "throughput_per_s") / ready
        at_least = MIN_SHARE.get(length_s) if arm == "cold" else None
        bench.find(f"{case}: {arm} / ready, p50", share, at_least=at_least)
