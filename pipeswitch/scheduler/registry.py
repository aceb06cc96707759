"""Registration: build in a child, load into the host store, announce; and the way back."""

from __future__ import annotations

from typing import Final

from ..errors import (
    AlreadyExists,
    Cancelled,
    ModelNotFound,
    PermissionDenied,
    PipeSwitchError,
    QueueFull,
    RegistrationRefused,
    ServerUnavailable,
    from_wire,
    to_wire,
)
from ..ipc.messages import (
    BuildDone,
    BuildFailed,
    BuildProgress,
    Epoch,
    ForgetModel,
    ModelName,
    ModelStored,
    StoreFailed,
    StoreModel,
)
from ..programs.layout import Manifest
from ..programs.signature import is_same_signature
from .admission import Admission, changed_on_the_way
from .core import Core
from .events import (
    Announce,
    Answer,
    BuilderExited,
    CancelAsked,
    Journal,
    KillBuild,
    PinAsked,
    RegisterAsked,
    Retract,
    StartBuild,
    SweepPrograms,
    Token,
    ToWorker,
    UnregisterAsked,
)
from .records import Model
from .residency import Residents
from .states import MODEL_AWAITED, ModelEvent, ModelState, Residency, ResidencyEvent, WorkerState
from .store import Store

OUT_OF_TIME: Final = (-14, -24)  # SIGALRM and SIGXCPU


