"""A job whose memory requests need is swapped out and in: its script does not notice (ADR 64)."""

from __future__ import annotations

import contextlib
import functools
import random
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import process_tools as tools
import pytest
import torch

from pipeswitch.base.errors import PipeSwitchError
from pipeswitch.base.failpoints import VARIABLE
from pipeswitch.client.client import FINAL_JOB_STATES, Task
from tests.process.figures import publishing, say
from tests.process.test_server_soak import holdings, processes

SEED: Final = 53
ARENA: Final = "6MiB"  # 2 MiB of fences, and room either for the model or for a job
WIDTH: Final = 512
ENVIRONMENT: Final = {"PIPESWITCH_SCHEDULER__COMMIT_EVERY": "50ms"}

SCRIPT: Final = """
import contextlib, copy, hashlib, itertools, os, queue, random, socket, subprocess, sys, threading
import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler
from pipeswitch import job

OUT, EPOCHS = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
net = nn.Sequential(
    nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 64)
).to(job.device)
opt = torch.optim.Adam(net.parameters(), 0.001)
data = TensorDataset(torch.randn(160, 64))
loader = DataLoader(data, 16, shuffle=True)
log = open(OUT + ".log", "w")
kept, ends = [], []

def learn(x, compute=net):
    loss = (compute(x) - x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()

BEFORE
for epoch in job.epochs(10**9):
    if epoch == EPOCHS or os.path.exists(OUT + ".enough"):
        break
    for (x,) in job.steps(loader, model=net, optimizer=opt):
        STEP
    AFTER
for end in ends:
    end()
log.close()
total = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
total.update(repr((random.getstate(), np.random.get_state(), kept)).encode())
for tensor in net.state_dict().values():
    total.update(tensor.detach().numpy().tobytes())
with open(OUT, "w") as file:
    file.write(f"{total.hexdigest()} {job.step} {epoch}")
"""

