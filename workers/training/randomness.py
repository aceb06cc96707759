"""Global random generators of torch, Python and numpy, and generators that a loader refers to."""

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

from .entropy import entropy

MAX_LOOKED_AT: Final = 500  # objects that one search for a loader's generators visits
MAX_DEPTH: Final = 5
MAX_PARTS: Final = 32  # a longer list or dict holds data, so its items are not searched
GENERATORS: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Unchanged:
    """Cached state of a global generator: numpy needs 27 us to return its state.

    Args:
        fetch: returns the generator's state.
        memory: returns the bytes of all objects that hold the state, or None if they are unknown.
    """

    def __init__(self, fetch: Callable[[], Any], memory: Callable[[], tuple[Any, ...] | None]):
        self._fetch, self._memory = fetch, memory
        self._last: tuple[tuple[Any, ...] | None, Any] = (None, None)

    def state(self) -> Any:
        """Return the generator's state, which callers share and must not change."""
        before = self._memory()
        if before is None or before != self._last[0]:
            state = self._fetch()
            # If another thread draws during the fetch, the state is returned but not cached.
            self._last = (before if before == self._memory() else None), state
        return self._last[1]


def _bytes_of(owner: Any) -> bytes:
    """Return a copy of an object's memory, without the reference count at its start."""
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
    """State of the global generators of torch, Python and numpy, of the device's generator, and of
    the seeds for unseeded generators."""

    def __init__(self, device: str) -> None:
        self._torch = torch.get_rng_state()
        self._python = _python.state()
        self._numpy = _numpy.state()
        self._entropy: Any = entropy.state
        self._device: torch.Tensor | None = None
        if device != "cpu":
            self._device = torch.get_device_module(device).get_rng_state(device)

    def restore(self, device: str) -> None:
        """Set the global generators to this state."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        entropy.state = self._entropy
        if self._device is not None and device != "cpu":
            torch.get_device_module(device).set_rng_state(self._device, device)

    def values(self) -> tuple[Any, ...]:
        """Return the state for ``state_codec.encode``: an array instead of 625 Python integers."""
        kind, words, gauss = self._python
        python = kind, np.array(words, np.uint32), gauss
        return self._torch, python, self._numpy, self._device, self._entropy

    @classmethod
    def from_values(cls, values: tuple[Any, ...]) -> RandomState:
        """Return the state from a result of its method ``values``."""
        state = cls.__new__(cls)
        state._torch, (kind, words, gauss), state._numpy, state._device, state._entropy = values
        state._python = (kind, tuple(int(word) for word in words), gauss)
        return state


@contextlib.contextmanager
def own_random() -> Iterator[None]:
    """Restore the script's global generators after the block has drawn from them."""
    random_state = RandomState("cpu")
    try:
        yield
    finally:
        random_state.restore("cpu")


def seed_all(*parts: object) -> None:
    """Seed the global cpu generators of torch, Python and numpy with a hash of ``parts``."""
    seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)


def generators_of(loader: Any) -> dict[str, Any]:
    """Return the random generators that a loader refers to: its sampler's, its dataset's, ….

    Follows attributes (``loader.dataset.transform.rng``) and short lists and dicts.

    Returns:
        Each generator once, under the first path that leads to it.
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
    """Return ``owner``'s parts that may hold a generator; their names are equal in each run."""
    if isinstance(owner, (list, tuple)) and len(owner) <= MAX_PARTS:
        return [(str(index), item) for index, item in enumerate(owner)]
    if type(owner) is dict and len(owner) <= MAX_PARTS:
        return [(name, item) for name, item in owner.items() if isinstance(name, str)]
    if isinstance(owner, (type, ModuleType, torch.Tensor)):
        return []
    attributes = getattr(owner, "__dict__", {})
    return [(name, item) for name, item in attributes.items() if name != "_iterator"]
