"""The daemon's side of training commits: copies slices to commit areas, and commits to disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pipeswitch.base.errors import RemoteProtocolError
from pipeswitch.base.failpoints import reach
from pipeswitch.commits.area import CommitArea
from pipeswitch.commits.commit_files import ImageChanged, write_commit
from pipeswitch.devices.memory import DeviceMemory
from pipeswitch.devices.order_checks import check_pieces, check_range
from pipeswitch.devices.worker_device import now_ms
from pipeswitch.ipc.messages.base import JobName, OpId, SliceRead, StepCommitted
from pipeswitch.ipc.messages.daemon import CommitCopy, CommitPersisted, OpenCommits, PersistCommit

log = logging.getLogger(__name__)

NO_COPY: Final = (OpId(0), 0)
"""Operation id and number of the last copy, for a job without copies."""

PERSIST_TRIES = 3
"""Maximum tries to write a commit. Two new commits overwrite it; the next try writes the newest."""


class CommitAreas:
    """The jobs' open commit areas.

    The control thread calls ``open``, ``close`` and ``area_for``. Other threads call ``copy`` and
    ``persist`` with an area, which stays mapped until its last user drops it, even after ``close``.
    """

    def __init__(self, device: DeviceMemory, send: Callable[[SliceRead], None]) -> None:
        self._device, self._send = device, send
        self._areas: dict[JobName, CommitArea] = {}
        self._newest: dict[JobName, tuple[OpId, int]] = {}  # operation id and number of last copy

    def open(self, order: OpenCommits, descriptor: int) -> None:
        """Map a job's area, in place of an earlier one of the job.

        Raises:
            RemoteProtocolError: the descriptor is not a commit area of this size.
        """
        self._areas[order.job] = CommitArea(descriptor, order.slot_bytes, is_writer=True)

    def close(self, job: JobName) -> None:
        """Drop a job's area; it is unmapped when no copy or write uses it."""
        self._areas.pop(job, None)
        self._newest.pop(job, None)

    def was_accepted(self, order: CommitCopy) -> bool:
        """Return True if this copy, or a later one of its operation id, was ordered before.

        A repeated order must not be copied: the slice's owner may write the slice again by now.
        """
        op_id, number = self._newest.get(order.job, NO_COPY)
        return order.op_id == op_id and order.number <= number

    def area_for(self, order: CommitCopy | PersistCommit) -> CommitArea:
        """Check an order, and return the commit area for it.

        Raises:
            RemoteProtocolError: the job has no area, a piece is out of bounds, or the id is stale.
        """
        area = self._areas.get(order.job)
        if area is None:
            raise RemoteProtocolError(f"job {order.job!r} has no open commit area")
        if isinstance(order, PersistCommit):
            return area
        newest, _ = self._newest.get(order.job, NO_COPY)
        if order.op_id < newest:
            raise RemoteProtocolError(f"operation {order.op_id} is stale: {newest} has committed")
        check_range("slice", order.slice_offset_bytes, order.slice_bytes, self._device.arena_bytes)
        size_bytes = check_pieces(order.slice_bytes, order.ranges)
        size_bytes += 0 if order.older is None else order.older.size_bytes
        check_range("commit image", 0, size_bytes, area.slot_bytes)
        self._newest[order.job] = (order.op_id, order.number)
        return area

    def copy(self, order: CommitCopy, area: CommitArea) -> StepCommitted:
        """Copy a slice to the commit area. Blocks; called on the to-host thread.

        The job waits only until the slice is read. The checksum takes longer than that.
        """
        began_at_ms = now_ms()
        size_bytes = sum(piece.size_bytes for piece in order.ranges)
        error, older = "", memoryview(b"")

        def fill(image: memoryview) -> None:
            self._device.read_slice(order.slice_offset_bytes, order.ranges, image[:size_bytes])
            image[size_bytes:] = older
            reach("commit.read")
            self._send(SliceRead(job=order.job, op_id=order.op_id, number=order.number))

        copied_at_ms = 0.0
        try:
            if order.older is not None:
                older = area.part_of_last(order.older.offset_bytes, order.older.size_bytes)
            commit = area.write(order.step, size_bytes + len(older), fill)
            copied_at_ms = now_ms()
            area.pin(commit, self._device.pin)  # training continues meanwhile
            area.prepare(commit.size_bytes)
        except (RemoteProtocolError, OSError) as problem:
            error = str(problem)
        reach("commit.acknowledge")
        return StepCommitted(
            job=order.job,
            op_id=order.op_id,
            number=order.number,
            step=order.step,
            copy_ms=(copied_at_ms or now_ms()) - began_at_ms,
            error=error,
        )

    def persist(self, order: PersistCommit, area: CommitArea) -> CommitPersisted:
        """Write the newest commit to disk. Blocks; called on the disk thread.

        New commits may be made meanwhile. The next one uses the other slot, but the one after it
        overwrites the image that is being read. Then the write starts again with the newest commit.
        """
        step, error = 0, ""
        try:
            for _ in range(PERSIST_TRIES):
                commit = area.newest()
                if commit is None:
                    error = "nothing has been committed yet"
                    break
                step = commit.step
                try:
                    write_commit(
                        Path(order.directory),
                        commit.step,
                        area.image(commit),
                        is_still_whole=lambda commit=commit: area.is_current(commit),  # type: ignore[misc]
                        is_lasting=order.is_lasting,
                    )
                    break
                except ImageChanged:
                    continue
            else:
                error = f"newer commits overwrote the image in each of {PERSIST_TRIES} tries"
        except OSError as problem:
            error = f"{os.strerror(problem.errno or 0)}: {problem.filename or order.directory}"
        except RemoteProtocolError as problem:
            error = problem.message
        except ValueError as problem:  # a NUL in a path
            error = f"{problem}: {order.directory!r}"
        except Exception as problem:  # a bug must not stop training; a later commit is tried
            log.exception("job=%s not persisted", order.job)
            error = f"{type(problem).__name__}: {problem}"
        return CommitPersisted(job=order.job, op_id=order.op_id, step=step, error=error)
