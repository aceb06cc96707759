"""What PipeSwitch is compared with. A later baseline is one more entry of ``BASELINES``."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from .models import BenchModel
from .trials import Numbers

TRAIN_MODULE: Final = "pipeswitch.benchmarks.train_script"


@dataclass(frozen=True)
class Setting:
    """What every baseline is given: the model, its files, and as many threads as the server's."""

    model: BenchModel
    folder: Path
    threads: int
    seed: int

    def order(self) -> dict[str, Any]:
        """For ``child.py``."""
        return {
            "source": self.model.source,
            "inputs": dict(self.model.inputs),
            "seed": self.seed,
            "threads": self.threads,
            "weights_path": str(self.folder / f"{self.model.name}.safetensors"),
            "inputs_path": str(self.folder / f"{self.model.name}.npz"),
        }

    def write_files(self) -> None:
        """Weights and inputs, made once by a child."""
        child = spawn("weights", self.order())
        output, _ = child.communicate()
        if child.returncode:
            raise RuntimeError(f"{self.model.name}: its weights could not be written\n{output}")


class Baseline(Protocol):
    """One way to answer a request without PipeSwitch; a context manager."""

    name: str
    every: int  # takes part in every so many rounds

    def prepare(self) -> None:
        """Bring about the state before a request; not timed."""

    def measure(self) -> Numbers:
        """Answer one request; ``total_ms`` and parts of it."""

    def close(self) -> None:
        """End every process of this baseline."""


def spawn(verb: str, order: dict[str, Any]) -> subprocess.Popen[str]:
    """A child of ours with pipes at both ends."""
    command = [sys.executable, "-P", "-m", "pipeswitch.benchmarks.child", verb, json.dumps(order)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def _read(child: subprocess.Popen[str]) -> Numbers:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"a baseline's process ended with status {child.wait()}")
    values: Numbers = json.loads(line)
    return values


def _end(child: subprocess.Popen[str] | None) -> None:
    if child is None:
        return
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class ReadyModel:
    """The model alone in a process that waits: the lower bound. Its clock is inside, no network."""

    name = "ready"
    every = 1

    def __init__(self, setting: Setting) -> None:
        self._child = spawn("ready", setting.order())
        _read(self._child)

    def prepare(self) -> None:
        """Nothing: it is ready."""

    def measure(self) -> Numbers:
        assert self._child.stdin is not None
        self._child.stdin.write("run\n")
        return _read(self._child)

    def close(self) -> None:
        _end(self._child)


class StopAndStart:
    """Kill the training process, start one for the request: no state is kept on the device.

    Kept fast where a user could: SIGKILL, no random initialisation, weights mapped, files cached.
    """

    name = "stop-and-start"
    every = 3

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._training: subprocess.Popen[str] | None = None

    def prepare(self) -> None:
        """A training process that computes, on as many threads as the server's."""
        threads = str(self._setting.threads)
        command = [
            sys.executable,
            "-P",
            "-m",
            TRAIN_MODULE,
            "--threads",
            threads,
            "--announce",
            "3",
        ]
        self._training = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._training.stdout is not None
        if not self._training.stdout.readline():
            raise RuntimeError("the training process of stop-and-start did not train")

    def measure(self) -> Numbers:
        began_ms = time.monotonic() * 1000
        _end(self._training)
        killed_ms = time.monotonic() * 1000
        child = spawn("once", self._setting.order())
        numbers = _read(child)
        ended_ms = time.monotonic() * 1000
        _end(child)
        return {"total_ms": ended_ms - began_ms, "kill_ms": killed_ms - began_ms} | numbers

    def close(self) -> None:
        _end(self._training)


BASELINES: Final[Mapping[str, Callable[[Setting], Baseline]]] = {
    ReadyModel.name: ReadyModel,
    StopAndStart.name: StopAndStart,
}
