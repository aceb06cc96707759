"""Request pool: shared memory with the inputs and the replies of requests.

The pool is one sealed memfd, mapped here and by every worker (``workers/inference/pool.py``). A
payload is copied into it once or, if it is large and comes inline (TCP), received into it. A large
reply is sent from it. An accepted inference holds a ``PoolAllocation``: a slab with its inputs,
freed when its answer is known, and a slab for its reply, freed when the reply has left. All
sessions of a caller use one share of the pool.

Owned by the frontend and used by its thread alone, except ``fill``.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from ...base.errors import QueueFull
from ...base.quotas import FairQuota
from ...ipc.messages.base import SlabTensor
from ...ipc.sparse import UsedRanges
from ...programs.interface.layout import aligned
from ...wire.slabs import SLAB_ALIGN_BYTES, SlabPool
from .validation import CheckedInput

NUMPY_BYTES: Final = 64 << 10  # numpy copies this much or more, without the interpreter lock
_RELEASED: Final = -1  # no slab lies there, so a second release raises KeyError


class PoolAllocation(msgspec.Struct, kw_only=True, eq=False):
    """Slabs of the pool that one request holds. Offsets are bytes from the pool's start."""

    holder: str  # caller whose share it counts toward
    held_bytes: int  # requested bytes, without the padding to whole pages
    input_offset_bytes: int
    reply_offset_bytes: int
    reply_bytes: int
    counted_bytes: int  # bytes that count toward the holder's share: whole pages
    tenant: str = ""  # its slabs lie in this tenant's file
    has_inputs: bool = False  # they were received into their slab

    def place(
        self, inputs: Sequence[CheckedInput], *, in_reply: bool = False
    ) -> tuple[SlabTensor, ...]:
        """Return the places of inputs (``in_reply``: of a function's results) in call order."""
        at = self.reply_offset_bytes if in_reply else self.input_offset_bytes
        return tuple(
            [
                SlabTensor(
                    name=item.name,
                    dtype=item.dtype,
                    shape=item.shape,
                    offset_bytes=at + item.offset_bytes,
                    size_bytes=item.size_bytes,
                )
                for item in inputs
            ]
        )


class LentSlab(np.ndarray[Any, np.dtype[np.uint8]]):
    """Slab into which a connection receives inputs. It is freed with the last view of it, unless a
    request gets it."""

    offset_bytes: int
    owner: tuple[str, str]  # holder, and tenant of the file
    end: weakref.finalize[Any, Any]


