"""``python -m tests.models [--only PART] [--rows FOLDER] [--out FILE] [--precision NAME]``.

With ``--device cuda:0`` the server and the plain modules compute on that GPU.

Each model prints a line: do its answers equal the plain module's? On a GPU, or in another
precision: do they differ by less than the limit?

Each model has a file in FOLDER, which is locked while its row is made. So an interrupted sweep
continues where it stopped, and several processes may share one sweep.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from pipeswitch.base.errors import PipeSwitchError
from pipeswitch.base.model_options import PRECISIONS
from pipeswitch.devices.cpu.packed import KERNELS
from pipeswitch.devices.torch_kernels import TorchKernels
from pipeswitch.programs.compiler.naming import named_inputs
from pipeswitch.programs.compiler.precision import MAX_ERROR
from pipeswitch.programs.graphs.bundle import read_bundle
from pipeswitch.programs.graphs.operators import OVERLOADS
from pipeswitch.programs.running.values import flatten_outputs
from pipeswitch.programs.spec import BUNDLE_FILE
from pipeswitch.testing import RunningServer, server

from . import factories
from .catalogue import OWN_SIDES, Entry, Inputs, catalogue
from .factories import SEED

LENGTHS: Final = (1, 7, 64, 512)
BATCH: Final = 3  # the second batch size, for models that accept it
THREADS: Final = 2
ROUNDING: Final = 1e-4  # maximum relative error of ``exact`` on a GPU
FAST_PATH: Final = "set_fastpath_enabled"
EXPERTS: Final = "set_experts_implementation"
FACTORY: Final = "package.module:function"
Dynamic = dict[str, dict[int, tuple[str, int, int]]]


def plainly(module: nn.Module, inputs: Inputs, device: str = "cpu") -> Any:
    """Return the output of the plain module, in host memory; a decoder does not return its cache.

    Args:
        device: where the module is.
    """
    if device != "cpu":
        moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)
        return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), plainly(module, moved))
    with torch.no_grad():
        if not isinstance(inputs, dict):
            return module(*inputs)
        has_cache = getattr(getattr(module, "config", None), "use_cache", False)
        return module(**inputs, **({"use_cache": False} if has_cache else {}))


def equal(answer: Any, expected: Any) -> bool:
    """Return True if all outputs have equal bits: NaN equals itself, but 0.0 differs from -0.0."""
    outputs, plain = list(answer.outputs.values()), list(flatten_outputs(expected).values())
    return len(outputs) == len(plain) and all(
        a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
        for a, b in zip(outputs, plain, strict=True)
    )


def error_of(answer: Any, expected: Any) -> float:
    """Return the largest difference of an output's numbers, relative to that output's largest."""
    worst = 0.0
    outputs, plain = answer.outputs.values(), flatten_outputs(expected).values()
    for ours, theirs in zip(outputs, plain, strict=True):
        if not theirs.is_floating_point() or not theirs.numel():
            continue
        is_real = theirs.isfinite()
        if bool((ours.isfinite() != is_real).any()):
            return math.inf
        scale = float(theirs[is_real].abs().max()) if is_real.any() else 0.0
        difference = (ours - theirs).abs()[is_real]
        worst = max(worst, float(difference.max()) / (scale or 1.0) if is_real.any() else 0.0)
    return worst


def open_dims(module: nn.Module, example: Inputs, *, has_sides: bool) -> Dynamic:
    """Return dynamic dimensions: lengths from 1 to 512; image sides and sound samples from half of
    the example's. Return none if arguments are nested or passed by name."""
    dims: Dynamic = {}
    if isinstance(example, dict) or not all(isinstance(value, torch.Tensor) for value in example):
        return dims
    for name, value in zip(named_inputs(module, example, None).names, example, strict=True):
        extents = value.shape
        if value.dim() in (2, 3) and (value.dtype is torch.int64 or value.dim() == 3):
            dims[name] = {1: (f"length_{name}", LENGTHS[0], LENGTHS[-1])}
        elif value.dim() == 2 and extents[1] > LENGTHS[-1]:
            dims[name] = {1: ("samples", extents[1] // 2, extents[1])}
        elif value.dim() == 4 and has_sides:
            dims[name] = {
                axis: (f"side{axis}", extents[axis] // 2, extents[axis]) for axis in (2, 3)
            }
    return dims


def resized(value: torch.Tensor, axis: int, extent: int) -> torch.Tensor:
    return torch.cat([value] * -(-extent // value.shape[axis]), axis).narrow(axis, 0, extent)


class Sweep:
    """Tester with one server, which registers each model, compares answers, and unregisters it."""

    def __init__(self, running: RunningServer, precision: str, device: str) -> None:
        self._running, self._client, self._device = running, running.client(), device
        self._precision, self._errors = precision, list[float]()

    def try_one(self, name: str, entry: Entry) -> dict[str, Any]:
        torch.manual_seed(SEED)
        began_s = time.monotonic()
        try:
            module, example = entry()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            return {"name": name, "outcome": "not made", "why": why, "took_s": 0.0}
        module.eval()  # docs/guide/serving.md compares answers with the module in this mode
        for parameter in module.parameters():
            parameter.requires_grad = False
        row: dict[str, Any] = {"name": name, "outcome": "refused"}
        row["parameters"] = sum(p.numel() for p in module.parameters())
        self._errors.clear()
        try:
            self._register(module, example, row)
            row["register_s"] = round(time.monotonic() - began_s, 1)
            if self._device != "cpu":
                module = copy.deepcopy(module).to(self._device)
            row["batches"] = self._ask(module, example, row["batch_max"])
            row["sizes"] = self._ask_sizes(module, example, row["dynamic"])
            answers = (*row["batches"].values(), *row["sizes"].values())
            row["outcome"] = "served" if all(answers) else "differs"
            row |= {"error": max(self._errors)} if self._errors else {}
        except PipeSwitchError as error:
            row["why"] = str(error).splitlines()[0][:400]
        except Exception as error:  # this error is not a refusal, so the model has failed
            row["outcome"] = "failed"
            row["why"] = f"{type(error).__name__}: {str(error)[:300]}"
        row["took_s"] = round(time.monotonic() - began_s, 1)
        self._forget()
        torch.backends.mha.set_fastpath_enabled(True)
        return row

    def _register(self, module: nn.Module, example: Inputs, row: dict[str, Any]) -> None:
        options: dict[str, Any] = {"example_inputs": example, "max_batch": 4}
        options["precision"] = self._precision
        source: Any = module
        row["dynamic"] = open_dims(module, example, has_sides=row["name"] not in OWN_SIDES)
        for _ in range(4):
            try:
                self._client.register("it", source, dynamic=row["dynamic"], **options)
                break
            except PipeSwitchError as error:
                if FAST_PATH in str(error) and "fast_path" not in row:
                    torch.backends.mha.set_fastpath_enabled(False)  # the refusal advises this
                    row["fast_path"] = False
                elif EXPERTS in str(error) and "experts" not in row:
                    row["experts"] = "batched_mm"
                    module.model.set_experts_implementation("batched_mm")
                elif FACTORY in str(error) and source is module:
                    row["dynamic"], row["graph"] = {}, str(error)[:300]
                    source = f"{factories.__name__}:{factories.factory_name(row['name'])}"
                    options["example_inputs"] = named_inputs(module, example, None).arguments
                elif row["dynamic"]:
                    row["dynamic"], row["fixed"] = {}, str(error)[:300]
                else:
                    raise
        shown = self._client.show("it")
        for axes in row["dynamic"].values():  # the server may have narrowed a range
            for axis, (dim_name, *_) in axes.items():
                low, high = shown["dims"].get(dim_name, (0, 0))
                axes[axis] = (dim_name, low, high)
        row |= {"mode": shown["mode"], "bytes": shown["bytes"], "batch_max": shown["batch"][1]}
        row["groups"] = shown["groups"]
        if self._precision != "exact":
            row |= {"precision": shown["precision"], "notes": shown["notes"]}
        folder = self._running.state_dir / "models" / shown["digest"]
        is_graph = shown["mode"] == "graph"
        nodes = read_bundle(folder / BUNDLE_FILE).graph.nodes if is_graph else ()
        names = {node.target for node in nodes}
        aten = (name.partition("aten.")[2] for name in names if name.startswith("aten."))
        row["operators"] = sorted(aten)

    def _ask(self, module: nn.Module, example: Inputs, most: int) -> dict[int, bool]:
        equal_by_batch = {}
        for batch in (1, BATCH) if most >= BATCH else (1,):
            inputs = tree_map_only(torch.Tensor, lambda t: torch.cat([t] * batch), example)  # noqa: B023
            answer = self._client.infer("it", inputs)
            equal_by_batch[batch] = self._is_right(answer, plainly(module, inputs, self._device))
        return equal_by_batch

    def _is_right(self, answer: Any, expected: Any) -> bool:
        if self._precision == "exact" and (self._device == "cpu" or equal(answer, expected)):
            return equal(answer, expected)
        self._errors.append(error_of(answer, expected))
        kernels = KERNELS if self._device == "cpu" else TorchKernels()
        limits = {"exact": ROUNDING, "fast": kernels.fast_error, **MAX_ERROR}
        return self._errors[-1] <= limits[self._precision]

    def _ask_sizes(self, module: nn.Module, example: Inputs, dynamic: Dynamic) -> dict[str, bool]:
        """Compare answers for each length, and for two sizes of images and sounds."""
        equal_by_size: dict[str, bool] = {}
        if not dynamic:
            return equal_by_size
        names = named_inputs(module, example, None).names
        for step in range(len(LENGTHS)):
            inputs, sizes = list(example), []
            for number, name in enumerate(names):
                for axis, (dim_name, low, high) in dynamic.get(name, {}).items():
                    is_length = dim_name.startswith("length")
                    length = min(max(LENGTHS[step], low), high)
                    extent = length if is_length else (low, low + (high - low) // 3)[step % 2]
                    inputs[number] = resized(inputs[number], axis, extent)
                    sizes.append(str(extent))
            if sizes and "x".join(sizes) not in equal_by_size:
                answer = self._client.infer("it", inputs)
                expected = plainly(module, tuple(inputs), self._device)
                equal_by_size["x".join(sizes)] = self._is_right(answer, expected)
        return equal_by_size

    def _forget(self) -> None:
        if any(row["name"] == "it" for row in self._client.models()):
            self._client.unregister("it")


@contextlib.contextmanager
def claimed(folder: Path, name: str) -> Iterator[Path | None]:
    """Yield the file for a row; None if the row exists or another process makes it."""
    path = folder / f"{name}.json"
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield path if not path.stat().st_size else None


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    operators = Counter(name for row in rows for name in row.get("operators", ()))
    listed = {f"{n}.{o}" for n, overloads in OVERLOADS.items() for o in overloads}
    return {
        "torch": torch.__version__,
        "models": len(rows),
        "outcomes": dict(Counter(row["outcome"] for row in rows)),
        "modes": dict(Counter(row["mode"] for row in rows if "mode" in row)),
        "operators_listed": len(listed),
        "operators_needed": len(operators),
        "operators_by_models": dict(operators.most_common()),
        "operators_of_no_model_here": sorted(listed - set(operators)),
        "table": [{k: v for k, v in row.items() if k != "operators"} for row in rows],
    }


def sweep(
    names: list[str], entries: Mapping[str, Entry], folder: Path, precision: str, device: str
) -> None:
    """Test the models whose rows are missing; print a line for each."""
    arguments = ("--threads", str(THREADS))
    root = str(Path(__file__).parents[2])  # the server imports tests.models.factories from here
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with server(arena="1GiB", host_store="2GiB", devices=(device,), args=arguments) as running:
        one = Sweep(running, precision, device.partition(":")[0])
        for number, name in enumerate(names, 1):
            with claimed(folder, name) as path:
                if path is None:
                    continue
                row = one.try_one(name, entries[name])
                path.write_text(json.dumps(row))
            sys.stdout.write(
                f"{number:3}/{len(names)} {row['outcome']:8} {name}  {row['took_s']} s  "
                f"{' '.join(row.get('sizes', ())) or row.get('fixed', '')} {row.get('why', '')}\n"
            )
            sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models whose name has one of A,B,C in it")
    parser.add_argument("--rows", type=Path, help="keep the rows there; those there stay")
    parser.add_argument("--out", type=Path, help="write the table there, as JSON")
    parser.add_argument("--precision", choices=PRECISIONS, default="exact")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    entries = catalogue()
    names = [name for name in entries if any(part in name for part in options.only.split(","))]
    with tempfile.TemporaryDirectory(prefix="pipeswitch-models-") as temporary:
        folder = options.rows or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        sweep(names, entries, folder, options.precision, options.device)
        texts = [(folder / f"{name}.json").read_text() for name in names]
    rows = [json.loads(text) for text in texts if text]  # empty: another process makes the row
    report = summary(rows)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in report["outcomes"].items())
    sys.stdout.write(
        f"models   {counts}; {report['operators_needed']} of {report['operators_listed']} "
        "operators are needed\n"
    )
    return 1 if any(row["outcome"] not in ("served", "refused") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
