"""Execution of the scheduler's commands; those for devices and helpers go to other classes.

``Effects`` runs in the scheduler's thread. It decides nothing, and sends results back as events.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from ..base import failpoints
from ..base.errors import Cancelled, PipeSwitchError, RemoteProtocolError, ServerUnavailable
from ..base.failpoints import reach
from ..base.plain_files import open_plain
from ..base.worker_thread import WorkerThread
from ..commits.commit_files import load_commit, read_record, remove_unnamed
from ..commits.progress import HANDED_ON, SUFFIX
from ..ipc.control_page import sealed_memfd
from ..ipc.messages.base import JobName, ModelName
from ..scheduler.state import events as ev
from ..scheduler.timeline import Timeline
from ..wire.frames import pack_dict
from .builds import Builds
from .device_effects import DeviceEffects, HelperEffects, ServerContext
from .folders import save_planned
from .journal import JournalFile

log = logging.getLogger(__name__)

_SERVER = ev.Token(-(1 << 62))  # for the server's own requests; ``restore`` uses -1, -2, …


class Effects:
    """Executor of the scheduler's commands; one method for each command."""

    def __init__(
        self,
        context: ServerContext,
        devices: Sequence[DeviceEffects],
        helpers: Mapping[str, HelperEffects],
        *,
        journal: JournalFile,
        profiles_dir: Path,
    ) -> None:
        self._devices, self._helpers, self._children = devices, helpers, context.children
        self._places, self._memory = context.places, context.memory
        self._frontend = context.frontend
        # Profiles that were measured here take precedence over shipped ones.
        self.builds = Builds(context, helpers, (self._places.profiles, profiles_dir))
        self._journal = journal
        self._take = context.take  # adds an event, which is handled after the current one
        self._refused: dict[ev.Token, PipeSwitchError] = {}  # errors that replace later replies
        self._disk = self._frontend.disk
        for name, known in journal.models.items():
            self._disk.keep_program(name, known["digest"], known["tenant"])
        self.timeline = Timeline()
        self.left: ev.Shutdown | None = None
        # Configured models whose first registration has no reply yet, and those that were refused.
        self.first_attempts: dict[ev.Token, ModelName] = {}
        self.refused_models = context.refused_models
        self.restored: dict[ev.Token, ModelName] = {}  # restored models without a reply yet

    def perform(self, command: ev.Command) -> None:
        match command:
            case ev.Send() | ev.Spawn() if command.target.kind in self._helpers:
                self._helpers[command.target.kind].perform(command)
            case ev.Send() | ev.Spawn() | ev.RaiseTurn() | ev.Interrupt() | ev.TakeBack():
                self._devices[command.target.device].perform(command)
            case ev.Kill(target, reason):
                if reason:
                    log.warning("%s=%d killed: %s", target.kind, target.slot, reason)
                self._children.kill(target)
            case ev.TakeResult(target=target):
                self._helpers[target.kind].perform(command)
            case ev.Reply():
                self._answer(command)
            case ev.Publish() | ev.ModelAvailable() | ev.ModelRemoved() | ev.LoadCommits():
                self._frontend.perform(command)
            case ev.Spans():
                self.timeline.add(command)
            case ev.StartBuild():
                self.builds.start(command)
            case ev.SweepPrograms():
                self.builds.sweep(command)
            case ev.DropPublished(directory=directory):
                self._frontend.uploads.remove([Path(directory)])
            case ev.CreateCommits():
                self._create_commits(command)
            case ev.DropCommits(job=job):
                reach("commits.drop")
                self._memory.drop_commits(job)
            case ev.CreateImage():
                self._create_image(command)
            case ev.DropImage(job=job):
                self._memory.drop_image(job)
            case ev.CountSharers(group=group, jobs=jobs):
                for one in self._memory.groups:
                    one.count(group, jobs)
            case ev.RemoveJob(job=job):
                self._remove_job(job)
            case ev.Journal():
                self._write_journal(command)
            case ev.SavePlanned():
                self._save_planned(command)
            case ev.LogWarning(text=text):
                log.warning("%s", text)
            case ev.Shutdown():
                self.left = command

    # -- answers and the journal ---------------------------------------------------------------

    def _answer(self, command: ev.Reply) -> None:
        if failpoints.is_on:
            reach("controller.answer")
        if not command.more:
            refusal = self._refused.pop(command.token, None)
            if refusal is not None:
                command = ev.Reply(token=command.token, error=refusal)
        if command.token >= 0:  # negative tokens: the server's own requests
            self._frontend.perform(command)
            return
        if command.more:
            return
        restored = self.restored.pop(command.token, None)
        name = self.first_attempts.pop(command.token, None)
        if restored is not None and command.error is not None:
            if not isinstance(command.error, Cancelled | ServerUnavailable):  # a client, or the end
                self.lose(f"model {restored} failed: {command.error}")
        elif command.error is not None and name is not None:
            text = f"model {name} of the configuration was refused: {command.error}"
            log.error("%s", text)
            sys.stderr.write(f"Warning: {text}\n")
            what = "[[model]] in the configuration"
            self.refused_models.append((name, str(command.error), what))
        elif command.error is not None:
            log.error("a request of the server itself was refused: %s", command.error)

    def lose(self, text: str) -> None:
        """Report damage that is found after the journal was read."""
        self._journal.losses.append(text)
        log.error("%s", text)
        sys.stderr.write(f"Warning: {text}\n")

    def _write_journal(self, command: ev.Journal) -> None:
        """Write an entry; if the disk refuses it, refuse the requests and remove the model or job.

        If no client waits for the entry (a removal, a pin, a restored model), the change stands.
        The journal then lacks the change until it can write another entry.
        """
        entry = command.entry
        if entry["kind"] == "model":
            self._disk.keep_program(entry["name"], entry["digest"], entry["tenant"])
        elif entry["kind"] == "model-gone":
            self._disk.drop_program(entry["name"])
        try:
            if entry["kind"] == "job" and command.accepts:  # a new job starts with an empty log
                log_path = self._places.logs / f"job-{entry['name']}.log"
                os.close(open_plain(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
                progress = log_path.with_suffix(SUFFIX)
                progress.unlink(missing_ok=True)
                log_path.with_suffix(".files").unlink(missing_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self._places.root / "jobs" / entry["name"] / HANDED_ON, progress)
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
                hint="free space on the disk of its state directory, or repair it, then try again",
            )
            self._refused.update(dict.fromkeys(command.accepts, error))
            if entry["kind"] == "job":
                self._take(
                    ev.JobRequest(token=_SERVER, job=JobName(entry["name"]), action="cancel")
                )
            else:
                self._take(ev.UnregisterRequest(token=_SERVER, model=ModelName(entry["name"])))

    # -- planned groups ------------------------------------------------------------------------

    def _save_planned(self, command: ev.SavePlanned) -> None:
        try:
            save_planned(self._places.profiles, command.file_name, command.document)
        except OSError as error:  # this server uses them; the next server has byte buckets
            log.warning("profile %s not written: %s", command.file_name, error)

    # -- commits -------------------------------------------------------------------------------

    def _create_commits(self, command: ev.CreateCommits) -> None:
        reach("commits.create")
        try:
            if command.loaded < 0:
                self._memory.create_commits(command.job, command.slot_bytes)
                return
            self._memory.commits[command.job] = os.dup(command.loaded)
            if command.is_on_disk:
                return
            target = self._places.commits / command.job
            shutil.rmtree(target, ignore_errors=True)  # left by an interrupted start
            shutil.copytree(
                self._places.root / "jobs" / command.job / "commit", target, copy_function=os.link
            )
        except OSError as error:  # no descriptor, memory or disk; a job needs commits to train
            log.error("job=%s cancelled: its commits cannot be kept: %s", command.job, error)
            self._take(ev.JobRequest(token=_SERVER, job=command.job, action="cancel"))

    def _create_image(self, command: ev.CreateImage) -> None:
        try:
            reach("image.create")
            image = sealed_memfd("pipeswitch-image", command.size_bytes)
        except OSError as error:  # the copy is refused, and the job is evicted
            log.error("job=%s has no image: %s", command.job, error)
        else:
            self._memory.drop_image(command.job)
            self._memory.images[command.job] = image

    def restore_commits(
        self, job: JobName, damaged: Callable[[str], None]
    ) -> tuple[int, int] | None:
        """Load a job's persisted commit; return (slot bytes, step), or None if there is none.

        ``damaged`` is called with a description of each newer commit that is skipped.
        """
        loaded = load_commit(self._places.commits / job, damaged)
        if loaded is None:
            return None
        descriptor, slot_bytes, record = loaded
        self._memory.commits[job] = descriptor
        return slot_bytes, record.step

    def step_on_disk(self, job: JobName) -> int:
        """Return the step of a job's persisted commit; -1 if there is no usable commit."""
        try:
            record = read_record(self._places.commits / job)
        except RemoteProtocolError as error:
            log.error("job=%s commit on disk is unusable: %s", job, error)
            return -1
        return -1 if record is None else record.step

    def sweep(self, jobs: Collection[str], now_s: float) -> None:
        """Move files that the journal does not name to the trash; called when the server starts.
        Remove a crash's leftovers among commits, and files that were in the trash for a day."""
        old = self._places.old_trash(now_s)
        self._places.set_aside(self._disk.digests(), jobs, f"trash/{now_s:.0f}")
        for path in self._places.commits.iterdir():
            if path.name.startswith(".gone-"):
                old.append(path)
            elif path.is_dir():
                remove_unnamed(path)
        self._frontend.uploads.remove(old)

    def _remove_job(self, job: JobName) -> None:
        """Rename a job's commits to a name that no job has; another thread removes them."""
        gone = self._places.commits / f".gone-{time.monotonic_ns()}"
        with contextlib.suppress(OSError):  # the job has no commits on disk
            os.rename(self._places.commits / job, gone)
            self._frontend.uploads.remove([gone])
        for kind in ("log", "history", "progress", "files"):
            with contextlib.suppress(OSError):  # it is missing, or a script put a folder there
                (self._places.logs / f"job-{job}.{kind}").unlink()


class Tracer:
    """Thread that answers ``trace``: decoding 30,000 spans would block the loop for 0.2 s."""

    def __init__(self, timeline: Timeline, answer: Callable[[ev.Reply], None]) -> None:
        """``answer`` may be called from any thread."""
        self._timeline = timeline
        self._answer = answer
        self._thread = WorkerThread("pipeswitch-trace")

    def ask(self, token: ev.Token, since_ms: float) -> None:
        """Queue a query; never blocks. ``since_ms``: as in ``Timeline.chrome_trace``."""
        self._thread.put(
            functools.partial(self._tell, token, since_ms),
            lambda error: self._answer(ev.Reply(token=token, error=error)),
        )

    def stop(self) -> None:
        """Answer the queued queries, then join the thread."""
        self._thread.shutdown()

    def _tell(self, token: ev.Token, since_ms: float) -> None:
        trace = pack_dict(self._timeline.chrome_trace(since_ms))
        self._answer(ev.Reply(token=token, body={"trace": msgspec.Raw(trace)}))
