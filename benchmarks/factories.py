"""Factories of the benchmarks' own models (``package.module:factory``)."""

from __future__ import annotations

import torch
from torch import nn

from .models import MLP_WIDTH


def mlp() -> nn.Module:
    """Return 12 linear layers of 2048 by 2048, each with a ReLU, no biases: 201,326,592 bytes."""
    layers: list[nn.Module] = []
    for _ in range(12):
        layers += [nn.Linear(MLP_WIDTH, MLP_WIDTH, bias=False), nn.ReLU()]
    return nn.Sequential(*layers)


def mlp_144() -> nn.Module:
    """Return 9 linear layers of 2048 by 2048 without biases: 144 MiB."""
    return nn.Sequential(*(nn.Linear(MLP_WIDTH, MLP_WIDTH, bias=False) for _ in range(9)))


def mlp_1152() -> nn.Module:
    """Return 18 linear layers of 4096 by 4096 without biases: 1,152 MiB."""
    return nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(18)))


def small_mlp() -> nn.Module:
    """Return a model of three small layers, for quick tests of the baselines."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8))


class FirstColumn(nn.Module):
    """Model that reads almost nothing of its input, so that only the request's path takes time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first number of ``x``, [1, n] float32, times the weight; the shape is [1]."""
        return (x[:, :1] * self.weight).sum(dim=1)


def first_column() -> nn.Module:
    """Return a model that computes almost nothing for any size of input."""
    return FirstColumn()


def tower_24() -> nn.Module:
    """Return 24 linear layers of 512 by 512 without biases, each with a ReLU: 24 MiB."""
    pairs = [(nn.Linear(512, 512, bias=False), nn.ReLU()) for _ in range(24)]
    return nn.Sequential(*(module for pair in pairs for module in pair))


def bert_base_like() -> nn.Module:
    """Return an encoder of BERT-base's shape, on embeddings: 12 layers, 12 heads, 85 M weights."""
    layer = nn.TransformerEncoderLayer(
        768, 12, dim_feedforward=3072, batch_first=True, activation="gelu"
    )
    return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)


def tiny() -> nn.Module:
    """Return the model that the GPU stages use on a machine without a GPU."""
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.ReLU())))


class _FirstOutput(nn.Module):
    """A model from the transformers library that returns only its first output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.model(input_ids=input_ids, return_dict=False)[0]
        return first


def bert_base() -> nn.Module:
    """Return BERT-base with random weights, without downloading its files."""
    from transformers import BertConfig, BertModel

    return _FirstOutput(BertModel(BertConfig()))


def distilbert() -> nn.Module:
    """Return DistilBERT with random weights, without downloading its files."""
    from transformers import DistilBertConfig, DistilBertModel

    return _FirstOutput(DistilBertModel(DistilBertConfig()))


def gpt2() -> nn.Module:
    """Return GPT-2 with random weights and without a key-value cache; download no files."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return _FirstOutput(GPT2LMHeadModel(GPT2Config(use_cache=False)))


def vit_4_blocks() -> nn.Module:
    """Return the first 4 of 24 blocks of ViT-L, which register in a tenth of the time."""
    from torchvision.models import VisionTransformer

    sizes = {"num_layers": 4, "num_heads": 16, "hidden_dim": 1024, "mlp_dim": 4096}
    model: nn.Module = VisionTransformer(image_size=224, patch_size=16, **sizes)
    return model


class _Residual(nn.Module):
    """Three convolutions; the first one's output is added to the third one's output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.third = nn.Conv2d(width, width, 1)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.relu(self.first(x))
        y = torch.relu(self.norm(self.second(first)))
        y = torch.relu(self.third(y) + first)
        logits: torch.Tensor = self.head(y.mean((2, 3)))
        return logits


def residual() -> nn.Module:
    """Return a small module with BatchNorm and a residual addition."""
    return _Residual(64)
