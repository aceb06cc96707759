"""Training jobs: round robin over idle time, stop, suspend, evict, commit, resume (DESIGN 5)."""

from __future__ import annotations

from typing import Any, Final

from ..errors import (
    AlreadyExists,
    HostStoreFull,
    InvalidInput,
    ModelNotFound,
    OutOfDeviceMemory,
    PipeSwitchError,
    ServerUnavailable,
    TaskFailed,
    WorkerLost,
    to_wire,
)
from ..ipc.messages import (
    CloseCommits,
    CommitCopy,
    CommitPersisted,
    CommitStep,
    Epoch,
    EvictTask,
    GrantTurn,
    JobEnded,
    JobName,
    JobReport,
    LeaseGranted,
    LeaseRefused,
    LeaseRequest,
    OpenCommits,
    Parked,
    PersistCommit,
    RunJob,
    Slot,
    StepCommitted,
    StopTask,
    Turn,
)
from .arena import Memory
from .core import Core
from .events import (
    CreateCommits,
    DropCommits,
    JobAsked,
    Journal,
    Token,
    ToWorker,
    TrainAsked,
)
from .records import NO_EPOCH, NO_TURN, Job, Worker
from .states import TASK_FINAL, TASK_ON_WORKER, TaskEvent, TaskState, WorkerEvent, WorkerState

RATE_WEIGHT: Final = 0.2  # of the newest report in a job's steps per second
COMMITS_HEADER_BYTES = 4096  # before the two slots of a commit area
NO_COPY: Final = (NO_EPOCH, 0)


