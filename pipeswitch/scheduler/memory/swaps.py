"""Swaps: a suspended job's slice is copied to an image in host memory, and later back. Pure.

The job's process waits meanwhile, so its script loses nothing, and no step is computed again.

    scheduler          worker               memory daemon
    HideSlice      ──▶ waits in its gate, hides the slice
                   ◀── SliceHidden
    CopySliceOut   ───────────────────────▶ copies, then zeroes the range
                   ◀─────────────────────── SliceCopied: the range is free
      … a request, or another job, uses the memory …
    CopySliceIn    ───────────────────────▶ copies to a range, perhaps another one
                   ◀─────────────────────── SliceCopied
    ShowSlice      ──▶ maps the range at the slice's former addresses
    GrantTurn      ──▶ continues

If the memory is needed again during the copy in, the copy is cancelled; the image is still whole.
"""

from __future__ import annotations

from ...ipc.messages import worker as worker_msg
from ...ipc.messages.base import JobName, OpId
from ...ipc.messages.daemon import CancelSlice, CopySliceIn, CopySliceOut, SliceCopied
from ..state.core import JOBS, RESIDENCY
from ..state.device_state import DeviceState
from ..state.events import CreateImage, DropImage
from ..state.records import NO_OP_ID, Job, JobSwap, Worker
from ..state.regions import Region
from ..state.states import TASK_SWAPS, TaskEvent, TaskState
from .allocators import ArenaAllocator, HostStoreAllocator, gib
from .slices import Slices


