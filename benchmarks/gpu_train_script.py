"""The training script of the GPU stages: the same file runs plain and as a job.

ResNet-50 on made-up images, Adam; ``--small`` a little MLP. Writes the milliseconds of its steps,
the device's work included, to ``--record``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from pipeswitch import job


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="", help="of a plain run; a job is told its own")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=15)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--record", default="")
    options = parser.parse_args()
    device = options.device or job.device
    torch.manual_seed(0)
    model: Any
    if options.small:
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
        )
        x = torch.randn(16, 64)
    else:
        import torchvision

        model = torchvision.models.resnet50(num_classes=8)
        x = torch.randn(32, 3, 224, 224)
    model.to(device)
    x, y = x.to(device), (torch.arange(len(x)) % 8).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    began_s = 0.0
    for number, (inputs, targets) in enumerate(
        job.steps([(x, y)] * options.steps, model=model, optimizer=optimizer)
    ):
        if number == options.warm_up:
            _synchronize(device)
            began_s = time.monotonic()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    _synchronize(device)
    step_ms = (time.monotonic() - began_s) * 1000 / (options.steps - options.warm_up)
    if options.record:
        Path(options.record).write_text(json.dumps({"step_ms": step_ms}))


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
