"""What the world leaves open: whether a thing that may go wrong does so this time."""

from __future__ import annotations

from typing import Literal, Protocol

Chance = Literal[
    "build_error", "builder_dies", "store_error", "copy_error", "persist_error", "prepare_error",
    "early_error",  # a request fails before it has the device
    "infer_error",
    "hang",  # a request begins and never ends
    "poison",  # a request kills its worker
    "unclean",  # a worker says later that it holds nothing of a task any more
    "commit",  # before it is due
    "skips_commit",  # an evicted script unwinds without one
    "script_error",
    "swallow",  # a script neither parks nor unwinds
    "linger",  # a process does not leave after its script
    "takes_along",  # a worker dies with its memory daemon
]  # fmt: skip


class Choices(Protocol):
    """Decides each time; the only source of chance."""

    def happens(self, what: Chance, name: str) -> bool:
        """Whether it happens now. ``name``: the model's or the job's, or the process's."""
        ...


class Faithful:
    """Nothing goes wrong."""

    def happens(self, what: Chance, name: str) -> bool:
        return False
