"""Client requests for jobs: train, show, pause, resume, cancel, wait, export, rm, move."""

from __future__ import annotations

from collections.abc import Sequence

from ...base import errors
from ..memory import device_placement
from ..memory.commits import Commits
from ..state.core import Core, handles
from ..state.events import JobRequest, Journal, LoadCommits, Token, TrainRequest
from ..state.records import Job
from ..state.states import TASK_FINAL, TaskEvent, TaskState
from .jobs import Jobs, entry_of


class JobRequests:
    """Client requests for jobs; each is answered at once, or when its condition is met."""

    def __init__(self, core: Core, jobs: Jobs) -> None:
        self._core, self._jobs = core, jobs
        self._after_others: list[TrainRequest] = []  # they wait for the disk write of an older job

    def pump(self) -> int:
        """Accept jobs that waited for an older job's disk write; answer requests that are due."""
        waiting, self._after_others = self._after_others, []
        for event in waiting:
            try:
                self.train(event)
            except errors.PipeSwitchError as error:
                self._core.refuse(event.token, error)
        if next(iter(self._jobs), None) is None:
            return 0
        for job in self._jobs:
            self._jobs.home(job).commits.save_last(job)
            if job.exporters and not Commits.is_unsaved(job):
                self._core.answer_all(job.exporters, job=self._jobs.row(job))
            if job.movers:
                self._answer_movers(job)
        self._jobs.tidy()
        return 0  # a change of jobs' turns needs no call of this part

    def refuse_all(self, error: errors.PipeSwitchError) -> None:
        """Refuse every waiting client: the server stops."""
        for job in self._jobs:
            waiting = job.waiters, job.answer_on_change, job.exporters, job.movers
            self._core.refuse_all(error, *waiting)
        for event in self._after_others:
            self._core.refuse(event.token, error)
        self._after_others.clear()

    def cancel(self, token: Token) -> None:
        """Cancel a client's wait for the end of a job."""
        for job in [one for one in self._jobs if token in one.waiters]:
            job.waiters.remove(token)
            self._core.refuse(token, errors.Cancelled("cancelled by the caller"))

    @handles(TrainRequest)
    def train(self, event: TrainRequest) -> None:
        """Accept a job, and answer when it is in the journal."""
        core = self._core
        if core.is_draining:
            raise errors.draining()
        spec = event.spec
        self._check_devices(spec.devices)
        old = self._jobs.get(spec.name)
        if old is not None and old.state.state not in TASK_FINAL:
            raise errors.AlreadyExists(
                f'a job "{spec.name}" is {old.state.state.value}',
                hint=f"choose another --name, or pipeswitch jobs cancel {spec.name}",
            )
        if old is not None and old.memory.is_persisting:  # the write goes to the new job's folder
            self._after_others.append(event)
            return
        if old is not None:
            self._jobs.remove(old)
        # The process of an old job of that name may still be exiting. Until it has exited, the new
        # job waits in the queue (``Ranking.runnable``).
        job = self._jobs.adopt(spec)
        if event.loaded:
            try:
                self._jobs.home(job).commits.take_over(job, event.loaded)
                job.progress.why = event.loaded.why
            except errors.HostStoreFull:
                self._jobs.remove(job)
                raise
        progress = job.progress
        progress.restarts, progress.steps_recomputed = event.restarts, event.steps_recomputed
        progress.step = event.last_step
        core.emit(Journal(entry={"kind": "job", **entry_of(spec)}, accepts=(event.token,)))
        self._jobs.publish(job, "job.submitted", entry=job.spec.entry)
        if event.is_paused:
            job.state.apply(TaskEvent.PAUSE, "as where it came from")
            self._jobs.changed(job)
        core.answer(event.token, job=self._jobs.row(job))

    def _check_devices(self, devices: Sequence[str]) -> None:
        kinds = device_placement.kinds_of(device_placement.limit(devices, self._jobs.names))
        if len(kinds) > 1:
            raise errors.InvalidInput(
                f"a job trains on devices of one kind, not on {' and '.join(kinds)}: its state "
                "would differ in the last bits",
                hint=" or ".join(f"--devices {kind}" for kind in kinds),
            )
        if refusal := device_placement.refusal(devices, self._jobs.names):
            raise refusal

    @handles(JobRequest)
    def on_request(self, event: JobRequest) -> None:
        """Handle show, pause, resume, cancel, wait, export, rm or move."""
        core, job = self._core, self._jobs.get(event.job)
        if job is None:
            raise errors.ModelNotFound(f'no job "{event.job}"', hint="pipeswitch jobs ls")
        if event.action == "show":
            core.answer(event.token, job=self._jobs.row(job))
        elif event.action == "wait":
            job.waiters.append(event.token)
            self._jobs.answer_final(job)
        elif event.action == "resume":
            self._resume_asked(job, event)
        elif event.action == "export":
            self._export_asked(job, event.token)
        elif event.action == "move":
            self._move_asked(job, event)
        elif event.action == "rm":
            self._remove_asked(job, event.token)
        else:
            self._hold_asked(job, event.token, event.action)

    def _resume_asked(self, job: Job, event: JobRequest) -> None:
        if job.state.state is TaskState.FAILED:
            if self._core.is_draining:
                raise errors.draining()
            if not job.spec.entry:  # a lost job: it is listed without its script
                raise errors.InvalidInput(
                    f'the script of job "{event.job}" is unknown: its journal entry was damaged',
                    hint=f"pipeswitch jobs rm {event.job}, then pipeswitch train SCRIPT",
                )
            if event.loaded is not None and not job.memory.commit_slot_bytes:
                # A commit sets the step back: the next dispatch counts the lost steps.
                failed_at = job.progress.step
                self._jobs.home(job).commits.take_over(job, event.loaded, is_on_disk=True)
                job.progress.step = max(failed_at, job.progress.step)
            elif job.memory.persisted_step >= 0 and not job.memory.commit_slot_bytes:
                self._core.emit(LoadCommits(request=event))  # the commit area was released
                return
            self._core.emit(Journal(entry={"kind": "job", **entry_of(job.spec)}))
            job.progress.error, job.timing.ended_at_ms = "", 0.0
            job.progress.deaths_without_progress = 0
        _check_live(job, but=TaskState.FAILED)
        if job.state.allows(TaskEvent.RESUME):
            job.state.apply(TaskEvent.RESUME, "requested by the user")
            job.progress.stops_missed = 0
            job.progress.why = event.loaded.why if event.loaded else ""
            self._jobs.count_anew(self._jobs.home(job))
            self._core.emit(Journal(entry={"kind": "hold-over", "name": job.spec.name}))
            self._jobs.publish(job, "job.resumed")
        if job.wanted == "pause":
            job.wanted, job.swap.leaves_at_ms = "run", 0.0
        self._core.answer(event.token, job=self._jobs.row(job))

    def _export_asked(self, job: Job, token: Token) -> None:
        """Write the job's newest commit to disk, where clients read it."""
        if job.memory.committed_step < 0:
            why = "committed nothing" if job.state.state in TASK_FINAL else "has not committed yet"
            raise errors.InvalidInput(
                f'job "{job.spec.name}" {why}: it has no state',
                hint=f"pipeswitch jobs show {job.spec.name}",
            )
        job.exporters.append(token)
        job.memory.persist_due_at_ms = self._core.now_ms  # answered by ``pump``

    def _move_asked(self, job: Job, event: JobRequest) -> None:
        """Bind the job to a device; ``JobMigrations`` evicts it if it runs, and places it there."""
        states = [home.state for home in self._jobs.homes if not home.state.daemon.is_given_up]
        names = [state.settings.device for state in states]
        _check_live(job)
        if event.to not in names:
            raise errors.InvalidInput(
                f'no device "{event.to}" here', hint=f"one of {', '.join(names)}"
            )
        if job.spec.devices and event.to not in job.spec.devices:
            raise errors.InvalidInput(
                f'job "{job.spec.name}" is limited to {", ".join(job.spec.devices)}',
                hint="give the allowed devices with train --devices, all of one kind",
            )
        job.sent_to, job.swap.leaves_at_ms = event.to, 0.0
        job.movers.append(event.token)

    def _answer_movers(self, job: Job) -> None:
        """Answer the clients that moved a job, if it has arrived, ended or cannot move."""
        name, state = job.spec.name, self._jobs.home(job).state
        there = next(h.state for h in self._jobs.homes if h.state.settings.device == job.sent_to)
        if there is not state and there.daemon.is_given_up and job.state.state not in TASK_FINAL:
            error = errors.ServerUnavailable(
                f'device {job.sent_to} is lost: job "{name}" stays on {state.settings.device}',
                hint="its memory daemon died too often: restart the server",
            )
            self._core.refuse_all(error, job.movers)
            job.sent_to = ""
        elif there is state or job.state.state in TASK_FINAL:
            self._core.answer_all(job.movers, job=self._jobs.row(job))

    def _remove_asked(self, job: Job, token: Token) -> None:
        if job.state.state not in TASK_FINAL or job.memory.is_persisting:
            is_over = job.state.state in TASK_FINAL
            what = "is being written to disk" if is_over else f"is {job.state.state.value}"
            hint = "try again in a moment" if is_over else f"pipeswitch jobs cancel {job.spec.name}"
            raise errors.InvalidInput(f'job "{job.spec.name}" {what}', hint=hint)
        row = self._jobs.row(job)
        self._jobs.remove(job)
        self._core.emit(Journal(entry={"kind": "job-over", "name": job.spec.name}))
        self._core.answer(token, job=row)

    def _hold_asked(self, job: Job, token: Token, action: str) -> None:
        """Pause or cancel a job; answer when it no longer has a worker."""
        event = TaskEvent.PAUSE if action == "pause" else TaskEvent.CANCEL
        _check_live(job)
        job.answer_on_change.append(token)
        if job.state.allows(event):
            job.state.apply(event, "requested by the user")
            self._jobs.changed(job)
        elif job.state.state is TaskState.PAUSED:
            self._jobs.changed(job)
        elif job.wanted != "cancel":  # a pause does not take a cancellation back
            job.wanted = "pause" if action == "pause" else "cancel"  # TrainingJobs evicts it


def _check_live(job: Job, but: TaskState | None = None) -> None:
    """Raise InvalidInput if the job has ended, unless its state is ``but``."""
    if job.state.state in TASK_FINAL and job.state.state is not but:
        raise errors.InvalidInput(
            f'job "{job.spec.name}" has ended: it is {job.state.state.value}',
            hint="pipeswitch jobs ls",
        )