class Swaps:
    """Swapped jobs of a device."""

    def __init__(
        self,
        device: DeviceState,
        arena: ArenaAllocator,
        slices: Slices,
        store: HostStoreAllocator,
    ) -> None:
        self._core = device.core
        self._device = device
        self._arena = arena
        self._slices = slices
        self._store = store

    def refusal(self, job: Job) -> str:
        """Return why the job cannot be swapped out, so that it is evicted; empty if it can."""
        core, region = self._core, self._arena.regions.get(job.slice)
        if region is None:
            return "it has no slice yet"
        if job.memory.lease_asked_bytes:
            return "its script waits for a larger slice"
        if core.settings.activation_memory_bytes:
            return "its step may use activation memory that other jobs wait for"
        if self._is_full(job):
            return f"max_swapped is {self._device.settings.max_swapped}"
        free_bytes = self._store.free_for_images_bytes
        if region.size_bytes > free_bytes:
            return f"the host store has {gib(free_bytes)} left for its {gib(region.size_bytes)}"
        return job.swap.error

    def _is_full(self, job: Job) -> bool:
        """Return True if as many other jobs as allowed are swapped."""
        jobs, most = self._device.jobs.values(), self._device.settings.max_swapped
        return sum(one.state.state in TASK_SWAPS and one is not job for one in jobs) >= most

    def cost_ms(self, job: Job, size_bytes: int) -> float:
        """Return what it costs a job to leave and to come back; 0: not measured yet."""
        free_bytes = self._store.free_for_images_bytes + self._store.images.get(job.spec.name, 0)
        if self._is_full(job) or job.swap.error or size_bytes > free_bytes:
            return job.timing.start_ms
        return job.swap.cost_ms or 2 * self._device.predictions.swap_out_ms(size_bytes)

    def out(self, job: Job, cause: str) -> None:
        """Begin to swap a suspended job out; ``refusal`` is empty."""
        core, region, slot = self._core, self._arena.regions.get(job.slice), job.slot
        assert region is not None
        assert slot is not None
        job.state.apply(TaskEvent.SWAP_OUT, cause)
        self._store.images[job.spec.name] = region.size_bytes
        core.emit(CreateImage(job=job.spec.name, size_bytes=region.size_bytes))
        job.swap = JobSwap(
            swap_id=core.next_op_id(),
            size_bytes=region.size_bytes,
            offset_bytes=region.offset_bytes,
            asked_at_ms=core.now_ms,
            cost_ms=job.swap.cost_ms,
        )
        job.progress.swaps += 1
        job.progress.why = cause
        core.counts["job_swaps"] += 1
        core.dirty |= JOBS
        core.wake_at(core.now_ms + core.settings.evict_grace_ms, JOBS)
        order = worker_msg.HideSlice(op_id=job.op_id, swap_id=job.swap.swap_id)
        self._device.send(slot, order, "signal")
        self._device.publish("job.swapping_out", job=job.spec.name, cause=cause)

    def hidden(self, worker: Worker, message: worker_msg.SliceHidden) -> None:
        """Copy out a slice that its process does not use any more."""
        job = self._device.job_of(worker, message.op_id)
        if job is None or job.swap.swap_id != message.swap_id or job.swap.is_hidden:
            self._core.counts["stale_messages"] += 1
            return
        if job.state.state is not TaskState.SWAPPING_OUT:
            return  # its script has ended
        job.swap.is_hidden = True
        self._device.daemon.send(
            CopySliceOut(
                job=job.spec.name,
                op_id=message.swap_id,
                offset_bytes=job.swap.offset_bytes,
                size_bytes=job.swap.size_bytes,
            ),
            image_of=job.spec.name,
        )

    def lets_ask(self, job: Job) -> bool:
        """Return True if a job may request a slice; a process that has hidden its slice may not.

        A script that waits for a slice does not wait in its gate. So a swap that has only been
        ordered ends; the job is evicted if its memory is still needed.
        """
        if job.state.state is TaskState.SWAPPING_OUT and not job.swap.is_hidden:
            job.state.apply(TaskEvent.SWAP_FAILED, "its script requests a slice")
            self._core.dirty |= JOBS | RESIDENCY
            self._show(job)
        return job.state.state not in TASK_SWAPS

    def bring_in(self, job: Job, region: Region) -> None:
        """Copy a swapped job's image to its new range."""
        swap = job.swap
        job.state.apply(TaskEvent.SWAP_IN, f"slice at {region.offset_bytes}")
        job.memory.lease_asked_bytes, job.memory.lease_bytes = 0, region.size_bytes
        swap.swap_id, swap.goes_in = self._core.next_op_id(), True
        swap.offset_bytes, swap.blocked_at_ms = region.offset_bytes, 0.0
        job.progress.why = ""
        self._device.daemon.send(
            CopySliceIn(
                job=job.spec.name,
                op_id=swap.swap_id,
                offset_bytes=region.offset_bytes,
                size_bytes=swap.size_bytes,
            ),
            image_of=job.spec.name,
        )

    def turn_round(self, job: Job, cause: str) -> None:
        """Cancel a copy in, because the memory is needed."""
        job.state.apply(TaskEvent.SWAP_OUT, cause)
        job.progress.why = cause
        self._device.daemon.send(CancelSlice(op_id=job.swap.swap_id))

    def copied(self, message: SliceCopied) -> None:
        """Handle the end of a copy, out or in."""
        jobs, core = self._device.jobs.values(), self._core
        job = next((one for one in jobs if one.swap.swap_id == message.op_id), None)
        if job is None or job.state.state not in (TaskState.SWAPPING_OUT, TaskState.SWAPPING_IN):
            core.counts["stale_messages"] += 1
            return
        swap, name = job.swap, job.spec.name
        what, size = f"{name} {'in' if swap.goes_in else 'out'}", {"bytes": swap.size_bytes}
        self._device.span("slices", what, message.began_at_ms, message.ended_at_ms, **size)
        took_ms = message.ended_at_ms - message.began_at_ms
        core.dirty |= JOBS | RESIDENCY
        if job.state.state is TaskState.SWAPPING_IN:
            if message.error:
                self._kill(job, f"its slice was not copied back: {message.error}")
                return
            swap.cost_ms += took_ms
            job.state.apply(TaskEvent.SWAPPED_IN, f"{took_ms:.0f} ms")
            self._show(job)
        elif swap.goes_in:  # turned round: the image is whole, the range perhaps half written
            self._slices.release(job.slice)
            self._is_out(job, "turned round")
        elif message.error:
            swap.error = f"its slice was not copied out: {message.error}"
            job.state.apply(TaskEvent.SWAP_FAILED, message.error)
            self._show(job)
        else:
            swap.cost_ms = took_ms
            self._device.predictions.swapped_out(swap.size_bytes, took_ms, core.now_ms)
            if message.needs_scrub:
                self._slices.release(job.slice)
            else:  # the daemon has zeroed it
                self._arena.regions.release(job.slice)
            self._is_out(job, f"{took_ms:.0f} ms")

    def _is_out(self, job: Job, cause: str) -> None:
        job.state.apply(TaskEvent.SWAPPED_OUT, cause)
        job.memory.lease_bytes, job.memory.lease_asked_bytes = 0, job.swap.size_bytes
        self._device.publish("job.swapped", job=job.spec.name)

    def _show(self, job: Job) -> None:
        """Let the process use its slice again."""
        self._drop_image(job.spec.name)
        assert job.slot is not None
        job.swap.swap_id, job.swap.is_hidden = NO_OP_ID, False
        order = worker_msg.ShowSlice(op_id=job.op_id, offset_bytes=job.swap.offset_bytes)
        self._device.send(job.slot, order, "signal")
        self._device.publish("job.swapped_in", job=job.spec.name)

    def refused(self, op_id: OpId, reason: str) -> None:
        """Handle an order that the daemon refused; it has done nothing."""
        now_ms = self._core.now_ms
        self.copied(SliceCopied(op_id=op_id, began_at_ms=now_ms, ended_at_ms=now_ms, error=reason))

    def leaves(self, job: Job, cause: str) -> None:
        """Make a job unwind whose user ordered it. It first comes in, if that is possible in time;
        else its process is killed, and its steps since the last commit are lost."""
        core, swap = self._core, job.swap
        if job.wanted == "cancel":
            self._kill(job, cause)
            return
        swap.leaves_at_ms = swap.leaves_at_ms or core.now_ms + core.settings.evict_grace_ms
        if core.now_ms >= swap.leaves_at_ms:
            self._kill(job, f"{cause}; its memory on the device did not become free in time")
        else:
            core.wake_at(swap.leaves_at_ms, JOBS)

    def is_blocked(self, job: Job) -> None:
        """Limit the time for which a swapped job waits for its own range (``slices_move``)."""
        core, swap = self._core, job.swap
        if self._device.settings.slices_move:
            return
        swap.blocked_at_ms = swap.blocked_at_ms or core.now_ms
        due_ms = swap.blocked_at_ms + core.settings.evict_grace_ms
        if core.now_ms >= due_ms:
            self._kill(job, "the range of its slice is in use; it starts from its last commit")
        else:
            core.wake_at(due_ms, JOBS)

    def _kill(self, job: Job, reason: str) -> None:
        assert job.slot is not None
        self._device.kill(self._device.workers[job.slot], reason, blame=False)

    def reaped(self, name: JobName) -> None:
        """Drop the image of a job whose process has ended."""
        self._drop_image(name)
        job = self._device.jobs.get(name)
        if job is not None:
            job.swap = JobSwap()

    def _drop_image(self, name: JobName) -> None:
        if self._store.images.pop(name, None) is not None:
            self._core.emit(DropImage(job=name))

    def check(self) -> None:
        """Assert that each swapped job has an image, and a range only during a copy."""
        for name, job in self._device.jobs.items():
            is_swapped = job.state.state in TASK_SWAPS
            assert (name in self._store.images) == is_swapped or job.slot is None, name
            has_range = self._arena.regions.get(job.slice) is not None
            if is_swapped and self._device.daemon.is_ready:
                assert has_range == (job.state.state is not TaskState.SWAPPED), job.state.story
