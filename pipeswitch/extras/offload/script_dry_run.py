"""``pipeswitch plan --train``: run a script's first steps in a separate process and measure them.

The run has no budget, and no tensor leaves the device. It writes which tensors a step saves and how
fast copies are, as input for planning. Then the script ends like an evicted script.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, Final, TextIO

import torch

from pipeswitch import job as job_api
from pipeswitch.base.errors import TaskPreempted
from pipeswitch.devices.cpu.worker_device import CpuCopies
from pipeswitch.devices.worker_device import HostCopies
from pipeswitch.ipc.gate import Gate

from ...workers.training.script import run_entry
from ...workers.training.snapshot import named
from .activations import Activations
from .saved import STEPS_MEASURED, least_for

PROBE_BYTES: Final = 16 << 20


class ScriptDryRun(job_api._PlainSession):
    """Session of a script that is only measured; ``out`` is the file for its last measured step."""

    def __init__(self, out: str, device: str, copies: HostCopies) -> None:
        super().__init__()
        self._out, self._device, self._copies = out, device, copies

    @property
    def device(self) -> str:
        """Device name, such as ``cuda:0``, as in the server's session."""
        return self._device

    def steps(self, loader: Iterable[Any], *, model: Any = None, **_: Any) -> Iterator[Any]:
        """Yield batches like ``job.steps``, up to the last measured step."""
        gate = Gate(lambda *_: None)
        gate.grant(1)
        gate.enter()
        activations = Activations("auto", None, self._copies, gate)
        for one in named(model, "model").values():
            activations.keep((*one.parameters(), *one.buffers()))
        measured = 0
        for batch in super().steps(loader):
            with activations.body(batch):
                yield batch
            if activations.plan.measured is not None:
                measured += 1
                self._write(activations)
            if measured == STEPS_MEASURED:
                raise TaskPreempted("it is measured")

    def open(self, *_: Any) -> TextIO:
        """Return a file that drops all text: a measurement leaves the script's logs as they are."""
        return open(os.devnull, "w")

    def _write(self, activations: Activations) -> None:
        plan = activations.plan
        assert plan.measured is not None
        rates = [_bytes_per_ms(self._copies, self._device, to_host=way) for way in (True, False)]
        report = {
            "step": asdict(plan.measured),
            "compute_ms": plan.compute_ms,
            "min_bytes": least_for(plan.of_step),
            "links": [{"bytes_per_ms": rate} for rate in rates],
        }
        with open(self._out, "w") as file:
            json.dump(report, file)


def _bytes_per_ms(copies: HostCopies, device: str, *, to_host: bool) -> float:
    source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device if to_host else "cpu")
    mark = copies.mark()
    began_s = time.monotonic()
    target = copies.target(PROBE_BYTES, on_host=to_host, mark=mark)
    for _ in copies.pieces(source, target, mark, to_host=to_host):
        pass
    return PROBE_BYTES / (time.monotonic() - began_s) / 1e3


def main(out: str, device: str, link_bytes_per_s: str, entry: str, *args: str) -> None:
    """Measure the script ``entry`` and write ``out``; the script's output goes to stderr."""
    os.dup2(2, 1)
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        from pipeswitch.devices.cuda.copies import CudaCopies

        copies: HostCopies = CudaCopies(0)
        device = "cuda:0"
    else:
        copies, device = CpuCopies(float(link_bytes_per_s)), "cpu"
    job_api._install(ScriptDryRun(out, device, copies))
    with contextlib.suppress(TaskPreempted):
        run_entry(entry, args, os.getcwd())


if __name__ == "__main__":
    main(*sys.argv[1:])
