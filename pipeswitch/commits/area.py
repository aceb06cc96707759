"""A job's commit area: a memfd with a 4 KiB header and two slots, one of which is active.

The active slot has the newest commit. The memory daemon writes the area, and the worker of a
resumed job reads it. The controller keeps the descriptor, so the area outlives both. A commit
(ADR 8) is written in four steps. If the writer dies between two, the last commit stays valid:

1. Erase the idle slot's record, because the slot's bytes will change.
2. Copy the image into the idle slot.
3. Write the idle slot's record (step, size, checksum).
4. Increase the sequence number by one, with a single aligned 8-byte store. This makes the idle slot
   the active one: the active slot is the sequence number's parity, so no second word is needed.

The header has little-endian 8-byte words: 0 magic, 1 slot bytes, 2 sequence number (0: no commit
yet), 8…11 record of slot 0, 16…19 record of slot 1. A record has sequence, step, size, checksum.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
import zlib
from collections.abc import Callable
from typing import Final

import msgspec

from ..base.errors import RemoteProtocolError
from ..base.failpoints import reach
from ..ipc.control_page import sealed_memfd

HEADER_BYTES: Final = 4096
SLOT_COUNT: Final = 2
MAX_STEP: Final = (1 << 63) - 1
MAGIC: Final = int.from_bytes(b"PSWCMT01", "little")

_MAGIC_WORD: Final = 0
_SLOT_BYTES_WORD: Final = 1
_SEQUENCE_WORD: Final = 2
_RECORD_WORDS: Final = (8, 16)
_SEQUENCE, _STEP, _SIZE, _CHECKSUM = range(4)

_LIBC: Final = ctypes.CDLL(None)
POPULATE_WRITE: Final = 23  # Linux 5.14; ``mmap`` has no name for it
CHECKSUM_PIECE_BYTES: Final = 4 << 20  # other threads can run between two pieces


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """Record of the image in a slot."""

    sequence: int  # 1, 2, …; the commit's slot is sequence % 2
    step: int  # the image is the state after the job's steps 1…step
    size_bytes: int
    checksum: int  # CRC-32 of the image


def area_bytes(slot_bytes: int) -> int:
    """Return the size of a commit area's memfd with slots of ``slot_bytes``."""
    return HEADER_BYTES + SLOT_COUNT * slot_bytes


def slot_bytes_of(descriptor: int) -> int:
    """Return the size of a slot of a commit area."""
    return (os.fstat(descriptor).st_size - HEADER_BYTES) // SLOT_COUNT


def create_area(slot_bytes: int) -> int:
    """Create an empty, sealed commit area; the caller owns the descriptor.

    Only the header's page is allocated; a writer allocates a slot before it writes it.

    Raises:
        OSError: the machine has no memory for the header.
    """
    descriptor = sealed_memfd(
        "pipeswitch-commits", area_bytes(slot_bytes), reserve_bytes=HEADER_BYTES
    )
    CommitArea(descriptor, slot_bytes, is_writer=True).close()
    return descriptor


def checksum_of(image: memoryview) -> int:
    """Return the CRC-32 of ``image``, computed in pieces so that other threads can run."""
    checksum = 0
    for start in range(0, len(image), CHECKSUM_PIECE_BYTES):
        checksum = zlib.crc32(image[start : start + CHECKSUM_PIECE_BYTES], checksum)
    return checksum


