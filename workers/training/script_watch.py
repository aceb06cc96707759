"""Detection of values that a script changes and ``job.steps`` does not restore.

Such values start over in a resumed script. All that the script reaches is marked before a loop and
at the beginning of the first epoch, and compared later. Nothing is restored here.
"""

from __future__ import annotations

import contextlib
import functools
import time
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from pipeswitch.base import state_codec
from pipeswitch.base.errors import InvalidInput

from .liveness import attributes_read, captured, carried_attributes, is_in_loop, live, names_in
from .marks import mark
from .objects import TrainedObjects, is_wrapper_of
from .randomness import generators_of
from .reachable import MAX_PARTS, PLAIN, Path, file_of, is_own, script_frames, text, walk
from .snapshot import NOTES, has_state

NOTHING: Final = mark(None)
FUNCTIONS: Final = (FunctionType, classmethod, staticmethod, type(functools.cache(len)))
CLOCKS: Final = (time.time, time.monotonic, time.perf_counter)


class Changed(str):
    """Expression of one changed value.

    Attributes:
        path, mark: of the value, as in ``ScriptWatch.marks``.
        is_carried: False for an attribute that the script's code only sets, or sets before it
            reads it, so that it may carry nothing from one pass to the next.
        help: what the script can do so that the value is restored.
    """

    path: Path
    mark: Any
    is_carried: bool
    help: str

    def __new__(cls, path: Path, mark: Any, *, is_carried: bool, help: str) -> Changed:
        self = super().__new__(cls, text(path))
        self.path, self.mark, self.is_carried, self.help = path, mark, is_carried, help
        return self


class ScriptWatch:
    """Marks of all that the script reaches from its frames at one instant.

    Args:
        frame: the script's frame that runs a loop of ``job``, or one that it calls.
        objects: what ``job.steps`` restores; None before the first loop.
        loader: the loop's loader, which need not have a variable.
        others: further objects that are restored.

    Attributes:
        marks: by path, a value's mark and its identity.
    """

    def __init__(
        self,
        frame: FrameType,
        objects: TrainedObjects | None = None,
        loader: Any = None,
        others: Iterable[Any] = (),
    ) -> None:
        self._began_s = time.monotonic()
        self._code, self._offset = _place(frame)
        marks = _marks(frame, objects, loader, others, {}, set())
        self.marks = {path: mark for path, mark, _ in marks}

    def changed(
        self, frame: FrameType, objects: TrainedObjects, loader: Any, others: Iterable[Any] = ()
    ) -> list[Changed]:
        """Return what has changed since the marks were made, outermost expressions only; nothing
        if the script is at another place."""
        code, offset = _place(frame)
        if code is not self._code or (offset != self._offset and is_in_loop(code, offset)):
            return []
        differences: dict[Path, tuple[Any, bool]] = {}
        values, written = dict[Path, Any](), set[int]()
        codes: set[CodeType] = set()
        for path, now, value in _marks(frame, objects, loader, others, values, codes):
            then = self.marks.get(path)
            if then is None or then[0] == now[0] or self._is_instant(value):
                continue
            is_below = any(path[:length] in differences for length in range(1, len(path)))
            if is_below or (then[0] == NOTHING and _is_of_library(values.get(path[:-1]))):
                continue
            is_replaced = now[1] != then[1]
            # It has another name, or is the variable of a function that runs.
            if now[1] in written and (not is_replaced or path[-1][0] == "cell"):
                continue
            written.add(now[1])
            differences[path] = (now, is_replaced)
        if not differences:
            return []
        carried = frozenset().union(*map(carried_attributes, codes))
        carried |= {name[1:] for name in live(code, offset) if name[0] == "."}
        read = frozenset().union(*map(attributes_read, codes))
        return [
            Changed(path, now, is_carried=is_carried, help=_help(path, values, is_replaced))
            for path, (now, is_replaced) in differences.items()
            for is_carried in [path[-1][0] != "attr" or path[-1][1] in carried]
            if is_carried or not _is_result(path, values, read)
        ]

    def _is_instant(self, value: Any) -> bool:
        past_s = 1.0 + time.monotonic() - self._began_s
        return isinstance(value, float) and any(0 <= now() - value <= past_s for now in CLOCKS)


def _place(frame: FrameType) -> tuple[CodeType, int]:
    """Return code and offset of the innermost frame that is the script's own."""
    own = (script_frames(frame) or [frame])[-1]
    return own.f_code, own.f_lasti


def _is_of_library(owner: Any) -> bool:
    """Return True for an object of a library's class: it fills an empty attribute when it is first
    used, as it does in each life."""
    kind = type(owner)
    is_record = kind in (Namespace, SimpleNamespace) or issubclass(kind, dict | list)
    return not (owner is None or is_record or is_own(file_of(kind)))


def _is_result(path: Path, values: Mapping[Path, Any], read: Collection[str]) -> bool:
    """Return True for an attribute in which a module keeps a tensor of its last forward."""
    value, owner = values[path], values.get(path[:-1])
    is_of_module = isinstance(value, torch.Tensor) and isinstance(owner, nn.Module)
    return is_of_module and (value.grad_fn is not None or path[-1][1] not in read)


