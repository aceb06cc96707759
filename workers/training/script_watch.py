"""Detection of variables that a script's loop changes and ``job.steps`` does not capture.

Such variables start over in a resumed script. Each variable that exists before the loop is marked
(value, length, version) and compared when a commit is due and when the loop ends. Nothing is
restored here: a warning names the variables.
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
import time
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from pipeswitch.base import state_codec
from pipeswitch.inputs.randomness import GENERATORS, generators_of

from .objects import TrainedObjects, is_wrapper_of
from .snapshot import NOTES, has_state, state_of
from .torch_private import version

MOST_LOOKED_AT: Final = 64  # entries compared in a list or dict
MAX_MODULES: Final = 200
PACKAGE: Final = __file__.rpartition("/")[0]
CLOCKS: Final = (time.time, time.monotonic, time.perf_counter)


class ScriptWatch:
    """Marks of one phase's variables, taken before its first loop."""

    def __init__(self, frame: FrameType, objects: TrainedObjects, loader: Any) -> None:
        self._began_s, self._code = time.monotonic(), frame.f_code
        self._marks = dict(_marks(frame, objects, loader))

    def changed(self, frame: FrameType | None, objects: TrainedObjects, loader: Any) -> list[str]:
        """Return the names of changed variables, without clock values and ``for`` targets."""
        if frame is None or frame.f_code is not self._code:
            return []
        now = dict(_marks(frame, objects, loader))
        return [
            name
            for name, mark in now.items()
            if name in self._marks
            and self._marks[name] != mark
            and self._marks[name][0] == mark[0]
            and not self._is_instant(mark[1])
        ]

    def _is_instant(self, value: Any) -> bool:
        past_s = 1.0 + time.monotonic() - self._began_s
        return isinstance(value, float) and any(0 <= now() - value <= past_s for now in CLOCKS)


def _known(objects: TrainedObjects, loader: Any) -> set[int]:
    """Return the ids of all captured objects and of their contents."""
    todo = [*objects.schedulers.values(), *objects.optimizers.values(), *objects.extras.values()]
    todo += objects.wrappers.values()
    loaders = () if isinstance(loader, list) else (loader,)  # the script may shuffle a list
    known = {id(one) for one in (*objects.modules, *loaders, getattr(loader, "dataset", None))}
    known |= {id(one) for one in generators_of(loader).values()}
    known |= {id(one) for one in (*objects.parameters.values(), *objects.buffers.values())}
    while todo:
        one = todo.pop()
        known.add(id(one))
        if isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, (list, tuple)) and len(one) <= MOST_LOOKED_AT:
            todo += one
    return known


def _marks(
    frame: FrameType, objects: TrainedObjects, loader: Any
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield name and mark of the script's variables: those of its function and its file, and the
    attributes of its own objects, modules, dataset and samplers."""
    known, targets = _known(objects, loader), _targets(frame.f_code)
    places = [("", frame.f_globals)]
    if frame.f_locals is not frame.f_globals:
        places.append(("", frame.f_locals))
    places_of_data = () if has_state(loader) else ("dataset", "sampler", "batch_sampler")
    parts = [getattr(loader, name, None) for name in places_of_data]
    folder = frame.f_code.co_filename.rpartition("/")[0] + "/"
    for name, value in [pair for _, names in places for pair in names.items()]:
        if id(value) not in known and (name == "self" or _is_own(value, folder)):
            places.append((f"{name}.", getattr(value, "__dict__", {})))
    for part in (*objects.modules[:MAX_MODULES], *(one for one in parts if not has_state(one))):
        if not type(part).__module__.startswith(("torch.", "builtins")):
            places.append((f"{type(part).__name__}.", getattr(part, "__dict__", {})))
    for prefix, names in places:
        for name, value in [*names.items()]:
            is_own = isinstance(name, str) and not name.startswith("_") and name not in targets
            is_known = id(value) in known or is_wrapper_of(value, known)
            mark = _mark(value) if is_own and not is_known else None
            if mark is not None:
                yield prefix + name, mark


def _is_own(value: Any, folder: str) -> bool:
    """Return True for an object whose class is in the script's folder and has no state_dict()."""
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""
    return file.startswith(folder) and "site-packages" not in file and not has_state(value)


@functools.cache
def _targets(code: CodeType) -> set[str]:
    """Return the targets of ``for`` loops, which a resumed script assigns again."""
    names: set[str] = set()
    is_target = False
    for step in dis.get_instructions(code):
        is_store = step.opname.startswith("STORE_")
        if is_target and is_store:
            names.add(str(step.argval))
        is_target = step.opname == "FOR_ITER" or (
            is_target and (is_store or step.opname.startswith("UNPACK"))
        )
    return names


def _mark(value: Any) -> tuple[Any, ...] | None:
    """Return a mark: type or identity, with the value or version; None for unwatched types."""
    kind = type(value)
    if kind in (int, float):
        return (kind, value)
    if isinstance(value, (torch.Tensor, np.ndarray)):  # replacing the object counts as a change
        return (id(value), version(value) if isinstance(value, torch.Tensor) else 0)
    if kind in NOTES:
        parts = value.values() if hasattr(value, "values") else value
        known = (int, float, torch.Tensor)
        first = [*parts][:MOST_LOOKED_AT]
        return (id(value), len(value), *(_mark(x) if type(x) in known else id(x) for x in first))
    if isinstance(value, Iterator) and not hasattr(value, "fileno"):  # no file
        inner = [one for one in (value, *gc.get_referents(value)) if isinstance(one, Iterator)]
        if not any(PACKAGE in repr(getattr(one, "gi_code", "")) for one in inner):  # job's own
            return (id(value), *(id(part) for one in inner for part in gc.get_referents(one)))
    if isinstance(value, nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        return (id(value), sum(map(version, tensors)))
    if isinstance(value, GENERATORS) or (has_state(value) and hasattr(value, "load_state_dict")):
        try:
            data, attachments = state_codec.encode(state_of(value))
            return (id(value), repr(data), *(one.read() for one in attachments))
        except Exception:  # its state_dict() is the script's own code
            return None
    return None
