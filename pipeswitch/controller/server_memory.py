"""The server's shared memory; the controller keeps it open, so it survives other processes."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Hashable, Sequence
from typing import Protocol

from ..commits.area import CommitArea, create_area, slot_bytes_of
from ..ipc.control_page import Board, new_doorbell, sealed_memfd
from ..ipc.messages.base import JobName, ResourceLimits
from ..ipc.sparse import read_only


class DeviceShare:
    """Memory that the processes of one device share; the controller keeps it alive."""

    def __init__(self, sizes: ResourceLimits) -> None:
        self.control_page_descriptor = sealed_memfd("pipeswitch-board", 4096)
        self.control_page = Board(self.control_page_descriptor)
        self.doorbells = [new_doorbell() for _ in range(sizes.doorbell_count)]
        self.arena: list[int] = []  # descriptors from DaemonReady; each new daemon sends its own
        self.arena_handle = b""
        self._arenas: dict[str, tuple[int, int]] = {}  # tenant -> (writable, read-only)
        self._arena_bytes = sizes.arena_bytes

    def take_arena(self, descriptors: list[int], handle: bytes) -> None:
        self.arena = descriptors
        self.arena_handle = handle

    def arena_of(self, tenant: str) -> tuple[int, int]:
        """Return a tenant's arena file twice: writable for the daemon, read-only for workers.

        Raises:
            OSError: this process has no descriptor left.
        """
        if tenant not in self._arenas:
            descriptor = sealed_memfd("pipeswitch-models", self._arena_bytes)
            try:
                self._arenas[tenant] = descriptor, read_only(descriptor)
            except OSError:
                os.close(descriptor)
                raise
        return self._arenas[tenant]

    def drop_arenas(self) -> None:
        """Close the arenas after the daemon and the workers that used them have exited."""
        close_soon([*self.arena, *itertools.chain(*self._arenas.values())])
        self.arena = []
        self._arenas.clear()

    def close(self) -> None:
        self.control_page.close()
        self.drop_arenas()
        for descriptor in (self.control_page_descriptor, *self.doorbells):
            os.close(descriptor)


class GroupMemory(Protocol):
    """Memory that the jobs of a group share (seam ``GROUPS``)."""

    def of(self, group: str, reader: Hashable) -> int: ...
    def count(self, group: str, jobs: int) -> None: ...
    def leave(self, reader: Hashable) -> None: ...
    def close(self) -> None: ...


class ServerMemory:
    """Memory that all devices share: a model's bytes are stored once for all devices."""

    def __init__(self, sizes: ResourceLimits, *, reserves_pool: bool = False) -> None:
        """``reserves_pool``: allocate the pool's pages now, because each cuda worker pins them."""
        self.store = sealed_memfd("pipeswitch-store", sizes.store_bytes)
        reserved = sizes.pool_bytes if reserves_pool else 0
        self.pool = sealed_memfd("pipeswitch-pool", sizes.pool_bytes, reserve_bytes=reserved)
        self._pools = {"": self.pool}  # by tenant; only "" unless tenants are separate
        self._pool_bytes = sizes.pool_bytes
        self.commits: dict[JobName, int] = {}
        self.images: dict[JobName, int] = {}  # images of swapped jobs' slices
        self.groups: Sequence[GroupMemory] = ()
        self.environment = -1  # file with the server's environment, for the owner's code

    def pool_of(self, tenant: str) -> int:
        """Return a tenant's file of the request pool.

        Raises:
            OSError: this process has no descriptor left.
        """
        if tenant not in self._pools:
            self._pools[tenant] = sealed_memfd("pipeswitch-pool", self._pool_bytes)
        return self._pools[tenant]

    def create_commits(self, job: JobName, slot_bytes: int) -> None:
        """Create a job's commit area; copy the newest commit of an area that it replaces."""
        descriptor = create_area(slot_bytes)
        old = self.commits.get(job)
        if old is not None:
            _carry_over(old, descriptor)
        self.drop_commits(job)
        self.commits[job] = descriptor

    def slot_bytes(self, job: JobName) -> int:
        """Return the maximum size of the job's commits in bytes; 0 without a commit area."""
        return slot_bytes_of(self.commits[job]) if job in self.commits else 0

    def drop_commits(self, job: JobName) -> None:
        old = self.commits.pop(job, None)
        if old is not None:
            close_soon([old])

    def drop_image(self, job: JobName) -> None:
        old = self.images.pop(job, None)
        if old is not None:
            close_soon([old])

    def close(self) -> None:
        for descriptor in (
            self.store,
            *self._pools.values(),
            *self.commits.values(),
            *self.images.values(),
        ):
            os.close(descriptor)
        if self.environment >= 0:
            os.close(self.environment)


def close_soon(descriptors: list[int]) -> None:
    """Close descriptors on another thread, or on this one if no thread can be started. The last
    close of a memfd or a removed file frees its pages, which takes 150 ms per GiB."""
    if descriptors:
        try:
            threading.Thread(target=lambda: [*map(os.close, descriptors)], name="close").start()
        except RuntimeError:
            for descriptor in descriptors:
                os.close(descriptor)


def _carry_over(old: int, new: int) -> None:
    """Copy the newest commit into a larger area."""
    source = CommitArea(old, slot_bytes_of(old))
    target = CommitArea(new, slot_bytes_of(new), is_writer=True)
    try:
        commit = source.newest()
        if commit is not None:
            image = source.image(commit)

            def fill(view: memoryview) -> None:
                view[:] = image

            target.write(commit.step, commit.size_bytes, fill)
    finally:
        target.close()
        source.close()
