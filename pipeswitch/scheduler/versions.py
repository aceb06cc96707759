"""Versions of models: which one a name stands for. Pure.

A version is a model of its own, with a program, a place and states of its own; what its number adds
is a name that many of them share, and that stands for one of them at any time. Requests are bound
to a version when they come: each answer is of exactly one (docs/adr/0025-versions.md).
"""

from __future__ import annotations

from typing import Final

from ..errors import InvalidInput
from ..ipc.messages import ModelName
from .core import Core
from .events import Announce, Journal
from .machine import Machine
from .records import Model, Served
from .states import ModelState, VersionEvent, VersionState

AT: Final = "@"  # between a name and a number; no name that a client may choose has it
PRESENT: Final = frozenset({ModelState.READY, ModelState.QUARANTINED})


def version_name(name: ModelName, version: int) -> ModelName:
    """What the scheduler, and ``ps``, call a version."""
    return ModelName(f"{name}{AT}{version}") if version > 1 else name


def split_name(name: str) -> tuple[ModelName, int]:
    """Inverse of ``version_name``."""
    base, _, number = name.partition(AT)
    return ModelName(base), int(number or 1)


class Versions:
    """The book of names."""

    def __init__(self, core: Core, machine: Machine) -> None:
        self._core = core
        self._machine = machine

    def served(self, name: ModelName) -> Served | None:
        return self._machine.served.get(name)

    def current(self, name: ModelName) -> Model | None:
        """The model that a name stands for."""
        served = self.served(name)
        return None if served is None else self.of(name, served.current)

    def newest(self, name: ModelName) -> Model | None:
        """The current one; of a name that is about to end, the last that leaves."""
        return self.current(name) or next(reversed(self.all_of(name)), None)

    def of(self, name: ModelName, version: int) -> Model | None:
        return self._machine.models.get(version_name(name, version))

    def resolve(self, name: ModelName, version: int = 0) -> ModelName:
        """What the version is called; 0: the current one. Unknown names stay what they are."""
        served = self.served(name)
        if not version:
            version = 1 if served is None else served.current
        return version_name(name, version)

    def all_of(self, name: ModelName) -> list[Model]:
        """Its versions that are there, the newest last."""
        found = [m for m in self._machine.models.values() if split_name(m.name)[0] == name]
        return sorted(found, key=lambda model: model.version)

    def is_current(self, model: Model) -> bool:
        served = self.served(model.base)
        return served is not None and served.current == model.version

    def missing(self, name: ModelName, which: str) -> InvalidInput:
        """What the asker for a version reads that is not there."""
        present = ", ".join(str(model.version) for model in self.all_of(name))
        return InvalidInput(
            f'"{name}" has no version {which}: it has {present}',
            hint="pipeswitch models --versions",
            version=which,
        )

    # -- what happens to them ------------------------------------------------------------------

    def restore(self, name: ModelName, current: int, last: int, spec_digest: str) -> None:
        """What the journal says, before the models themselves come back."""
        born = self._core.next_epoch()
        self._machine.served[name] = Served(name, current, last, spec_digest, born)

    def opened(self, model: Model, spec_digest: str) -> None:
        """A version begins to exist; the first of a name is what the name stands for."""
        served = self._machine.served.get(model.base)
        if served is None:
            self.restore(model.base, model.version, model.version, spec_digest)
        else:
            served.last = max(served.last, model.version)
        if self.is_current(model):
            model.serving.apply(VersionEvent.CHOSEN, "registered")

    def choose(self, model: Model, cause: str) -> Model | None:
        """Requests that come from now on are this version's; the one that was theirs before."""
        served = self._machine.served[model.base]
        before = self.current(model.base)
        if before is not None:
            before.serving.apply(VersionEvent.REPLACED, cause)
        model.serving.apply(VersionEvent.CHOSEN, cause)
        served.current = model.version
        self._remember(served)
        self.announce(model)
        self._core.publish("model.version", model=model.base, version=model.version, cause=cause)
        return before

    def announce(self, model: Model) -> None:
        assert model.manifest is not None
        self._core.emit(
            Announce(
                model=model.name,
                manifest=model.manifest,
                priority=model.priority,
                tenant=self._machine.device.state.tenant_of(model),
                base=model.base,
                version=model.version,
                is_current=self.is_current(model),
                lineage=self._machine.served[model.base].born,
            )
        )

    def outdated(self, name: ModelName) -> list[Model]:
        """Versions that nothing keeps: the current one stays, and the newest of the others."""
        present = [m for m in self.all_of(name) if m.state.state in PRESENT]
        others = [m for m in present if not self.is_current(m)]
        return others[: max(0, len(others) - (self._core.settings.keep_versions - 1))]

    def gone(self, model: Model) -> None:
        """It is no model any more. A name without its version stands for the newest that is left,
        and ends with the last."""
        served, rest = self._machine.served[model.base], self.all_of(model.base)
        if model.serving.state is VersionState.COMING and model.version == served.last:
            served.last -= 1  # it never was one
        staying = [m for m in rest if m.manifest and m.state.state is not ModelState.LEAVING]
        if not rest:
            del self._machine.served[model.base]
            if served.last > 1:
                self._core.emit(Journal(entry={"kind": "serving-gone", "name": model.base}))
        elif served.current == model.version and staying:
            self.choose(staying[-1], f"version {model.version} is gone")

    def _remember(self, served: Served) -> None:
        entry = {"kind": "serving", "name": served.name, "version": served.current,
                 "last": served.last, "spec_digest": served.spec_digest}  # fmt: skip
        self._core.emit(Journal(entry=entry))
