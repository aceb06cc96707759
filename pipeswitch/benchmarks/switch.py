"""``bench switch``: a request that preempts training and finds its model elsewhere.

Arms, in turns: *cold* (training runs, the model is not on the device), *resident* (training runs,
it is), *ready* (plain eager in a process, nothing else runs), *stop-and-start* (kill the training
process, start one that answers).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..client import Client
from .baselines import BASELINES, Baseline, Setting
from .models import MODELS, QUICK_MODELS, BenchModel
from .serving import TWINS, Training, ask, serving
from .trials import Arm, Numbers, Run, paired_differences, quantile, ratio

ROUNDS: Final = 20
QUICK_ROUNDS: Final = 7
MIN_RATIO: Final = 100.0  # DESIGN 11, cpu device
CHECKSUM_TOLERANCE: Final = 1e-3  # of a sum over all outputs, relative to its size


def run(bench: Run, models: Sequence[str]) -> None:
    """Measure each model with a server of its own."""
    for name in models or (QUICK_MODELS if bench.is_quick else tuple(MODELS)):
        with tempfile.TemporaryDirectory(prefix="pipeswitch-bench-") as folder:
            _one_model(bench, MODELS[name], Path(folder))
    bench.notes.append("total_ms is the client's clock; of ready it is the model's run alone")
    bench.notes.append("overhead: total of cold minus resident, or stop-and-start minus ready")


def _one_model(bench: Run, model: BenchModel, folder: Path) -> None:
    setting = Setting(model, folder, bench.threads, bench.seed)
    bench.say(f"{model.name}: writing weights, starting baselines and a server")
    setting.write_files()
    baselines = [make(setting) for make in BASELINES.values()]
    try:
        with serving(model, bench.threads, bench.seed) as (_, client):
            requests = _Requests(bench, client, setting)
            arms = [
                Arm("cold", requests.cold, requests.training.run),
                Arm("resident", requests.resident, requests.training.run),
                *(requests.arm_of(baseline) for baseline in baselines),
            ]
            bench.say(f"{model.name}: measuring")
            rounds = QUICK_ROUNDS if bench.is_quick else ROUNDS
            bench.trial_loop(model.name, arms, rounds, warmup=3)
    finally:
        for baseline in baselines:
            baseline.close()
    _findings(bench, model.name)


class _Requests:
    """What the arms share: which twin is on the device, the inputs, the training job."""

    def __init__(self, bench: Run, client: Client, setting: Setting) -> None:
        self._client = client
        with np.load(setting.order()["inputs_path"]) as arrays:
            self._inputs: Any = [arrays[name] for name in arrays.files]
        self.training = Training(client, bench.threads, bench.seed)
        self._here = 1  # neither; the first cold request is for twin 0
        self._checksum: float | None = None

    def cold(self) -> Numbers:
        self._here = 1 - self._here
        return self._ask(is_resident=False)

    def resident(self) -> Numbers:
        return self._ask(is_resident=True)

    def _ask(self, *, is_resident: bool) -> Numbers:
        result, numbers = ask(
            self._client, TWINS[self._here], self._inputs, is_resident=is_resident
        )
        if self._here == 0:
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
        """Whatever is compared has computed the same thing."""
        assert self._checksum is not None
        if abs(checksum - self._checksum) > CHECKSUM_TOLERANCE * max(1.0, abs(self._checksum)):
            raise RuntimeError(f"{name} answers {checksum}, the server {self._checksum}")


def _findings(bench: Run, case: str) -> None:
    cold = bench.values(case, "cold", "total_ms")
    resident = bench.values(case, "resident", "total_ms")
    ready = bench.values(case, "ready", "total_ms")
    restart = bench.values(case, "stop-and-start", "total_ms")
    ours = quantile(paired_differences(cold, resident), 0.5)
    theirs = quantile(restart, 0.5) - quantile(ready, 0.5)
    bench.find(f"{case}: cold switch overhead, p50 of pairs", ours, "ms")
    bench.find(f"{case}: the same from minimums", min(cold) - min(resident), "ms")
    bench.find(f"{case}: switch + stall of the cold bill, p50", _wait_ms(bench, case, "cold"), "ms")
    bench.find(f"{case}: stop-and-start overhead, p50", theirs, "ms")
    # A difference of totals may drown in noise, or be negative; what the bill owns up to does not.
    billed = _wait_ms(bench, case, "cold")
    by_pairs = ratio(theirs, max(ours, billed))
    by_minimum = ratio(min(restart) - min(ready), max(min(cold) - min(resident), billed))
    bench.find(f"{case}: stop-and-start overhead / ours", by_pairs, at_least=MIN_RATIO)
    bench.find(f"{case}: the same from minimums", by_minimum, at_least=MIN_RATIO)
    bench.find(f"{case}: cold / ready, p50", quantile(cold, 0.5) / quantile(ready, 0.5))
    bench.find(f"{case}: cold / ready, minimums", min(cold) / min(ready))
    bench.find(f"{case}: resident / ready, minimums", min(resident) / min(ready))


def _wait_ms(bench: Run, case: str, arm: str) -> float:
    switch, stall = (bench.values(case, arm, key) for key in ("switch_ms", "stall_ms"))
    return quantile([a + b for a, b in zip(switch, stall, strict=True)], 0.5)
