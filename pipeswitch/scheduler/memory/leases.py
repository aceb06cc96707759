"""Slices of the arena for training jobs: grants, evictions and release. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from ...base.errors import OutOfDeviceMemory, PipeSwitchError, to_wire
from ...ipc.messages import worker as worker_msg
from ...ipc.messages.base import JobName, OpId
from ...ipc.messages.daemon import Scrub
from ..core import RESIDENCY
from ..policies.job_orders import JOB_ORDERS
from ..state.device_state import DeviceState
from ..state.records import Job, Worker
from ..state.regions import Owner, Region
from ..state.states import TaskEvent, TaskState
from .allocators import ArenaAllocator, HostStoreAllocator, gib
from .commits import Commits
from .residency import Residents


class Slices:
    """Slices of a device. A range gets another owner only after it has been zeroed."""

    def __init__(self, device: DeviceState, arena: ArenaAllocator, residents: Residents) -> None:
        self._core = device.core
        self._device = device
        self._arena = arena
        self._residents = residents
        self._unscrubbed: dict[OpId, float] = {}  # failed scrub -> time of the next try

    def lease(self, owner: Owner, size_bytes: int) -> Region | Literal["soon"] | None:
        """Take a place for a job's state; idle models are evicted for it.

        Returns:
            The region; "soon" if enough will soon be free; None if another job would have to leave.

        Raises:
            OutOfDeviceMemory: it would not fit even if only the pinned models were in the arena.
        """
        self.refuse_too_large(owner, size_bytes)
        costs = self._arena.costs(for_request=False)
        window = self._arena.regions.cheapest_window(size_bytes, costs)
        window = window or self._arena.window_after_packing(size_bytes, costs)
        if window is None:
            return None
        if self._arena.obstacles(window):
            return "soon"
        self._residents.clear(window, f"job {owner.name}")
        self._core.dirty |= RESIDENCY
        region = self._arena.regions.reserve(owner, size_bytes, at_bytes=window.offset_bytes)
        assert region is not None
        return region

    def refuse_too_large(self, owner: Owner, size_bytes: int) -> None:
        """Raise OutOfDeviceMemory if the slice does not fit in an arena with only pinned models."""
        if not self._arena.can_ever_hold(size_bytes):
            largest = self._arena.largest_for_all_bytes
            raise OutOfDeviceMemory(
                f'job "{owner.name}" needs {gib(size_bytes)} for parameters, gradients and '
                f"optimizer state; the arena has {gib(largest)}",
                hint="start with a larger --arena, or unpin a model (pipeswitch unload NAME)",
                requested_bytes=size_bytes,
                largest_free_bytes=largest,
            )

    def release(self, owner: Owner) -> None:
        """Order a slice that has no writer to be zeroed; then its range is free for any tenant."""
        if self._arena.regions.get(owner) is None:
            return
        self._core.dirty |= RESIDENCY
        region = self._arena.regions.release(owner)
        if not self._device.daemon.is_ready:
            return  # the memory was lost with the daemon
        op_id = self._core.next_op_id()
        scrubbed = self._arena.regions.reserve(
            Owner("scrub", str(op_id)), region.size_bytes, region.offset_bytes
        )
        assert scrubbed is not None
        self._scrub(op_id, scrubbed)

    def _scrub(self, op_id: OpId, region: Region) -> None:
        self._device.daemon.send(
            Scrub(op_id=op_id, offset_bytes=region.offset_bytes, size_bytes=region.size_bytes)
        )

    def scrub_again(self) -> int:
        """Retry ranges that the daemon failed to zero; until they are zero, nobody may own them."""
        for op_id, at_ms in list(self._unscrubbed.items()):
            region = self._arena.regions.get(Owner("scrub", str(op_id)))
            if region is None:  # the memory was lost with the daemon
                del self._unscrubbed[op_id]
            elif self._core.now_ms < at_ms:
                self._core.wake_at(at_ms, RESIDENCY)
            else:
                del self._unscrubbed[op_id]
                self._scrub(op_id, region)
        return RESIDENCY if self._unscrubbed else 0

    def scrubbed(self, op_id: OpId) -> None:
        if self._arena.regions.get(Owner("scrub", str(op_id))) is not None:
            self._arena.regions.release(Owner("scrub", str(op_id)))

    def refused(self, op_id: OpId) -> None:
        """Schedule another try for a range that the daemon could not zero."""
        if self._arena.regions.get(Owner("scrub", str(op_id))) is not None:
            self._unscrubbed[op_id] = self._core.now_ms + self._core.settings.restart_backoff_ms

    def check(self) -> None:
        """Assert that each slice is held by a live process."""
        for region in self._arena.regions:
            if region.owner.kind == "slice":
                name = JobName(region.owner.name)
                assert any(w.job == name for w in self._device.workers.values()), region


MIN_STARTS: Final = 10  # a job may keep its memory for this many times its start time


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
    ) -> None:
        self._device = device
        self._arena = arena
        self._slices = slices
        self._commits = commits
        self._store = store

    def requested(self, worker: Worker, message: worker_msg.LeaseRequest) -> None:
        """Handle a job's request for its slice; the job waits without the device's turn."""
        job = self._device.job_of(worker, message.op_id)
        if job is None or job.state.state is TaskState.EVICTING:
            return  # EvictTask is on its way to the job
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
        self._slices.release(Owner("slice", name))

    def grant(self) -> Iterator[tuple[Job, str]]:
        """Grant slices to waiting jobs, but none while requests wait: their models may need room.

        If a job that has committed no longer fits because of models that were pinned later, it
        waits: a failure would lose its work.

        Yields:
            A job that must leave before the next job can have its slice, and the reason.
        """
        device = self._device
        if device.queue.requests or not device.daemon.is_ready:
            return
        jobs = device.jobs.values()
        asks = [one for one in jobs if one.memory.lease_asked_bytes and one.slot is not None]
        order = JOB_ORDERS[device.settings.training]
        for job in sorted(asks, key=lambda job: (job.spec.priority, *order.rank(job.view(0.0)))):
            memory = job.memory
            if not memory.lease_asked_bytes or job.slot is None:  # evicted for another job
                continue
            try:
                lease = self._arena.regions.get(job.slice)  # a repeated request gets it again
                region = lease or self._slices.lease(job.slice, memory.lease_asked_bytes)
            except OutOfDeviceMemory as error:
                may_fit = memory.lease_asked_bytes <= self._arena.leasable_bytes
                if memory.committed_step >= 0 and may_fit:
                    hint = f"pipeswitch unload {', '.join(device.pinned)}"
                    job.progress.why = f"waits for memory of pinned models: {hint}"
                    continue
                memory.lease_asked_bytes = 0
                self._refuse(job, error)
                continue
            if region == "soon":
                continue
            if region is None:
                leaves = self.who_leaves_for(job)
                if leaves is not None:
                    yield leaves, f"memory for job {job.spec.name}"
                continue
            memory.lease_asked_bytes = 0
            memory.lease_bytes, job.progress.why = region.size_bytes, ""
            if lease is None:
                min_ms = MIN_STARTS * job.timing.start_ms
                job.timing.turn_left_ms = max(device.core.settings.training_cycle_ms, min_ms)
            if job.state.state is TaskState.TRANSMITTING:
                job.state.apply(TaskEvent.STARTED, "leased its slice")
            granted = worker_msg.LeaseGranted(
                op_id=job.op_id, offset_bytes=region.offset_bytes, size_bytes=region.size_bytes
            )
            self._device.send(job.slot, granted, "signal", commits_of=job.spec.name)

    def may_grant(self, job: Job) -> bool:
        """Return True if the slice that a job waits for could fit if only pinned models stayed."""
        return self._arena.can_ever_hold(job.memory.lease_asked_bytes)

    def who_leaves_for(self, job: Job) -> Job | None:
        """Return the suspended job that must leave its slice; None if there is none.

        It has a lower priority than ``job``, or an equal one and no training time left. While tasks
        run, no job must leave, because their models can soon be evicted instead.
        """
        device = self._device
        if device.owner.tasks:
            return None
        may_leave = [
            other
            for other in device.jobs.values()
            if self._arena.regions.get(other.slice) is not None
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
