"""Training under a budget: ours beside the layer-wise plan, on the cpu device.

    python -m benchmarks.swaps [LINK_GBPS]

At each share of what a step needs, the plan of ``planning/swaps.py`` and vDNN's alone take turns,
each for a loop of its own; one JSON line for each. A line without ``planner`` is a forecast over
one step that was measured without a limit: waits of each plan, and of Belady's. ``vgg`` computes;
``paced`` waits where others compute, so that neighbours on the machine change nothing.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipeswitch.devices.cpu.copies import CpuCopies
from pipeswitch.ipc.gate import Gate
from pipeswitch.planning import swaps
from workers.training import activations as executor
from workers.training.activations import Activations

SHARES = (1.0, 0.7, 0.5, 0.3)
ROUNDS, STEPS, BATCH = 3, 8, 32


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    width = 3
    for more in (16, 16, 0, 32, 32, 0, 64, 64, 0):
        if more:
            layers += [nn.Conv2d(width, more, 3, padding=1), nn.BatchNorm2d(more), nn.ReLU(True)]
            width = more
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


class Paced(torch.autograd.Function):
    """Saves its output, and takes its time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size_bytes: int, ms: float) -> torch.Tensor:
        time.sleep(ms / 1e3)
        ctx.ms = ms
        ctx.save_for_backward(torch.empty(size_bytes, dtype=torch.uint8))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _ = ctx.saved_tensors
        time.sleep(2 * ctx.ms / 1e3)
        return grads[0], None, None


class PacedNet(nn.Module):
    """Of layers unlike each other."""

    def __init__(self) -> None:
        super().__init__()
        dice = random.Random(0)
        self.layers = [(dice.choice([256, 512, 1024, 2048]) << 10, dice.uniform(1, 5))
                       for _ in range(20)]  # fmt: skip
        self.weight = nn.Parameter(torch.zeros(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.weight.expand(len(x), 10)
        for size_bytes, ms in self.layers:
            y = Paced.apply(y, size_bytes, ms)
        return y


MODELS = {"vgg": vgg, "paced": PacedNet}


def layer_wise(step: swaps.Step, budget_bytes: int, lanes: swaps.Lanes, *_: object, **__: object):  # type: ignore[no-untyped-def]
    found = swaps.hiding(step, budget_bytes, lanes)
    return min(found, key=lambda one: (one.wait_ms, one.moved_bytes)) if found else None


@contextmanager
def planned_by(planner: str) -> Iterator[None]:
    """What the executor asks for a plan."""
    ours = vars(executor)["plan"]
    if planner == "layer-wise":
        vars(executor)["plan"] = layer_wise
    try:
        yield
    finally:
        vars(executor)["plan"] = ours


def loop(
    name: str, budget_bytes: int, link_gbps: float, planner: str
) -> tuple[Activations, list[float]]:
    """A loop of its own; its steps' milliseconds behind the measured ones."""
    torch.manual_seed(0)
    model = MODELS[name]()
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    gate = Gate(lambda *_: None)
    gate.grant(1)
    gate.enter()
    limit = Activations("auto", budget_bytes, CpuCopies(link_gbps * 1e9), gate)
    limit.keep((*model.parameters(), *model.buffers()))
    took = []
    with planned_by(planner):
        for _ in range(executor.STEPS_MEASURED + STEPS):
            began = time.monotonic()
            with limit.body((x, y)):
                torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
            took.append((time.monotonic() - began) * 1e3)
    limit.close()
    return limit, took[executor.STEPS_MEASURED :]


def main(link_gbps: float = 0.25) -> None:
    torch.set_num_threads(1)
    for name in MODELS:
        compare(name, link_gbps)


def compare(name: str, link_gbps: float) -> None:
    free = loop(name, 1 << 40, link_gbps, "plan")[0]
    needed, step = free.peak_bytes, free.measured
    assert step is not None
    lane = swaps.Lane(bytes_per_ms=link_gbps * 1e6)
    for share in SHARES:
        budget_bytes = int(share * needed)
        given = step, budget_bytes, (lane, lane)
        belady = swaps.forecast(step, swaps.farthest(step, budget_bytes), budget_bytes, given[2])
        found = {"plan": swaps.plan(*given), "layer-wise": layer_wise(*given), "belady": belady}
        waits = {key: one and round(one.wait_ms, 2) for key, one in found.items()}
        print(json.dumps({"model": name, "share": share, "link_gbps": link_gbps,
                          "compute_ms": round(free.compute_ms, 2), "waits_ms": waits}))  # fmt: skip
        took: dict[str, list[float]] = {"plan": [], "layer-wise": []}
        last: dict[str, Activations] = {}
        for _ in range(ROUNDS):
            for planner, steps in took.items():
                last[planner], more = loop(name, budget_bytes, link_gbps, planner)
                steps += more
        for planner, steps in took.items():
            figures = last[planner].figures
            print(json.dumps({
                "model": name, "share": share, "budget_bytes": budget_bytes, "planner": planner,
                "link_gbps": link_gbps, "step_ms": round(statistics.median(steps), 2),
                "planned_step_ms": figures["planned_step_ms"], "waited_ms": figures["waited_ms"],
                "planned_wait_ms": figures["planned_wait_ms"],
                "peak_bytes": last[planner].peak_bytes,
                "offloaded_bytes": figures["offloaded_bytes"], "steps": len(steps),
                "torch": torch.__version__,
            }))  # fmt: skip


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
