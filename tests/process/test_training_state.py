"""Training jobs keep all work and state of any script, or a message names what they lose."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import os
import random
import subprocess
import sys
import textwrap
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
from tqdm import tqdm

from pipeswitch import job
from pipeswitch.base import errors
from pipeswitch.commits.weights import weights_of
from tests.process.test_training_exact import Crashed, FakeHost, HookedGate, Outside, begun, digest
from tests.process.test_training_exact import one_thread as one_thread
from tests.process.tools import checked_server, finish, run_plain, until, write_script

Poke = Callable[[], None]
Script = Callable[[Poke], str]  # returns a digest of its final state


def plain(script: Script) -> str:
    job._install(None)
    return script(lambda: None)


def live(
    host: FakeHost,
    script: Script,
    *,
    evict_at: int = -1,
    crash_at: int = -1,
    every_ms: float = 1e9,
    **options: Any,
) -> str:
    """Run one life of the script; return "" if layer ``evict_at`` or poke ``crash_at`` ends it."""
    random.seed()  # another process has other random states
    np.random.seed(random.randrange(1 << 30))
    torch.manual_seed(random.randrange(1 << 30))
    gate = HookedGate(lambda *_: None)
    gate.grant(1)
    gate.countdown = evict_at
    session = begun(host, gate, commit_every_ms=every_ms, **options)
    pokes = 0

    def poke() -> None:
        nonlocal pokes
        pokes += 1
        if pokes == crash_at:
            raise Crashed

    try:
        ended = script(Outside(poke))
    except (errors.TaskPreempted, Crashed) as end:
        if isinstance(end, Crashed):
            session.place.is_over = True
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
    """Step the second optimizer only in the last epoch."""
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
    """Train a WGAN, whose generator steps in every fifth iteration."""
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
    """Fill a replay memory before the first optimizer step, as in reinforcement learning."""
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


class Odd(torch.optim.Optimizer):
    """Optimizer whose parameters share a tensor, and which swaps or replaces two other states."""

    def __init__(self, parameters: Any, swaps: bool | str) -> None:
        super().__init__(parameters, {})
        self.swaps = swaps

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        if not self.state:
            count = torch.zeros(())
            for one in parameters:
                new, old = torch.zeros_like(one), torch.zeros_like(one)
                self.state[one] = {"count": count, "new": new, "old": old}
        self.state[parameters[0]]["count"] += 1
        for one in parameters:
            state = self.state[one]
            if self.swaps and one.numel():
                if self.swaps == "data":
                    state["new"].data, state["old"].data = state["old"].data, state["new"].data
                else:
                    state["new"], state["old"] = state["old"], state["new"]
                state["new"].copy_(one.grad)
            else:
                state["new"], state["old"] = one.grad.clone(), state["new"]
            one.sub_((state["new"] + 0.5 * state["old"]) / (10 + state["count"]))


class WithEmpty(nn.Linear):
    """Linear layer with a parameter of no bytes, whose states lie where the next ones begin."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.a_first = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.a_first.sum()


def shares_and_swaps(poke: Poke, swaps: bool | str = True) -> str:
    loader, net = data(), nn.Sequential(WithEmpty(), nn.Linear(6, 6))
    opt = Odd(net.parameters(), swaps)
    for _ in job.epochs(3):
        for (a,) in job.steps(loader, model=net, optimizer=opt):
            trained(a, net, opt)
    return digest(net.state_dict(), opt.state_dict())


def shares_and_replaces(poke: Poke) -> str:
    return shares_and_swaps(poke, swaps=False)


def shares_and_swaps_data(poke: Poke) -> str:
    return shares_and_swaps(poke, swaps="data")


def swaps_buffers(poke: Poke) -> str:
    """Exchange two layers' buffers, one of them through ``.data``."""
    loader, net = data(), nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6))
    opt, one, other = torch.optim.SGD(net.parameters(), 0.05), net[0], net[2]
    for _ in job.epochs(3):
        for (a,) in job.steps(loader, model=net, optimizer=opt):
            trained(a, net, opt)
            one.running_mean, other.running_mean = other.running_mean, one.running_mean
            if job.step % 2 == 0:
                mine, theirs = one.running_var, other.running_var
                mine.data, theirs.data = theirs.data, mine.data
    return digest(net.state_dict())


def swaps_parameters(poke: Poke) -> str:
    """Exchange the weights of a network and its average through ``.data``."""
    loader, net, mean = data(), nn.Linear(6, 6), nn.Linear(6, 6)
    opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    for _ in job.epochs(3):
        for (a,) in job.steps(loader, model=[net, mean], optimizer=opt):
            trained(a, net, opt)
            if job.step % 3 == 0:
                for one, other in zip(net.parameters(), mean.parameters(), strict=True):
                    one.data, other.data = other.data, one.data
    return digest(net.state_dict(), mean.state_dict(), opt.state_dict())


