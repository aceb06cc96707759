"""Plain PyTorch, as all baselines' processes use it: the model, its inputs, its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from pipeswitch.programs.build.sources import Loaded, _constructor, load_source
from pipeswitch.programs.running.values import flatten_outputs
from pipeswitch.programs.spec import BuildSpec

DTYPES: Final = {"FP32": torch.float32, "INT64": torch.int64}
Order = dict[str, Any]
"""What ``baselines.Setting.order`` says: source, inputs, seed, threads and paths."""


def build_spec(order: Order) -> BuildSpec:
    """Return the order as a registration's spec."""
    inputs = {name: (tuple(shape), dtype) for name, (shape, dtype) in order["inputs"].items()}
    weights = f"random:{order['seed']}"
    return BuildSpec(name="bench", source=order["source"], weights=weights, inputs=inputs)


def load(order: Order) -> Loaded:
    """Return the module with seeded random weights, as a registration would make it."""
    return load_source(build_spec(order))


def network(order: Order) -> nn.Module:
    """Load the order's module, ready to answer with the order's threads."""
    torch.set_num_threads(order["threads"])
    return load(order).module.eval()


def structure(order: Order) -> nn.Module:
    """Return the module on meta: no memory is touched and no random number drawn."""
    construct, _ = _constructor(build_spec(order))
    with torch.device("meta"):
        module = construct()
    return module.eval()


def inputs_of(order: Order) -> list[torch.Tensor]:
    """Return one request's inputs, in call order."""
    with np.load(order["inputs_path"]) as arrays:
        return [torch.from_numpy(arrays[name]) for name in arrays.files]


def answer(module: nn.Module, tensors: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compute the output tensors of a request in the Open Inference Protocol's JSON."""
    inputs = [
        torch.tensor(one["data"], dtype=DTYPES[one["datatype"]]).reshape(one["shape"])
        for one in tensors
    ]
    with torch.inference_mode():
        outputs = flatten_outputs(module(*inputs))
    return [
        {"name": name, "datatype": "FP32", "shape": list(y.shape), "data": y.flatten().tolist()}
        for name, y in outputs.items()
    ]


def checksum(output: Any) -> float:
    """Return the sum of the first output, in which all compared runs must agree."""
    first = next(iter(flatten_outputs(output).values()))
    return float(first.double().sum())


def as_arrays(outputs: Sequence[torch.Tensor]) -> list[Any]:
    """Copies that may leave the process."""
    return [np.array(output.numpy()) for output in outputs]
