"""What torch reads and starts when it first computes: done before the sandbox forbids it."""

from __future__ import annotations

import torch

from pipeswitch.programs import views  # noqa: F401  # the device imports it at its first tensor
from pipeswitch.programs.operators import checked_by

SIDE = 512  # enough elements that torch gives each of its threads a part


def warm_up() -> None:
    """Start all compute threads of this one; let the libraries look at the processor."""
    checked_by()  # reads torch's version from a file
    square = torch.ones(SIDE, SIDE)
    torch.mm(square, square).sum()
    torch.nn.functional.conv2d(torch.ones(1, 16, 16, 16), torch.ones(16, 16, 3, 3))
