"""Loaders of accelerate, and training loops of Transformers' and Lightning's ``Trainer``.

These loops fetch from a ``LoaderProxy``, and each fetch ends a step. All epochs of one ``train()``
are one loop of the session: work of the framework between two epochs belongs to the last step of
the earlier epoch.
"""

from __future__ import annotations

import contextlib
import datetime
import dis
import enum
import inspect
import io
import logging
import os
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.utils.data import Dataset

from pipeswitch.base import state_codec
from pipeswitch.base.errors import InvalidInput
from pipeswitch.inputs.randomness import RandomState
from pipeswitch.job import InexactResumeWarning, script_level

from .reachable import is_own
from .snapshot import DataPosition, DataState, filled, has_state, load_state, state_of

LIBRARIES = ("lightning", "pytorch_lightning", "transformers", "accelerate", "tqdm", "rich")
CONSTANTS = (os.PathLike, io.IOBase, enum.Enum, datetime.timedelta, logging.Logger, Dataset)

NUMBERS: Final = (int, float, bool, str, type(None))
MAX_PARTS: Final = 256  # tensors in an attribute that is captured at each step

Moment = tuple[tuple[Any, ...], tuple[Any, ...]]  # states of generators: global, loader's


class Source:
    """Batches of a framework's loader, epoch after epoch, and the position to resume from.

    Accelerate's loader fetches one batch ahead, to recognise the last batch. This fetch used the
    generators' states of the step before, so a resumed script restores them to fetch it again.
    """

    # No __dict__: the session would find this object's generators there and capture them, too.
    __slots__ = (
        "_ahead",
        "_before",
        "_data",
        "_device",
        "_entry",
        "_held",
        "_is_fresh",
        "_iterator",
        "_loader",
        "given",
        "is_closed",
    )

    def __init__(self, loader: Any, device: str) -> None:
        self._ahead = hasattr(loader, "base_dataloader")  # accelerate's public name
        self._loader, self._device = loader, device
        self._data = DataPosition(loader.base_dataloader if self._ahead else loader, {})
        self._data.warn_if_inexact()
        self._held: deque[Any] = deque()
        self._entry: Moment | None = None  # generators at the start of this epoch
        self._before: Moment | None = None  # generators at the start of the last fetch
        self._is_fresh = False  # an epoch has begun, but no batch was fetched
        self.given = 0  # number of this epoch's returned batches
        self.is_closed = False  # the framework has finished and fetches no more batches

    def begin(self, behind: int) -> None:
        """Begin the next epoch after its first ``behind`` batches."""
        self.given, self._is_fresh = behind, True
        self._entry = self._before = now = self._now()
        self._open(DataState(*now[1]) if behind else None)

    @property
    def is_over(self) -> bool:
        """True if this epoch's last batch was returned."""
        if self._ahead:
            return not (self._is_fresh or self._held)
        return bool(self.given == len(self._loader))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.is_closed:
            raise StopIteration
        if self._ahead and self._is_fresh:
            self._fetch()
        self._is_fresh = False
        try:
            batch = self._held.popleft() if self._held else next(self._iterator)
        except StopIteration:
            raise InvalidInput(
                f"the loader returned only {self.given} batches, fewer than its length"
            ) from None
        if self._ahead:
            self._fetch()
        self.given += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position; called between two steps, while no fetch is under way."""
        names = ("given", "is_closed", "_is_fresh", "_entry", "_before")
        iteration = self._loader.iteration if self._ahead else 0
        state = {name: getattr(self, name) for name in names}
        data = self._data.capture()
        now = (data.generators, data.own)
        return {**state, "held": len(self._held), "iteration": iteration, "now": now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position; used batches are fetched again only if the loader requires it."""
        for name in ("given", "is_closed", "_is_fresh", "_entry", "_before"):
            setattr(self, name, state[name])
        if self.is_closed:
            return
        self.pass_by(state)
        now = DataState(*state["now"])
        self._go_to(state["_entry"])
        self._open(DataState(*state["_before"][1]) if state["held"] else now)
        if state["held"]:
            self._go_to(state["_before"])
            self._held.append(next(self._iterator))
        self._data.restore_generators(now)

    def pass_by(self, state: dict[str, Any]) -> None:
        """Set the loader's epoch to that of ``state``; fetch nothing."""
        if self._ahead:
            self._loader.iteration = state["iteration"]

    def _open(self, data: DataState | None) -> None:
        """Open the loader at a position; with None, at its start."""
        self._held.clear()
        if self._ahead:  # like DataLoaderShard.__iter__
            self._loader.begin()
            self._loader.set_epoch(self._loader.iteration)
        if data is None:
            self._iterator = self._data.open_new()
        elif self._data.is_checked and self._entry is not None:  # the state may omit a buffer
            self._iterator = self._data.open_again(self.given, DataState(*self._entry[1]))
        else:
            self._iterator = self._data.open_at(self.given, data)

    def _fetch(self) -> None:
        self._before = self._now()
        try:
            self._held.append(next(self._iterator))
        except StopIteration:
            self._loader.end_of_dataloader = True

    def _now(self) -> Moment:
        data = self._data.capture()
        return RandomState(self._device).values(), (data.generators, data.own)

    def _go_to(self, moment: Moment) -> None:
        RandomState.from_values(moment[0]).restore(self._device)
        self._data.restore_generators(DataState(*moment[1]))


