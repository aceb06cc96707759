"""The torch side of the baselines: plain PyTorch, no part of the server.

Verbs: ``weights`` writes a model's tensors to safetensors, ``ready`` keeps the eager model in a
process, ``once`` is what stop-and-start starts: imports, builds, loads, runs, leaves.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

STARTED_AT_MS = time.monotonic() * 1000


def _now_ms() -> float:
    return time.monotonic() * 1000


def _tell(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _load(order: dict[str, Any]) -> Any:
    """The module with seeded random weights, as a registration would make it."""
    from pipeswitch.programs.sources import load_source
    from pipeswitch.programs.spec import BuildSpec

    inputs = {name: (tuple(shape), dtype) for name, (shape, dtype) in order["inputs"].items()}
    spec = BuildSpec(
        name="bench", source=order["source"], weights=f"random:{order['seed']}", inputs=inputs
    )
    return load_source(spec)


def write_weights(order: dict[str, Any]) -> None:
    """All tensors (buffers that are not persistent included), and one request's inputs."""
    import numpy as np
    from safetensors.torch import save_file

    from pipeswitch.programs.requests import random_inputs
    from pipeswitch.programs.sources import example_specs

    loaded = _load(order)
    tensors, seen = {}, set()
    for name, tensor in _named_tensors(loaded.module):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach().contiguous()
    save_file(tensors, order["weights_path"])
    values = random_inputs(example_specs(loaded.inputs), seed=order["seed"])
    np.savez(order["inputs_path"], *values)
    _tell(bytes=Path(order["weights_path"]).stat().st_size)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _inputs(order: dict[str, Any]) -> list[torch.Tensor]:
    import numpy as np
    import torch

    with np.load(order["inputs_path"]) as arrays:
        return [torch.from_numpy(arrays[name]) for name in arrays.files]


def _checksum(output: Any) -> float:
    value = output[0] if isinstance(output, tuple | list) else output
    return float(value.double().sum())


def ready(order: dict[str, Any]) -> None:
    """Ready model: build once, then one timed eager run for each line that comes in."""
    import torch

    torch.set_num_threads(order["threads"])
    module, inputs = _load(order).module, _inputs(order)
    with torch.inference_mode():
        _tell(ready=True)
        for _ in sys.stdin:
            began_ms = _now_ms()
            output = module(*inputs)
            _tell(total_ms=_now_ms() - began_ms, checksum=_checksum(output))


def once(order: dict[str, Any]) -> None:
    """Stop-and-start, the quick way: no random initialisation, weights mapped from the file."""
    import torch
    from safetensors.torch import load_file

    from pipeswitch.programs import sources
    from pipeswitch.programs.spec import BuildSpec

    if order["source"].startswith("torchvision:"):
        import torchvision  # noqa: F401 - counted as import, not as build
    torch.set_num_threads(order["threads"])
    imported_ms = _now_ms()
    inputs = {name: (tuple(shape), dtype) for name, (shape, dtype) in order["inputs"].items()}
    spec = BuildSpec(name="bench", source=order["source"], weights="random:0", inputs=inputs)
    construct, _ = sources._constructor(spec)
    with torch.device("meta"):
        module = construct()
    module.eval()
    built_ms = _now_ms()
    _assign(module, load_file(order["weights_path"]))
    loaded_ms = _now_ms()
    with torch.inference_mode():
        output = module(*_inputs(order))
    _tell(
        checksum=_checksum(output),
        import_ms=imported_ms - STARTED_AT_MS,
        build_ms=built_ms - imported_ms,
        load_ms=loaded_ms - built_ms,
        compute_ms=_now_ms() - loaded_ms,
    )


def _assign(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Put the file's tensors where meta ones are; tied names share what their twin got."""
    from torch import nn

    given: dict[int, torch.Tensor] = {}
    for name, meta in _named_tensors(module):
        if name in tensors:
            given[id(meta)] = tensors[name]
    for owner in module.modules():
        for key, parameter in list(owner._parameters.items()):
            if parameter is not None:
                owner._parameters[key] = nn.Parameter(given[id(parameter)], requires_grad=False)
        for key, buffer in list(owner._buffers.items()):
            if buffer is not None:
                owner._buffers[key] = given[id(buffer)]


VERBS = {"weights": write_weights, "ready": ready, "once": once}

if __name__ == "__main__":
    VERBS[sys.argv[1]](json.loads(sys.argv[2]))
