"""Training jobs lose neither work nor state without a word, whatever the script keeps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pipeswitch import job
from pipeswitch.errors import TaskPreempted
from tests.process.test_training_exact import Crashed, FakeHost, HookedGate, begun, digest

Poke = Callable[[], None]
Script = Callable[[Poke], str]  # returns a digest of all that it ends with


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    job._install(None)


def plain(script: Script) -> str:
    job._install(None)
    return script(lambda: None)


def live(
    host: FakeHost, script: Script, *, evict_at: int = -1, crash_at: int = -1, every_ms: float = 1e9
) -> str:
    """One life of the script, which ends at the n-th layer or the n-th poke; "": it was ended."""
    random.seed()  # another process has other generators
    np.random.seed(random.randrange(1 << 30))
    torch.manual_seed(random.randrange(1 << 30))
    gate = HookedGate(lambda *_: None)
    gate.grant(1)
    gate.countdown = evict_at
    session = begun(host, gate, commit_every_ms=every_ms)
    pokes = 0

    def poke() -> None:
        nonlocal pokes
        pokes += 1
        if pokes == crash_at:
            raise Crashed

    try:
        ended = script(poke)
    except (TaskPreempted, Crashed) as end:
        if isinstance(end, Crashed):
            session._over = True
            host.crash()
        session.close()
        return ""
    session.finish()
    return ended


def data(count: int = 48) -> DataLoader[Any]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return DataLoader(TensorDataset(torch.randn(count, 6)), 8, shuffle=True)


# ------------------------------------------------------------------------------ optimizers


def late_optimizer(poke: Poke) -> str:
    """The second optimizer steps in the last epoch only."""
    loader, gen, dis = data(), nn.Linear(6, 6), nn.Linear(6, 1)
    og, od = torch.optim.Adam(gen.parameters(), 0.01), torch.optim.Adam(dis.parameters(), 0.01)
    for _ in job.epochs(3):
        for (a,) in job.steps(loader, model=[gen, dis], optimizer=[og, od]):
            og.zero_grad()
            F.l1_loss(gen(a), a).backward()
            og.step()
            if job.step >= 14:
                od.zero_grad()
                dis(gen(a).detach()).mean().backward()
                od.step()
    return digest(gen.state_dict(), dis.state_dict(), og.state_dict(), od.state_dict())


def gan(poke: Poke) -> str:
    loader, gen, dis = data(), nn.Linear(6, 6), nn.Linear(6, 1)
    od, og = torch.optim.Adam(dis.parameters(), 0.01), torch.optim.Adam(gen.parameters(), 0.01)
    for _ in job.epochs(3):
        for (a,) in job.steps(loader, model=[gen, dis], optimizer=[od, og]):
            dis.zero_grad()
            (dis(gen(a).detach()) - dis(a)).mean().backward()
            od.step()
            gen.zero_grad()
            (-dis(gen(a))).mean().backward()
            og.step()
    return digest(gen.state_dict(), dis.state_dict(), od.state_dict(), og.state_dict())


def critic_steps_more_often(poke: Poke) -> str:
    """WGAN: the generator steps in each fifth body."""
    loader, gen, dis = data(), nn.Linear(6, 6), nn.Linear(6, 1)
    od = torch.optim.RMSprop(dis.parameters(), 0.01)
    og = torch.optim.RMSprop(gen.parameters(), 0.01)
    for _ in job.epochs(3):
        for (a,) in job.steps(loader, model=[gen, dis], optimizer=[od, og]):
            od.zero_grad()
            (dis(gen(a).detach()) - dis(a)).mean().backward()
            od.step()
            if job.step % 5 == 4:
                og.zero_grad()
                (-dis(gen(a))).mean().backward()
                og.step()
    return digest(gen.state_dict(), dis.state_dict(), od.state_dict(), og.state_dict())


def evaluation_behind_the_step(poke: Poke) -> str:
    loader, net, ema = data(), nn.Linear(6, 6), nn.Linear(6, 6)
    opt = torch.optim.Adam(net.parameters(), 0.01)
    for _ in job.epochs(3):
        for (a,) in job.steps(loader, model=[net, ema], optimizer=opt):
            opt.zero_grad()
            F.mse_loss(net(a), a).backward()
            opt.step()
            with torch.no_grad():
                for mean, value in zip(ema.parameters(), net.parameters(), strict=True):
                    mean.lerp_(value, 0.1)
                ema(a)
    return digest(net.state_dict(), ema.state_dict(), opt.state_dict())


def accumulates(poke: Poke) -> str:
    loader, net = data(), nn.Linear(6, 6)
    opt = torch.optim.Adam(net.parameters(), 0.01)
    for _ in job.epochs(3):
        for (a,) in job.steps(loader, model=net, optimizer=opt):
            F.mse_loss(net(a), a).backward()
            if (job.step_in_epoch + 1) % 6 == 0:
                opt.step()
                opt.zero_grad()
    return digest(net.state_dict(), opt.state_dict())


def learns_late(poke: Poke) -> str:
    """Reinforcement learning: a memory is filled before the first step."""
    loader, net, note = data(), nn.Linear(6, 6), {"memory": []}
    opt = torch.optim.Adam(net.parameters(), 0.01)
    for _ in job.epochs(3):
        for (a,) in job.steps(loader, model=net, optimizer=opt, extra_state=note):
            note["memory"].append(net(a).detach().mean().item() + random.random())
            if job.step >= 12:
                opt.zero_grad()
                (net(a) * random.choice(note["memory"])).square().mean().backward()
                opt.step()
    return digest(net.state_dict(), opt.state_dict(), note)


OPTIMIZERS = [
    late_optimizer,
    gan,
    critic_steps_more_often,
    evaluation_behind_the_step,
    accumulates,
    learns_late,
]


@pytest.mark.parametrize("script", OPTIMIZERS, ids=lambda script: script.__name__)
def test_an_eviction_at_any_layer_loses_no_finished_step_and_ends_bit_equal(script: Script) -> None:
    expected = plain(script)
    host, lives, ended = FakeHost(), 0, ""
    while not ended:
        lives += 1
        assert lives < 60, "no progress"
        ended = live(host, script, evict_at=3 * lives % 13 + 4)
        if not ended:
            kind, said = host.events[-1]
            assert kind == "evicting"
            assert said["committed_step"] in (said["step"], None if said["step"] == 0 else -1)
    assert lives > 3
    assert ended == expected


@pytest.mark.parametrize("script", OPTIMIZERS, ids=lambda script: script.__name__)
def test_commits_go_on_whether_an_optimizer_has_stepped_or_not(script: Script) -> None:
    host = FakeHost()
    live(host, script, evict_at=-1, every_ms=1.0)
    steps = [said["step"] for kind, said in host.events if kind == "committed"]
    assert len(steps) > 8
    assert max(late - early for early, late in itertools.pairwise(steps)) <= 2
