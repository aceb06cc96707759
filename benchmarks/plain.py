"""Plain PyTorch in the baselines' processes: how they load the model and inputs, and answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from pipeswitch.programs.compiler.sources import Loaded, _constructor, load_source
from pipeswitch.programs.running.values import flatten_outputs
from pipeswitch.programs.spec import BuildSpec

DTYPES: Final = {"FP32": torch.float32, "INT64": torch.int64}
Order = dict[str, Any]
"""Result of ``Setting.order``: source, inputs, seed, threads and paths."""


def build_spec(order: Order) -> BuildSpec:
    """Return the spec with which a server would register the order's model."""
    inputs = {name: (tuple(shape), dtype) for name, (shape, dtype) in order["inputs"].items()}
    weights = f"random:{order['seed']}"
    return BuildSpec(name="bench", source=order["source"], weights=weights, inputs=inputs)


def load(order: Order) -> Loaded:
    """Return the module with the seeded random weights that a registration gives it."""
    return load_source(build_spec(order))


def network(order: Order) -> nn.Module:
    """Return the order's module in eval mode, and set the number of threads."""
    torch.set_num_threads(order["threads"])
    return load(order).module.eval()


def structure(order: Order) -> nn.Module:
    """Return the module on the meta device, without memory for weights or random numbers."""
    construct, _ = _constructor(build_spec(order))
    with torch.device("meta"):
        module = construct()
    return module.eval()


def inputs_of(order: Order) -> list[torch.Tensor]:
    """Return the inputs of one request, in call order."""
    with np.load(order["inputs_path"]) as arrays:
        return [torch.from_numpy(arrays[name]) for name in arrays.files]


def answer(module: nn.Module, tensors: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Run the module; its inputs and outputs are JSON tensors of the Open Inference Protocol."""
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
    """Return the sum of the first output, by which runs of different arms are compared."""
    first = next(iter(flatten_outputs(output).values()))
    return float(first.double().sum())


def as_arrays(outputs: Sequence[torch.Tensor]) -> list[Any]:
    """Return copies of the outputs that can be sent to another process."""
    return [np.array(output.numpy()) for output in outputs]
