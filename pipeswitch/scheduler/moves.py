"""Jobs that go to another device and take their process along (ADR 33).

1. Asked for, by its user or because requests hold its device, the job steps aside as for a request.
2. Parked, and nothing of it being copied or written, its slice gets a range on the other device,
   and its process copies it there (``MoveTask``). Nothing waits for that on either device.
3. ``Moved``: its process, its slice and its commits are the other device's, in one step.

Whatever cannot go on, its last commit counts: a process that dies is the old device's until 3; one
that cannot come along (it has no slice yet, there is no room, another kind of device) is evicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import OutOfDeviceMemory
from ..ipc.messages import JobName, Moved, MoveTask, Slot, Turn
from .core import JOBS, PLACES, QUEUE, TURN, WORKERS, Core
from .device import Device
from .events import HandOver
from .memory.placing import kinds_of
from .state.records import Job, Worker
from .state.regions import Owner
from .state.states import TASK_ON_WORKER, MoveEvent, MoveState, TaskState, WorkerEvent
from .training.jobs import Jobs
from .training.training import JOBS_TENANT, MAX_IN_PLACE

CAN_TAKE = "cpu"  # kind of device whose slices a process can map in each other's place


class Moves:
    """Of all jobs: who is to go where, and how far that is."""

    def __init__(self, core: Core, devices: Sequence[Device], jobs: Jobs) -> None:
        self._core = core
        self._devices = devices
        self._jobs = jobs

    def pump(self) -> int:
        """Take each move one step on."""
        if len(self._devices) == 1:
            return 0
        for device in self._devices:
            for job in list(device.state.jobs.values()):
                self._look(device, job)
        return QUEUE | TURN | WORKERS | PLACES | JOBS if any(self._jobs) else 0

    def _look(self, device: Device, job: Job) -> None:
        state = job.move.state
        if job.state.state not in TASK_ON_WORKER:
            if state is not MoveState.STAYS:
                job.move.apply(MoveEvent.PROCESS_GONE, job.state.state.value)
        elif state is MoveState.COPYING:
            self._watch(device, job)
        elif state is MoveState.LEAVING:
            device.training.evict(job.name, "it moves to another device")
        elif state is MoveState.ASKED:
            self._begin(device, job)
        elif (target := self._wanted(device, job)) is not None:
            job.move.apply(MoveEvent.ASK, f"to device {target}")
            job.target = target
            self._begin(device, job)
        if job.move.state is not state:
            self._core.touched |= JOBS

    def _wanted(self, device: Device, job: Job) -> int | None:
        """Where it is to go: where its user sent it, else to an idle device when requests have held
        its own for ``move_after_ms``."""
        core, state = self._core, device.state
        if job.sent_to:
            target = self._jobs.names.index(job.sent_to)
            return None if target == state.index else target
        after_ms = core.settings.move_after_ms
        if not after_ms or job.state.state is not TaskState.SUSPENDED or not state.is_busy:
            return None
        due_ms = max(job.parked_at_ms, job.move_asked_at_ms) + after_ms
        if core.now_ms < due_ms:
            core.look_again(due_ms, JOBS)
            return None
        others = (one for one in self._devices if self._is_idle(one) and self._may_take(one, job))
        return next((one.state.index for one in others), None)

    @staticmethod
    def _is_idle(device: Device) -> bool:
        state = device.state
        trains = any(job.state.state in TASK_ON_WORKER for job in state.jobs.values())
        return state.is_ready and not state.is_busy and not trains

    @staticmethod
    def _may_take(device: Device, job: Job) -> bool:
        return not job.allowed or device.state.settings.device in job.allowed

    def _begin(self, device: Device, job: Job) -> None:
        """From ASKED on. Outcomes:

        1. It was sent back, its target is lost, or, not sent by its user, not idle any more: it
           stays.
        2. Its process cannot come along: it leaves; not sent by its user, it stays.
        3. The target is not ready, or something of the job is on its way: it waits.
        4. It computes: it is told to stop, once.
        5. It is parked and has a place: its process copies.
        """
        job.target = self._jobs.names.index(job.sent_to) if job.sent_to else job.target
        target, state = self._devices[job.target], job.state.state
        if target is device or target.state.is_given_up:
            self._stays(job, "there is no other device to go to")  # 1.
        elif not job.sent_to and not self._is_idle(target):
            self._stays(job, "the other device is taken")  # 1.
        elif state is TaskState.EVICTING or not target.state.is_daemon_ready:
            return  # 3.
        elif reason := self._unfit(device, target, job):
            self._cannot_come(job, reason)  # 2.
        elif job.copying_epoch or job.is_persisting:
            return  # 3.
        elif state is TaskState.RUNNING:
            device.training.stop(job.name, Turn(0), Slot(0))  # 4.
        elif state is TaskState.SUSPENDED:
            self._copy(device, target, job)

    @staticmethod
    def _unfit(device: Device, target: Device, job: Job) -> str:
        """Why its process cannot come along; empty: it can."""
        if kinds_of(one.state.settings.device for one in (device, target)) != [CAN_TAKE]:
            return "its tensors cannot be mapped on the other device"
        if not job.lease_bytes or job.lease_asked_bytes:
            return "it has no slice yet"
        if device.state.settings.activation_memory_bytes:
            return "the other jobs there reckon with what they hold"
        in_place = [one for one in target.state.jobs.values() if one.state.state in TASK_ON_WORKER]
        if len(in_place) + target.arena.coming >= MAX_IN_PLACE:
            return "the other device has as many jobs as it can have"
        return ""

    def _copy(self, device: Device, target: Device, job: Job) -> None:
        """Its slice gets a place on the other device, and its process fills it."""
        assert job.slot is not None
        try:
            region = target.slices.lease(job.moving, job.lease_bytes)
        except OutOfDeviceMemory:
            region = None
        if region == "soon":
            return  # 3.
        if region is None:
            self._cannot_come(job, "the other device has no room for its state")  # 2.
            return
        job.move.apply(MoveEvent.BEGUN, f"{region.size_bytes} bytes")  # 5.
        job.move_asked_at_ms = self._core.now_ms
        order = MoveTask(
            epoch=job.epoch,
            device=job.target,
            offset_bytes=region.offset_bytes,
            size_bytes=region.size_bytes,
        )
        device.state.signal(job.slot, order)
        self._watch(device, job)

    def _stays(self, job: Job, cause: str) -> None:
        job.move.apply(MoveEvent.CALLED_OFF, cause)
        job.move_asked_at_ms = self._core.now_ms  # it is not asked again at once

    def _cannot_come(self, job: Job, cause: str) -> None:
        if job.sent_to:
            job.move.apply(MoveEvent.UNFIT, cause)
        else:
            self._stays(job, cause)

    def _watch(self, device: Device, job: Job) -> None:
        """While it copies: where its memory was lost, or it takes too long, its commit counts."""
        assert job.slot is not None
        worker, core = device.state.workers[job.slot], self._core
        late_at_ms = job.move_asked_at_ms + core.settings.evict_grace_ms
        if self._devices[job.target].arena.regions.get(job.moving) is None:
            device.state.kill(worker, "the device that it moves to was lost", blame=False)
        elif core.now_ms >= late_at_ms:
            device.state.kill(worker, "did not move")
        else:
            core.look_again(late_at_ms, JOBS)

    def moved(self, device: Device, worker: Worker, message: Moved) -> None:
        """Its process has nothing of the old device any more. What it said before was read before;
        what it says next comes from the other one."""
        core, job = self._core, device.state.job_of(worker, message.epoch)
        if job is None or job.move.state is not MoveState.COPYING:
            core.counts["stale_messages"] += 1
            return
        target = self._devices[job.target]
        if not worker.state.allows(WorkerEvent.GAVE_AWAY):  # it was killed meanwhile
            return
        place = target.fleet.place()
        if place is None or target.arena.regions.get(job.moving) is None:
            device.state.kill(worker, "its place on the other device was lost", blame=False)
            return
        job.move.apply(MoveEvent.ARRIVED, f"{message.copied_bytes} bytes")
        job.moves += 1
        pid, slot = worker.pid, worker.slot
        device.fleet.gave_away(worker, job.name)
        new = target.fleet.took_over(place, pid, job.name)
        new.job, new.task_epoch, new.runs_code = job.name, job.epoch, True
        new.tenant = JOBS_TENANT if core.settings.separates_tenants else None
        core.emit(
            HandOver(
                slot=slot,
                device=device.state.index,
                to_device=target.state.index,
                to_slot=new.slot,
                to_generation=new.generation,
            )
        )
        device.slices.release(job.slice)
        target.slices.arrived(job)
        self._jobs.goes(job, target.state.index)
        job.slot = new.slot
        device.state.span("scheduler", f"move {job.name}", job.move_asked_at_ms, core.now_ms)
        target.state.publish(
            "job.moved", job=job.name, step=job.step, bytes=message.copied_bytes,
            copy_ms=message.copy_ms,
        )  # fmt: skip

    def reaped(self) -> None:
        """A process is gone: what it was copying to has no owner any more."""
        for device in self._devices:
            for region in list(device.arena.regions):
                name = JobName(region.owner.name)
                if region.owner.kind == "moving" and not self._jobs.has_process_of(name):
                    device.slices.release(Owner("moving", name))
