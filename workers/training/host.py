"""Services of the worker process for a training session: leases, commits, reports."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from pipeswitch.base.errors import PipeSwitchError, TaskPreempted, from_wire
from pipeswitch.base.extras import JOBS
from pipeswitch.base.failpoints import reach
from pipeswitch.base.plain_files import open_plain
from pipeswitch.commits.area import CommitArea, slot_bytes_of
from pipeswitch.commits.progress import SUFFIX, Life, Progress, read_life
from pipeswitch.devices.worker_device import HostCopies, WorkerDevice, now_ms
from pipeswitch.ipc.channel import Channel
from pipeswitch.ipc.messages import worker as worker_msg
from pipeswitch.ipc.messages.base import ByteRange, ModelName, SliceRead, StepCommitted
from pipeswitch.ipc.sparse import keep_newest

HISTORY: Final = ".history"
MAX_HISTORY_BYTES: Final = 64 << 20  # a line with three numbers has about 60 bytes


class JobHost:
    """Services for a session, over the worker's channels.

    The main thread sends requests, and the termination thread delivers the replies. Session tests
    use their own hosts.
    """

    def __init__(
        self,
        message: worker_msg.RunJob,
        task: Channel,
        view: WorkerDevice,
        descriptors: Sequence[int],
    ) -> None:
        self._message = message
        self._task = task
        self._view = view
        self.device = view.device
        self.tiles: Any = None  # ``ActivationBudget``, if jobs share activation memory
        self._changed = threading.Condition()
        self._lease: (
            worker_msg.LeaseGranted | worker_msg.LeaseRefused | worker_msg.HostGranted | None
        ) = None
        self._is_read = False  # the last commit has read the slice
        self._committed: StepCommitted | None = None
        self._commit_number = 0  # number of the last commit begun: 1, 2, … in each dispatch
        self._evicting = False
        self._is_called = False  # the main thread must come to the gate
        self._publishing = 0  # published states whose copy is not finished
        self._published: worker_msg.PublishAnswered | None = None
        self._history: BinaryIO | None = None
        self._history_bytes = 0
        self._progress: Progress | None = None
        self._unseen_steps = 0
        self._has_leased = False
        *areas, last = (-1, *descriptors)
        shares = bool(message.spec.group) and "shared_ring" in JOBS.names()
        self._ring_descriptor = last if shares else -1
        # Descriptor of the job's commit area, to read from.
        self._commits = areas[-1] if shares else last

    def host_copies(self) -> HostCopies:
        """Return the device's copier of saved tensors (``WorkerDevice.host_copies``)."""
        return self._view.host_copies()

    def now_ms(self) -> float:
        """Return the monotonic time in milliseconds."""
        return now_ms()

    @functools.cached_property
    def ring(self) -> Any:
        """Ring with the batches of the job's group, opened at the first ``job.shared``; or None."""
        if self._ring_descriptor < 0:
            return None
        return JOBS.load("shared_ring")(self._ring_descriptor, self._message.job)

    # -- main thread ---------------------------------------------------------------------------

    def lease(self, slice_bytes: int, state_bytes: int, *, is_same: bool = False) -> torch.Tensor:
        """Return a zeroed, writable uint8 tensor over the slice; block until it is granted.

        The caller has left the device. A second call (the next phase) returns the first slice
        again; the last commit stays valid until the next commit.

        Args:
            slice_bytes: size for parameters, buffers, gradients, optimizer state and state area.
            state_bytes: size of the largest commit.
            is_same: only the commits need more room; the slice keeps its content.

        Raises:
            OutOfDeviceMemory, HostStoreFull: the request can never fit.
            TaskPreempted: the job was evicted while it waited.
        """
        reach("job.lease")
        self._view.synchronize()  # kernels may still use the former slice, which another task gets
        request = worker_msg.LeaseRequest(
            op_id=self._message.op_id, slice_bytes=slice_bytes, state_bytes=state_bytes
        )
        answer = self._ask(request, or_evicted=True)
        if answer is None:
            raise TaskPreempted("evicted while waiting for device memory")
        assert isinstance(answer, worker_msg.LeaseGranted)
        slice_tensor = self._view.slice_bytes(answer.offset_bytes, slice_bytes)
        if self._has_leased and not is_same:
            slice_tensor.zero_()  # the first slice is reused for the next phase
        self._has_leased = True
        reach("job.leased")
        return slice_tensor

    def charge_host(self, size_bytes: int) -> None:
        """Reserve ``size_bytes`` of host memory in total for activations; block until granted.

        Raises:
            HostStoreFull: there is no room; the earlier reservation stays.
        """
        self._ask(
            worker_msg.HostRequest(op_id=self._message.op_id, size_bytes=size_bytes),
            or_evicted=False,
        )

    def _ask(
        self, request: worker_msg.LeaseRequest | worker_msg.HostRequest, *, or_evicted: bool
    ) -> worker_msg.LeaseGranted | worker_msg.HostGranted | None:
        """Request memory and wait for the grant; return None if an eviction comes first."""
        with self._changed:
            self._lease = None
        self._task.send(request)
        with self._changed:
            self._changed.wait_for(lambda: self._lease or (or_evicted and self._evicting))
            answer = self._lease
        if isinstance(answer, worker_msg.LeaseRefused):
            raise from_wire(answer.error, answer.message, "", answer.data)
        return answer

    def begin_commit(
        self, step: int, ranges: Sequence[tuple[int, int]], older: tuple[int, int] | None = None
    ) -> None:
        """Order the daemon to copy these ranges of the slice; do not wait for the copy.

        Args:
            older: range of the last commit that is copied behind them.
        """
        reach("job.commit")
        with self._changed:
            self._is_read, self._committed = False, None
            self._commit_number += 1
        self._view.synchronize()  # all earlier kernels must run before the daemon reads
        _flush(self._history)  # a commit keeps the rows of its steps, too
        self._task.send(
            worker_msg.CommitStep(
                op_id=self._message.op_id,
                number=self._commit_number,
                step=step,
                ranges=tuple(ByteRange(offset_bytes=o, size_bytes=s) for o, s in ranges),
                older=older and ByteRange(offset_bytes=older[0], size_bytes=older[1]),
            )
        )

    def wait_commit(self, *, only_read: bool = False) -> float | None:
        """Wait until the last ``begin_commit`` is acknowledged; return its duration in ms.

        With ``only_read``, wait only until it has read the slice; return None if it is not over.

        Raises:
            PipeSwitchError: the daemon could not copy the state; the previous commit is intact.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._committed or (only_read and self._is_read))
            answer = self._committed
        if answer is None:
            return None
        if answer.error:
            raise PipeSwitchError(f"commit of step {answer.step} failed: {answer.error}")
        reach("job.committed")
        return answer.copy_ms

    @property
    def is_publishing(self) -> bool:
        """True if a commit is being copied to a model; the next commit would overwrite it."""
        return self._publishing > 0

    def await_copy(self) -> None:
        """Wait until all published states are copied, or the caller must come to the gate; it has
        left the device.

        Raises:
            TaskPreempted: the job was evicted while it waited.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._publishing or self._evicting or self._is_called
            )
            self._is_called = False  # after the wait: the call may have come before it
            if self._publishing and self._evicting:
                raise TaskPreempted("evicted while a commit was copied")

    def publish(
        self, model: str, step: int, part: str, tensors: Sequence[tuple[str, str, tuple[int, ...]]]
    ) -> None:
        """Request that the state after ``step`` becomes a model's next version; await the answer.

        Raises:
            PipeSwitchError: the model is unknown, of another client, or has other names or shapes.
            TaskPreempted: the job was evicted while it waited.
        """
        with self._changed:
            self._published = None
            self._publishing += 1
        self._task.send(
            worker_msg.PublishStep(
                op_id=self._message.op_id,
                model=ModelName(model),
                step=step,
                part=part,
                tensors=tuple(tensors),
            )
        )
        answer = self._await_publish()
        if answer is None:
            raise TaskPreempted("evicted while publishing")
        if answer.error:
            with self._changed:
                self._publishing -= 1
            raise from_wire(answer.error, answer.message, answer.hint, answer.data)

    def _await_publish(self) -> worker_msg.PublishAnswered | None:
        """Wait for the answer to ``publish``; return None if an eviction comes first."""
        with self._changed:
            self._changed.wait_for(lambda: self._published is not None or self._evicting)
            return self._published

    def restore(self) -> memoryview | None:
        """Return a private copy of the last committed image, or None if there is no commit."""
        reach("job.restore")
        image = _last_image(self._commits) if self._commits >= 0 else None
        return memoryview(image) if image is not None else None

    def remember(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line to the job's history file, which outlives the job; ignore a full disk."""
        with contextlib.suppress(OSError):
            if self._history is None:
                path = Path(self._message.log_path).with_suffix(HISTORY)
                self._history = open(path, "ab", opener=open_plain)  # noqa: SIM115 - as long as we
                self._history_bytes = os.fstat(self._history.fileno()).st_size
            line = json.dumps({"step": step, **values}).encode() + b"\n"
            if self._history_bytes + len(line) <= MAX_HISTORY_BYTES:
                self._history_bytes += self._history.write(line)

    def reached(self, step: int) -> None:
        """Store the step for the server's next start; on a full disk only this count is lost."""
        if self._progress is not None:
            self._progress.at(step)
        elif self._message.log_path:
            recomputed = self._message.steps_recomputed + self._unseen_steps
            life = Life(True, self._message.restarts, recomputed, step)
            with contextlib.suppress(OSError):
                self._progress = Progress(Path(self._message.log_path).with_suffix(SUFFIX), life)

    def resumes_at(self, step: int) -> None:
        """Report the steps that an earlier process computed and lost without reporting them, and
        drop their rows of the history."""
        if self._message.log_path:
            with contextlib.suppress(OSError):  # no row yet
                _drop_rows(Path(self._message.log_path).with_suffix(HISTORY), step)
        if self._message.restarts and self._message.log_path:
            life = read_life(Path(self._message.log_path).with_suffix(SUFFIX))
            self._unseen_steps = max(0, life.step - max(step, self._message.last_step))
            if self._unseen_steps:
                self.report("unseen", steps=self._unseen_steps)

    def end(self, message: worker_msg.JobEnded) -> None:
        """Report that the script ended or was stopped, so that the next run is not a restart."""
        if self._progress is not None:
            self._progress.ended()
        reach("job.ended")
        self._task.send(message)

    def flush(self) -> None:
        """Flush the history for other readers, and cut a long log to its newest part."""
        if self._message.log_bytes:
            with contextlib.suppress(OSError):  # if files cannot have holes, the log stays whole
                keep_newest(self._message.log_path, self._message.log_bytes)
        _flush(self._history)

    def report(self, kind: str, /, **values: Any) -> None:
        """Send progress, a log, a warning or an event to the controller. Does not block."""
        reach("job.report")
        self._task.send(worker_msg.JobReport(op_id=self._message.op_id, kind=kind, values=values))

    # -- termination thread --------------------------------------------------------------------

    def lease_answered(
        self,
        message: worker_msg.LeaseGranted | worker_msg.LeaseRefused | worker_msg.HostGranted,
        descriptors: Sequence[int],
    ) -> None:
        """Deliver the answer to ``lease`` or ``charge_host``, with a commit area if it has one."""
        with self._changed:
            for descriptor in descriptors:  # the main thread, which reads the area, waits meanwhile
                if self._commits >= 0:
                    os.close(self._commits)
                self._commits = descriptor
            self._lease = message
            self._changed.notify_all()

    def commit_answered(self, message: SliceRead | StepCommitted) -> None:
        with self._changed:
            if message.number != self._commit_number:
                return  # an earlier answer, sent again; the awaited commit is still being copied
            if isinstance(message, SliceRead):
                self._is_read = True
            else:
                self._committed = message
            self._changed.notify_all()

    def publish_answered(
        self, message: worker_msg.PublishAnswered | worker_msg.PublishCopied
    ) -> None:
        with self._changed:
            if isinstance(message, worker_msg.PublishAnswered):
                self._published = message
            else:
                self._publishing = max(0, self._publishing - 1)  # may be an earlier process's copy
            self._changed.notify_all()

    def call(self) -> None:
        """End a wait for copies: the main thread must come to the gate."""
        with self._changed:
            self._is_called = True
            self._changed.notify_all()

    def wake(self) -> None:
        """End a wait for memory, because an eviction was requested."""
        with self._changed:
            self._evicting = True
            self._changed.notify_all()


def _last_image(descriptor: int) -> bytes | None:
    """Return a private copy of the newest complete commit; the area may be overwritten later."""
    area = CommitArea(descriptor, slot_bytes_of(descriptor))
    try:
        commit = area.newest()
        return bytes(area.image(commit)) if commit is not None else None
    finally:
        area.close()


def _flush(file: BinaryIO | None) -> None:
    if file is not None:
        with contextlib.suppress(OSError):
            file.flush()


def _drop_rows(path: Path, step: int) -> None:
    """Cut a history off before its first row of ``step`` or a later step, and before a cut row."""
    with open(path, "r+b", opener=open_plain) as file:
        rows = file.read()
        end = len(rows)
        while end:
            begin = rows.rfind(b"\n", 0, end - 1) + 1
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if json.loads(rows[begin:end])["step"] < step and rows[end - 1 : end] == b"\n":
                    break
            end = begin
        file.truncate(end)
