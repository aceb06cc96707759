"""Publication of a job's commit as the next version of a model: wait, copy, build. Pure.

1. *waits*: the commit does not exist yet. A script publishes its current step. A client publishes
   the newest commit when earlier publications of the name have ended. A script's publication also
   waits while ``MAX_COPIES`` of its name are on disk; the script's next ``job.publish`` waits, too;
2. *copies*: the daemon writes the commit to a separate folder. A script makes no other commit
   meanwhile. The commit of an ended job is on disk already;
3. *copied*: it waits to be built. The publications of a name are built one at a time, in order of
   arrival, when the current version is ready. Publications in *waits* delay no other one;
4. *builds*: the model's program is built with these weights, as a separate registration. The
   version becomes current when its bytes are in the host store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from ...base import errors
from ...ipc.messages.base import JobName, ModelName, OpId
from ...ipc.messages.daemon import CommitPersisted, PersistCommit
from ...ipc.messages.worker import PublishAnswered, PublishCopied, PublishStep
from ...programs.interface.matching import match
from ..server.server_state import ServerState
from ..state.core import ALL, Core, handles
from ..state.device_state import DeviceState
from ..state.events import DropPublished, PublishRequest, Token, VersionRequest
from ..state.records import NO_OP_ID, Job, Model, Registration, Worker
from ..state.states import MODEL_AWAITED, TASK_FINAL, ModelState
from ..state.versions import Versions
from .model_registry import Registry

UNDER_WAY: Final = (ModelState.BUILDING, ModelState.STORING)
MAX_COPIES: Final = 8  # copied commits of a name that wait to be built; each takes disk space


@dataclass
class Publication:
    """One publication, from its acceptance until its version is ready or refused."""

    name: ModelName
    job: JobName
    step: int  # step of the commit; -1: the newest commit
    part: str  # name of the trained module; empty: the only module that fits
    token: Token | None
    since: OpId  # id of its acceptance; later jobs or models with these names do not count
    is_script: bool  # a script requested it; a commit later than ``step`` is allowed, too
    stage: Literal["waits", "copies", "copied", "builds"] = "waits"
    op_id: OpId = NO_OP_ID  # operation id of its copy
    device: int = 0  # index of the device whose daemon copies
    directory: str = ""  # folder of the copied commit; empty: the job's own folder
    is_cancelled: bool = False  # it ends when the daemon no longer writes its folder
    version: Model | None = None
    registration: Registration | None = None


class Publishing:
    """All unfinished publications, by the name of the model, in order of arrival."""

    def __init__(
        self, core: Core, machine: ServerState, registry: Registry, versions: Versions
    ) -> None:
        self._core = core
        self._machine = machine
        self._registry = registry
        self._versions = versions
        self._lines: dict[ModelName, list[Publication]] = {}

    @handles(PublishRequest)
    def on_request(self, event: PublishRequest) -> None:
        """Publish a commit for a client, who is answered when the version is ready."""
        self._check(event)
        self._accept(event.model, event.job, event.step, event.part, event.token)

    @handles(VersionRequest)
    def version_asked(self, event: VersionRequest) -> None:
        """Build a model's next version from a client's file; answer when it is ready."""
        if self._core.is_draining:
            raise errors.draining()
        name = self._versions.aliases.names.get(event.model, event.model)
        before = self.model_for(name, event.tenant or None)
        models = self._machine.models.values()
        if self._lines.get(name) or any(
            one.base == name
            and one.state.state in UNDER_WAY
            and not self._registry.registrations[one.name].is_known  # restored, with its program
            for one in models
        ):
            raise errors.ServerUnavailable(
                f'a version of "{name}" is being built', hint="try again when it is ready"
            )
        self._begin_version(before, event.spec, event.token)

    def script_asked(self, device: DeviceState, worker: Worker, message: PublishStep) -> None:
        """Accept or refuse a script's request to publish its current step, and reply at once."""
        job = device.job_of(worker, message.op_id)
        if job is None:
            return
        answer = PublishAnswered(op_id=message.op_id)
        try:
            if self._core.is_draining:
                raise errors.draining()
            model = self.model_for(message.model, job.spec.tenant)
            if model.manifest is None:
                raise _not_ready(model)
            tensors = {name: (dtype, shape) for name, dtype, shape in message.tensors}
            match(model.manifest.plain_weights, tensors, message.part, model.manifest.unsaved)
        except errors.PipeSwitchError as error:
            wire = errors.to_wire(error)
            answer = PublishAnswered(
                op_id=message.op_id,
                error=wire["type"],
                message=wire["message"],
                hint=wire["hint"],
                data=wire["data"],
            )
        else:
            self._accept(message.model, job.spec.name, message.step, message.part, None)
        device.send(worker.slot, answer, "signal")

    def _check(self, event: PublishRequest) -> None:
        if self._core.is_draining:
            raise errors.draining()
        job = self._machine.jobs.get(event.job)
        if job is None:
            raise _no_job(event.job)
        self.model_for(event.model, None)
        if job.memory.committed_step < 0:
            what = f'job "{job.spec.name}" has not committed yet'
            raise errors.InvalidInput(what, hint="pipeswitch jobs ls")
        if event.step not in (-1, job.memory.committed_step):
            raise _other_step(event.job, event.step, job.memory.committed_step)

    def model_for(self, name: ModelName, tenant: str | None) -> Model:
        """Return the current version of a name, if a publication can follow it.

        Raises:
            ModelNotFound, PermissionDenied, InvalidInput.
        """
        model = self._versions.current(name)
        if model is None or model.state.state is ModelState.LEAVING:
            raise errors.ModelNotFound(
                f'no model "{name}": register a model before a job publishes weights for it',
                hint=f"pipeswitch register {name} SOURCE",
            )
        if tenant not in (None, model.tenant):
            raise errors.PermissionDenied(f'"{name}" is another client\'s')
        if model.state.state not in (ModelState.READY, *MODEL_AWAITED):
            raise _not_ready(model)
        return model

    def _accept(
        self, name: ModelName, job: JobName, step: int, part: str, token: Token | None
    ) -> None:
        since = self._core.next_op_id()
        one = Publication(name, job, step, part, token, since, token is None)
        self._lines.setdefault(name, []).append(one)

    # -- progress ------------------------------------------------------------------------------

    def pump(self) -> int:
        """Begin the publications that can begin, and end the finished ones."""
        for name, line in list(self._lines.items()):
            for one in list(line):
                if one.stage == "waits" and self._may_begin(one, line):
                    self._begin(one)
                elif one.stage == "builds":
                    self._poll(one)
            begun = [one for one in line if one.stage != "waits"]
            is_next = begun[:1] and begun[0].stage == "copied" and not self._is_awaited(name)
            if is_next and all(one.stage != "builds" for one in begun):
                self._build(begun[0])
            if not line:
                del self._lines[name]
        return ALL if self._lines else 0

    @staticmethod
    def _may_begin(one: Publication, line: list[Publication]) -> bool:
        """Return True if the publication's commit may be copied as soon as it exists."""
        begun = [other for other in line if other.stage != "waits"]
        if one.is_script:
            return len(begun) <= MAX_COPIES  # not counting the first, which is built or next
        return one.step >= 0 or not any(other.since < one.since for other in begun)

    def _is_awaited(self, name: ModelName) -> bool:
        model = self._versions.current(name)
        return model is not None and model.state.state in MODEL_AWAITED

    def _begin(self, one: Publication) -> None:
        job = self._job_of(one)
        if job is None:
            self._end(one, _no_job(one.job))
        elif job.memory.committed_step < one.step:
            if job.state.state in TASK_FINAL:
                self._end(
                    one, errors.InvalidInput(f'job "{job.spec.name}" ended before step {one.step}')
                )
        elif not job.memory.commit_slot_bytes:
            one.stage = "copied"
        elif (device := self._machine.jobs.home(job).state).daemon.is_ready:
            one.stage, one.op_id = "copies", self._core.next_op_id()
            one.device = device.index
            one.directory = f"{self._core.settings.published_dir}/{job.spec.name}@{one.op_id}"
            name, directory = job.spec.name, one.directory
            device.daemon.send(
                PersistCommit(job=name, op_id=one.op_id, directory=directory, is_lasting=False)
            )

    def persisted(self, message: CommitPersisted) -> bool:
        """Record a finished copy. Return False if it belongs to no publication."""
        one = self._copying(message.op_id)
        if one is None:
            return False
        job = self._job_of(one)
        if one.is_cancelled:
            self._end(one, None)
        elif message.error:
            self._end(
                one, errors.ServerUnavailable(f"the commit cannot be copied: {message.error}")
            )
        elif not one.is_script and one.step not in (-1, message.step) and job is not None:
            self._end(one, _other_step(one.job, one.step, message.step))
        else:
            one.stage = "copied"
            self._tell_script(one)
        return True

    def refused(self, op_id: OpId, reason: str) -> None:
        """End a publication whose copy the daemon refused."""
        one = self._copying(op_id)
        if one is not None:
            self._end(one, errors.ServerUnavailable(f"the commit cannot be copied: {reason}"))

    def _copying(self, op_id: OpId) -> Publication | None:
        every = [one for line in self._lines.values() for one in line]
        return next((a for a in every if (a.stage, a.op_id) == ("copies", op_id)), None)

    def _tell_script(self, one: Publication) -> None:
        """Allow the script to commit again."""
        job = self._job_of(one)
        if one.is_script and job is not None and job.slot is not None:
            device = self._machine.jobs.home(job).state
            device.send(job.slot, PublishCopied(op_id=job.op_id), "signal")

    def _build(self, one: Publication) -> None:
        """Build the current version's program with the commit's weights, and check it."""
        served = self._versions.served(one.name)
        try:
            if served is not None and served.born > one.since:
                raise errors.ModelNotFound(
                    f'"{one.name}" was unregistered and registered again as another model',
                    model=one.name,
                )
            before = self.model_for(one.name, None)
            if not one.directory and self._job_of(one) is None:
                raise _no_job(one.job)
        except errors.PipeSwitchError as error:
            self._end(one, error)
            return
        weights = one.directory or f"{self._core.settings.commits_dir}/{one.job}"
        token = one.token
        one.stage, one.token = "builds", None  # the registry answers the client
        own = msgspec.msgpack.encode({"weights": weights, "part": one.part})
        one.version = self._begin_version(before, own, token)
        one.registration = self._registry.registrations[one.version.name]

    def _begin_version(self, before: Model, own: bytes, token: Token | None) -> Model:
        """Build the program of ``before`` with the weights that the spec ``own`` names."""
        served = self._versions.served(before.base)
        assert served is not None
        spec = self._registry.likes.spec(before, f"{before.base} {served.last + 1}", own)
        return self._registry.begin_version(before, spec, token)

    def _poll(self, one: Publication) -> None:
        """End the publication if its version is ready or has failed."""
        assert one.version is not None
        assert one.registration is not None
        is_building = one.version.state.state is ModelState.BUILDING
        if is_building and not one.directory and self._job_of(one) is None:
            self._registry.give_up(one.version, _no_job(one.job))  # no commit is left
        if one.registration.error is not None:
            self._end(one, one.registration.error)
        elif one.version.state.state not in UNDER_WAY:
            self._end(one, None)

    def _end(self, one: Publication, error: errors.PipeSwitchError | None) -> None:
        self._lines[one.name].remove(one)
        if one.stage in ("waits", "copies"):
            self._tell_script(one)
        if one.directory:
            self._core.emit(DropPublished(directory=one.directory))
        if error is not None:
            self._refused(one, error)

    def _refused(self, one: Publication, error: errors.PipeSwitchError) -> None:
        core, job = self._core, self._job_of(one)
        if one.token is not None:
            core.refuse(one.token, error)
        if job is not None and one.is_script and not isinstance(error, errors.Cancelled):
            job.progress.why = f'not published as "{one.name}": {error.message}'
        core.publish("model.publish_failed", model=one.name, job=one.job, error=error.message)

    def _job_of(self, one: Publication) -> Job | None:
        """Return the publication's job; None if it is gone, even if another one has its name."""
        job = self._machine.jobs.get(one.job)
        return job if job is not None and job.created_op_id < one.since else None

    def cancel(self, token: Token) -> None:
        """Cancel a client's publications. The registry cancels versions that are being built."""
        for one in [one for line in self._lines.values() for one in line if one.token == token]:
            error = errors.Cancelled(f'publication of "{one.name}" cancelled')
            if one.stage == "copies":
                self._core.refuse(token, error)
                one.token, one.is_cancelled = None, True
            else:
                self._end(one, error)

    def daemon_died(self, device: int) -> None:
        """Restart the copies of a dead daemon in other folders; the old folders are removed."""
        for one in [one for line in self._lines.values() for one in line]:
            if one.stage == "copies" and one.device != device:
                continue
            if one.is_cancelled:
                self._end(one, None)
            elif one.stage == "copies":
                self._core.emit(DropPublished(directory=one.directory))
                one.stage, one.directory = "waits", ""

    def refuse_all(self, error: errors.PipeSwitchError) -> None:
        """Refuse every waiting client: the server stops."""
        for line in self._lines.values():
            for one in line:
                if one.token is not None:
                    self._core.refuse(one.token, error)
        self._lines.clear()


def _not_ready(model: Model) -> errors.InvalidInput:
    return errors.InvalidInput(f'"{model.base}" is {model.state.state.value}, it must be ready')


def _no_job(name: JobName) -> errors.ModelNotFound:
    return errors.ModelNotFound(f'no job "{name}"', hint="pipeswitch jobs ls", job=name)


def _other_step(name: JobName, step: int, there: int) -> errors.InvalidInput:
    return errors.InvalidInput(
        f'job "{name}" has only its newest commit, of step {there}, not of step {step}',
        hint=f"pipeswitch register NAME --from-job {name}",
    )
