"""Models with a memory: registration refuses a model whose answers depend on earlier requests.

Each module remembers in one way. ``graph`` modules can be exported. ``module`` modules cannot, and
run as the operator's own code. A module that is accepted must answer requests in any order like a
new module."""

from __future__ import annotations

import functools
import gc
import importlib
import random
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.programs.compiler.export import export_module_to_bundle
from pipeswitch.programs.compiler.program import build
from pipeswitch.programs.compiler.statefulness import Fresh
from pipeswitch.programs.compiler.verify import same_bits
from pipeswitch.programs.interface.layout import Manifest
from pipeswitch.programs.running.executor import BoundProgram
from pipeswitch.programs.spec import BuildSpec
from tests.models import loading

T = torch.Tensor
PACKAGE = "operators_memories"
SEED = 7
KEPT: dict[str, T] = {}
LATEST: T | None = None


class Base(nn.Module):
    """Module that subtracts ``of(x)``; ``does_export`` says whether torch can trace it."""

    def __init__(self, *, does_export: bool) -> None:
        super().__init__()
        self.layer, self.does_export = nn.Linear(4, 4), does_export
        self.made()

    def made(self) -> None:
        """Create the attributes that ``of`` needs."""

    def of(self, x: T) -> Any:
        raise NotImplementedError

    def forward(self, x: T) -> T:
        y = self.layer(x - self.of(x))
        return y if self.does_export or float(x.sum()) > -1e9 else y * 2


class InGlobal(Base):
    def of(self, x: T) -> Any:
        global LATEST
        LATEST = x.mean(0) if LATEST is None else LATEST
        return LATEST


class InGlobalDict(Base):
    def of(self, x: T) -> Any:
        return KEPT.setdefault("first", x.mean(0))


class InClass(Base):
    first: T | None = None

    def of(self, x: T) -> Any:
        if InClass.first is None:
            InClass.first = x.mean(0)
        return InClass.first


class InNewClassAttribute(Base):
    def of(self, x: T) -> Any:
        if not hasattr(type(self), "scale"):
            type(self).scale = x.mean(0)
        return type(self).scale


class InDefault(Base):
    def of(self, x: T, memory: dict[str, T] = {}) -> Any:  # noqa: B006
        return memory.setdefault("first", x.mean(0))


class InClosure(Base):
    def made(self) -> None:
        first: T | None = None

        def reference(x: T) -> T:
            nonlocal first
            first = x.mean(0) if first is None else first
            return first

        self.reference = reference

    def of(self, x: T) -> Any:
        return self.reference(x)


class Holder:
    def __init__(self) -> None:
        self.first: T | None = None

    def __call__(self, x: T) -> T:
        self.first = x.mean(0) if self.first is None else self.first
        return self.first


class InObject(Base):
    def made(self) -> None:
        self.holder = Holder()

    def of(self, x: T) -> Any:
        return self.holder(x)


class InDeque(Base):
    def made(self) -> None:
        self.queue: deque[T] = deque(maxlen=3)

    def of(self, x: T) -> Any:
        self.queue.append(x.mean(0))
        return self.queue[0]


@functools.lru_cache
def scale_of(shape: Any, holder: Any) -> T:
    return holder.x.mean(0)


class InLruCache(Base):
    def of(self, x: T) -> Any:
        HOLDER.x = x
        return scale_of(tuple(x.shape), HOLDER)


HOLDER = SimpleNamespace()


class ByIdentity(Base):
    def made(self) -> None:
        self.last: Any = None

    def of(self, x: T) -> Any:
        if self.last is None or self.last[0] is not x:
            self.last = (x, x.mean(0))
        return self.last[1]


class ByAddress(Base):
    def made(self) -> None:
        self.by_address: dict[int, T] = {}

    def of(self, x: T) -> Any:
        return self.by_address.setdefault(x.data_ptr(), x.mean(0))


class Counts(Base):
    def made(self) -> None:
        self.calls = 0

    def of(self, x: T) -> Any:
        self.calls += 1
        return float(self.calls)


class Largest(Base):
    """Module that remembers the largest value, like a quantizer's observer."""

    def made(self) -> None:
        self.largest = 0.0

    def of(self, x: T) -> Any:
        self.largest = max(self.largest, float(x.abs().max()))
        return self.largest


