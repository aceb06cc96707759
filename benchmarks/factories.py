"""Models of our own, constructed by a builder (``package.module:factory``)."""

from __future__ import annotations

import torch
from torch import nn

from .models import MLP_WIDTH


def mlp() -> nn.Module:
    """Twelve times (2048 by 2048, ReLU), without biases: 201,326,592 bytes."""
    layers: list[nn.Module] = []
    for _ in range(12):
        layers += [nn.Linear(MLP_WIDTH, MLP_WIDTH, bias=False), nn.ReLU()]
    return nn.Sequential(*layers)


def small_mlp() -> nn.Module:
    """Three layers, to try the baselines themselves in a moment."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8))


def _tower(layers: int) -> nn.Module:
    """Times 512 by 512 and ReLU, without biases: 1 MiB a layer."""
    pairs = [(nn.Linear(512, 512, bias=False), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*(module for pair in pairs for module in pair))


def tower_6() -> nn.Module:
    """6 MiB."""
    return _tower(6)


def tower_12() -> nn.Module:
    """12 MiB."""
    return _tower(12)


def tower_24() -> nn.Module:
    """24 MiB."""
    return _tower(24)


class FirstColumn(nn.Module):
    """Reads next to nothing of its input: what remains is the request's path."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [1, n] float32. Returns [1]."""
        return (x[:, :1] * self.weight).sum(dim=1)


def first_column() -> nn.Module:
    """A model whose computation costs the same for any size of input: nearly nothing."""
    return FirstColumn()


class _LastState(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [rows, words] int64. Returns [rows, words, 512]."""
        found: torch.Tensor = self.encoder(x).last_hidden_state
        return found


def bert_small() -> nn.Module:
    """BERT of 4 layers, 512 wide, 8 heads, as transformers has it: 115 MB."""
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=512, num_hidden_layers=4, num_attention_heads=8,
                        intermediate_size=2048)  # fmt: skip
    return _LastState(BertModel(config))
