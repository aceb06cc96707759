"""``extra_state="auto"``: plain values of the script's variables are captured without being named.

Captured is what the code that may still run uses: variables that it assigns, attributes of the
script's own objects that it sets, and containers, tensors, arrays and generators that it reads.
"""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import sys
import zlib
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path as FilePath
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, Final

import torch

from pipeswitch.base import state_codec
from pipeswitch.base.errors import InvalidInput

from . import reachable
from .liveness import INITS, assigned, is_in_loop, names_in
from .randomness import GENERATORS
from .script_watch import codes_of, live_names
from .snapshot import filled, load_state, state_of

AUTO: Final = "auto"
MAX_STEPS: Final = 5  # from a variable to an attribute
MAX_BYTES: Final = 4 << 20  # of one value; a larger one is passed by name
FIXED: Final = (*reachable.PLAIN, tuple, frozenset, type(FilePath()))


class ScriptValues:
    """Values that the script's frames have now, by their expressions; an ``extra_state``.

    Args:
        initial: see ``initial_values``.

    Attributes:
        paths: of the values of the last capture.
    """

    def __init__(self, initial: Mapping[reachable.Path, int | None]) -> None:
        self.paths: dict[reachable.Path, None] = {}
        self._initial = initial
        self._last: list[tuple[reachable.Path, Any, int | None]] = []

    def state_dict(self) -> dict[str, Any]:
        frames = reachable.script_frames(sys._getframe(1))
        if frames:  # the script has not ended
            initial = self._initial
            self._last = [(path, one, initial.get(path)) for path, one in _values(frames)]
            self.paths = dict.fromkeys(path for path, *_ in self._last)
        return {"values": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values of all frames that the script has now.

        A value that the script has not changed since it began, and that is edited in its file now,
        stays.
        """
        frame, used = sys._getframe(1), dict[int, Any]()
        for path, value, then in state["values"]:
            is_edited = then != self._initial.get(path, then)
            if is_edited and fingerprint(value) == then:
                continue
            try:
                now = reachable.resolve(frame, path)
            except LookupError:
                if path[1:] or not _may_have(frame, *path[0]):  # a function that does not run yet
                    continue
                now = None
            if isinstance(now, GENERATORS):
                load_state(now, value)
            elif (new := filled(now, value, used)) is not now:
                _assign(frame, path, new)
        self._last = state["values"]

    @property
    def text(self) -> str:
        return ", ".join(dict.fromkeys(map(reachable.text, self.paths)))


def initial_values(frames: list[FrameType]) -> dict[reachable.Path, int | None]:
    """Return fingerprints of what the script's own code has made, before anything is restored."""
    return {path: fingerprint(value) for path, value in _values(frames)}


def fingerprint(value: Any) -> int | None:
    """Return a checksum of a value that a commit can have; None for another one."""
    try:
        data, parts = state_codec.encode(value)
    except InvalidInput:
        return None
    return zlib.crc32(repr((data, [part.read() for part in parts])).encode())


def _values(frames: list[FrameType]) -> Iterator[tuple[reachable.Path, Any]]:
    """Yield the paths of what is captured, and what they lead to."""
    attributes_set, owners = _attributes_set(frames), set[int]()
    for index, frame in enumerate(frames):
        code, variables = frame.f_code, frame.f_locals
        stored = assigned(code, frame.f_lasti) if is_in_loop(code, frame.f_lasti) else frozenset()
        if variables is frame.f_globals:
            stored = stored.union(*(names_in(one, "STORE") for one in codes_of(variables)))
        for name in live_names(frame):
            if not reachable.is_dunder(name):
                path = ((index, name),)
                yield from _plain(path, variables[name], name in stored, attributes_set, owners)


def _plain(
    path: reachable.Path, value: Any, is_set: bool, attributes_set: set[str], owners: set[int]
) -> Iterator[tuple[reachable.Path, Any]]:
    """Yield a value that is captured, or those of the script's own object and of its parts."""
    if issubclass(type(value), GENERATORS) or _is_plain(value):
        if is_set or type(value) not in FIXED:
            yield path, _state(value)
    elif _has_plain_attributes(value) and id(value) not in owners and len(path) < MAX_STEPS:
        owners.add(id(value))
        names = attributes_set | _set_by(codes_of(vars(type(value))))
        for key, one in reachable.attributes(value):
            yield from _plain((*path, ("attr", key)), one, key in names, attributes_set, owners)


def _attributes_set(frames: list[FrameType]) -> set[str]:
    """Return the attributes that the frames' functions and those of their modules set."""
    modules = {id(frame.f_globals): frame.f_globals for frame in frames}
    codes = [code for variables in modules.values() for code in codes_of(variables)]
    return _set_by([*codes, *(frame.f_code for frame in frames)])


def _set_by(codes: Iterable[CodeType]) -> set[str]:
    names = (assigned(code, -1) for code in codes if code.co_name not in INITS)
    return {name[1:] for name in set[str]().union(*names) if name[0] == "."}


def _has_plain_attributes(value: Any) -> bool:
    """Return True for a record, or an object of a class in the script's own files."""
    kind = type(value)
    if issubclass(kind, (type, dict, list, tuple)):
        return False
    is_record = kind in (Namespace, SimpleNamespace) or dataclasses.is_dataclass(kind)
    return is_record or (
        reachable.is_own(reachable.file_of(kind)) and not hasattr(kind, "state_dict")
    )


def _is_plain(value: Any) -> bool:
    """Return True for a value that the codec keeps, without parameters, and not too large."""
    if type(value) in reachable.PLAIN:
        return True
    try:
        data, attachments = state_codec.encode(value)
    except InvalidInput:
        return False
    sizes = [one.size_bytes for one in attachments]
    are_free = not any(isinstance(one.source, torch.nn.Parameter) for one in attachments)
    return are_free and sum(sizes) <= MAX_BYTES and _size(data) <= MAX_BYTES


def _size(data: Any) -> int:
    """Return about how many bytes JSON data take."""
    if isinstance(data, dict):
        return sum(map(_size, data.values()))
    if isinstance(data, list) and {list, dict, str}.intersection(map(type, data)):
        return sum(map(_size, data))
    return len(data) if isinstance(data, str) else 16 * len(data) if isinstance(data, list) else 16


def _state(value: Any) -> Any:
    return state_of(value) if issubclass(type(value), GENERATORS) else value


def _may_have(frame: FrameType, index: int, name: str) -> bool:
    """Return True if a frame has such a variable, which may not be bound yet."""
    frames = reachable.script_frames(frame)
    if index >= len(frames):
        return False
    code = frames[index].f_code
    return name in (*code.co_varnames, *code.co_cellvars, *code.co_names)


def _assign(frame: FrameType, path: reachable.Path, value: Any) -> None:
    """Give a variable or an attribute a new value."""
    (index, name), *steps = path
    if steps:
        setattr(reachable.resolve(frame, path[:-1]), steps[-1][1], value)
        return
    owner = reachable.script_frames(frame)[index]
    owner.f_locals[name] = value
    if sys.version_info < (3, 13) and owner.f_code.co_flags & inspect.CO_OPTIMIZED:
        # As a debugger does (PEP 667); nothing may read ``f_locals`` in between.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(owner), ctypes.c_int(0))
