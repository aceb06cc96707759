"""Attributes of the script's objects: callbacks, trainers, modules, optimizers.

They are captured at each commit point, so this must stay fast.
"""

from __future__ import annotations

import datetime
import dis
import enum
import inspect
import io
import logging
import os
import warnings
from collections.abc import Collection, Iterator
from typing import Any, Final

import torch
from torch.utils.data import Dataset

from pipeswitch.base import state_codec
from pipeswitch.base.errors import InvalidInput
from pipeswitch.job import InexactResumeWarning, script_level

from .snapshot import filled, has_state, load_state, state_of

LIBRARIES = ("lightning", "pytorch_lightning", "transformers", "accelerate", "tqdm", "rich")
CONSTANTS = (os.PathLike, io.IOBase, enum.Enum, datetime.timedelta, logging.Logger, Dataset)

NUMBERS: Final = (int, float, bool, str, type(None))
MAX_PARTS: Final = 256  # tensors in an attribute that is captured at each step


class Keepers:
    """State of callbacks that their ``state_dict()`` does not contain.

    Their attributes are captured: plain values, tensors, generators, and the state of modules (such
    as averaged weights). An attribute of another type causes a warning, once.

    Args:
        callbacks: the trainer's callbacks, in order.
        hook: method in which a callback adds its state to checkpoints. A callback that overrides it
            is captured even if it belongs to the library.
        model: the trained model, whose state is captured elsewhere.
    """

    def __init__(self, callbacks: list[Any], hook: str, model: Any) -> None:
        self._trained = {id(module) for module in model.modules()}
        self._callbacks = {
            f"{index}.{type(one).__name__}": one
            for index, one in enumerate(callbacks)
            if _overrides(one, hook) or not type(one).__module__.startswith(LIBRARIES)
        }
        self._warned = False

    def state_dict(self) -> dict[str, Any]:
        return {key: self._state_of(key, one) for key, one in self._callbacks.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, one in self._callbacks.items():
            values, states = state.get(key, ({}, {}))
            for name, value in values.items():
                setattr(one, name, filled(vars(one).get(name), value))
            for name, value in states.items():
                now = vars(one).get(name)
                if has_state(now):
                    load_state(now, value)
                else:
                    self._warn(key, name, now, "is created after training has started")

    def _state_of(self, key: str, one: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the plain values, and the states of attributes that have a ``state_dict()``."""
        values: dict[str, Any] = {}
        states: dict[str, Any] = {}
        for name, value in vars(one).items():
            if id(value) in self._trained or isinstance(value, torch.optim.Optimizer):
                continue
            if has_state(value):
                states[name] = state_of(value)
                continue
            try:
                state_codec.encode(value)
                values[name] = value
            except InvalidInput:
                is_constant = callable(value) or isinstance(value, CONSTANTS)
                is_constant = is_constant or _overrides(one, "state_dict")
                kinds = type(one).__module__, type(value).__module__
                if not is_constant and not any(kind.startswith(LIBRARIES) for kind in kinds):
                    self._warn(key, name, value, "cannot be captured")
        return values, states

    def _warn(self, key: str, name: str, value: Any, why: str) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"job.trainer: {key.partition('.')[2]}.{name}, of type {type(value).__name__}, {why}: "
            "it starts over in a resumed script. Create it before training, or give the callback "
            "state_dict() and load_state_dict()",
            InexactResumeWarning,
            stacklevel=script_level(),
        )


class Attributes:
    """Plain attributes of a trainer, module or optimizer that no class of a library assigns.

    An attribute that cannot be captured causes a warning, once, if it is replaced in training.

    Args:
        owners: trainers, modules, optimizers and dicts of the script.
        others: objects of libraries; only numbers and texts that training changes are captured.
        known: ids of parameters and buffers; attributes that contain one are not captured.
    """

    def __init__(
        self, owners: dict[str, Any], others: dict[str, Any], known: Collection[int] = ()
    ) -> None:
        self._owners = {key: _items(one) for key, one in owners.items() if one is not None}
        self._kinds = {key: type(owners[key]) for key in self._owners}
        self._names = {key: _assigned_by_library(owners[key]) for key in self._owners}
        self._odd: dict[tuple[str, str], Any] = {}
        self._warned, self._known = False, known
        self._others = {key: (vars(one), _numbers_of(one)) for key, one in others.items()}

    def state_dict(self) -> dict[str, Any]:
        changed = {
            key: {name: (value, "cpu") for name, value in zip(first, now, strict=True)}
            for key, (items, first) in self._others.items()  # in each step: keep it fast
            if (now := [*map(items.get, first)]) != [*first.values()]
        }
        return {key: dict(self._values(key, one)) for key, one in self._owners.items()} | changed

    def _values(self, key: str, items: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, str]]]:
        names = self._names[key]
        for name, value in [*items.items()]:
            if name in names:
                continue
            if type(value) in NUMBERS:
                yield name, (value, "cpu")
                continue
            if callable(value) or has_state(value):
                continue
            try:
                _, parts = state_codec.encode(value)
                if any(id(part.source) in self._known for part in parts):
                    continue
                if len(parts) <= MAX_PARTS:
                    tensors = (p.source for p in parts if isinstance(p.source, torch.Tensor))
                    yield name, (value, next((str(one.device) for one in tensors), "cpu"))
                    continue
            except InvalidInput:
                parts = []
            if parts or self._odd.setdefault((key, name), value) is not value:
                self._warn(f"{self._kinds[key].__name__}.{name}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        owners = self._owners | {key: items for key, (items, _) in self._others.items()}
        for key, values in state.items():
            for name, (value, device) in values.items() if key in owners else ():
                owners[key][name] = filled(owners[key].get(name), _moved(value, device))

    def _warn(self, name: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"job: {name} changes, cannot be captured, and starts over in a resumed "
                "script. Keep it in numbers, lists or tensors",
                InexactResumeWarning,
                stacklevel=script_level(),
            )


def _moved(value: Any, device: str) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_moved(one, device) for one in value)
    if type(value) is dict:
        return {key: _moved(one, device) for key, one in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _items(owner: Any) -> dict[str, Any]:
    return owner if isinstance(owner, dict) else vars(owner)


def _numbers_of(owner: Any) -> dict[str, Any]:
    pairs = [(name, one) for name, one in vars(owner).items() if name[0] != "_"]
    return {name: one for name, one in pairs if type(one) in NUMBERS and name != "training"}


def _assigned_by_library(owner: Any) -> set[str]:
    """Return the names of attributes that the methods of torch's and the trainer's classes set."""
    names = set(vars(torch.nn.Module()))
    for kind in type(owner).__mro__:
        if kind.__module__.startswith((*LIBRARIES, "torch.")):
            for method in vars(kind).values():
                code = getattr(inspect.unwrap(getattr(method, "fset", method)), "__code__", None)
                steps = () if code is None else dis.get_instructions(code)
                names |= {one.argval for one in steps if one.opname == "STORE_ATTR"}
    return names


def _overrides(callback: Any, method: str) -> bool:
    kinds = (kind for kind in type(callback).__mro__ if method in vars(kind))
    return any(not kind.__module__.endswith(".callback") for kind in kinds)