def _help(path: Path, values: Mapping[Path, Any], is_replaced: bool) -> str:
    """Return what to write so that a value is restored."""
    while path[-1][0] == "item" and type(values[path[:-1]]) in NOTES:
        path, is_replaced = path[:-1], False
    name, value, owner, key = text(path), values[path], values.get(path[:-1]), str(path[-1][1])
    if isinstance(value, nn.Module):
        return f"model=[…, {name}]"
    if (type(value) in NOTES or has_state(value)) and not is_replaced:
        return f"extra_state={{{key!r}: {name}}}"
    if isinstance(value, Iterator):
        return f"create {name} from job.step, or pass its loader to job.steps"
    is_object = not isinstance(owner, (nn.Module, FunctionType, type, ModuleType, type(None)))
    if path[-1][0] == "attr" and is_object:
        which = f"{type(owner).__name__} state_dict() and load_state_dict()"
        return f"give {which}, and pass extra_state={{'state': {text(path[:-1])}}}"
    if path[-1][0] == "cell":
        name = key
    try:
        state_codec.encode(value)
    except InvalidInput:
        return f"keep what {name} has as plain values in a dict, and pass that as extra_state"
    note = f"note = {{{key!r}: {name}}}; extra_state=note; then use note[{key!r}]"
    is_variable = owner is None and len(path) == 1
    before = "make it a buffer, or " if isinstance(owner, nn.Module) else ""
    return f"{before}{note}, or extra_state='auto'" if is_variable else f"{before}{note}"


def _known(objects: TrainedObjects, loader: Any, others: Iterable[Any]) -> set[int]:
    """Return the ids of all captured objects and of their contents, without modules, and the
    addresses of captured tensors, of which others may be views."""
    todo = [*objects.schedulers.values(), *objects.optimizers.values(), *objects.extras.values()]
    todo += [*objects.wrappers.values(), *objects.wrapped.values(), *others]
    todo += [one.param_groups for one in objects.optimizers.values()]
    known = {id(one) for one in generators_of(loader).values()}
    parts = [getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler")]
    known |= {id(one) for one in (loader, *parts) if has_state(one) or isinstance(one, Iterator)}
    if has_state(loader):
        known |= {id(one) for one in parts if one is not None}
    known |= {id(one) for one in (*objects.parameters.values(), *objects.buffers.values())}
    while todo:
        one = todo.pop()
        if not isinstance(one, PLAIN):
            known |= {id(one), _address(one)}
        if isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, (list, tuple)) and len(one) <= MAX_PARTS:
            todo += one
    return known


def _address(value: Any) -> int:
    """Return the address of a tensor's or array's memory, which views share; else an identity."""
    if isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray | torch.Tensor):
        return _address(value.base)
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return (is_dense and value.untyped_storage().data_ptr()) or id(value)


def _marks(
    frame: FrameType,
    objects: TrainedObjects | None,
    loader: Any,
    others: Iterable[Any],
    values: dict[Path, Any],
    codes: set[CodeType],
) -> Iterator[tuple[Path, tuple[Any, int], Any]]:
    """Yield path, mark with identity, and value of all that is not restored.

    ``values`` is filled with all that was met on the way, ``codes`` with the script's functions.
    """
    known = set() if objects is None else _known(objects, loader, others)
    trained = set() if objects is None else {id(one) for one in objects.modules}
    more = {} if objects is None else {**objects.models, "loader": loader}
    frames, marks = script_frames(frame), dict[int, Any]()
    codes |= {one.f_code for one in frames}
    for path, value in walk(frames, live_names, known=known, more=more):
        values[path] = value
        if id(value) not in marks:
            marks[id(value)] = None
            with contextlib.suppress(Exception):  # what a library's object raises when asked
                if isinstance(value, FunctionType) and is_own(value.__code__.co_filename):
                    codes.add(value.__code__)
                is_kept = {id(value), _address(value)} & known or id(value) in trained
                if not is_kept and not is_wrapper_of(value, known):
                    marks[id(value)] = mark(value)
        if marks[id(value)] is not None:
            yield path, (marks[id(value)], id(value)), value


def live_names(frame: FrameType) -> list[str]:
    """Return the variables of a frame whose values the next pass of its loop may read."""
    code, variables = frame.f_code, frame.f_locals
    if not is_in_loop(code, frame.f_lasti):
        return [*variables]
    names = live(code, frame.f_lasti) | captured(code, frame.f_lasti)
    if variables is frame.f_globals:  # functions may read them, too
        names = names.union(*(names_in(one, "LOAD") for one in codes_of(variables)))
    return [name for name in variables if name in names]


def codes_of(variables: Mapping[str, Any]) -> Iterator[CodeType]:
    """Yield the code of the functions and methods among the variables of a module or class that
    are the script's own."""
    for value in [*variables.values()]:
        if type(value) is property:
            value = value.fset or value.fget
        while type(value) in FUNCTIONS:
            value = getattr(value, "__func__", value)
            if type(value) is FunctionType and is_own(value.__code__.co_filename):
                yield value.__code__
            value = getattr(value, "__wrapped__", None)  # by a decorator
        if issubclass(type(value), type) and is_own(file_of(value)):
            yield from codes_of({k: v for k, v in vars(value).items() if not isinstance(v, type)})
