"""A job's commit area: one memfd, a 4 KiB header and two slots, of which one is the commit.

The memory daemon writes, the worker that resumes the job reads, the controller keeps the
descriptor so that it outlives both. A commit (ADR 8) is written in four steps, and
``kill -9`` of the writer between any two leaves the last complete commit in place:

1. the idle slot's record is struck out, since its bytes are about to change;
2. the image is copied into the idle slot;
3. the idle slot's record (step, size, checksum) is written;
4. the sequence number goes up by one. It is a single aligned 8-byte store, and it is the flip:
   the active slot is the sequence number's parity, so there is no second word to disagree with.

Header, little-endian 8-byte words: 0 magic, 1 slot bytes, 2 sequence number (0: no commit yet),
8…11 the record of slot 0 and 16…19 that of slot 1: sequence number, step, size, checksum.
"""

from __future__ import annotations

import contextlib
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

CHECKSUM_PIECE_BYTES: Final = 4 << 20  # the interpreter lock is let go and taken once a piece


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """Record of the image in a slot."""

    sequence: int  # 1, 2, …; the commit's slot is sequence % 2
    step: int  # the job's steps 1…step are in the image
    size_bytes: int
    checksum: int  # CRC-32 of the image


def area_bytes(slot_bytes: int) -> int:
    """Size of the memfd of a commit area whose images take at most ``slot_bytes``."""
    return HEADER_BYTES + SLOT_COUNT * slot_bytes


def slot_bytes_of(descriptor: int) -> int:
    """Return the size of a slot of a commit area."""
    return (os.fstat(descriptor).st_size - HEADER_BYTES) // SLOT_COUNT


def create_area(slot_bytes: int) -> int:
    """Create an empty, sealed commit area; the caller owns the descriptor.

    It takes a page alone, and no time: who writes a slot reserves it.

    Raises:
        OSError: the machine has no memory for it.
    """
    descriptor = sealed_memfd(
        "pipeswitch-commits", area_bytes(slot_bytes), reserve_bytes=HEADER_BYTES
    )
    CommitArea(descriptor, slot_bytes, is_writer=True).close()
    return descriptor


def checksum_of(image: memoryview) -> int:
    """CRC-32 of ``image``, in pieces so that other threads get their turn."""
    checksum = 0
    for start in range(0, len(image), CHECKSUM_PIECE_BYTES):
        checksum = zlib.crc32(image[start : start + CHECKSUM_PIECE_BYTES], checksum)
    return checksum


class CommitArea:
    """A mapping of a commit area. One process writes it, from one thread; any number read."""

    def __init__(self, descriptor: int, slot_bytes: int, *, is_writer: bool = False) -> None:
        """Map it; the descriptor stays the caller's. A writer formats an area that is all zeros.

        Raises:
            RemoteProtocolError: not a commit area of this slot size, or one that could shrink.
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
        self._reserved_bytes = [0] * SLOT_COUNT
        self._words = self._bytes[:HEADER_BYTES].cast("Q")
        if is_writer and self._words[_MAGIC_WORD] == 0:
            self._words[_SLOT_BYTES_WORD] = slot_bytes
            self._words[_MAGIC_WORD] = MAGIC
        header = (self._words[_MAGIC_WORD], self._words[_SLOT_BYTES_WORD])
        if header != (MAGIC, slot_bytes):
            self.close()
            raise RemoteProtocolError(f"not a commit area with slots of {slot_bytes} bytes")

    def newest(self) -> Commit | None:
        """Return the last complete commit, its checksum verified; None if there has been none.

        If the active image is damaged and the one before it is still whole, that one: an older
        commit costs recomputed steps, a damaged one would be merged.

        Raises:
            RemoteProtocolError: there were commits and none is whole.
        """
        while True:
            sequence = self._words[_SEQUENCE_WORD]
            if sequence == 0:
                return None
            for number in (sequence, sequence - 1):
                commit = self._record(number)
                if commit is None or checksum_of(self.image(commit)) != commit.checksum:
                    continue
                if self.is_current(commit):  # the writer may have come round to it meanwhile
                    return commit
            if self._words[_SEQUENCE_WORD] == sequence:
                raise RemoteProtocolError(f"commit {sequence} and the one before it are damaged")

    def image(self, commit: Commit) -> memoryview:
        """Return the commit's bytes in place, read-only. Check ``is_current`` afterwards."""
        return self._slot(commit.sequence)[: commit.size_bytes].toreadonly()

    def is_current(self, commit: Commit) -> bool:
        """Return True if the slot still holds that commit, so that what was read of it is whole."""
        return self._record(commit.sequence) == commit

    def write(self, step: int, size_bytes: int, fill: Callable[[memoryview], None]) -> Commit:
        """Write a commit as told above; ``fill`` puts the image into the view it is given.

        Raises:
            RemoteProtocolError: larger than a slot, or no step; the commit before stays.
            OSError: the machine has no memory for it; the commit before stays.
            Whatever ``fill`` raises: the commit before stays.
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

    def close(self) -> None:
        """Unmap. Views from ``image`` must be gone; else the mapping goes with the last of them."""
        self._words.release()
        self._bytes.release()
        with contextlib.suppress(BufferError):  # a caller still has a view
            self._map.close()

    def _reserve(self, slot: int, size_bytes: int) -> None:
        """Else a write could be a signal, on a machine that is full."""
        if size_bytes > self._reserved_bytes[slot]:
            start = HEADER_BYTES + slot * self.slot_bytes
            os.posix_fallocate(self._own, start, size_bytes)
            self._reserved_bytes[slot] = size_bytes

    def _slot(self, sequence: int) -> memoryview:
        start = HEADER_BYTES + (sequence % SLOT_COUNT) * self.slot_bytes
        return self._bytes[start : start + self.slot_bytes]

    def _record(self, sequence: int) -> Commit | None:
        """Return the record of commit ``sequence``, or None if its slot holds something else."""
        first = _RECORD_WORDS[sequence % SLOT_COUNT]
        own_sequence, step, size_bytes, checksum = self._words[first : first + 4].tolist()
        if sequence == 0 or own_sequence != sequence or size_bytes > self.slot_bytes:
            return None
        return Commit(sequence=sequence, step=step, size_bytes=size_bytes, checksum=checksum)


def _require_whole(descriptor: int, size_bytes: int) -> None:
    """Refuse a file that is too small, or that its owner could shrink under us (SIGBUS)."""
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
