"""``bench switchflow``: SwitchFlow's figures 2 and 6 to 10 and table 1, one after the other.

Figure 2, case *… twice*: two clients, each with a model of its own, ask back to back. Arms, in
turns: *pipeswitch* (one model computes at a time), *threads* (both in one process, neither excludes
the other: multi-stream), *session-slicing* (a lock that a request holds), *alone* (one client).
Figure 6 is ``bench interference``: requests beside a training job. Figure 7 is
``bench devices``: preempted jobs that go to another device. Table 1, of models,
is ``bench state``. Figures 8 to 10 are ``bench shared-input``: jobs on the same data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from . import devices, interference, shared_input, state
from .setting import settings
from .trials import Run

DEFAULT_MODELS: Final = ("resnet50",)
QUICK_MODELS: Final = ("resnet18",)


def run(bench: Run, models: Sequence[str] = ()) -> None:
    """Run all figures; ``models``: for those of requests."""
    for setting in settings(bench, models, DEFAULT_MODELS, QUICK_MODELS):
        interference.twice(bench, setting)
    interference.run(bench, models)
    for other in (devices, shared_input, state):
        other.run(bench)
    bench.notes.append(
        "… twice: figure 2; one model and a training job: figure 6; … moves, requests stay: "
        "figure 7; jobs: figures 8 to 10; models alone: table 1"
    )
