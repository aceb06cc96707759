"""Aliases: further names of models. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ...ipc.messages.base import ModelName
from .core import Core
from .events import Journal, Token


class Aliases:
    """Table of aliases; the journal has the aliases of registered models."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.names: dict[ModelName, ModelName] = {}  # name that each alias stands for
        self._of: dict[ModelName, tuple[ModelName, ...]] = {}

    def of(self, name: ModelName) -> tuple[ModelName, ...]:
        return self._of.get(name, ())

    def add(self, name: ModelName, aliases: Iterable[ModelName]) -> tuple[ModelName, ...]:
        """Add aliases of a name; return the new ones."""
        new = tuple(one for one in aliases if one not in self.names)
        self.names |= dict.fromkeys(new, name)
        self._of[name] = (*self.of(name), *new)
        return new

    def remember(self, aliases: Iterable[ModelName], accepts: tuple[Token, ...] = ()) -> None:
        """Write aliases to the journal; if a write fails, its alias is removed (``Journal``)."""
        for alias in aliases:
            entry = {"kind": "alias", "name": alias, "model": self.names[alias]}
            self._core.emit(Journal(entry=entry, accepts=accepts))

    def remove(self, alias: ModelName) -> None:
        name = self.names.pop(alias)
        self._of[name] = tuple(one for one in self.of(name) if one != alias)
        self._core.emit(Journal(entry={"kind": "alias-gone", "name": alias}))
