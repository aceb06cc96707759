"""A server with its owner's policy, and deadlines that cannot be met."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from process_tools import Checked, checked_server, eager, is_bit_equal, mlp, until

from pipeswitch.base.errors import DeadlineExceeded
from pipeswitch.cli.common import EXIT_INTERRUPTED
from pipeswitch.gateway.serving.oip import InferRequest
from pipeswitch.gateway.serving.upstream import Upstream
from pipeswitch.wire.frames import WireTensor

WIDTH = 512

OF_MINE = """
from pipeswitch.scheduler.policies import Eviction, Order, Policy

class Mine(Order):
    left = 3

    def rank(self, head, view):
        self.left -= 1
        return (head.arrived_at_ms / max(0, self.left),)  # a bug, soon

def make(*, max_wait_ms):
    return Policy("mine", Mine(), Eviction())
"""

HANGS = """
import os, pathlib
from pipeswitch.scheduler.policies import Eviction, Order, Policy

class Hangs(Order):
    def rank(self, head, view):
        while True:
            try:
                while True:
                    pathlib.Path(os.environ["REACHED"]).touch()
            except BaseException:
                pass

def make(*, max_wait_ms):
    return Policy("hangs", Hangs(), Eviction())
"""
SIMULATE = """
import sys
from pipeswitch.cli import main
from pipeswitch.extras.lab import simulate
simulate.HANGS_AFTER_S = float(sys.argv.pop(1))
main.main()
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checked]:
    folder: Path = tmp_path_factory.mktemp("policy")
    (folder / "of_mine.py").write_text(OF_MINE)
    environment = {
        "PYTHONPATH": str(folder),
        "PIPESWITCH_SCHEDULER__ADMISSION": "deadline",
        "PIPESWITCH_TENANTS__MODEST": "100",
    }
    with checked_server(args=("--policy", "of_mine:make"), environment=environment) as checked:
        yield checked


def test_a_policy_that_fails_costs_one_warning_and_no_request(running: Checked) -> None:
    client, module = running.client, mlp(WIDTH, 2, seed=1)
    assert client.stats()["policy"] == "mine"
    client.register("m", module, example_inputs=(torch.zeros(1, WIDTH),))
    example = torch.ones(1, WIDTH)
    for _ in range(5):
        assert is_bit_equal(client.infer("m", example)["y"], eager(module, example))
    assert client.stats()["policy"] == "priority"
    log = running.running.log()
    assert log.count('policy "mine" failed and is replaced by "priority"') == 1
    assert "ZeroDivisionError" in log


def test_a_deadline_that_cannot_be_met_is_refused_with_the_prediction(running: Checked) -> None:
    client = running.client
    client.register("slow", mlp(2048, 8, seed=2), example_inputs=(torch.zeros(1, 2048),))
    example = torch.ones(1, 2048)
    for _ in range(3):
        client.infer("slow", example)
    with pytest.raises(DeadlineExceeded) as caught:
        client.infer("slow", example, deadline_ms=0.1)
    assert caught.value.data["predicted_ms"] > 0.1


@pytest.mark.parametrize(("limit_s", "status"), [(1, os.EX_SOFTWARE), (999, EXIT_INTERRUPTED)])
def test_a_policy_that_hangs_a_simulation_is_named_and_may_be_interrupted(
    limit_s: int, status: int, tmp_path: Path
) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    reached = tmp_path / "reached"
    words = [str(limit_s), "simulate", "poisson:40", "--policy", "hangs:make"]
    process = subprocess.Popen(
        [sys.executable, "-c", SIMULATE, *words],
        text=True,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "REACHED": str(reached)},
    )
    until(reached.exists, "it hangs", 60)
    if status == EXIT_INTERRUPTED:
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=250)
    assert process.returncode == status
    named = 'Error: policy "hangs" has not returned from rank, for 1 s now' in errors
    assert named == (status == os.EX_SOFTWARE), errors


def test_a_tenant_has_its_turns_by_weight_between_a_greedy_ones_requests(running: Checked) -> None:
    client = running.client
    client.register("long", Long(), example_inputs=(torch.zeros(1, WIDTH),))
    for name in ("mine", "theirs"):
        client.register(name, mlp(WIDTH, 2, seed=3), example_inputs=(torch.zeros(1, WIDTH),))
        client.infer(name, torch.zeros(1, WIDTH))
    order = asyncio.run(_order_of(client.address))
    assert order.count("greedy") == 8 * order.count("modest") == 64
    assert "modest" not in order[12:]
    assert client.stats()["tenant_s"].keys() == {"(owner)", "greedy", "modest"}
    tenants = {row["name"] for row in client.ps() if row["kind"] == "tenant"}
    assert tenants == {"greedy", "modest"}


async def _order_of(address: str) -> list[str]:
    """Send requests during a long run, the greedy tenant's first; return tenants in run order."""
    upstream = Upstream(address)
    x = WireTensor(name="", dtype="float32", shape=(1, WIDTH), frame=0)
    request = InferRequest(id="", inputs=(x,), frames=[bytes(4 * WIDTH)])

    async def ask(tenant: str, model: str) -> tuple[int, str]:
        _, timing = await upstream.infer(model, 0, request, tenant)
        return timing["op_id"], tenant

    requests = [("", "long"), *[("greedy", "theirs")] * 64, *[("modest", "mine")] * 8]
    try:
        ran = await asyncio.gather(*[ask(*one) for one in requests])
        return [tenant for _, tenant in sorted(ran)[1:]]
    finally:
        upstream.close()


def test_what_is_dispatched_ahead_yields_to_deadlines_and_priorities_and_is_billed_as_queued() -> (
    None
):
    with checked_server() as checked:
        client, x = checked.client, torch.zeros(1, WIDTH)
        client.register("long", Long(), example_inputs=(x,))
        client.register("short", mlp(WIDTH, 2, seed=4), example_inputs=(x,))
        for name in ("long", "short"):
            client.infer(name, x)
        first = client.submit("long", x)
        late = client.submit("short", x, deadline_ms=20.0)
        low = [client.submit("long", x, priority="low") for _ in range(2)]
        high = [client.submit("short", x, priority="high") for _ in range(2)]
        timings = [one.result(60).timing for one in (first, *high, *low)]
        assert isinstance(late.exception(60), DeadlineExceeded)
        assert [one.op_id for one in timings] == sorted(one.op_id for one in timings)
        # Resident models and no job: whatever they wait for is another request.
        assert all(one.switch_ms < one.queue_ms for one in timings[1:])


class Long(torch.nn.Module):
    """Module that computes for most of a second."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.repeat(2048, 1)
        for _ in range(20):
            x = self.linear(x)
        return x[:1]
