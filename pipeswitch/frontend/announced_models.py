"""Models that the scheduler has announced, and the check that a request fits its model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from ..base.errors import PipeSwitchError, model_failed
from ..ipc.messages.base import ModelName
from ..scheduler.state.events import ModelAvailable
from ..scheduler.state.versions import split_name
from ..wire.frames import RequestHeader
from .intake import validation
from .intake.validation import ValidatedRequest

MAX_FITTING: Final = 256  # maximum number of cached checks, for all models together


class AnnouncedModels:
    """All announced versions of all models. Only the loop's thread uses them."""

    def __init__(self, max_bytes: int) -> None:
        """Start without models; ``max_bytes`` limits all inputs of a request together."""
        self.max_bytes = max_bytes
        self.current: dict[str, ModelAvailable] = {}
        self.aliases: dict[str, str] = {}  # alias -> model name
        self._aliases_of: dict[str, tuple[str, ...]] = {}
        self.versions: dict[tuple[str, int], ModelAvailable] = {}
        self.failures: dict[str, dict[int, str]] = {}  # name -> failed version -> reason
        self._fitting: dict[Hashable, ValidatedRequest] = {}  # cached results of checks

    def announce(self, announced: ModelAvailable) -> None:
        """Add or update a version of a model, which may become the current one."""
        self._fitting.clear()
        base = announced.base or announced.model
        self.versions[base, announced.version] = announced
        reasons = self.failures.get(base, {})
        reasons.pop(announced.version, None)
        if not reasons:
            self.failures.pop(base, None)
        if announced.is_current:
            self.current[base] = announced
            self._set_aliases(base, announced.aliases)

    def retract(self, model: ModelName, failure: str = "", aliases: Sequence[str] = ()) -> None:
        """Remove a version that is no longer registered, or has failed for a reason."""
        base, version = split_name(model)
        reasons = self.failures.setdefault(base, {})
        reasons.pop(version, None)
        reasons |= {version: failure} if failure else {}
        if not reasons:
            del self.failures[base]
        self.versions.pop((base, version), None)
        if (current := self.current.get(base)) is not None and current.model == model:
            del self.current[base]
        if base not in self.current and (failure or not reasons):
            self._set_aliases(base, aliases)

    def _set_aliases(self, base: str, aliases: Sequence[str]) -> None:
        for alias in self._aliases_of.pop(base, ()):
            self.aliases.pop(alias, None)
        if aliases:
            self._aliases_of[base] = tuple(aliases)
            self.aliases |= dict.fromkeys(aliases, base)

    def find(self, name: str, version: int, caller: str) -> ModelAvailable:
        """Return a model's version; ``version`` 0 means the current one.

        Raises:
            ModelNotFound, ServerUnavailable: it is unknown; the model is failed.
        """
        announced = self.versions.get((name, version)) if version else self.current.get(name)
        if announced is not None:
            return announced
        raise self.missing(name, caller, version)

    def missing(self, name: str, caller: str, version: int = 0) -> PipeSwitchError:
        """Return the error for a failed or unknown model; only the owner ("") gets a reason."""
        reasons, is_served = self.failures.get(name, {}), name in self.current
        number = version or max(reasons, default=0)
        if number in reasons and (version or not is_served):
            others = [one for known, one in self.versions if known == name]
            shown = f"version {number}: " * (number > 1) + reasons[number]
            return model_failed(name, "" if caller else shown, others)
        if is_served and version:
            return validation.no_version(name, version, self.versions)
        aliases = {alias: self.current.get(model) for alias, model in self.aliases.items()}
        return validation.model_not_found(name, aliases | self.current)

    def version(self, name: str, version: int) -> ModelAvailable:
        """Return one version of a model.

        Raises:
            ModelNotFound: the version does not exist; the text names those that do.
        """
        announced = self.versions.get((name, version))
        if announced is None:
            raise validation.no_version(name, version, self.versions)
        return announced

    def admit(
        self, header: RequestHeader, sizes: Sequence[int], announced: ModelAvailable
    ) -> ValidatedRequest:
        """Return the result of ``validation.check_infer``, cached for equal requests."""
        key = (announced.model, announced.wrapper is None, header.inputs, *sizes)
        admitted = self._fitting.get(key)
        if admitted is None:
            admitted = validation.check_infer(header, sizes, announced, self.max_bytes)
            if len(self._fitting) >= MAX_FITTING:
                self._fitting.clear()
            self._fitting[key] = admitted
        return admitted
