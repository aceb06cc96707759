"""``bench workers``: who runs the new task (PipeSwitch, figure 9).

Arms, in turns: *one-process* (the process that trained cleans up and infers), *two-processes* (a
new process is forked while the old one stops, builds the model and infers), *pipeswitch-style*
(active and standby, as published), *pipeswitch* (ours, the model not on the device), *ready*.

The cpu device has no context to create: forking from a process that has torch imported, building
the module and binding it is all that a new process costs here, and cleaning up is dropping
references. On a GPU both rows are larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pipeswitch.planning.fit import quantile

from .baselines import ReadyModel
from .rival import ONE_PROCESS, PUBLISHED, TWO_PROCESSES
from .setting import settings
from .switch import compare
from .trials import Run, paired_differences

DEFAULT_MODELS: Final = ("resnet152",)
QUICK_MODELS: Final = ("mlp",)
ARMS: Final = (ONE_PROCESS.name, TWO_PROCESSES.name, PUBLISHED.name)


def run(bench: Run, models: Sequence[str] = ()) -> None:
    """Measure each model with a server of its own."""
    for setting in settings(bench, models, DEFAULT_MODELS, QUICK_MODELS):
        name = setting.model.name
        compare(bench, setting, [ReadyModel.name, *ARMS])
        ready = bench.values(name, ReadyModel.name, "total_ms")
        for arm in ("cold", *ARMS):
            more_ms = quantile(paired_differences(bench.values(name, arm, "total_ms"), ready), 0.5)
            bench.find(f"{name}: {arm}, more than ready, p50 of pairs", more_ms, "ms")