class CommitArea:
    """Mapping of a commit area. One thread of one process may write it; others may read it."""

    def __init__(self, descriptor: int, slot_bytes: int, *, is_writer: bool = False) -> None:
        """Map the area; the caller keeps the descriptor. A writer writes a missing header.

        Raises:
            RemoteProtocolError: the file is not a commit area of this slot size, or could shrink.
        """
        size_bytes = area_bytes(slot_bytes)
        _require_whole(descriptor, size_bytes)
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writer else 0)
        self.slot_bytes = slot_bytes
        self._map = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=access)
        self._bytes = memoryview(self._map)
        self._own = os.dup(descriptor) if is_writer else -1
        if is_writer:
            weakref.finalize(self, os.close, self._own)
        self._reserved_bytes, self._pinned_bytes = [0] * SLOT_COUNT, [0] * SLOT_COUNT
        self._unpin: list[Callable[[], object]] = [int] * SLOT_COUNT  # at first there is nothing
        self._words = self._bytes[:HEADER_BYTES].cast("Q")
        if is_writer and self._words[_MAGIC_WORD] == 0:
            self._words[_SLOT_BYTES_WORD] = slot_bytes
            self._words[_MAGIC_WORD] = MAGIC
        header = (self._words[_MAGIC_WORD], self._words[_SLOT_BYTES_WORD])
        if header != (MAGIC, slot_bytes):
            self.close()
            raise RemoteProtocolError(f"not a commit area with slots of {slot_bytes} bytes")

    def newest(self) -> Commit | None:
        """Return the last complete commit whose checksum matches; None if there was no commit.

        If the newest image is damaged, return the previous commit; the job recomputes some steps.

        Raises:
            RemoteProtocolError: there were commits, but none is undamaged.
        """
        while True:
            sequence = self._words[_SEQUENCE_WORD]
            if sequence == 0:
                return None
            for number in (sequence, sequence - 1):
                commit = self._record(number)
                if commit is None or checksum_of(self.image(commit)) != commit.checksum:
                    continue
                if self.is_current(commit):  # the writer may have overwritten the slot meanwhile
                    return commit
            if self._words[_SEQUENCE_WORD] == sequence:
                raise RemoteProtocolError(f"commit {sequence} and the one before it are damaged")

    def part_of_last(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return a range of the last commit, which stays valid during the next ``write``.

        Raises:
            RemoteProtocolError: the last commit is damaged, or has no such range.
        """
        commit = self.newest()
        if commit is None or commit.sequence != self._words[_SEQUENCE_WORD]:
            raise RemoteProtocolError("the last commit is damaged, and the next one needs it")
        if not 0 <= offset_bytes <= offset_bytes + size_bytes <= commit.size_bytes:
            raise RemoteProtocolError(f"the last commit has only {commit.size_bytes} bytes")
        return self.image(commit)[offset_bytes : offset_bytes + size_bytes]

    def image(self, commit: Commit) -> memoryview:
        """Return a read-only view of the commit's bytes. Check ``is_current`` after reading it."""
        return self._slot(commit.sequence)[: commit.size_bytes].toreadonly()

    def is_current(self, commit: Commit) -> bool:
        """Return True if the slot still has this commit, so bytes that were read are valid."""
        return self._record(commit.sequence) == commit

    def write(self, step: int, size_bytes: int, fill: Callable[[memoryview], None]) -> Commit:
        """Write a commit in the module's four steps; ``fill`` writes the image into its argument.
        After an error, even one that ``fill`` raises, the previous commit is still valid.

        Raises:
            RemoteProtocolError: the image is larger than a slot, or the step is invalid.
            OSError: the machine has no memory for the image.
        """
        if not 0 <= size_bytes <= self.slot_bytes:
            raise RemoteProtocolError(
                f"a commit of {size_bytes} bytes does not fit in a slot of {self.slot_bytes}"
            )
        if not 0 <= step <= MAX_STEP:
            raise RemoteProtocolError(f"a commit cannot have the step {step}")
        sequence = self._words[_SEQUENCE_WORD] + 1
        self._reserve(sequence % SLOT_COUNT, size_bytes)
        record = _RECORD_WORDS[sequence % SLOT_COUNT]
        self._words[record + _SEQUENCE] = 0
        reach("commit.struck")
        image = self._slot(sequence)[:size_bytes]
        fill(image)
        reach("commit.copied")
        commit = Commit(
            sequence=sequence, step=step, size_bytes=size_bytes, checksum=checksum_of(image)
        )
        self._words[record + _STEP] = step
        self._words[record + _SIZE] = size_bytes
        self._words[record + _CHECKSUM] = commit.checksum
        self._words[record + _SEQUENCE] = sequence
        reach("commit.recorded")
        self._words[_SEQUENCE_WORD] = sequence
        reach("commit.flipped")
        return commit

    def pin(self, commit: Commit, pin: Callable[[memoryview], Callable[[], None] | None]) -> None:
        """Pin the commit's image with ``pin`` until the area is unmapped, if a larger one of its
        slot was not pinned before."""
        slot = commit.sequence % SLOT_COUNT
        if commit.size_bytes > self._pinned_bytes[slot]:
            self._unpin[slot]()
            self._pinned_bytes[slot] = commit.size_bytes
            if (unpin := pin(self.image(commit))) is not None:
                self._unpin[slot] = last = weakref.finalize(self, unpin)
                last.atexit = False

    def prepare(self, size_bytes: int) -> None:
        """Allocate and map the idle slot, so that a next commit of this size need not wait. If
        memory is short, that commit fails."""
        slot = (self._words[_SEQUENCE_WORD] + 1) % SLOT_COUNT
        if size_bytes > self._reserved_bytes[slot]:
            with contextlib.suppress(OSError):
                self._reserve(slot, size_bytes)
                start = HEADER_BYTES + slot * self.slot_bytes
                first = ctypes.c_char.from_buffer(self._map, start - start % mmap.PAGESIZE)
                # Unlike ``mmap.madvise``, this lets other threads run.
                _LIBC.madvise(ctypes.byref(first), ctypes.c_size_t(size_bytes), POPULATE_WRITE)

    def close(self) -> None:
        """Unmap the area now, or when the last view from ``image`` is freed."""
        for unpin in self._unpin:
            unpin()
        self._words.release()
        self._bytes.release()
        with contextlib.suppress(BufferError):  # a caller still has a view
            self._map.close()

    def _reserve(self, slot: int, size_bytes: int) -> None:
        """Allocate a slot's pages; raise OSError if memory is short. A write to a page that is not
        allocated would end the process with SIGBUS instead."""
        if size_bytes > self._reserved_bytes[slot]:
            start = HEADER_BYTES + slot * self.slot_bytes
            os.posix_fallocate(self._own, start, size_bytes)
            self._reserved_bytes[slot] = size_bytes

    def _slot(self, sequence: int) -> memoryview:
        start = HEADER_BYTES + (sequence % SLOT_COUNT) * self.slot_bytes
        return self._bytes[start : start + self.slot_bytes]

    def _record(self, sequence: int) -> Commit | None:
        """Return the record of commit ``sequence``, or None if its slot has another commit."""
        first = _RECORD_WORDS[sequence % SLOT_COUNT]
        own_sequence, step, size_bytes, checksum = self._words[first : first + 4].tolist()
        if sequence == 0 or own_sequence != sequence or size_bytes > self.slot_bytes:
            return None
        return Commit(sequence=sequence, step=step, size_bytes=size_bytes, checksum=checksum)


def _require_whole(descriptor: int, size_bytes: int) -> None:
    """Refuse a file of another size, or one that its owner could shrink (SIGBUS)."""
    actual_bytes = os.fstat(descriptor).st_size
    if actual_bytes != size_bytes:
        raise RemoteProtocolError(
            f"a commit area of {size_bytes} bytes was announced, {actual_bytes} came"
        )
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RemoteProtocolError(f"a commit area must be a memfd: {error}") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise RemoteProtocolError("a commit area must be sealed against shrinking")
