"""Registration of models: build in a process, load into the host store, announce, remove."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

import msgspec

from ...base import errors
from ...ipc.messages.base import ModelName, OpId
from ...ipc.messages.builder import BuildDone, BuildFailed, BuildProgress
from ...ipc.messages.daemon import ModelStored, StoreFailed, StoreModel
from ...planning.planned_groups import PlannedFile
from ...programs.interface.layout import ORIGIN, Manifest, is_same_signature
from ..memory import device_placement
from ..requests.admission import Admission, changed_on_the_way
from ..requests.completion import not_found
from ..server.server_state import ServerState
from ..state import events as ev
from ..state.core import QUEUE, RESIDENCY, TURN, Core, handles
from ..state.records import DeviceModel, Model, Registration
from ..state.states import ModelEvent, ModelState
from ..state.versions import AT, PRESENT, Versions, split_name, version_name
from .build_queue import BuildQueue
from .likes import Likes, decoded
from .names import Names

OUT_OF_TIME: Final = (-14, -24)  # SIGALRM and SIGXCPU
CRASHED: Final = -11  # SIGSEGV
MAX_SHOWN: Final = 80  # longest pair of values that an error shows


class Registry:
    """All registered models."""

    def __init__(
        self,
        core: Core,
        machine: ServerState,
        admission: Admission,
        versions: Versions,
        builds: BuildQueue,
    ) -> None:
        self._core = core
        self._versions = versions
        self._machine = machine
        self._admission = admission
        self.names = Names(core, machine, admission, versions)
        self.registrations = self.names.registrations
        self._builds = builds
        self.likes = Likes(core, machine, versions, self.registrations)

    # -- register -----------------------------------------------------------------------------

    @handles(ev.RegisterModelRequest)
    def register(self, event: ev.RegisterModelRequest) -> None:
        """Register a model: build it; progress and one final answer follow.
        If a model has the name already: 1. same spec and tenant: only its aliases, priority and pin
        may change; 2. else: an error."""
        core = self._core
        if core.is_draining:
            raise errors.draining()
        self.names.check_free(split_name(event.model)[0], event.aliases)
        old = None if event.is_known else self._versions.newest(event.model)
        if old is not None and self._versions.current(event.model) is None:
            raise not_found(event.model)  # its current version is failed
        if old is not None and self._is_same(event, old):
            notes = self.names.change(event, old)  # 1.
            if old.state.state in PRESENT:
                self._answer_registered(old, event.token, notes)
            elif event.is_configured:  # a restored model; the server must not wait for it
                core.answer(event.token, model=old.base)
            else:
                self.registrations[old.name].waiters.append(event.token)
            return
        if old is not None:
            raise _taken(event, old, self.registrations[old.name].spec)
        unknown = device_placement.refusal(event.devices, self._machine.jobs.names)
        if unknown is not None and not event.is_known:
            raise unknown
        most = core.settings.max_models_per_client
        models = self._machine.models.values()
        count = len({model.base for model in models if model.tenant == event.tenant})
        if event.tenant and not event.is_known and count >= most:
            raise errors.HostStoreFull(
                f"this client has {count} models, [server] max_models_per_client is {most} "
                "(clients without a key are one)",
                hint="pipeswitch unregister NAME",
            )
        self._builds.check_room(event.client)
        like = self.likes.of(event)
        if like is not None:
            event = msgspec.structs.replace(event, devices=like.devices, wrapper=like.wrapper)
        self._begin(event, (event.token,), like=like)

    def _is_same(self, event: ev.RegisterModelRequest, old: Model) -> bool:
        """Return True if the registration repeats the old one, from the same tenant.
        Two tenants must not share a model without their consent."""
        served = self._versions.served(event.model)
        is_of_one = old.tenant == event.tenant and old.state.state is not ModelState.LEAVING
        return is_of_one and served is not None and served.spec_digest == event.spec_digest

    def begin_version(self, before: Model, spec: bytes, token: ev.Token | None) -> Model:
        """Build the next version of a name from ``spec``; it becomes current when it is ready."""
        served = self._versions.served(before.base)
        assert served is not None
        event = ev.RegisterModelRequest(
            token=ev.Token(0) if token is None else token,
            model=version_name(before.base, served.last + 1),
            spec=spec,
            spec_digest=served.spec_digest,
            priority=before.priority,
            is_pinned=False,
            client=self.registrations[before.name].client,
            tenant=before.tenant,
            devices=before.devices,
            wrapper=before.wrapper,
        )
        self._begin(event, () if token is None else (token,), takes_over=True)
        return self._machine.models[event.model]

    def _begin(
        self,
        event: ev.RegisterModelRequest,
        waiters: tuple[ev.Token, ...],
        *,
        takes_over: bool = False,
        like: Model | None = None,
    ) -> None:
        """Reserve the name and queue a build, which waits for the program of ``like``."""
        core, machine = self._core, self._machine
        base, version = split_name(event.model)
        registration = Registration(
            model=event.model,
            spec=event.spec,
            spec_digest=event.spec_digest,
            client=event.client,
            build_id=core.next_op_id(),
            takes_over=takes_over,
            is_known=event.is_known,
            like=like,
            lent=event.lent,
            waiters=list(waiters),
        )
        model = Model(
            name=event.model,
            priority=1 if event.priority is None else event.priority,
            want_pinned=event.is_pinned,
            registered_at_ms=core.now_ms,
            base=base,
            version=version,
            tenant=event.tenant,
            devices=device_placement.limit(event.devices, machine.jobs.names),
            manifest=event.restored,
            wrapper=event.wrapper,
        )
        self.names.failed.pop(model.name, None)
        self.registrations[model.name] = registration
        self._builds.waiting.append(registration)
        machine.models[model.name] = model
        if model.want_pinned:
            core.pins[model.name] = None
        for device in machine.devices:
            device.state.replicas[model.name] = DeviceModel(model)
        self.names.aliases.add(base, event.aliases)
        self._versions.opened(model, event.spec_digest)
        if event.restored is not None:
            self._versions.announce(model)

    def pump(self) -> int:
        """Finish unregistrations whose model is idle now; start the next builds."""
        for one, why in self.likes.pump(self._builds.waiting):
            self.give_up(self._machine.models[one.model], why)
        self.names.pump(is_idle=self._builds.is_idle)
        self._builds.pump()
        return QUEUE | TURN | RESIDENCY if self.names.leaving else 0

    @property
    def is_quiet(self) -> bool:
        """True if no client waits for a registration or an unregistration."""
        ones, names = self.registrations.values(), self._machine.served.values()
        return not any(one.waiters or one.end_waiters for one in ones) and not any(
            served.end_waiters for served in names
        )

    def refuse_all(self, error: errors.PipeSwitchError) -> None:
        """Refuse every waiting client: the server stops."""
        for one in self.registrations.values():
            self._core.refuse_all(error, one.waiters, one.end_waiters)
        for served in self._machine.served.values():
            self._core.refuse_all(error, served.end_waiters)

    def progress(self, message: BuildProgress) -> None:
        if self._of(message.model, message.op_id) is None:
            return
        for token in self.registrations[message.model].waiters:
            self._core.emit(
                ev.Reply(
                    token=token,
                    more=True,
                    body={"stage": message.stage, "fraction": message.fraction},
                )
            )

    def built(
        self, message: BuildDone, manifest: Manifest, planned: tuple[PlannedFile, ...]
    ) -> None:
        """Reserve space for a built model, order the daemon to load it, and plan its groups.

        Requests are admitted from now on, and wait until the model is in the host store.
        """
        model = self._of(message.model, message.op_id)
        if model is None or model.state.state is not ModelState.BUILDING:
            return
        if model.manifest is not None and not is_same_signature(model.manifest, manifest):
            self._admission.not_stored(model, changed_on_the_way(model.name))
        current = self._versions.current(model.base)
        its = current.manifest if current is not None and current is not model else None
        if current and its and its.digest == manifest.digest and self._is_new(model):
            self._leave_as_it_is(model, current)
            return
        before, model.manifest = model.manifest, manifest
        model.state.apply(ModelEvent.BUILT, f"digest {manifest.digest[:12]}")
        tensors = () if before is None else before.tensors
        is_kept = [one.digest for one in tensors] == [one.digest for one in manifest.tensors]
        lent = self.registrations[model.name].lent if is_kept else ()  # else it was packed again
        devices = self._machine.devices
        try:
            for device in devices:
                if device.state.may_serve(model):
                    device.arena.check_fits(model, is_pinned=model.want_pinned)
            streams = any(device.arena.min_bytes(manifest) for device in devices)
            self._machine.store.take(model, lent, is_alone=streams)
            if not all(d.residents.take(d.state.replicas[model.name]) for d in devices):
                raise self._machine.store.full(model)
        except errors.PipeSwitchError as error:
            self._refuse(model, error)
            return
        self._versions.announce(model)
        self._store_again(model)
        for device in devices:
            device.plans.use_first(device.state.replicas[model.name], planned)

    def _is_new(self, model: Model) -> bool:
        """Return True if this server made the version from new weights, and did not restore it."""
        return self.registrations[model.name].takes_over

    def _leave_as_it_is(self, model: Model, current: Model) -> None:
        """Discard a published version that equals the current one."""
        waiters = self.registrations[model.name].waiters
        for token in waiters:
            self._answer_registered(current, token)
        waiters.clear()
        text = f'version {current.version} of "{model.base}" has these weights'
        self._refuse(model, errors.AlreadyExists(text))

    def _store_again(self, model: Model) -> None:
        """Order one ready daemon to load the model for all devices; do nothing if none is ready."""
        assert model.manifest is not None
        registration = self.registrations[model.name]
        region = self._machine.store.regions.get(model.owner)
        device = next((d.state for d in self._machine.devices if d.state.daemon.is_ready), None)
        registration.storing = None if device is None else device.index
        if device is None or region is None:
            return
        device.daemon.send(
            StoreModel(
                model=model.name,
                op_id=registration.build_id,
                directory=self._core.settings.program_dir(model.manifest.digest),
                store_offset_bytes=model.store_offset_bytes,
                size_bytes=region.size_bytes,
                image=model.image,
                fills=self._machine.store.fills(model),
            )
        )

    def store_from(self, device: int | None) -> None:
        """Repeat the load orders of a device's dead daemon; None: the orders that no daemon got."""
        # Variants come last: their loads prove the bytes of others that they share.
        for model in sorted(self._machine.models.values(), key=lambda one: bool(one.image)):
            is_storing = model.state.state is ModelState.STORING
            if is_storing and self.registrations[model.name].storing == device:
                self._store_again(model)

    def stored(self, message: ModelStored) -> None:
        """Make a stored model ready: its requests may be dispatched."""
        core = self._core
        model = self._of(message.model, message.op_id)
        if model is None or model.state.state is not ModelState.STORING:
            return
        assert model.manifest is not None
        model.state.apply(ModelEvent.STORED, f"{message.load_ms:.0f} ms")
        core.model_changes += 1
        self._admission.stored(model)
        registration = self.registrations[model.name]
        waiters = registration.waiters
        if not registration.is_known and not registration.takes_over:
            self.names.aliases.remember(self.names.aliases.of(model.base))
            self.names.drop_failed(self.names.failed_of(model.base))
        self.names.remember(model, accepts=tuple(waiters))
        notes = self.names.hand_over(model, "published") if self._is_new(model) else []
        core.publish("model.registered", model=model.name, bytes=model.manifest.total_bytes)
        for token in waiters:
            self._answer_registered(model, token, notes)
        waiters.clear()

    def store_failed(self, message: StoreFailed) -> None:
        model = self._of(message.model, message.op_id)
        if model is None or model.state.state is not ModelState.STORING:
            return
        registration, manifest = self.registrations[model.name], model.built
        if model.image and not self._machine.store.fills(model):  # the other's bytes may be wrong
            self._machine.store.remove(model)
            try:
                self._machine.store.take(model, is_alone=True)
                self._store_again(model)
            except errors.HostStoreFull as error:
                self._refuse(model, error)
            return
        is_derived = manifest.precision is not None
        if not registration.is_known or registration.rebuilds or not is_derived:
            self._refuse(model, errors.RegistrationRefused("weights", message.reason))
            return
        model.state.apply(ModelEvent.DAMAGED, message.reason)
        for device in self._machine.devices:
            device.residents.release(device.state.replicas[model.name])
        self._machine.store.remove(model)
        registration.build_id, registration.rebuilds = self._core.next_op_id(), manifest.digest
        self._builds.waiting.append(registration)

    def refused(self, op_id: OpId, reason: str) -> None:
        """Handle an order that the daemon could not carry out: no other answer follows."""
        for one in list(self.registrations.values()):
            model = self._machine.models[one.model]
            if one.build_id == op_id and model.state.state is ModelState.STORING:
                self._refuse(model, errors.RegistrationRefused("weights", reason))

    def build_failed(self, message: BuildFailed) -> None:
        model = self._of(message.model, message.op_id)
        if model is not None and model.state.state is ModelState.BUILDING:
            error = errors.from_wire(message.error, message.message, message.hint, message.data)
            self._refuse(model, error)

    def builder_exited(self, event: ev.Exited) -> None:
        """Refuse the model of a builder that died without a report, because of the model's code."""
        one = self._builds.exited(OpId(event.source.incarnation))
        model = self._of(one.model, one.build_id) if one is not None else None
        if model is not None and model.state.state is ModelState.BUILDING:
            self._refuse(model, errors.RegistrationRefused("build", _why_it_ended(event.status)))

    def _of(self, name: ModelName, op_id: OpId) -> Model | None:
        registration = self.registrations.get(name)
        is_it = registration is not None and registration.build_id == op_id
        return self._machine.models[name] if is_it else None

    def _refuse(self, model: Model, error: errors.PipeSwitchError) -> None:
        """Remove everything of a refused model, and free its name."""
        core, is_known = self._core, self.registrations[model.name].is_known
        if not is_known:
            core.emit(ev.ModelRemoved(model=model.name))
        if model.manifest is not None:  # it may have waiting requests
            self._admission.not_stored(model, error)
        model.state.apply(ModelEvent.REFUSED, type(error).__name__)
        registration = self.names.remove(model)
        registration.error = error
        if registration.is_known:  # the model's journal entry and files stay
            model.reason = str(error)
            self.names.list_failed(model)
        self.names.release(model.base)
        core.refuse_all(error, registration.waiters)
        core.publish("model.refused", model=model.name, error=errors.to_wire(error))

    def _answer_registered(self, model: Model, token: ev.Token, notes: Sequence[str] = ()) -> None:
        manifest = self._machine.devices[0].state.replicas[model.name].manifest
        assert manifest is not None
        streams = self._machine.stream_of(model)
        notes = [streams["text"], *notes] if streams else notes
        self._core.answer(
            token,
            model=model.base,
            version=model.version,
            digest=manifest.digest,
            program=manifest.program,
            mode=manifest.mode,
            mode_reason=manifest.mode_reason,
            notes=[*manifest.extra.get("notes", []), *notes],
            streams=streams,
            bytes=manifest.total_bytes,
            groups=len(manifest.groups),
            batching=msgspec.to_builtins(manifest.batching),
            precision=manifest.precision and manifest.precision.row(),
        )

    def cancel(self, event: ev.CancelRequest) -> None:
        """Cancel a registration whose client cancelled it or disconnected.

        A model that is being stored is not cancelled any more: it will be registered, and the
        client gets that answer.
        """
        core = self._core
        for one in list(self.registrations.values()):
            model = self._machine.models[one.model]
            if event.token not in one.waiters or model.state.state is not ModelState.BUILDING:
                continue
            one.waiters.remove(event.token)
            error = errors.Cancelled(f'registration of "{model.name}" cancelled')
            core.refuse(event.token, error)
            if not one.waiters:
                self.give_up(model, error)

    def give_up(self, model: Model, error: errors.PipeSwitchError) -> None:
        self._builds.give_up(self.registrations[model.name])
        self._refuse(model, error)

    # -- unregister, load, unload -------------------------------------------------------------

    @handles(ev.UnregisterRequest)
    def unregister(self, event: ev.UnregisterRequest) -> None:
        """Stop admitting requests; answer when the queued requests have ended.

        A name removes all its versions; a version's own name removes that version. A registration
        whose build waits or runs is cancelled, since a build may take arbitrarily long.
        """
        core = self._core
        if event.model in self.names.aliases.names:
            self.names.drop_alias(event)
            return
        if (others := self._machine.composites.get(event.model)) is not None:
            others.unregister(event)
            return
        one = self._machine.models.get(event.model) if AT in event.model else None
        models = [one] if one is not None else self._versions.all_of(event.model)
        known = [*self.names.failed_of(event.model), *models]
        if not known:
            raise not_found(event.model)
        if event.tenant not in (None, known[-1].tenant):
            raise errors.PermissionDenied(f'"{event.model}" is another client\'s')
        if any(model.state.state is ModelState.STORING for model in models):
            raise errors.AlreadyExists(
                f'"{event.model}" is still being registered', hint="wait until it is ready"
            )
        staying = [model for model in models if model.state.state is not ModelState.BUILDING]
        for model in models:
            if model not in staying:
                self.give_up(model, errors.Cancelled(f'registration of "{model.name}" cancelled'))
                if model.name not in self.names.failed:
                    core.emit(ev.Journal(entry={"kind": "model-gone", "name": model.name}))
        self.names.drop_failed(self.names.failed_of(event.model))  # some may have failed just now
        staying.sort(key=self._versions.is_current)  # the current version leaves last
        for model in staying:
            self.names.leave(model, "requested by the user")
        served = self._versions.served(event.model)
        if one is not None and staying:
            self.registrations[one.name].end_waiters.append(event.token)
        elif one is None and served is not None:
            served.end_waiters.append(event.token)
        else:
            core.answer(event.token, model=event.model)


