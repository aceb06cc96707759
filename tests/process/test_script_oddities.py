"""Unusual training scripts, killed and evicted: bit-equal, or refused with a reason."""

from __future__ import annotations

import os
import random
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from process_tools import Checked, checked_server, finish, mlp, run_plain, until, write_script

from pipeswitch.base.errors import InvalidInput, TaskFailed
from pipeswitch.cli.main import main

SEED = 1121
ENVIRONMENT = {
    "PIPESWITCH_SCHEDULER__COMMIT_EVERY": "10ms",
    "PIPESWITCH_WORKERS__RESTART_BACKOFF": "20ms",
}
WIDTHS = {"small": 64, "huge": 2010}
DISTURBANCES = ["small", "huge", "small", "pause", "pause", "pause", "huge", "small", "pause"]

PRELUDE = """
    import hashlib, os, random, signal, sys, time
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset
    from pipeswitch import job

    out = sys.argv[1]
    is_served = len(sys.argv) > 2
    torch.manual_seed(0); random.seed(0); np.random.seed(0)
    x = torch.randn(128, 20); y = torch.randint(0, 3, (128,))

    def here():
        '''A place in the body: time passes, and some steps are the last of their process.'''
        ends_at = time.monotonic() + 0.003
        while time.monotonic() < ends_at:  # commits are made by the clock
            pass
        died = f"{out}.died-{job.step}"
        if is_served and job.step in (30, 50) and not os.path.exists(died):
            open(died, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

    def net():
        return nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2),
                             nn.Linear(32, 3)).to(job.device)

    def loader(**options):
        return DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, **options)

    def learn(model, optimizer, a, b):
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
        optimizer.zero_grad()

    def save(*parts):
        total = hashlib.sha256()
        def add(value):
            if isinstance(value, torch.Tensor):
                total.update(str(value.dtype).encode() + str(value.shape).encode())
                total.update(repr(value.detach().tolist()).encode())
            elif isinstance(value, dict):
                for key, item in value.items():
                    total.update(repr(key).encode())
                    add(item)
            elif isinstance(value, (list, tuple)):
                for item in value:
                    add(item)
            else:
                total.update(repr(value).encode())
        add((*parts, torch.get_rng_state(), random.getstate(), np.random.rand(), job.step))
        with open(out, "w") as file:
            file.write(total.hexdigest())
"""

