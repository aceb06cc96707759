"""Commits of jobs: images of a slice that the daemon copies to the host store and to disk."""

from __future__ import annotations

import math
from typing import Final

from ...base.errors import HostStoreFull, ServerUnavailable
from ...ipc.messages.base import OpId, SliceRead, StepCommitted
from ...ipc.messages.daemon import (
    CloseCommits,
    CommitCopy,
    CommitPersisted,
    OpenCommits,
    PersistCommit,
)
from ...ipc.messages.worker import CommitStep
from ...programs.interface.layout import aligned
from ..state.core import JOBS
from ..state.device_state import DeviceState
from ..state.events import CreateCommits, DropCommits, LoadedCommit
from ..state.records import NO_OP_ID, Job, Worker
from ..state.states import TASK_FINAL
from .allocators import ArenaAllocator, HostStoreAllocator

HEADER_BYTES: Final = 4096  # size of the header before the two slots of a commit area
NO_COPY: Final = (NO_OP_ID, 0)
DISK_SHARE: Final = 20  # a job's writes may take 1/20 of the time, so large ones are rarer


class Commits:
    """Commit areas of a device's jobs, each with at most one commit in progress."""

    def __init__(
        self, device: DeviceState, arena: ArenaAllocator, store: HostStoreAllocator
    ) -> None:
        self._core = device.core
        self._device = device
        self._arena = arena
        self._store = store

    def restore(self, job: Job, slot_bytes: int, step: int) -> bool:
        """Adopt a commit area from disk. Return False if there is no room: the job starts anew."""
        if self._store.regions.reserve(job.commits, HEADER_BYTES + 2 * slot_bytes):
            job.memory.commit_slot_bytes = slot_bytes
            job.progress.step = job.memory.committed_step = job.memory.persisted_step = step
        return bool(job.memory.commit_slot_bytes)

    def take_over(self, job: Job, loaded: LoadedCommit, *, is_on_disk: bool = False) -> None:
        """Give a job the commit area that was loaded for it.

        Raises:
            HostStoreFull: the host store has no room for it.
        """
        if not self.restore(job, loaded.slot_bytes, loaded.step):
            raise HostStoreFull(
                f'no memory for the commits of job "{job.spec.name}"',
                hint="a larger --host-store",
                requested_bytes=2 * loaded.slot_bytes,
            )
        self._core.emit(
            CreateCommits(
                job=job.spec.name,
                slot_bytes=loaded.slot_bytes,
                loaded=loaded.descriptor,
                is_on_disk=is_on_disk,
            )
        )
        self._tell_daemon(job)

    def open(self, job: Job, state_bytes: int) -> None:
        """Reserve a commit area for two images; it outlives the worker and the daemon.

        Raises:
            HostStoreFull: no room for two images.
        """
        core, name = self._core, job.spec.name
        if job.memory.commit_slot_bytes >= state_bytes:
            return
        state_bytes = aligned(state_bytes, HEADER_BYTES)  # slots share no page: each is pinned
        store, owner = self._store.regions, job.commits
        old = store.release(owner) if store.get(owner) is not None else None
        if store.reserve(owner, HEADER_BYTES + 2 * state_bytes) is None:
            if old is not None:
                store.reserve(owner, old.size_bytes, at_bytes=old.offset_bytes)
            raise HostStoreFull(
                f'the commits of job "{name}" need {2 * state_bytes} bytes, the host store '
                f"has {store.largest_free_bytes}",
                hint="unregister a model or start with a larger --host-store",
                requested_bytes=2 * state_bytes,
                largest_free_bytes=store.largest_free_bytes,
            )
        job.memory.commit_slot_bytes = state_bytes
        core.emit(CreateCommits(job=name, slot_bytes=state_bytes))
        self._tell_daemon(job)

    def leaves(self, job: Job) -> None:
        """Close the commits of a job that moves to another device."""
        if job.memory.commit_slot_bytes:
            self._device.daemon.send(CloseCommits(job=job.spec.name))

    def enters(self, job: Job) -> None:
        """Open the commits of a job that moved here from another device."""
        if job.memory.commit_slot_bytes:
            self._tell_daemon(job)

    def _tell_daemon(self, job: Job) -> None:
        name, slot_bytes = job.spec.name, job.memory.commit_slot_bytes
        self._device.daemon.send(OpenCommits(job=name, slot_bytes=slot_bytes), commits_of=name)

    def commit(self, worker: Worker, message: CommitStep) -> None:
        """Order the daemon to copy ranges of the slice, make the copy current and acknowledge it.

        Each commit number is copied once. After the acknowledgement the job writes its slice again,
        so a late or repeated message would copy an inconsistent image.
        """
        job = self._device.job_of(worker, message.op_id)
        if job is None or message.number <= job.memory.commit_number:
            self._core.counts["stale_messages"] += 1
            return
        region = self._arena.regions.get(job.slice)
        if region is None or not self._device.daemon.is_ready or job.swap.is_hidden:
            return  # no copy and no acknowledgement: the worker may use the number again
        job.memory.commit_number = message.number
        job.memory.copy_id, job.memory.copying_number = job.op_id, message.number
        self._device.daemon.send(
            CommitCopy(
                job=job.spec.name,
                op_id=job.op_id,
                number=message.number,
                step=message.step,
                slice_offset_bytes=region.offset_bytes,
                slice_bytes=region.size_bytes,
                ranges=message.ranges,
                older=message.older,
            )
        )

    def slice_read(self, message: SliceRead) -> None:
        """Let the job write its slice again: the copy, which is not current yet, has its bytes."""
        if (job := self._copying(message)) is not None:
            self._to_job(job, message)

    def _copying(self, message: SliceRead | StepCommitted) -> Job | None:
        """Return the job whose copy the message is about; None if it is about an earlier one."""
        job = self._device.jobs.get(message.job)
        commit_ids = (message.op_id, message.number)
        if job is None or commit_ids != (job.memory.copy_id, job.memory.copying_number):
            self._core.counts["stale_messages"] += 1
            return None
        return job

    def _to_job(self, job: Job, message: SliceRead | StepCommitted) -> None:
        if job.slot is not None and message.op_id == job.op_id:
            self._device.send(job.slot, message, "signal")

    def committed(self, message: StepCommitted) -> None:
        """Acknowledge a commit to the worker, and write it to disk as soon as allowed."""
        core, device = self._core, self._device
        if (job := self._copying(message)) is None:
            return
        job.memory.copy_id, job.memory.copying_number = NO_COPY
        if not message.error:
            if core.is_draining:  # the commit could not be written later
                job.memory.persist_due_at_ms = core.now_ms
            job.memory.committed_step = max(job.memory.committed_step, message.step)
            job.progress.deaths_without_progress = 0
            core.counts["commits"] += 1
            copy_ms = message.copy_ms
            device.publish("job.committed", job=job.spec.name, step=message.step, copy_ms=copy_ms)
        self._to_job(job, message)

    def persist_due(self) -> None:
        """Order the disk writes that are due. Each job's writes take at most 1/20 of the time.
        The last commit of a job that was paused or has ended is due at once."""
        core, device = self._core, self._device
        for job in device.jobs.values():
            memory = job.memory
            if memory.is_persisting or not device.daemon.is_ready or not self.is_unsaved(job):
                continue
            if core.now_ms < memory.persist_due_at_ms:
                core.wake_at(memory.persist_due_at_ms, JOBS)
                continue
            memory.is_persisting = True
            memory.persist_id = job.op_id
            memory.persist_began_at_ms, memory.persist_due_at_ms = core.now_ms, math.inf
            name = job.spec.name
            directory = f"{core.settings.commits_dir}/{name}"
            device.daemon.send(PersistCommit(job=name, op_id=job.op_id, directory=directory))

    @staticmethod
    def is_unsaved(job: Job) -> bool:
        """Return True if the job's newest commit is in the host store but not on disk."""
        memory = job.memory
        return memory.commit_slot_bytes > 0 and memory.committed_step > memory.persisted_step

    def persisted(self, message: CommitPersisted) -> None:
        """Record that a commit is on disk, or why the write failed; training continues."""
        job = self._device.jobs.get(message.job)
        if job is None or message.op_id <= job.created_op_id:
            return
        self._has_written(job, is_well=not message.error)
        if message.error:
            self._device.publish("job.persist_failed", job=job.spec.name, error=message.error)
            self._not_saved(job, message.error)
        else:
            job.memory.persisted_step = max(job.memory.persisted_step, message.step)

    def _has_written(self, job: Job, *, is_well: bool) -> None:
        """Record the end of a write; schedule the next one unless an earlier time was requested."""
        now_ms = self._core.now_ms
        job.memory.is_persisting = False
        if job.memory.persist_due_at_ms == math.inf:
            took_ms = now_ms - job.memory.persist_began_at_ms
            pause_ms = DISK_SHARE * took_ms if is_well else self._core.settings.commit_every_ms
            job.memory.persist_due_at_ms = now_ms + pause_ms

    def _not_saved(self, job: Job, reason: str) -> None:
        job.progress.why = f"commit not on disk: {reason}"
        error = ServerUnavailable(f"job {job.spec.name}: {job.progress.why}")
        self._core.refuse_all(error, job.exporters)

    def save_last(self, job: Job) -> None:
        """Drop an ended job's commit area from the host store once its newest commit is on disk.

        A failed write is retried: there is no other copy.
        """
        is_over = job.state.state in TASK_FINAL
        if is_over and not job.memory.is_persisting and not self.is_unsaved(job):
            self.remove(job)

    def refused(self, op_id: OpId, reason: str) -> None:
        """Handle an order that the daemon refused: no other answer to it will come."""
        for job in self._device.jobs.values():
            if job.memory.persist_id == op_id and job.memory.is_persisting:
                self._has_written(job, is_well=False)
                self._not_saved(job, reason)
            if job.memory.copy_id == op_id:
                job.memory.copy_id, job.memory.copying_number = NO_COPY
                self._restart(job, op_id, f"its commit was refused: {reason}")

    def _restart(self, job: Job, op_id: OpId, reason: str) -> None:
        """Restart the job from its last commit: no acknowledgement of the new one will come."""
        if job.slot is not None and job.op_id == op_id:
            self._device.kill(self._device.workers[job.slot], reason)

    def remove(self, job: Job) -> None:
        """Release the job's commit area; its file on disk stays."""
        if job.memory.commit_slot_bytes:
            self._store.regions.release(job.commits)
            self.leaves(job)
            job.memory.commit_slot_bytes = 0
            self._core.emit(DropCommits(job=job.spec.name))

    def daemon_died(self) -> None:
        """Handle the daemon's death: slices are lost with the device memory, commits are kept."""
        for job in self._device.jobs.values():
            job.memory.lease_bytes = job.memory.lease_asked_bytes = 0
            if job.memory.is_persisting:  # the disk is sound, so the next daemon writes at once
                job.memory.is_persisting, job.memory.persist_due_at_ms = False, self._core.now_ms
            job.memory.copy_id, job.memory.copying_number = NO_COPY

    def daemon_ready(self) -> None:
        for job in self._device.jobs.values():
            if job.memory.commit_slot_bytes:
                self._tell_daemon(job)
            if job.exporters or job.state.state in TASK_FINAL:  # the write is ordered again
                job.memory.persist_due_at_ms = self._core.now_ms

    @property
    def is_quiet(self) -> bool:
        """True if no commit is being copied or written, and none is due."""
        now_ms = self._core.now_ms
        return not any(
            job.memory.copy_id
            or job.memory.is_persisting
            or (self.is_unsaved(job) and job.memory.persist_due_at_ms <= now_ms)
            for job in self._device.jobs.values()
        )
