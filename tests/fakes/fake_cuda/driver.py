"""``cuda.bindings.driver`` for this process's fake machine."""

from __future__ import annotations

from typing import Any

from . import WORLD


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(WORLD.driver, name)
