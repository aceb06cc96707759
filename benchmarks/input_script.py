"""Training script of ``bench shared-input``, on images that are costly to load.

The job's entry is ``benchmarks.input_script:main``. With ``--measure`` the script only prints the
times to train on a batch and to load a batch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pipeswitch import job

BATCH: Final = 16
SIDE: Final = 64
SAMPLES: Final = 20 * BATCH
MEASURED: Final = 20  # number of batches that --measure times


class Packed(Dataset[tuple[torch.Tensor, int]]):
    """Float32 images, ``[3, SIDE, SIDE]``, each unpacked ``units`` times to make loading costly."""

    def __init__(self, units: int) -> None:
        self.units = units
        dice = np.random.default_rng(0)
        images = dice.integers(0, 16, (SAMPLES, 3, SIDE, SIDE), dtype=np.uint8)
        self.packed = [zlib.compress(image.tobytes()) for image in images]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        for _ in range(self.units):
            raw = zlib.decompress(self.packed[index])
        image = np.frombuffer(raw, np.uint8).reshape(3, SIDE, SIDE).astype(np.float32)
        return torch.from_numpy(image), index % 10


def main() -> None:
    """Train; write the times at which steps ended, in ms, to the file ``--record``."""
    options = _options()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = options.width
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, 2),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, 2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * width, 10),
    ).to(job.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(0)
    loader: Any = DataLoader(Packed(options.units), BATCH, shuffle=True, generator=order)
    if options.measure:
        _measure(model, optimizer, loader)
        return
    if options.shared:
        loader = job.shared(loader)
    instants_ms: list[float] = []
    for _ in job.epochs(options.passes):
        for x, y in job.steps(loader, model=model, optimizer=optimizer):
            _step(model, optimizer, x, y)
            instants_ms.append(time.monotonic() * 1000)
    part = Path(f"{options.record}.part")
    part.write_text(json.dumps(instants_ms))
    os.replace(part, options.record)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> None:
    loss: Any = nn.functional.cross_entropy(model(x), y)  # untyped in torch
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _measure(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    train_ms, load_ms = [], []
    batches = iter(loader)
    for _ in range(MEASURED):
        began_ms = time.monotonic() * 1000
        x, y = next(batches)
        loaded_ms = time.monotonic() * 1000
        _step(model, optimizer, x, y)
        load_ms.append(loaded_ms - began_ms)
        train_ms.append(time.monotonic() * 1000 - loaded_ms)
    figures = {"train_ms": float(np.median(train_ms)), "load_ms": float(np.median(load_ms))}
    sys.stdout.write(json.dumps(figures) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--units", type=int, default=1, help="work of loading a sample")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--record", default="", help="a file for the instants")
    return parser.parse_args()


if __name__ == "__main__":
    main()
