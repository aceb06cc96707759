"""Seeds for generators that a script leaves unseeded: they are the same in each life of a job.

The source is a key, and a count for each module that draws: a library that another life imports
earlier or later takes no seed of the script's. Both are part of ``RandomState``, so commits keep
them and a resume restores them. Each forked process gets its own key. ``os.urandom`` itself is not
replaced: keys and names of other libraries must not repeat.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

import torch
from numpy.random import bit_generator

_TorchGenerator: Final = torch.Generator
_seed_python: Final = random.Random.seed


class Entropy:
    """Source of seeds; ``state`` is a key in hex, and how often each module has used it."""

    def __init__(self) -> None:
        self.state: tuple[str, dict[str, int]] = ("", {})
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """Take another key."""
        self.state = (os.urandom(16).hex(), {})

    def bits(self, count: int) -> int:
        """Return a number of ``count`` bits, a multiple of 8."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") in (
            __name__,
            "random",
            "tempfile",
        ):
            frame = frame.f_back
        module = "" if frame is None else str(frame.f_globals.get("__name__"))
        key, counts = self.state
        number = counts.get(module, 0)
        self.state = key, {**counts, module: number + 1}
        text = f"{key} {number} {module}"
        return int.from_bytes(hashlib.shake_256(text.encode()).digest(count // 8))


entropy: Final = Entropy()


def _seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
    _seed_python(generator, entropy.bits(256) if a is None else a, version)


def _seed_torch() -> int:
    seed = entropy.bits(56)
    torch.manual_seed(seed)
    return seed


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _TorchGenerator)


class _Generator(torch.Generator, metaclass=_AnyGenerator):
    def seed(self) -> int:
        self.manual_seed(seed := entropy.bits(56))
        return seed


@contextlib.contextmanager
def repeatable_seeds() -> Iterator[None]:
    """Seed unseeded generators of Python, numpy and torch from ``entropy`` within the block."""
    own: Any = random.getstate.__self__  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (bit_generator, "randbits", entropy.bits),
            (random.Random, "seed", _seed),
            (random, "seed", functools.partial(_seed, own)),
            (torch, "Generator", _Generator),
            (torch, "seed", _seed_torch),
            (torch.random, "seed", _seed_torch),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
