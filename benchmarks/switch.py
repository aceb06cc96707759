"""``bench switch``: requests that preempt training, with another model on the device (PipeSwitch,
figure 5). README.md describes the arms."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from pipeswitch.base.quantiles import quantile
from pipeswitch.client.client import Client

from .baselines import BASELINES, NEEDS_CUDA, ReadyModel, StopAndStart
from .models import QUICK_MODELS, SWITCH_MODELS
from .rival import PUBLISHED, SERIAL, TO_DEVICE
from .serving import Training, ask, serving, twins_in
from .setting import Baseline, Setting, settings
from .trials import Arm, Numbers, Run, paired_differences, ratio

ROUNDS: Final = 12
QUICK_ROUNDS: Final = 7
MAX_RATIOS: Final = {"fast": 0.70, "bf16": 0.50}  # limits of cold times / ``ready``'s
MIN_RATIO: Final = 100.0  # limit of stop-and-start's overhead / our overhead, on the cpu device
MIN_RIVAL_RATIO: Final = 3.0  # limit of the PipeSwitch-style system's overhead / our overhead
RIVALS: Final = (PUBLISHED.name, SERIAL.name, TO_DEVICE.name)
ARMS: Final = (ReadyModel.name, *RIVALS, StopAndStart.name)
CHECKSUM_TOLERANCE: Final = 1e-3  # allowed relative error of the outputs' sum


def run(bench: Run, models: Sequence[str]) -> None:
    """Measure each model with its own server."""
    for setting in settings(bench, models, SWITCH_MODELS, QUICK_MODELS):
        compare(bench, setting, ARMS)
        _findings(bench, setting.model.name)
    bench.skip(NEEDS_CUDA)
    bench.notes.append("total_ms is the client's clock; of ready it is the model's run alone")
    bench.notes.append("overhead: total of cold minus resident, or stop-and-start minus ready")


def compare(bench: Run, setting: Setting, baselines: Sequence[str]) -> None:
    """Measure our server (cold and resident, in three precisions) in turns with these baselines."""
    name = setting.model.name
    with contextlib.ExitStack() as stack:
        rivals = []
        for baseline in baselines:
            rivals.append(BASELINES[baseline](setting))
            stack.callback(rivals[-1].close)
        _, client = stack.enter_context(
            serving(setting.model, bench.threads, bench.seed, precisions=tuple(MAX_RATIOS))
        )
        requests = Requests(bench, client, setting)
        arms = [
            Arm("cold", requests.cold, requests.training.run),
            Arm("resident", requests.resident, requests.training.run),
            *(
                Arm(f"{state}, {form}", partial(asked, form), requests.training.run)
                for form in MAX_RATIOS
                for state, asked in (("cold", requests.cold), ("resident", requests.resident))
            ),
            *(requests.arm_of(rival) for rival in rivals),
        ]
        bench.say(f"{name}: measuring")
        bench.trial_loop(name, arms, bench.rounds(ROUNDS, QUICK_ROUNDS), warmup=3)


class Requests:
    """Requests to our server. Its arms share the last twin, the inputs and the training job."""

    def __init__(self, bench: Run, client: Client, setting: Setting) -> None:
        self._client = client
        self._inputs: Any = setting.arrays()
        self.training = Training(client, bench.threads, bench.seed)
        self._last = dict.fromkeys(("exact", *MAX_RATIOS), 1)  # the first cold request: twin 0
        self._checksum: float | None = None

    def cold(self, form: str = "exact") -> Numbers:
        self._last[form] = 1 - self._last[form]
        return self._ask(form, is_resident=False)

    def resident(self, form: str = "exact") -> Numbers:
        return self._ask(form, is_resident=True)

    def _ask(self, form: str, *, is_resident: bool) -> Numbers:
        name = twins_in(form)[self._last[form]]
        result, numbers = ask(self._client, name, self._inputs, is_resident=is_resident)
        if name == twins_in("exact")[0]:
            self._checksum = float(next(iter(result.outputs.values())).sum(dtype=np.float64))
        return numbers

    def arm_of(self, baseline: Baseline) -> Arm:
        def prepare() -> None:
            self.training.hold()
            baseline.prepare()

        def measure() -> Numbers:
            numbers = baseline.measure()
            self._same(baseline.name, numbers.pop("checksum"))
            return numbers

        return Arm(baseline.name, measure, prepare, baseline.every, warms_up=baseline.every == 1)

    def _same(self, name: str, checksum: float) -> None:
        assert self._checksum is not None
        if abs(checksum - self._checksum) > CHECKSUM_TOLERANCE * max(1.0, abs(self._checksum)):
            raise RuntimeError(f"{name} answers {checksum}, the server {self._checksum}")


def _findings(bench: Run, case: str) -> None:
    arms = ("cold", "resident", "ready", "stop-and-start")
    cold, resident, ready, restart = (bench.values(case, arm, "total_ms") for arm in arms)
    ours = quantile(paired_differences(cold, resident), 0.5)
    theirs = quantile(restart, 0.5) - quantile(ready, 0.5)
    billed = _wait_ms(bench, case, "cold")
    for what, value_ms in (
        ("cold switch overhead, p50 of pairs", ours),
        ("switch + stall of the cold bill, p50", billed),
        ("stop-and-start overhead, p50", theirs),
    ):
        bench.find(f"{case}: {what}", value_ms, "ms")
    # A difference of totals may be noise, even negative; overhead that the server measures is not.
    share = ratio(theirs, max(ours, billed))
    bench.find(f"{case}: stop-and-start overhead / ours", share, at_least=MIN_RATIO)
    _against_rivals(bench, case)
    for arm in ("cold", *(f"cold, {form}" for form in MAX_RATIOS)):
        share = ratio(bench.p50(case, arm, "total_ms"), bench.p50(case, "ready", "total_ms"))
        bench.find(f"{case}: {arm} / ready, p50", share, at_most=MAX_RATIOS.get(arm[6:]))


def _against_rivals(bench: Run, case: str) -> None:
    """Add findings for each rival's overhead, computed like ours in two ways.

    One is the total time minus the time of ``ready``. The other is billed time: from the request's
    arrival in the server to its outputs, without computing."""
    ready = bench.values(case, "ready", "total_ms")
    cold = bench.values(case, "cold", "total_ms")
    billed = _wait_ms(bench, case, "cold")
    ours = max(quantile(paired_differences(cold, ready), 0.5), billed)
    ours_least = max(min(cold) - min(ready), billed)
    resident = bench.values(case, "resident", "total_ms")
    warm = max(
        quantile(paired_differences(resident, ready), 0.5), _wait_ms(bench, case, "resident")
    )
    for arm in RIVALS:
        at_least = MIN_RIVAL_RATIO if arm == RIVALS[0] else None
        totals = bench.values(case, arm, "total_ms")
        theirs = quantile(paired_differences(totals, ready), 0.5)
        least = min(totals) - min(ready)
        wait = bench.p50(case, arm, "wait_ms")
        bench.find(f"{case}: {arm} overhead, p50 of pairs with ready", theirs, "ms")
        for what, value in (
            ("p50 of pairs", ratio(theirs, ours)),
            ("minimums", ratio(least, ours_least)),
            ("as billed", ratio(wait, billed)),
        ):
            bench.find(f"{case}: {arm} overhead / ours, {what}", value, at_least=at_least)
        bench.find(f"{case}: {arm} overhead / ours when resident, p50", ratio(theirs, warm))
    # The shortest possible wait: each system that stops training after a layer waits for the layer.
    waits, stops = (bench.values(case, RIVALS[0], key) for key in ("wait_ms", "acknowledge_ms"))
    most = ratio(quantile(waits, 0.5), quantile(stops, 0.5))
    bench.find(f"{case}: {RIVALS[0]} wait / its wait for training alone: the most to gain", most)


def _wait_ms(bench: Run, case: str, arm: str) -> float:
    switch, stall = (bench.values(case, arm, key) for key in ("switch_ms", "stall_ms"))
    return quantile([a + b for a, b in zip(switch, stall, strict=True)], 0.5)