NOISY: Final = """
class Noisy(Dataset):
    own, calls = torch.Generator().manual_seed(7), 0
    def __len__(self):
        return 160
    def __getitem__(self, index):
        self.calls += 1
        noise = torch.randn(64, generator=self.own) + torch.randn(64)
        return (data[index][0] + 0.01 * noise * (self.calls % 5),)
"""
SCRIPTS: Final = {
    "files": (
        "rows = open(OUT + '.rows', 'a')",
        "print(job.step, learn(x).hex(), file=log); rows.write(f'{job.step}\\n')",
        "rows.flush()",
    ),
    "subprocess": (
        "code = 'import sys\\nn = 0.0\\nfor line in sys.stdin:\\n n += float(line)\\n"
        " print(n.hex(), flush=True)'\n"
        "pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)\n"
        "child = subprocess.Popen([sys.executable, '-c', code], **pipes)\n"
        "ends.append(child.communicate)",
        "print(learn(x), file=child.stdin, flush=True); kept.append(child.stdout.readline())",
        "",
    ),
    "workers": (
        NOISY + "loader = DataLoader(Noisy(), 16, True, num_workers=2, persistent_workers=True)",
        "kept.append(learn(x))",
        "",
    ),
    "gan": (
        "other = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))\n"
        "net = nn.ModuleList([net, other])\n"
        "opt = [torch.optim.Adam(net[0].parameters()), torch.optim.RMSprop(other.parameters())]",
        "kept.append(0.0)\n"
        "fake = net[0](torch.randn_like(x))\n"
        "for one in (1, 0):\n"
        "    loss = (other(fake.detach()) - other(x)).mean() if one else -other(fake).mean()\n"
        "    opt[one].zero_grad(); loss.backward(); opt[one].step(); kept[-1] += loss.item()",
        "",
    ),
    "checkpoints": (
        "",
        "learn(x)",
        "net.eval(); kept.append(net(data[:][0]).sum().item()); net.train()\n"
        "torch.save([net.state_dict(), opt.state_dict()], f'{OUT}.{epoch % 3}.pt')",
    ),
    "counters": (
        "nn.calls = 0",
        "nn.calls += 1; kept.append((nn.calls, learn(x * (1 + nn.calls % 3))))",
        "",
    ),
    "socket": (
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "def echo(theirs):\n"
        "    while text := theirs.recv(100):\n"
        "        theirs.sendall(text.upper())\n"
        "serve = lambda: echo(listener.accept()[0])\n"
        "thread = threading.Thread(target=serve); thread.start()\n"
        "ours = socket.create_connection(listener.getsockname())\n"
        "ends += [ours.close, thread.join, listener.close]",
        "ours.sendall(learn(x).hex().encode()); kept.append(ours.recv(100))",
        "",
    ),
    "thread": (
        "losses = queue.Queue()\n"
        "def write():\n"
        "    for number, loss in enumerate(iter(losses.get, None)):\n"
        "        print(number, loss.hex(), file=log)\n"
        "writer = threading.Thread(target=write); writer.start()\n"
        "ends += [lambda: losses.put(None), writer.join]",
        "losses.put(learn(x))",
        "",
    ),
    "iterators": (
        "halves = (i * 0.5 for i in itertools.count())\n"
        "walk = itertools.cycle(np.random.default_rng(3).permutation(1000))\n"
        "def averages():\n"
        "    mean = 0.0\n"
        "    while True:\n"
        "        mean = 0.9 * mean + 0.1 * (yield mean)\n"
        "average = averages(); next(average)",
        "kept.append(average.send(learn(x * (next(halves) % 2) + float(next(walk)) / 1000)))",
        "",
    ),
    "environment": (
        "class World:\n"
        "    rng, place = np.random.default_rng(5), np.zeros(64, np.float32)\n"
        "    def step(self, force):\n"
        "        self.place += force + self.rng.normal(0, 0.01, 64).astype(np.float32)\n"
        "        return torch.from_numpy(np.tanh(self.place))\n"
        "world = World()",
        "kept.append(learn(x + world.step(net(x).mean().item())))",
        "kept.append(world.place.tolist())",
    ),
    "augmentation": (NOISY + "loader = DataLoader(Noisy(), 16, shuffle=True)", "learn(x)", ""),
    "average": (
        "slow = copy.deepcopy(net); mean = torch.optim.swa_utils.AveragedModel(net)",
        "learn(x); mean.update_parameters(net)\n"
        "with torch.no_grad():\n"
        "    for a, b in zip(slow.parameters(), net.parameters()): a.lerp_(b, 0.01)",
        "kept.append([p.sum().item() for p in (*slow.parameters(), *mean.parameters())])",
    ),
    "sampler": (
        "weights = WeightedRandomSampler([1.0] * 160, 160)\n"
        "loader = DataLoader(data, 16, sampler=weights)",
        "weights.weights[job.step % 160] += learn(x)",
        "kept.append(weights.weights.tolist())",
    ),
    "accumulation": (
        "",
        "opt.zero_grad()\nfor part in x.chunk(4): net(part).square().mean().backward()\nopt.step()",
        "",
    ),
    "saved": (
        "hooks = torch.autograd.graph.saved_tensors_hooks\n"
        "pack, offload = lambda t: t.numpy(force=True).copy(), torch.autograd.graph.save_on_cpu",
        "with hooks(pack, torch.from_numpy) if job.step % 2 else offload(): learn(x)",
        "",
    ),
    "recomputation": ("", "learn(x, lambda x: checkpoint(net, x, use_reentrant=False))", ""),
    "closure": (
        "net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 64))\n"
        "opt = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=3, history_size=4)",
        "def closure():\n"
        "    opt.zero_grad()\n"
        "    loss = (net(x) - x).square().mean()\n"
        "    loss.backward()\n"
        "    return loss\n"
        "opt.step(closure)",
        "",
    ),
    "autocast": ("", "with torch.autocast('cpu', torch.bfloat16): learn(x)", ""),
    "norms": (
        "",
        "learn(x); print(*(p.norm().item().hex() for p in net.parameters()), file=log)",
        "print(*(b.double().sum().item().hex() for b in net.buffers()), file=log)",
    ),
    "hidden": (
        "net = nn.GRU(64, 64); state = None\n"
        "opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)",
        "out, new = net(x[None], state); state = new.detach()\n"
        "opt.zero_grad(); (out - x).square().mean().backward(); opt.step()",
        "",
    ),
    "large": (
        "net = nn.Sequential(nn.Linear(64, 1400), nn.ReLU(), nn.Linear(1400, 64))\n"
        "opt = torch.optim.Adam(net.parameters())",
        "kept.append(learn(x))",
        "",
    ),
    "penalty": (
        "",
        "x.requires_grad_(); y = net(x).square().mean()\n"
        "(slope,) = torch.autograd.grad(y, x, create_graph=True)\n"
        "opt.zero_grad(); (y + slope.square().sum()).backward(); opt.step()",
        "",
    ),
}
"""Scripts by what a second run of them would lose: code before the loop, in a step, and after each
epoch."""
SWAPS: Final = 6
QUICK: Final = ("files", "subprocess", "workers", "gan", "checkpoints")


