"""Two cpu devices of one server: both serve in parallel, and a death on one affects only that."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import process_tools as tools
import pytest
import torch

from pipeswitch.client.client import Task

WIDTH = 256


@pytest.fixture(scope="module")
def running() -> Iterator[tools.Checked]:
    with tools.checked_server(
        devices=("cpu:0", "cpu:1"),
        arena="32MiB",
        args=("--standby", "1"),
        environment=tools.ENVIRONMENT,
    ) as checked:
        yield checked


def pids(checked: tools.Checked, device: str) -> dict[str, int]:
    """Return the pids of a device's workers and daemon, by name."""
    rows = [row for row in checked.client.ps() if row["on"] == device]
    return {row["name"]: row["pid"] for row in rows if row["kind"] in ("worker", "daemon")}


def test_both_serve_to_the_bit_and_a_daemon_that_dies_under_load_costs_no_request(
    running: tools.Checked,
) -> None:
    client, x = running.client, torch.randn(4, WIDTH)
    modules = {name: tools.mlp(WIDTH, 4, seed) for seed, name in enumerate("ab")}
    expected = {name: tools.eager(module, x) for name, module in modules.items()}
    for name, module in modules.items():
        client.register(name, module, example_inputs=(x,))
    client.load("a")  # pins it on both devices
    tools.until(
        lambda: all(row["state"] == "resident" for row in client.ps() if row["name"] == "a"),
        "a is on both devices",
    )
    devices: list[str] = []
    wrong: list[Any] = []

    def ask(name: str) -> None:
        with running.running.client() as mine:
            while len(devices) < 200:
                try:
                    result = mine.infer(name, x)
                except Exception as error:
                    wrong.append(error)
                    return
                if not tools.is_bit_equal(result["y"], expected[name]):
                    wrong.append(name)
                devices.append(result.timing.device)

    before = pids(running, "cpu:0")
    threads = [threading.Thread(target=ask, args=(name,)) for name in "aabb"]
    for thread in threads:
        thread.start()
    tools.until(lambda: {"cpu:0", "cpu:1"} <= set(devices), "both devices answer")
    dead = pids(running, "cpu:1")
    tools.kill(dead["memory-daemon"])
    for thread in threads:
        thread.join()
    assert not wrong
    tools.until(
        lambda: running.count("daemon_restarts"), "its death is seen"
    )  # requests may be answered before that
    tools.until(
        lambda: all(row["ready"] for row in running.stats()["devices"]), "both are ready again"
    )
    assert running.count("daemon_restarts") == 1
    assert pids(running, "cpu:0") == before
    assert not set(pids(running, "cpu:1").values()) & set(dead.values())


TIMED = tools.DIGESTED.replace("hashlib,", "hashlib, time,")
COUNTED = TIMED.replace(
    "    torch.manual_seed(0)",
    """
    told = open(sys.argv[1] + ".told", "a", buffering=1)
    told.write("begun\\n")
    torch.manual_seed(0)""",
).replace(
    "            net(x)",
    """
            told.write(f"{job.step}\\n")
            ends_at = time.monotonic() + float(sys.argv[4])
            while time.monotonic() < ends_at:  # a step takes long enough to be disturbed
                pass
            net(x)""",
)


@pytest.mark.parametrize(
    ("moves", "others", "epochs"), [(4, 6, 6), pytest.param(20, 40, 40, marks=pytest.mark.slow)]
)
def test_a_job_that_moves_repeats_no_step_unless_its_process_dies(
    running: tools.Checked, tmp_path: Path, moves: int, others: int, epochs: int
) -> None:
    """Move the job, then move, evict and kill it at random; compare its final state."""
    script = tools.write_script(tmp_path, "train.py", COUNTED)
    task = running.client.train(script, args=[str(tmp_path / "m"), str(epochs), "512", "0.005"])
    tools.until(lambda: task.status()["committed_step"] > 0, "it has committed")
    before = task.status()
    for index in range(moves):
        row = task.move(f"cpu:{index % 2}")
        assert row["on"] == f"cpu:{index % 2}"
        tools.until(lambda step=row["step"]: goes_past(task, step), "it trains there")  # type: ignore[misc]
    row = task.status()
    assert (row["restarts"], row["steps_recomputed"]) == (before["restarts"], 0)
    assert row["evictions"] - before["evictions"] >= moves - 1
    words = (tmp_path / "m.told").read_text().split()
    assert words.count("begun") == row["evictions"] + 1 - before["evictions"]
    whole = dict.fromkeys(map(int, filter(str.isdigit, words)))
    assert [*whole] == [*range(len(whole))]  # no step is missing
    assert disturb(running, task, random.Random(7), others) == others, "it ended too soon"
    assert tools.finish(task, 240.0)["step"] == 100 * epochs
    tools.run_plain(script, str(tmp_path / "plain"), str(epochs), "512", "0")
    assert (tmp_path / "m").read_text() == (tmp_path / "plain").read_text()


def disturb(running: tools.Checked, task: Task, chance: random.Random, count: int) -> int:
    """Move, pause and kill a job at random, also in the middle of a move.

    Returns:
        The number of disturbances before the job ended.
    """
    for index in range(count):
        if task.status()["state"] in ("done", "failed"):
            return index
        what = chance.choice(["move", "move", "move", "pause", "kill", "kill in a move"])
        to = f"cpu:{chance.randrange(2)}"
        if what == "pause":
            task.pause()
            task.resume()
        elif what == "move":
            task.move(to)
        else:
            # Wait for a commit, because a job fails if it dies several times without one.
            since = task.status()["committed_step"]
            tools.until(lambda since=since: goes_on(task, since), "it commits")  # type: ignore[misc]
            row = running.row(task.name)
            moving = threading.Thread(target=task.move, args=(to,))
            if what == "kill in a move":
                moving.start()
            if row["pid"]:
                tools.kill(row["pid"])
            if what == "kill in a move":
                moving.join()
    return count


def goes_past(task: Task, step: int) -> bool:
    return bool(task.status()["step"] > step)


def goes_on(task: Task, since: int) -> bool:
    row = task.status()
    return bool(row["state"] in ("done", "failed") or row["committed_step"] > since)


def test_a_job_goes_on_where_a_device_is_when_its_own_dies(
    running: tools.Checked, tmp_path: Path
) -> None:
    """Train two jobs in parallel, one per device; compare the end with a run without a server."""
    script = tools.write_script(tmp_path, "train.py", tools.DIGESTED)
    tasks = [
        running.client.train(script, name=name, args=[str(tmp_path / name), "1000000", "512"])
        for name in ("k", "l")
    ]
    tools.until(
        lambda: all(task.status()["committed_step"] > 0 for task in tasks), "both have committed"
    )
    on = {row["name"]: row["on"] for row in running.rows("job")}
    assert {on["k"], on["l"]} == {"cpu:0", "cpu:1"}
    for device in (on["l"], on["k"]):
        assert tasks[0].move(device)["on"] == device
    tools.kill(pids(running, on["l"])["memory-daemon"])
    epochs = max(task.status()["epoch"] for task in tasks) + 20  # neither has reached this one
    for name in ("k", "l"):
        (tmp_path / f"{name}.enough-{epochs}").touch()
    assert [tools.finish(task)["step"] for task in tasks] == [100 * epochs] * 2
    tools.run_plain(script, str(tmp_path / "plain"), str(epochs), "512")
    plain = (tmp_path / "plain").read_text()
    assert [(tmp_path / name).read_text() for name in ("k", "l")] == [plain, plain]
