"""A job of ``benchmarks.coshift``: paced layers that save, and a loader that takes its time.

Args: record's path, steps, layers, KiB that each saves, milliseconds of each, of the loader.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from benchmarks.swaps import Paced
from pipeswitch import job


class Net(nn.Module):
    """Layer after layer takes its time, and saves."""

    def __init__(self, layers: int, kib: int, ms: float) -> None:
        super().__init__()
        self.layers, self.kib, self.ms = layers, kib, ms
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for _ in range(self.layers):
            x = Paced.apply(x, self.kib << 10, self.ms)
        return x


class Loader:
    """Waits for each batch."""

    def __init__(self, steps: int, ms: float) -> None:
        self.steps, self.ms = steps, ms

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.steps):
            time.sleep(self.ms / 1e3)
            yield torch.full((8, 16), float(index % 5))


def main() -> None:
    path, steps, layers, kib, ms, loader_ms = sys.argv[1:]
    torch.manual_seed(0)
    net = Net(int(layers), int(kib), float(ms)).to(job.device)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    began = time.monotonic()
    for x in job.steps(Loader(int(steps), float(loader_ms)), model=net, optimizer=optimizer):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    found = {"span": (began, time.monotonic()), "state": hashlib.sha256(state).hexdigest()}
    Path(path).write_text(json.dumps(found))


main()
