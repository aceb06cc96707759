"""Leases of slices to jobs: requests, grants, and which job must leave. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from ...base.errors import OutOfDeviceMemory, PipeSwitchError, to_wire
from ...ipc.messages import worker as worker_msg
from ...ipc.messages.base import JobName
from ..policies.job_orders import JOB_ORDERS
from ..state.device_state import DeviceState
from ..state.records import Job, Worker
from ..state.regions import Owner, Region
from ..state.states import TaskEvent, TaskState
from .allocators import ArenaAllocator, HostStoreAllocator
from .commits import Commits
from .slices import Slices
from .swaps import Swaps

MIN_COSTS: Final = 10  # a job may keep its memory for this many times what it costs to leave


class Leases:
    """Slices of jobs: at most one per job, from its first ``job.steps`` until it is reaped.
    The job's offloaded activations stay in host memory for the same time."""

    def __init__(
        self,
        device: DeviceState,
        arena: ArenaAllocator,
        slices: Slices,
        commits: Commits,
        store: HostStoreAllocator,
        swaps: Swaps,
    ) -> None:
        self._device = device
        self._arena = arena
        self._slices = slices
        self._commits = commits
        self._store = store
        self._swaps = swaps

    def requested(self, worker: Worker, message: worker_msg.LeaseRequest) -> None:
        """Handle a job's request for its slice; the job waits without the device's turn."""
        job = self._device.job_of(worker, message.op_id)
        if job is None or job.state.state is TaskState.EVICTING:
            return  # EvictTask is on its way to the job
        if not self._swaps.lets_ask(job):
            return
        old = self._arena.regions.get(job.slice)
        grows = old is not None and old.size_bytes < message.slice_bytes
        try:
            if grows:  # a slice that fitted before may wait instead
                self._slices.refuse_too_large(job.slice, message.slice_bytes)
            self._commits.open(job, message.state_bytes)
        except PipeSwitchError as error:
            self._refuse(job, error)
            return
        if grows:  # the script has copied its state elsewhere
            self._slices.release(job.slice)
        elif old is not None:  # only its commits need more room, or the next phase begins
            self._granted(job, old)
            return
        job.memory.lease_asked_bytes = max(1, message.slice_bytes)
        if not job.memory.lease_bytes:  # else a later phase of the script sends the request
            job.timing.start_ms = self._device.core.now_ms - job.timing.dispatched_at_ms

    def host_requested(self, worker: Worker, message: worker_msg.HostRequest) -> None:
        """Answer a host memory request at once, even of a leaving job: it may be inside a layer."""
        job = self._device.job_of(worker, message.op_id)
        if job is None:
            return  # the job is being killed
        assert job.slot is not None
        try:
            self._store.charge(job.spec.name, max(0, message.size_bytes))
        except PipeSwitchError as error:
            self._refuse(job, error)
            return
        self._device.send(job.slot, worker_msg.HostGranted(op_id=job.op_id), "signal")

    def reaped(self, name: JobName) -> None:
        """Release everything of a job whose process is reaped."""
        self._store.charge(name, 0)
        self._swaps.reaped(name)
        self._slices.release(Owner("slice", name))

    def grant(self) -> Iterator[tuple[Job, str]]:
        """Grant slices to waiting jobs, but none while requests wait: their models may need room.
        A swapped job waits for one, too.

        If a job that has committed no longer fits because of models that were pinned later, it
        waits: a failure would lose its work.

        Yields:
            A job that must leave before the next job can have its slice, and the reason.
        """
        device = self._device
        if device.queue.requests or not device.daemon.is_ready:
            return
        is_reserved = False
        for job in self._asks():
            memory = job.memory
            if not memory.lease_asked_bytes or job.slot is None:  # evicted for another job
                continue
            is_swapped = job.state.state is TaskState.SWAPPED
            if is_swapped and is_reserved:
                continue
            try:
                lease = self._arena.regions.get(job.slice)  # a repeated request gets it again
                region = lease or self._slices.lease(
                    job.slice, memory.lease_asked_bytes, self._own_range(job)
                )
            except OutOfDeviceMemory as error:
                may_fit = memory.lease_asked_bytes <= self._arena.leasable_bytes
                if is_swapped or (memory.committed_step >= 0 and may_fit):
                    hint = f"pipeswitch unload {', '.join(device.pinned)}"
                    job.progress.why = f"waits for memory of pinned models: {hint}"
                    if is_swapped:
                        self._swaps.is_blocked(job)
                    continue
                memory.lease_asked_bytes = 0
                self._refuse(job, error)
                continue
            # What leaves for this job must not come back first: several may have to leave for it.
            is_reserved |= region == "soon" or (region is None and self._has_rivals(job))
            if region == "soon":
                job.swap.blocked_at_ms = 0.0
                continue
            if region is None:
                leaves = self.who_leaves_for(job)
                if leaves is not None:
                    yield leaves, f"memory for job {job.spec.name}"
                elif is_swapped:
                    self._swaps.is_blocked(job)
                continue
            if lease is None:
                min_ms = MIN_COSTS * self._swaps.cost_ms(job, region.size_bytes)
                job.timing.turn_left_ms = max(device.core.settings.training_cycle_ms, min_ms)
            if is_swapped:
                self._swaps.bring_in(job, region)
            else:
                self._granted(job, region)

    def _granted(self, job: Job, region: Region) -> None:
        job.memory.lease_asked_bytes = 0
        job.memory.lease_bytes, job.progress.why = region.size_bytes, ""
        if job.state.state is TaskState.TRANSMITTING:
            job.state.apply(TaskEvent.STARTED, "leased its slice")
        granted = worker_msg.LeaseGranted(
            op_id=job.op_id, offset_bytes=region.offset_bytes, size_bytes=region.size_bytes
        )
        assert job.slot is not None
        self._device.send(job.slot, granted, "signal", commits_of=job.spec.name)

    def _own_range(self, job: Job) -> int | None:
        """Return the only offset at which a swapped job may come in; None: any."""
        is_bound = job.state.state is TaskState.SWAPPED and not self._device.settings.slices_move
        return job.swap.offset_bytes if is_bound else None

    def may_grant(self, job: Job) -> bool:
        """Return True if the slice that a job waits for could fit if only pinned models stayed."""
        return self._arena.can_ever_hold(job.memory.lease_asked_bytes)

    def _asks(self) -> list[Job]:
        """Return the jobs that wait for memory; a swapped one comes after those it left for."""
        jobs, order = self._device.jobs.values(), JOB_ORDERS[self._device.settings.training]
        asks = [one for one in jobs if one.memory.lease_asked_bytes and one.slot is not None]
        if len(asks) < 2:
            return asks
        swapped = [one for one in asks if one.state.state is TaskState.SWAPPED]
        first_id = min((one.swap.swap_id for one in swapped), default=math.inf)

        def turn(job: Job) -> tuple[float, ...]:
            left_as: float = 0 if job.op_id < first_id else math.inf  # it started later
            if job in swapped:
                left_as = job.swap.swap_id
            return (job.spec.priority, left_as, *order.rank(job.view(0.0)))

        return sorted(asks, key=turn)

    def _has_rivals(self, job: Job) -> bool:
        """Return True if a job has a slice that it will have to leave for ``job``."""
        return any(
            other is not job
            and other.spec.priority >= job.spec.priority
            and self._arena.regions.get(other.slice) is not None
            for other in self._device.jobs.values()
        )

    def who_leaves_for(self, job: Job) -> Job | None:
        """Return the suspended job that must leave its slice; None if there is none.

        It has a lower priority than ``job``, or an equal one and no training time left. While tasks
        run, no job must leave, because their models can soon be evicted instead.
        """
        device = self._device
        if device.owner.tasks:
            return None
        own = self._own_range(job)
        in_its_range = (
            None
            if own is None
            else self._arena.regions.overlapping(own, max(1, job.memory.lease_asked_bytes))
        )
        may_leave = [
            other
            for other in device.jobs.values()
            if (region := self._arena.regions.get(other.slice)) is not None
            and (in_its_range is None or region in in_its_range)
            and other.state.state is TaskState.SUSPENDED
            and (other.spec.priority, min(0.0, -other.timing.turn_left_ms))
            >= (job.spec.priority, 0.0)
            and other is not job
        ]
        leaves = max(may_leave, key=lambda other: (other.spec.priority, -other.place), default=None)
        if leaves is None:
            job.progress.why = "waits for memory of other jobs, which train for a while first"
        return leaves

    def _refuse(self, job: Job, error: PipeSwitchError) -> None:
        assert job.slot is not None
        wire = to_wire(error)
        refused = worker_msg.LeaseRefused(
            op_id=job.op_id, error=wire["type"], message=str(error), data=wire["data"]
        )
        self._device.send(job.slot, refused, "signal")