def write(folder: Path, name: str) -> Path:
    source = SCRIPT
    for place, code in zip(("BEFORE", "        STEP", "    AFTER"), SCRIPTS[name], strict=True):
        indent = place[: len(place) - len(place.lstrip())]
        source = source.replace(place, "\n".join(indent + line for line in code.splitlines()))
    return tools.write_script(folder, f"train-{name}.py", source)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".enough"}


def has_trained(task: Task, step: int) -> bool:
    row = task.status()
    assert row["state"] not in FINAL_JOB_STATES, (row, "".join(task.logs()))
    return bool(row["step"] > step)


class Requests:
    """Requests at random moments, each of which needs the memory of the job that trains."""

    def __init__(self, checked: tools.Checked) -> None:
        self.checked, self.random = checked, random.Random(SEED)
        self.x = torch.ones(1, WIDTH)
        checked.client.register("large", tools.mlp(WIDTH, 3, 1), example_inputs=(self.x,))
        self.answer = checked.client.infer("large", self.x)["y"]

    def one(self) -> None:
        assert torch.equal(self.checked.client.infer("large", self.x)["y"], self.answer)

    def swap(self, task: Task, swaps: int) -> dict[str, Any]:
        """Send requests until the job has been swapped so often; return its row."""
        while (row := task.status())["swaps"] < swaps:
            tools.until(lambda: has_trained(task, row["step"]), f"{task.name} trains")
            threading.Event().wait(self.random.uniform(0, 0.03))  # a random instant
            self.one()
        return row


@pytest.fixture(scope="module")
def requests() -> Iterator[Requests]:
    with tools.checked_server(arena=ARENA, environment=ENVIRONMENT) as checked:
        yield Requests(checked)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SCRIPTS],
)
def test_a_swapped_script_goes_on_as_if_nothing_had_happened(
    requests: Requests, tmp_path: Path, name: str
) -> None:
    """Run a script with swaps at random moments, then plainly; compare all that it leaves."""
    script, out = write(tmp_path, name), {}
    for way in ("served", "plain"):
        (tmp_path / way).mkdir()
        out[way] = tmp_path / way / "out"
    task = requests.checked.client.train(script, name=name, args=[str(out["served"]), "-1"])
    requests.swap(task, SWAPS)
    out["served"].with_suffix(".enough").touch()
    row = tools.finish(task)
    assert (row["evictions"], row["restarts"], row["steps_recomputed"]) == (0, 0, 0), row
    assert row["swaps"] >= SWAPS
    tools.run_plain(script, str(out["plain"]), out["served"].read_text().split()[-1])
    assert files(out["served"].parent) == files(out["plain"].parent)


# ---- faults ----------------------------------------------------------------------------------

QUICK_FAULTS: Final = ("worker in swapped", "daemon in swapping_in")
HOLDS: Final = {"swapping_out": "daemon.slice.out", "swapping_in": "daemon.slice.in"}
"""Where the daemon waits while a job is in a state; a pinned model holds it in ``swapped``."""


