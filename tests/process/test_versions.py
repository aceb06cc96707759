"""Trained here, served here: what a job leaves, and what is published of it, on one real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from process_tools import Checked, checked_server, finish, is_bit_equal, write_script
from safetensors.torch import load_file

from pipeswitch.errors import InvalidInput, ModelNotFound

ENVIRONMENT = {
    "PIPESWITCH_SCHEDULER__COMMIT_EVERY": "50ms",
    "PIPESWITCH_WORKERS__RESTART_BACKOFF": "20ms",
}

TRAIN = """
    import sys
    import torch
    from pipeswitch import job

    steps, saved = int(sys.argv[1]), sys.argv[2]
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(4 * 6 * 6, 5),
    ).to(memory_format=torch.channels_last).to(job.device)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    data = [torch.randn(4, 3, 8, 8) for _ in range(steps)]
    for x in job.steps(data, model=net, optimizer=optimizer):
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.log(loss=loss, even=job.step % 2)
    torch.save(net.state_dict(), saved)
"""


@pytest.fixture(scope="module")
def checked() -> Iterator[Checked]:
    with checked_server(environment=ENVIRONMENT) as running:
        yield running


def test_an_ended_jobs_state_and_history_are_there_until_it_is_removed(
    checked: Checked, tmp_path: Path
) -> None:
    script = write_script(tmp_path, "train.py", TRAIN)
    task = checked.client.train(script, name="left", args=[12, tmp_path / "left.pt"])
    finish(task)
    row = task.export(tmp_path / "left.safetensors")
    assert row["persisted_step"] == 12
    assert row["state"] == "done"
    wanted, found = torch.load(tmp_path / "left.pt"), load_file(tmp_path / "left.safetensors")
    assert set(found) == set(wanted)
    assert all(is_bit_equal(found[name], wanted[name]) for name in wanted)
    assert checked.count("store_free_bytes") == checked.count("store_capacity_bytes")

    history = task.history()
    assert [line["step"] for line in history] == list(range(12))
    assert [line["even"] for line in history] == [step % 2 for step in range(12)]
    assert all(line["loss"] > 0 for line in history)

    with pytest.raises(InvalidInput, match="no folder"):
        task.export(tmp_path / "missing" / "x.safetensors")
    task.remove()
    with pytest.raises(ModelNotFound):
        task.status()
    with pytest.raises(ModelNotFound):
        task.export(tmp_path / "x.safetensors")
    with pytest.raises(ModelNotFound):
        list(task.logs())
    assert not list(tmp_path.glob("*x.safetensors*"))


def test_a_job_that_committed_nothing_has_no_state(checked: Checked, tmp_path: Path) -> None:
    task = checked.client.train(write_script(tmp_path, "short.py", "x = 1\n"), name="short")
    finish(task)
    with pytest.raises(InvalidInput, match="committed nothing"):
        task.export(tmp_path / "x.safetensors")
    assert task.history() == []
