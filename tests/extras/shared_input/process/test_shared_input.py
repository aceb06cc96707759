"""Jobs that share their input: each batch is loaded once, and each job ends as it would alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from process_tools import Checked, checked_server, finish, kill, run_plain, until, write_script

from pipeswitch.base.errors import TaskFailed
from pipeswitch.client.client import Task

BATCHES: Final = 8  # number of batches in one pass

SCRIPT: Final = """
    import hashlib, os, random, sys
    import torch
    from torch.utils.data import DataLoader, Dataset
    from pipeswitch import job

    out, width, passes, seed, written = sys.argv[1], *map(int, sys.argv[2:])

    calls = os.open(out + ".calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    class Noisy(Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            os.write(calls, b".")
            return torch.rand(16, 256) + random.random(), index % 4

    torch.manual_seed(width)
    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(4096, width), torch.nn.ReLU(), torch.nn.Dropout(0.3),
        torch.nn.Linear(width, 4),
    ).to(job.device)
    optimizer = torch.optim.Adam(net.parameters(), 0.001)
    loader = job.shared(DataLoader(Noisy(), batch_size=8, shuffle=True), seed=seed)
    notes = {"losses": ""}
    for epoch in job.epochs(passes):
        if os.path.exists(out + ".enough"):
            break
        for x, y in job.steps(loader, model=net, optimizer=optimizer, extra_state=notes):
            loss = torch.nn.functional.cross_entropy(net(x), y)
            loss.backward()
            if written:
                x.mul_(2)
            optimizer.step()
            optimizer.zero_grad()
            losses = notes["losses"] + loss.item().hex()
            notes["losses"] = hashlib.sha256(losses.encode()).hexdigest()
    weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    print(job.step, hashlib.sha256(notes["losses"].encode() + weights).hexdigest())
"""


@pytest.fixture(scope="module")
def checked() -> Iterator[Checked]:
    environment = {"PIPESWITCH_SCHEDULER__COMMIT_EVERY": "10ms"}
    with checked_server(environment=environment) as running:
        yield running


def said(checked: Checked, name: str) -> str:
    return "".join(checked.client.task(name).logs())


def arguments(out: Path, width: int, passes: int, *, seed: int = 0, written: int = 0) -> list[str]:
    return [str(out), str(width), str(passes), str(seed), str(written)]


def test_two_jobs_load_their_input_once_and_end_as_each_alone(
    checked: Checked, tmp_path: Path
) -> None:
    script, passes = write_script(tmp_path, "calm.py", SCRIPT), 6
    expected = {
        width: run_plain(script, *arguments(tmp_path / f"alone-{width}", width, passes))
        for width in (24, 32)
    }
    out = tmp_path / "shared"
    tasks = {
        width: checked.client.train(
            script, name=f"calm-{width}", args=arguments(out, width, passes), share="calm"
        )
        for width in expected
    }
    for width, task in tasks.items():
        finish(task)
        assert said(checked, f"calm-{width}") == expected[width]
    loaded = (tmp_path / "shared.calls").stat().st_size
    each = passes * BATCHES * 8
    assert each < loaded <= each + 2 * 8  # each job also loads its first batch, to compare it


def test_a_job_that_is_killed_evicted_and_resumed_leaves_itself_and_the_other_exact(
    checked: Checked, tmp_path: Path
) -> None:
    script = write_script(tmp_path, "hurt.py", SCRIPT)
    tasks = {
        width: checked.client.train(
            script,
            name=f"hurt-{width}",
            args=arguments(tmp_path / "s", width, 1_000_000),
            share="hurt",
        )
        for width in (24, 32)
    }
    victim = tasks[24]
    until(lambda: victim.status()["committed_step"] > 0, "it has committed")
    assert kill(until(lambda: checked.row("hurt-24")["pid"], "it has a worker"))
    until(lambda: victim.status()["restarts"] == 1, "its death is known")
    goes_on(victim)
    victim.pause()
    goes_on(tasks[32])
    victim.resume()
    goes_on(victim)
    (tmp_path / "s.enough").touch()  # both jobs end after this pass; no process is starting
    for width, task in tasks.items():
        row = finish(task)
        alone = arguments(tmp_path / f"alone-{width}", width, row["step"] // BATCHES)
        assert said(checked, f"hurt-{width}").splitlines()[-1] == run_plain(script, *alone).strip()
        assert (row["restarts"], row["evictions"] > 0) == ((1, True) if width == 24 else (0, False))


def goes_on(task: Task) -> None:
    """Wait for at least one more pass, so that the job has resumed from a commit if necessary."""
    step = task.status()["step"]
    until(lambda: task.status()["step"] > step + BATCHES, f"{task.name} goes on")


def test_a_write_in_place_and_another_input_fail_that_job_alone_and_say_what_to_type(
    checked: Checked, tmp_path: Path
) -> None:
    script = write_script(tmp_path, "wrong.py", SCRIPT)
    good = checked.client.train(
        script, name="good", args=arguments(tmp_path / "s", 24, 1_000_000), share="wrong"
    )
    until(lambda: good.status()["step"] > 0, "it shares")
    for name, options, text in (
        ("writes", {"written": 1}, "written in place .*x = x.clone"),
        ("differs", {"seed": 3}, 'job "good": seed 3 here, 0 there .*"other"'),
    ):
        args = arguments(tmp_path / "s", 32, 1, **options)
        task = checked.client.train(script, name=name, args=args, share="wrong")
        with pytest.raises(TaskFailed, match=f"(?s)SharedInputRefused: .*{text}"):
            task.wait(60)
    step = good.status()["step"]
    until(lambda: good.status()["step"] > step, "it goes on")
    good.cancel()