class Observer(Base):
    def made(self) -> None:
        self.register_buffer("high", torch.zeros(4))
        self.high: T

    def of(self, x: T) -> Any:
        self.high.copy_(torch.maximum(self.high, x.amax(0)))
        return self.high


class RunningStatistics(Base):
    def made(self) -> None:
        self.norm = nn.BatchNorm1d(4)

    def of(self, x: T) -> Any:
        n = self.norm
        return nn.functional.batch_norm(x, n.running_mean, n.running_var, training=True)


class StillStatistics(Base):
    """Module that writes equal statistics in each call, which the operator's schema hides."""

    def made(self) -> None:
        self.norm = nn.BatchNorm1d(4)

    def of(self, x: T) -> Any:
        n = self.norm
        return nn.functional.batch_norm(
            x, n.running_mean, n.running_var, training=True, momentum=0.0
        )


class LazyLayer(Base):
    def of(self, x: T) -> Any:
        if not hasattr(self, "late"):
            self.late = nn.Linear(4, 4)
        return self.late(x)


class Draws(Base):
    def of(self, x: T) -> Any:
        return torch.rand(4)


class DrawsInPython(Base):
    def of(self, x: T) -> Any:
        return random.random()


class ByShape(Base):
    """Module that caches a value that depends only on the shape, which is allowed."""

    def made(self) -> None:
        self.tables: dict[int, T] = {}

    def of(self, x: T) -> Any:
        n = x.shape[1]
        return self.tables.setdefault(n, torch.arange(float(n)))


class WritesItsInput(Base):
    def of(self, x: T) -> Any:
        x.mul_(2.0)
        return 1.0


REFUSED = [
    InGlobal,
    InGlobalDict,
    InClass,
    InNewClassAttribute,
    InDefault,
    InClosure,
    InObject,
    InDeque,
    InLruCache,
    Largest,
    Observer,
    RunningStatistics,
    LazyLayer,
    Draws,
    DrawsInPython,
    Counts,
]
MODULE_MODE_ALONE = [ByIdentity, ByAddress, StillStatistics]
SERVED = [ByShape, WritesItsInput]


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear all remembered values, and make the factories an operator's package."""
    forget()
    kinds = [*REFUSED, *MODULE_MODE_ALONE, *SERVED]
    makers = {
        f"{kind.__name__}_{does_export}": functools.partial(kind, does_export=does_export)
        for kind in kinds
        for does_export in (True, False)
    }
    monkeypatch.setitem(sys.modules, PACKAGE, SimpleNamespace(**makers))  # type: ignore[arg-type]


def forget() -> None:
    global LATEST
    LATEST = None
    KEPT.clear()
    InClass.first = None
    if hasattr(InNewClassAttribute, "scale"):
        del InNewClassAttribute.scale
    InDefault.of.__defaults__[0].clear()
    scale_of.cache_clear()


def fresh(kind: type[Base], *, does_export: bool) -> Base:
    forget()
    torch.manual_seed(SEED)
    return kind(does_export=does_export).eval().requires_grad_(False)


def built(spec: BuildSpec, folder: Path) -> tuple[Manifest, BoundProgram]:
    """Build a program like a registration, and load it like a worker."""
    forget()
    manifest = build(spec, folder, lambda stage, done: None)
    forget()
    return manifest, loading.bound(folder, manifest)


def by_factory(kind: type[Base], folder: Path, *, does_export: bool) -> BoundProgram:
    spec = BuildSpec(
        name="it",
        source=f"{PACKAGE}:{kind.__name__}_{does_export}",
        weights=f"random:{SEED}",
        inputs={"x": ((2, 4), "float32")},
        allow_module_mode=True,
    )
    manifest, bound = built(spec, folder)
    assert (manifest.mode == "graph") == does_export, manifest.mode_reason
    return bound


def from_python(kind: type[Base], folder: Path, example: T) -> BoundProgram:
    folder.mkdir(exist_ok=True)
    module = fresh(kind, does_export=True)
    export_module_to_bundle(module, example, folder / "it.bundle")
    return built(BuildSpec(name="it", source=str(folder / "it.bundle")), folder / "out")[1]


EXAMPLES = [torch.zeros(2, 4), torch.ones(2, 4), torch.randn(2, 4)]


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("example", EXAMPLES, ids=["zeros", "ones", "random"])
def test_a_module_from_python_that_remembers_is_refused(
    kind: type[Base], example: T, tmp_path: Path
) -> None:
    with pytest.raises(RegistrationRefused):
        from_python(kind, tmp_path, example)