class AcceleratedEpoch(Source):
    """One epoch of accelerate's loader in a ``job.steps`` loop."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._entry is None:  # not resumed
            self.begin(0)
        return self

    def __next__(self) -> Any:
        from accelerate.utils import send_to_device

        if self.is_over:  # like the end of DataLoaderShard.__iter__
            self._loader.iteration += 1
            self._loader.end()
            raise StopIteration
        return send_to_device(super().__next__(), self._loader.device)


class LoaderProxy:
    """Proxy of a framework's loader, with an iteration of its own and the loader's attributes."""

    def __init__(self, loop: TrainerLoop, loader: Any) -> None:
        self._loop, self._loader, self._behind = loop, loader, 0
        self._source = Source(loader, loop.session.device)
        self._steps: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:  # Lightning sets the loader's worker_init_fn
            setattr(self._loader, name, value)

    def __iter__(self) -> Iterator[Any]:
        behind, self._behind = self._behind, 0
        self._source.begin(behind)
        return self

    def __next__(self) -> Any:
        if self._source.is_over:
            raise StopIteration
        return self.step()

    def step(self) -> Any:
        """Return the next batch; the first call begins or resumes the session's loop."""
        if self._steps is None:
            self._steps = self._loop.session.steps(self._source, **self._loop.objects())
        return next(self._steps)

    def skip(self, batches: int) -> LoaderProxy:
        """Begin the next epoch after ``batches`` batches, unless a commit sets the position."""
        if self._loop.session.place.upcoming() is None:
            self._behind = batches
        return self

    def close(self) -> None:
        """End and commit the session's loop, because the framework has finished."""
        self._source.is_closed = True
        if self._steps is not None:
            next(self._steps, None)


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
    """Plain attributes of a trainer or module that its library's own classes do not assign.

    An attribute that cannot be captured causes a warning, once, if it is replaced in training.

    Args:
        owners: trainers, modules and dicts of the script.
        others: objects of libraries; only numbers and texts that training changes are captured.
    """

    def __init__(self, owners: dict[str, Any], others: dict[str, Any]) -> None:
        self._owners = {key: _items(one) for key, one in owners.items() if one is not None}
        self._kinds = {key: type(owners[key]) for key in self._owners}
        self._names = {key: _assigned_by_library(owners[key]) for key in self._owners}
        self._odd: dict[tuple[str, str], Any] = {}
        self._warned = False
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
                f"job.trainer: {name} changes, cannot be captured, and starts over in a resumed "
                "script. Keep it in numbers, lists or tensors",
                InexactResumeWarning,
                stacklevel=script_level(),
            )


def _moved(value: Any, device: str) -> Any:
    """Return the value with its tensors on the device."""
    if type(value) in (list, tuple):
        return type(value)(_moved(one, device) for one in value)
    if type(value) is dict:
        return {key: _moved(one, device) for key, one in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _items(owner: Any) -> dict[str, Any]:
    return owner if isinstance(owner, dict) else vars(owner)


def _numbers_of(owner: Any) -> dict[str, Any]:
    """Return an object's numbers and texts, without private ones and a module's ``training``."""
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
    """Return True if a class other than the library's base class defines the method."""
    kinds = (kind for kind in type(callback).__mro__ if method in vars(kind))
    return any(not kind.__module__.endswith(".callback") for kind in kinds)


class TrainerLoop:
    """One trainer's loop; as an ``extra_state`` it captures the trainer's own state."""

    def __init__(self, session: Any, trainer: Any) -> None:
        self.session, self.trainer = session, trainer
        self.feed: LoaderProxy | None = None
        self.was_over = False  # True: the loop had ended in the job's last commit

    def objects(self) -> dict[str, Any]:
        """Return the keyword arguments for ``job.steps``."""
        raise NotImplementedError

    def extras(self, scaler: Any, keepers: Keepers) -> dict[str, Any]:
        extras = {"trainer": self, "callbacks": keepers}
        return extras if scaler is None else {**extras, "scaler": scaler}

    def attributes(self, model: Any, owners: dict[str, Any], **others: Any) -> Attributes:
        """Return the attributes of a model's modules and of further objects."""
        for name, module in model.named_modules():
            file = getattr(sys.modules.get(type(module).__module__), "__file__", None)
            (owners if is_own(file or "") else others)[f"model.{name}"] = module
        return Attributes(owners, others)

    def began(self, *_: Any, **__: Any) -> None:
        """Restore a loop that had ended; called as a callback when training begins."""
        if self.was_over and self.feed is not None:
            with contextlib.suppress(StopIteration):
                self.feed.step()

    def ended(self, *_: Any, **__: Any) -> None:
        if self.feed is not None:
            self.feed.close()
