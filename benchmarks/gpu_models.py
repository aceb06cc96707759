"""Models of the GPU benchmark that no library here provides; random weights."""

from __future__ import annotations

from torch import nn


def bert_base_like() -> nn.Module:
    """An encoder of BERT-base's shape over embeddings: 12 layers, 768 wide, 12 heads, 85 M."""
    layer = nn.TransformerEncoderLayer(
        768, 12, dim_feedforward=3072, batch_first=True, activation="gelu"
    )
    return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)


def tiny() -> nn.Module:
    """For trying the benchmark itself without a GPU."""
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.ReLU())))
