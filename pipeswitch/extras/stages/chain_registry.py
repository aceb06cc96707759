"""Chains: names that stand for several models, run one after the other. Pure.

This module has only the list: members, owners, and journal entries. The frontend turns a request
for a chain into requests for its models (``chain_requests.py``), which are scheduled.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...base import errors
from ...ipc.messages.base import ModelName
from ...programs.interface.layout import Manifest
from ...scheduler.introspection import shown_value
from ...scheduler.server.server_state import ServerState
from ...scheduler.state import events as ev
from ...scheduler.state.core import Core, handles
from ...scheduler.state.states import ModelState
from ...scheduler.state.versions import Versions
from .chains import Chain, ChainStep, chain_of


class ChainRequest(ev.ClientRequest, frozen=True):
    """Request to register a chain."""

    model: ModelName  # the chain's name
    steps: tuple[ChainStep, ...] = ()
    returns: dict[str, str] = msgspec.field(default_factory=dict)
    tenant: str = ""  # tenant that will own the chain; empty: the server's owner
    restored: Chain | None = None  # the chain in the journal of an earlier server


class Chains:
    """All registered chains."""

    def __init__(self, core: Core, machine: ServerState, versions: Versions) -> None:
        self._core, self._machine, self._versions = core, machine, versions
        self.known: dict[ModelName, tuple[Chain, str]] = {}  # each chain with its tenant
        self._faults: dict[ModelName, str] = {}  # chains that a changed model does not fit
        versions.follow = self.follow

    @handles(ChainRequest)
    def on_request(self, event: ChainRequest) -> None:
        """Register a chain. A repeated registration by the same client is a no-op."""
        core, name = self._core, event.model
        chain = event.restored or self._checked(event)
        if name not in self.known:
            self.known[name] = chain, event.tenant
            self._machine.composites[name] = self
            if event.restored is None:
                spec = msgspec.msgpack.encode(chain)
                entry = {"kind": "chain", "name": name, "spec": spec, "tenant": event.tenant}
                core.emit(ev.Journal(entry=entry, accepts=(event.token,)))
            self._announce(name, chain)
        core.answer(
            event.token,
            model=name,
            steps=msgspec.to_builtins(chain.steps),
            inputs=[one.name for one in chain.inputs],
            outputs=[*chain.returns],
        )

    def _checked(self, event: ChainRequest) -> Chain:
        """Check a chain; raise ServerUnavailable, AlreadyExists, HostStoreFull or InvalidInput."""
        core, known = self._core, self.known
        if core.is_draining:
            raise errors.draining()
        hint = f"pipeswitch unregister {event.model}, or choose another name"
        names = self._versions.aliases.names
        if event.model in self._machine.served or event.model in names:
            raise errors.AlreadyExists(f'"{event.model}" is a model', hint=hint)
        steps = [
            msgspec.structs.replace(one, model=names.get(ModelName(one.model), one.model))
            for one in event.steps
        ]
        chain = chain_of(event.model, steps, event.returns, self._models())
        members = [self._versions.current(ModelName(step.model)) for step in chain.steps]
        if len({core.tenant_of(model.tenant) for model in members if model is not None}) > 1:
            raise errors.InvalidInput(
                f'chain "{event.model}": its models belong to clients that are separate here',
                hint="register them as one client",
            )
        if event.model in known and known[event.model] != (chain, event.tenant):
            raise errors.AlreadyExists(f'"{event.model}" is already another chain', hint=hint)
        count = sum(tenant == event.tenant for _, tenant in known.values())
        most = core.settings.max_models_per_client
        if event.tenant and event.model not in known and count >= most:
            raise errors.HostStoreFull(
                f"this client has {count} chains, [server] max_models_per_client is {most}",
                hint="pipeswitch unregister NAME",
            )
        return chain

    def follow(self, base: ModelName) -> None:
        """Give the chains of a model the dtypes and extents of its current version."""
        for name, (chain, tenant) in self.known.items():
            if all(step.model != base for step in chain.steps):
                continue
            self._faults.pop(name, None)
            try:
                fresh = chain_of(name, chain.steps, chain.returns, self._models())
            except errors.InvalidInput as error:  # its row says so; each step checks its own inputs
                self._faults[name] = error.message
                continue
            if fresh != chain:
                self.known[name] = fresh, tenant
                self._announce(name, fresh)

    def _announce(self, name: ModelName, chain: Chain) -> None:
        manifest = chain.manifest
        self._core.emit(
            ev.ModelAvailable(model=name, manifest=manifest, priority=0, composite=chain)
        )

    def _models(self) -> dict[str, Manifest]:
        """Return the manifests of the current versions, as clients see them."""
        current = [self._versions.current(name) for name in self._machine.served]
        return {
            one.base: one.manifest if one.wrapper is None else one.wrapper.public(one.manifest)
            for one in current
            if one and one.manifest and one.state.state is not ModelState.LEAVING
        }

    def row(self, name: ModelName) -> dict[str, Any]:
        """Return the row of a chain: it has the keys of a model's row, and the steps."""
        chain, tenant = self.known[name]
        missing = [
            f'step "{step.name}" needs "{step.model}", which is not ready'
            for step in chain.steps
            if (model := self._versions.current(ModelName(step.model))) is None
            or model.state.state is not ModelState.READY
        ]
        fault = self._faults.get(name, "")
        missing += [fault] if fault and not missing else []
        return {
            "name": name,
            "aliases": [],
            "version": 1,
            "current": True,
            "share": 100,
            "versions": [1],
            "state": "incomplete" if missing else ModelState.READY.value,
            "residency": "",
            "priority": "",
            "pinned": False,
            "requests": 0,
            "reason": "; ".join(missing),
            "tenant": tenant,
            "digest": "",
            "mode": "chain",
            "mode_reason": "",
            "bytes": 0,
            "groups": 0,
            "grouping": "its models",
            "source": " > ".join(step.model for step in chain.steps),
            "steps": msgspec.to_builtins(chain.steps),
            "returns": chain.returns,
            "inputs": {v.name: shown_value(v) for v in chain.inputs},
            "outputs": {v.name: shown_value(v) for v in chain.outputs},
            "dims": {dim.name: [dim.low, dim.high] for dim in chain.dims},
            "batch": list(chain.manifest.batch),
            "batching": None,
            "precision": None,
            "is_batch_invariant": None,
        }

    def unregister(self, event: ev.UnregisterRequest) -> None:
        """Remove a chain; its running requests continue."""
        _, tenant = self.known[event.model]
        if event.tenant not in (None, tenant):
            raise errors.PermissionDenied(f'"{event.model}" is another client\'s')
        del self.known[event.model], self._machine.composites[event.model]
        self._faults.pop(event.model, None)
        self._core.emit(ev.Journal(entry={"kind": "chain-gone", "name": event.model}))
        self._core.emit(ev.ModelRemoved(model=event.model))
        self._core.answer(event.token, model=event.model)