class Jobs:
    """All training jobs. ``order`` is the round robin: the first runnable job goes next."""

    def __init__(self, core: Core, memory: Memory) -> None:
        self._core = core
        self._memory = memory
        self.order: list[JobName] = []
        self._cycle_left_ms: dict[JobName, float] = {}

    # -- clients ------------------------------------------------------------------------------

    def train(self, event: TrainAsked) -> None:
        """Accept a job; it is answered as soon as it is on the books."""
        core = self._core
        if core.is_draining:
            core.refuse(event.token, ServerUnavailable("the server is draining"))
            return
        old = core.jobs.get(event.job)
        if old is not None and old.state.state not in TASK_FINAL:
            error = AlreadyExists(
                f'a job "{event.job}" is {old.state.state.value}',
                hint=f"choose another --name, or pipeswitch jobs cancel {event.job}",
            )
            core.refuse(event.token, error)
            return
        # The process of an old job of that name may still be leaving: this one waits for it
        # in the queue (see _runnable).
        job = self.adopt(event.job, event.entry, event.args, event.priority)
        core.emit(Journal(entry={"kind": "job", "name": job.name, "entry": job.entry,
                                 "args": list(job.args), "priority": job.priority},
                          accepts=(event.token,)))  # fmt: skip
        core.publish("job.submitted", job=job.name, entry=job.entry)
        core.answer(event.token, job=self.row(job))

    def adopt(self, name: JobName, entry: str, args: tuple[str, ...], priority: int) -> Job:
        """Put a job on the books (a new one, or one the journal remembers)."""
        core = self._core
        job = Job(name, entry, args, priority)
        job.born_epoch = Epoch(core.last_epoch)
        core.jobs[name] = job
        if name in self.order:
            self.order.remove(name)
        self.order.append(name)
        self._cycle_left_ms[name] = core.settings.training_cycle_ms
        return job

    def restore(
        self, name: JobName, entry: str, args: tuple[str, ...], priority: int,
        slot_bytes: int, step: int, *, is_paused: bool = False,
    ) -> None:  # fmt: skip
        """A job the journal remembers, with its commit area loaded from disk (0: none)."""
        job = self.adopt(name, entry, args, priority)
        if slot_bytes and self._memory.store.reserve(
            job.commits, COMMITS_HEADER_BYTES + 2 * slot_bytes
        ):
            job.commit_slot_bytes = slot_bytes
            job.step = job.committed_step = job.persisted_step = step
        if is_paused:
            job.state.apply(TaskEvent.PAUSE, "as before the restart")

    def asked(self, event: JobAsked) -> None:
        """show, pause, resume, cancel, wait."""
        core = self._core
        job = core.jobs.get(event.job)
        if job is None:
            core.refuse(
                event.token, ModelNotFound(f'no job "{event.job}"', hint="pipeswitch jobs ls")
            )
            return
        if event.action == "show":
            core.answer(event.token, job=self.row(job))
        elif event.action == "wait":
            job.waiters.append(event.token)
            self._answer_final(job)
        elif event.action == "resume":
            self._resume_asked(job, event.token)
        else:
            self._hold_asked(job, event.token, event.action)

    def _resume_asked(self, job: Job, token: Token) -> None:
        if job.state.state in TASK_FINAL:
            self._core.refuse(token, _is_over(job))
            return
        if job.state.allows(TaskEvent.RESUME):
            job.state.apply(TaskEvent.RESUME, "asked by the user")
            self._core.emit(Journal(entry={"kind": "hold-over", "name": job.name}))
            self._core.publish("job.resumed", job=job.name)
        if job.wanted == "pause":
            job.wanted = "run"
        self._core.answer(token, job=self.row(job))

    def _hold_asked(self, job: Job, token: Token, action: str) -> None:
        """Pause or cancel: answered when the job holds no worker any more."""
        event = TaskEvent.PAUSE if action == "pause" else TaskEvent.CANCEL
        if job.state.state in TASK_FINAL:
            self._core.refuse(token, _is_over(job))
            return
        job.answer_on_change.append(token)
        if job.state.allows(event):
            job.state.apply(event, "asked by the user")
            self._changed(job)
        elif job.state.state is TaskState.PAUSED:
            self._changed(job)
        else:
            job.wanted = "pause" if action == "pause" else "cancel"
            self.evict(job.name, f"{action} asked by the user")

    def row(self, job: Job) -> dict[str, Any]:
        """One line of ``jobs``."""
        return {
            "name": job.name,
            "state": job.state.state.value,
            "entry": job.entry,
            "args": list(job.args),
            "step": job.step,
            "epoch": job.epoch_index,
            "committed_step": job.committed_step,
            "persisted_step": job.persisted_step,
            "steps_per_s": round(job.steps_per_s, 3),
            "suspensions": job.suspensions,
            "evictions": job.evictions,
            "restarts": job.restarts,
            "steps_recomputed": job.steps_recomputed,
            "lease_bytes": job.lease_bytes,
            "worker": job.slot,
            "error": job.error,
            "why": job.why,
            "log": job.last_log,
        }

    # -- the device's idle time ---------------------------------------------------------------

    def pump(self) -> None:
        """Give the idle device to the next job, and keep the rules about suspended ones."""
        core = self._core
        self._grant_leases()
        if core.training is not None:
            self._watch_running(core.jobs[core.training])
        elif core.is_daemon_ready and not core.is_draining and self._is_device_idle():
            self._run_next()
        self._keep_one_suspended()
        self._kill_who_stays()
        self._persist_due()

    def _is_device_idle(self) -> bool:
        core = self._core
        return core.current is None and core.upcoming is None and not core.queue

    def _runnable(self) -> list[Job]:
        """Jobs that could have the device, in the order they would get it."""
        jobs = [self._core.jobs[name] for name in self.order]
        able = [
            job
            for job in jobs
            if (job.state.state is TaskState.SUSPENDED and not job.lease_asked_bytes)
            or (job.state.state is TaskState.QUEUED and not self._is_leaving(job))
        ]
        return sorted(able, key=lambda job: job.priority)  # stable: rotation inside a priority

    def _is_leaving(self, job: Job) -> bool:
        """Whether something of its last dispatch is not over yet.

        A commit that is still being copied is the one to resume from: a script that began before
        the flip would start from the one before it, and could commit an older step over it.
        """
        return self._has_process(job) or bool(job.copying_epoch)

    def _has_process(self, job: Job) -> bool:
        """Whether a process of this job lives, be it one that is about to leave.

        A job never has two: the old one's slice is released by name when it is reaped, and it
        may still hold the job's log and commits.
        """
        return any(worker.job == job.name for worker in self._core.workers.values())

    def _waiting_behind(self, running: Job) -> bool:
        """Whether another job wants the device, or memory the running one may have."""
        waiting = self._runnable() + [
            job for job in self._core.jobs.values() if job.lease_asked_bytes
        ]
        return any(job is not running and job.priority <= running.priority for job in waiting)

    def _run_next(self) -> None:
        for job in self._runnable():
            if job.state.state is TaskState.SUSPENDED:
                self._resume(job)
                return
            worker = self._pick_worker()
            if worker is not None:
                self._dispatch(job, worker)
                return

    def _pick_worker(self) -> Worker | None:
        """A standby; the least warm one, so that warm ones stay for inference."""
        free = [
            worker
            for worker in self._core.workers.values()
            if worker.is_free
            and worker.state.state is WorkerState.STANDBY
            and worker.preparing is None
        ]
        return min(free, key=lambda worker: (len(worker.warm), -worker.slot), default=None)

    def _dispatch(self, job: Job, worker: Worker) -> None:
        core = self._core
        job.epoch = core.next_epoch()
        job.turn = Turn(core.next_epoch())
        job.commit_number = 0
        job.slot = worker.slot
        job.state.apply(TaskEvent.DISPATCHED, f"worker {worker.slot}")
        worker.state.apply(WorkerEvent.ACTIVATED, f"job {job.name}")
        worker.job = job.name
        worker.task_epoch = job.epoch
        self._holds_device(job)
        core.emit(
            ToWorker(
                slot=worker.slot,
                message=RunJob(
                    epoch=job.epoch,
                    turn=job.turn,
                    job=job.name,
                    entry=job.entry,
                    args=job.args,
                    log_path="",
                    slot_bytes=job.commit_slot_bytes,
                    commit_every_ms=core.settings.commit_every_ms,
                ),
                commits_of=job.name if job.commit_slot_bytes else None,
            )
        )
        core.publish("job.dispatched", job=job.name, worker=worker.slot, step=job.committed_step)

    def _resume(self, job: Job) -> None:
        core = self._core
        assert job.slot is not None
        job.turn = Turn(core.next_epoch())
        job.state.apply(TaskEvent.TURN_GIVEN, "device is idle")
        core.workers[job.slot].state.apply(WorkerEvent.TURN_GIVEN, f"job {job.name}")
        self._holds_device(job)
        core.emit(
            ToWorker(
                slot=job.slot, message=GrantTurn(epoch=job.epoch, turn=job.turn), channel="signal"
            )
        )
        core.publish("job.resumed_in_place", job=job.name, worker=job.slot)

    def _holds_device(self, job: Job) -> None:
        self._core.training = job.name
        job.cycle_began_at_ms = self._core.now_ms
        job.last_ran_at_ms = self._core.now_ms
        self._core.look_again(job.cycle_began_at_ms + self._cycle_left_ms[job.name])

    def _watch_running(self, job: Job) -> None:
        """End its cycle when another job waits; kill it when it does not stop or unwind."""
        core, settings = self._core, self._core.settings
        state = job.state.state
        if state in (TaskState.RUNNING, TaskState.TRANSMITTING):
            is_wanted = self._waiting_behind(job)
            ends_at_ms = job.cycle_began_at_ms + self._cycle_left_ms[job.name]
            if is_wanted and core.now_ms >= ends_at_ms:
                self.stop(job.name, Turn(0), Slot(0))
            elif is_wanted:
                core.look_again(ends_at_ms)
            elif core.now_ms >= ends_at_ms:
                self._new_cycle(job)
        elif state is TaskState.STOPPING:
            self._kill_after(job, job.stop_asked_at_ms + settings.stop_grace_ms, "did not stop")

    def _new_cycle(self, job: Job) -> None:
        job.cycle_began_at_ms = self._core.now_ms
        self._cycle_left_ms[job.name] = self._core.settings.training_cycle_ms

    def _kill_after(self, job: Job, at_ms: float, reason: str) -> None:
        core = self._core
        if core.now_ms < at_ms or job.slot is None:
            core.look_again(at_ms)
            return
        core.kill(core.workers[job.slot], reason)

    def _keep_one_suspended(self) -> None:
        """At most one job stays suspended in place: the one that goes next (DESIGN 3)."""
        jobs = [self._core.jobs[name] for name in self.order]
        suspended = [job for job in jobs if job.state.state is TaskState.SUSPENDED]
        suspended.sort(key=lambda job: (job.lease_asked_bytes > 0, job.priority))
        for job in suspended[1:]:
            self.evict(job.name, "another job is suspended already")

    def _kill_who_stays(self) -> None:
        """A script that swallows the eviction, or a process that does not leave after it."""
        core, grace_ms = self._core, self._core.settings.evict_grace_ms
        for job in core.jobs.values():
            if job.state.state is TaskState.EVICTING:
                self._kill_after(job, job.evict_asked_at_ms + grace_ms, "did not unwind")
        for worker in core.workers.values():
            if worker.state.state is WorkerState.RETIRING:
                if core.now_ms >= worker.retired_at_ms + grace_ms:
                    core.kill(worker, "its script is over, its process did not leave")
                else:
                    core.look_again(worker.retired_at_ms + grace_ms)

    # -- stop, park, evict --------------------------------------------------------------------

    def stop(self, name: JobName, next_turn: Turn, next_slot: Slot) -> None:
        """Ask the job that holds the device to step aside and to hand the turn on by itself.

        Once for each of its turns: whoever comes later is served when it has parked. One that is
        being evicted is asked too; it answers before it commits and unwinds.
        """
        core, job = self._core, self._core.jobs[name]
        if job.slot is None or job.stopped_turn == job.turn:
            return
        job.state.apply(TaskEvent.STOP_REQUESTED, f"turn {next_turn}")
        job.stopped_turn = job.turn
        job.stop_asked_at_ms = core.now_ms
        core.workers[job.slot].may_raise = next_turn
        core.look_again(core.now_ms + core.settings.stop_grace_ms)
        core.emit(
            ToWorker(
                slot=job.slot,
                message=StopTask(
                    epoch=job.epoch, turn=job.turn, next_turn=next_turn, next_slot=next_slot
                ),
                channel="signal",
            )
        )

    def parked(self, worker: Worker, message: Parked) -> bool:
        """It computes no more; the caller passes the turn on. False for a late message.

        It may be late behind its own JobEnded: the two come over different channels.
        """
        core = self._core
        if worker.task_epoch == message.epoch and worker.may_raise == message.next_turn:
            worker.may_raise = NO_TURN
        job = self._job_of(worker, message.epoch)
        if job is None or message.turn != job.turn or not job.state.allows(TaskEvent.PARKED):
            return False
        if job.state.apply(TaskEvent.PARKED, message.where) is TaskState.SUSPENDED:
            worker.state.apply(WorkerEvent.PARKED, f"job {job.name}")
            job.suspensions += 1
            core.counts["preemptions"] += 1
        core.span(
            f"worker {worker.slot}",
            f"stop {job.name} ({message.where})",
            message.asked_at_ms,
            message.parked_at_ms,
            flow=message.next_turn,
        )
        core.publish(
            "job.suspended",
            job=job.name,
            where=message.where,
            stop_ms=message.parked_at_ms - message.asked_at_ms,
        )
        self._device_left(job)
        return True

    def _device_left(self, job: Job) -> None:
        """Account the cycle; rotate when it is used up."""
        core = self._core
        if core.training != job.name:
            return
        core.training = None
        core.span("scheduler", f"train {job.name}", job.cycle_began_at_ms, core.now_ms)
        left = self._cycle_left_ms[job.name] - (core.now_ms - job.cycle_began_at_ms)
        self._cycle_left_ms[job.name] = left
        if left <= 0:
            self._cycle_left_ms[job.name] = core.settings.training_cycle_ms
            self.order.remove(job.name)
            self.order.append(job.name)

    def evict(self, name: JobName, cause: str) -> None:
        """Ask a job on a worker to commit its last step and unwind."""
        core, job = self._core, self._core.jobs[name]
        if not job.state.allows(TaskEvent.EVICT_REQUESTED) or job.slot is None:
            return
        job.state.apply(TaskEvent.EVICT_REQUESTED, cause)
        job.evictions += 1
        job.evict_asked_at_ms = core.now_ms
        job.lease_asked_bytes = 0  # it unwinds out of the wait
        job.why = cause
        core.counts["job_evictions"] += 1
        core.look_again(core.now_ms + core.settings.evict_grace_ms)
        core.emit(ToWorker(slot=job.slot, message=EvictTask(epoch=job.epoch), channel="signal"))
        core.publish("job.evicting", job=name, cause=cause)

    def _job_of(self, worker: Worker, epoch: int) -> Job | None:
        """The job a message speaks of; None when it speaks of an older dispatch."""
        job = self._core.jobs.get(worker.job) if worker.job is not None else None
        return job if job is not None and job.epoch == epoch and job.slot == worker.slot else None

    # -- leases and commits -------------------------------------------------------------------

    def lease_requested(self, worker: Worker, message: LeaseRequest) -> None:
        """A job's first ``job.steps`` wants its slice; it waits outside the device's turn."""
        job = self._job_of(worker, message.epoch)
        if job is None or job.state.state is TaskState.EVICTING:
            return  # EvictTask is on its way to it
        old = self._memory.arena.get(job.slice)
        if old is not None and old.size_bytes < message.slice_bytes:
            # The next phase of the script needs more. It asks only when it has moved out.
            self._memory.release_slice(job.name)
        try:
            self._open_commits(job, message.state_bytes)
        except PipeSwitchError as error:
            self._refuse_lease(job, error)
            return
        job.lease_asked_bytes = max(1, message.slice_bytes)
        self._grant_leases()

    def _open_commits(self, job: Job, state_bytes: int) -> None:
        """A commit area that holds two images; kept over restarts of worker and daemon.

        Raises:
            HostStoreFull: no room for two images.
        """
        core = self._core
        if job.commit_slot_bytes >= state_bytes:
            return
        store, owner = self._memory.store, job.commits
        old = store.release(owner) if store.get(owner) is not None else None
        if store.reserve(owner, COMMITS_HEADER_BYTES + 2 * state_bytes) is None:
            if old is not None:
                store.reserve(owner, old.size_bytes, at_bytes=old.offset_bytes)
            raise HostStoreFull(
                f'the commits of job "{job.name}" need {2 * state_bytes} bytes, the host store '
                f"has {store.largest_free_bytes}",
                hint="unregister a model or start with a larger --host-store",
                requested_bytes=2 * state_bytes,
                largest_free_bytes=store.largest_free_bytes,
            )
        job.commit_slot_bytes = state_bytes
        core.emit(CreateCommits(job=job.name, slot_bytes=state_bytes))
        self._tell_daemon_of_commits(job)

    def _tell_daemon_of_commits(self, job: Job) -> None:
        self._core.tell_daemon(
            OpenCommits(job=job.name, slot_bytes=job.commit_slot_bytes), commits_of=job.name
        )

    def _grant_leases(self) -> None:
        """Slices for those who wait; not while requests do, whose models may need the room."""
        core = self._core
        if core.queue or not core.is_daemon_ready:
            return
        for job in core.jobs.values():
            if not job.lease_asked_bytes or job.slot is None:
                continue
            try:
                held = self._memory.arena.get(job.slice)  # asked again: the same one
                region = held or self._memory.lease_slice(job.name, job.lease_asked_bytes)
            except OutOfDeviceMemory as error:
                job.lease_asked_bytes = 0
                self._refuse_lease(job, error)
                continue
            if region == "soon":
                continue
            if region is None:
                self._make_room(job)
                continue
            job.lease_asked_bytes = 0
            job.lease_bytes = region.size_bytes
            if job.state.state is TaskState.TRANSMITTING:
                job.state.apply(TaskEvent.STARTED, "leased its slice")
            core.emit(
                ToWorker(
                    slot=job.slot,
                    message=LeaseGranted(
                        epoch=job.epoch,
                        offset_bytes=region.offset_bytes,
                        size_bytes=region.size_bytes,
                    ),
                    channel="signal",
                    commits_of=job.name,
                )
            )

    def _make_room(self, job: Job) -> None:
        """Models in use leave soon; another job's slice only when that job is evicted."""
        core = self._core
        if core.current is not None or core.upcoming is not None:
            return
        for other in core.jobs.values():
            has_slice = self._memory.arena.get(other.slice) is not None
            if other is not job and has_slice and other.state.state is TaskState.SUSPENDED:
                self.evict(other.name, f"memory for job {job.name}")
                return

    def _refuse_lease(self, job: Job, error: PipeSwitchError) -> None:
        assert job.slot is not None
        wire = to_wire(error)
        self._core.emit(
            ToWorker(
                slot=job.slot,
                message=LeaseRefused(
                    epoch=job.epoch, error=wire["type"], message=str(error), data=wire["data"]
                ),
                channel="signal",
            )
        )

    def commit(self, worker: Worker, message: CommitStep) -> None:
        """Let the daemon copy the pieces of the slice; it flips and acknowledges.

        Each number once: when a commit is acknowledged its owner writes the slice again, so a
        message that comes late or again would have a torn image copied.
        """
        job = self._job_of(worker, message.epoch)
        if job is None or message.number <= job.commit_number:
            self._core.counts["stale_messages"] += 1
            return
        region = self._memory.arena.get(job.slice)
        if region is None or not self._core.is_daemon_ready:
            return  # nothing is copied, so nothing is acknowledged and the number is not used up
        job.commit_number = message.number
        job.copying_epoch, job.copying_number = job.epoch, message.number
        self._core.tell_daemon(
            CommitCopy(
                job=job.name,
                epoch=job.epoch,
                number=message.number,
                step=message.step,
                slice_offset_bytes=region.offset_bytes,
                slice_bytes=region.size_bytes,
                ranges=message.ranges,
            )
        )

    def committed(self, message: StepCommitted) -> None:
        """Flipped: tell the worker; write it to disk now and then."""
        core = self._core
        job = core.jobs.get(message.job)
        told = (message.epoch, message.number)
        if job is None or told != (job.copying_epoch, job.copying_number):
            core.counts["stale_messages"] += 1  # of an older job of this name, or told again
            return
        job.copying_epoch, job.copying_number = NO_COPY
        if not message.error:
            if core.is_draining:  # there is no later
                job.persist_due_at_ms = core.now_ms
            elif job.committed_step == job.persisted_step == -1:  # the first commit
                job.persist_due_at_ms = core.now_ms + core.settings.persist_every_ms
            job.committed_step = max(job.committed_step, message.step)
            job.deaths_without_progress = 0
            core.counts["commits"] += 1
            core.publish("job.committed", job=job.name, step=message.step, copy_ms=message.copy_ms)
        if job.slot is not None and message.epoch == job.epoch:
            core.emit(ToWorker(slot=job.slot, message=message, channel="signal"))

    def _persist_due(self) -> None:
        """Write commits to disk now and then, and at once when a job was put aside."""
        core = self._core
        for job in core.jobs.values():
            if not self._is_unsaved(job) or job.is_persisting or not core.is_daemon_ready:
                continue
            if core.now_ms < job.persist_due_at_ms:
                core.look_again(job.persist_due_at_ms)
                continue
            job.is_persisting = True
            job.persist_epoch = job.epoch
            job.persist_due_at_ms = core.now_ms + core.settings.persist_every_ms
            core.tell_daemon(PersistCommit(job=job.name, epoch=job.epoch, directory=""))

    def _is_unsaved(self, job: Job) -> bool:
        """Its newest commit is not on disk, and somebody may want to resume from it."""
        return job.committed_step > job.persisted_step and job.state.state not in TASK_FINAL

    def persisted(self, message: CommitPersisted) -> None:
        """On disk, or why not; the older file is intact either way and training goes on."""
        job = self._core.jobs.get(message.job)
        if job is None or message.epoch <= job.born_epoch:
            return
        job.is_persisting = False
        if message.error:
            self._core.publish("job.persist_failed", job=job.name, error=message.error)
            job.why = f"commit not on disk: {message.error}"
        else:
            job.persisted_step = max(job.persisted_step, message.step)

    def refused(self, epoch: Epoch, reason: str) -> None:
        """The daemon refused an order: no answer to it will come."""
        for job in self._core.jobs.values():
            if job.persist_epoch == epoch and job.is_persisting:
                job.is_persisting = False
                job.why = f"commit not on disk: {reason}"
            if job.copying_epoch == epoch:
                job.copying_epoch, job.copying_number = NO_COPY
                self._restart(job, epoch, f"its commit was refused: {reason}")

    def _restart(self, job: Job, epoch: Epoch, reason: str) -> None:
        """From the last commit: its script waits for an acknowledgement that will not come."""
        if job.slot is not None and job.epoch == epoch:
            self._core.kill(self._core.workers[job.slot], reason)

    def report(self, worker: Worker, message: JobReport) -> None:
        """What the script says of itself."""
        job = self._job_of(worker, message.epoch)
        if job is None:
            return
        values = {str(key): value for key, value in message.values.items()}
        if message.kind == "progress":
            self._progress(job, values)
        elif message.kind == "nan_loss":
            job.why = f"{values.get('name')} was {values.get('value')} at step {values.get('step')}"
        elif message.kind in ("warning", "commit_failed"):
            job.why = str(values.get("text") or values.get("what", message.kind))
        self._core.publish(f"job.{message.kind}", **{**values, "job": job.name})

    def _progress(self, job: Job, values: dict[str, Any]) -> None:
        """Steps done, and how fast since the last report that was not interrupted."""
        core, before = self._core, job.step
        job.step = _number(values.get("step"), job.step)
        job.epoch_index = _number(values.get("epoch"), job.epoch_index)
        elapsed_ms = core.now_ms - job.reported_at_ms
        if job.step > before and job.reported_at_ms and elapsed_ms > 0:
            rate = (job.step - before) * 1000.0 / elapsed_ms
            job.steps_per_s += RATE_WEIGHT * (rate - job.steps_per_s) if job.steps_per_s else rate
        job.reported_at_ms = core.now_ms
        if isinstance(values.get("log"), dict):
            job.last_log = values["log"] or job.last_log

    # -- ends ---------------------------------------------------------------------------------

    def ended(self, worker: Worker, message: JobEnded) -> None:
        """The script is over; its process retires and only then its memory is free."""
        job = self._job_of(worker, message.epoch)
        if job is None:
            return
        worker.state.apply(WorkerEvent.RETIRED, f"job {job.name} {message.outcome}")
        worker.deaths = 0
        worker.retired_at_ms = self._core.now_ms
        self._device_left(job)
        job.slot = None
        job.lease_asked_bytes = 0
        job.lease_bytes = 0
        job.step = max(job.step, message.step)
        if message.outcome == "done":
            job.state.apply(TaskEvent.FINISHED, "script ended")
        elif message.outcome == "failed":
            job.error = f"{message.error_type}: {message.error_text}"
            job.state.apply(TaskEvent.ERROR, message.error_type)
        elif job.state.state is TaskState.EVICTING:
            job.state.apply(TaskEvent.UNWOUND, "preempted")
        else:  # its own code raised TaskPreempted without being asked
            job.error = "the script raised TaskPreempted by itself"
            job.state.apply(TaskEvent.ERROR, "TaskPreempted")
        self._after_unwinding(job)

    def _after_unwinding(self, job: Job) -> None:
        if job.state.state is TaskState.QUEUED:
            if job.wanted == "pause":
                job.state.apply(TaskEvent.PAUSE, "asked by the user")
            elif job.wanted == "cancel":
                job.state.apply(TaskEvent.CANCEL, "asked by the user")
            if job.wanted in ("pause", "drain"):
                job.persist_due_at_ms = self._core.now_ms  # at once
        self._changed(job)

    def _changed(self, job: Job) -> None:
        core = self._core
        core.publish(f"job.{job.state.state.value}", job=job.name, step=job.step, error=job.error)
        if job.state.state is TaskState.PAUSED:  # also for the next server
            core.emit(Journal(entry={"kind": "hold", "name": job.name, "why": "paused"}))
        for token in job.answer_on_change:
            core.answer(token, job=self.row(job))
        job.answer_on_change.clear()
        job.wanted = "run" if job.wanted != "drain" else job.wanted
        if job.state.state in TASK_FINAL:
            self._forget_commits(job)
            core.emit(Journal(entry={"kind": "job-over", "name": job.name,
                                     "state": job.state.state.value}))  # fmt: skip
            self._answer_final(job)

    def _forget_commits(self, job: Job) -> None:
        if job.commit_slot_bytes:
            self._memory.store.release(job.commits)
            job.commit_slot_bytes = 0
            self._core.tell_daemon(CloseCommits(job=job.name))
            self._core.emit(DropCommits(job=job.name))

    def _answer_final(self, job: Job) -> None:
        if job.state.state not in TASK_FINAL:
            return
        for token in job.waiters:
            if job.state.state is TaskState.FAILED:
                kind, _, text = job.error.partition(": ")
                error = TaskFailed(
                    f'job "{job.name}" failed: {job.error}',
                    hint=f"pipeswitch jobs logs {job.name}",
                    type=kind,
                    text=text,
                    job=self.row(job),
                )
                self._core.refuse(token, error)
            else:
                self._core.answer(token, job=self.row(job))
        job.waiters.clear()

    # -- faults -------------------------------------------------------------------------------

    def worker_died(self, worker: Worker, status: int) -> None:
        """Reaped. After a crash the job starts again from its last commit."""
        core = self._core
        name = worker.job
        if name is None:
            return
        worker.job = None
        job = core.jobs.get(name)
        if job is not None and job.slot == worker.slot:
            self._device_left(job)
            job.slot = None
            job.lease_bytes = job.lease_asked_bytes = 0
            job.restarts += 1
            job.deaths_without_progress += worker.is_blamed
            job.steps_recomputed += max(0, job.step - max(job.committed_step, 0))
            was_evicting = job.state.state is TaskState.EVICTING
            job.why = worker.kill_reason or f"worker exited with status {status}"
            job.state.apply(TaskEvent.WORKER_DIED, f"status {status}")
            if job.deaths_without_progress >= core.settings.max_job_deaths and not was_evicting:
                job.error = f"{WorkerLost.__name__}: its worker died {job.deaths_without_progress} "
                job.error += f"times without a commit in between (last status {status})"
                job.state.apply(TaskEvent.ERROR, "no progress")
            self._after_unwinding(job)
        self._memory.release_slice(name)

    def daemon_died(self) -> None:
        """Slices are gone with the device; commits are not."""
        for job in self._core.jobs.values():
            job.is_persisting = False
            job.copying_epoch, job.copying_number = NO_COPY

    def daemon_ready(self) -> None:
        for job in self._core.jobs.values():
            if job.commit_slot_bytes:
                self._tell_daemon_of_commits(job)

    def refuse_all(self, error: PipeSwitchError) -> None:
        """The server cannot go on: nobody is left without an answer."""
        for job in self._core.jobs.values():
            for token in (*job.waiters, *job.answer_on_change):
                self._core.refuse(token, error)
            job.waiters.clear()
            job.answer_on_change.clear()

    def drain(self) -> None:
        """Commit and unwind every job, write all to disk; the journal brings them back."""
        for job in self._core.jobs.values():
            job.persist_due_at_ms = self._core.now_ms  # also of one that waits in the queue
            if job.state.state in TASK_ON_WORKER:
                if job.wanted == "run":
                    job.wanted = "drain"
                self.evict(job.name, "the server is draining")

    @property
    def is_quiet(self) -> bool:
        """No job on a worker, and no commit on its way to host or disk, or due to be."""
        now_ms = self._core.now_ms
        return not any(
            job.state.state in TASK_ON_WORKER
            or job.copying_epoch
            or job.is_persisting
            or (self._is_unsaved(job) and job.persist_due_at_ms <= now_ms)
            for job in self._core.jobs.values()
        )


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default


def _is_over(job: Job) -> InvalidInput:
    return InvalidInput(
        f'job "{job.name}" is over: it is {job.state.state.value}', hint="pipeswitch jobs ls"
    )
