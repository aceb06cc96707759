"""A model three times as large as the arena: its groups are copied in turn, despite deaths."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import process_tools as tools
import pytest
import torch

from pipeswitch.base.errors import InvalidInput, OutOfDeviceMemory

WIDE = 1024
DEPTH = 30  # 120 MiB
ARENA = "42MiB"  # 40 MiB and the fences
SLOW_LINK = ("--link-gbps", "0.2")  # copying all weights takes more than half a second
X = torch.linspace(-1, 1, WIDE).reshape(1, WIDE)


class Tied(torch.nn.Module):
    """Module whose first and last layers read one table, and which uses one view early and late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = torch.nn.Embedding(WIDE, WIDE)
        self.body = tools.mlp(WIDE, 25, 6)
        self.late = torch.nn.Parameter(torch.randn(WIDE, WIDE) / 32)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        turned = self.late.t()
        hidden = self.body(self.table(rows) @ turned)
        return torch.nn.functional.linear(hidden @ turned, self.table.weight)


@pytest.fixture(scope="module")
def running() -> Iterator[tools.Checked]:
    with tools.checked_server(
        arena=ARENA, environment=tools.ENVIRONMENT, args=SLOW_LINK
    ) as checked:
        checked.client.register("large", tools.mlp(WIDE, DEPTH, 0), example_inputs=(X,))
        checked.client.register("small", tools.mlp(WIDE, 2, 1), example_inputs=(X,))
        yield checked


@pytest.fixture(autouse=True)
def _settled(running: tools.Checked) -> Iterator[None]:
    yield
    running.settle()


@pytest.fixture(scope="module")
def large() -> torch.Tensor:
    return tools.eager(tools.mlp(WIDE, DEPTH, 0), X)


def test_it_answers_what_the_plain_model_does_pass_after_pass(
    running: tools.Checked, large: torch.Tensor
) -> None:
    first = running.client.infer("large", X)
    assert tools.is_bit_equal(first["y"], large)
    size = running.client.show("large")["bytes"]
    assert first.timing.streamed == size
    for _ in range(5):
        result = running.client.infer("large", X)
        assert tools.is_bit_equal(result["y"], large)
        assert result.timing.resident_bytes + result.timing.streamed == size
    futures = [running.client.submit("large", X) for _ in range(4)]
    assert all(tools.is_bit_equal(future.result(60)["y"], large) for future in futures)


def test_weights_that_are_read_again_at_the_end_stay(running: tools.Checked) -> None:
    rows = torch.tensor([3, 1, 4])
    expected = tools.eager(Tied().eval(), rows)
    row = running.client.register("tied", Tied().eval(), example_inputs=(rows,))
    assert any(note.startswith("streams: ") for note in row["notes"])
    for _ in range(3):
        assert tools.is_bit_equal(running.client.infer("tied", rows).value, expected)
    running.client.unregister("tied")


def test_a_small_one_keeps_its_place_beside_it(running: tools.Checked, large: torch.Tensor) -> None:
    small = tools.eager(tools.mlp(WIDE, 2, 1), X)
    for number in range(5):
        assert tools.is_bit_equal(running.client.infer("large", X)["y"], large)
        result = running.client.infer("small", X)
        assert tools.is_bit_equal(result["y"], small)
        assert result.timing.resident or number < 2


def test_a_pass_lets_a_small_one_in_between_two_groups(
    running: tools.Checked, large: torch.Tensor
) -> None:
    """Send a small request while the large one runs, up to ten times: the moment is random."""
    small = tools.eager(tools.mlp(WIDE, 2, 1), X)
    order: list[str] = []
    for _ in range(10):
        running.client.infer("small", X)
        order.clear()
        future = running.client.submit("large", X)
        future.add_done_callback(lambda _: order.append("large"))
        tools.until(lambda: running.row("large")["state"] == "active", "it computes")
        assert tools.is_bit_equal(running.client.infer("small", X)["y"], small)
        order.append("small")
        assert tools.is_bit_equal(future.result(60)["y"], large)
        if order[0] == "small":
            return
    raise AssertionError("the small one waits for the whole pass")


def test_a_job_that_trains_beside_it_loses_no_step(
    running: tools.Checked, large: torch.Tensor, tmp_path: Path
) -> None:
    task = tools.start_endless_job(running, tmp_path)
    for _ in range(5):
        assert tools.is_bit_equal(running.client.infer("large", X)["y"], large)
    row = tools.until(
        lambda: (lambda r: r if r["suspensions"] else None)(task.status()), "suspended"
    )
    assert (row["restarts"], row["evictions"], row["steps_recomputed"]) == (0, 0, 0)


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.2, 0.4])
def test_a_worker_killed_in_the_middle_of_a_pass_costs_no_answer(
    running: tools.Checked, large: torch.Tensor, delay_s: float
) -> None:
    future = running.client.submit("large", X)
    pid = tools.until(lambda: running.row("large")["pid"], "a worker has it")
    threading.Event().wait(delay_s)  # a random moment of the run, not a condition
    tools.kill(pid)
    assert tools.is_bit_equal(future.result(60)["y"], large)
    running.wait_until_whole()


def test_a_daemon_killed_in_the_middle_of_a_pass_costs_no_answer(
    running: tools.Checked, large: torch.Tensor
) -> None:
    future = running.client.submit("large", X)
    tools.until(lambda: running.row("large")["state"] == "active", "it computes")
    tools.kill(running.daemon_pid())
    assert tools.is_bit_equal(future.result(60)["y"], large)
    running.wait_until_whole()


def test_what_it_cannot_do_is_said(running: tools.Checked, large: torch.Tensor) -> None:
    with pytest.raises(OutOfDeviceMemory):
        running.client.load("large")
    with pytest.raises(OutOfDeviceMemory):
        running.client.profile("large")
    with pytest.raises(InvalidInput):
        running.client.infer("large", torch.zeros(1, WIDE + 1))
    wide = torch.nn.Linear(2816, 2816, bias=False)  # 30 MiB in one group
    module = torch.nn.Sequential(wide, torch.nn.Linear(2816, 2816, bias=False))
    with pytest.raises(OutOfDeviceMemory, match=r"the largest has 30\.2 MiB"):
        running.client.register("lump", module, example_inputs=(torch.zeros(1, 2816),))
    assert tools.is_bit_equal(running.client.infer("large", X)["y"], large)
