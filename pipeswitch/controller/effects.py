"""Performs the scheduler's commands: messages, forks, kills, memfds, journal, answers.

Runs in the scheduler's thread. It decides nothing; what it learns goes back as an event.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from ..commits.files import load_commit, read_record, remove_unnamed
from ..errors import (
    PipeSwitchError,
    RegistrationRefused,
    RemoteProtocolError,
    ServerUnavailable,
    to_wire,
)
from ..failpoints import reach
from ..ipc.messages import (
    BuildDone,
    BuildFailed,
    BuildSettings,
    Epoch,
    JobName,
    Message,
    ModelName,
)
from ..planning import files as profile_files
from ..planning.profile import Profile
from ..programs.build.builder import work_prefix
from ..programs.layout import Manifest
from ..programs.spec import files_of, is_checked, kept, load_manifest, needs_more, save_manifest
from ..scheduler.events import (
    Announce,
    Answer,
    BuilderExited,
    Command,
    CreateCommits,
    DropCommits,
    DropPublished,
    FromBuilder,
    JobAsked,
    Journal,
    KillBuild,
    KillWorker,
    Leave,
    Publish,
    RaiseTurn,
    RemoveJob,
    Retract,
    SaveProfile,
    Span,
    SpawnDaemon,
    SpawnWorker,
    StartBuild,
    StopTrial,
    SweepPrograms,
    ToDaemon,
    Token,
    ToWorker,
    UnregisterAsked,
    Warn,
)
from ..scheduler.timeline import Timeline
from .device import DeviceEffects, Ground
from .folders import DIGEST
from .journal import JournalFile
from .processes import Child

log = logging.getLogger(__name__)

_SERVER = Token(-(1 << 62))  # the server itself asks; below all of main's own


def _copied_bytes(spec: bytes) -> int:
    """What a build copies before it looks at it; at least one byte."""
    found = 1
    for path in files_of(spec):
        with contextlib.suppress(OSError):  # the builder says it better
            found += path.stat().st_size
    return found


class Effects:
    """One method per command."""

    def __init__(
        self,
        ground: Ground,
        devices: Sequence[DeviceEffects],
        *,
        journal: JournalFile,
        profiles_dir: Path,
    ) -> None:
        self._devices = devices
        self._sizes, self._places, self._memory = ground.sizes, ground.places, ground.memory
        self._processes, self._frontend = ground.processes, ground.frontend
        # What was measured here before what came along.
        self._profile_folders = (self._places.profiles, profiles_dir)
        self._journal = journal
        self._take = ground.take  # an event, to be handled after the running one
        self._builders: dict[Epoch, Child] = {}
        self._refused: dict[Token, PipeSwitchError] = {}  # their good answer is on its way here
        self.built_before: dict[bytes, str] = {}  # spec -> digest, from the journal
        self._disk = self._frontend.disk
        for name, known in journal.models.items():
            self._disk.keep_program(name, known["digest"], known["tenant"])
        self._started_at_s = time.time()  # wall clock: file times are
        self._built_at_s: dict[bytes, float] = {}  # by spec: what was uploaded later is another's
        self.timeline = Timeline()
        self.left: Leave | None = None

    def perform(self, command: Command) -> None:
        match command:
            case (
                ToWorker(device=device)
                | ToDaemon(device=device)
                | RaiseTurn(device=device)
                | StopTrial(device=device)
                | SpawnWorker(device=device)
                | SpawnDaemon(device=device)
                | KillWorker(device=device)
            ):
                self._devices[device].perform(command)
            case Answer():
                self._answer(command)
            case Publish() | Announce() | Retract():
                self._frontend.perform(command)
            case Span():
                self.timeline.add(command)
            case StartBuild():
                self._start_build(command)
            case KillBuild(epoch=epoch):
                if epoch in self._builders:
                    self._processes.kill(self._builders[epoch])
            case SweepPrograms():
                self.sweep(command)
            case DropPublished(directory=directory):
                self._frontend.remove_files([Path(directory)])
            case CreateCommits():
                self._create_commits(command)
            case DropCommits(job=job):
                reach("commits.drop")
                self._memory.drop_commits(job)
            case RemoveJob(job=job):
                self._remove_job(job)
            case Journal():
                self._write_journal(command)
            case SaveProfile(profile=profile):
                self._save_profile(profile)
            case Warn(text=text):
                log.warning("%s", text)
            case Leave():
                self.left = command

    # -- answers and what they promise ---------------------------------------------------------

    def _answer(self, command: Answer) -> None:
        reach("controller.answer")
        if not command.more:
            refusal = self._refused.pop(command.token, None)
            if refusal is not None:
                command = Answer(token=command.token, error=refusal)
        if command.token >= 0:  # negative: asked by the server itself
            self._frontend.perform(command)
        elif command.error is not None:
            log.error("asked by the server itself and refused: %s", command.error)

    def _write_journal(self, command: Journal) -> None:
        """What cannot be written is not accepted: its askers are refused, and it is taken back as
        if its owner had asked for that. What was there before (pinned now, gone, restored) goes
        on: the journal is behind then, and catches up with the next entry it can write."""
        entry = command.entry
        if entry["kind"] == "model":
            self._disk.keep_program(entry["name"], entry["digest"], entry["tenant"])
        elif entry["kind"] == "model-gone":
            self._disk.drop_program(entry["name"])
        try:
            if entry["kind"] == "job":  # accepted: its log exists, and is its own
                (self._places.logs / f"job-{entry['name']}.log").write_bytes(b"")
            reach("journal.write")
            self._journal.append(entry)
            reach("journal.written")
        except OSError as problem:
            reason = os.strerror(problem.errno or 0)
            log.error("journal %s=%s not written: %s", entry["kind"], entry["name"], reason)
            if not command.accepts or min(command.accepts) < 0:
                self._journal.owe(entry)
                return
            error = ServerUnavailable(
                f'the server cannot keep "{entry["name"]}": {self._places.root}: {reason}',
                hint="free or mend the disk of its state directory, then try again",
            )
            self._refused.update(dict.fromkeys(command.accepts, error))
            if entry["kind"] == "job":
                self._take(JobAsked(token=_SERVER, job=JobName(entry["name"]), action="cancel"))
            else:
                self._take(UnregisterAsked(token=_SERVER, model=ModelName(entry["name"])))

    # -- builds --------------------------------------------------------------------------------

    def _start_build(self, command: StartBuild) -> None:
        """Fork a builder; a program that the journal knows is on disk already.

        One that other contracts than ours let through is built anew, of the bytes on disk.
        """
        spec, digest = command.spec, self.built_before.pop(command.spec, None)
        if digest is None:
            self._built_at_s[spec] = time.time()
        if digest is not None and (self._places.models / digest / "manifest.json").is_file():
            if self._is_checked(digest):
                self._built(BuildDone(model=command.model, epoch=command.epoch, digest=digest))
                # No process, no exit; but the next build waits for it.
                self._take(BuilderExited(model=command.model, epoch=command.epoch, status=0))
                return
            spec = kept(spec, self._places.models / digest)
        elif refusal := self._disk.refusal(command.tenant, _copied_bytes(spec), "a program"):
            self._refuse_build(command, refusal)
            self._take(BuilderExited(model=command.model, epoch=command.epoch, status=0))
            return

        done: list[BuildDone] = []

        def on_message(message: Message, _: list[int]) -> None:
            if isinstance(message, BuildDone):
                done.append(message)  # what it claims is looked at when it can write no more
                self._processes.kill(self._builders[command.epoch])
            else:
                self._take(FromBuilder(message=message))

        def on_exit(status: int) -> None:
            self._builders.pop(command.epoch, None)
            if done:
                self._publish(command, done[0], spec)
            for left in self._places.models.glob(work_prefix(command.epoch) + "*"):
                shutil.rmtree(left, ignore_errors=True)  # it was killed
            self._take(BuilderExited(model=command.model, epoch=command.epoch, status=status))

        settings = BuildSettings(
            model=command.model,
            epoch=command.epoch,
            spec=spec,
            directory=str(self._places.models),
            threads=self._sizes.build_threads,
            timeout_s=self._sizes.build_timeout_s,
            memory_bytes=self._sizes.build_memory_bytes,
            disk_bytes=max(1, self._disk.left_bytes(command.tenant)),
            task_memory_bytes=self._sizes.task_memory_bytes,
            is_sandboxed=self._sizes.is_sandboxed,
        )
        self._builders[command.epoch] = self._processes.fork(
            "builder", "pipeswitch-bld", settings, 1, [], on_message, on_exit
        )

    def manifest_of(self, digest: str) -> Manifest | None:
        """Of a program on the disk; None where it cannot be read: its next build says why."""
        try:
            return load_manifest(self._places.models / digest)
        except RegistrationRefused:
            return None

    def _refuse_build(self, command: StartBuild, error: PipeSwitchError) -> None:
        wire = to_wire(error)
        failed = BuildFailed(
            model=command.model, epoch=command.epoch, error=wire["type"],
            message=wire["message"], hint=wire["hint"], data=wire["data"],
        )  # fmt: skip
        self._take(FromBuilder(message=failed))

    def _is_checked(self, digest: str) -> bool:
        manifest = self.manifest_of(digest)
        return manifest is None or is_checked(manifest)

    def _publish(self, command: StartBuild, message: BuildDone, spec: bytes) -> None:
        """A builder of a client's program may say anything: it is looked at as a stranger's.

        Its digest names the program among its tenant's alone (``Places.name_for``).
        """
        is_a_place = bool(re.fullmatch(DIGEST, message.digest)) and "/" not in message.folder
        if not is_a_place or not message.folder.startswith(work_prefix(command.epoch)):
            nonsense = RegistrationRefused("build", "its builder spoke nonsense")
            self._refuse_build(command, nonsense)
            return
        try:
            built = load_manifest(self._places.models / message.folder)
            if built.mode == "module" and not needs_more(spec):
                raise RegistrationRefused("build", "a module's code, of a source that has none")
            digest = self._places.name_for(command.tenant, message.digest)
            message = msgspec.structs.replace(message, digest=digest)
            if built.digest != digest:
                built = msgspec.structs.replace(built, digest=digest)
                save_manifest(self._places.models / message.folder, built)
            self._places.publish(message.folder, digest)
        except RegistrationRefused as error:
            self._refuse_build(command, error)
            return
        except OSError as error:
            reason = f"{os.strerror(error.errno or 0)}: {self._places.models}"
            self._refuse_build(command, RegistrationRefused("build", reason))
            return
        over_bytes = -self._disk.left_bytes(command.tenant, message.digest)
        if over_bytes > 0:  # another one was built meanwhile
            refusal = self._disk.refusal(command.tenant, over_bytes, "a program")
            assert refusal is not None
            self._refuse_build(command, refusal)
        else:
            self._built(message)

    def _built(self, message: BuildDone) -> None:
        reach("build.done")
        try:
            manifest = load_manifest(self._places.models / message.digest)
        except RegistrationRefused as error:
            failed = BuildFailed(
                model=message.model, epoch=message.epoch, error="RegistrationRefused",
                message=error.message, data=error.data,
            )  # fmt: skip
            self._take(FromBuilder(message=failed))
            return
        found = tuple(profile_files.find(self._profile_folders, manifest.digest))
        self._take(FromBuilder(message=message, manifest=manifest, profiles=found))

    def sweep(self, command: SweepPrograms) -> None:
        """Programs that neither a model nor the journal names, and the gone models' uploads.

        The loop renames, another thread removes: a large file takes its time.
        """
        wanted = command.digests | self._disk.digests()
        garbage = self._places.take_away(wanted)
        uploads = self._places.uploads
        still_named = {path for spec in command.specs for path in files_of(spec)}
        for spec in command.gone_specs:
            at_s = self._built_at_s.pop(spec, self._started_at_s)
            for path in files_of(spec):
                if path.parent == uploads and path not in still_named:
                    with contextlib.suppress(OSError):
                        if path.stat().st_mtime <= at_s:
                            garbage.append(path)
        self._frontend.remove_files(garbage)

    def _save_profile(self, profile: Profile) -> None:
        try:
            profile_files.save(self._places.profiles, profile)
        except OSError as error:  # it is in force; the next server has to measure again
            log.warning("profile model=%s not written: %s", profile.model, error)

    # -- commits -------------------------------------------------------------------------------

    def _create_commits(self, command: CreateCommits) -> None:
        reach("commits.create")
        self._memory.create_commits(command.job, command.slot_bytes)

    def restore_commits(self, job: JobName) -> tuple[int, int] | None:
        """Load a job's persisted commit; (slot bytes, step), or None when there is none."""
        loaded = load_commit(self._places.commits / job)
        if loaded is None:
            return None
        descriptor, slot_bytes, record = loaded
        self._memory.keep_commits(job, descriptor, slot_bytes)
        return slot_bytes, record.step

    def step_on_disk(self, job: JobName) -> int:
        """Of a job's persisted commit; -1: there is none that could be used."""
        try:
            record = read_record(self._places.commits / job)
        except RemoteProtocolError as error:
            log.error("job=%s commit on disk is unusable: %s", job, error)
            return -1
        return -1 if record is None else record.step

    def sweep_commits(self, jobs: Collection[str]) -> None:
        """At the start: commits of other jobs, and what a crash left beside those of these."""
        for path in self._places.commits.iterdir():
            if path.name not in jobs:
                shutil.rmtree(path, ignore_errors=True)
            elif path.is_dir():
                remove_unnamed(path)

    def _remove_job(self, job: JobName) -> None:
        shutil.rmtree(self._places.commits / job, ignore_errors=True)
        for kind in ("log", "history"):
            (self._places.logs / f"job-{job}.{kind}").unlink(missing_ok=True)
