"""Detection of modules that keep state between calls.

A module that keeps state (a cache, a hidden state, the scale of the first data) has no unique
answer to a request. Two runs on the same inputs may still agree, and a graph traced after them
contains the state as a constant. So answers are compared with those of the module's initial state.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn

from ..interface.dims import values_of
from .checking import all_same, keeps_state, on_other_values, program_on_cpu

if TYPE_CHECKING:
    from .encoder import EncodedProgram

_LIBRARIES: Final = {*sys.stdlib_module_names, "pipeswitch"}
_INSTALLED: Final = {"site-packages", "dist-packages"}
"""Folders of installed packages. Like ``_LIBRARIES``, they contain no state of a model, except for
the packages of the model's own classes. Packages in ``_SHARED`` never contain such state."""
_SHARED: Final = {"numpy", "torch", "torchvision", "transformers"}
_ABSENT: Final = object()
_AROUND: Final[dict[type, str]] = {
    **dict.fromkeys((MethodType, staticmethod, classmethod), "__func__"),
    **dict.fromkeys((functools.cached_property, functools.partial), "func"),
    **dict.fromkeys((FunctionType, functools._lru_cache_wrapper), "__wrapped__"),
    property: "fget",
}
"""Types that may wrap a function, and the attribute that holds the function."""


class Fresh:
    """Runner of a module that restores the module's initial state before each call.

    It restores the attributes of the module and of plain objects in it, and everything that its
    code can reach: globals, class attributes, closures, default arguments. It clears each
    ``lru_cache``. Parameters and buffers are shared: other checks detect writes to their bytes.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any] | None = None) -> None:
        """Keep the state of ``module``; ``call`` runs it on flat inputs (default: the module).

        Attributes:
            now: runs the module in its current state.
        """
        self.now = call or (lambda inputs: list(module(*inputs)))
        self._own = _packages(module)
        reach = _Reach(module, self._own)
        self._places, self._caches = list(reach.places.values()), reach.caches
        self._shared = {id(value): value for value in (*module.modules(), *module.buffers())}
        self._then = self._copied([place.get() for place in self._places])

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with self.inside():
            return list(self.now(inputs))

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Restore the initial state for the block, and the current state afterwards."""
        now = [place.get() for place in self._places]
        for cache in self._caches:
            cache.cache_clear()
        try:
            self._put(self._copied(self._then))
            yield
        finally:
            self._put(now)

    def _put(self, values: Sequence[Any]) -> None:
        for place, value in zip(self._places, values, strict=True):
            place.set(value)

    def _copied(self, values: list[Any]) -> Any:
        return _copied(values, dict(self._shared), self._own)


def _copied(value: Any, copies: dict[int, Any], own: frozenset[str]) -> Any:
    """Copy containers, tensors and plain objects, each once; share parameters and other values.

    An object with ``__del__`` is shared: deleting a copy would close a resource of the original.
    """
    if id(value) in copies or isinstance(value, nn.Parameter) or hasattr(type(value), "__del__"):
        return copies.get(id(value), value)
    copied: Any = value
    if isinstance(value, torch.Tensor):
        copied = copies[id(value)] = value.detach().clone()
    elif type(value) is tuple:
        copied = tuple(_copied(item, copies, own) for item in value)
    elif isinstance(value, dict | list | deque | set | np.ndarray):
        copied = copies[id(value)] = copy.copy(value)
        if isinstance(value, dict | list | deque):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                copied[key] = _copied(item, copies, own)
    elif _is_plain(value, own):
        copied = copies[id(value)] = object.__new__(type(value))
        object.__setattr__(copied, "__dict__", _copied(vars(value), copies, own))
    return copied


def _is_plain(value: Any, own: frozenset[str]) -> bool:
    """Return whether the attributes of a module or non-library object are its whole state."""
    kind: Any = type(value)
    ways = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__")
    has_own = any(getattr(kind, name) is not getattr(object, name, None) for name in ways)
    has_own |= any(hasattr(kind, name) for name in ("__copy__", "__deepcopy__", "__del__"))
    is_library = _is_library(kind.__module__, own) and not isinstance(value, nn.Module)
    return hasattr(value, "__dict__") and not has_own and not is_library


def _packages(module: nn.Module) -> frozenset[str]:
    kinds = {kind for child in module.modules() for kind in type(child).__mro__}
    return frozenset(kind.__module__.partition(".")[0] for kind in kinds) - _SHARED


def _is_library(module_name: str | None, own: frozenset[str]) -> bool:
    """Return whether a module belongs to a library, not to the model or its user."""
    package = (module_name or "").partition(".")[0]
    if package in _LIBRARIES or package in _SHARED:
        return True
    return package not in own and _is_installed(package)


@functools.cache
def _is_installed(package: str) -> bool:
    module = sys.modules.get(package)
    files = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(not _INSTALLED.isdisjoint(Path(file).parts) for file in files if file)


