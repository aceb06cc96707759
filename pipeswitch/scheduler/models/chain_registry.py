"""Chains: names that stand for several models, run one after the other. Pure.

This module has only the list: members, owners, and journal entries. The frontend turns a request
for a chain into requests for its models (``frontend/chain_requests.py``), which are scheduled.
"""

from __future__ import annotations

import msgspec

from ...base import errors
from ...ipc.messages.base import ModelName
from ...programs.interface.chains import Chain, chain_of
from ...programs.interface.layout import Manifest
from ..server.server_state import ServerState
from ..state.core import Core, handles
from ..state.events import ChainRequest, Journal, ModelAvailable, ModelRemoved, UnregisterRequest
from ..state.states import ModelState
from ..state.versions import Versions


class Chains:
    """All registered chains."""

    def __init__(self, core: Core, machine: ServerState, versions: Versions) -> None:
        self._core, self._machine, self._versions = core, machine, versions
        versions.follow = self.follow

    @handles(ChainRequest)
    def on_request(self, event: ChainRequest) -> None:
        """Register a chain. A repeated registration by the same client is a no-op."""
        core, name = self._core, event.model
        chain = event.restored or self._checked(event)
        if name not in self._machine.chains:
            self._machine.chains[name] = chain, event.tenant
            if event.restored is None:
                spec = msgspec.msgpack.encode(chain)
                entry = {"kind": "chain", "name": name, "spec": spec, "tenant": event.tenant}
                core.emit(Journal(entry=entry, accepts=(event.token,)))
            core.emit(ModelAvailable(model=name, manifest=chain.manifest, priority=0, chain=chain))
        core.answer(
            event.token,
            model=name,
            steps=msgspec.to_builtins(chain.steps),
            inputs=[one.name for one in chain.inputs],
            outputs=[*chain.returns],
        )

    def _checked(self, event: ChainRequest) -> Chain:
        """Check a chain; raise ServerUnavailable, AlreadyExists, HostStoreFull or InvalidInput."""
        core, known = self._core, self._machine.chains
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
        for name, (chain, tenant) in self._machine.chains.items():
            if all(step.model != base for step in chain.steps):
                continue
            self._machine.chain_faults.pop(name, None)
            try:
                fresh = chain_of(name, chain.steps, chain.returns, self._models())
            except errors.InvalidInput as error:  # its row says so; each step checks its own inputs
                self._machine.chain_faults[name] = error.message
                continue
            if fresh != chain:
                self._machine.chains[name] = fresh, tenant
                self._core.emit(
                    ModelAvailable(model=name, manifest=fresh.manifest, priority=0, chain=fresh)
                )

    def _models(self) -> dict[str, Manifest]:
        """Return the manifests of the current versions, as clients see them."""
        current = [self._versions.current(name) for name in self._machine.served]
        return {
            one.base: one.manifest if one.wrapper is None else one.wrapper.public(one.manifest)
            for one in current
            if one and one.manifest and one.state.state is not ModelState.LEAVING
        }

    def unregister(self, event: UnregisterRequest) -> None:
        """Remove a chain; its running requests continue."""
        _, tenant = self._machine.chains[event.model]
        if event.tenant not in (None, tenant):
            raise errors.PermissionDenied(f'"{event.model}" is another client\'s')
        del self._machine.chains[event.model]
        self._machine.chain_faults.pop(event.model, None)
        self._core.emit(Journal(entry={"kind": "chain-gone", "name": event.model}))
        self._core.emit(ModelRemoved(model=event.model))
        self._core.answer(event.token, model=event.model)
