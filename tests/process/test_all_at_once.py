"""A server with too small an arena and 200 disturbances: no answer and no state is lost."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import process_tools as tools
import pytest
import torch

from pipeswitch.client.client import Client
from tests.extras.offload.process.test_activations import SAVED_BYTES, SCRIPT
from tests.process.figures import say

SEED: Final = int(os.environ.get("PIPESWITCH_SEED", "1"))
DISTURBANCES: Final = 200
DAEMON_DIES: Final = range(30, DISTURBANCES, 45)  # the daemon is killed before these disturbances
ARENA: Final = "22MiB"  # 20 MiB for models and slices, and the fences
MODELS: Final = {  # width and depth; "large" (60 MiB) streams, the other models evict each other
    "large": (1024, 15),
    "middle": (1024, 2),
    "small": (128, 2),
}
JOBS: Final = {  # mode of offloading, and budget for activations in bytes
    "limited": ("all", SAVED_BYTES // 2),
    "planned": ("auto", SAVED_BYTES // 3),
    "roomy": ("none", 1 << 30),
}


class Asked:
    """Models, inputs and the plain modules' outputs, with two threads that send requests."""

    def __init__(self, client: Client) -> None:
        modules = {name: tools.mlp(*size, seed) for seed, (name, size) in enumerate(MODELS.items())}
        self.inputs = {name: torch.linspace(-1, 1, MODELS[name][0])[None] for name in modules}
        self.expected = {name: tools.eager(one, self.inputs[name]) for name, one in modules.items()}
        for name, module in modules.items():
            client.register(name, module, example_inputs=(self.inputs[name],))

    def ask(self, client: Client, name: str) -> None:
        answer = client.infer(name, self.inputs[name])["y"]
        assert tools.is_bit_equal(answer, self.expected[name]), f"{name} answers otherwise"

    def keep_asking(self, client: Client, over: threading.Event) -> int:
        dice, count = random.Random(SEED), 0
        while not over.wait(dice.uniform(0, 0.2)):
            self.ask(client, dice.choice([*MODELS]))
            count += 1
        return count


def disturb(checked: tools.Checked, requests: Asked, dice: random.Random, number: int) -> None:
    """Disturb the server at a random instant, perhaps during the previous recovery."""
    threading.Event().wait(dice.uniform(0, 0.3))  # a random instant, not a condition
    how = dice.choices(("kill", "evict", "request"), (1, 3, 6))[0]
    if number in DAEMON_DIES:
        assert tools.kill(checked.daemon_pid())
        checked.wait_until_whole()
    elif how == "request":
        requests.ask(checked.client, dice.choice([*MODELS]))
    else:
        tools.hurt(checked, checked.client.task(dice.choice([*JOBS])), how)


def figures_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return a job's figures of activations; {} while there are none, or no plan in "planned"."""
    figures: dict[str, Any] = row.get("activations", {})
    is_planned = row["name"] != "planned" or figures.get("planned_step_ms")
    return figures if figures.get("saved_bytes") and is_planned else {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whatever_dies_states_and_answers_are_as_undisturbed_and_all_bytes_come_back(
    tmp_path: Path,
) -> None:
    say(f"PIPESWITCH_SEED={SEED}")
    script, dice = tools.write_script(tmp_path, "job.py", SCRIPT), random.Random(SEED)
    enough = {name: tmp_path / f"enough-{name}" for name in JOBS}
    environment = {**tools.ENVIRONMENT, "PIPESWITCH_DEVICE__LINK_GBPS": "1"}
    with tools.checked_server(arena=ARENA, host_store="128MiB", environment=environment) as checked:
        requests, over = Asked(checked.client), threading.Event()
        tasks = {}
        for seed, (name, (offload, budget)) in enumerate(JOBS.items()):
            args = [str(tmp_path / name), str(budget), str(enough[name]), str(seed)]
            tasks[name] = checked.client.train(script, name=name, args=args, offload=offload)
        with checked.running.client() as other, ThreadPoolExecutor(1) as pool:
            answers = pool.submit(requests.keep_asking, other, over)
            try:
                for number in range(DISTURBANCES):
                    disturb(checked, requests, dice, number)
            finally:
                over.set()
            say(f"{answers.result(60)} answers beside")
        figures_by_name = {
            name: tools.until(lambda t=task: figures_of(t.status()), f"figures of {name}", 60.0)
            for name, task in tasks.items()
        }
        tools.until(lambda: checked.count("store_offloaded_bytes"), "what is offloaded is charged")
        for name, task in tasks.items():
            enough[name].write_text(str(task.status()["epoch"] + 3))
        ends = {name: tools.finish(task, 120.0) for name, task in tasks.items()}
        say(
            str(
                {
                    name: [row[key] for key in ("step", "restarts", "evictions", "suspensions")]
                    for name, row in ends.items()
                }
            )
        )
        for name, figures in figures_by_name.items():
            assert figures["peak_bytes"] <= JOBS[name][1], name
            assert (figures["offloaded_bytes"] > 0) == (name != "roomy"), figures
        for what in ("restarts", "evictions"):
            assert sum(row[what] for row in ends.values()) > DISTURBANCES // 20, ends
        for name in MODELS:
            checked.client.unregister(name)
        for what in ("arena", "store"):
            whole = checked.count(f"{what}_capacity_bytes")
            tools.until(
                lambda w=what, b=whole: checked.count(f"{w}_free_bytes") == b, f"a free {what}"
            )
    for seed, name in enumerate(JOBS):
        served, plain = tmp_path / name, tmp_path / f"{name}-plain"
        enough[name].write_text(served.read_text().split()[-1])
        tools.run_plain(script, str(plain), "1GiB", str(enough[name]), str(seed))
        assert served.read_text() == plain.read_text(), name
