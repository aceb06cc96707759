"""The demo's two baselines, each in a plain process without PipeSwitch in the path.

``ready PLAN``         all models are loaded, eager, without training. Then the process reads a
                       schedule, and answers the same requests at the same times, first come first
                       served. This is the lower bound.
``start PLAN MODEL``   stop-and-start: all that a new process does for its first request: import,
                       build, load the weights from a warm file cache, run.

Each prints its result as one JSON line. The weights equal the server's (same seed), so the answers
are compared, too.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ...programs.spec import BuildSpec


def main(arguments: list[str]) -> None:
    """Run one baseline and print its result."""
    import torch

    plan: dict[str, Any] = json.loads(Path(arguments[1]).read_text())
    torch.set_num_threads(int(plan["threads"]))
    warnings.simplefilter("ignore")  # hide the libraries' advice to the model's author
    with torch.no_grad():
        if arguments[0] == "ready":
            _ready(plan)
        else:
            _start(plan, arguments[2])


def _ready(plan: Mapping[str, Any]) -> None:
    import numpy as np
    import torch
    from safetensors.torch import save_file

    from ...programs.compiler.sources import load_source
    from ...programs.running.values import flatten_outputs

    models, inputs, differences = {}, {}, {}
    for name in plan["models"]:
        models[name] = load_source(_spec(plan, name)).module
        tensors = {key: t.contiguous() for key, t in _tensors(models[name])}
        save_file(tensors, _file(plan, name))
    _say({"built": list(models)})
    schedule = json.loads(sys.stdin.readline())
    for name, model in models.items():
        inputs[name] = _inputs(plan, name)
        answer = torch.from_numpy(np.load(Path(plan["folder"], f"{name}.answer.npy")))
        ours = next(iter(flatten_outputs(model(*inputs[name])).values()))
        differences[name] = (ours - answer).abs().max().item()
    latencies: list[float] = []
    began_s = time.perf_counter()
    for due_s, name in schedule:
        time.sleep(max(0.0, began_s + due_s - time.perf_counter()))
        models[name](*inputs[name])
        latencies.append((time.perf_counter() - began_s - due_s) * 1000.0)
    _say({"latencies_ms": latencies, "differences": differences})


def _start(plan: Mapping[str, Any], name: str) -> None:
    import torch
    from safetensors.torch import load_file

    # The bare structure: ``load_source`` would draw random weights first, which costs seconds.
    from ...programs.compiler.sources import _constructor

    construct, _ = _constructor(_spec(plan, name))
    with torch.device("meta"):
        model = construct().train(False)
    _fill(model, load_file(_file(plan, name)))
    model(*_inputs(plan, name))
    _say({"done": name})


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors; a state dict would lack the buffers that are not persistent."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _fill(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace the model's meta tensors by those of the file."""
    from torch import nn

    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        if leaf in dict(owner.named_parameters(recurse=False)):
            setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
        else:
            setattr(owner, leaf, tensor)


def _spec(plan: Mapping[str, Any], name: str) -> BuildSpec:
    from ...programs.spec import BuildSpec

    model = plan["models"][name]
    shapes = {key: (tuple(shape), dtype) for key, (shape, dtype) in model["inputs"].items()}
    return BuildSpec(name=name, source=model["source"], weights=plan["weights"], inputs=shapes)


def _inputs(plan: Mapping[str, Any], name: str) -> list[torch.Tensor]:
    import numpy as np
    import torch

    with np.load(Path(plan["folder"], f"{name}.inputs.npz")) as stored:
        return [torch.from_numpy(stored[key]) for key in stored.files]  # in call order


def _file(plan: Mapping[str, Any], name: str) -> Path:
    return Path(plan["folder"], f"{name}.safetensors")


def _say(message: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