OPTIMIZERS = [
    swaps_buffers,
    swaps_parameters,
    shares_and_swaps_data,
    shares_and_swaps,
    shares_and_replaces,
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
            kind, event = host.events[-1]
            assert kind == "evicting"
            assert event["committed_step"] in (event["step"], None if event["step"] == 0 else -1)
    assert lives > 2
    assert ended == expected


@pytest.mark.parametrize("script", OPTIMIZERS, ids=lambda script: script.__name__)
def test_commits_go_on_whether_an_optimizer_has_stepped_or_not(script: Script) -> None:
    host = FakeHost()
    live(host, script, evict_at=-1, every_ms=1.0)
    steps = [event["step"] for kind, event in host.events if kind == "committed"]
    most = 6 if script is accumulates else 2
    assert len(steps) >= 8
    assert max(late - early for early, late in itertools.pairwise(steps)) <= most


def writes_behind_the_loop(poke: Poke) -> str:
    loader, net = data(), nn.Linear(6, 6)
    opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    for _ in job.epochs(3):
        for (a,) in job.steps(loader, model=net, optimizer=opt):
            trained(a, net, opt)
        for parameter in net.parameters():
            parameter.data.mul_(1.07)
        net(torch.ones(1, 6))
        poke()
    poke()
    return digest(net.state_dict())


def swaps_states(poke: Poke) -> str:
    loader, one, other = data(16), nn.Linear(6, 6), nn.Linear(6, 6)
    opts = [torch.optim.SGD(net.parameters(), 0.05, momentum=0.9) for net in (one, other)]
    for _ in job.epochs(3):
        for (a,) in job.steps(loader, model=[one, other], optimizer=opts):
            for net, opt in zip((one, other), opts, strict=True):
                trained(a, net, opt)
        for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
            states = opts[0].state[mine], opts[1].state[theirs]
            opts[1].state[theirs], opts[0].state[mine] = states
            states[0]["momentum_buffer"].mul_(0.9)
        one(torch.ones(1, 6))
        poke()
    return digest(one.state_dict(), other.state_dict(), [opt.state_dict() for opt in opts])


def writes_extra_state(poke: Poke) -> str:
    """Update a large target network before the optimizer's step, as old scripts do."""
    loader, net, target = data(), nn.Linear(6, 6), nn.Linear(200, 200)
    opt = torch.optim.SGD(net.parameters(), 0.05)
    for _ in job.epochs(3):
        for (a,) in job.steps(loader, model=net, optimizer=opt, extra_state=target):
            target.weight.data.mul_(0.9).add_(net.weight.data.sum())
            poke()
            trained(a, net, opt)
    return digest(net.state_dict(), target.state_dict())


@pytest.mark.parametrize("every_ms", [1e9, 1.0])
@pytest.mark.parametrize("script", [writes_behind_the_loop, swaps_states, writes_extra_state])
def test_writes_through_data_are_never_in_an_earlier_commit(
    script: Script, every_ms: float
) -> None:
    expected = plain(script)
    for count in range(1, 22):
        ways = ("evict_at", "crash_at") if every_ms == 1.0 else ("evict_at",)
        for at in ({way: count} for way in ways):  # without a commit a crash begins anew
            host = FakeHost()
            ended = live(host, script, **at, every_ms=every_ms)
            assert (ended or live(host, script, every_ms=every_ms)) == expected, at


def test_no_commit_is_copied_while_the_code_behind_the_loop_runs() -> None:
    host = FakeHost()

    def look() -> None:
        host.events.append(("looked", {"copy": host._copy}))

    live(host, lambda _: writes_behind_the_loop(look), every_ms=1.0)
    assert [values for kind, values in host.events if kind == "looked"] == [{"copy": None}] * 4


@pytest.mark.parametrize("kind", ["memory", "storage", "parameter"])
def test_states_that_share_memory_without_being_one_tensor_are_refused(kind: str) -> None:
    def script(poke: Poke) -> str:
        net, (one, other) = nn.Linear(6, 6), torch.zeros(2, 6, 6)
        opt = torch.optim.SGD(net.parameters(), 0.05)
        for (a,) in job.steps(data(), model=net, optimizer=opt):
            trained(a, net, opt)
            shared = {"memory": one.t(), "storage": other, "parameter": net.weight.detach()}
            opt.state[net.weight].update(one=one, shared=shared[kind])
        return "ended"

    with pytest.raises(errors.InvalidInput, match="share memory"):
        live(FakeHost(), script)


def test_an_optimizers_own_step_may_take_a_number() -> None:
    net, plain_step = nn.Linear(6, 6), torch.optim.SGD.step
    own: Any = type("Own", (torch.optim.SGD,), {"step": lambda opt, number: plain_step(opt)})
    opt, _ = own(net.parameters(), 0.05), begun(FakeHost())
    for (a,) in job.steps(data(), model=net, optimizer=opt):
        net(a).sum().backward()
        opt.step(3)


def test_weights_written_behind_the_last_loop_are_committed_at_the_end() -> None:
    host = FakeHost()

    def script(poke: Poke) -> str:
        net = nn.Linear(6, 6)
        opt = torch.optim.SGD(net.parameters(), 0.05)
        for (a,) in job.steps(data(), model=net, optimizer=opt):
            trained(a, net, opt)
        net.weight.data.zero_()
        return "ended"

    live(host, script)
    image = host.restore()
    assert image is not None
    assert not weights_of(image)["model.weight"].values.any()


# --------------------------------------------------------------------- commits that grow or fail


class SmallHost(FakeHost):
    """Host that grants no slice over ``limit_bytes``, and whose commits fail if ``fails``."""

    limit_bytes = 1 << 40
    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.slices: list[int] = []

    def lease(self, slice_bytes: int, state_bytes: int, **kept: bool) -> torch.Tensor:
        self.slices.append(slice_bytes)
        if slice_bytes > self.limit_bytes:
            raise errors.OutOfDeviceMemory("no room", requested_bytes=slice_bytes)
        return super().lease(slice_bytes, state_bytes, **kept)

    def wait_commit(self, *, only_read: bool = False) -> float:
        took_ms = super().wait_commit(only_read=only_read)
        if self.fails:
            raise errors.ServerUnavailable("the daemon is gone")
        return took_ms


def growing(kind: str) -> Script:
    def script(poke: Poke) -> str:
        loader, net = data(64), nn.Sequential(nn.Linear(6, 2000), nn.Linear(2000, 6))
        opt: Any = torch.optim.SGD(net.parameters(), 0.01)
        if kind == "optimizer":
            opt = Unforeseen(net.parameters())
        note: dict[str, Any] = {"kept": []}
        for _ in job.epochs(3):
            for (a,) in job.steps(loader, model=net, optimizer=opt, extra_state=note):
                poke()
                opt.zero_grad()
                loss = F.mse_loss(net(a), a)
                loss.backward()
                opt.step()
                tensors = {
                    "tensors": lambda a=a, loss=loss: [(one, loss.detach()) for one in a] * 8,
                    "numbers": lambda loss=loss: [loss.item()] * 2000,
                    "one tensor": lambda: torch.randn(20_000),
                    "array": lambda: np.random.rand(20_000),
                    "optimizer": list,
                }[kind]()
                note["kept"].append(tensors)
        return digest(net.state_dict(), opt.state_dict(), [*map(repr, note["kept"])])

    return script


class Unforeseen(torch.optim.Optimizer):
    """Optimizer with four tensors per parameter; it reads values, so it cannot run on "meta"."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            for name in ("a", "b", "c", "d", *(["late"] if job.step > 20 else [])):
                state.setdefault(name, torch.ones_like(parameter))
                state[name].mul_(parameter.grad.sum().item())
            parameter.sub_(1e-3 * state["a"])


GROWING = ["tensors", "numbers", "one tensor", "array", "optimizer"]


@pytest.mark.parametrize("kind", GROWING)
def test_state_that_grows_gets_a_larger_slice_and_is_kept(kind: str) -> None:
    script = growing(kind)
    expected = plain(script)
    host, ended, lives = FakeHost(), "", 0
    while not ended:
        lives += 1
        assert lives < 30, "no progress"
        ended = live(host, script, crash_at=11, every_ms=1.0)
    assert ended == expected
    assert host.leases > lives, "it grew"
    assert "commit_failed" not in host.kinds()


@pytest.mark.parametrize("kind", GROWING[:-1])
def test_where_nothing_can_grow_the_job_says_so_once_and_trains_on(kind: str) -> None:
    host = SmallHost()
    host.limit_bytes = 700 << 10
    with pytest.warns(UserWarning, match="was not kept: no room") as warned:
        ended = live(host, growing(kind), every_ms=1.0)
    assert ended
    assert "commit_failed" in host.kinds()
    assert "committed" in host.kinds()
    assert len(warned) == 1


def test_a_commit_that_the_daemon_refuses_costs_the_job_nothing() -> None:
    host = SmallHost()
    host.fails = True
    with pytest.warns(UserWarning, match="the daemon is gone") as warned:
        assert live(host, gan, every_ms=1.0) == plain(gan)
    assert len(warned) == 1
    assert host.kinds().count("commit_failed") > 1


class LateHost(SmallHost):
    """Host whose commits are over only when the script waits for their end."""

    begun = 0

    def begin_commit(self, *order: Any) -> None:
        self.begun += 1
        super().begin_commit(*order)

    def wait_commit(self, *, only_read: bool = False) -> Any:
        if not only_read:
            return super().wait_commit()
        assert self._copy is not None
        return self._copy.join()  # it has read the slice

    def publish(self, *_: Any) -> None:
        pass


@pytest.mark.filterwarnings("ignore:the state after step")
@pytest.mark.parametrize("fails", [False, True])
def test_a_publish_waits_for_the_commit_under_way_and_counts_it(fails: bool) -> None:
    host, net = LateHost(), nn.Linear(6, 6)
    host.fails = fails
    opt = torch.optim.SGD(net.parameters(), 0.01)

    def script(_: Poke) -> str:
        for (a,) in job.steps(data(64), model=net, optimizer=opt):
            opt.zero_grad()
            net(a).square().mean().backward()
            opt.step()
            if job.step == 4:
                job.publish("m")
        return "ended"

    assert live(host, script, every_ms=1.0) == "ended"
    assert host.kinds().count("commit_failed" if fails else "committed") == host.begun >= 3


FAILS = """
    import os, sys, torch
    from pipeswitch import job
    torch.manual_seed(0)
    out = sys.argv[1]
    net = torch.nn.Linear(4, 1); opt = torch.optim.Adam(net.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(torch.randn(400, 4), 4, shuffle=True)
    for a in job.steps(loader, model=net, optimizer=opt):
        opt.zero_grad(); net(a).square().mean().backward(); opt.step()
        if job.step in (40, 60) and len(sys.argv) > 2 and not os.path.exists(f"{out}.{job.step}"):
            open(f"{out}.{job.step}", "w").close()
            raise ValueError("the disk is full")
    with open(out, "w") as file:
        file.write(repr(net.weight.tolist()))
"""


def test_a_failed_job_is_started_again_from_its_last_commit_also_by_the_next_server(
    tmp_path: Path,
) -> None:
    path = write_script(tmp_path, "fails.py", textwrap.dedent(FAILS))
    run_plain(path, str(tmp_path / "plain"))
    environment = {"PIPESWITCH_SCHEDULER__COMMIT_EVERY": "10ms"}
    options = {"arena": "64MiB", "state_dir": tmp_path / "state", "environment": environment}
    with checked_server(**options, settles=False) as checked:
        task = checked.client.train(path, name="it", args=[str(tmp_path / "out"), "served"])
        with pytest.raises(errors.TaskFailed, match="the disk is full"):
            task.wait(60)
        steps_lost = 40 - task.status()["committed_step"]
        assert task.resume()["error"] == ""
        with pytest.raises(errors.TaskFailed):
            task.wait(60)
        row = task.status()
        assert (row["step"], row["steps_recomputed"]) == (60, steps_lost)
        until(lambda: task.status()["persisted_step"] >= 40 - steps_lost, "its commit is on disk")
        assert "".join(task.logs()).count("ValueError: the disk") == 2, "the log goes on"
    with checked_server(**options) as checked:
        task = checked.client.task("it")
        task.resume()
        row = finish(task, 60)
        assert (row["state"], row["step"]) == ("done", 100)
        with pytest.raises(errors.InvalidInput):
            task.resume()
    assert (tmp_path / "out").read_text() == (tmp_path / "plain").read_text()


ERRORS = """
    import sys
    from pipeswitch.workers.training.torch_private import is_left_by_error
    def loop():
        try:
            yield 1
        finally:
            print(is_left_by_error(sys._getframe(1)))
    def fails():
        raise ValueError
    def by(body):
        for one in loop():
            body()
    class Odd:
        __getattr__ = __add__ = __getitem__ = lambda *_: fails()
    def breaks():
        for one in loop():
            break
    def returns():
        for one in loop():
            return str(one)
    odd = Odd()
    for body in (fails, lambda: fails(), lambda: odd.name, lambda: odd + 1, lambda: odd[0]):
        try:
            by(body)
        except ValueError:
            pass
    breaks(), returns()
"""


def test_an_error_in_a_called_function_does_not_end_the_loop(tmp_path: Path) -> None:
    """Run in a new process; in this one a library may have changed how Python calls functions."""
    path = write_script(tmp_path, "errors.py", textwrap.dedent(ERRORS))
    printed = subprocess.check_output([sys.executable, path], text=True).split()
    assert printed == ["True"] * 5 + ["False"] * 2


# ------------------------------------------------------------------------------- extra_state


def resumes(script: Script, *, crash_at: int = 9, lives: int = 3) -> None:
    """Check that the script ends like the plain run despite kills and evictions."""
    expected, host, ended, count = plain(script), FakeHost(), "", 0
    while not ended:
        count += 1
        assert count < 40, "no progress"
        at = {"evict_at": 11} if count % 3 == 0 else {"crash_at": crash_at + count % 2}
        ended = live(host, script, **at, every_ms=1.0)
    assert count >= lives
    assert ended == expected


def trained(a: torch.Tensor, net: nn.Module, opt: torch.optim.Optimizer) -> float:
    opt.zero_grad()
    loss = net(a).square().mean()
    loss.backward()
    opt.step()
    return loss.item()


def nested_notes(poke: Poke) -> str:
    loader, net = data(), nn.Linear(6, 1)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    note: dict[str, Any] = {"best": 9.0, "deep": {"list": [0, {"x": 0}], "pair": ([], 1)}}
    losses: list[float] = []
    hidden, array, numbers = torch.zeros(6), np.zeros(6), set[int]()
    memory, deep = deque[Any](maxlen=5), note["deep"]["list"][1]
    rows, inner = torch.zeros(0, 6), note["deep"]["pair"][0]
    for _ in job.epochs(4):
        for (a,) in job.steps(
            loader,
            model=net,
            optimizer=opt,
            extra_state={
                "mine": note,
                "losses": losses,
                "hidden": hidden,
                "array": array,
                "seen": numbers,
                "memory": memory,
                "many": {"rows": [rows]},
            },
        ):
            poke()
            loss = trained(a + hidden, net, opt)
            note["best"] = min(note["best"], loss)
            deep["x"] += 1
            inner.append(job.step) if job.step % 5 == 0 else None
            losses.append(loss)
            hidden.mul_(0.9).add_(a.mean(0))
            array += loss
            numbers.add(job.step % 7)
            memory.append((a[0], loss))
            rows.set_(torch.cat([rows, a[:1]]))
    return digest(net.state_dict(), note, losses, hidden, array, numbers, list(memory), rows, inner)


def kept_list(poke: Poke) -> str:
    loader, net = data(), nn.Linear(6, 1)
    opt, losses = torch.optim.SGD(net.parameters(), 0.1), list[float]()
    for _ in job.epochs(4):
        for (a,) in job.steps(loader, model=net, optimizer=opt, extra_state=losses):
            poke()
            losses.append(trained(a, net, opt))
    return digest(net.state_dict(), losses)


def notes_of_each_epoch(poke: Poke) -> str:
    """Use new objects in each epoch, under the same names in ``extra_state``."""
    loader, net, totals = data(), nn.Linear(6, 1), list[float]()
    opt, draws = torch.optim.SGD(net.parameters(), 0.1), random.Random(4)
    for _ in job.epochs(4):
        sums, hidden = {"loss": 0.0}, torch.zeros(1)
        for (a,) in job.steps(
            loader,
            model=net,
            optimizer=opt,
            extra_state={"sums": sums, "hidden": hidden, "totals": totals, "draws": draws},
        ):
            poke()
            sums["loss"] += trained(a, net, opt) + draws.random()
            hidden += sums["loss"]
        totals.append(sums["loss"] + hidden.item())
    return digest(net.state_dict(), totals)


@pytest.mark.parametrize(
    "script", [nested_notes, kept_list, notes_of_each_epoch], ids=lambda one: one.__name__
)
def test_what_extra_state_refers_to_is_filled_again_in_place(script: Script) -> None:
    resumes(script)


def begin_loop(extra_state: Any, **options: Any) -> None:
    net = nn.Linear(6, 1)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    session = begun(FakeHost())
    steps = job.steps(data(), model=net, optimizer=opt, extra_state=extra_state, **options)
    next(steps)
    session._over = True
    steps.close()
    session.close()


def test_a_number_that_is_passed_by_its_value_warns() -> None:
    net, best = nn.Linear(6, 1), 9.0
    opt, note = torch.optim.SGD(net.parameters(), 0.1), {"calls": 0}
    begun(FakeHost())
    with pytest.warns(job.InexactResumeWarning, match=r"\['best'\], extra_state\['x'\]\[0\]"):
        next(
            job.steps(
                data(),
                model=net,
                optimizer=opt,
                extra_state={"best": best, "note": note, "x": [best]},
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begin_loop(note)
        begin_loop([note, note])


@pytest.mark.parametrize(
    "odd", [iter([1.0]), 0.5, "text", object()], ids=lambda odd: type(odd).__name__
)
def test_what_extra_state_cannot_capture_is_refused(odd: Any) -> None:
    with pytest.raises(errors.InvalidInput):
        begin_loop(odd)
    with pytest.raises(errors.InvalidInput):
        begin_loop({"odd": odd, "draws": random.Random(1)})


class Half:
    def state_dict(self) -> dict[str, int]:
        return {}


def test_a_state_dict_that_nothing_loads_is_refused_at_once() -> None:
    with pytest.raises(errors.InvalidInput, match="load_state_dict"):
        begin_loop({"half": Half()})


# ------------------------------------------------------------------------------------- data


class Stream(IterableDataset[torch.Tensor]):
    """A stream that continues from pass to pass, and saves its position."""

    def __init__(self, passes: int = 32) -> None:
        self.at, self.passes = 0, passes

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.tensor([self.at % 13 / 13.0, self.at % 7 / 7.0])
            if self.at % self.passes == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Shuffled(Stream):
    """A shuffled stream whose saved state lacks the shuffle buffer."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        dice, buffer = random.Random(3 + self.at), list[torch.Tensor]()
        for one in super().__iter__():
            buffer.append(one)
            if len(buffer) > 9:
                yield buffer.pop(dice.randrange(len(buffer)))
        yield from buffer


class OneSided(Stream):
    """A stream as in streaming libraries: ``state_dict`` takes the number of used samples."""

    def state_dict(self, samples: int, at_start: bool) -> dict[str, Any]:  # type: ignore[override]
        return {"at": samples}


class ForgetfulLoader:
    """A loader whose state has the position, but not the generator for augmentation."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        noise = torch.Generator().manual_seed(int(torch.randint(99, ())))
        while self.at < 8:
            self.at += 1
            yield torch.full((4, 2), float(self.at)) + torch.rand(4, 2, generator=noise)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Bar:
    """A wrapper with tqdm's attributes."""

    def __init__(self, inner: Any, most: int = 99) -> None:
        self.iterable, self.most = inner, most

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.iterable):
            if index < self.most:
                yield batch * (1 + index)


class Endless(DataLoader[Any]):
    """A loader whose own ``__iter__`` makes two passes."""

    def __iter__(self) -> Any:
        for _ in range(2):
            yield from super().__iter__()


LOADERS: dict[str, Callable[[], Any]] = {
    "a stream": lambda: DataLoader(Stream(), 4),
    "a stream behind a bar": lambda: Bar(DataLoader(Stream(), 4)),
    "a stream behind two": lambda: Bar(Bar(DataLoader(Stream(), 4)), most=6),
    "a buffer that is left out": lambda: DataLoader(Shuffled(), 4),
    "a buffer behind a bar": lambda: Bar(DataLoader(Shuffled(), 4)),
    "a loader's generator that is left out": ForgetfulLoader,
    "a state that needs arguments": lambda: DataLoader(OneSided(), 4),
    "a loader with its own loop": lambda: Endless(torch.randn(20, 2), 4, shuffle=True),
    "a list": lambda: list(torch.randn(8, 4, 2)),
}
UNKNOWN = ["behind", "arguments", "own loop"]


def loaded(name: str) -> Script:
    def script(poke: Poke) -> str:
        data()
        loader, net, sums = LOADERS[name](), nn.Linear(2, 1), list[float]()
        opt = torch.optim.SGD(net.parameters(), 0.01)
        for _ in job.epochs(1 if "arguments" in name else 3):
            for a in job.steps(loader, model=net, optimizer=opt, extra_state={"seen": sums}):
                poke()
                trained(a, net, opt)
                sums.append(a.sum().item())
        return digest(net.state_dict(), sums)

    return script


@pytest.mark.parametrize("name", LOADERS)
def test_whatever_loads_the_data_a_resumed_job_sees_the_same_or_warns(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumes(loaded(name), crash_at=4 if "arguments" in name else 9, lives=2)
    warnings_seen = {str(one.message) for one in caught if one.category is job.InexactResumeWarning}
    assert bool(warnings_seen) == any(word in name for word in UNKNOWN), warnings_seen


def test_a_source_that_never_brings_a_batch_back_is_warned_of_as_the_job_resumes() -> None:
    class Live(Stream):
        """A stream whose samples differ in each run, because they come from ``os.urandom``."""

        def __iter__(self) -> Iterator[torch.Tensor]:
            for one in super().__iter__():
                yield one + torch.tensor(list(os.urandom(2))) / 256.0

    LOADERS["live"] = lambda: DataLoader(Live(), 4)
    host = FakeHost()
    assert not live(host, loaded("live"), crash_at=13, every_ms=1.0)
    with pytest.warns(job.InexactResumeWarning, match="did not restore the last batch"):
        assert live(host, loaded("live"), every_ms=1.0)
    del LOADERS["live"]


def many_folds(poke: Poke) -> str:
    """Run ``job.epochs`` for each fold, and compute a score after each fold."""
    loader, scores = data(), list[float]()
    x = torch.randn(20, 6)
    for fold in range(9):
        torch.manual_seed(fold)
        net = nn.Linear(6, 1)
        opt = torch.optim.Adam(net.parameters(), 0.05)
        for _ in job.epochs(2):
            for (a,) in job.steps(loader, model=net, optimizer=opt):
                poke()
                trained(a, net, opt)
        with torch.no_grad():
            scores.append(net(x).square().mean().item())
    return digest(net.state_dict(), scores)


def many_loops(poke: Poke) -> str:
    """Train one model in loops outside ``job.epochs``; a list grows after each loop."""
    loader, net, scores = data(), nn.Linear(6, 1), list[float]()
    for _ in range(7):
        opt = torch.optim.SGD(net.parameters(), 0.05)
        for (a,) in job.steps(loader, model=net, optimizer=opt):
            poke()
            trained(a, net, opt)
        scores.append(net.weight.sum().item())
    return digest(net.state_dict(), scores)


@pytest.mark.parametrize("script", [many_folds, many_loops], ids=lambda one: one.__name__)
def test_what_is_computed_behind_each_of_many_phases_stays_what_it_was(script: Script) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumes(script, crash_at=31, lives=2)


@pytest.mark.parametrize("why", ["too much to keep", "no room on the device"])
def test_a_phase_whose_end_is_no_longer_kept_is_warned_of(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = SmallHost()
    if why == "too much to keep":
        monkeypatch.setattr("pipeswitch.workers.training.script_cursor.MAX_PAST_BYTES", 1000)
    else:
        all_phases = SmallHost()
        assert live(all_phases, many_folds, every_ms=1.0)
        host.limit_bytes = sorted(all_phases.slices)[len(all_phases.slices) // 2]
    with pytest.warns(job.InexactResumeWarning, match="no longer kept") as warned:
        assert live(host, many_folds, every_ms=1.0)
    assert len(warned) == 1


# ----------------------------------------------------- state that ``job.steps`` does not have


class Bare:
    """Early stopping as scripts often have it, without ``state_dict``."""

    def __init__(self) -> None:
        self.bad, self.best = 0, 9.0


class Early(Bare):
    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


KEPT: dict[str, Callable[[], Any]] = {
    "a number": lambda: 9.0,
    "a list": list,
    "a dict": lambda: {"calls": 0},
    "a tensor": lambda: torch.zeros(6),
    "a generator": lambda: random.Random(1),
    "numpy's generator": lambda: np.random.default_rng(1),
    "a network": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(6, 1)),
    "early stopping": Early,
    "an object": Bare,
    "an iterator": lambda: (one for _ in range(9) for one in data()),
    "a long list": lambda: [torch.zeros(i) for i in range(90)],
    "a scaler": lambda: torch.amp.GradScaler("cpu", growth_interval=2),
}


def use(note: Any, net: nn.Module, loss: float) -> Any:
    """Change an object as a loop's body does; return the variable's new value."""
    if isinstance(note, float):
        return note + loss
    if isinstance(note, list):
        note.append(note.pop(0) if len(note) > 64 else loss)
    elif isinstance(note, dict):
        note["calls"] += 1
    elif isinstance(note, torch.Tensor):
        note.add_(loss)
    elif isinstance(note, torch.optim.swa_utils.AveragedModel):
        note.update_parameters(net)
    elif isinstance(note, Bare):
        note.bad += 1
    elif isinstance(note, Iterator):
        next(note)
    elif isinstance(note, torch.amp.GradScaler):
        note.scale(torch.ones(1))
        note._growth_tracker.add_(1)
    else:
        note.random()
    return note


@pytest.mark.parametrize("where", ["in the body", "between two epochs"])
@pytest.mark.parametrize("name", KEPT)
def test_what_a_loop_changes_and_job_steps_does_not_have_is_named_once(
    name: str, where: str
) -> None:
    def script(poke: Poke, passes: bool = False) -> str:
        loader, net, kept = data(), nn.Linear(6, 1), KEPT[name]()
        opt = torch.optim.SGD(net.parameters(), 0.1)
        loader.dataset.system = random.SystemRandom()  # has no state to capture
        constant, began_s, table = torch.inference_mode()(torch.ones)(3), time.time(), [1, 2]
        for _ in job.epochs(3):
            began_s = time.time()
            is_network = isinstance(kept, nn.Module)
            for (a,) in job.steps(
                loader,
                model=[net, kept] if passes and is_network else net,
                optimizer=opt,
                extra_state=kept if passes and not is_network else None,
            ):
                loss = trained(a, net, opt)
                if where == "in the body":
                    kept = use(kept, net, loss)
            if where != "in the body":
                kept = use(kept, net, loss)
        return digest(net.state_dict(), constant, table, began_s > 0)

    named = r"kept(\.bad|\['calls'\])?: the script|kept, "
    with pytest.warns(job.InexactResumeWarning, match=named) as warned:
        live(host := FakeHost(), script, every_ms=1.0)
    assert len(warned) == 1
    assert ["kept" in values["text"] for kind, values in host.events if kind == "warning"] == [True]
    if name not in ("a number", "an object", "an iterator"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            live(FakeHost(), lambda poke: script(poke, passes=True), every_ms=1.0)


class OwnTrainer:
    def __init__(self) -> None:
        self.loader, self.net, self.best, self.seen = data(), nn.Linear(6, 1), 9.0, 0
        self.opt = torch.optim.SGD(self.net.parameters(), 0.1)

    def fit(self) -> None:
        for (a,) in job.steps(self.loader, model=self.net, optimizer=self.opt):
            self.best = min(self.best, trained(a, self.net, self.opt))


class Counting(nn.Linear):
    calls = 0

    def __init__(self) -> None:
        super().__init__(6, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Epochs(Sampler[int]):
    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(torch.randperm(16, generator=torch.Generator().manual_seed(self.passes)))


@pytest.mark.parametrize("what", ["net.calls", "loader.sampler.passes"])
def test_plain_attributes_of_modules_and_samplers_are_named(what: str) -> None:
    def script(poke: Poke) -> str:
        net: nn.Module = Counting() if "calls" in what else nn.Linear(6, 1)
        dataset = TensorDataset(torch.randn(16, 6))
        loader = DataLoader(dataset, 4, sampler=Epochs() if "passes" in what else None)
        opt = torch.optim.SGD(net.parameters(), 0.1)
        for _ in job.epochs(2):
            for (a,) in job.steps(loader, model=net, optimizer=opt):
                trained(a, net, opt)
        return "ended"

    with pytest.warns(job.InexactResumeWarning, match=rf"{what}: the script"):
        live(FakeHost(), script, every_ms=1.0)


def test_attributes_of_a_home_made_trainer_are_named() -> None:
    def script(poke: Poke) -> str:
        OwnTrainer().fit()
        return "ended"

    with pytest.warns(job.InexactResumeWarning, match=r"self\.best: the script"):
        live(FakeHost(), script, every_ms=1.0)


# ------------------------------------------------------------------------- extra_state="auto"


@dataclasses.dataclass
class Progress:
    best: float = 9.0
    history: list[float] = dataclasses.field(default_factory=list)


class Recorder:
    def __init__(self) -> None:
        self.level, self.seen = 0, {"a": 0}

    def up(self) -> None:
        self.level += 1
        self.seen["a"] += 2


class Level(enum.IntEnum):
    LOW = 1


class Raising:
    """A proxy without an object."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no object")


class Pair(NamedTuple):
    first: int
    second: int


@dataclasses.dataclass(slots=True)
class Slotted:
    bad: int = 0
    fixed: int = 1
    recorder: Recorder = dataclasses.field(default_factory=Recorder)


def one_epoch(loader: Any, net: nn.Module, opt: Any, poke: Poke, recorder: Recorder) -> float:
    total, last = 0.0, None
    for (a,) in job.steps(loader, model=net, optimizer=opt, extra_state="auto"):
        poke()
        total += trained(a, net, opt)
        last = a.mean() if last is None else last + a.mean()
        recorder.up()
        poke()
    return total + float(last)


def in_functions(poke: Poke) -> str:
    loader, net = data(), nn.Linear(6, 1)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    totals, worst, recorder, label = [], -9.0, Recorder(), "none"
    for _ in job.epochs(3):
        poke()
        totals.append(one_epoch(loader, net, opt, poke, recorder))
        if totals[-1] > worst:
            worst, label = totals[-1], f"epoch {len(totals)}"
    return digest(net.state_dict(), totals, worst, label, vars(recorder))


def in_one_function(poke: Poke) -> str:
    loader, net = data(), nn.Linear(6, 1)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    hidden, count, mode, order = None, 0, "cold", np.arange(8)
    rng, progress, args = np.random.default_rng(1), Progress(), SimpleNamespace(step=0)
    sums: dict[str, Any] = collections.defaultdict(lambda: [0.0])
    odd = [Raising(), slice(1), Level.LOW]
    for epoch in job.epochs(3):
        np.random.shuffle(order)
        bad = 0
        for (a,) in job.steps(loader, model=net, optimizer=opt, extra_state="auto"):
            poke()
            loss = trained(a * (1 + 0.1 * count), net, opt)
            hidden = (a.mean(), hidden[0] + 1 if hidden else 0)
            bad += loss > progress.best
            level, proxy = odd[-1], odd[0]
            count, args.step = count + 1, args.step + 2
            progress.best = min(progress.best, loss)
            progress.history.append(loss + rng.random())
            sums[mode][0] += loss
            if count == 5 and proxy and level:
                mode = "warm"
            poke()
        sums["bad"][0] += bad + epoch
    return digest(net.state_dict(), hidden, count, mode, order, vars(progress), args.step, sums)


def in_objects(poke: Poke) -> str:
    """Count in an inner function, in an ``except``, and in an object of an object."""
    loader, net, calls, failures = data(), nn.Linear(6, 1), 0, 0
    opt, kept = torch.optim.SGD(net.parameters(), 0.1), Slotted()

    def step(a: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        trained(a * (1 + 0.1 * calls + 0.2 * failures), net, opt)
        if calls % 3 == 0:
            raise ValueError

    for _ in job.epochs(3):
        batches = iter(job.steps(loader, model=net, optimizer=opt, extra_state="auto"))
        while True:
            try:
                (a,) = next(batches)
            except StopIteration:
                break
            poke()
            try:
                step(a)
            except ValueError:
                failures += 1
            kept.recorder.up()
            kept.bad += kept.fixed
            poke()
    return digest(net.state_dict(), calls, failures, kept.bad, vars(kept.recorder))


def with_equal_beginnings(poke: Poke) -> str:
    """Begin several variables with one object."""
    loader, cell = data(), nn.LSTMCell(6, 6)
    opt, pair = torch.optim.SGD(cell.parameters(), 0.1), Pair(0, 0)
    h = c = torch.zeros(8, 6)
    sums, rows = {"h": h, "c": h}, [[0]] * 2
    for _ in job.epochs(3):
        for (a,) in job.steps(loader, model=cell, optimizer=opt, extra_state="auto"):
            poke()
            h, c = (one.detach() for one in cell(a, (h, c)))
            trained_cell = cell(a, (h, c))[0].square().mean()
            opt.zero_grad()
            trained_cell.backward()
            opt.step()
            sums["h"] = sums["h"] + h
            rows = [[*rows[0], pair.first], rows[1]]
            pair = pair._replace(first=pair.first + 1)
            poke()
    return digest(cell.state_dict(), h, c, sums, rows, pair)


@pytest.mark.parametrize(
    "script", [in_functions, in_one_function, in_objects, with_equal_beginnings]
)
def test_auto_restores_plain_values_of_the_scripts_variables(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = plain(script)
    for crash_at in range(1, 40, 2):
        host = FakeHost()
        ended = live(host, script, crash_at=crash_at, every_ms=1.0)
        ended = ended or live(host, script, crash_at=crash_at // 2, every_ms=1.0)
        assert (ended or live(host, script, every_ms=1.0)) == expected, crash_at
    assert "job.steps(extra_state='auto') keeps: " in capsys.readouterr().err


def test_auto_leaves_what_is_edited_between_two_lives_and_not_changed_by_the_script() -> None:
    def script(poke: Poke, rate: float) -> str:
        loader, net, config = data(), nn.Linear(6, 1), {"rate": rate, "names": ["a"]}
        opt, state = torch.optim.SGD(net.parameters(), 0.1), {"count": 0, "rate": rate}
        args = SimpleNamespace(rate=rate, names=[rate])
        for _ in job.epochs(2):
            for (a,) in job.steps(loader, model=net, optimizer=opt, extra_state="auto"):
                trained(a * config["rate"] * args.names[0], net, opt)
                state["count"] += 1
                poke()
        return f"{config['rate']} {args.names} {args.rate} {state['count']}"

    for crash_at in (3, 9):
        host = FakeHost()
        live(host, functools.partial(script, rate=1.0), crash_at=crash_at, every_ms=1.0)
        ended = live(host, functools.partial(script, rate=2.0), every_ms=1.0)
        assert ended == "2.0 [2.0] 2.0 12"


@pytest.mark.parametrize("wrap", [lambda it: enumerate(it), lambda it: enumerate(x for x in it)])
def test_a_count_around_a_generator_around_the_loop_is_warned_of(wrap: Any) -> None:
    def script(poke: Poke) -> str:
        loader, net = data(), nn.Linear(6, 1)
        opt = torch.optim.SGD(net.parameters(), 0.1)
        for _, (a,) in wrap(job.steps(loader, model=net, optimizer=opt)):
            trained(a, net, opt)
            poke()
        return "ended"

    host = FakeHost()
    live(host, script, crash_at=4, every_ms=1.0)
    with pytest.warns(job.InexactResumeWarning, match=r"enumerate\(job.steps"):
        live(host, script, every_ms=1.0)


def test_auto_says_what_it_keeps_and_leaves_what_the_loop_only_reads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    live(FakeHost(), in_one_function, every_ms=1.0)
    (line,) = {one for one in capsys.readouterr().err.splitlines() if "keeps" in one}
    names = line.partition("keeps: ")[2].split(", ")
    assert {"hidden", "count", "rng", "progress.best", "progress.history", "sums"} <= {*names}
    assert not {"net", "opt", "loader", "poke", "loss", "a"} & {*names}


def passed_on(steps: Any) -> Iterator[Any]:
    yield from steps


WRAPS: dict[str, Callable[[Any], Any]] = {
    "none": lambda steps: steps,
    "tqdm": lambda steps: tqdm(steps, disable=True),
    "generator": lambda steps: (one for one in steps),
    "yield from": passed_on,
    "enumerate": lambda steps: (one for _, one in enumerate(tqdm(steps, disable=True))),
}


@pytest.mark.parametrize("ends", ["error", "break", "return"])
@pytest.mark.parametrize("name", WRAPS)
@pytest.mark.filterwarnings("ignore::pipeswitch.job.InexactResumeWarning")
def test_an_error_behind_a_wrapper_does_not_end_the_loop_and_a_break_does(
    name: str, ends: str
) -> None:
    def pass_over(epoch: int, net: nn.Module, opt: Any, poke: Poke) -> None:
        for (a,) in WRAPS[name](job.steps(data(), model=net, optimizer=opt)):
            trained(a, net, opt)
            if epoch == 0 and job.step_in_epoch == 3:
                poke()
                if ends == "return":
                    return
                if ends == "break":
                    break

    def script(poke: Poke) -> str:
        net = nn.Linear(6, 1)
        opt = torch.optim.SGD(net.parameters(), 0.1)
        for epoch in job.epochs(2):
            pass_over(epoch, net, opt, poke)
        return f"{job.step}"

    host = FakeHost()
    session = begun(host, commit_every_ms=1.0)
    if ends == "error":
        with pytest.raises(ValueError, match="disk"):
            script(Outside(disk_is_full))
        session.fail()
        session.close()
        session = begun(host, commit_every_ms=1.0)
    assert script(Outside(lambda: None)) == ("12" if ends == "error" else "9")
    session.finish()


def disk_is_full() -> None:
    raise ValueError("disk")
