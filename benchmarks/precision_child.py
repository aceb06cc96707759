"""Process of ``bench precision`` that runs one model in each precision and in plain PyTorch."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import nn

from pipeswitch.base.errors import PipeSwitchError
from pipeswitch.devices.cpu.packed import KERNELS
from pipeswitch.programs.compiler.program import build
from pipeswitch.programs.compiler.verify import load_image
from pipeswitch.programs.graphs.bundle import read_bundle
from pipeswitch.programs.running.executor import GraphProgram
from pipeswitch.programs.running.tensor_views import tensor_over
from pipeswitch.programs.running.values import flatten_outputs
from pipeswitch.programs.spec import BuildSpec, weights_file

from . import plain
from .trials import now_ms, say

COPIES: Final = 5  # how often the weights are copied to measure copy_ms, the fastest copy
Runner = Callable[[Sequence[torch.Tensor]], Any]


def serve(order: Mapping[str, Any]) -> None:
    """Build the model for each arm; then, for each input line, run the arm that it names."""
    torch.set_num_threads(order["threads"])
    network = plain.load(dict(order)).module.eval()
    runners: dict[str, Runner] = {"eager": lambda inputs: network(*inputs)}
    facts: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="pipeswitch-bench-") as folder:
        for arm in order["arms"]:
            try:
                if arm.startswith("torch.compile"):
                    runners[arm] = _compiled(network, arm)
                    runners[arm](_inputs(order, 1))
                else:
                    runners[arm], facts[arm] = _served(dict(order), arm, Path(folder) / arm)
            except (PipeSwitchError, RuntimeError) as error:
                runners.pop(arm, None)
                skipped[arm] = f"{type(error).__name__}: {str(error)[:200]}"
    say(skipped=skipped, facts=facts)
    with torch.inference_mode():
        correct: dict[int, torch.Tensor] = {}  # eager's output, by batch
        for line in sys.stdin:
            request = json.loads(line)
            arm, batch = request["arm"], request["batch"]
            inputs = _inputs(order, batch)
            if batch not in correct:
                correct[batch] = _first(network(*inputs))
            _answer(runners[arm], inputs, correct[batch])


def _answer(runner: Runner, inputs: Sequence[torch.Tensor], correct: torch.Tensor) -> None:
    """Run an arm once; print its time and its error."""
    began_ms, began_s = now_ms(), time.thread_time()
    output = runner(inputs)
    processor_ms, total_ms = 1e3 * (time.thread_time() - began_s), now_ms() - began_ms
    error = float((_first(output) - correct).abs().max()) / (float(correct.abs().max()) or 1.0)
    say(processor_ms=processor_ms, total_ms=total_ms, error=error)


def _first(output: Any) -> torch.Tensor:
    values = output if isinstance(output, list) else list(flatten_outputs(output).values())
    first: torch.Tensor = values[0]
    return first.float()


def _inputs(order: Mapping[str, Any], batch: int) -> list[torch.Tensor]:
    torch.manual_seed(order["seed"])
    return [
        torch.randint(0, 1000, (batch, *shape[1:]))
        if dtype == "int64"
        else torch.randn(batch, *shape[1:])
        for shape, dtype in order["inputs"].values()
    ]


def _compiled(network: nn.Module, arm: str) -> Runner:
    options: dict[str, Any] = {"freezing": True} if "freezing" in arm else {}
    compiled = torch.compile(network, dynamic=False, options=options)

    def run(inputs: Sequence[torch.Tensor]) -> Any:
        with torch.no_grad():  # torch.compile freezes only graphs without gradients
            return compiled(*inputs)

    return run


def _served(order: dict[str, Any], precision: str, folder: Path) -> tuple[Runner, Any]:
    """Build the model in one precision, like a registration; return its runner, bytes and times."""
    spec: BuildSpec = msgspec.structs.replace(plain.build_spec(order), precision=precision)
    manifest = build(spec, folder, lambda stage, share: None)
    notes = [note for note in manifest.extra.get("notes", ()) if "precision" in note]
    if manifest.mode != "graph":
        raise RuntimeError("it is served as a module")
    path = folder / weights_file(manifest)
    is_derived = manifest.precision is not None
    graph = read_bundle(path, is_derived=is_derived).graph
    image = load_image(path, manifest)
    program = GraphProgram(manifest, graph, "cpu", KERNELS if is_derived else None)
    bound = program.bind(lambda one: tensor_over(image.untyped_storage(), one, 0))
    copies, target = [], torch.empty_like(image)
    for _ in range(COPIES):
        began_s = time.thread_time()
        target.copy_(image)
        copies.append(1e3 * (time.thread_time() - began_s))
    facts = {"bytes": manifest.total_bytes, "copy_ms": min(copies), "notes": notes}

    def run(inputs: Sequence[torch.Tensor], image: torch.Tensor = image) -> Any:
        return bound.run([*inputs], lambda index: None)  # the unused argument keeps ``image`` alive

    return run, facts


if __name__ == "__main__":
    {"serve": serve}[sys.argv[1]](json.loads(sys.argv[2]))
