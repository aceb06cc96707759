"""Which changes of a script's values are named, and which are not."""

from __future__ import annotations

import argparse
import collections
import copy
import dis
import enum
import fractions
import functools
import itertools
import pathlib
import random
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

from pipeswitch.workers.training import reachable
from pipeswitch.workers.training.liveness import (
    assigned,
    captured,
    carried_attributes,
    is_in_loop,
    live,
)
from pipeswitch.workers.training.objects import TrainedObjects
from pipeswitch.workers.training.script_changes import FREE_S, SHARE, Allowance
from pipeswitch.workers.training.script_values import initial_values
from pipeswitch.workers.training.script_watch import Changed, ScriptWatch, live_names

Point = collections.namedtuple("Point", "x y")
COUNT = {"calls": 0}


class Mode(enum.Enum):
    WARM = 1
    COLD = 2


class Own:
    flag = False

    def __init__(self) -> None:
        self.n, self.done, self._private = 0, False, 0
        self.inner = types.SimpleNamespace(sum=0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def bump(self) -> None:
        self.n += 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(2, 2), nn.Dropout(0.1)
        self.cache: Any = None
        self.seen: Any = None
        self.features: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features, self.seen = self.layer(x), x
        self.cache = self.features if self.cache is None else self.cache + self.features
        return self.drop(self.features)


def counter() -> Callable[[], int]:
    n = 0

    def up() -> int:
        nonlocal n
        n += 1
        return n

    return up


def with_attribute() -> Callable[[], int]:
    up = counter()
    up.calls = 0  # type: ignore[attr-defined]
    return up


def reads_a_global() -> int:
    COUNT["calls"] += 1
    return COUNT["calls"]


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda one: setattr(one, name, value)


def _write(array: Any) -> None:
    array[array.shape[0] // 2] = 1


def _write_data(tensor: torch.Tensor) -> None:
    tensor.data[0] = 1


IN_PLACE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "list": (lambda: [1], lambda one: one.append(2), "it"),
    "long list": (lambda: [*range(1000)], lambda one: one.__setitem__(500, -1), "it"),
    "list of tensors": (lambda: [torch.zeros(2)] * 99, lambda one: one[98].add_(1), "it"),
    "nested list": (lambda: [[0, 0]], lambda one: one[0].__setitem__(1, 1), "it[0][1]"),
    "dict": (lambda: {"a": 1}, lambda one: one.update(a=2), "it['a']"),
    "new key": (lambda: {"a": 1}, lambda one: one.update(b=2), "it"),
    "long dict": (lambda: dict.fromkeys(range(99), 0), lambda one: one.update({50: 1}), "it"),
    "dict of lists": (lambda: {"a": []}, lambda one: one["a"].append(1), "it['a']"),
    "defaultdict": (
        lambda: collections.defaultdict(int, a=1),
        lambda one: one.update(a=2),
        "it['a']",
    ),
    "Counter": (lambda: collections.Counter("a"), lambda one: one.update("a"), "it['a']"),
    "dict by objects": (lambda: {Mode: [1], print: 2}, lambda one: one.update({print: 3}), "it"),
    "weak dict": (
        lambda: weakref.WeakKeyDictionary({Own: 1}),
        lambda one: one.update({Own: 2}),
        "it",
    ),
    "set": (lambda: {1}, lambda one: one.add(2), "it"),
    "deque": (lambda: collections.deque([1]), lambda one: one.append(2), "it"),
    "array": (lambda: np.zeros(3), _write, "it"),
    "array of objects": (lambda: np.array([None, 2, "a"]), _write, "it"),
    "large array": (lambda: np.zeros(600_000), lambda one: one.__iadd__(1), "it"),
    "tensor": (lambda: torch.zeros(3), _write, "it"),
    "tensor by .data": (lambda: torch.zeros(3), _write_data, "it"),
    "large tensor": (lambda: torch.zeros(99, 999), _write, "it"),
    "network": (lambda: nn.Linear(2, 2), lambda one: one.weight.data.add_(1), "it"),
    "layer's number": (lambda: nn.Dropout(0.1), _set("p", 0.5), "it.p"),
    "Namespace": (lambda: argparse.Namespace(step=0), _set("step", 1), "it.step"),
    "own object": (Own, lambda one: one.bump(), "it.n"),
    "private attribute": (Own, _set("_private", 1), "it._private"),
    "bool": (Own, _set("done", True), "it.done"),
    "inner object": (Own, lambda one: setattr(one.inner, "sum", 1), "it.inner.sum"),
    "object in a list": (lambda: [Own()], lambda one: one[0].bump(), "it[0].n"),
    "closure": (counter, lambda one: one(), "it.n"),
    "global of a function": (
        lambda: reads_a_global,
        lambda one: one(),
        f"{__name__}.COUNT['calls']",
    ),
    "function's attribute": (with_attribute, _set("calls", 1), "it.calls"),
    "method's object": (lambda: Own().bump, lambda one: one(), "it.__self__.n"),
    "partial": (lambda: functools.partial(print, [1]), lambda one: one.args[0].pop(), "it.args"),
    "random.Random": (lambda: random.Random(1), lambda one: one.random(), "it"),
    "numpy's generator": (lambda: np.random.default_rng(1), lambda one: one.random(), "it"),
    "RandomState": (lambda: np.random.RandomState(1), lambda one: one.rand(), "it"),
    "torch's generator": (
        lambda: torch.Generator().manual_seed(1),
        lambda one: torch.rand(1, generator=one),
        "it",
    ),
    "generator in a tuple": (lambda: (random.Random(1),), lambda one: one[0].random(), "it"),
    "list's iterator": (lambda: iter([1, 2]), next, "it"),
    "cycle": (lambda: itertools.cycle([1, 2]), next, "it"),
    "count": (itertools.count, next, "it"),
    "loader's iterator": (
        lambda: iter(DataLoader(TensorDataset(torch.zeros(9)), 1)),
        lambda one: next(one),
        "it",
    ),
    "Subset": (
        lambda: Subset(TensorDataset(torch.zeros(4)), [0]),
        _set("indices", [0, 1]),
        "it.indices",
    ),
    "sampler's weights": (
        lambda: WeightedRandomSampler(torch.ones(4), 4),
        lambda one: one.weights.mul_(2),
        "it.weights",
    ),
    "Sobol": (
        lambda: torch.quasirandom.SobolEngine(2),
        lambda one: one.draw(4),
        "it.num_generated",
    ),
    "metric": (
        lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1)),
        lambda one: one.update_parameters(nn.Linear(1, 1)),
        "it",
    ),
    "loss scaler": (
        lambda: torch.amp.GradScaler("cpu"),
        lambda one: one.load_state_dict({**one.state_dict(), "_growth_tracker": 7}),
        "it",
    ),
}
REPLACED: dict[str, tuple[Any, Any]] = {
    "int": (0, 1),
    "float": (0.0, 1.0),
    "bool": (False, True),
    "text": ("a", "b"),
    "bytes": (b"a", b"b"),
    "complex": (1j, 2j),
    "None before": (None, 3.0),
    "None after": (3.0, None),
    "other type": (1, "1"),
    "tuple": ((1, 2), (1, 3)),
    "tuple of tensors": ((torch.zeros(2),), (torch.ones(2),)),
    "named tuple": (Point(1, 2), Point(1, 3)),
    "numpy's integer": (np.int64(1), np.int64(2)),
    "numpy's float": (np.float32(1), np.float32(2)),
    "enum": (Mode.WARM, Mode.COLD),
    "fraction": (fractions.Fraction(1, 2), fractions.Fraction(1, 3)),
    "path": (pathlib.Path("a"), pathlib.Path("b")),
    "range": (range(2), range(3)),
    "frozenset": (frozenset({1}), frozenset({2})),
    "function": (abs, print),
    "own function": (counter, reads_a_global),
    "class": (dict, list),
    "tensor": (torch.zeros(3), torch.ones(3)),
    "large tensor": (torch.zeros(99, 999), torch.zeros(99, 999)),
    "array": (np.zeros(3), np.ones(3)),
    "list": ([1.0], [1.0, 2.0]),
    "network": (nn.Linear(2, 2), nn.Linear(2, 2)),
    "loader": (
        DataLoader(TensorDataset(torch.zeros(4)), 1),
        DataLoader(TensorDataset(torch.zeros(4)), 2),
    ),
}


