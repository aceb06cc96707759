"""A resumed script finds the state of its epoch's beginning, and the same order of the data."""

from __future__ import annotations

import _thread
import itertools
import operator
import random
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset, WeightedRandomSampler

from pipeswitch import job
from pipeswitch.base.errors import HostStoreFull
from tests.process.test_training_exact import FakeHost, digest
from tests.process.test_training_state import Poke, Script, live, one_thread, plain

__all__ = ["one_thread"]
ROWS = 40


class ByLoss(Sampler[int]):
    """Sampler whose order depends on a network: when a pass begins, or at each index."""

    def __init__(self, net: nn.Module, x: torch.Tensor, late: bool = False) -> None:
        self.net, self.x, self.late = net, x, late

    def __len__(self) -> int:
        return len(self.x)

    @torch.no_grad()
    def order(self) -> list[int]:
        order: list[int] = self.net(self.x).sum(1).argsort().tolist()
        return order

    def __iter__(self) -> Iterator[int]:
        if not self.late:
            return iter(self.order())
        return (self.order()[index] for index in range(len(self.x)))


class Training:
    """Random script of the guide's shape, drawn from ``seed``."""

    def __init__(self, seed: int, poke: Poke) -> None:
        self.poke, dice = poke, random.Random(seed)
        torch.manual_seed(seed)
        random.seed(seed)
        self.x = torch.randn(ROWS, 4)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 2))
        self.target = nn.Linear(4, 2)
        self.note = {"size": 24, "sum": 0.0, "step": 0}
        self.weights = torch.ones(ROWS).double()
        self.own = [torch.Generator().manual_seed(seed + index) for index in range(2)]
        self.epochs, self.phases = dice.randint(2, 4), dice.choice([1, 1, 1, 2])
        self.tops = dice.sample(["labels", "size", "draws", "step", "target", "own"], 3)
        self.ends = dice.sample(["size", "sum", "target", "scale", "draws"], 2)
        kinds = dice.choices(["shuffle", "weights", "loss", "own", "list"], k=3)
        self.kinds = kinds[: dice.choice([1, 1, 1, 2, 3])]
        self.early, self.most = dice.choice([0, 0, 0, 3]), dice.choice([0, 0, 0, 4])
        self.opt = torch.optim.Adam(self.net.parameters(), 0.02)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.opt, 1, 0.9)

    def learn(self) -> str:
        for _ in range(self.phases):
            for _ in job.epochs(self.epochs):
                rows, self.labels = self.x, torch.zeros(ROWS, dtype=torch.long)
                for top in self.tops:
                    rows = self.top(top, rows)
                for kind in self.kinds:
                    self.loop(kind, rows)
                    with torch.no_grad():
                        self.labels = (self.net(self.x).sum(1) > self.note["sum"] / 9).long()
                for end in self.ends:
                    self.end(end)
                self.schedule.step()
                self.poke()
        states = [one.state_dict() for one in (self.net, self.target, self.opt)]
        draws = torch.rand(3), random.random(), [one.get_state() for one in self.own]
        return digest(states, self.note, self.weights, self.labels, draws, job.step)

    @torch.no_grad()
    def top(self, top: str, rows: torch.Tensor) -> torch.Tensor:
        if top == "labels":
            self.labels = self.net(self.x).argmax(1)
        elif top == "size":
            return rows[: int(self.note["size"])]
        elif top == "draws":
            return rows + 0.1 * torch.randn(()) + random.random()
        elif top == "step":
            self.note["step"] += job.step
        elif top == "target":
            return rows + self.target(self.x[:1]).sum()
        else:
            return rows * torch.rand((), generator=self.own[0])
        return rows

    @torch.no_grad()
    def end(self, end: str) -> None:
        if end == "size":
            self.note["size"] = min(ROWS, self.note["size"] + 4)
        elif end == "sum":
            self.note["sum"] *= 0.5
        elif end == "target":
            self.target.weight.add_(self.net[3].weight.sum())
        elif end == "scale":
            self.net[0].weight.mul_(0.9)
        else:
            torch.rand(2)

    def loader(self, kind: str, rows: torch.Tensor) -> Any:
        data = TensorDataset(torch.arange(len(rows)), rows, self.labels[: len(rows)])
        sampler: Any = None
        if kind == "weights":
            sampler = WeightedRandomSampler(self.weights[: len(rows)], len(rows))  # type: ignore[arg-type]
        elif kind == "loss":
            sampler = ByLoss(self.net, rows)
        own = self.own[len(self.kinds) % 2] if kind == "own" else None
        loader = DataLoader(
            data, 4, shuffle=kind in ("shuffle", "own"), sampler=sampler, generator=own
        )
        return list(loader) if kind == "list" else loader

    def loop(self, kind: str, rows: torch.Tensor) -> None:
        steps = job.steps(
            self.loader(kind, rows),
            model=[self.net, self.target],
            optimizer=self.opt,
            scheduler=self.schedule,
            extra_state={"note": self.note, "w": self.weights, "g": self.own[0], "h": self.own[1]},
        )
        if self.most:
            steps = itertools.islice(steps, self.most)
        for index, x, y in steps:
            self.poke()
            self.opt.zero_grad()
            loss = F.cross_entropy(self.net(x), y, reduction="none")
            loss.mean().backward()
            self.opt.step()
            self.poke()
            self.weights[index] = loss.detach().double() + 0.1
            self.note["sum"] += loss.mean().item()
            if self.early and job.step_in_epoch == self.early:
                break


