"""Models that take the program of another one, and differ only in their weights. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ...base.errors import PermissionDenied, RegistrationRefused
from ...ipc.messages.base import ModelName
from ...programs.interface.layout import BUNDLE_FILE, ORIGIN
from ..requests.completion import not_found
from ..server.server_state import ServerState
from ..state.core import Core
from ..state.events import RegisterModelRequest
from ..state.records import Model, Registration
from ..state.states import ModelState
from ..state.versions import AT, Versions


class Likes:
    """Choice of the model whose program a registration takes, and the wait for it."""

    def __init__(
        self,
        core: Core,
        machine: ServerState,
        versions: Versions,
        registrations: Mapping[ModelName, Registration],
    ) -> None:
        self._core = core
        self._machine = machine
        self._versions = versions
        self._registrations = registrations

    def of(self, event: RegisterModelRequest) -> Model | None:
        """Return the model whose program the registration takes; None: its source is exported.

        Raises:
            ModelNotFound, PermissionDenied: no model has this name; it belongs to another tenant.
        """
        if not event.like:
            return None
        name = self._versions.aliases.names.get(event.like, event.like)
        first = ModelName(name.removesuffix(f"{AT}1"))  # its record has the plain name
        model = self._machine.models.get(first) if AT in name else self._versions.current(name)
        if model is None or model.state.state is ModelState.LEAVING:
            raise not_found(event.like, like=event.like)
        if model.tenant != event.tenant:
            raise PermissionDenied(f'"{event.like}" is another client\'s')
        return model

    def spec(self, model: Model, name: str, own: bytes) -> bytes:
        """Return the spec of a model's program with the weights or the adapter that the spec
        ``own`` names, and with the precision of ``own``, if given."""
        spec, changes = decoded(self._registrations[model.name].spec), decoded(own)
        origin = spec.get("origin") or spec["source"]
        spec["source"] = self._bundle_of(model) or origin
        keys = ("precision", "max_error") if changes.get("precision") else ()
        spec |= {key: changes[key] for key in ("weights", *keys) if changes[key] or key in keys}
        if changes.get("adapter") or spec.get("adapter"):
            spec |= {"adapter": changes.get("adapter", ""), "origin": origin}
        spec = {key: value for key, value in spec.items() if key not in ORIGIN}
        spec |= {key: changes[key] for key in ORIGIN if key in changes}
        spec |= {"name": name, "part": changes.get("part", "")}
        return msgspec.msgpack.encode(spec)

    def _bundle_of(self, model: Model) -> str:
        """Return the path of a built model's bundle; empty: it runs as a module."""
        if model.built.mode != "graph":
            return ""
        return f"{self._core.settings.program_dir(model.built.digest)}/{BUNDLE_FILE}"

    def pump(
        self, waiting: Sequence[Registration]
    ) -> Iterator[tuple[Registration, RegistrationRefused]]:
        """Release registrations whose program is built; yield those that get none."""
        for one in [*waiting]:
            like = one.like
            if like is None:
                continue
            is_gone = self._machine.models.get(like.name) is not like
            if not is_gone and like.state.state is ModelState.BUILDING:
                continue
            if not is_gone and self._bundle_of(like):
                one.spec, one.like = self.spec(like, one.model, one.spec), None
            else:
                why = "is not registered" if is_gone else "runs as a module: give the source"
                yield one, RegistrationRefused("like", f'"{like.base}" {why}')


def decoded(spec: bytes) -> dict[str, Any]:
    """Return the options of an encoded spec."""
    return msgspec.msgpack.decode(spec, type=dict[str, Any])
