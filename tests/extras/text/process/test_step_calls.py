"""Calls of torch in a decode step of a language model, in each precision."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeswitch.devices.cpu.packed import KERNELS, missing_half, missing_int8
from pipeswitch.programs.compiler.program import build
from pipeswitch.programs.graphs.cached_attention import DecodeRows
from pipeswitch.programs.spec import BuildSpec
from tests.models import loading

transformers = pytest.importorskip("transformers")

LAYERS, USED, ROWS = 2, 5, 16


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(call)] += 1
        return call(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    sizes = {"n_embd": 64, "n_layer": LAYERS, "n_head": 2, "n_positions": 32, "vocab_size": 64}
    config = transformers.GPT2Config(bos_token_id=None, eos_token_id=None, **sizes)
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    return path


@pytest.mark.parametrize(("form", "most"), [("exact", 153), ("bf16", 131), ("int8", 188)])
@pytest.mark.skipif(bool(missing_half() or missing_int8()), reason=missing_half() or missing_int8())
def test_a_step_makes_few_calls_and_copies_no_cache(
    form: str, most: int, folder: Path, tmp_path: Path
) -> None:
    """``most`` may only fall: on a processor that has just read all weights, a call takes 5 µs."""
    spec = BuildSpec(
        name="m", source=f"hf:{folder}", weights="pretrained", generate=True, precision=form
    )
    manifest = build(spec, tmp_path, lambda *progress: None)
    bound = loading.bound(tmp_path, manifest, KERNELS)
    cache = torch.randn(2, ROWS, manifest.inputs[-1].shape[-1])
    cache[:, USED:] = float("nan")
    numbers = torch.tensor([[3], [7]]), torch.ones(2, dtype=torch.int64), torch.tensor([USED] * 2)
    with torch.no_grad(), DecodeRows([USED] * 2), Calls() as calls:
        environment = bound.start([*numbers, cache])
        for group in range(len(manifest.groups)):
            bound.run_group(group, environment)
    assert bound.finish(environment)[0].isfinite().all()
    assert cache[:, USED].isfinite().all()
    assert cache[:, USED + 1 :].isnan().all()
    assert calls.counts["aten.cat.default"] <= 2  # the mask and the new rows
    assert sum(calls.counts.values()) <= most, calls.counts