class _Place:
    """A place of state: an attribute of a module or class, a global, or a cell of a closure."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    def get(self) -> Any:
        if isinstance(self._owner, dict | type):
            attributes = self._owner if isinstance(self._owner, dict) else vars(self._owner)
            return attributes.get(self._name, _ABSENT)
        return getattr(self._owner, self._name)

    def set(self, value: Any) -> None:
        if self.get() is value:
            return
        if isinstance(self._owner, dict):
            self._owner[self._name] = value
            if value is _ABSENT:
                del self._owner[self._name]
        elif value is _ABSENT:
            delattr(self._owner, self._name)
        elif isinstance(self._owner, nn.Module):  # its own __setattr__ would register a value
            object.__setattr__(self._owner, self._name, value)
        else:
            setattr(self._owner, self._name, value)


class _Reach:
    """Places and caches that a module's code can reach, except those of libraries."""

    def __init__(self, module: nn.Module, own: frozenset[str]) -> None:
        self._own = own
        self.places: dict[tuple[int, str], _Place] = {}
        self.caches: list[Any] = []
        self._seen: set[int] = set()
        for child in module.modules():
            self._add(child, "__class__", "__dict__")  # because a lazy module changes its class
            self._look(type(child))
            for value in list(vars(child).values()):
                self._look(value)

    def _add(self, owner: Any, *names: str) -> None:
        for name in names:
            self.places.setdefault((id(owner), name), _Place(owner, name))

    def _look(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, type):
            for kind in value.__mro__:
                if not _is_library(kind.__module__, self._own):
                    self._look_at_class(kind)
        elif _is_plain(value, self._own) and not isinstance(value, nn.Module):
            self._look(type(value))
            for attribute in list(vars(value).values()):
                self._look(attribute)
        if type(value) in _AROUND:
            self._look(getattr(value, _AROUND[type(value)], None))
        if type(value) is functools._lru_cache_wrapper and not _is_library(
            value.__module__, self._own
        ):
            self.caches.append(value)
        if type(value) is FunctionType and not _is_library(value.__module__, self._own):
            self._look_at_function(value)

    def _look_at_class(self, kind: type) -> None:
        """Visit a class's attributes, and the attributes that its functions may set."""
        functions = [value for value in vars(kind).values() if type(value) is FunctionType]
        names = {*vars(kind)}.union(*(_names(function.__code__) for function in functions))
        for name in names:
            if not name.startswith("__"):
                self._look_at_name(kind, name)
        for function in functions:
            self._look(function)

    def _look_at_function(self, function: FunctionType) -> None:
        self._add(function, "__defaults__", "__kwdefaults__")
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # the cell is empty
                self._look(cell.cell_contents)
                self._add(cell, "cell_contents")
        names = _names(function.__code__)
        for name in _globals(function.__code__):
            value = function.__globals__.get(name)
            if isinstance(value, ModuleType) and not _is_library(value.__name__, self._own):
                for inner in names & vars(value).keys():
                    self._look_at_name(vars(value), inner)
            else:
                self._look_at_name(function.__globals__, name)

    def _look_at_name(self, owner: Any, name: str) -> None:
        value = _Place(owner, name).get()
        if type(value) not in _AROUND and not isinstance(value, type | ModuleType):
            self._add(owner, name)
        self._look(value)


def _names(code: CodeType) -> set[str]:
    """Return the names that a code object, with its inner functions, reads or writes."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _globals(code: CodeType) -> set[str]:
    """Return the names in ``_names`` that are globals, not attributes."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    own = {one.argval for one in dis.get_instructions(code) if one.opname.endswith("_GLOBAL")}
    return own.union(*map(_globals, inner))


def check_keeps_nothing(
    program: EncodedProgram, fresh: Fresh, inputs: Sequence[torch.Tensor]
) -> None:
    """Compare the program with the fresh module on other values than those of the export.

    Raises:
        RegistrationRefused: their answers differ, so the module keeps state.
    """
    specs = program.graph.inputs
    own = values_of((spec.shape for spec in specs), (value.shape for value in inputs))
    assert own is not None
    compute = program_on_cpu(program.graph, program.weights)
    last_outputs: list[torch.Tensor] = []

    def both(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # The program first: the module's run may write the weights that both share.
        last_outputs.clear()
        with contextlib.suppress(Exception):  # values may be invalid, such as indices out of range
            last_outputs.extend(compute([value.clone() for value in values]))
        return fresh(values)

    _, expected = on_other_values(both, specs, own, inputs)
    is_here = all(value.device.type == "cpu" for value in expected)  # on a GPU bits may differ
    if is_here and not all_same(expected, last_outputs):
        raise keeps_state(
            "its answers to other values than the example's differ from its exported graph's"
        )
