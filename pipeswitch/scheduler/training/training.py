"""Training on a device: jobs share its idle time; they stop, park, are evicted, and end."""

from __future__ import annotations

import math
from typing import Final

from ...base.errors import DRAINING, WorkerLost
from ...ipc.messages import worker as worker_msg
from ...ipc.messages.base import JobName, Slot, Turn
from ..memory.commits import Commits
from ..memory.leases import Leases
from ..memory.swaps import Swaps
from ..policies.job_orders import JOB_ORDERS
from ..state.core import JOBS, QUEUE, RESIDENCY, TURN, WORKERS
from ..state.device_state import DeviceState
from ..state.events import Interrupt
from ..state.records import Job, Worker
from ..state.states import (
    TASK_ON_WORKER,
    TASK_SWAPS,
    WORKER_FREE,
    OwnerState,
    TaskEvent,
    TaskState,
    WorkerEvent,
    WorkerState,
)
from .jobs import Jobs

JOBS_TENANT: Final = ""  # jobs run code, so they belong to the server's owner
OPEN_AFTER_MS: Final = 50.0  # then a stopping job's stream is opened: its script may wait for it
MAX_IN_PLACE: Final = 4  # maximum number of jobs with a process (and a slice, if there is room)
MIN_GRACE_MS: Final = 1000.0
GATE_ADVICE: Final = "compute in the loop, in modules that are passed to job.steps"
MAX_MISSED: Final = 4  # missed grace periods in a row before a job is paused
FORGIVEN_AFTER: Final = 100  # number of punctual stops after which missed ones no longer count
STARVED_CYCLES: Final = 5  # cycles that a job waits before a job that keeps activations is evicted
STARVED_STEPS: Final = 5  # a job that made this many steps meanwhile keeps activations between them
WHY_EVICTED: Final = {
    "pause": "pause requested by the user",
    "cancel": "cancel requested by the user",
    "drain": DRAINING,
}


class Ranking:
    """Order of jobs, without side effects. Among equal priorities, the device's order decides."""

    def __init__(self, device: DeviceState, jobs: Jobs, leases: Leases) -> None:
        self._device, self._jobs, self._leases = device, jobs, leases
        self.order = JOB_ORDERS[device.settings.training]

    def runnable(self) -> list[Job]:
        """Return the jobs that could have the device, in the order in which they would get it."""
        able = [
            job
            for job in self._device.jobs.values()
            if (job.state.state is TaskState.SUSPENDED and not job.memory.lease_asked_bytes)
            or (job.state.state is TaskState.QUEUED and not self._is_leaving(job))
        ]
        return sorted(able, key=self.rank)

    def rank(self, job: Job) -> tuple[float, ...]:
        """Rank a job that does not have the device; the smallest goes next."""
        is_blocked, priority = job.memory.is_blocked, job.spec.priority
        return (is_blocked, priority, job.is_away, *self.order.rank(job.view(0.0)))

    def _is_leaving(self, job: Job) -> bool:
        """Return True if a process or a commit of the job's last dispatch has not ended yet.

        The job must resume from the commit that is still being copied. A script that began before
        this commit is current would resume from an older one and could overwrite the new one.
        """
        return self._jobs.has_process_of(job.spec.name) or bool(job.memory.copy_id)

    def behind(self, running: Job) -> list[Job]:
        """Return the jobs that wait for the device or memory, and may follow the running job."""
        waiting = self.runnable() + [
            job
            for job in self._device.jobs.values()
            if job.memory.lease_asked_bytes and self._leases.may_grant(job)
        ]
        own = running.view(self._device.core.now_ms)
        return [
            job
            for job in waiting
            if job is not running
            and (job.memory.lease_asked_bytes or not job.is_away)
            and ((view := job.view(0.0)).priority <= own.priority or running.memory.is_blocked)
            and (
                view.priority != own.priority
                or running.memory.is_blocked
                or self.order.yields(own, view)
            )
        ]

    def is_impatient(self, running: Job, behind: list[Job]) -> bool:
        """Return True if the running job's cycle must end now for a job that waits behind it."""
        own = running.view(self._device.core.now_ms)
        return running.memory.is_blocked or any(
            self.order.is_impatient(own, job.view(0.0))
            for job in behind
            if not (job.memory.lease_asked_bytes and self.order.shares)  # it cannot compute yet
        )

    def in_place(self) -> list[Job]:
        """Return the jobs that have a worker."""
        return [job for job in self._device.jobs.values() if job.state.state in TASK_ON_WORKER]


