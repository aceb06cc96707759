"""Versions of models, and the version that a name stands for. Pure.

A version is a separate model, with its own program, memory and states. Several versions share a
name and differ in their number. The name stands for the current version. A request is bound to a
version on arrival, so exactly one version computes its answer (docs/adr/0025-versions.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

from ...base.errors import ModelNotFound
from ...ipc.messages.base import ModelName, OpId
from .core import Core
from .events import Journal, ModelAvailable, Token
from .records import Model, Served
from .states import ModelState, VersionEvent, VersionState

AT: Final = "@"  # separates name and number; no client may use it in a name
SPREAD: Final = 0.6180339887498949  # golden ratio: spreads successive requests evenly
PRESENT: Final = frozenset({ModelState.READY, ModelState.QUARANTINED})


def version_name(name: ModelName, version: int) -> ModelName:
    """Return the name that a version has in the scheduler and in ``ps``: NAME, or NAME@2."""
    return ModelName(f"{name}{AT}{version}") if version > 1 else name


def split_name(name: str) -> tuple[ModelName, int]:
    """Split a version's name: the inverse of ``version_name``."""
    base, _, number = name.partition(AT)
    return ModelName(base), int(number or 1)


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


class Versions:
    """Table of names and their versions."""

    def __init__(
        self, core: Core, models: dict[ModelName, Model], served: dict[ModelName, Served]
    ) -> None:
        self._core = core
        self.models = models
        self.aliases = Aliases(core)
        self._served = served
        self._of: dict[ModelName, dict[int, Model]] = {}  # versions of each name
        self.follow: Callable[[ModelName], None] = lambda base: None  # set by ``Composites``

    def served(self, name: ModelName) -> Served | None:
        return self._served.get(name)

    def current(self, name: ModelName) -> Model | None:
        """Return the model that a name stands for."""
        served = self.served(name)
        return None if served is None else self.of(name, served.current)

    def newest(self, name: ModelName) -> Model | None:
        """Return the current version; without one, the newest version that is being removed."""
        return self.current(name) or next(reversed(self.all_of(name)), None)

    def of(self, name: ModelName, version: int) -> Model | None:
        return self.models.get(version_name(name, version))

    def resolve(self, name: ModelName, version: int = 0) -> ModelName:
        """Return the version's name; 0: the current version. Unknown names stay unchanged."""
        served = self.served(name)
        if not version:
            version = 1 if served is None else served.current
        return version_name(name, version)

    def all_of(self, name: ModelName) -> list[Model]:
        """Return the existing versions of a name, the newest last."""
        versions = self._of.get(name, {})
        return [versions[number] for number in sorted(versions)]

    def is_current(self, model: Model) -> bool:
        served = self.served(model.base)
        return served is not None and served.current == model.version

    def present(self, name: ModelName) -> list[Model]:
        """Return the versions that frontends know of, the newest last."""
        leaving = ModelState.LEAVING
        return [m for m in self.all_of(name) if m.manifest and m.state.state is not leaving]

    def missing(self, name: ModelName, which: int | str) -> ModelNotFound:
        """Return the error for a version that does not exist."""
        present = ", ".join(str(model.version) for model in self.present(name))
        return ModelNotFound(
            f'"{name}" has no version {which}: it has {present}',
            hint="pipeswitch models --versions",
            version=which,
        )

    # -- changes -------------------------------------------------------------------------------

    def restore(
        self,
        name: ModelName,
        current: int,
        last: int,
        spec_digest: str,
        there: Collection[int],
        shares: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Restore a name from the journal, before its versions. ``there``: the versions' numbers.

        If the journal lacks the current version, the name has no current version: no start changes
        which version is served.
        """
        if there:
            self._open(name, current, last, spec_digest)
            self._served[name].shares.update(one for one in shares if one[0] in there)

    def _open(self, name: ModelName, current: int, last: int, spec_digest: str) -> None:
        born = self._core.next_op_id()
        self._served[name] = Served(name, current, last, spec_digest, born)

    def opened(self, model: Model, spec_digest: str) -> None:
        """Add a version; the first one of a name becomes current."""
        served = self._served.get(model.base)
        self._of.setdefault(model.base, {})[model.version] = model
        if served is None:
            self._open(model.base, model.version, model.version, spec_digest)
        else:
            served.last = max(served.last, model.version)
        if self.is_current(model):
            self._chosen(model, "registered")
            served = self._served[model.base]
            model.split = served if served.shares else None

    def choose(self, model: Model, cause: str) -> Model | None:
        """Make a version current for later requests; return the previous current version."""
        served = self._served[model.base]
        before = self.current(model.base)
        if before is not None:
            before.serving.apply(VersionEvent.REPLACED, cause)
            before.split = None
        served.shares = {}
        self._chosen(model, cause)
        served.current = model.version
        self._remember(served)
        self.announce(model)
        self._core.publish("model.version", model=model.base, version=model.version, cause=cause)
        return before

    def _chosen(self, model: Model, cause: str) -> None:
        model.serving.apply(VersionEvent.CHOSEN, cause)
        model.chosen_op_id = self._core.next_op_id()

    def split(self, model: Model, percent: int) -> bool:
        """Give a version a share of the requests that name no version, until another is current.
        Return False if this version is current, or the shares exceed 100 %."""
        served, current = self._served[model.base], self.current(model.base)
        every = {**served.shares, model.version: percent}
        shares = {version: share for version, share in every.items() if share}
        if current is None or model is current or sum(shares.values()) > 100:
            return False
        served.shares, current.split = shares, served if shares else None
        self._remember(served)
        return True

    def drawn(self, served: Served, current: Model) -> Model:
        """Return the version that gets the next request without a number, by the shares."""
        served.drawn += 1
        place = served.drawn * SPREAD % 1.0 * 100
        for version, percent in served.shares.items():
            if place < percent:
                model = self.of(served.name, version)
                return model if model and model.state.state is ModelState.READY else current
            place -= percent
        return current

    def share(self, model: Model) -> int:
        """Return the version's percentage of the requests that name no version."""
        shares = self._served[model.base].shares
        rest_percent = 100 - sum(shares.values()) if self.is_current(model) else 0
        return shares.get(model.version, rest_percent)

    def announce(self, model: Model) -> None:
        assert model.manifest is not None
        self._core.emit(
            ModelAvailable(
                model=model.name,
                manifest=model.manifest,
                priority=model.priority,
                tenant=self._core.tenant_of(model.tenant),
                base=model.base,
                version=model.version,
                is_current=self.is_current(model),
                registration_id=self._served[model.base].born,
                wrapper=model.wrapper,
                aliases=self.aliases.of(model.base),
            )
        )
        if self.is_current(model):
            self.follow(model.base)

    def outdated(self, name: ModelName) -> list[Model]:
        """Return the versions beyond ``keep_versions``: those that were current longest ago."""
        present = [m for m in self.all_of(name) if m.state.state in PRESENT]
        present.sort(key=_when_chosen)
        return present[: max(0, len(present) - self._core.settings.keep_versions)]

    def successor(self, name: ModelName) -> Model | None:
        """Return the successor of the current version: the version that was current before it.

        A version that is not in the host store yet may succeed: its requests wait. A quarantined
        version succeeds only if there is no other. Returns None if all versions are leaving.
        """
        bad = ModelState.QUARANTINED
        return max(
            self.present(name),
            key=lambda m: (m.state.state is not bad, *_when_chosen(m)),
            default=None,
        )

    def gone(self, model: Model, *, is_failed: bool = False) -> None:
        """Remove a version. The name is removed with its last version.

        If the version is failed, the journal keeps it and its place: it is current again when a
        later server can restore it.
        """
        del self._of[model.base][model.version]
        served = self._served[model.base]
        if not self.all_of(model.base):
            del self._served[model.base], self._of[model.base]
        if is_failed:
            return
        if model.serving.state is VersionState.COMING and model.version == served.last:
            served.last -= 1  # the version never became current
        if served.last > 1 and model.base not in self._served:
            self._core.emit(Journal(entry={"kind": "serving-gone", "name": model.base}))
        self._succeed(served, model.version)

    def failed_gone(self, model: Model) -> None:
        """Remove a failed version from the journal's record of the served version."""
        served = self._served.get(model.base)
        if served is None or model.version > served.last:
            self._core.emit(Journal(entry={"kind": "serving-gone", "name": model.base}))
        else:
            self._succeed(served, model.version)

    def _succeed(self, served: Served, version: int) -> None:
        """Choose a successor of a version that is gone, if it was current and there is one."""
        successor = self.successor(served.name) if served.current == version else None
        if successor is not None:
            self.choose(successor, f"version {version} is gone")

    def _remember(self, served: Served) -> None:
        entry = {
            "kind": "serving",
            "name": served.name,
            "version": served.current,
            "last": served.last,
            "spec_digest": served.spec_digest,
            "shares": list(served.shares.items()),
        }
        self._core.emit(Journal(entry=entry))


def _when_chosen(model: Model) -> tuple[OpId, int]:
    """Return a key that sorts versions by when they were last current; restored ones by number."""
    return model.chosen_op_id, model.version
