"""``bench memory``: unified memory management with one part removed (PipeSwitch, figure 8).

Switches are measured without a server (``rig.py``). README.md says which part each arm lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pipeswitch.base.quantiles import quantile
from pipeswitch.devices.cpu.memory import CpuDeviceMemory
from pipeswitch.planning.grouping import bucket

from .rig import Rig
from .setting import Setting, settings
from .trials import Arm, Numbers, Run, now_ms, paired_differences

ROUNDS: Final = 100
QUICK_ROUNDS: Final = 10
DEFAULT_MODELS: Final = ("resnet152", "mlp")
QUICK_MODELS: Final = ("mlp",)
SKIPPED: Final = {
    "without-pinning": "needs a CUDA device; store-pages-unmapped is the cpu device's analog",
    "unified-memory": "needs a CUDA device",
}


def run(bench: Run, models: Sequence[str] = ()) -> None:
    """Measure each model on its own ``Rig``."""
    for setting in settings(bench, models, DEFAULT_MODELS, QUICK_MODELS):
        _one_model(bench, setting)
    bench.skip(SKIPPED)
    bench.notes.append("makespan: from the order to switch until the last group has computed")


class _Variants:
    """Arms that measure one model. Before each trial the child maps and faults in the arena."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._plan = bucket(rig.layer_bytes)
        self._left: CpuDeviceMemory | None = None
        rig.set_plan(self._plan)

    def prepare(self) -> None:
        self.close()
        self._rig.map_arena()
        self._rig.prefault()

    def prepare_unmapped_store(self) -> None:
        self.prepare()
        self._rig.forget_store_pages()

    def ours(self) -> Numbers:
        return self._rig.switch(self._plan).numbers()

    def without_arena(self) -> Numbers:
        began_ms = now_ms()
        self._left = self._rig.use(self._rig.allocate())
        self._rig.map_arena()
        return self._rig.switch(self._plan, began_at_ms=began_ms).numbers()

    def without_reuse(self) -> Numbers:
        began_ms = now_ms()
        self._rig.map_arena()
        return self._rig.switch(self._plan, began_at_ms=began_ms).numbers()

    def close(self) -> None:
        """Close the arena that a trial of ``without_arena`` replaced; this is not timed."""
        if self._left is not None:
            self._left.close()
            self._left = None


def _one_model(bench: Run, setting: Setting) -> None:
    model, rig = setting.model, Rig(setting)
    variants = _Variants(rig)
    try:
        bench.say(f"{model.name}: measuring")
        arms = [
            Arm("ours", variants.ours, variants.prepare),
            Arm("without-arena", variants.without_arena, variants.prepare),
            Arm("without-ipc-reuse", variants.without_reuse, variants.prepare),
            Arm("store-pages-unmapped", variants.ours, variants.prepare_unmapped_store),
        ]
        bench.trial_loop(model.name, arms, bench.rounds(ROUNDS, QUICK_ROUNDS), warmup=2)
    finally:
        variants.close()
        rig.close()
    ours = bench.values(model.name, "ours", "makespan_ms")
    bench.find(f"{model.name}: ours, p50", quantile(ours, 0.5), "ms")
    for arm in arms[1:]:
        values = bench.values(model.name, arm.name, "makespan_ms")
        more_ms = quantile(paired_differences(values, ours), 0.5)
        bench.find(f"{model.name}: {arm.name}, more than ours, p50 of pairs", more_ms, "ms")