def named(change: Callable[[Any], Any], it: Any) -> list[Changed]:
    net = nn.Linear(2, 2)
    objects = TrainedObjects({"model": net}, {}, {}, {})
    watch = ScriptWatch(sys._getframe(), objects, [])
    replaced = change(it)
    if replaced is not None and replaced is not it:
        it = replaced
    return watch.changed(sys._getframe(), objects, [])


@pytest.fixture(autouse=True)
def _no_test_frames() -> Iterator[None]:
    reachable.begin(sys._getframe())
    yield
    reachable._outside.clear()


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_changed_in_place_is_named_and_nothing_else(name: str) -> None:
    make, change, expected = IN_PLACE[name]

    def act(one: Any) -> None:
        change(one)

    found = named(act, make())
    assert expected in found
    assert all(one.startswith(expected.rpartition(".")[0]) for one in found), found
    assert not named(lambda _: None, make())


@pytest.mark.parametrize("name", REPLACED)
def test_a_replaced_value_is_named(name: str) -> None:
    before, after = REPLACED[name]
    hold = argparse.Namespace(it=copy.deepcopy(before), same=copy.deepcopy(before))
    found = named(lambda one: setattr(one, "it", copy.deepcopy(after)), hold)
    assert [*{one.split(".")[1].partition("[")[0] for one in found}] == ["it"]