EXACT = {
    "parameters that are given other memory": """
        model = net(); optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        mask = (torch.rand(32, 20) > 0.3).float()
        for epoch in job.epochs(10):
            for a, b in job.steps(loader(), model=model, optimizer=optimizer):
                here(); learn(model, optimizer, a, b)
                model[0].weight.data = model[0].weight.data * mask
        save(model.state_dict(), optimizer.state_dict())
    """,
    "parameters that are written through data": """
        model = net(); optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for epoch in job.epochs(10):
            for a, b in job.steps(loader(), model=model, optimizer=optimizer):
                for p in model.parameters():
                    p.data.mul_(0.999)
                here(); loss = F.cross_entropy(model(a), b)
                here(); loss.backward(); optimizer.step(); optimizer.zero_grad()
        save(model.state_dict())
    """,
    "generators of samplers, datasets and the script": """
        class Shuffled(Sampler):
            def __init__(self):
                self.rng = random.Random(3)
            def __len__(self):
                return 128
            def __iter__(self):
                order = list(range(128)); self.rng.shuffle(order); yield from order
        class Augmented(Dataset):
            def __init__(self):
                self.transforms = [{"rng": np.random.default_rng(5)}]
            def __len__(self):
                return 128
            def __getitem__(self, i):
                return x[i] + float(self.transforms[0]["rng"].normal()), y[i]
        mine = np.random.RandomState(7); draws = torch.Generator().manual_seed(1)
        model = net(); optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        data = DataLoader(Augmented(), 16, sampler=Shuffled())
        for epoch in job.epochs(10):
            for a, b in job.steps(data, model=model, optimizer=optimizer,
                                  extra_state={"mine": mine, "draws": draws}):
                here()
                learn(model, optimizer, a * mine.rand() + torch.randn(20, generator=draws), b)
        save(model.state_dict())
    """,
    "a module with an extra state, and buffers that come late and grow": """
        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(20, 3); self.calls = 0
                self.empty = nn.Parameter(torch.zeros(0, 4))
                self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex128))
                self.register_buffer("late", None); self.register_buffer("kept", torch.zeros(0))
            def forward(self, a):
                self.calls += 1
                mean = a.mean().reshape(1)
                self.late = mean if self.late is None else 0.9 * self.late + 0.1 * mean
                self.kept = torch.cat([self.kept, mean])[-40:]
                more = self.late + self.kept.sum() + self.wave.real + self.empty.sum()
                return self.linear(a) * (1 + 0.001 * self.calls) + more
            def get_extra_state(self):
                return {"calls": self.calls}
            def set_extra_state(self, state):
                self.calls = state["calls"]
        model = Odd(); optimizer = torch.optim.RAdam(model.parameters(), 1e-3)
        for epoch in job.epochs(10):
            for a, b in job.steps(loader(), model=model, optimizer=optimizer):
                here(); learn(model, optimizer, a, b)
        save(model.state_dict(), optimizer.state_dict())
    """,
    "early stopping, and a state that is carried along, in a dict": """
        model = nn.GRU(20, 8, batch_first=True); head = nn.Linear(8, 3)
        optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], 3e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        notes = {"hidden": None, "best": float("inf"), "bad": 0, "losses": [], "last": 0.0}
        for epoch in job.epochs(40):
            for a, b in job.steps(DataLoader(TensorDataset(x, y), 16), model=[model, head],
                                  optimizer=optimizer, scheduler=plateau, extra_state=notes):
                here(); result, hidden = model(a[None], notes["hidden"])
                notes["hidden"] = hidden.detach(); loss = F.cross_entropy(head(result[0]), b)
                loss.backward(); optimizer.step(); optimizer.zero_grad()
                notes["last"] = loss.item()  # the loop may have ended before an eviction
            last = notes["last"]; plateau.step(last); notes["losses"].append(last)
            is_better = last < notes["best"] - 0.01
            notes["best"] = min(notes["best"], last)
            notes["bad"] = 0 if is_better else notes["bad"] + 1
            if notes["bad"] >= 8 and epoch >= 9:
                break
        save(model.state_dict(), optimizer.state_dict(), notes, epoch)
    """,
    "sparse gradients that are left over": """
        table = nn.EmbeddingBag(300, 8, sparse=True); head = nn.Linear(8, 3)
        optimizers = {1: torch.optim.SparseAdam(table.parameters()),
                      2: torch.optim.Adam(head.parameters())}
        data = DataLoader(TensorDataset(torch.randint(0, 300, (128, 5)), y), 16, shuffle=True)
        for epoch in job.epochs(10):
            for a, b in job.steps(data, model=[table, head], optimizer=optimizers):
                here()
                for optimizer in optimizers.values():
                    optimizer.zero_grad()
                F.cross_entropy(head(table(a)), b).backward()
                for optimizer in optimizers.values():
                    optimizer.step()
        save(table.state_dict(), head.state_dict(), table.weight.grad.to_dense())
    """,
    "loops that are left, and closed in the next one": """
        model = net(); optimizer = torch.optim.Adam(model.parameters(), 1e-3); bars = []
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for epoch in job.epochs(12):
            bars.append(job.steps(loader(), model=model, optimizer=optimizer, scheduler=schedule))
            for a, b in bars[-1]:
                here(); learn(model, optimizer, a, b)
                if job.step % 7 == 3:
                    break
            for a, b in job.steps(loader(), model=model, optimizer=optimizer, scheduler=schedule):
                here(); learn(model, optimizer, a, b); bars.clear()
            schedule.step()
        save(model.state_dict(), optimizer.state_dict(), schedule.state_dict())
    """,
    "a preemption that is caught, a thread and an exit hook": """
        import atexit, threading
        def main():
            model = net(); optimizer = torch.optim.Adam(model.parameters(), 1e-3)
            for epoch in job.epochs(10):
                for a, b in job.steps(loader(), model=model, optimizer=optimizer):
                    here(); learn(model, optimizer, a, b)
            ended = []
            threading.Thread(target=lambda: (sum(range(10**7)), ended.append(1))).start()
            atexit.register(lambda: save(model.state_dict(), ended))
        try:
            main()
        except:
            sys.exit(1)
    """,
}

REFUSED = {
    "inside job.steps": """
        model = net(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for a, b in job.steps(loader(), model=model, optimizer=optimizer):
            for c, d in job.steps(loader(), model=model, optimizer=optimizer):
                learn(model, optimizer, c, d)
    """,
    "model.0.weight_orig": """
        from torch.nn.utils.prune import l1_unstructured
        model = net(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for epoch in job.epochs(20):
            if epoch == 1:
                l1_unstructured(model[0], "weight", 0.3)
            for a, b in job.steps(loader(), model=model, optimizer=optimizer):
                here(); learn(model, optimizer, a, b)
    """,
    "a parameter group": """
        model = net(); optimizer = torch.optim.Adam(model[4].parameters(), 0.1)
        optimizer.add_param_group({"params": list(model[0].parameters())})
        for epoch in job.epochs(20):
            if epoch == 1:
                optimizer.param_groups.pop()
            for a, b in job.steps(loader(), model=model, optimizer=optimizer):
                here(); learn(model, optimizer, a, b)
    """,
    "share memory": """
        model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
        model[1].weight.data = model[0].weight.data
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for a, b in job.steps(loader(), model=model, optimizer=optimizer):
            learn(model, optimizer, a, b)
    """,
    "has no values yet": """
        model = nn.LazyLinear(3); optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for a, b in job.steps(loader(), model=model, optimizer=optimizer):
            learn(model, optimizer, a, b)
    """,
    "extra_state 'best': a float": """
        model = net(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for a, b in job.steps(loader(), model=model, optimizer=optimizer,
                              extra_state={"best": 0.0, "draws": random.Random(1)}):
            learn(model, optimizer, a, b)
    """,
    r"job.epochs\(\d+\) was job.epochs\(12\)": """
        model = net(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
        mine = out + ".mine"; first = int(open(mine).read()) if os.path.exists(mine) else 0
        for epoch in job.epochs(12 - first):
            for a, b in job.steps(loader(), model=model, optimizer=optimizer):
                here(); learn(model, optimizer, a, b)
            with open(mine, "w") as file:
                file.write(str(first + epoch + 1))
    """,
    "before it reached its last commit": """
        model = net(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for epoch in job.epochs(12):
            if os.path.exists(out + ".died-30"):
                break
            for a, b in job.steps(loader(), model=model, optimizer=optimizer):
                here(); learn(model, optimizer, a, b)
    """,
}


