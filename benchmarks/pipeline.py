"""``bench pipeline``: ways to group layers for copying (PipeSwitch, section 4.2 and figure 7).

The ways are compared with each other and with the shortest possible time, without server or
training job (``rig.py``). README.md describes the arms, which differ in when layers are copied.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from pipeswitch.base.quantiles import quantile
from pipeswitch.extras.lab.costs import LayerCosts, LinkCost, bound, makespan
from pipeswitch.extras.lab.planner import robust_plan
from pipeswitch.planning.grouping import Plan, bucket

from .baselines import ReadyModel
from .lane import PlainCopy
from .models import MLP_WIDTH, MODELS, BenchModel, mlp
from .rig import Rig, Switch
from .setting import Setting
from .trials import Arm, Numbers, Run

RATIOS: Final = (0.5, 1.0, 2.0)  # time to copy the model over the link / time to compute it
ROUNDS: Final = 30
QUICK_ROUNDS: Final = 5
CALIBRATIONS: Final = 5
QUIET: Final = 1.05  # limit of a ratio that should be 1; a smaller difference is noise
MLP_BYTES: Final = 12 * MLP_WIDTH * MLP_WIDTH * 4
PROBE_ROUNDS: Final = 3
PROBE_BATCH: Final = 64
COMPUTE_OVER_MEMCPY: Final = 2.5  # target for the MLP; the ratio 0.5 needs at least 2


def run(bench: Run, models: Sequence[str] = ()) -> None:
    """Measure all arms at each ratio of ``RATIOS``, with one ``Rig`` for each model."""
    for model in [MODELS[name] for name in models] or [_mlp(bench)]:
        with tempfile.TemporaryDirectory(prefix="pipeswitch-bench-") as folder:
            _one_model(bench, Setting(model, Path(folder), bench.threads, bench.seed))


def _mlp(bench: Run) -> BenchModel:
    """Return the MLP with a batch size for which computing takes longer than copying weights."""
    copier = PlainCopy(MLP_BYTES)
    memcpy_ms = min(copier.measure()["transfer_ms"] for _ in range(2 * PROBE_ROUNDS))
    with tempfile.TemporaryDirectory(prefix="pipeswitch-bench-") as folder:
        setting = Setting(mlp(PROBE_BATCH), Path(folder), bench.threads, bench.seed)
        setting.write_files()
        ready = ReadyModel(setting)
        probe_ms = min(ready.measure()["total_ms"] for _ in range(2 * PROBE_ROUNDS))
        ready.close()
    batch = max(8, round(PROBE_BATCH * COMPUTE_OVER_MEMCPY * memcpy_ms / probe_ms / 8) * 8)
    bench.notes.append(f"batch {batch}, plain copy {memcpy_ms:.1f} ms")
    return mlp(batch)


def _one_model(bench: Run, setting: Setting) -> None:
    name = setting.model.name
    bench.say(f"{name}: writing weights, building the program")
    setting.write_files()
    rig = Rig(setting)
    try:
        compute_ms = _calibrate(rig).resident_ms
        for share in RATIOS:
            link_gbps = sum(rig.layer_bytes) / (share * compute_ms) / 1e6
            rig.use(rig.allocate(link_gbps)).close()
            rig.map_arena()
            bench.say(f"{name}, link:compute {share:g}: {link_gbps:.2f} GB/s")
            _one_ratio(bench, f"{name}, link:compute {share:g}", rig)
    finally:
        rig.close()


class _Arms:
    """The arms, with the plan of each arm and the measured switches."""

    def __init__(self, rig: Rig, costs: LayerCosts) -> None:
        self._rig = rig
        self.plans: dict[str, Plan] = _simple_plans(rig)
        self.plans["planned"] = robust_plan(costs)
        self.resident = {"resident": len(self.plans["resident"])}
        self.switches: dict[str, list[Switch]] = {name: [] for name in self.plans}

    def arm(self, name: str) -> Arm:
        return Arm(name, partial(self._measure, name), partial(self._prepare, name))

    def _prepare(self, name: str) -> None:
        self._rig.set_plan(self.plans[name])
        self._rig.prefault()

    def _measure(self, name: str) -> Numbers:
        switch = self._rig.switch(
            self.plans[name],
            resident=self.resident.get(name, 0),
            is_pipelined=name != "no-pipeline",
        )
        self.switches[name].append(switch)
        return switch.numbers()


def _simple_plans(rig: Rig) -> dict[str, Plan]:
    layers = tuple(range(len(rig.layers)))
    buckets = bucket(rig.layer_bytes)
    return {
        "no-pipeline": layers,
        "one-shot": (0,),
        "per-layer": layers,
        "bucket": buckets,
        "resident": buckets,
    }


def _calibrate(rig: Rig) -> LayerCosts:
    """Measure each layer's copy and computing time while copies run; return medians."""
    switches_of: dict[str, list[Switch]] = {"per-layer": [], "one-shot": []}
    plans = _simple_plans(rig)
    for number in range(CALIBRATIONS + 1):
        for name, switches in switches_of.items():
            rig.set_plan(plans[name])
            rig.prefault()
            switch = rig.switch(plans[name])
            if number:  # switch 0 is a warm-up
                switches.append(switch)
    return costs_of(rig.layer_bytes, switches_of["per-layer"], switches_of["one-shot"])


