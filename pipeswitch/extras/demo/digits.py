"""The demo's background job: a small CNN on scikit-learn's 1,797 handwritten digits.

It is an ordinary training script: ``python -m pipeswitch.extras.demo.digits`` runs a plain loop.
Under a server (``pipeswitch train pipeswitch.extras.demo.digits:main``) the same lines can be
suspended, evicted and killed, and still end with the same weights.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Final

from ... import job
from ...base.errors import PipeSwitchError

SEED: Final = 0
BATCH: Final = 64
TEST_COUNT: Final = 360  # a fifth of the digits, chosen by the seed and never trained on
CHANNELS: Final = 48
LEARNING_RATE: Final = 1e-3


def check_digits() -> None:
    """Raise PipeSwitchError if scikit-learn is not installed."""
    if importlib.util.find_spec("sklearn") is None:
        raise PipeSwitchError(
            "the demo trains on scikit-learn's digits, which is not installed",
            hint="pip install 'pipeswitch[demo]'",
        )


def main() -> None:
    """Train until ``--epochs`` are over or ``--stop-file`` exists, then report the accuracy."""
    arguments = _arguments()
    check_digits()
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(SEED)
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16.0
    y = torch.tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(x))
    test, train = order[:TEST_COUNT], order[TEST_COUNT:]
    loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=BATCH, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3, padding=1),
        nn.BatchNorm2d(CHANNELS),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, padding=1),
        nn.BatchNorm2d(2 * CHANNELS),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(2 * CHANNELS, 2 * CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(2 * CHANNELS * 16, 10),
    ).to(job.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    criterion = nn.CrossEntropyLoss()
    for _ in job.epochs(arguments.epochs):
        for images, targets in job.steps(loader, model=model, optimizer=optimizer):
            loss = criterion(model(images), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            job.log(loss=loss)
        if arguments.stop_file is not None and arguments.stop_file.exists():
            break
    model.train(False)
    with torch.no_grad():
        hits = model(x[test].to(job.device)).argmax(1).cpu() == y[test]
    accuracy = hits.double().mean().item()
    job.log(accuracy=accuracy)
    print(f"steps={job.step} test_accuracy={accuracy:.4f}", flush=True)  # noqa: T201  # its log


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=10, help="maximum number of epochs")
    parser.add_argument("--stop-file", type=Path, help="end after the epoch in which it appears")
    return parser.parse_args()


if __name__ == "__main__":
    main()