def script(folder: Path, name: str, body: str) -> Path:
    prelude = textwrap.dedent(PRELUDE)
    return write_script(folder, f"{name.replace(' ', '-')}.py", prelude + textwrap.dedent(body))


@pytest.fixture(scope="module")
def running() -> Iterator[Checked]:
    with checked_server(arena="64MiB", environment=ENVIRONMENT) as checked:
        # The large model needs all 62 MiB of the arena, so a job's slice must be evicted for it.
        for name, width in WIDTHS.items():
            module = mlp(width, 4, 1)
            checked.client.register(name, module, example_inputs=(torch.zeros(1, width),))
        yield checked


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the scripts; run each undisturbed, with its output in ``SCRIPT.plain``."""
    folder = tmp_path_factory.mktemp("exact")
    scripts = {name: script(folder, name, body) for name, body in EXACT.items()}
    for path in scripts.values():
        run_plain(path, f"{path}.plain")
    return scripts


@pytest.mark.parametrize("name", EXACT)
def test_an_odd_script_that_is_killed_and_evicted_ends_bit_equal(
    running: Checked, exact: dict[str, Path], name: str
) -> None:
    path, dice = exact[name], random.Random(SEED)
    out = Path(f"{path}.served")
    task = running.client.train(path, args=[str(out), "served"])
    for what in DISTURBANCES:
        until(lambda: task.status()["step"] > 0, "it trains")
        threading.Event().wait(dice.uniform(0.02, 0.1))  # a random instant, not a condition
        try:
            if what == "pause":
                task.pause()
                task.resume()
            else:
                running.client.infer(what, torch.ones(1, WIDTHS[what]))
        except InvalidInput:  # the job has ended already
            break
    row = finish(task)
    assert out.read_text() == Path(f"{path}.plain").read_text()
    assert row["restarts"] == 2
    assert row["evictions"] > 0
    assert row["suspensions"] > 0


@pytest.mark.parametrize("says", REFUSED)
def test_what_would_not_resume_exactly_is_refused_in_words(
    running: Checked, tmp_path: Path, says: str
) -> None:
    path = script(tmp_path, f"refused-{list(REFUSED).index(says)}", REFUSED[says])
    task = running.client.train(path, args=[str(tmp_path / "out"), "served"])
    with pytest.raises(TaskFailed, match=says):
        task.wait(60)


def test_what_a_script_does_wrong_is_told_where_it_was_typed(
    running: Checked, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput):
        running.client.train(write_script(tmp_path, "broken.py", "def f(:"))
    raises = write_script(tmp_path, "raises.py", "def go():\n    raise ValueError('mine')\ngo()\n")
    task = running.client.train(raises)
    with pytest.raises(TaskFailed, match="mine"):
        task.wait(60)
    log = "".join(task.logs())
    assert log.startswith(
        f'Traceback (most recent call last):\n  File "{raises}", line 3, in <module>\n'
    )
    assert log.count("ValueError: mine") == 1


def test_a_script_that_fails_at_once_fails_the_command(running: Checked, tmp_path: Path) -> None:
    script = write_script(tmp_path, "wants.py", "import sys\nsys.exit('wants: --data')\n")
    with pytest.raises(SystemExit) as ended:
        main(["--host", running.running.ipc_address, "train", str(script)])
    assert ended.value.code == TaskFailed.exit_code


def test_what_a_resumed_script_will_not_find_is_warned_of(running: Checked, tmp_path: Path) -> None:
    body = """
        model = net(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
        first = model.state_dict(); schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for a, b in job.steps(loader(), model=model, optimizer=optimizer):
            learn(model, optimizer, a, b)
    """
    task = running.client.train(script(tmp_path, "warned", body), args=[os.devnull])
    finish(task)
    log = "".join(task.logs())
    assert "Pass scheduler=" in log
    assert "model.0.weight, model.0.bias" in log
    assert "other tensors share this memory" in log
