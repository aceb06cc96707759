"""Names of models: the version that each stands for, pins, and unregistration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ...base import errors
from ...base.errors import InvalidInput, OutOfDeviceMemory, PermissionDenied
from ...ipc.messages.base import ModelName
from ..requests.admission import Admission
from ..requests.completion import not_found
from ..server.server_state import ServerState
from ..state import events as ev
from ..state.core import Core, handles
from ..state.events import Journal, ModelRemoved, PinRequest, RollbackRequest, SweepPrograms, Token
from ..state.records import PRIORITY_NAMES, Model, Registration
from ..state.states import ModelEvent, ModelState, Residency, ResidencyEvent, TaskEvent
from ..state.versions import PRESENT, Versions, split_name

MAX_ALIASES: Final = 16  # limit for each model


class Names:
    """Life of a model after its registration.

    Attributes:
        registrations: registration of each model.
        leaving: models that take no new request and wait for the end of the queued requests.
        failed: models of an earlier server that could not be restored, with their ``reason``.
    """

    def __init__(
        self, core: Core, machine: ServerState, admission: Admission, versions: Versions
    ) -> None:
        self._core = core
        self._machine = machine
        self._admission = admission
        self._versions = versions
        self.aliases = versions.aliases
        self.registrations: dict[ModelName, Registration] = {}
        self.leaving: dict[ModelName, Model] = {}
        self.failed: dict[ModelName, Model] = {}
        self._has_gone = False  # a model was removed, but not its files
        self._marks: dict[tuple[ModelName, str], Model] = {}  # failed models of ``mark_refused``

    def pump(self, *, is_idle: bool) -> None:
        """Finish unregistrations whose model is idle now.

        Args:
            is_idle: whether no build waits or runs; builds may reuse files that would be removed.
        """
        for model in list(self.leaving.values()):
            self._finish(model)
        if self._has_gone and is_idle:
            self._sweep()

    def _sweep(self) -> None:
        models = self._machine.models.values()
        self._core.emit(
            SweepPrograms(
                digests=frozenset(m.manifest.digest for m in models if m.manifest is not None)
            )
        )
        self._has_gone = False

    def remember(self, model: Model, accepts: tuple[Token, ...] = ()) -> None:
        """Write the model and its pin to the journal, for a restore without a build."""
        assert model.manifest is not None
        registration = self.registrations[model.name]
        entry = {
            "kind": "model",
            "name": model.name,
            "spec": registration.spec,
            "spec_digest": registration.spec_digest,
            "digest": model.manifest.digest,
            "priority": model.priority,
            "pin": model.want_pinned,
            "tenant": model.tenant,
            "lent": self._machine.store.lent(model),
        }
        self._core.emit(Journal(entry=entry, accepts=accepts))

    def check_free(self, model: ModelName, aliases: Sequence[ModelName]) -> None:
        """Check that a model may have this name and these aliases.

        Raises:
            AlreadyExists: one of them belongs to another model.
            InvalidInput: there are too many aliases.
        """
        served, others = self._machine.served, self._machine.composites
        for name in (model, *aliases):
            is_others = name != model and (name in served or bool(self.failed_of(name)))
            other = name if is_others or name in others else self.aliases.names.get(name, model)
            if other != model or name in others:
                hint = f"pipeswitch unregister {name}, or choose another name"
                of_what = "" if other == name else f' by "{other}"'
                raise errors.AlreadyExists(f'"{name}" is already taken{of_what}', hint=hint)
        if len({*self.aliases.of(model), *aliases}) > MAX_ALIASES:
            raise InvalidInput(f'"{model}" would have more than {MAX_ALIASES} aliases')

    def drop_alias(self, event: ev.UnregisterRequest) -> None:
        """Remove an alias; its model stays."""
        name = self.aliases.names[event.model]
        there = self._versions.present(name)
        owner = next(iter([*there, *self.failed_of(name)]), None)
        if owner is not None and event.tenant not in (None, owner.tenant):
            raise PermissionDenied(f'"{event.model}" is another client\'s')
        self.aliases.remove(event.model)
        if there:
            self._versions.announce(self._versions.newest(name) or there[0])
        self._core.answer(event.token, model=event.model)

    def release(self, name: ModelName) -> None:
        """Free the aliases of a name that has no version any more."""
        if name not in self._machine.served and not self.failed_of(name):
            for alias in self.aliases.of(name):
                self.aliases.remove(alias)

    def hand_over(self, model: Model, cause: str) -> list[str]:
        """Make a version current and move the pin to it; remove outdated versions; return notes."""
        before = self._versions.choose(model, cause)
        if before is not None:
            if before.want_pinned:
                self._pin(before, is_pinned=False)
                self._pin(model, is_pinned=True)
            for device in self._machine.devices:
                if device.state.replicas[before.name].is_on_device:
                    device.residents.prefetch(model.name)
        outdated = self._versions.outdated(model.base)
        for old in outdated:
            self.leave(old, f"version {model.version} is there")
        return [f"version {old.version} was removed ([jobs] keep_versions)" for old in outdated]

    @handles(RollbackRequest)
    def rollback(self, event: RollbackRequest) -> None:
        """Make another existing version current, or give it a share of the requests."""
        core, current = self._core, self._versions.current(event.model)
        served, there = self._versions.served(event.model), self._versions.all_of(event.model)
        if served is None or (current is None and event.share >= 0):
            raise not_found(event.model)
        if event.tenant not in (None, (current or there[-1]).tenant):
            raise PermissionDenied(f'"{event.model}" is another client\'s')
        before = served.current  # it may be failed
        older = [m for m in there if m.version < before]
        target = self._versions.of(event.model, event.version) if event.version else None
        if not event.version and older:
            target = older[-1]
        if target is None or target.state.state is not ModelState.READY:
            which = str(event.version) if event.version else f"before {before}"
            raise self._versions.missing(event.model, which)
        if event.share >= 0 and not self._versions.split(target, event.share):
            raise InvalidInput(
                f"version {before} is the current one: it gets the rest of 100 %",
                hint="pipeswitch models --versions",
            )
        if event.share < 0 and target is not current:
            self.hand_over(target, "rolled back")
        core.answer(event.token, model=event.model, version=target.version, before=before)

    def remove(self, model: Model) -> Registration:
        """Remove the model, free its name, and return its registration."""
        for device in self._machine.devices:
            device.residents.remove(device.state.replicas[model.name])
        self._machine.store.remove(model)
        del self._machine.models[model.name]
        self._core.pins.pop(model.name, None)
        registration = self.registrations.pop(model.name)
        self._has_gone = True
        is_failed = registration.is_known and model.state.state is ModelState.FAILED
        self._versions.gone(model, is_failed=is_failed)
        return registration

    def failed_of(self, name: ModelName) -> list[Model]:
        """Return the failed versions of a name, or the failed version with exactly this name."""
        return [model for model in self.failed.values() if name in (model.base, model.name)]

    def mark_lost(self, name: ModelName, reason: str, aliases: Iterable[ModelName] = ()) -> None:
        """List a model as failed, because its journal entry or configuration is unusable."""
        base, version = split_name(name)
        self.aliases.add(base, aliases)
        model = Model(name, 1, False, self._core.now_ms, base, version, reason=reason)
        model.state.apply(ModelEvent.REFUSED, reason)
        self.list_failed(model)

    def list_failed(self, model: Model) -> None:
        """List a model of the journal that is failed, with its ``reason``."""
        self.failed[model.name] = model
        aliases = self.aliases.of(model.base)
        self._core.emit(ModelRemoved(model=model.name, failure=model.reason, aliases=aliases))

    def mark_refused(self, name: ModelName, reason: str, what: str) -> None:
        """Show why the server's registration of ``what`` was refused: as a note of the served
        model, or as failed, unless a model with the name failed. An empty reason removes either."""
        text = f"its {what} was refused: "
        own, there = self._marks.get((name, what)), self.failed_of(name)
        if (served := self._machine.served.get(name)) is not None:
            if reason or served.note.startswith(text):
                served.note = reason and text + reason
        elif any(one is not own for one in there):
            return
        elif reason:
            self.mark_lost(name, reason)
            self._marks[name, what] = self.failed[name]
        else:
            self.drop_failed(there)

    def drop_failed(self, models: Iterable[Model]) -> None:
        """Remove models that could not be restored, also from the journal."""
        for model in models:
            del self.failed[model.name]
            self._core.emit(ModelRemoved(model=model.name))
            self._core.emit(Journal(entry={"kind": "model-gone", "name": model.name}))
            self._versions.failed_gone(model)
            self._has_gone = True
            self.release(model.base)

    def leave(self, model: Model, cause: str) -> None:
        """Stop accepting requests for the model, and give its name to another version."""
        if model.state.state is ModelState.LEAVING:
            return
        model.state.apply(ModelEvent.UNREGISTERED, cause)
        self.leaving[model.name] = model
        for device in self._machine.devices:
            for one in [*device.state.between.values()]:
                if one.model == model.name:  # it may wait for memory until the name is used again
                    device.state.refuse(one, TaskEvent.ERROR, not_found(model.base))
        successor = self._versions.successor(model.base)
        if successor is not None and self._versions.is_current(model):
            self.hand_over(successor, f"version {model.version} goes")
        self._core.emit(ModelRemoved(model=model.name))

    def _finish(self, model: Model) -> None:
        core, devices = self._core, self._machine.devices
        if not all(d.residents.is_idle(d.state.replicas[model.name]) for d in devices):
            return
        if any(helper.count(model.name) for helper in self._admission.helpers.values()):
            return
        del self.leaving[model.name]
        served = self._machine.served[model.base]
        registration = self.remove(model)
        for device in devices:
            device.worker_pool.remove(model.name)
        self.release(model.base)
        core.emit(Journal(entry={"kind": "model-gone", "name": model.name}))
        core.publish("model.unregistered", model=model.name)
        core.answer_all(registration.end_waiters, model=model.name)
        if model.base not in self._machine.served:
            core.answer_all(served.end_waiters, model=model.base)

    @handles(PinRequest)
    def pin(self, event: PinRequest) -> None:
        """Pin a model, send it to the device and pardon it (``load``), or unpin it (``unload``)."""
        core = self._core
        model = self._versions.current(event.model)
        if model is None or model.state.state is ModelState.LEAVING:
            raise not_found(event.model)
        is_pinned = event.pin and self._machine.stream_of(model) is None
        if event.pin and model.state.state is ModelState.QUARANTINED:
            model.state.apply(ModelEvent.PARDONED, "requested by the user")
            core.model_changes += 1
            model.deaths, model.reason = 0, ""
        elif event.pin and not is_pinned:
            raise OutOfDeviceMemory(
                f'"{event.model}" is larger than the arena, so it cannot be pinned',
                hint="start with a larger --arena",
                requested_bytes=model.built.total_bytes,
                largest_free_bytes=self._machine.devices[0].arena.leasable_bytes,
            )
        if event.pin:
            model.failed_batches = 0
        self._pin(model, is_pinned=is_pinned)
        replica = self._machine.shown(model)
        core.answer(
            event.token, model=event.model, pinned=is_pinned, state=replica.residency.state.value
        )

    def change(self, event: ev.RegisterModelRequest, model: Model) -> list[str]:
        """Give a model the aliases, priority and pin of a repeated registration; return a note.
        The priority holds for all versions of the name, the pin for this one."""
        is_pinned = event.is_pinned or model.want_pinned
        priority = model.priority if event.priority is None else event.priority
        notes = []
        if (priority, is_pinned) != (model.priority, model.want_pinned):
            pinned = f"it is {'pinned' if is_pinned else 'not pinned'} now"
            notes = [f"its priority is {PRIORITY_NAMES[priority]}, and {pinned}"]
            for device in self._machine.devices if is_pinned and model.manifest is not None else ():
                if device.state.may_serve(model):
                    device.arena.check_fits(model, is_pinned=True)
            for one in self._versions.all_of(model.base):
                one.priority = priority
                self._pin(one, is_pinned=is_pinned if one is model else one.want_pinned)
        new = self.aliases.add(model.base, event.aliases)
        if new and (model.state.state in PRESENT or self.registrations[model.name].is_known):
            self.aliases.remember(new, (event.token,))  # otherwise ``stored`` does it
        for one in self._versions.present(model.base) if new or notes else ():
            self._versions.announce(one)  # ``built`` announces a model that is not present yet
        return notes

    def _pin(self, model: Model, *, is_pinned: bool) -> None:
        model.want_pinned = is_pinned
        self._core.pins.pop(model.name, None)
        if is_pinned:
            self._core.pins[model.name] = None
        for device in (device.state for device in self._machine.devices):
            replica = device.replicas[model.name]
            if is_pinned and replica.residency.state is Residency.RESIDENT:
                device.move(replica, ResidencyEvent.PIN, "requested by the user")
                # Otherwise Residents.bring_pinned copies it when no request waits.
            elif not is_pinned and replica.residency.state is Residency.PINNED:
                device.move(replica, ResidencyEvent.UNPIN, "requested by the user")
        if model.state.state in PRESENT:
            self.remember(model)
