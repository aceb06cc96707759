"""Outputs that equal the plain model's, during switches, evictions and preempted training."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torchvision
from process_tools import Checked, checked_server, eager, is_bit_equal, mlp, start_endless_job
from torch import nn

SEED = 20261121

# name, and side of the square input in pixels; ViT accepts only 224
FAMILIES = [
    ("resnet18", 64),
    ("inception_v3", 96),
    ("densenet121", 64),
    ("vit_b_32", 224),
    ("swin_t", 64),
    ("convnext_tiny", 64),
    ("mobilenet_v3_small", 64),
    ("efficientnet_b0", 64),
    ("regnet_y_400mf", 64),
    ("shufflenet_v2_x0_5", 64),
]
FEW = [family for family in FAMILIES if family[0] in ("resnet18", "vit_b_32", "convnext_tiny")]
ARENA = "400MiB"  # ViT's 337 MiB and one medium model; all models need twice as much


@pytest.fixture(scope="module")
def running() -> Iterator[Checked]:
    with checked_server(arena=ARENA, host_store="2GiB") as checked:
        yield checked


def plain(name: str, seed: int) -> nn.Module:
    """Return the eager model with the weights of ``random:SEED``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inception warns of a slow initialisation
        torch.manual_seed(seed)
        return torchvision.models.get_model(name, weights=None).eval()


@pytest.mark.timeout(900)  # building ten models takes a minute, or several on a busy machine
@pytest.mark.parametrize(
    "families", [FEW, pytest.param(FAMILIES, marks=pytest.mark.slow)], ids=["three", "ten"]
)
def test_families_answer_bit_equal_while_they_evict_each_other_and_training_runs(
    running: Checked, tmp_path: Path, families: list[tuple[str, int]]
) -> None:
    client = running.client
    requests: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for number, (family, side) in enumerate(families):
        name = f"{family}-of-{len(families)}"
        row = client.register(
            name,
            f"torchvision:{family}",
            weights=f"random:{number}",
            inputs={"x": ((1, 3, side, side), "float32")},
        )
        assert row["mode"] == "graph"
        module = plain(family, number)
        for batch in (1, 2, 3):
            generator = torch.Generator().manual_seed(len(requests))
            x = torch.randn(batch, 3, side, side, generator=generator)
            requests.append((name, x, eager(module, x)))
    random.Random(SEED).shuffle(requests)
    start_endless_job(running, tmp_path)
    before = running.stats()

    futures = [(name, client.submit(name, x), y) for name, x, y in requests]
    wrong = [name for name, future, y in futures if not is_bit_equal(future.result(60)["y"], y)]
    assert wrong == []
    # Send them again, one at a time, so that the job trains between two requests.
    wrong = [name for name, x, y in requests if not is_bit_equal(client.infer(name, x)["y"], y)]
    assert wrong == []

    after = running.stats()
    assert after["evictions"] > before["evictions"]  # not all models fit
    assert after["preemptions"] > before["preemptions"]
    assert all(job["suspensions"] > 0 for job in client.jobs())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_travels_both_ways_bit_equal(running: Checked, dtype: torch.dtype) -> None:
    module = mlp(32, 3, seed=4).to(dtype)
    name = str(dtype).removeprefix("torch.")
    running.client.register(name, module, example_inputs=(torch.zeros(2, 32, dtype=dtype),))
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(5)).to(dtype)
    y = running.client.infer(name, x)["y"]
    assert y.dtype == dtype
    assert is_bit_equal(y, eager(module, x))
