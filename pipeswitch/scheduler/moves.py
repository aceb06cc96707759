"""Moves of jobs from one device to another.

A job that moves is evicted: it commits its last step and unwinds. When its process is reaped,
``Jobs.rehome`` places it on the other device, where its script starts again from that commit.
"""

from __future__ import annotations

from collections.abc import Sequence

from .core import JOBS, PLACES, QUEUE, TURN, WORKERS, Core
from .device import Device
from .state.records import Job
from .state.states import TASK_ON_WORKER, TaskState
from .training.jobs import Jobs


class Moves:
    """Eviction of jobs that their user moves, or that requests have kept parked for too long."""

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
                    device.training.evict(job.spec.name, "it moves to another device")
        return QUEUE | TURN | WORKERS | PLACES | JOBS if any(self._jobs) else 0

    def _target(self, device: Device, job: Job) -> Device | None:
        """Return the ready device to which a job on a worker should move; None if it stays."""
        if job.state.state not in TASK_ON_WORKER:
            return None
        if job.sent_to:
            target = self._devices[self._jobs.names.index(job.sent_to)]
            return target if target is not device and target.state.daemon.is_ready else None
        after_ms = self._core.settings.move_after_ms
        if not after_ms or job.state.state is not TaskState.SUSPENDED or not device.state.is_busy:
            return None
        due_ms = job.timing.parked_at_ms + after_ms
        if self._core.now_ms < due_ms:
            self._core.look_again(due_ms, JOBS)
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
