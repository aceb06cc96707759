"""``bench workers``: which process should run a new task (PipeSwitch, figure 9); see README.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pipeswitch.base.quantiles import quantile

from .baselines import ReadyModel
from .rival import ONE_PROCESS, PUBLISHED, TWO_PROCESSES
from .setting import settings
from .switch import compare
from .trials import Run, paired_differences

DEFAULT_MODELS: Final = ("resnet152",)
QUICK_MODELS: Final = ("mlp",)
ARMS: Final = (ONE_PROCESS.name, TWO_PROCESSES.name, PUBLISHED.name)


def run(bench: Run, models: Sequence[str] = ()) -> None:
    """Measure each model with its own server."""
    for setting in settings(bench, models, DEFAULT_MODELS, QUICK_MODELS):
        name = setting.model.name
        compare(bench, setting, [ReadyModel.name, *ARMS])
        ready = bench.values(name, ReadyModel.name, "total_ms")
        for arm in ("cold", *ARMS):
            more_ms = quantile(paired_differences(bench.values(name, arm, "total_ms"), ready), 0.5)
            bench.find(f"{name}: {arm}, more than ready, p50 of pairs", more_ms, "ms")