def _taken(event: ev.RegisterModelRequest, old: Model, spec: bytes) -> errors.AlreadyExists:
    """Return the error for a name that is taken; it names the options that differ."""
    hint = f"pipeswitch unregister {event.model} first, or choose another name"
    is_leaving = old.state.state is ModelState.LEAVING
    if is_leaving or old.tenant != event.tenant:
        why = "being unregistered" if is_leaving else "another client's"
        return errors.AlreadyExists(f'"{event.model}" is {why}', hint=hint)
    changed = ("source", "weights") if old.version > 1 else ()
    skipped = {"name", "part", "allow_module_mode", *ORIGIN, *changed}
    differs: dict[str, str] = {}
    with contextlib.suppress(msgspec.DecodeError, UnicodeError):
        was, now = map(decoded, (spec, event.spec))
        own = {"weights", "adapter"} if event.like else was.keys() & now.keys() - skipped
        for option in sorted(own):
            if now.get(option) != was.get(option):  # a path on the server is not shown
                pair = f" ({now.get(option)!r}, not {was.get(option)!r})"
                differs[option] = option + pair * (len(pair) <= MAX_SHOWN and "'/" not in pair)
    if differs.keys() <= {"source", "weights"}:
        hint += f"; weights alone: pipeswitch register {event.model} --weights FILE --as-version"
    what = ", ".join(differs.values()) or "source, weights, or the contents of a file"
    text = f'"{event.model}" is registered already, and this registration differs: {what}'
    return errors.AlreadyExists(text, hint=hint, differs=[*differs])


def _why_it_ended(status: int) -> str:
    if status in OUT_OF_TIME:
        return "building and verifying took longer than [workers] build_timeout"
    text = f"the builder process ended with status {status} before it was done"
    if status == CRASHED:
        text += (
            "; code that writes to its weights without torch (numpy, an extension) ends the process"
        )
    return text
