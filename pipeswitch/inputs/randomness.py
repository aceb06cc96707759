"""Random generators: the global ones, and those that hang on a loader."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch

MAX_LOOKED_AT: Final = 500  # objects, on the way from a loader to the generators behind it
MAX_DEPTH: Final = 5
MAX_PARTS: Final = 32  # of a list or dict: longer ones are data
GENERATORS: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Unchanged:
    """State of a global generator, fetched again only after its memory changed: numpy takes 27 us.

    Args:
        fetch: returns the generator's state.
        memory: returns the bytes of all objects that the state is in; None: they are not known.
    """

    def __init__(self, fetch: Callable[[], Any], memory: Callable[[], tuple[Any, ...] | None]):
        self._fetch, self._memory = fetch, memory
        self._last: tuple[tuple[Any, ...] | None, Any] = (None, None)

    def state(self) -> Any:
        """Return the state; nobody may change it."""
        before = self._memory()
        if before is None or before != self._last[0]:
            state = self._fetch()
            # Another thread may draw between the two looks.
            self._last = (before if before == self._memory() else None), state
        return self._last[1]


def _bytes_of(owner: Any) -> bytes:
    """Return an object's own memory behind its reference count."""
    return ctypes.string_at(id(owner) + _HEADER_BYTES, type(owner).__basicsize__ - _HEADER_BYTES)


def _python_memory() -> tuple[Any, ...]:
    owner: Any = random.getstate.__self__  # type: ignore[attr-defined]
    return _bytes_of(owner), owner.gauss_next


def _numpy_memory() -> tuple[Any, ...] | None:
    get_state: Any = np.random.get_state
    owner = get_state.__self__
    bits = owner._bit_generator
    return (_bytes_of(owner), _bytes_of(bits)) if type(bits) is np.random.MT19937 else None


_HEADER_BYTES: Final = ctypes.sizeof(ctypes.c_ssize_t)  # the reference count
_python = Unchanged(random.getstate, _python_memory)
_numpy = Unchanged(np.random.get_state, _numpy_memory)


class RandomState:
    """The global generators of torch, python and numpy (and of the device, if it has its own)."""

    def __init__(self, device: str) -> None:
        self._torch = torch.get_rng_state()
        self._python = _python.state()
        self._numpy = _numpy.state()
        self._device = None if device == "cpu" else _module(device).get_rng_state(device)

    def restore(self, device: str) -> None:
        """Put the generators back to where they were."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if self._device is not None and device != "cpu":
            _module(device).set_rng_state(self._device, device)

    def values(self) -> tuple[Any, ...]:
        """Values for ``tagged``: arrays instead of 625 Python integers."""
        kind, words, gauss = self._python
        return (self._torch, (kind, np.array(words, np.uint32), gauss), self._numpy, self._device)

    @classmethod
    def from_values(cls, values: tuple[Any, ...]) -> RandomState:
        """Inverse of ``values``."""
        state = cls.__new__(cls)
        state._torch, (kind, words, gauss), state._numpy, state._device = values
        state._python = (kind, tuple(int(word) for word in words), gauss)
        return state


def _module(device: str) -> Any:
    """``torch.cuda`` for ``cuda:0``."""
    return torch.get_device_module(device)


@contextlib.contextmanager
def own_random() -> Iterator[None]:
    """Restore the script's global generators after the body has drawn from them."""
    random_state = RandomState("cpu")
    try:
        yield
    finally:
        random_state.restore("cpu")


def seed_all(*parts: object) -> None:
    """Seed the global generators of torch (of the cpu), python and numpy by these."""
    seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)


def generators_of(loader: Any) -> dict[str, Any]:
    """Random generators that hang on the loader: its own, its sampler's, its dataset's, ….

    Follows attributes (``loader.dataset.transform.rng``) and short lists and dicts.

    Returns:
        By the path to it, each generator once.
    """
    generators: dict[str, Any] = {}
    visited: set[int] = set()
    todo: list[tuple[str, Any, int]] = [("loader", loader, 0)]
    while todo and len(visited) < MAX_LOOKED_AT:
        path, owner, depth = todo.pop(0)
        if id(owner) in visited:
            continue
        visited.add(id(owner))
        if isinstance(owner, GENERATORS) and not isinstance(owner, random.SystemRandom):
            generators[path] = owner
        elif depth < MAX_DEPTH:
            todo += [(f"{path}.{name}", item, depth + 1) for name, item in _parts_of(owner)]
    return generators


def _parts_of(owner: Any) -> list[tuple[str, Any]]:
    """Return ``owner``'s parts that may hold a generator, by names that later starts find too."""
    if isinstance(owner, (list, tuple)) and len(owner) <= MAX_PARTS:
        return [(str(index), item) for index, item in enumerate(owner)]
    if type(owner) is dict and len(owner) <= MAX_PARTS:
        return [(name, item) for name, item in owner.items() if isinstance(name, str)]
    if isinstance(owner, (type, ModuleType, torch.Tensor)):
        return []
    attributes = getattr(owner, "__dict__", {})
    return [(name, item) for name, item in attributes.items() if name != "_iterator"]