SAME: dict[str, Callable[[Any], Any]] = {
    "an equal list": lambda one: setattr(one, "items", [1, 2]),
    "an equal tensor": lambda one: setattr(one, "tensor", torch.zeros(2)),
    "an equal function": lambda one: setattr(one, "function", counter()),
    "not a number": lambda one: setattr(one, "nan", float("nan")),
    "a clock": lambda one: setattr(one, "began", time.monotonic()),
}


@pytest.mark.parametrize("name", SAME)
def test_an_equal_value_and_the_time_are_not_named(name: str) -> None:
    one = argparse.Namespace(items=[1, 2], tensor=torch.zeros(2), function=counter())
    one.nan, one.began = float("nan"), time.monotonic()
    assert not named(SAME[name], one)


def test_a_result_that_a_module_keeps_is_not_named_and_a_state_is() -> None:
    net = Net()
    objects = TrainedObjects({"model": net}, {}, {}, {})
    net(torch.ones(2))
    watch = ScriptWatch(sys._getframe(), objects, [])
    net(torch.zeros(2))
    assert watch.changed(sys._getframe(), objects, []) == ["net.cache"]


def test_what_a_librarys_object_first_fills_is_not_named_and_a_later_change_is() -> None:
    layer = nn.Dropout()
    layer.size = None  # type: ignore[assignment]
    assert not named(_set("size", 1), layer)
    assert named(_set("size", 2), layer) == ["layer.size"]


def test_attributes_that_are_only_set_carry_nothing() -> None:
    one = Own()
    one.set_epoch(0)
    found = named(lambda it: setattr(it, "epoch", it.bump()), one)
    assert {c.path[-1][1]: c.is_carried for c in found} == {"epoch": False, "n": True}