class Faults(Requests):
    """A server with failpoints, and a job that is made to enter a state and stay in it."""

    def __init__(self, checked: tools.Checked, folder: Path) -> None:
        super().__init__(checked)
        self.folder, self.points = folder, folder / "points"

    def start(self, name: str) -> Task:
        (self.folder / name).mkdir()
        script = write(self.folder / name, "recomputation")
        task = self.checked.client.train(
            script, name=name, args=[str(self.folder / name / "out"), "-1"]
        )
        tools.until(lambda: has_trained(task, 20), "it trains")
        return task

    def arm(self, point: str, action: str) -> Path:
        """Arm a failpoint. The rename makes the whole file visible at once."""
        draft = self.points / f".{point}"
        draft.write_text(action)
        return draft.rename(self.points / point)

    def fires(self, point: str, action: str) -> None:
        armed = self.arm(point, action)
        self.one()
        tools.until(lambda: not armed.exists(), f"{point} is reached")

    @contextlib.contextmanager
    def held(self, task: Task, state: str) -> Iterator[None]:
        """Bring the job into a state, in which it is during the block."""
        armed = self.arm(HOLDS[state], "delay 1000") if state in HOLDS else None
        request = self.checked.client.submit("large", self.x)
        if armed is None:
            self.checked.client.load("large")
        tools.until(lambda: task.status()["state"] == state, f"it is {state}")
        tools.until(lambda: armed is None or not armed.exists(), f"the daemon waits in {state}")
        yield
        request.result(60)
        if armed is None:
            self.checked.client.unload("large")

    def finish(self, task: Task) -> dict[str, Any]:
        """Let the job train on and end; it must have the plain run's weights. Return its row."""
        tools.until(
            functools.partial(has_trained, task, task.status()["step"] + 20), "it trains again"
        )
        out = self.folder / task.name / "out"
        out.with_suffix(".enough").touch()
        row = tools.finish(task)
        epochs = out.read_text().split()[-1]
        plain = out.with_name("plain")
        tools.run_plain(out.with_name("train-recomputation.py"), str(plain), epochs)
        assert out.read_text() == plain.read_text()
        return row


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "points").mkdir()
    environment = {
        **ENVIRONMENT,
        VARIABLE: str(folder / "points"),
        "PIPESWITCH_WORKERS__RESTART_BACKOFF": "20ms",
        "PIPESWITCH_SCHEDULER__EVICT_GRACE": "3s",
    }
    with tools.checked_server(arena=ARENA, environment=environment) as checked:
        yield Faults(checked, folder)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in QUICK_FAULTS else pytest.mark.slow)
        for state in ("swapping_out", "swapped", "swapping_in")
        for case in (f"worker in {state}", f"daemon in {state}")
    ],
)
def test_a_kill_in_each_state_loses_only_steps_after_the_last_commit(
    faults: Faults, case: str
) -> None:
    victim, state = case.split(" in ")
    task = faults.start(case.replace(" ", "-"))
    with faults.held(task, state):
        pids = {
            "worker": faults.checked.row(task.name)["pid"],
            "daemon": faults.checked.daemon_pid(),
        }
        assert tools.kill(pids[victim])
        tools.until(lambda: task.status()["restarts"] == 1, "its process has ended")
    row = faults.finish(task)
    assert (row["restarts"], row["evictions"]) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["crash", "stop", "disk", "error"])