@pytest.mark.parametrize("kind", [*REFUSED, *MODULE_MODE_ALONE])
def test_a_factorys_module_that_remembers_is_refused(kind: type[Base], tmp_path: Path) -> None:
    with pytest.raises(RegistrationRefused):
        by_factory(kind, tmp_path / "module", does_export=False)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_factorys_graph_has_no_memory_in_it(kind: type[Base], tmp_path: Path) -> None:
    """Build the graph of a factory whose module remembers: it must be refused."""
    with pytest.raises(RegistrationRefused):
        by_factory(kind, tmp_path / "graph", does_export=True)


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize("way", ["graph", "module", "python"])
def test_what_answers_alike_after_any_call_is_served(
    kind: type[Base], way: str, tmp_path: Path
) -> None:
    makers: dict[str, Callable[[], BoundProgram]] = {
        "graph": lambda: by_factory(kind, tmp_path / "it", does_export=True),
        "module": lambda: by_factory(kind, tmp_path / "it", does_export=False),
        "python": lambda: from_python(kind, tmp_path / "it", torch.zeros(2, 4)),
    }
    bound = makers[way]()
    for x in (torch.randn(2, 4), torch.zeros(2, 4), torch.randn(2, 4)):
        clone = x.clone()
        with torch.no_grad():
            right = fresh(kind, does_export=way != "module")(x.clone())
        [answer] = bound.run([clone], lambda index: None)
        assert same_bits(answer.clone(), right)
        assert same_bits(clone, x), "a request is run again if its worker dies"


class Uncopied:
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("forward does not use it")


layer = Uncopied()  # forward reads an attribute of this name


def test_globals_that_only_have_an_attributes_name_are_left_alone(tmp_path: Path) -> None:
    from_python(ByShape, tmp_path / "it", torch.ones(2, 4))


class Connected:
    """Connection of a user; when the object ends, the other side is closed."""

    def __init__(self, ended: SimpleQueue[int]) -> None:
        self.ended = ended

    def __del__(self) -> None:
        self.ended.put(id(self))


class Owning(dict[str, Any]):
    """A container that owns a connection."""

    def __del__(self) -> None:
        self["ended"].put(id(self))


class Calls(nn.Module):
    """Module with a layer, and with a function that works only in the process that created it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: T) -> T:
        self.function()
        return self.layer(x)


@pytest.mark.parametrize("way", ["closure", "attribute", "container"])
def test_what_a_models_code_reaches_is_not_ended_by_its_registration(
    way: str, tmp_path: Path
) -> None:
    """Such objects must not be copied: the copy's ``__del__`` would close what both share."""
    ended: SimpleQueue[int] = SimpleQueue()
    owner: Any = Owning(ended=ended) if way == "container" else Connected(ended)
    module = Calls(lambda: None if way == "attribute" else owner).eval()
    if way == "attribute":
        module.connection = owner
    export_module_to_bundle(module, torch.randn(2, 4), tmp_path / "it.bundle")
    gc.collect()
    assert ended.empty()
    module.connection = owner  # keeps ``owner`` alive until here
    module.connection = owner = None
    gc.collect()
    assert ended.qsize() == 1


def test_objects_of_installed_packages_are_used_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such objects must not be copied: a pytest fixture refers to the whole test session."""
    ids: SimpleQueue[int] = SimpleQueue()
    Fresh(Calls(lambda: ids.put(id(monkeypatch))).eval())([torch.randn(2, 4)])
    assert ids.get() == id(monkeypatch)


def test_a_models_own_package_is_no_library_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model that remembers must be refused, even if pip has installed its code."""
    package = tmp_path / "site-packages" / "installed_model.py"
    package.parent.mkdir()
    package.write_text(INSTALLED)
    monkeypatch.syspath_prepend(str(package.parent))
    module = importlib.import_module("installed_model").Remembers().eval()
    with pytest.raises(RegistrationRefused):
        export_module_to_bundle(module, torch.zeros(2, 4), tmp_path / "it.bundle")


INSTALLED = """
import torch

class Memory:
    first = None

class Remembers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.memory = torch.nn.Linear(4, 4), Memory()

    def forward(self, x):
        if self.memory.first is None:
            self.memory.first = x.mean(0)
        return self.layer(x) + self.memory.first
"""
