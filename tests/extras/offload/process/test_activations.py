"""Saved tensors under a budget on a real server, while the job is suspended, evicted and killed."""

from __future__ import annotations

import json
import random
import subprocess
import threading
from pathlib import Path
from typing import Any, Final

import process_tools as tools
import pytest
import torch
from process_tools import ENVIRONMENT as OFTEN

from pipeswitch.base.errors import InvalidInput, TaskFailed

ENVIRONMENT: Final = {**OFTEN, "PIPESWITCH_DEVICE__LINK_GBPS": "0.5"}
SCRIPT: Final = """
    import hashlib, sys
    from pathlib import Path
    import torch
    from pipeswitch import job

    out, memory, enough = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.manual_seed(int((sys.argv[4:] or ["0"])[0]))
    layers, width = [], 3
    for more in (8, 8, 16, 16):
        layers += [torch.nn.Conv2d(width, more, 3, padding=1), torch.nn.BatchNorm2d(more),
                   torch.nn.ReLU(inplace=True)]
        width = more
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Dropout(0.3),
                                torch.nn.Linear(16 * 256, 4)).to(job.device)
    optimizer = torch.optim.Adam(model.parameters(), 0.001)
    data = [(torch.randn(16, 3, 16, 16), torch.randint(0, 4, (16,))) for _ in range(8)]
    for epoch in job.epochs(1_000_000):
        if enough.exists() and epoch >= int(enough.read_text()):
            break
        for x, y in job.steps(data, model=model, optimizer=optimizer, activation_memory=memory):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    state = torch.cat([value.double().flatten() for value in model.state_dict().values()])
    out.write_text(f"{hashlib.sha256(state.numpy().tobytes()).hexdigest()} {epoch}")
"""
SAVED_BYTES: Final = 2_500_000  # approximate bytes that a step saves


def strike(checked: tools.Checked, name: str, dice: random.Random) -> None:
    """Suspend, evict or kill the job at a random instant, then wait for a commit."""
    threading.Event().wait(dice.uniform(0, 0.05))  # a random instant, not a condition
    task = checked.client.task(name)
    how = dice.choice(["request", "evict", "kill"])
    if how == "request":
        for _ in range(3):
            checked.client.infer("small", torch.ones(1, 64))
    else:
        tools.hurt(checked, task, how)
    before = task.status()["committed_step"]
    tools.until(lambda: task.status()["committed_step"] > before, "it commits")


def test_suspended_evicted_and_killed_at_random_it_ends_bit_equal(tmp_path: Path) -> None:
    script, dice = tools.write_script(tmp_path, "limited.py", SCRIPT), random.Random(44)
    served, plain, enough = tmp_path / "served", tmp_path / "plain", tmp_path / "enough"
    with tools.checked_server(arena="64MiB", environment=ENVIRONMENT) as checked:
        checked.client.register("small", tools.mlp(64, 3, 1), example_inputs=(torch.zeros(1, 64),))
        arguments = [str(served), str(SAVED_BYTES // 3), str(enough)]
        task = checked.client.train(script, name="limited", args=arguments)
        tools.until(lambda: task.status()["committed_step"] > 0, "it commits")
        for _ in range(12):
            strike(checked, "limited", dice)
        row = tools.until(
            lambda: row if (row := task.status()).get("activations") else None, "figures"
        )
        enough.write_text(str(task.status()["epoch"] + 3))
        end = tools.finish(task)
        assert end["restarts"] >= 3
        assert end["evictions"] >= 3
        took = row["activations"]
        assert took["budget_bytes"] == SAVED_BYTES // 3
        assert took["peak_bytes"] <= took["budget_bytes"] < took["saved_bytes"]
        assert took["offloaded_bytes"] > 0
    enough.write_text(served.read_text().split()[-1])
    tools.run_plain(script, str(plain), "1GiB", str(enough))
    assert served.read_text() == plain.read_text()


@pytest.mark.parametrize(
    ("memory", "store", "kind", "says", "hint"),
    [
        (
            "100KiB",
            "64MiB",
            "OutOfDeviceMemory",
            r"may take 100\.00 KiB: .* too much",
            "activation_memory=",
        ),
        ("1MiB", "2MiB", "HostStoreFull", r"has [01]\.\d MiB left", "--host-store "),
    ],
)
def test_a_job_over_its_budget_or_the_host_stores_fails_and_says_by_how_much(
    tmp_path: Path, memory: str, store: str, kind: str, says: str, hint: str
) -> None:
    script = tools.write_script(tmp_path, "large.py", SCRIPT)
    with tools.checked_server(arena="64MiB", host_store=store) as checked:
        arguments = [str(tmp_path / "out"), memory, str(tmp_path / "never")]
        task = checked.client.train(script, name="large", args=arguments)
        with pytest.raises(TaskFailed, match=says) as caught:
            task.wait(60)
        assert caught.value.data["type"] == kind
        assert hint in caught.value.data["text"]
        tools.until(lambda: not checked.count("store_offloaded_bytes"), "its process has left")


def test_a_plan_says_what_a_job_will_do_that_is_limited_by_its_command_line(tmp_path: Path) -> None:
    script = tools.write_script(
        tmp_path, "planned.py", SCRIPT.replace(", activation_memory=memory", "")
    )
    arguments = [str(tmp_path / "out"), "", str(tmp_path / "never")]

    def planned(memory: str) -> subprocess.CompletedProcess[str]:
        words = ("plan", "--train", script, "--memory", memory, "--json", "--", *arguments)
        return tools.command(*words, environment=ENVIRONMENT)

    plan = json.loads(planned("800KiB").stdout)
    needed, (whole, limited) = plan["needed_bytes"], plan["plans"]
    assert plan["min_bytes"] < limited["peak_bytes"] <= 800 << 10 < needed
    assert whole["offloaded_bytes"] == 0 < limited["offloaded_bytes"]
    assert limited["step_ms"] <= limited["layer_wise_ms"]
    refused = planned("40KiB")
    assert f"--memory {-(-plan['min_bytes'] >> 10)}KiB" in refused.stdout
    assert refused.returncode == 1
    options: Any = {"arena": "64MiB", "environment": ENVIRONMENT, "state_dir": tmp_path / "state"}
    with tools.checked_server(settles=False, **options) as checked:
        with pytest.raises(InvalidInput):
            checked.client.train(script, args=arguments, offload="al")
        checked.client.train(script, name="planned", args=arguments, activation_memory="800KiB")
        took = tools.until(lambda: figures_of_a_plan(checked), "a plan")
        assert took["saved_bytes"] >= needed
        assert took["budget_bytes"] == 800 << 10 >= took["peak_bytes"]
        assert took["host_bytes"] >= took["offloaded_bytes"] > 0
        assert took["step_ms"] > 0
    with tools.checked_server(**options) as checked:  # the job keeps the budget that it began with
        took = tools.until(lambda: figures_of_a_plan(checked), "a plan")
        assert took["budget_bytes"] == 800 << 10
        checked.client.task("planned").cancel()


def figures_of_a_plan(checked: tools.Checked) -> dict[str, Any]:
    took: dict[str, Any] = checked.client.task("planned").status().get("activations", {})
    return took if took.get("planned_step_ms") else {}