class Registry:
    """All registered models. Builds of one client run one after the other: each uses every core.

    Clients take turns: one that has had none for longest is next, so that one client's endless
    builds keep another client waiting for one of them at most.
    """

    def __init__(
        self, core: Core, store: Store, residents: Residents, admission: Admission
    ) -> None:
        self._core = core
        self._store = store
        self._residents = residents
        self._admission = admission
        self._waiting_builds: dict[ModelName, str] = {}  # whose it is, in order of arrival
        self._builders: dict[Epoch, str] = {}  # from StartBuild until the process is gone
        self._last_turns: dict[str, Epoch] = {}  # of clients that wait for another one
        self._gone_specs: set[bytes] = set()  # of models whose files are to be given back

    # -- register -----------------------------------------------------------------------------

    def register(self, event: RegisterAsked) -> None:
        """Outcomes: 1. same name and spec: a no-op; 2. same name, other spec: an error;
        3. a build starts; progress and one final answer follow."""
        core = self._core
        if core.is_draining:
            core.refuse(event.token, ServerUnavailable("the server is draining"))
            return
        old = core.models.get(event.model)
        is_leaving = old is not None and old.state.state is ModelState.LEAVING
        if old is not None and old.spec_digest == event.spec_digest and not is_leaving:
            if old.manifest is not None and old.state.state in (
                ModelState.READY,
                ModelState.QUARANTINED,
            ):
                self._answer_registered(old, event.token)  # 1.
            else:
                old.register_tokens.append(event.token)
            return
        if old is not None:
            error = AlreadyExists(
                f'"{event.model}" is '
                f"{'being unregistered' if is_leaving else 'registered from something else'}",
                hint=f"pipeswitch unregister {event.model}, or choose another name",
            )
            core.refuse(event.token, error)
            return
        limit = core.settings.max_waiting_builds
        if event.client and list(self._waiting_builds.values()).count(event.client) >= limit:
            core.refuse(event.token, QueueFull(f"{limit} registrations of this client wait"))
            return
        limit = core.settings.max_waiting_builds_in_all
        if event.client and len(self._waiting_builds) >= limit:
            core.refuse(event.token, QueueFull(f"{limit} registrations wait"))
            return
        model = Model(
            name=event.model,
            spec=event.spec,
            spec_digest=event.spec_digest,
            priority=event.priority,
            want_pinned=event.is_pinned,
            build_epoch=core.next_epoch(),
            registered_at_ms=core.now_ms,
            tenant=event.tenant,
            manifest=event.restored,
        )
        model.register_tokens.append(event.token)
        core.models[model.name] = model
        self._waiting_builds[model.name] = event.client
        if event.restored is not None:
            self._announce(model)

    def pump(self) -> None:
        """Finish unregistrations whose model is idle now; start the next builds."""
        core = self._core
        for model in [m for m in core.models.values() if m.state.state is ModelState.LEAVING]:
            self._finish_unregister(model)
        if self._gone_specs and not self._builders:  # one may have found its program there already
            self._sweep()
        while len(self._builders) < core.settings.max_builds and (name := self._next_build()):
            model, client = core.models[name], self._waiting_builds.pop(name)
            self._builders[model.build_epoch] = client
            self._last_turns[client] = model.build_epoch
            core.emit(
                StartBuild(
                    model=model.name,
                    epoch=model.build_epoch,
                    spec=model.spec,
                    tenant=model.tenant,
                )
            )
        waiting = {*self._waiting_builds.values(), *self._builders.values()}
        self._last_turns = {c: at for c, at in self._last_turns.items() if c in waiting}

    def _sweep(self) -> None:
        models = self._core.models.values()
        self._core.emit(
            SweepPrograms(
                digests=frozenset(m.manifest.digest for m in models if m.manifest is not None),
                specs=frozenset(model.spec for model in models),
                gone_specs=frozenset(self._gone_specs),
            )
        )
        self._gone_specs.clear()

    def _next_build(self) -> ModelName | None:
        """The first of the client whose last turn is longest ago, and that builds nothing now."""
        busy = set(self._builders.values())
        free = [name for name, client in self._waiting_builds.items() if client not in busy]
        return min(
            free,
            key=lambda name: self._last_turns.get(self._waiting_builds[name], -1),
            default=None,
        )

    @property
    def is_quiet(self) -> bool:
        """No client waits for a registration or for its end."""
        models = self._core.models.values()
        return not any(model.register_tokens or model.unregister_tokens for model in models)

    def refuse_all(self, error: PipeSwitchError) -> None:
        """The server cannot go on: every client that waits is answered."""
        for model in self._core.models.values():
            for token in (*model.register_tokens, *model.unregister_tokens):
                self._core.refuse(token, error)
            model.register_tokens.clear()
            model.unregister_tokens.clear()

    def progress(self, message: BuildProgress) -> None:
        model = self._of(message.model, message.epoch)
        if model is None:
            return
        for token in model.register_tokens:
            self._core.emit(
                Answer(
                    token=token,
                    more=True,
                    body={"stage": message.stage, "fraction": message.fraction},
                )
            )

    def built(self, message: BuildDone, manifest: Manifest) -> Model | None:
        """The directory is complete: take room and let the daemon load it; the model if so.

        From here on requests are admitted, and wait: after a restart they come before the bytes do.
        """
        model = self._of(message.model, message.epoch)
        if model is None or model.state.state is not ModelState.BUILDING:
            return None
        if model.manifest is not None and not is_same_signature(model.manifest, manifest):
            self._admission.not_stored(model, changed_on_the_way(model.name))
        model.manifest = model.built = manifest
        model.state.apply(ModelEvent.BUILT, f"digest {manifest.digest[:12]}")
        try:
            self._store.take(model)
        except PipeSwitchError as error:
            self._refuse(model, error)
            return None
        self._announce(model)
        self.store_again(model)
        return model

    def _announce(self, model: Model) -> None:
        assert model.manifest is not None
        manifest, priority = model.manifest, model.priority
        self._core.emit(Announce(model=model.name, manifest=manifest, priority=priority))

    def store_again(self, model: Model) -> None:
        """(Re)send the load order; there may be no daemon now, or the one that had it died."""
        assert model.manifest is not None
        self._core.tell_daemon(
            StoreModel(
                model=model.name,
                epoch=model.build_epoch,
                directory=self._core.settings.program_dir(model.manifest.digest),
                store_offset_bytes=model.store_offset_bytes,
                size_bytes=model.manifest.total_bytes,
            )
        )

    def stored(self, message: ModelStored) -> None:
        """Complete: requests may be dispatched."""
        core = self._core
        model = self._of(message.model, message.epoch)
        if model is None or model.state.state is not ModelState.STORING:
            return
        assert model.manifest is not None
        model.state.apply(ModelEvent.STORED, f"{message.load_ms:.0f} ms")
        self._admission.stored(model)
        self._remember(model, accepts=tuple(model.register_tokens))
        core.publish("model.registered", model=model.name, bytes=model.manifest.total_bytes)
        for token in model.register_tokens:
            self._answer_registered(model, token)
        model.register_tokens.clear()

    def _remember(self, model: Model, accepts: tuple[Token, ...] = ()) -> None:
        """In the journal: the next server has it again, pinned or not, without a build."""
        assert model.manifest is not None
        entry = {
            "kind": "model",
            "name": model.name,
            "spec": model.spec,
            "spec_digest": model.spec_digest,
            "digest": model.manifest.digest,
            "priority": model.priority,
            "pin": model.want_pinned,
            "tenant": model.tenant,
        }
        self._core.emit(Journal(entry=entry, accepts=accepts))

    def store_failed(self, message: StoreFailed) -> None:
        model = self._of(message.model, message.epoch)
        if model is not None and model.state.state is ModelState.STORING:
            self._refuse(model, RegistrationRefused("weights", message.reason))

    def refused(self, epoch: Epoch, reason: str) -> None:
        """The daemon could not carry out an order for a reason of its own: no answer follows."""
        for model in list(self._core.models.values()):
            if model.build_epoch == epoch and model.state.state is ModelState.STORING:
                self._refuse(model, RegistrationRefused("weights", reason))

    def build_failed(self, message: BuildFailed) -> None:
        model = self._of(message.model, message.epoch)
        if model is not None and model.state.state is ModelState.BUILDING:
            error = from_wire(message.error, message.message, message.hint, message.data)
            self._refuse(model, error)

    def builder_exited(self, event: BuilderExited) -> None:
        """A builder that died without a word: its model's code brought it down."""
        model = self._of(event.model, event.epoch)
        self._builders.pop(event.epoch, None)
        if model is not None and model.state.state is ModelState.BUILDING:
            self._refuse(model, RegistrationRefused("build", _why_it_ended(event.status)))

    def _of(self, name: ModelName, epoch: Epoch) -> Model | None:
        model = self._core.models.get(name)
        return model if model is not None and model.build_epoch == epoch else None

    def _refuse(self, model: Model, error: PipeSwitchError) -> None:
        """Nothing stays behind of a model that was refused; the name is free again."""
        core = self._core
        if model.manifest is not None:  # it may have been announced
            core.emit(Retract(model=model.name))
            self._admission.not_stored(model, error)
        model.state.apply(ModelEvent.REFUSED, type(error).__name__)
        self._store.forget(model)
        del core.models[model.name]
        self._gone_specs.add(model.spec)
        for token in model.register_tokens:
            core.refuse(token, error)
        core.publish("model.refused", model=model.name, error=to_wire(error))

    def _answer_registered(self, model: Model, token: Token) -> None:
        manifest = model.manifest
        assert manifest is not None
        self._core.answer(
            token,
            model=model.name,
            digest=manifest.digest,
            mode=manifest.mode,
            mode_reason=manifest.mode_reason,
            bytes=manifest.total_bytes,
            groups=len(manifest.groups),
        )

    def cancel(self, event: CancelAsked) -> None:
        """The client that registers has gone or given up.

        While its bytes are being stored it is too late: the model is registered in a moment, and
        the answer says so.
        """
        core = self._core
        for model in list(core.models.values()):
            is_building = model.state.state is ModelState.BUILDING
            if event.token not in model.register_tokens or not is_building:
                continue
            model.register_tokens.remove(event.token)
            error = Cancelled(f'registration of "{model.name}" cancelled')
            core.refuse(event.token, error)
            if not model.register_tokens:
                self._give_up(model, error)

    def _give_up(self, model: Model, error: PipeSwitchError) -> None:
        """End its build, or take it from those that wait."""
        if model.build_epoch in self._builders:
            self._core.emit(KillBuild(model=model.name, epoch=model.build_epoch))
        else:
            del self._waiting_builds[model.name]
        self._refuse(model, error)

    # -- unregister, load, unload -------------------------------------------------------------

    def unregister(self, event: UnregisterAsked) -> None:
        """No new request is admitted; the answer comes when the queued ones are through.

        A registration whose build waits or runs is cancelled: a build may take as long as it may.
        """
        core = self._core
        model = core.models.get(event.model)
        if model is None:
            core.refuse(event.token, _not_found(event.model))
            return
        if event.tenant not in (None, model.tenant):
            core.refuse(event.token, PermissionDenied(f'"{event.model}" is another client\'s'))
            return
        if model.state.state is ModelState.BUILDING:
            self._give_up(model, Cancelled(f'registration of "{model.name}" cancelled'))
            core.emit(Journal(entry={"kind": "model-gone", "name": model.name}))  # if it was there
            core.answer(event.token, model=model.name)
            return
        if model.state.state is ModelState.STORING:
            error = AlreadyExists(
                f'"{event.model}" is still being registered', hint="wait until it is ready"
            )
            core.refuse(event.token, error)
            return
        if model.state.state is not ModelState.LEAVING:
            model.state.apply(ModelEvent.UNREGISTERED, "asked by the user")
            core.emit(Retract(model=model.name))
        model.unregister_tokens.append(event.token)

    def _finish_unregister(self, model: Model) -> None:
        core = self._core
        if model.users or core.queue.count(model.name) or model.is_being_sent:
            return
        if model.residency.state is not Residency.HOST:
            self._residents.evict(model, "unregistered")
        self._store.forget(model)
        del core.models[model.name]
        self._gone_specs.add(model.spec)
        for worker in core.workers.values():
            worker.unpreparable = {key for key in worker.unpreparable if key[0] != model.name}
            if model.name in worker.warm and worker.state.state is not WorkerState.DEAD:
                del worker.warm[model.name]
                if worker.job is None:
                    core.emit(ToWorker(slot=worker.slot, message=ForgetModel(model=model.name)))
        core.emit(Journal(entry={"kind": "model-gone", "name": model.name}))
        core.publish("model.unregistered", model=model.name)
        for token in model.unregister_tokens:
            core.answer(token, model=model.name)

    def pin(self, event: PinAsked) -> None:
        """``load`` pins and brings to the device, and pardons; ``unload`` unpins."""
        core = self._core
        model = core.models.get(event.model)
        if model is None or model.state.state is ModelState.LEAVING:
            core.refuse(event.token, _not_found(event.model))
            return
        model.want_pinned = event.pin
        if event.pin:
            if model.state.state is ModelState.QUARANTINED:
                model.state.apply(ModelEvent.PARDONED, "asked by the user")
                model.deaths, model.reason = 0, ""
            if model.residency.state is Residency.RESIDENT:
                model.residency.apply(ResidencyEvent.PIN, "asked by the user")
            # One that is not on the device is brought when nothing waits (Residents.bring_pinned).
        elif model.residency.state is Residency.PINNED:
            model.residency.apply(ResidencyEvent.UNPIN, "asked by the user")
        if model.state.state not in MODEL_AWAITED:
            self._remember(model)
        core.answer(event.token, model=model.name, pinned=event.pin,
                    state=model.residency.state.value)  # fmt: skip


def _why_it_ended(status: int) -> str:
    """Of a builder that said nothing itself."""
    if status in OUT_OF_TIME:
        return "building and verifying it took longer than [workers] build_timeout allows"
    return f"the builder process ended with status {status} before it was done"


def _not_found(name: str) -> ModelNotFound:
    return ModelNotFound(f'no model "{name}"', hint="pipeswitch models")
