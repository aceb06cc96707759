"""Shared parts of the baselines: a model's files, the interface of a baseline, child processes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .models import MODELS, BenchModel
from .trials import Numbers, Run


@dataclass(frozen=True)
class Setting:
    """Model, folder of its files, thread count and seed, equal for all baselines."""

    model: BenchModel
    folder: Path
    threads: int
    seed: int

    def order(self) -> dict[str, Any]:
        """Return the order that child processes get, for JSON: the setting, and paths of files."""
        return {
            "source": self.model.source,
            "inputs": dict(self.model.inputs),
            "seed": self.seed,
            "threads": self.threads,
            "weights_path": str(self.folder / f"{self.model.name}.safetensors"),
            "inputs_path": str(self.folder / f"{self.model.name}.npz"),
            "packed_path": str(self.folder / f"{self.model.name}.packed"),
        }

    def arrays(self) -> list[Any]:
        """Return the inputs of one request. Call ``write_files`` first."""
        with np.load(self.order()["inputs_path"]) as arrays:
            return [arrays[name] for name in arrays.files]

    def write_files(self) -> None:
        """Write weights and inputs with a child process."""
        child = spawn("weights", self.order())
        output, _ = child.communicate()
        if child.returncode:
            raise RuntimeError(f"{self.model.name}: its weights could not be written\n{output}")


def settings(
    bench: Run, names: Sequence[str], full: Sequence[str], quick: Sequence[str]
) -> Iterator[Setting]:
    """Yield a setting for each model that can be measured here; its folder is temporary."""
    for name in bench.usable(names or (quick if bench.is_quick else full)):
        with tempfile.TemporaryDirectory(prefix="pipeswitch-bench-") as folder:
            setting = Setting(MODELS[name], Path(folder), bench.threads, bench.seed)
            bench.say(f"{name}: writing weights, starting")
            setting.write_files()
            yield setting


@dataclass(frozen=True)
class Style:
    """Choices by which rivals differ in how they serve a request (``rival.py``).

    ``transfer``: "groups" copies groups while computing; "whole" copies the model before computing;
    "tensors" copies each tensor into newly allocated memory, like ``.to(device)``. ``workers`` as
    in PipeSwitch's figure 9: "standby" has a second worker ready; "one" uses the worker that
    trained; "new" forks a worker for the request while the old one stops."""

    name: str
    transfer: Literal["groups", "whole", "tensors"] = "groups"
    workers: Literal["standby", "one", "new"] = "standby"


class Baseline:
    """One way to answer a request without PipeSwitch."""

    name: str
    every = 1  # the baseline is measured in every ``every``-th round

    def prepare(self) -> None:
        """Create the state before a request; not timed."""

    def measure(self) -> Numbers:
        """Answer one request; return ``total_ms`` and parts of it."""
        raise NotImplementedError

    def close(self) -> None:
        """End every process of this baseline."""
        raise NotImplementedError


def spawn(
    verb: str, order: dict[str, Any], *, module: str = "child", keep: tuple[int, ...] = ()
) -> subprocess.Popen[str]:
    """Start a child process with pipes for input and output; it inherits descriptors ``keep``."""
    name = f"{__package__}.{module}"
    command = [sys.executable, "-P", "-m", name, verb, json.dumps(order)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, pass_fds=keep
    )


def tell(child: subprocess.Popen[str], **values: Any) -> None:
    """Write one JSON line to the child's standard input."""
    assert child.stdin is not None
    child.stdin.write(json.dumps(values) + "\n")


def read_line(child: subprocess.Popen[str]) -> Numbers:
    """Return the child's next JSON line; raise RuntimeError if it has ended."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"a baseline's process ended with status {child.wait()}")
    values: Numbers = json.loads(line)
    return values


def next_answer(child: subprocess.Popen[str]) -> Numbers:
    """Request an answer from a child that reads a line per request; return the answer."""
    assert child.stdin is not None
    child.stdin.write("run\n")
    return read_line(child)


def end(child: subprocess.Popen[str] | None) -> None:
    """Kill and reap the child."""
    if child is None:
        return
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
