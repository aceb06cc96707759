"""Processes of the baselines that compute with plain PyTorch, without any part of the server.

Verbs: ``weights`` writes a model's tensors to a safetensors file; ``ready`` waits with the eager
model in memory; ``once``, which the stop-and-start baseline starts for each switch, imports torch,
builds and loads the model, and runs it; ``tensors`` copies a model's tensors one by one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .trials import now_ms, say

if TYPE_CHECKING:
    import torch
    from torch import nn

EXIT_INTERRUPTED = 130  # exit status of a shell after SIGINT
STARTED_AT_MS = time.monotonic() * 1000


def write_weights(order: dict[str, Any]) -> None:
    """Write a model's tensors, with its buffers that are not persistent, and one request's inputs.

    Also write the model packed group by group, for the baselines that copy it in groups.
    """
    import numpy as np
    import torch

    from pipeswitch.base.errors import RegistrationRefused
    from pipeswitch.programs.compiler.module_mode import build_module
    from pipeswitch.programs.compiler.sources import example_specs
    from pipeswitch.programs.interface.synthetic_inputs import random_inputs
    from pipeswitch.programs.spec import save_manifest

    from . import plain

    loaded = plain.load(order)
    save_tensors(loaded.module, order["weights_path"])
    values = random_inputs(example_specs(loaded.inputs), {}, seed=order["seed"])
    np.savez(order["inputs_path"], *values)
    packed = Path(order["packed_path"])
    packed.mkdir()
    why = RegistrationRefused("baseline", "eager, with hooks")
    examples = [torch.from_numpy(value) for value in values]
    spec = plain.build_spec(order)
    save_manifest(
        packed, build_module(spec, loaded, examples, packed, why, lambda stage, share: None)
    )
    say(bytes=Path(order["weights_path"]).stat().st_size)


def save_tensors(module: nn.Module, path: str) -> None:
    """Write all tensors of a module to a safetensors file; write a tensor with two names once."""
    from safetensors.torch import save_file

    tensors, saved = {}, set()
    for name, tensor in _named_tensors(module):
        if id(tensor) not in saved:
            saved.add(id(tensor))
            tensors[name] = tensor.detach().contiguous()
    save_file(tensors, path)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def ready(order: dict[str, Any]) -> None:
    """Build the model once; then, for each input line, run it and print the time."""
    import torch

    from . import plain

    torch.set_num_threads(order["threads"])
    module, inputs = plain.load(order).module, plain.inputs_of(order)
    say(ready=True)
    _answer(module, inputs)


def _answer(module: nn.Module, inputs: list[torch.Tensor]) -> None:
    """Run and time the model once for each input line."""
    import torch

    from . import plain

    with torch.inference_mode():
        for _ in sys.stdin:
            began_ms = now_ms()
            output = module(*inputs)
            say(total_ms=now_ms() - began_ms, checksum=plain.checksum(output))


def once(order: dict[str, Any]) -> None:
    """Load and run the model as fast as possible: no random initialisation, weights mapped.

    After the first answer, run the model again for each input line.
    """
    import torch
    from safetensors.torch import load_file

    from . import plain

    if order["source"].startswith("torchvision:"):
        import torchvision  # noqa: F401 - counted as import, not as build
    device = order.get("device", "cpu")
    torch.set_num_threads(order["threads"])
    imported_ms = now_ms()
    module = plain.structure(order)
    built_ms = now_ms()
    _assign(module, load_file(order["weights_path"], device=device))
    loaded_ms = now_ms()
    inputs = [value.to(device) for value in plain.inputs_of(order)]
    with torch.inference_mode():
        output = module(*inputs)
    say(
        checksum=plain.checksum(output),
        import_ms=imported_ms - STARTED_AT_MS,
        build_ms=built_ms - imported_ms,
        load_ms=loaded_ms - built_ms,
        compute_ms=now_ms() - loaded_ms,
    )
    _answer(module, inputs)


def _assign(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Replace a module's meta tensors by the file's tensors; tied names share one tensor."""
    from torch import nn

    parameters: dict[int, torch.Tensor] = {}
    for name, meta in _named_tensors(module):
        if name in tensors:
            parameters[id(meta)] = tensors[name]
    for owner in module.modules():
        for key, parameter in list(owner._parameters.items()):
            if parameter is not None:
                owner._parameters[key] = nn.Parameter(
                    parameters[id(parameter)], requires_grad=False
                )
        for key, buffer in list(owner._buffers.items()):
            if buffer is not None:
                owner._buffers[key] = parameters[id(buffer)]


def tensors(order: dict[str, Any]) -> None:
    """Print the sizes of a model's tensors; then, for each input line, allocate and copy them."""
    import torch

    from . import plain

    by_id = {id(tensor): tensor for _, tensor in _named_tensors(plain.structure(order))}
    sources = [torch.zeros(meta.shape, dtype=meta.dtype) for meta in by_id.values()]
    say(tensor_bytes=[source.nbytes for source in sources])
    for _ in sys.stdin:
        began_ms = now_ms()
        copies = [torch.empty_like(source).copy_(source) for source in sources]
        ended_ms = now_ms()
        del copies
        say(transfer_ms=ended_ms - began_ms)


VERBS = {"weights": write_weights, "ready": ready, "once": once, "tensors": tensors}


def main(verb: str, order: str) -> None:
    """Run a verb. Ctrl-C ends this process silently: the benchmark also gets it, and reports it."""
    try:
        VERBS[verb](json.loads(order))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main(*sys.argv[1:])
