"""Moves of jobs from one device to another.

A job that moves is evicted: it commits its last step and unwinds. When its process is reaped,
``reassign`` places it on the other device, where its script starts again from that commit.
"""

from __future__ import annotations

from collections.abc import Sequence

from .server.device import Device
from .state.core import ALL, JOBS, QUEUE, RESIDENCY, TURN, WORKERS, Core
from .state.events import Journal
from .state.records import Job
from .state.states import TASK_FINAL, TASK_ON_WORKER, TaskState
from .training.jobs import Jobs


class JobMigrations:
    """Jobs that change devices: a user moves them, or requests have parked them for too long."""

    def __init__(self, core: Core, devices: Sequence[Device], jobs: Jobs) -> None:
        self._core = core
        self._devices = devices
        self._jobs = jobs

    def pump(self) -> int:
        """Evict the jobs whose new device is ready."""
        if len(self._devices) == 1:
            return 0
        for device in self._devices:
            for job in device.state.jobs.values():
                target = self._target(device, job)
                if target is not None and job.state.state is not TaskState.EVICTING:
                    job.leaves_for = target.state.index
                    device.training.evict(job.spec.name, "it is moved to another device")
        return QUEUE | TURN | WORKERS | RESIDENCY | JOBS if any(self._jobs) else 0

    def reassign(self) -> int:
        """Place waiting jobs on better devices, with their commits.

        A job stays while its last process is not reaped, or its commit is being copied or written.
        An ended job moves only from a device that is given up.
        """
        if len(self._jobs.homes) == 1:
            return 0
        counts = self._jobs.counts()
        for home in self._jobs.homes:
            for job in list(home.state.jobs.values()):
                is_waiting = job.state.state in (TaskState.QUEUED, TaskState.PAUSED)
                is_waiting = is_waiting or home.state.daemon.is_given_up
                if not is_waiting or job.memory.copy_id or job.memory.is_persisting:
                    continue
                if self._jobs.has_process_of(job.spec.name):
                    continue
                # A job that was evicted for another device prefers that device.
                preferred = home.state.index if job.leaves_for is None else job.leaves_for
                target = self._jobs.place(job, preferred, counts)
                if target != home.state.index:
                    self._goes(job, target)
                    if job.state.state not in TASK_FINAL:
                        counts[home.state.index] -= 1
                        counts[target] += 1
        return QUEUE | TURN | WORKERS | JOBS

    def _goes(self, job: Job, index: int) -> None:
        """Move a job and its commits to another device, also in the journal."""
        home, target = self._jobs.home(job), self._jobs.homes[index]
        home.commits.leaves(job)
        self._core.dirty = ALL
        del home.state.jobs[job.spec.name]
        self._jobs.enters(job, target)
        target.commits.enters(job)
        self._jobs.publish(job, "job.placed")
        is_sent = job.sent_to == target.state.settings.device
        if job.state.state not in TASK_FINAL:
            entry = {
                "kind": "placed",
                "name": job.spec.name,
                "is_sent": is_sent,
                "device": target.state.settings.device,
            }
            self._core.emit(Journal(entry=entry))

    def _target(self, device: Device, job: Job) -> Device | None:
        """Return the ready device to which a job on a worker should move; None if it stays."""
        if job.state.state not in TASK_ON_WORKER:
            return None
        if job.sent_to:
            target = self._devices[self._jobs.names.index(job.sent_to)]
            return target if target is not device and target.state.daemon.is_ready else None
        after_ms = self._core.settings.move_after_ms
        waits = job.state.state in (TaskState.SUSPENDED, TaskState.SWAPPED)
        if not after_ms or not waits or not device.state.is_busy:
            return None
        due_ms = job.timing.parked_at_ms + after_ms
        if self._core.now_ms < due_ms:
            self._core.wake_at(due_ms, JOBS)
            return None
        others = (one for one in self._devices if self._is_idle(one) and self._may_take(one, job))
        return next(others, None)

    @staticmethod
    def _is_idle(device: Device) -> bool:
        state = device.state
        trains = any(job.state.state in TASK_ON_WORKER for job in state.jobs.values())
        return state.is_ready and not state.is_busy and not trains

    @staticmethod
    def _may_take(device: Device, job: Job) -> bool:
        return not job.allowed or device.state.settings.device in job.allowed
