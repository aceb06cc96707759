"""Marks of a script's values: two marks of one value differ if it has changed in between.

A mark is cheap and hashable. Small contents are compared as they are, larger ones by a checksum,
and large tensors by address and version, which do not show a write through ``.data``.
"""

from __future__ import annotations

import enum
import gc
import operator
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch import nn

from pipeswitch.base import state_codec

from .randomness import GENERATORS
from .reachable import KEYS, MAX_PARTS, PLAIN
from .snapshot import has_state, state_of
from .torch_private import version

PACKAGE: Final = __file__.rpartition("/")[0]
SMALL_BYTES: Final = 1 << 16  # of tensors and arrays that are compared by content
MAX_CHECKED_BYTES: Final = 8 << 20  # of arrays; larger ones are compared by a sample
SAMPLES: Final = 4096
MAX_STATE_BYTES: Final = 1 << 20
CONTAINERS: Final = (dict, list, tuple, deque)


def mark(value: Any) -> Any:
    """Return a mark of ``value`` without its parts; None for a value that is not watched."""
    for kinds, mark_of in _MARKS:
        if isinstance(value, kinds):
            return mark_of(value)
    if isinstance(value, nn.Module):
        return _module(value)
    if has_state(value) and hasattr(value, "load_state_dict"):
        return _state(value)
    if isinstance(value, Iterator):
        return _iterator(value)
    if not hasattr(value, "__dict__") and type(value).__module__ != "datetime":
        kind: Any = type(value)
        return (kind, hash(value)) if kind.__hash__ not in (None, object.__hash__) else kind
    return type(value)


def _plain(value: Any) -> Any:
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def _tensor(value: torch.Tensor) -> Any:
    kind = (str(value.dtype), tuple(value.shape))
    is_small = value.device.type == "cpu" and value.layout is torch.strided
    if is_small and value.numel() * value.element_size() <= SMALL_BYTES and not value.is_quantized:
        return (*kind, zlib.crc32(state_codec.Attachment(value, 0).read()))
    return (*kind, id(value), version(value))


def _array(value: np.ndarray[Any, Any]) -> Any:
    kind = (value.dtype.str, value.shape)
    if value.dtype.hasobject:
        return (*kind, _long(value.ravel().tolist()))
    if value.nbytes > MAX_CHECKED_BYTES:
        step = max(1, value.size // SAMPLES)
        return (*kind, id(value), zlib.crc32(value.flat[::step].tobytes()))
    return (*kind, zlib.crc32(np.ascontiguousarray(value).data))


def _container(value: Any) -> Any:
    keys = [key for key in value if type(key) in KEYS] if isinstance(value, dict) else []
    if isinstance(value, tuple) and len(value) <= MAX_PARTS:
        return (type(value), *map(mark, value))
    if len(value) <= MAX_PARTS:  # its parts have marks of their own, if they have a path
        pairs = value.items() if isinstance(value, dict) else ()
        rest = [one for key, one in pairs if not isinstance(key, KEYS)]
        return type(value), len(value), hash(frozenset(keys)), _long(rest)
    parts = [*value.values()] if isinstance(value, dict) else [*value]
    return type(value), len(value), hash(frozenset(keys)), _long(parts)


def _long(parts: list[Any]) -> int:
    is_plain = {*map(type, parts)} <= {*PLAIN}
    return hash(tuple(parts if is_plain else map(mark, parts)))


def _set(value: Any) -> Any:
    return type(value), hash(frozenset(value))


def _generator(value: Any) -> Any:
    if isinstance(value, random.SystemRandom):
        return None
    state = state_of(value)
    if isinstance(state, torch.Tensor):
        return _tensor(state)
    return hash(state) if isinstance(state, tuple) else repr(state)


def _function(value: Any) -> Any:
    return value.__code__ if isinstance(value, FunctionType) else id(value)


def _module(value: nn.Module) -> Any:
    own = (*value._parameters.values(), *value._buffers.values())
    return (id(value), *(_tensor(one) for one in own if one is not None))


def _state(value: Any) -> Any:
    if isinstance(value, torch.optim.Optimizer):  # its attributes and groups have marks
        return id(value)
    try:
        data, attachments = state_codec.encode(state_of(value))
    except Exception:  # its state_dict() is the script's own code
        return type(value)
    if sum(one.size_bytes for one in attachments) > MAX_STATE_BYTES:
        marked = [_MARK_OF[isinstance(one.source, torch.Tensor)](one.source) for one in attachments]
        return (repr(data), *marked)
    return (repr(data), *(zlib.crc32(one.read()) for one in attachments))


def _iterator(value: Any) -> Any:
    if hasattr(value, "fileno"):
        return None
    inner = [one for one in (value, *gc.get_referents(value)) if isinstance(one, Iterator)]
    if any(PACKAGE in repr(getattr(one, "gi_code", "")) for one in inner):  # of job itself
        return None
    text = repr(value) if type(value).__module__ == "itertools" else ""  # shows a count's number
    left = [operator.length_hint(one, -1) for one in inner if not hasattr(one, "__dict__")]
    own = [one for one in getattr(value, "__dict__", {}).values() if type(one) in PLAIN]
    return (text, *left, *own, *(id(part) for one in inner for part in gc.get_referents(one)))


_MARK_OF: Final[Mapping[bool, Callable[[Any], Any]]] = {True: _tensor, False: _array}
_MARKS: Final[tuple[tuple[Any, Callable[[Any], Any]], ...]] = (
    (enum.Enum, repr),
    (np.generic, lambda value: (type(value), value.tobytes())),
    (PLAIN, _plain),
    (torch.Tensor, _tensor),
    (np.ndarray, _array),
    (CONTAINERS, _container),
    ((set, frozenset), _set),
    ((WeakKeyDictionary, WeakValueDictionary), lambda value: _long([*value.values()])),
    (GENERATORS, _generator),
    ((FunctionType, BuiltinFunctionType, type), _function),
    (MethodType, lambda value: id(value.__func__)),
    (ModuleType, lambda value: None),
)