class Refuses:
    """Raises whatever is asked, like a proxy without an object."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no object")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no object")


def test_objects_that_raise_do_not_stop_a_look() -> None:
    it = argparse.Namespace(proxy=Refuses(), unhashable={"s": slice(1)}, n=1)
    assert named(_set("n", 2), it) == ["it.n"]


HELP = {
    "extra_state={'it': it}": ([1], lambda it: it.append(2)),
    "extra_state={'a': it.a}": (argparse.Namespace(a=[1]), lambda it: it.a.append(2)),
    "model=[…, it]": (nn.Linear(1, 1), lambda it: it.weight.data.add_(1)),
    "give Own state_dict() and load_state_dict(), and pass extra_state={'state': it}": (
        Own(),
        lambda it: it.bump(),
    ),
    "note = {'n': n}; extra_state=note; then use note['n']": (counter(), lambda it: it()),
    "note = {'flag': it.flag}; extra_state=note; then use note['flag']": (Own, _set("flag", True)),
    "create it from job.step, or pass its loader to job.steps": (iter([1]), next),
    "make it a buffer, or note = {'p': it.p}; extra_state=note; then use note['p']": (
        nn.Dropout(),
        _set("p", 0.1),
    ),
}


@pytest.mark.parametrize("text", HELP)
def test_the_warning_says_what_to_write(text: str) -> None:
    it, change = HELP[text]
    assert text in {one.help for one in named(lambda one: (change(one), None)[1], it)}


def _places(values: Any) -> Iterator[Any]:
    for value in values:
        frame = sys._getframe(1)
        code, offset = frame.f_code, frame.f_lasti
        seen.append((live(code, offset) | captured(code, offset), is_in_loop(code, offset)))
        yield value


seen: list[tuple[frozenset[str], Any]] = []


def test_variables_that_each_pass_writes_first_are_not_live() -> None:
    seen.clear()
    hidden: Any = None
    best, flag, kept = 9, False, 0
    for _ in _places("a"):
        total = 0
        for x in _places("b"):
            hidden = (x, hidden)
            loss = len(hidden)
            total += loss
            if flag:
                kept = 1
        if loss < best:  # loss has been written, since a loop counts as run
            best = loss
        assert kept <= total
    (epochs, first), (steps, second) = seen
    assert first
    assert second
    assert {"best", "hidden", "kept", "flag"} <= epochs & steps
    assert "total" in steps - epochs
    assert not {"loss", "x"} & (epochs | steps)
    assert carried_attributes(Net.forward.__code__) == {"cache"}


def test_paths_through_except_and_variables_of_inner_functions_are_live() -> None:
    seen.clear()
    count, failures, last, again, inner = 0, 0, None, None, 0

    def step() -> None:
        nonlocal count
        count += 1

    for _ in _places("a"):
        batches = iter(_places("b"))
        while True:
            try:
                x = next(batches)
            except StopIteration:
                break
            try:
                step()
                shown = [x + y for y in "a" if (z := y)]
                again = [repr(inner) for inner in "b"]
            except ValueError:
                failures += 1
                repr(last)
                last = failures
                continue
            except KeyboardInterrupt:
                repr((x, shown))
                raise
            repr((z, inner, (lambda: x)()))
            inner = again
    for names, is_repeated in seen:
        assert is_repeated
        assert {"count", "failures", "last", "inner"} <= names
        assert {"x", "y", "z", "shown", "again"} & names == set()
    code = sys._getframe().f_code
    assert {"count", "failures"} <= assigned(code, -1)


MODULE = """
loss, best, calls, lr = 1, 9, 0, 0.1
class Meter:
    def __init__(self): self.loss = 0
    def read(self): return self.loss
def constant():
    lr = 1
    return lr
@functools.lru_cache
def up():
    global calls
    calls += 1
for _ in places("ab"):
    loss = 2
    best = min(best, loss)
    print(lr)
"""


def test_attributes_and_locals_are_not_taken_for_globals() -> None:
    names: dict[str, Any] = {"places": _variables, "functools": functools, "__name__": __name__}
    seen.clear()
    exec(compile(MODULE, __file__, "exec"), names)
    for live_now, stored in seen:
        assert {"best", "calls", "lr"} <= live_now
        assert "loss" not in live_now
        assert {"best", "calls"} <= stored
        assert "lr" not in stored


def _variables(values: Any) -> Iterator[Any]:
    for value in values:
        frame = sys._getframe(1)
        paths = {path[0][1] for path in initial_values([frame])}
        seen.append((frozenset(live_names(frame)), paths))
        yield value


def test_a_global_and_a_variable_of_a_running_function_have_one_name() -> None:
    n, _private, net = 0, [0], nn.Linear(2, 2)
    objects = TrainedObjects({"model": net}, {}, {}, {})

    def up() -> None:
        nonlocal n
        n += 1
        _private.append(n)

    watch = ScriptWatch(sys._getframe(), objects, [])
    up()
    assert watch.changed(sys._getframe(), objects, []) == ["_private", "n"]


def test_loops_of_a_long_function_are_told_apart() -> None:
    lines = "".join(f"    a{i} = {i} + x\n" for i in range(200))
    text = f"def f(x):\n  for x in 1, 2:\n   for y in 1, 2:\n{lines}    print(a7, b)\n"
    names: dict[str, Any] = {}
    exec(text, names)  # its jumps need more than one byte
    code = names["f"].__code__
    heads = [step.offset for step in dis.get_instructions(code) if step.opname == "FOR_ITER"]
    assert [{"a7", "b"} & live(code, offset) for offset in heads] == [{"b"}] * 2
    assert [is_in_loop(code, offset) for offset in heads] == [True] * 2


def test_looks_take_no_more_than_their_share_of_the_time() -> None:
    clock = [0.0]
    allowance = Allowance(lambda: clock[0])
    looks = 0
    for _ in range(10_000):
        clock[0] += 0.1
        if allowance.is_left:
            with allowance:
                clock[0] += 0.02
                looks += 1
    assert FREE_S + SHARE * clock[0] <= looks * 0.02 <= FREE_S + SHARE * clock[0] + 0.02
