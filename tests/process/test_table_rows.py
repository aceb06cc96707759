"""Tables that requests read by rows: the rows are copied first, and the tables last (ADR 67)."""

from __future__ import annotations

from collections.abc import Iterator

import process_tools as tools
import pytest
import torch

from pipeswitch.base.errors import InvalidInput, TaskFailed

WIDE = 512
ROWS = 6144  # 12 MiB
X = torch.ones(1, WIDE)
A, B = torch.tensor([[3, 1, 4, 1, ROWS - 1]]), torch.tensor([[9, 0, 77, 5, ROWS - 2]])
ASKED = [A, B, A]


class Bag(torch.nn.Module):
    """Module that reads rows of a table behind its first weight, and perhaps all of it at last."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scale = torch.nn.Parameter(torch.rand(700))  # so the table begins within a unit
        self.table = torch.nn.Embedding(ROWS, WIDE)
        self.body, self.is_tied = tools.mlp(WIDE, 10, 5), name == "tied"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        factor = self.scale.sum()
        hidden: torch.Tensor = self.body(self.table(ids) * factor)
        return torch.nn.functional.linear(hidden, self.table.weight) if self.is_tied else hidden


@pytest.fixture(scope="module", params=["cpu", "cuda:0"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tools.Checked]:
    """Start a server with room for one of its models; on cpu the table's copy takes 120 ms."""
    environment = tools.fake_gpu(tmp_path_factory.mktemp("gpu")) | tools.ENVIRONMENT
    options = {"devices": (request.param,), "environment": environment, "arena": "40MiB"}
    with tools.checked_server(args=("--link-gbps", "0.1"), **options) as checked:
        for name in ("bag", "tied"):
            checked.client.register(name, Bag(name).eval(), example_inputs=(A,))
        checked.client.register("plain", tools.mlp(WIDE, 20, 3), example_inputs=(X,))
        yield checked


@pytest.mark.parametrize("running", ["cpu"], indirect=True)
def test_the_answer_does_not_wait_for_the_table(running: tools.Checked) -> None:
    running.client.infer("plain", X)  # "bag" is cold then
    running.client.infer("bag", A)
    assert running.client.show("bag")["residency"] == "transmitting"


@pytest.mark.parametrize("name", ["bag", "tied"])
def test_the_next_requests_read_other_rows(running: tools.Checked, name: str) -> None:
    expected = [tools.eager(Bag(name).eval(), one) for one in ASKED]
    for first in range(3):
        running.client.infer("plain", X)
        if first == 2:  # without a row that exists
            with pytest.raises((TaskFailed, InvalidInput)):
                running.client.infer(name, torch.tensor([[1, 2, 3, 4, ROWS]]))
        answers = [running.client.submit(name, one) for one in ASKED[first:]]
        for answer, value in zip(answers, expected[first:], strict=True):
            assert tools.is_bit_equal(answer.result(60).value, value)


@pytest.mark.parametrize("name", ["bag", "tied"])
@pytest.mark.parametrize("victim", ["worker", "daemon"])
def test_a_death_costs_no_answer(running: tools.Checked, name: str, victim: str) -> None:
    running.client.infer("plain", X)
    future, workers = running.client.submit(name, A), [*running.worker_pids().values()]
    for pid in workers if victim == "worker" else [running.daemon_pid()]:
        tools.kill(pid)
    assert tools.is_bit_equal(future.result(60).value, tools.eager(Bag(name).eval(), A))
    running.wait_until_whole()