def drawn(seed: int) -> Script:
    return lambda poke: Training(seed, poke).learn()


def disturbed(script: Script, seed: int, host: FakeHost | None = None) -> tuple[str, int]:
    """Return the script's end and its number of lives, with evictions and kills at random."""
    dice, host, ended, lives = random.Random(seed), host or FakeHost(), "", 0
    every_ms = dice.choice([1.0, 9.0, 40.0, 150.0])
    while not ended:
        lives += 1
        assert lives < 90, "no progress"
        is_evicted = dice.random() < 0.4
        at = {"evict_at": dice.randint(5, 90)} if is_evicted else {"crash_at": dice.randint(5, 60)}
        ended = live(host, script, **at, every_ms=every_ms)
    return ended, lives


@pytest.mark.parametrize("seed", range(30))
def test_a_script_of_the_guides_shape_ends_bit_equal(seed: int) -> None:
    assert disturbed(drawn(seed), seed)[0] == plain(drawn(seed))


def trained(steps: Any, poke: Poke, net: nn.Module, opt: torch.optim.Optimizer) -> None:
    for _, x in steps:
        poke()
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step()


def scene(seed: int = 3) -> tuple[torch.Tensor, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Linear(4, 1)
    return torch.randn(ROWS, 4), net, torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)


def rows_of(x: torch.Tensor, **how: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(len(x)), x), 4, **how)


def made_in_the_epoch(poke: Poke) -> str:
    """New objects under old names, a loop's variables that hide optimizers, and parts in lists."""
    x, net, opt = scene()
    nets, sums, memory = [net, nn.Linear(4, 1)], {"x": 0.0}, [torch.zeros(4)]
    opts = [opt, torch.optim.SGD(nets[1].parameters(), 0.02)]
    for _ in job.epochs(4):
        sums = {"x": sums["x"] + net(x).sum().item()}
        for one, opt in zip(nets, opts, strict=True):
            opt.zero_grad()
            one(x + memory[0]).mean().backward()
            opt.step()
        state = {"sums": sums, "deep": {"memory": [memory[0], {"again": memory}]}}
        for _, a in job.steps(
            rows_of(x, shuffle=True), model=nets, optimizer=opts, extra_state=state
        ):
            poke()
            for one, opt in zip(nets, opts, strict=True):
                opt.zero_grad()
                one(a).square().mean().backward()
                opt.step()
            sums["x"] += a.sum().item()
            memory[0] += a.mean(0)
    return digest([one.state_dict() for one in nets], sums, memory)


def left_between_phases(poke: Poke) -> str:
    """A first phase that is left early, and whose last epoch's labels the next one uses."""
    x, net, opt = scene()
    labels = x[:, :1]
    for epoch in job.epochs(6):
        labels = net(x).detach()
        steps = job.steps(rows_of(x, shuffle=True), model=net, optimizer=opt)
        trained(steps, poke, net, opt)
        with torch.no_grad():
            net.weight.mul_(0.9)
        if epoch == 5:
            break
    for _ in job.epochs(2):
        steps = job.steps(rows_of(x + labels, shuffle=True), model=net, optimizer=opt)
        trained(steps, poke, net, opt)
    return digest(net.state_dict(), labels)


