"""Requests that a real server computes in one batch: their bits, errors, a worker's death."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from process_tools import Checked, checked_server, eager, is_bit_equal, mlp, until
from torch import nn

from pipeswitch.base.errors import PipeSwitchError, RegistrationRefused

LONG_MS = 20_000.0  # how long an incomplete batch waits for further requests
WORDS, WIDTH = 97, 1024


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.words(ids)) * 2.0 - 1.0


class Centred(nn.Module):
    """Module whose answer to a request depends on the other requests of its batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(dim=0)


@pytest.fixture(scope="module")
def running() -> Iterator[Checked]:
    with checked_server(arena="64MiB", host_store="128MiB") as checked:
        yield checked


def wait_until_pinned(running: Checked, *names: str) -> None:
    """Wait until the models are on the device, because only then requests wait for a batch."""
    for name in names:
        until(lambda name=name: running.client.show(name)["residency"] == "pinned", name)


@pytest.fixture(scope="module")
def table(running: Checked) -> Table:
    module = Table().eval()
    example = (torch.zeros(1, 5, dtype=torch.int64),)
    for name, batch in (("table", 64), ("eight", 8)):
        running.client.register(
            name, module, example_inputs=example, batch=batch, batch_delay_ms=LONG_MS, pin=True
        )
    wait_until_pinned(running, "table", "eight")
    return module


def test_64_waiting_requests_are_one_run_and_each_reads_its_own_rows(
    running: Checked, table: Table
) -> None:
    assert running.client.show("table")["batching"] == {
        "limit": 64,
        "delay_ms": LONG_MS,
        "is_exact": True,
    }
    runs = running.count("runs")
    inputs = [torch.randint(WORDS, (1, 5)) for _ in range(64)]
    answers = [future.result(30) for future in [running.client.submit("table", x) for x in inputs]]
    for x, answer in zip(inputs, answers, strict=True):
        assert is_bit_equal(answer["y"], eager(table, x))
        assert (answer.timing.batch, answer.timing.batched) == (64, 64)
    assert running.count("runs") == runs + 1


def test_one_with_a_bad_index_fails_alone(running: Checked, table: Table) -> None:
    inputs = [torch.randint(WORDS, (1, 5)) for _ in range(8)]
    inputs[3] = torch.full((1, 5), WORDS)
    futures = [running.client.submit("eight", x) for x in inputs]
    with pytest.raises(PipeSwitchError):
        futures.pop(3).result(30)
    del inputs[3]
    for x, future in zip(inputs, futures, strict=True):
        answer = future.result(30)
        assert is_bit_equal(answer["y"], eager(table, x))
        assert answer.timing.batched == 1


def test_models_whose_requests_cannot_be_joined_are_refused_with_what_to_type(
    running: Checked,
) -> None:
    example = (torch.zeros(1, 4),)
    with pytest.raises(RegistrationRefused, match="depends on the other requests of its batch"):
        running.client.register("centred", Centred(), example_inputs=example, batch=4)
    with pytest.raises(RegistrationRefused, match="it is fixed at 1") as fixed:
        running.client.register("fixed", Centred(), example_inputs=example, max_batch=1, batch=4)
    assert "--max-batch 4" in fixed.value.hint
    with pytest.raises(RegistrationRefused, match="8 is more than the model takes, 1 to 4") as few:
        running.client.register("few", mlp(4, 1, 0), example_inputs=example, max_batch=4, batch=8)
    assert "--batch 4, or --max-batch 8" in few.value.hint
