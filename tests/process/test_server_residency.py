"""Resident models are not copied again, and a resident job loses no step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import Checked, checked_server, mlp, start_endless_job, until

WIDTH = 512
DEPTH = 5  # a little more than 5 MiB of weights, in regions of 6 MiB


@pytest.fixture(scope="module")
def running() -> Iterator[Checked]:
    """Start a server with room for three of the four models, or for two and a job's slice."""
    with checked_server(arena="22MiB") as checked:
        for seed, name in enumerate("abcd"):
            checked.client.register(name, mlp(WIDTH, DEPTH, seed), example_inputs=value(0.0))
        yield checked


@pytest.fixture(autouse=True)
def _settled(running: Checked) -> Iterator[None]:
    yield
    running.settle()


def still(checked: Checked) -> dict[str, Any]:
    """Wait until no copy is in flight, which may be after the answer; return the counters."""
    until(
        lambda: all(m["residency"] != "transmitting" for m in checked.client.models()),
        "no model is on its way",
    )
    return checked.stats()


def value(number: float) -> torch.Tensor:
    return torch.full((1, WIDTH), number)


def test_a_cold_request_transmits_the_model_once_and_the_bill_says_so(running: Checked) -> None:
    for name in "abc":
        running.client.infer(name, value(0.0))
    before = still(running)
    result = running.client.infer("d", value(0.0))
    after = still(running)
    assert not result.timing.resident
    assert result.timing.total_ms > 0
    size = running.client.show("d")["bytes"]
    assert after["transmitted_bytes"] - before["transmitted_bytes"] == size
    assert after["transmissions"] - before["transmissions"] == 1
    assert after["evictions"] - before["evictions"] == 1  # one of the three was evicted
    assert sum(m["residency"] == "resident" for m in running.client.models()) == 3


def test_training_that_is_suspended_in_place_loses_no_step(
    running: Checked, tmp_path: Path
) -> None:
    running.client.infer("a", value(0.0))
    task = start_endless_job(running, tmp_path)
    worker = task.status()["worker"]
    before = still(running)
    for number in range(25):
        step = task.status()["step"]
        result = running.client.infer("a", value(float(number)))
        assert result.timing.worker != worker
        assert task.status()["step"] >= step
    row = until(
        lambda: (lambda r: r if r["suspensions"] >= 10 else None)(task.status()), "it was suspended"
    )
    assert (row["restarts"], row["evictions"], row["steps_recomputed"]) == (0, 0, 0)
    assert row["worker"] == worker  # always the same process
    assert row["lease_bytes"] > 0
    after = still(running)
    assert after["preemptions"] - before["preemptions"] >= row["suspensions"]
    assert after["transmitted_bytes"] == before["transmitted_bytes"]
