"""Equal decisions of the live server and the simulator, for equal policies and arrivals.

All other requests arrive while one long request computes. So only the policy decides their order,
not the timing of link and device. Both servers must have the same order and number of switches.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import checked_server, finish, mlp, until, write_script

from pipeswitch.client import Client
from pipeswitch.extras.lab.arrivals import Arrival
from pipeswitch.extras.lab.costs import Costs, Link
from pipeswitch.extras.lab.replay import PaperJob, PaperModel, Setting, replay

WIDTH, DEPTH = 512, 5  # a little more than 5 MiB of weights, in regions of 6 MiB
MIB = 1 << 20
ORDER = ["long", "a", "b", "a", "c", "b", "a", "c", "c", "a", "b"]
APART = 3  # number of first requests that arrive one after the other; the rest arrive together
STEPS, STEP_MS = 24, 50.0  # a job takes 1.2 s, longer than the first cycle of 1 s
WIDTHS = {"large": 1024, "small": 64}  # the large job is submitted first
TRAINS = """
    import sys, time
    import torch
    from pipeswitch import job

    width, steps, step_ms, out = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    net = torch.nn.Linear(width, width).to(job.device)
    optimizer = torch.optim.SGD(net.parameters(), 0.001)
    for _ in job.epochs(1):
        for x in job.steps([torch.zeros(1, width)] * steps, model=net, optimizer=optimizer):
            ends_at = time.monotonic() + step_ms / 1000
            while time.monotonic() < ends_at:  # a step takes as long as the simulator says
                net(x)
            net(x).sum().backward()
            optimizer.step()
    with open(out, "a") as file:
        file.write(f"{width} ")
"""
DEADLINES_MS = {3: 160e3, 5: 80e3, 8: 40e3, 9: 120e3}  # request number -> deadline


class Long(torch.nn.Module):
    """Module that computes for a second with one small weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.repeat(2048, 1)  # here, because a large input would arrive late
        for _ in range(40):
            x = self.linear(x)
        return x[:1]


class Slow(torch.nn.Module):
    """Module that computes longer than its copy takes, so the copy's timing does not matter."""

    def __init__(self, number: int) -> None:
        super().__init__()
        # The policy sjf compares the times of first runs, and on a busy machine one of 12 ms can
        # take 50 ms, so the next takes four times as long or more.
        self.net, self.rows = mlp(WIDTH, DEPTH, number), (512, 4096, 16384)[number]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.net(x.repeat(self.rows, 1))[:1]
        return output


def models() -> dict[str, tuple[torch.nn.Module, torch.Tensor]]:
    by_name: dict[str, tuple[torch.nn.Module, torch.Tensor]] = {
        name: (Slow(number), torch.zeros(1, WIDTH)) for number, name in enumerate("abc")
    }
    return by_name | {"long": (Long(), torch.zeros(1, WIDTH))}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Return a server's state directory. Restored models are ready before workers load them."""
    return tmp_path / "state"


@pytest.mark.parametrize("policy", ["priority", "fifo", "edf", "sjf", "alternating", "collate"])
def test_the_live_server_decides_as_the_simulator_does(policy: str, state: Path) -> None:
    live_order, live_switches = _live(policy, state)
    paper = _simulated(policy)
    assert [ORDER[n] for n in live_order] == [ORDER[n] for n in paper.order]
    assert live_order == paper.order
    assert live_switches == paper.switches


def test_jobs_end_live_in_the_order_in_which_they_do_in_the_simulator(tmp_path: Path) -> None:
    assert _simulated_ends("rotate") == ["large", "small"]  # another order than ``pack``
    script, out = write_script(tmp_path, "trains.py", TRAINS), tmp_path / "ends"
    with checked_server(environment={"PIPESWITCH_SCHEDULER__TRAINING": "pack"}) as checked:
        tasks = [
            checked.client.train(
                script, name=name, args=[str(width), str(STEPS), str(STEP_MS), str(out)]
            )
            for name, width in WIDTHS.items()
        ]
        for task in tasks:
            finish(task)
    ended = [int(word) for word in out.read_text("utf-8").split()]
    assert ended == [WIDTHS[name] for name in _simulated_ends("pack")]


def _simulated_ends(training: str) -> list[str]:
    jobs = [
        PaperJob(name=name, steps=STEPS, step_ms=STEP_MS, memory_bytes=8 * width**2)
        for name, width in WIDTHS.items()
    ]
    outcome = replay(Setting(memory_bytes=64 * MIB, costs=Costs(), training=training), [], [], jobs)
    return [job.name for job in sorted(outcome.jobs, key=lambda job: job.jct_ms)]


def _live(policy: str, state: Path) -> tuple[tuple[int, ...], int]:
    """Serve all requests with room for ``long`` and two models; return order and switches."""
    patient = {"PIPESWITCH_SCHEDULER__MAX_WAIT": "240s"}  # no priority by waiting
    with checked_server(
        arena="16MiB", args=("--policy", policy), environment=patient, state_dir=state
    ) as checked:
        client, inputs = checked.client, {}
        known = {row["name"] for row in client.models()}
        for name, (module, example) in models().items():
            if name not in known:
                client.register(name, module, example_inputs=(example,))
            inputs[name] = example
        until(lambda: {row["state"] for row in client.models()} == {"ready"}, "all are stored")
        # A worker takes no request while it loads a program, so wait until each has loaded all.
        until(lambda: not any(row["why"].startswith("preparing") for row in client.ps()), "standby")
        client.infer("long", inputs["long"])  # so that the first request below needs no copy
        before = client.stats()["switches"]
        futures = []
        for number, name in enumerate(ORDER):
            deadline_ms = DEADLINES_MS.get(number)
            futures.append(client.submit(name, inputs[name], deadline_ms=deadline_ms))
            if number < APART:  # after these the arena is full: requests only queue
                until(lambda: _is_on_the_device(client, ORDER[: len(futures)]), "it is there")
        timings: list[Any] = [future.result(240.0).timing for future in futures]
        assert timings[0].compute_ms > 50.0  # time for later requests to arrive
        order = sorted(range(len(ORDER)), key=lambda number: timings[number].op_id)
        return tuple(order), client.stats()["switches"] - before


def _is_on_the_device(client: Client, names: list[str]) -> bool:
    where = {row["name"]: row["residency"] for row in client.models()}
    return client.stats()["inference"]["in_flight"] == len(names) and all(
        where[name] == "resident" for name in names
    )


def _simulated(policy: str) -> Any:
    names, takes_ms = list(dict.fromkeys(ORDER)), {"long": 500.0, "a": 12.5, "b": 100.0, "c": 400.0}
    paper = [
        PaperModel(
            name=name,
            layer_bytes=(MIB if name == "long" else 5 * MIB + 4096,),
            layer_ms=(takes_ms[name],),
            plan=(0,),
        )
        for name in names
    ]
    arrivals = [Arrival(0.0, names.index("long"))]
    for number, name in enumerate(ORDER):
        time_ms = 1e3 + 10.0 * min(number, APART) + 0.01 * number
        arrivals.append(Arrival(time_ms, names.index(name), DEADLINES_MS.get(number)))
    setting = Setting(
        memory_bytes=14 * MIB,
        costs=Costs(to_device=Link(bytes_per_ms=float(5 * MIB))),
        policy=policy,
        max_wait_ms=240e3,
    )
    outcome = replay(setting, paper, arrivals)
    order = tuple(number - 1 for number in outcome.order if number)
    return dataclasses.replace(outcome, order=order, switches=outcome.switches - 1)