class _File:
    """A mapping of a memfd."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, 0)
        self.memory = memoryview(self._map)
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.slabs = UsedRanges(descriptor, len(self.memory))  # used if tenants are separate

    def close(self) -> None:
        del self.bytes
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._map.close()


class RequestPool:
    """Mapping of the pool, its slabs, and the bytes that each caller holds.

    If tenants are separate, each has a file of the pool's size. One allocator manages the slabs of
    all files. A slab has pages only in its tenant's file, and only while it is taken (ADR 23).

    Invariants (``check``): those of the allocator and the shares; if no slab is taken, no caller
    holds bytes.
    """

    def __init__(self, descriptor: int, file_of: Callable[[str], int] | None = None) -> None:
        """Map the memfd. The caller still owns the descriptor.

        Args:
            file_of: returns a tenant's memfd, if tenants are separate. The caller owns the memfds
                and keeps them open.
        """
        self._file_of = file_of
        self._files = {"": _File(descriptor)}
        self._slabs = SlabPool(len(self.memory))
        self._shares = FairQuota(self._slabs.capacity_bytes)
        self._lent_bytes = 0
        self.share_bytes = max(self._shares.left(""), 1)  # share of a caller that is alone
        self.on_release: Callable[[], None] | None = None  # set while requests wait for memory
        self.give_up: Callable[[], bool] = lambda: False  # evicts a cached block, if there is one
        self.call_soon: Callable[[Callable[[], None]], None] = operator.call

    @property
    def memory(self) -> memoryview:
        """Memory of the file that all tenants share, or of the owner's file."""
        return self._files[""].memory

    def memory_of(self, allocation: PoolAllocation | None) -> memoryview:
        """Return the memory of an allocation's file; None: of the shared or the owner's file."""
        return self._files[allocation.tenant if allocation is not None else ""].memory

    def memory_of_tenant(self, tenant: str) -> memoryview:
        """Return the memory of a tenant's file, which is already mapped."""
        return self._files[tenant].memory

    def close(self) -> None:
        """Unmap the pool. Messages that still wait to be sent keep the mapping."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    # ---- slabs ---------------------------------------------------------------------------------

    def lend(self, holder: str, size_bytes: int, tenant: str) -> memoryview | None:
        """Return memory of a tenant's file for inputs that begin to arrive.

        None: there is little room, so they are received elsewhere and copied. Slow senders hold
        slabs for long, so half of what is free without these stays for others.
        """
        counted_bytes = _paged(size_bytes)
        limit_bytes = (self._slabs.free_bytes + self._lent_bytes) // 2 - self._lent_bytes
        file = self._files.get(tenant)
        if file is None or counted_bytes > min(self._shares.left(holder), limit_bytes):
            return None
        if (offset := self._slabs.take(size_bytes)) is None:
            return None
        self._shares.add(holder, counted_bytes)
        self._lent_bytes += counted_bytes
        if self._file_of is not None:
            file.slabs.keep(offset, counted_bytes)
        lent = file.bytes[offset : offset + size_bytes].view(LentSlab)
        lent.offset_bytes, lent.owner = offset, (holder, tenant)
        free = functools.partial(self._free_lent, holder, offset, tenant)
        lent.end = weakref.finalize(lent, lambda: self.call_soon(free))  # on any thread
        lent.end.atexit = False
        return lent.data

    def _free_lent(self, holder: str, offset_bytes: int, tenant: str) -> None:
        self._lent_bytes -= self._slabs.size_of(offset_bytes)
        self.free_block(holder, offset_bytes, 0, tenant)
        if self.on_release is not None:
            self.on_release()

    def lent_for(
        self, inputs: Sequence[CheckedInput], tensors: Sequence[Any], holder: str, tenant: str
    ) -> LentSlab | None:
        """Return the slab into which inputs were received, if in the model's order."""
        lent = getattr(tensors[0], "obj", None) if tensors else None
        if not isinstance(lent, LentSlab) or lent.owner != (holder, tenant):
            return None
        return lent if [one.frame for one in inputs] == [*range(len(tensors))] else None

    def reserve(
        self,
        holder: str,
        input_bytes: int,
        reply_bytes: int,
        tenant: str = "",
        lent: LentSlab | None = None,
    ) -> PoolAllocation:
        """Allocate slabs for a request's inputs and its reply in a tenant's file: both, or neither.
        The inputs may be in a slab that was ``lent`` to the same holder.

        Raises:
            QueueFull: the share is used up, or no hole is large enough; the error has the sizes.
        """
        sizes_bytes = (reply_bytes,) if lent is not None else (reply_bytes, input_bytes)
        wanted_bytes, counted_bytes = sum(sizes_bytes), _paged(*sizes_bytes)
        self._check_share(holder, wanted_bytes, counted_bytes, tenant)
        slabs = list[Any](map(self._slabs.take, sizes_bytes))
        if None in slabs:
            for offset in slabs:
                if offset is not None:
                    self._slabs.free(offset)
            if self.give_up():
                return self.reserve(holder, input_bytes, reply_bytes, tenant, lent)
            raise self._full(wanted_bytes)
        self._shares.add(holder, counted_bytes)
        if self._file_of is not None:
            for offset in slabs:
                self._files[tenant].slabs.keep(offset, self._slabs.size_of(offset))
        if lent is not None and lent.end.detach():
            slabs.append(lent.offset_bytes)
            counted_bytes += self._slabs.size_of(lent.offset_bytes)
            self._lent_bytes -= self._slabs.size_of(lent.offset_bytes)
        return PoolAllocation(
            holder=holder,
            held_bytes=input_bytes + reply_bytes,
            counted_bytes=counted_bytes,
            input_offset_bytes=slabs[1],
            reply_offset_bytes=slabs[0],
            reply_bytes=reply_bytes,
            tenant=tenant,
            has_inputs=lent is not None,
        )

    def take_block(self, holder: str, size_bytes: int, beside_bytes: int, tenant: str) -> int:
        """Allocate a block of a cache in a tenant's file; return its offset.

        Args:
            beside_bytes: bytes of this process outside the pool that the block needs; they count
                toward the holder's share, too.

        Raises:
            QueueFull: the holder's share is used up, or no hole is large enough.
        """
        counted_bytes = _paged(size_bytes) + beside_bytes
        self._check_share(holder, size_bytes, counted_bytes, tenant)
        while (offset := self._slabs.take(size_bytes, at_end=True)) is None:
            if not self.give_up():
                raise self._full(size_bytes)
        self._shares.add(holder, counted_bytes)
        if self._file_of is not None:
            self._files[tenant].slabs.keep(offset, self._slabs.size_of(offset))
        return offset

    def free_block(self, holder: str, offset_bytes: int, beside_bytes: int, tenant: str) -> None:
        """Free a block, and its part of the holder's share. KeyError: it was freed before."""
        size_bytes = self._slabs.size_of(offset_bytes)
        self._slabs.free(offset_bytes)
        if self._file_of is not None:
            self._files[tenant].slabs.drop(offset_bytes)
        self._shares.give(holder, size_bytes + beside_bytes)

    def _check_share(self, holder: str, wanted_bytes: int, counted_bytes: int, tenant: str) -> None:
        """Evict cached blocks until the holder's share has room; then map the tenant's file.
        Raises QueueFull: no cached block is left, or the file cannot be mapped."""
        while counted_bytes > self._shares.left(holder):
            if not self.give_up():
                raise QueueFull(
                    f"this client's waiting requests use {self._shares.of(holder)} bytes of the "
                    f"pool; {wanted_bytes} more exceed its share of the free part",
                    hint="wait for answers, or raise [server] pool",
                    limit="pool",
                    requested_bytes=wanted_bytes,
                )
        if tenant not in self._files:
            self._open(tenant)

    def _full(self, wanted_bytes: int) -> QueueFull:
        return QueueFull(
            f"the request pool is full: {wanted_bytes} bytes wanted, "
            f"{self._slabs.free_bytes} of {self._slabs.capacity_bytes} free",
            hint="try again, or raise [server] pool",
            limit="pool",
            requested_bytes=wanted_bytes,
            largest_free_bytes=self._slabs.largest_free_bytes,
        )

    def _open(self, tenant: str) -> None:
        """Map a tenant's file at its first request.
        Raises QueueFull: this process has no descriptor or no address range left."""
        assert self._file_of is not None, f"the pool has no file of {tenant!r}"
        try:
            self._files[tenant] = _File(self._file_of(tenant))
        except OSError as error:
            raise QueueFull(
                f"the server has no memory for another tenant's requests: {error.strerror}",
                hint="try again later",
                limit="memory",
            ) from None

    def tidy(self, tenant: str) -> None:
        """Return the pages outside of a tenant's slabs to the system, if tenants are separate.
        A worker may have touched more than its slabs. Does nothing after ``close``."""
        file = self._files.get(tenant)
        if self._file_of is not None and file is not None:
            file.slabs.tidy()

    def release_inputs(self, allocation: PoolAllocation) -> None:
        """Free the inputs' slab: their last reader is done. KeyError: it was released before."""
        offset, allocation.input_offset_bytes = allocation.input_offset_bytes, _RELEASED
        size_bytes = self._slabs.size_of(offset)
        self._slabs.free(offset)
        allocation.counted_bytes -= size_bytes
        self._shares.give(allocation.holder, size_bytes)
        if self._file_of is not None:
            self._files[allocation.tenant].slabs.drop(offset)

    def release_reply(self, allocation: PoolAllocation) -> None:
        """Free the reply's slab, and the bytes of the holder's share that the allocation still has.

        KeyError: it was released before.
        """
        offset, allocation.reply_offset_bytes = allocation.reply_offset_bytes, _RELEASED
        self._slabs.free(offset)
        if self._file_of is not None:
            self._files[allocation.tenant].slabs.drop(offset)
        self._shares.give(allocation.holder, allocation.counted_bytes)
        if self.on_release is not None:
            self.on_release()

    # ---- bytes ---------------------------------------------------------------------------------

    def copy_rows(self, tenant: str, places: Iterable[tuple[int, int]], rows: Any) -> None:
        """Copy rows to ``places`` (offset and size in bytes) in a tenant's file."""
        memory, at = self.memory_of_tenant(tenant), 0
        for offset, size in places:
            memory[offset : offset + size] = rows[at : at + size]
            at += size

    def fill(self, tensors: Sequence[SlabTensor], payload: Sequence[Any], tenant: str = "") -> None:
        """Copy each tensor's buffer to its place, and clear the bytes between and after them.

        A worker's kernels can read whole pages, so these must hold only this request's bytes.
        Any thread may call this; numpy releases the interpreter lock during the copy.
        """
        file = self._files[tenant]
        filled_end = tensors[0].offset_bytes if tensors else 0
        for tensor, data in zip(tensors, payload, strict=True):  # in ascending order of offset
            at = tensor.offset_bytes
            file.memory[filled_end:at] = bytes(at - filled_end)
            filled_end = at + len(data)
            if len(data) < NUMPY_BYTES:
                file.memory[at:filled_end] = data
            else:
                np.copyto(file.bytes[at:filled_end], np.frombuffer(data, dtype=np.uint8))
        end = aligned(filled_end, SLAB_ALIGN_BYTES)
        file.memory[filled_end:end] = bytes(end - filled_end)

    def clear_beside(self, owner: PoolAllocation | None, outputs: Sequence[SlabTensor]) -> None:
        """Clear the rest of the pages of outputs that become inputs, as ``fill`` does."""
        memory = self.memory_of(owner)
        starts = sorted(one.offset_bytes for one in outputs)[1:]
        ends = sorted(one.offset_bytes + one.size_bytes for one in outputs)
        starts += [aligned(end, SLAB_ALIGN_BYTES) for end in ends[-1:]]
        for end, start in zip(ends, starts, strict=True):
            memory[end:start] = bytes(max(0, start - end))

    # ---- statistics ----------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        return self._slabs.capacity_bytes

    @property
    def free_bytes(self) -> int:
        return self._slabs.free_bytes

    def as_dict(self) -> dict[str, int]:
        """Return the pool's part of ``stats``."""
        return {
            "pool_capacity_bytes": self._slabs.capacity_bytes,
            "pool_free_bytes": self._slabs.free_bytes,
            "pool_slabs": self._slabs.slab_count,
        }

    @property
    def is_empty(self) -> bool:
        """True if no client holds a slab or bytes."""
        return not self._slabs.slab_count and not self._shares.held

    def check(self) -> None:
        """Assert the invariants."""
        self._slabs.check()
        self._shares.check()
        assert self._slabs.slab_count or not self._shares.held


def _paged(*sizes_bytes: int) -> int:
    """Return the total bytes of one slab for each size; a slab has whole pages, at least one."""
    pages = 0
    for size_bytes in sizes_bytes:
        pages += -(-(size_bytes or 1) // SLAB_ALIGN_BYTES)
    return pages * SLAB_ALIGN_BYTES