class TrainingJobs:
    """Jobs on a device: dispatch, stop, suspend, evict, end of a script."""

    def __init__(
        self, device: DeviceState, swaps: Swaps, jobs: Jobs, leases: Leases, commits: Commits
    ) -> None:
        self._core, self._device, self._swaps = device.core, device, swaps
        self._jobs, self._leases, self._commits = jobs, leases, commits
        self._ranking = Ranking(device, jobs, leases)
        self._open_after_ms = math.inf if device.settings.slices_move else OPEN_AFTER_MS

    def pump(self) -> int:
        """Give the idle device to the next job, and enforce limits on the other jobs."""
        core, device = self._core, self._device
        if not device.jobs:
            return 0
        for job in device.jobs.values():
            if job.wanted != "run":
                self.evict(job.spec.name, WHY_EVICTED[job.wanted])
        for job, why in self._leases.grant():
            self.free_memory(job.spec.name, why)
        if device.owner.job is not None:
            self._watch_running(device.jobs[device.owner.job])
        elif device.daemon.is_ready and not core.is_draining and self._is_device_idle():
            self._run_next()
        self._make_place()
        if self._ranking.order.shares:
            self._rebalance_starved()
        self._kill_who_stays()
        self._commits.persist_due()
        return QUEUE | TURN | WORKERS | RESIDENCY | JOBS

    def _is_device_idle(self) -> bool:
        """Return True if nobody has the turn and no waiting request may have it now."""
        device = self._device
        return device.owner.is_free and next(device.queue.heads(*device.queue_view), None) is None

    def _run_next(self) -> None:
        for job in self._ranking.runnable():
            if job.state.state is TaskState.SUSPENDED:
                self._resume(job)
                return
            worker = self._pick_worker() if len(self._ranking.in_place()) < MAX_IN_PLACE else None
            if worker is not None:
                self._dispatch(job, worker)
                return

    def _pick_worker(self) -> Worker | None:
        """Return the standby with the fewest loaded programs; the others stay for inference."""
        free = [
            worker
            for worker in self._device.workers.values()
            if worker.state.state in WORKER_FREE
            and worker.state.state is WorkerState.STANDBY
            and worker.preparing is None
        ]

        def order(worker: Worker) -> tuple[bool, int, int]:
            fits = self._device.fits(worker, is_code=True, tenant=JOBS_TENANT)
            return not fits, len(worker.warm), -worker.slot

        return min(free, key=order, default=None)

    def _dispatch(self, job: Job, worker: Worker) -> None:
        core = self._core
        job.op_id = core.next_op_id()
        job.timing.dispatched_at_ms = core.now_ms
        job.turn = Turn(core.next_op_id())
        job.memory.commit_number = 0
        last_step, job.progress.step = job.progress.step, max(job.memory.committed_step, 0)
        # The lost steps count, however the last process ended.
        job.progress.steps_recomputed += max(0, last_step - job.progress.step)
        job.slot, job.leaves_for = worker.slot, None
        job.state.apply(TaskEvent.DISPATCHED, f"worker {worker.slot}")
        self._device.claim(worker, is_code=True, tenant=JOBS_TENANT)
        worker.state.apply(WorkerEvent.ACTIVATED, f"job {job.spec.name}")
        worker.job = job.spec.name
        worker.dispatch_id = job.op_id
        self._holds_device(job)
        self._device.send(
            worker.slot,
            worker_msg.RunJob(
                op_id=job.op_id,
                turn=job.turn,
                spec=job.spec,
                log_path=f"{core.settings.logs_dir}/job-{job.spec.name}.log",
                log_bytes=core.settings.job_log_bytes,
                slot_bytes=job.memory.commit_slot_bytes,
                commit_every_ms=core.settings.commit_every_ms,
                restarts=job.progress.restarts,
                steps_recomputed=job.progress.steps_recomputed,
                last_step=last_step,
                activation_bytes=self._ranking.order.shares * core.settings.activation_memory_bytes,
            ),
            commits_of=job.spec.name if job.memory.commit_slot_bytes else None,
        )
        self._device.publish(
            "job.dispatched", job=job.spec.name, worker=worker.slot, step=job.memory.committed_step
        )

    def _resume(self, job: Job) -> None:
        core, device = self._core, self._device
        assert job.slot is not None
        job.turn = Turn(core.next_op_id())
        job.is_away = job.memory.is_blocked = False
        job.state.apply(TaskEvent.TURN_GIVEN, "device is idle")
        job.timing.preempted_ms += core.now_ms - job.timing.parked_at_ms
        device.workers[job.slot].state.apply(WorkerEvent.TURN_GIVEN, f"job {job.spec.name}")
        self._holds_device(job)
        device.send(job.slot, worker_msg.GrantTurn(op_id=job.op_id, turn=job.turn), "signal")
        device.publish("job.resumed_in_place", job=job.spec.name, worker=job.slot)

    def _holds_device(self, job: Job) -> None:
        self._device.owner.train(job.spec.name, job.state.state.value)
        if self._ranking.order.shares:
            job.progress.beside = self._beside(job)
        job.timing.cycle_began_at_ms = job.timing.last_ran_at_ms = self._core.now_ms
        self._core.dirty |= TURN | JOBS | WORKERS
        self._core.wake_at(job.timing.cycle_began_at_ms + job.timing.cycle_left_ms, JOBS)

    def _beside(self, job: Job) -> dict[str, object]:
        """Return the other job whose turn began last, and the time since then; empty: none."""
        others = [one for one in self._ranking.in_place() if one is not job]
        if not others:
            return {}
        before = max(others, key=lambda one: one.timing.last_ran_at_ms)
        shift_ms = round(self._core.now_ms - before.timing.last_ran_at_ms, 1)
        return {"job": before.spec.name, "shift_ms": shift_ms}

    def _watch_running(self, job: Job) -> None:
        """End the job's cycle when another job waits; kill the job if it does not stop in time."""
        core, settings = self._core, self._core.settings
        state = job.state.state
        if state in (TaskState.RUNNING, TaskState.TRANSMITTING):
            behind, ends_at_ms = self._ranking.behind(job), job.timing.cycle_began_at_ms
            if behind and not self._ranking.is_impatient(job, behind):
                ends_at_ms += job.timing.cycle_left_ms
            is_asking = job.memory.lease_asked_bytes > 0
            if behind and (is_asking or core.now_ms >= ends_at_ms):
                self.stop(job.spec.name, Turn(0), Slot(0), at_boundary=not is_asking)
            elif behind:
                core.wake_at(ends_at_ms, JOBS)
        elif state is TaskState.STOPPING and job.stops_at_boundary:
            step_late_at_ms = job.timing.stop_asked_at_ms + settings.training_cycle_ms
            if core.now_ms >= step_late_at_ms:  # now it stops inside its step
                self.stop(job.spec.name, Turn(0), Slot(0))
            else:
                core.wake_at(step_late_at_ms, JOBS)
        elif state is TaskState.STOPPING:
            asked_at_ms = job.timing.stop_asked_at_ms
            is_late = core.now_ms >= asked_at_ms + self._open_after_ms
            if is_late and job.timing.opened_for_ms != asked_at_ms and job.slot is not None:
                job.timing.opened_for_ms = asked_at_ms
                core.emit(Interrupt(self._device.address(job.slot), job.op_id, job.turn))
            self._kill_after(job, asked_at_ms, settings.stop_grace_ms, "did not stop")

    def reported(self, job: Job) -> None:
        """Record that the job computes; start its next cycle if one is over and no job waits."""
        now_ms = self._core.now_ms
        if job.memory.beside_blocked and not job.memory.is_blocked:
            job.memory.beside_blocked, job.progress.why = {}, ""
        if now_ms >= job.timing.cycle_began_at_ms + job.timing.cycle_left_ms and (
            self._device.owner.job == job.spec.name
            and job.state.state is TaskState.RUNNING
            and not self._ranking.behind(job)
        ):
            self._account(job)
            job.timing.cycle_began_at_ms = now_ms
            job.timing.cycle_left_ms = self._core.settings.training_cycle_ms

    def _kill_after(self, job: Job, asked_at_ms: float, grace_ms: float, what: str) -> None:
        """Kill a job's process when its grace period is over.

        Requests wait during this period. So each time that a job uses up its period, the next one
        is a quarter as long, but at least a second. After ``MAX_MISSED`` times the job is paused
        (``worker_died``).
        """
        core, device, progress = self._core, self._device, job.progress
        if progress.suspensions - progress.missed_at >= FORGIVEN_AFTER:
            progress.stops_missed = 0
        grace_ms = max(min(grace_ms, MIN_GRACE_MS), grace_ms / 4**progress.stops_missed)
        if core.now_ms < asked_at_ms + grace_ms or job.slot is None:
            core.wake_at(asked_at_ms + grace_ms, JOBS)
            return
        worker = device.workers[job.slot]
        if not worker.state.allows(WorkerEvent.KILLED):
            return  # the process was killed already
        progress.stops_missed, progress.missed_at = progress.stops_missed + 1, progress.suspensions
        reason = f"{what} within {grace_ms / 1000.0:.3g} s"
        if not progress.suspensions:
            reason += f"; it has never been suspended: {GATE_ADVICE}"
        if progress.stops_missed >= MAX_MISSED:
            reason += f", {progress.stops_missed} times: paused, "
            reason += f"pipeswitch jobs resume {job.spec.name}"
        device.publish("job.warning", job=job.spec.name, text=reason)
        device.kill(worker, reason)

    def _make_place(self) -> None:
        """Evict a job whose turn is over for the next queued job, if too many have a process."""
        if len(self._device.jobs) <= MAX_IN_PLACE:
            return
        in_place, queued = self._ranking.in_place(), self._device.jobs.values()
        waiting = [job for job in queued if job.state.state is TaskState.QUEUED]
        is_leaving = any(job.state.state is TaskState.EVICTING for job in in_place)
        if len(in_place) < MAX_IN_PLACE or is_leaving or not waiting:
            return
        first = min(waiting, key=self._ranking.rank)
        leaves = self._leases.who_leaves_for(first)
        if leaves is not None:
            self.evict(leaves.spec.name, f"job {first.spec.name} is next")

    def _rebalance_starved(self) -> None:
        """Evict a job that keeps activations between steps, if another job needs their memory.
        The evicted job resumes later from its last step."""
        core, in_place = self._core, self._ranking.in_place()
        for job in in_place:
            memory = job.memory
            if not memory.is_blocked:
                continue
            if not memory.beside_blocked:
                memory.blocked_at_ms = core.now_ms
                memory.beside_blocked = {one.spec.name: one.progress.step for one in in_place}
            keepers = [
                other
                for other in in_place
                if (step := other.progress.step) - memory.beside_blocked.get(other.spec.name, step)
                >= STARVED_STEPS
            ]
            if not keepers:
                continue
            keeper = min(keepers, key=lambda other: other.progress.evictions)
            job.progress.why = (
                f"waits for memory of activations that job {keeper.spec.name} keeps between steps"
            )
            due_ms = memory.blocked_at_ms + STARVED_CYCLES * core.settings.training_cycle_ms
            if core.now_ms >= due_ms:
                memory.blocked_at_ms = core.now_ms  # if that does not help, another job is evicted
                why = f"keeps activations between steps; job {job.spec.name} waits for their memory"
                self.evict(keeper.spec.name, why)
            else:
                core.wake_at(due_ms, JOBS)

    def _kill_who_stays(self) -> None:
        """Kill a script that ignores its eviction, or a process that does not exit after it."""
        core, device, grace_ms = self._core, self._device, self._core.settings.evict_grace_ms
        for job in device.jobs.values():
            if job.state.state is TaskState.EVICTING:
                self._kill_after(job, job.timing.evict_asked_at_ms, grace_ms, "did not unwind")
            elif job.state.state is TaskState.SWAPPING_OUT and not job.swap.is_hidden:
                self._kill_after(job, job.swap.asked_at_ms, grace_ms, "did not wait in its loop")
        for worker in device.workers.values():
            if worker.state.state is WorkerState.RETIRING:
                if core.now_ms >= worker.retired_at_ms + grace_ms:
                    device.kill(worker, "its script ended, but its process did not exit")
                else:
                    core.wake_at(worker.retired_at_ms + grace_ms, JOBS)

    def stop(
        self, name: JobName, next_turn: Turn, next_slot: Slot, *, at_boundary: bool = False
    ) -> None:
        """Order the job that has the device to park and to pass the turn on.

        This happens once per turn: a later request is served when the job has parked. A job that is
        being evicted gets the order, too; it parks before it commits and unwinds. A job that stops
        for another job may first end its step (``at_boundary``), which frees its activations. If
        that takes too long, the job gets a second order. Then the controller passes the turn on,
        because the answer to the first order may already be on its way.
        """
        core, owner, job = self._core, self._device.owner, self._device.jobs[name]
        if job.slot is None:
            return
        if owner.state is OwnerState.STOPPING:
            if at_boundary or not job.stops_at_boundary:
                return
            next_turn, next_slot = Turn(0), Slot(0)
        else:
            job.state.apply(TaskEvent.STOP_REQUESTED, f"turn {next_turn}")
        owner.stop_job(job.slot, next_turn)
        job.stops_at_boundary, job.timing.stop_asked_at_ms = at_boundary, core.now_ms
        core.dirty |= JOBS
        wait_ms = min(core.settings.stop_grace_ms, self._open_after_ms)
        core.wake_at(core.now_ms + wait_ms, JOBS)
        order = worker_msg.StopTask(
            op_id=job.op_id,
            turn=job.turn,
            next_turn=next_turn,
            next_slot=next_slot,
            at_boundary=at_boundary,
        )
        self._device.send(job.slot, order, "signal")

    def parked(self, worker: Worker, message: worker_msg.JobParked) -> bool:
        """Record that the job has parked; the caller passes the turn on. Return False if too late.

        The message may arrive after the job's JobEnded, which uses another channel.
        """
        core, promised = self._core, self._device.owner.promised
        if worker.dispatch_id == message.op_id and promised.get(worker.slot) == message.next_turn:
            del promised[worker.slot]
        job = self._device.job_of(worker, message.op_id)
        if job is None or message.turn != job.turn or not job.state.allows(TaskEvent.PARKED):
            return False
        if job.state.apply(TaskEvent.PARKED, message.where) is TaskState.SUSPENDED:
            worker.state.apply(WorkerEvent.PARKED, f"job {job.spec.name}")
            job.progress.suspensions += 1
            job.timing.parked_at_ms = core.now_ms
            job.is_away = message.where in ("loader", "copies")
            core.counts["preemptions"] += 1
        self._device.span(
            f"worker {worker.slot}",
            f"stop {job.spec.name} ({message.where})",
            message.asked_at_ms,
            message.parked_at_ms,
            flow=message.next_turn,
        )
        self._device.publish(
            "job.suspended",
            job=job.spec.name,
            where=message.where,
            stop_ms=message.parked_at_ms - message.asked_at_ms,
        )
        self._device_left(job)
        return True

    def back(self, worker: Worker, message: worker_msg.JobReady) -> None:
        """Record that an away job needs the device again, or that a job needs activation memory."""
        job = self._device.job_of(worker, message.op_id)
        if job is not None and message.turn == job.turn:
            job.is_away, job.memory.is_blocked = False, message.is_blocked

    def _device_left(self, job: Job) -> None:
        """Record the end of the job's turn; if its cycle is used up, put it behind other jobs."""
        core, device = self._core, self._device
        if device.owner.job != job.spec.name:
            return
        device.owner.job_left(job.state.state.value)
        self._account(job)
        if job.timing.cycle_left_ms <= 0:
            job.timing.cycle_left_ms = core.settings.training_cycle_ms
            job.place = core.next_op_id()

    def _account(self, job: Job) -> None:
        core = self._core
        timing = job.timing
        track = f"train {job.spec.name}"
        self._device.span("scheduler", track, timing.cycle_began_at_ms, core.now_ms)
        trained_ms = core.now_ms - timing.cycle_began_at_ms
        self._device.spend("train", trained_ms)
        timing.cycle_left_ms -= trained_ms
        timing.trained_ms += trained_ms
        if job.memory.lease_bytes:
            timing.turn_left_ms -= trained_ms

    def free_memory(self, name: JobName, cause: str) -> None:
        """Free the memory of a job: swap it out when it is suspended, or evict it (ADR 64)."""
        job = self._device.jobs.get(name)
        if job is None or job.slot is None:
            return
        state = job.state.state
        if state is TaskState.SWAPPING_IN:
            self._swaps.turn_round(job, cause)
        elif state is TaskState.EVICTING or state in TASK_SWAPS:
            return
        elif refusal := self._swaps.refusal(job):
            self.evict(name, f"{cause}; it is not swapped: {refusal}")
        elif state is TaskState.SUSPENDED:
            self._swaps.out(job, cause)
        else:
            self.stop(name, Turn(0), Slot(0))

    def evict(self, name: JobName, cause: str) -> None:
        """Order a job on a worker to commit its last step and unwind."""
        core, job = self._core, self._device.jobs.get(name)
        if job is not None and job.state.state is TaskState.SWAPPED:
            self._swaps.leaves(job, cause)
        if job is None or not job.state.allows(TaskEvent.EVICT_REQUESTED) or job.slot is None:
            return  # the job's process is about to exit
        job.state.apply(TaskEvent.EVICT_REQUESTED, cause)
        job.progress.evictions += 1
        job.timing.evict_asked_at_ms = core.now_ms
        job.memory.lease_asked_bytes = 0  # the eviction ends its wait
        job.progress.why = cause
        core.counts["job_evictions"] += 1
        core.dirty |= JOBS
        core.wake_at(core.now_ms + core.settings.evict_grace_ms, JOBS)
        self._device.send(job.slot, worker_msg.EvictTask(op_id=job.op_id), "signal")
        self._device.publish("job.evicting", job=name, cause=cause)

    def ended(self, worker: Worker, message: worker_msg.JobEnded) -> None:
        """Retire the process of a script that has ended; its memory is free after its exit."""
        job = self._device.job_of(worker, message.op_id)
        if job is None:
            return
        worker.state.apply(WorkerEvent.RETIRED, f"job {job.spec.name} {message.outcome}")
        worker.deaths = 0
        worker.retired_at_ms = self._core.now_ms
        self._device_left(job)
        job.slot, job.is_away, job.memory.is_blocked = None, False, False
        job.memory.lease_bytes = job.memory.lease_asked_bytes = 0
        job.progress.step = max(job.progress.step, message.step)
        if message.outcome == "done":
            job.state.apply(TaskEvent.FINISHED, "script ended")
        elif message.outcome == "failed":
            job.progress.error = f"{message.error_type}: {message.error_text}"
            job.state.apply(TaskEvent.ERROR, message.error_type)
        elif job.state.state is TaskState.EVICTING:
            job.state.apply(TaskEvent.UNWOUND, "preempted")
        else:  # the script's own code raised TaskPreempted
            job.progress.error = "the script itself raised TaskPreempted"
            job.state.apply(TaskEvent.ERROR, "TaskPreempted")
        self._jobs.unwound(job)

    def worker_died(self, worker: Worker, status: int) -> None:
        """Handle a job's reaped process. After a crash the job restarts from its last commit."""
        core, device = self._core, self._device
        name = worker.job
        if name is None:
            return
        worker.job = None
        job = device.jobs.get(name)
        if job is not None and job.slot == worker.slot:
            self._device_left(job)
            job.slot, job.is_away, job.memory.is_blocked = None, False, False
            job.memory.lease_bytes = job.memory.lease_asked_bytes = 0
            progress = job.progress
            progress.restarts += 1
            progress.deaths_without_progress += worker.is_blamed
            was_evicting = job.state.state is TaskState.EVICTING
            progress.why = worker.kill_reason or f"worker exited with status {status}"
            job.state.apply(TaskEvent.WORKER_DIED, f"status {status}")
            deaths = progress.deaths_without_progress
            if deaths >= core.settings.max_job_deaths and not was_evicting:
                progress.error = f"{WorkerLost.__name__}: its worker died {deaths} "
                progress.error += f"times without a commit (last status {status})"
                job.state.apply(TaskEvent.ERROR, "no progress")
            elif progress.stops_missed >= MAX_MISSED and job.wanted == "run":
                job.wanted = "pause"
            self._jobs.unwound(job)
        self._leases.reaped(name)
