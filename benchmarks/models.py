"""Models that the benchmarks measure. Imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

Inputs = Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class BenchModel:
    """A model's source and inputs, as they are registered, and its memory on the device."""

    name: str
    source: str
    room_bytes: int  # size of the model's region on the device, rounded up
    inputs: Inputs = field(default_factory=dict)


MLP_SOURCE: Final = "benchmarks.factories:mlp"
MLP_WIDTH: Final = 2048
MIB: Final = 1 << 20


def mlp(batch: int) -> BenchModel:
    """Return an MLP of 12 equal layers, 201 MB in sum. A larger batch takes longer to compute."""
    return BenchModel("mlp", MLP_SOURCE, 194 * MIB, {"x": ((batch, MLP_WIDTH), "float32")})


SMALL: Final = BenchModel(
    "small", "benchmarks.factories:small_mlp", MIB, {"input": ((1, 64), "float32")}
)
MODELS: Final[Mapping[str, BenchModel]] = {
    model.name: model
    for model in (
        SMALL,
        BenchModel("resnet152", "torchvision:resnet152", 234 * MIB),
        BenchModel("inception_v3", "torchvision:inception_v3", 106 * MIB),
        BenchModel("bert-base", "hf:bert-base-uncased", 422 * MIB),
        mlp(64),
        BenchModel("resnet18", "torchvision:resnet18", 48 * MIB),
        BenchModel("resnet50", "torchvision:resnet50", 100 * MIB),
        BenchModel("mobilenet_v2", "torchvision:mobilenet_v2", 16 * MIB),
    )
}
SWITCH_MODELS: Final = ("resnet152", "inception_v3", "bert-base", "mlp")
QUICK_MODELS: Final = ("resnet152",)


def missing(name: str) -> str:
    """Return the reason why a model cannot be measured here; empty if it can be measured."""
    is_there = importlib.util.find_spec("transformers") is not None
    if MODELS[name].source.startswith("hf:") and not is_there:
        return "transformers is not installed: pip install 'pipeswitch[hf]'"
    return ""