def two_loaders_of_their_own(poke: Poke) -> str:
    x, net, opt = scene()
    loaders = [rows_of(x, shuffle=True, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
    for _ in job.epochs(3):
        for loader in loaders:
            trained(job.steps(loader, model=net, optimizer=opt), poke, net, opt)
    return digest(net.state_dict())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "script",
    [made_in_the_epoch, left_between_phases, two_loaders_of_their_own],
    ids=lambda one: one.__name__,
)
def test_objects_are_found_wherever_the_script_has_them(script: Script, seed: int) -> None:
    assert disturbed(script, seed)[0] == plain(script)


def test_parts_of_a_subset_that_grows_may_be_passed_as_extra_state() -> None:
    def script(poke: Poke) -> str:
        x, net, opt = scene()
        data = TensorDataset(torch.arange(ROWS), x)
        easy = Subset(data, list(range(12)))
        for _ in job.epochs(4):
            loader = DataLoader(easy, 4, shuffle=True)
            state = {"indices": easy.indices}
            steps = job.steps(loader, model=net, optimizer=opt, extra_state=state)
            trained(steps, poke, net, opt)
            easy.indices = list(range(len(easy) + 9))
        return digest(net.state_dict())

    for seed in range(4):
        assert disturbed(script, seed)[0] == plain(script)


def crashed(script: Script, crash_at: int, host: FakeHost | None = None) -> list[str]:
    """Return the warnings of a script's second life."""
    host = host or FakeHost()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not live(host, script, crash_at=crash_at, every_ms=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert live(host, script, every_ms=1.0)
    texts = [str(one.message) for one in caught if one.category is job.InexactResumeWarning]
    return [one for one in texts if "changes this" not in one]


def wrapped(wrap: Any, *, at_end: int = 0) -> Script:
    def script(poke: Poke) -> str:
        x, net, opt = scene()
        for _ in job.epochs(2):
            steps = job.steps(rows_of(x), model=net, optimizer=opt)
            for index, one in enumerate(wrap(steps)):
                batch = one if isinstance(one, list) else next(a for a in one if type(a) is list)
                trained([batch], poke, net, opt)
                assert index < 10
        return digest(net.state_dict(), job.step)

    return script


@pytest.mark.parametrize(
    ("wrap", "warned"),
    [
        (lambda steps: itertools.islice(steps, 6), ""),
        (lambda steps: itertools.islice(steps, 0, 5), ""),
        (lambda steps: itertools.islice(steps, None), ""),
        (lambda steps: itertools.islice(steps, 1, 6), "islice"),
        (lambda steps: itertools.islice(steps, 0, 9, 2), "islice"),
        (enumerate, "enumerate"),
        (lambda steps: zip(range(9), steps, strict=False), "zip"),
        (lambda steps: (one for one in steps), "enumerate"),
    ],
)
def test_what_counts_batches_takes_the_rest_or_is_warned_of(wrap: Any, warned: str) -> None:
    messages = crashed(wrapped(wrap), 3)
    assert [f"{warned}(job.steps(…)) counts" in one for one in messages] == [True] * bool(warned)
    if not warned:
        assert disturbed(wrapped(wrap), 1)[0] == plain(wrapped(wrap))


def late_order(poke: Poke) -> str:
    x, net, opt = scene()
    loader = rows_of(x, sampler=ByLoss(net, x, late=True))
    for _ in job.epochs(3):
        trained(job.steps(loader, model=net, optimizer=opt), poke, net, opt)
    return "ended"


def shrinks(poke: Poke) -> str:
    x, net, opt = scene()
    easy = Subset(TensorDataset(torch.arange(ROWS), x), [*range(12)])
    for _ in job.epochs(2):
        loader = DataLoader(easy, 4)
        trained(job.steps(loader, model=net, optimizer=opt), poke, net, opt)
        easy.indices = [*range(ROWS)]
    return "ended"


def made_late(poke: Poke) -> str:
    x, net, opt = scene()
    net = None  # type: ignore[assignment]
    for _ in job.epochs(3):
        if net is None:
            _, net, opt = scene()
        trained(job.steps(rows_of(x), model=net, optimizer=opt), poke, net, opt)
    return "ended"


@pytest.mark.parametrize(
    ("script", "crash_at", "text"),
    [
        (late_order, 6, "reads state while it iterates"),
        (shrinks, 2, ""),
        (shrinks, 5, "now has 3"),
        (shrinks, 11, "has fewer now"),
        (made_late, 18, "Create models, optimizers and schedulers before"),
    ],
)
def test_what_cannot_be_restored_is_warned_of(script: Script, crash_at: int, text: str) -> None:
    messages = crashed(script, crash_at)
    assert [text in one for one in messages] == [True] * bool(text), messages


def test_without_room_commits_are_made_between_epochs() -> None:
    class FullHost(FakeHost):
        def lease(self, slice_bytes: int, state_bytes: int, **kept: bool) -> torch.Tensor:
            if kept:
                raise HostStoreFull("full")
            return super().lease(slice_bytes, state_bytes, **kept)

    host = FullHost()
    with pytest.warns(UserWarning, match="only between epochs"):
        assert live(host, drawn(0), every_ms=1.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "commits are made only")
        assert disturbed(drawn(0), 0, FullHost())[0] == plain(drawn(0))


@pytest.mark.parametrize("kind", ["steps", "epochs"])
def test_a_loop_may_be_closed_where_no_python_code_runs(kind: str) -> None:
    is_closed = threading.Event()

    def script(poke: Poke) -> str:
        net = nn.Linear(6, 1)
        opt = torch.optim.SGD(net.parameters(), 0.1)
        epochs = job.epochs(2)
        next(epochs)
        steps = job.steps([torch.ones(2, 6)], model=net, optimizer=opt)
        next(steps)
        todo = [steps.close, *([] if kind == "steps" else [epochs.close]), is_closed.set]
        _thread.start_new_thread(deque[None](maxlen=0).extend, (map(operator.call, todo),))
        return str(is_closed.wait(30))

    assert live(FakeHost(), script) == "True"
