"""Modules whose next step needs state from the previous step."""

from __future__ import annotations

from typing import Any, Final

import torch

WIDTH: Final = 32
CELL: Final = {"h": "h_out", "c": "c_out"}
RECALLS: Final = {"past": ("rows", 1)}


class Cell(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = torch.nn.LSTMCell(8, WIDTH), torch.nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> dict[str, torch.Tensor]:
        h, c = self.cell(x, (h, c))
        return {"y": self.head(h), "h_out": h, "c_out": c}


class Recalls(torch.nn.Module):
    """Module that attends to all rows of its sequence, including the rows of this step."""

    def __init__(self) -> None:
        super().__init__()
        self.made = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = self.made(x)
        whole = torch.cat((past, rows), 1)
        return {"y": torch.softmax(x @ whole.transpose(1, 2), -1) @ whole, "rows": rows}


def seeded(make: Any) -> Any:
    torch.manual_seed(0)
    return make().eval()
