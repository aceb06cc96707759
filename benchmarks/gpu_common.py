"""Shared parts of the stages of ``gpu.py``: printing of findings, the required GPU, the models."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .models import MIB, BenchModel

ROOT = Path(__file__).resolve().parent.parent

MARK = "RESULT "
NEEDS_A_GPU = 3  # exit status of a stage without a GPU
BINDINGS = "PIPESWITCH_CUDA_BINDINGS"  # names the package of CUDA bindings; tests use a stand-in
DEV = "PIPESWITCH_GPU_DEV"  # names a folder that replaces /dev in tests
RUNGS = "PIPESWITCH_GPU_RUNGS"  # mechanisms that the self-test chose, which later stages reuse


def put(**values: Any) -> None:
    """Print one finding at once, so that the report has it even if the stage is killed later."""
    sys.stdout.write(MARK + json.dumps(values, default=str) + "\n")
    sys.stdout.flush()


def package() -> str:
    """Return the name of the Python package with the CUDA bindings in use."""
    return os.environ.get(BINDINGS, "cuda.bindings")


def is_fake() -> bool:
    """Return True for the tests' stand-in bindings: models are small, and times are meaningless."""
    return package() != "cuda.bindings"


def require_gpu() -> dict[str, Any]:
    """Return the device's facts; exit with a message if there is no device."""
    from pipeswitch.base.errors import ConfigError
    from pipeswitch.devices.cuda.examine import examine

    try:
        return examine(package(), 0)["device"]
    except ConfigError as error:
        sys.exit(end_without(error.message, str(error.data.get("kind", ""))))


def end_without(why: str, kind: str) -> int:
    """Return the exit status of a stage without a usable GPU, which differs if a GPU has a fault.

    Args:
        kind: kind of ``NoCudaDevice``; empty for any other fault.
    """
    nodes = device_nodes()
    if kind in ("no driver", "no device") and not nodes:
        put(needs=f"needs a GPU: {why}")
        return NEEDS_A_GPU
    put(device_fault=why, kind=kind, device_nodes=nodes)
    return 1


def device_nodes() -> list[str]:
    """Return the names of the GPUs' device nodes (also WSL's), whatever the driver reports."""
    folder = Path(os.environ.get(DEV, "/dev"))
    return sorted(path.name for name in ("nvidia*", "dxg") for path in folder.glob(name))


def rung_environment() -> dict[str, str]:
    """Return settings for the mechanisms that the self-test chose, so that servers run no test."""
    rungs = json.loads(os.environ.get(RUNGS, "{}"))
    return {f"PIPESWITCH_DEVICE__{key.upper()}": value for key, value in rungs.items()}


@contextlib.contextmanager
def served(arena: str, store: str = "512MiB", **environment: str) -> Iterator[tuple[Any, Any]]:
    """Yield a server on the GPU and its client; if the block fails, print the end of the log."""
    from pipeswitch.testing import server

    with (
        server(
            arena=arena,
            host_store=store,
            devices=("cuda:0",),
            environment=rung_environment() | environment,
        ) as running,
        running.client() as client,
    ):
        try:
            yield running, client
        except Exception:
            put(server_log=running.log()[-6000:])
            raise


def now_ms() -> float:
    return time.monotonic() * 1000.0


def percentiles(values: list[float]) -> dict[str, float]:
    """Return p50, p90, extremes and count of times in milliseconds; from 100 values on also p99,
    which is the maximum of fewer."""
    ordered = sorted(values)
    ranks = {"p50": 0.5, "p90": 0.9} | ({"p99": 0.99} if len(ordered) >= 100 else {})
    found = {name: ordered[int(len(ordered) * rank)] for name, rank in ranks.items()}
    found |= {"max": ordered[-1], "min": ordered[0]}
    return {name: round(value, 3) for name, value in found.items()} | {"n": len(ordered)}


@dataclass(frozen=True)
class GpuModel(BenchModel):
    """A model with the target of its cold switch."""

    target: float = 0.0  # limit of a cold switch's time / ready-eager's time, at batch 8


TEXTS = dict.fromkeys(("input_ids", "attention_mask"), ((8, 128), "int64"))


def _images(side: int) -> dict[str, tuple[tuple[int, ...], str]]:
    return {"x": ((8, 3, side, side), "float32")}


def models() -> dict[str, GpuModel]:
    """Return the models by name; without transformers, BERT-base is an encoder of its shape."""
    import importlib.util

    if is_fake():
        tiny = GpuModel("tiny", "benchmarks.factories:tiny", 0, {"x": ((8, 64), "float32")})
        return {tiny.name: tiny}
    has_transformers = importlib.util.find_spec("transformers") is not None
    bert = GpuModel(
        "bert-base",
        "hf:bert-base-uncased" if has_transformers else "benchmarks.factories:bert_base_like",
        440 * MIB,
        TEXTS if has_transformers else {"x": ((8, 128, 768), "float32")},
        target=1.7,
    )
    all_models = (
        GpuModel("resnet50", "torchvision:resnet50", 110 * MIB, _images(224)),
        GpuModel("resnet152", "torchvision:resnet152", 240 * MIB, _images(224), target=0.80),
        GpuModel("inception_v3", "torchvision:inception_v3", 110 * MIB, _images(299), target=0.80),
        bert,
        GpuModel("vit_4_blocks", "benchmarks.factories:vit_4_blocks", 210 * MIB, _images(224)),
        GpuModel("vit_l_16", "torchvision:vit_l_16", 1240 * MIB, _images(224), target=1.7),
    )
    return {model.name: model for model in all_models}
