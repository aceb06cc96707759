"""``bench pipeline``, second part: groupings against each other and the bound (figure 7).

The rig's engine without a server or a training job: what differs is when each layer travels. Arms,
in turns: *no-pipeline* (layer by layer, computing starts when all have arrived), *one-shot* (one
copy, then compute), *per-layer*, *bucket* (what the server does without a profile), *planned*
(``planning.robust_plan`` for costs measured a moment before), *resident* (nothing to send:
what a switch is compared with).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from pipeswitch.machine import cpu_count
from pipeswitch.planning.costs import LayerCosts, LinkCost, bound, makespan
from pipeswitch.planning.fit import quantile
from pipeswitch.planning.grouping import Plan, bucket
from pipeswitch.planning.planned import robust_plan

from .models import BenchModel
from .rig import Rig, Switch
from .setting import Setting
from .trials import Arm, Numbers, Run

RATIOS: Final = (0.5, 1.0, 2.0)  # link : compute
ROUNDS: Final = 30
QUICK_ROUNDS: Final = 5
CALIBRATIONS: Final = 5
QUIET: Final = 1.05  # a difference below is noise


def compare_plans(bench: Run, model: BenchModel) -> None:
    """All arms at each ratio, then all cores beside the bound of their work."""
    with tempfile.TemporaryDirectory(prefix="pipeswitch-bench-") as folder:
        setting = Setting(model, Path(folder), bench.threads, bench.seed)
        bench.say(f"{model.name}: writing weights, building the program")
        setting.write_files()
        rig = Rig(setting)
        try:
            compute_ms = _calibrate(rig).resident_ms
            for share in RATIOS:
                link_gbps = sum(rig.layer_bytes) / (share * compute_ms) / 1e6
                rig.use(rig.allocate(link_gbps)).close()
                rig.map_arena()
                case = f"{model.name}, link:compute {share:g}"
                bench.say(f"{case}: {link_gbps:.2f} GB/s")
                _one_ratio(bench, case, rig)
        finally:
            rig.close()
        _all_cores(bench, replace(setting, threads=cpu_count()))


class _Arms:
    """The variants, and what their switches were."""

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
    """What each layer costs now, beside a copy: medians of some switches."""
    found: dict[str, list[Switch]] = {"per-layer": [], "one-shot": []}
    plans = _simple_plans(rig)
    for number in range(CALIBRATIONS + 1):
        for name, switches in found.items():
            rig.set_plan(plans[name])
            rig.prefault()
            switch = rig.switch(plans[name])
            if number:  # the first one warms up
                switches.append(switch)
    return costs_of(rig.layer_bytes, found["per-layer"], found["one-shot"])


def costs_of(
    layer_bytes: Sequence[int], per_layer: Sequence[Switch], one_shot: Sequence[Switch]
) -> LayerCosts:
    """Fit the link's two numbers, take computation layer by layer, both by medians.

    One copy of everything against one per layer tells what a copy costs beside its bytes.
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
    seen = costs_of(rig.layer_bytes, arms.switches["per-layer"], arms.switches["one-shot"])
    least_ms = bound(seen)
    bench.find(f"{case}: M*, from this run's layers", least_ms, "ms")
    p50 = {name: quantile(bench.values(case, name, "makespan_ms"), 0.5) for name in arms.plans}
    for name in arms.plans:
        if name != "resident":
            bench.find(f"{case}: {name} / M*, p50", p50[name] / least_ms)
    whole = ("no-pipeline", "one-shot", "per-layer", "bucket")
    fastest = min(whole, key=lambda name: p50[name])
    share = p50["planned"] / p50[fastest]
    bench.find(f"{case}: planned / best other ({fastest}), p50", share, at_most=QUIET)
    least = {name: min(bench.values(case, name, "makespan_ms")) for name in arms.plans}
    share = least["planned"] / min(least[name] for name in whole)
    bench.find(f"{case}: planned / best other, minimums", share, at_most=QUIET)
    predicted_ms = makespan(arms.plans["planned"], planned_for)
    bench.find(f"{case}: planned, measured / predicted, p50", p50["planned"] / predicted_ms)
    stall_ms = quantile(bench.values(case, "planned", "stall_ms"), 0.5)
    bench.find(f"{case}: planned, waited for the link, p50", stall_ms, "ms")
    bench.notes.append(f"{case}: {len(arms.plans['planned'])} planned groups")


def _all_cores(bench: Run, setting: Setting) -> None:
    """Computing on all cores leaves none for the copy: the bound is the cores' work."""
    case = f"{setting.model.name}, all cores"
    bench.say(f"{case}: building")
    rig = Rig(setting)
    try:
        arms = _Arms(rig, _calibrate(rig))
        names = ("one-shot", "bucket", "resident")
        trials = [arms.arm(name) for name in names]
        bench.trial_loop(case, trials, bench.rounds(ROUNDS, QUICK_ROUNDS), warmup=1)
    finally:
        rig.close()
    resident_ms = quantile(bench.values(case, "resident", "makespan_ms"), 0.5)
    copy_ms = quantile(bench.values(case, "one-shot", "transfer_ms"), 0.5)
    work_ms = resident_ms + copy_ms / setting.threads
    bench.find(f"{case}: work bound (compute + copy / {setting.threads} cores)", work_ms, "ms")
    bucket_ms = quantile(bench.values(case, "bucket", "makespan_ms"), 0.5)
    bench.find(f"{case}: bucket / work bound, p50", bucket_ms / work_ms)
