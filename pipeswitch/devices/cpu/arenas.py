"""Arenas of models on the cpu device: one file, or one for each tenant (ADR 23).

Only the memory daemon writes an arena. It begins with the fences.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

import numpy as np

from ...base.errors import RemoteProtocolError
from ...ipc.control_page import seal_against_writers, sealed_memfd
from ...ipc.messages.daemon import TransmitModel
from ...ipc.sparse import keep_only
from ..order_checks import FENCE_BYTES

ZEROS: Final = memoryview(bytes(1 << 20))

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class OneFile:
    """One arena for all tenants: populated at the start, and sealed against other writers.

    The copy thread calls all methods except ``take`` and ``open_tenant``, as in ``FilePerTenant``.
    """

    def __init__(self, arena_bytes: int, fence_count: int) -> None:
        """Allocate the memory.

        Raises:
            OSError: not enough memory.
        """
        descriptor = sealed_memfd("pipeswitch-models", arena_bytes, reserve_bytes=arena_bytes)
        # Write zeros: a page that is only reserved is cleared when it is mapped, which takes three
        # times as long. Populate the mapping: page faults of the copy thread would slow a switch.
        for start in range(0, arena_bytes, len(ZEROS)):
            os.pwrite(descriptor, ZEROS[: arena_bytes - start], start)
        self._map = mmap.mmap(descriptor, arena_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        seal_against_writers(descriptor)
        self.descriptors = [descriptor]
        self._fences = memoryview(self._map)[: fence_count * FENCE_BYTES].cast("I")
        self._bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)

    def open_tenant(self, tenant: str, descriptor: int) -> None:
        raise RemoteProtocolError("tenants share this arena")

    def take(self, order: TransmitModel) -> None:
        """Assign a region to the order's tenant; other tenants' tasks no longer read it.

        Raises:
            RemoteProtocolError: this tenant has no file.
        """
        if order.tenant:
            raise RemoteProtocolError("tenants share this arena")

    def write(self, tenant: str, start: int, source: Bytes) -> None:
        """Copy with ``np.copyto``, which releases the interpreter lock."""
        np.copyto(self._bytes[start : start + len(source)], source)

    def clear(self, tenant: str, start: int, end: int) -> None:
        """Zero a range of less than a page, or of less than 2 MiB after a streamed group."""
        self._bytes[start:end] = 0

    def signal_fence(self, tenant: str, index: int, value: int) -> None:
        self._fences[index] = value

    def tidy(self) -> None:
        """Do nothing: all pages belong to the one file. Called after a copy."""

    def close(self) -> None:
        self._fences.release()
        del self._bytes
        self._map.close()
        os.close(self.descriptors[0])


class _TenantsFile:
    """Arena file of one tenant; only the fences are mapped, system calls write the rest."""

    def __init__(self, descriptor: int, fence_count: int) -> None:
        self.descriptor = os.dup(descriptor)
        self._map = mmap.mmap(self.descriptor, fence_count * FENCE_BYTES)
        self.fences = memoryview(self._map).cast("I")

    def close(self) -> None:
        self.fences.release()
        self._map.close()
        os.close(self.descriptor)


class FilePerTenant:
    """Sparse files, one for each tenant. An offset is leased to one tenant, in all files at once.

    Invariant (after ``tidy``): a page exists only in the file of the tenant that leases its offset.
    All files together have at most the arena's pages, plus the fences of each file.
    """

    def __init__(self, arena_bytes: int, fence_count: int) -> None:
        self.descriptors: list[int] = []  # empty: the controller sends a worker its tenant's file
        self._arena_bytes = arena_bytes
        self._fence_count = fence_count
        self._files: dict[str, _TenantsFile] = {}
        self._places: list[tuple[int, int, str]] = []  # disjoint (start, end, tenant)

    def open_tenant(self, tenant: str, descriptor: int) -> None:
        size_bytes = os.fstat(descriptor).st_size
        if tenant in self._files or size_bytes != self._arena_bytes:
            raise RemoteProtocolError(
                f"a file of {size_bytes} bytes for tenant {tenant!r}; each has one, of "
                f"{self._arena_bytes}"
            )
        self._files[tenant] = _TenantsFile(descriptor, self._fence_count)

    def take(self, order: TransmitModel) -> None:
        if order.tenant not in self._files:
            raise RemoteProtocolError(f"tenant {order.tenant!r} has no file")
        start, end = order.arena_offset_bytes, order.arena_offset_bytes + order.region_bytes
        self._places = [
            (low, high, tenant)
            for first, last, tenant in self._places
            for low, high in ((first, min(last, start)), (max(first, end), last))
            if low < high
        ]
        self._places.append((start, end, order.tenant))

    def tidy(self) -> None:
        """Free the pages of offsets that a tenant no longer leases; takes 35 ms for 64 MiB.

        It runs after a copy, so the copy's request does not wait for it. The next copy does.
        """
        places, fences = self._places, (0, self._fence_count * FENCE_BYTES)
        for tenant, file in list(self._files.items()):
            own = [(low, high) for low, high, whose in places if whose == tenant]
            keep_only(file.descriptor, [fences, *own], self._arena_bytes)

    def write(self, tenant: str, start: int, source: Bytes) -> None:
        """Write with a system call, which neither clears new pages first nor maps them here."""
        descriptor, rest = self._files[tenant].descriptor, source.data
        while rest:
            count = os.pwrite(descriptor, rest, start)
            start, rest = start + count, rest[count:]

    def clear(self, tenant: str, start: int, end: int) -> None:
        os.pwrite(self._files[tenant].descriptor, bytes(max(0, end - start)), start)

    def signal_fence(self, tenant: str, index: int, value: int) -> None:
        self._files[tenant].fences[index] = value

    def close(self) -> None:
        for file in self._files.values():
            file.close()


Models = OneFile | FilePerTenant
