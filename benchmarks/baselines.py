"""Baselines that PipeSwitch is compared with. A new baseline needs an entry in ``BASELINES``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from .rival import STYLES, Rival
from .setting import Baseline, Setting, end, next_answer, read_line, spawn
from .trials import Numbers, now_ms

TRAIN_MODULE: Final = "benchmarks.train_script"


class ReadyModel(Baseline):
    """Lower bound: the model alone in a waiting process, timed there, without a network."""

    name = "ready"

    def __init__(self, setting: Setting) -> None:
        self._child = spawn("ready", setting.order())
        read_line(self._child)

    def measure(self) -> Numbers:
        return next_answer(self._child)

    def close(self) -> None:
        end(self._child)


class StopAndStart(Baseline):
    """Stop-and-start: kill the process that trains, then start a process that answers the request.

    It is as fast as a user could make it: SIGKILL, no random initialisation, weights mapped, files
    in the page cache.
    """

    name = "stop-and-start"
    every = 3

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._running: subprocess.Popen[str] | None = None

    def prepare(self) -> None:
        """Start a process that trains, with as many threads as the server has."""
        end(self._running)
        command = [sys.executable, "-P", "-m", TRAIN_MODULE, "--announce", "3"]
        command += ["--threads", str(self._setting.threads)]
        self._running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._running.stdout is not None
        if not self._running.stdout.readline():
            raise RuntimeError("the training process of stop-and-start did not train")

    def measure(self) -> Numbers:
        """Measure the switch to the model, up to its first answer."""
        began_ms = now_ms()
        end(self._running)
        killed_ms = now_ms()
        self._running = spawn("once", self._setting.order())
        numbers = read_line(self._running)
        ended_ms = now_ms()
        return {"total_ms": ended_ms - began_ms, "kill_ms": killed_ms - began_ms} | numbers

    def again(self) -> Numbers:
        """Measure one more answer of the started process."""
        assert self._running is not None
        return next_answer(self._running)

    def close(self) -> None:
        end(self._running)


BASELINES: Final[Mapping[str, Callable[[Setting], Baseline]]] = {
    ReadyModel.name: ReadyModel,
    **{style.name: partial(Rival, style=style) for style in STYLES},
    StopAndStart.name: StopAndStart,
}
NEEDS_CUDA: Final = {"mps": "needs a CUDA device", "unified-memory": "needs a CUDA device"}
"""Baselines of the paper that do not exist on the cpu device, each with the reason."""
