"""Optimizers that wrap another one, or whose groups grow: bit-equal after kills."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipeswitch import job
from pipeswitch.base.errors import InvalidInput
from tests.process.test_training_exact import FakeHost, begun
from tests.process.test_training_state import Poke, Script, data, live, resumes, trained
from tests.process.test_training_state import one_thread as one_thread


class Lookahead(torch.optim.Optimizer):
    """Keeps the slow weights; like torch_optimizer's, does not call ``Optimizer.__init__``."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.optimizer = base
        self.param_groups, self.state, self.defaults = base.param_groups, defaultdict(dict), {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def home(self) -> Any:
        return self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                slow = self.home()[p].setdefault("slow", p.clone())
                if group["count"] % 3 == 0:
                    p.copy_(slow.lerp_(p, 0.5))


class Timm(Lookahead):
    """Keeps the slow weights in the inner optimizer's state."""

    def home(self) -> Any:
        return self.optimizer.state


class Sharded(Lookahead):
    """Passes on state and groups, like AcceleratedOptimizer and PostLocalSGDOptimizer."""

    state = property(lambda self: self.optimizer.state, lambda self, value: None)
    param_groups = property(lambda self: self.optimizer.param_groups, lambda *_: None)


class ScheduleFree:
    """Is no ``Optimizer``, and has a state of its own, like ScheduleFreeWrapper."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.state, self.weight_sum = base, defaultdict[Any, Any](dict), 0.0
        self.zero_grad, self.train_mode = base.zero_grad, True

    @property
    def param_groups(self) -> Any:
        return self.base.param_groups

    @torch.no_grad()
    def step(self) -> None:
        self.weight_sum += 1.0
        for group in self.param_groups:
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / self.weight_sum)
        self.base.step()

    def state_dict(self) -> Any:
        return {"base": self.base.state_dict(), "sum": self.weight_sum}

    def load_state_dict(self, state: Any) -> None:
        self.base.load_state_dict(state["base"])


class Noam:
    """Counts steps to set the learning rate, and has neither groups nor a state."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._optimizer, self.steps, self.zero_grad = base, 0, base.zero_grad

    def step(self) -> None:
        self.steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] = 0.1 * self.steps**-0.5
        self._optimizer.step()

    def state_dict(self) -> Any:
        return {"steps": self.steps, **self._optimizer.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self._optimizer.load_state_dict(state)


class Layered(torch.optim.Optimizer):
    """Has an optimizer for each parameter in a dict, like torchao's and layer-wise GaLore."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        parameters = base.param_groups[0]["params"]
        self.each = {p: torch.optim.Adam([p], 0.01) for p in parameters}
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.each.values():
            one.step()


class Counting(torch.optim.Optimizer):
    """Wraps nothing, and counts in an attribute."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups[0]["params"], {})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 / self.count)


class Slow(Lookahead):
    """Keeps the slow weights in a list of its own, and the parameters in another one."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base)
        self.parameters = [*base.param_groups[0]["params"]]
        self.slow, self.calls = copy.deepcopy(self.parameters), 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.calls += 1
        for p, slow in zip(self.parameters, self.slow, strict=True):
            if self.calls % 3 == 0:
                p.copy_(slow.lerp_(p, 0.5))


class History(torch.optim.Optimizer):
    """Keeps a history of vectors in attributes, like an L-BFGS of one's own."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups[0]["params"], {})
        self.history, self._last = list[torch.Tensor](), None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        now = nn.utils.parameters_to_vector(p.grad for p in self.param_groups[0]["params"])
        if self._last is not None:
            self.history = [*self.history, now - self._last][-5:]
        self._last = now
        change = 0.05 * now + 0.01 * sum(self.history)
        for p, part in zip(self.param_groups[0]["params"], change.split(16), strict=False):
            p.sub_(part.mean())


def nested(base: torch.optim.Optimizer) -> Any:
    return Lookahead(Lookahead(base))


class Sam(torch.optim.Optimizer):
    """Steps twice, and calls the base optimizer."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base_optimizer, self.param_groups = base, base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                old = self.state[p].setdefault("old_p", torch.zeros_like(p))
                p.add_(old, alpha=0.01)
                old.copy_(p)
        self.base_optimizer.step()


KINDS: dict[str, Any] = {
    one.__name__: one
    for one in (
        Lookahead,
        Timm,
        Sharded,
        ScheduleFree,
        Noam,
        nested,
        Sam,
        Layered,
        Counting,
        Slow,
        History,
    )
}


def wraps(kind: Any, passed: Any = lambda opt: opt) -> Script:
    def script(poke: Poke) -> str:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        opt = kind(torch.optim.Adam(net.parameters(), 0.01))
        for _ in job.epochs(6):
            for (a,) in job.steps(data(), model=net, optimizer=passed(opt)):
                poke()
                trained(a, net, opt)
        return repr([p.tolist() for p in net.parameters()])

    return script


@pytest.mark.parametrize("name", KINDS)
def test_a_wrapper_and_what_it_wraps_end_bit_equal(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", job.InexactResumeWarning)
        resumes(wraps(KINDS[name]))


def test_the_inner_optimizer_alone_may_be_passed_if_it_has_all_state() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", job.InexactResumeWarning)
        resumes(wraps(Timm, lambda opt: opt.optimizer))


def unfreezes(kind: Any, where: str) -> Script:
    def script(poke: Poke) -> str:
        loader = data()
        net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        net[:2].requires_grad_(False)
        opt = kind(torch.optim.Adam(net[2].parameters(), 0.01))
        schedule = torch.optim.lr_scheduler.StepLR(getattr(opt, "optimizer", opt), 7)
        for epoch in job.epochs(6):
            for number, layer in enumerate((net[1], net[0])):
                if where == "between epochs" and epoch == 2 + number:
                    thaw(opt, layer)
            for (a,) in job.steps(loader, model=net, optimizer=opt, scheduler=schedule):
                poke()
                if where == "in a body" and job.step in (9, 20):
                    thaw(opt, net[job.step == 9])
                poke()
                trained(a, net, opt)
                schedule.step()
        return repr([net.state_dict(), opt.param_groups])

    return script


def thaw(optimizer: Any, layer: nn.Module) -> None:
    layer.requires_grad_(True)
    bare = getattr(optimizer, "optimizer", optimizer)
    bare.add_param_group({"params": [*layer.parameters()], "lr": 0.003})


@pytest.mark.parametrize("where", ["between epochs", "in a body"])
@pytest.mark.parametrize("kind", [lambda opt: opt, Timm], ids=["Adam", "Timm"])
def test_groups_that_are_added_in_mid_run_end_bit_equal(kind: Any, where: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", job.InexactResumeWarning)
        resumes(unfreezes(kind, where))


def test_added_parameters_that_no_model_has_are_refused() -> None:
    def script(poke: Poke) -> str:
        net = nn.Linear(6, 1)
        opt = torch.optim.SGD(net.parameters(), 0.1)
        for (a,) in job.steps(data(), model=net, optimizer=opt):
            trained(a, net, opt)
            if len(opt.param_groups) == 1:
                opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        return "ended"

    with pytest.raises(InvalidInput, match=r"optimizer\.optimizer\.1\.0"):
        live(FakeHost(), script, every_ms=1.0)


class Odd(Sam):
    """Keeps a number in an object of its own, like PostLocalSGDOptimizer's averager."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base)
        self.averager = SimpleNamespace(step=0)


def test_an_object_that_a_wrapper_keeps_is_named() -> None:
    begun(FakeHost())
    with pytest.warns(job.InexactResumeWarning, match=r"Odd\.averager"):
        wraps(Odd)(lambda: None)


@pytest.mark.parametrize("kind", ["DTensor", "FlatParameter"])
def test_sharded_parameters_are_refused_with_the_reason(kind: str) -> None:
    net = nn.Linear(6, 1)
    net.weight.__class__ = type(kind, (nn.Parameter,), {})
    begun(FakeHost())
    with pytest.raises(InvalidInput, match="one process") as refused:
        list(job.steps(data(), model=net, optimizer=torch.optim.SGD(net.parameters(), 0.1)))
    assert "fully_shard" in str(refused.value.hint)


ODD: tuple[Any, ...] = (None, "high", [1.0], (1.0,), {"a": 1}, 1j, torch.zeros(2), torch.zeros(0))
ODD += (torch.zeros(1, device="meta"), object(), 10**400, np.array(["a"]), b"x", np.zeros(2))


@pytest.mark.parametrize("value", ODD, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_value_that_is_not_a_number_is_refused_by_its_name_and_type(
    value: Any, by_hand: bool
) -> None:
    if not by_hand:
        begun(FakeHost())
    with pytest.raises(InvalidInput, match="accuracy is .*" + type(value).__name__):
        job.log(loss=1.0, accuracy=value)


@pytest.mark.parametrize("value", [True, 2, 0.5, torch.ones(1, 1), np.ones(1), np.int8(3)])
def test_numbers_and_single_elements_are_logged(value: Any) -> None:
    begun(FakeHost())
    job.log(accuracy=value)