def costs_of(
    layer_bytes: Sequence[int], per_layer: Sequence[Switch], one_shot: Sequence[Switch]
) -> LayerCosts:
    """Return the link's cost per copy and per byte, and each layer's computing time, from medians.

    Copying layer by layer takes longer than one copy; the difference gives a copy's fixed cost.
    """
    whole_ms = quantile([sum(switch.transfers_ms) for switch in one_shot], 0.5)
    pieces_ms = quantile([sum(switch.transfers_ms) for switch in per_layer], 0.5)
    count = len(layer_bytes)
    alpha_ms = max(0.0, (pieces_ms - whole_ms) / max(count - 1, 1))
    beta_ms = max(0.0, whole_ms - alpha_ms) / sum(layer_bytes)
    computes = zip(*(switch.computes_ms for switch in per_layer), strict=True)
    compute_ms = tuple(quantile(layer, 0.5) for layer in computes)
    return LayerCosts(tuple(layer_bytes), compute_ms, LinkCost(alpha_ms, beta_ms))


def _one_ratio(bench: Run, case: str, rig: Rig) -> None:
    planned_for = _calibrate(rig)
    arms = _Arms(rig, planned_for)
    bench.trial_loop(
        case, [arms.arm(name) for name in arms.plans], bench.rounds(ROUNDS, QUICK_ROUNDS), warmup=1
    )
    costs = costs_of(rig.layer_bytes, arms.switches["per-layer"], arms.switches["one-shot"])
    min_ms = bound(costs)
    bench.find(f"{case}: M*, from this run's layers", min_ms, "ms")
    p50 = {name: bench.p50(case, name, "makespan_ms") for name in arms.plans}
    for name in arms.plans:
        if name != "resident":
            bench.find(f"{case}: {name} / M*, p50", p50[name] / min_ms)
    whole = ("no-pipeline", "one-shot", "per-layer", "bucket")
    fastest = min(whole, key=lambda name: p50[name])
    share = p50["planned"] / p50[fastest]
    bench.find(f"{case}: planned / best other ({fastest}), p50", share, at_most=QUIET)
    least = {name: min(bench.values(case, name, "makespan_ms")) for name in arms.plans}
    share = least["planned"] / min(least[name] for name in whole)
    bench.find(f"{case}: planned / best other, minimums", share, at_most=QUIET)
    predicted_ms = makespan(arms.plans["planned"], planned_for)
    bench.find(f"{case}: planned, measured / predicted, p50", p50["planned"] / predicted_ms)
    stall_ms = bench.p50(case, "planned", "stall_ms")
    bench.find(f"{case}: planned, waited for the link, p50", stall_ms, "ms")
    bench.notes.append(f"{case}: {len(arms.plans['planned'])} planned groups")