@pytest.mark.parametrize(
    "point", ["job.hidden", "daemon.slice.out", "daemon.slice.done", "daemon.slice.in"]
)
def test_a_fault_at_each_point_of_a_swap_loses_no_step_of_the_last_commit(
    faults: Faults, point: str, action: str
) -> None:
    task = faults.start(f"{point}-{action}")
    faults.fires(point, action)
    assert faults.finish(task)["restarts"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("state", ["swapping_out", "swapped", "swapping_in"])
@pytest.mark.parametrize("order", ["pause", "cancel"])
def test_an_order_in_each_state_is_carried_out(faults: Faults, order: str, state: str) -> None:
    task = faults.start(f"{order}-{state}")
    with faults.held(task, state):
        getattr(task, order)()
    if order == "cancel":
        tools.until(lambda: task.status()["state"] == "cancelled", "it is cancelled")
        return
    tools.until(lambda: task.status()["state"] == "paused", "it is paused")
    task.resume()
    faults.finish(task)


@pytest.mark.slow
def test_a_request_during_the_copy_in_turns_it_round(faults: Faults) -> None:
    task = faults.start("turns")
    with faults.held(task, "swapping_in"):
        swaps = task.status()["swaps"]
        faults.one()
        assert task.status()["swaps"] == swaps
    assert faults.finish(task)["steps_recomputed"] == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"environment": {"PIPESWITCH_SCHEDULER__MAX_SWAPPED": "0"}}, "max_swapped is 0"),
        pytest.param({"host_store": "6MiB"}, "the host store has", marks=pytest.mark.slow),
    ],
)
def test_a_job_that_may_not_be_swapped_is_evicted_and_says_why(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    environment = {**ENVIRONMENT, **options.pop("environment", {})}
    with tools.checked_server(arena=ARENA, environment=environment, **options) as checked:
        faults = Faults(checked, tmp_path)
        task = faults.start("stays")
        records = checked.client.events("job.evicting", timeout_s=tools.DEADLINE_S)
        faults.one()
        assert why in next(records)["cause"]
        row = faults.finish(task)
        assert (row["swaps"], row["evictions"], row["restarts"]) == (0, 1, 0), row


def places(pid: int) -> set[str]:
    """Return the offsets in the arena of the slice that a job's process has mapped."""
    with contextlib.suppress(FileNotFoundError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        slices = [line for line in lines if "pipeswitch-work" in line and " rw-s " in line]
        return {line.split()[2] for line in slices}
    return set()


@pytest.mark.slow
def test_three_jobs_in_memory_for_two_swap_each_other_and_move(tmp_path: Path) -> None:
    with tools.checked_server(arena="10MiB", environment=ENVIRONMENT) as checked:
        script, tasks, seen = write(tmp_path, "large"), [], defaultdict(set)
        outs = [tmp_path / str(number) / "out" for number in range(3)]
        for out in outs:
            out.parent.mkdir()
            tasks.append(checked.client.train(script, name=out.parent.name, args=[str(out), "-1"]))

        def have_moved() -> bool:
            for task in tasks:
                assert task.status()["state"] not in FINAL_JOB_STATES, "".join(task.logs())
                seen[task.name] |= places(checked.row(task.name)["pid"])
            return all(len(seen[task.name]) > 1 for task in tasks)

        tools.until(have_moved, "each job's slice has been at two places", 200)
        for out in outs:
            out.with_suffix(".enough").touch()
        rows = [tools.finish(task) for task in tasks]
    assert all((row["evictions"], row["steps_recomputed"]) == (0, 0) for row in rows), rows
    for out in outs:
        tools.run_plain(script, str(out.with_name("plain")), out.read_text().split()[-1])
        assert out.read_text() == out.with_name("plain").read_text()


def held_by(pids: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return each process's memory and its numbers of descriptors, threads and mappings."""
    maps = {name: Path(f"/proc/{pid}/maps").read_text().count("\n") for name, pid in pids.items()}
    return {
        name: {**holdings(pid), "mappings": maps[name], "KiB": tools.rss_bytes(pid) >> 10}
        for name, pid in pids.items()
    }


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_thousand_swaps_grow_nothing(tmp_path: Path) -> None:
    with (
        publishing("swaps") as figures,
        tools.checked_server(arena=ARENA, environment=ENVIRONMENT) as checked,
    ):
        requests = Requests(checked)
        script = write(tmp_path, "accumulation")
        task = checked.client.train(script, name="soak", args=[str(tmp_path / "out"), "-1"])
        requests.swap(task, 100)
        pids = {**processes(checked), "job": checked.row("soak")["pid"]}
        before, free = held_by(pids), checked.stats()
        for swaps in range(200, 2_001, 100):
            requests.swap(task, swaps)
            say(f"{swaps} swaps: {held_by(pids)}")
        after = held_by(pids)
        figures.update(before=before, after=after)
        grown = {
            (name, kind): after[name][kind] - count
            for name, held in before.items()
            for kind, count in held.items()
            if after[name][kind] > count
        }
        allowed = {"KiB": 16 << 10, "mappings": 20, "descriptors": 1}
        assert all(count <= allowed.get(kind, 0) for (_, kind), count in grown.items()), grown
        assert checked.stats()["store_free_bytes"] == free["store_free_bytes"]
        assert task.status()["steps_recomputed"] == 0
        task.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("state", ["swapping_out", "swapped", "swapping_in"])
def test_a_job_outlives_its_server_in_each_state(tmp_path: Path, state: str) -> None:
    options = {"arena": ARENA, "state_dir": tmp_path / "state"}
    (tmp_path / "points").mkdir()
    environment = {**ENVIRONMENT, VARIABLE: str(tmp_path / "points")}
    with tools.checked_server(
        settles=False, status=-signal.SIGKILL, environment=environment, **options
    ) as checked:
        faults = Faults(checked, tmp_path)
        task = faults.start("outlives")
        tools.until(lambda: task.status()["persisted_step"] > 0, "a commit is on disk")
        with contextlib.suppress(PipeSwitchError), faults.held(task, state):
            tools.kill(checked.pid)
    with tools.checked_server(**options) as checked:
        checked.client.unload("large")
        faults.checked = checked
        faults.finish(checked.client.task("outlives"))
