"""The control page: one small shared page with the turn word, and how doorbells are rung.

The control page is a sealed memfd made by the controller and mapped by every worker. Word 0 holds
the *turn*: the number of the task that may compute on the device now (invariant I5). It is written
by the process that gives the device away: the stopping worker when it has parked, or the controller
when a task ended or its worker was reaped. Word ``BEGUN + slot`` holds the operation id of the last
task that the worker in that slot began to compute: after its death it tells whether that task can
be blamed. Word ``STOP + slot`` holds the operation id of the task that is to be interrupted between
two groups, since a request waits: a pass of a streamed model yields. Word 1 says how far a
model that streams has computed (ADR 43): its copy's operation id and how many groups, in one
number, so that a late one of another pass is not believed. The worker that has the turn writes it.
Words ``CLAIM + slot`` and ``NEED + slot`` say what the slot's job takes of the memory for
activations (``workers/training/activation_budget.py``).

A *doorbell* is an eventfd, one per worker slot, and the last one the memory daemon's: it wakes the
process, which then looks at the words it waits for. No wake-up is lost: the eventfd's counter stays
until it is read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final

BOARD_BYTES: Final = 4096
TURN_WORD: Final = 0
COMPUTED_WORD: Final = 1
MAX_GROUPS: Final = 1 << 20
BEGUN: Final = 16
MAX_SLOTS: Final = 64
STOP: Final = BEGUN + MAX_SLOTS
CLAIM: Final = STOP + MAX_SLOTS
NEED: Final = CLAIM + MAX_SLOTS

F_SEAL_FUTURE_WRITE: Final = 0x0010  # Linux 5.1; Python 3.11's fcntl does not name it


def sealed_memfd(name: str, size_bytes: int, *, reserve_bytes: int = 0) -> int:
    """Create an anonymous shared memory file of fixed size, which has no name in /dev/shm.

    Sealed against shrinking and growing, so no peer can make another die of SIGBUS.
    ``reserve_bytes``: so many are taken now; a full machine is an OSError here, no signal later.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        if reserve_bytes:
            os.posix_fallocate(descriptor, 0, reserve_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def seal_against_writers(descriptor: int) -> None:
    """No new writable mapping from now on; mappings that exist stay writable."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)


def new_doorbell() -> int:
    """Return a blocking eventfd."""
    return os.eventfd(0, os.EFD_CLOEXEC)


def ring(doorbell: int) -> None:
    """Ring a doorbell."""
    os.eventfd_write(doorbell, 1)


class Board:
    """Mapping of the control page; aligned 64-bit loads and stores are atomic."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, BOARD_BYTES)
        self._words = memoryview(self._map).cast("q")

    @property
    def turn(self) -> int:
        return self._words[TURN_WORD]

    def write_turn(self, turn: int) -> None:
        self._words[TURN_WORD] = turn

    def write_computed(self, op_id: int, count: int) -> None:
        self._words[COMPUTED_WORD] = op_id * MAX_GROUPS + count

    def has_computed(self, op_id: int, count: int) -> bool:
        """Return True if ``count`` groups of this operation id's copy have computed."""
        said_op_id, said_count = divmod(self._words[COMPUTED_WORD], MAX_GROUPS)
        return not count or (said_op_id == op_id and said_count >= count)

    def write_begun(self, slot: int, op_id: int) -> None:
        self._words[BEGUN + slot] = op_id

    def begun(self, slot: int) -> int:
        """Operation id of the last task the slot's worker began to compute; 0: none."""
        return self._words[BEGUN + slot]

    def write_stop(self, slot: int, op_id: int) -> None:
        self._words[STOP + slot] = op_id

    def stop(self, slot: int) -> int:
        """Return the operation id of the task that the slot's worker must interrupt, or 0."""
        return self._words[STOP + slot]

    def write_tiles(self, slot: int, claim: int, least: int) -> None:
        self._words[CLAIM + slot] = claim
        self._words[NEED + slot] = least

    def tiles(self) -> tuple[list[int], list[int]]:
        """Return each slot's claim of activation memory, and the minimum that its step needs."""
        return self._words[CLAIM:NEED].tolist(), self._words[NEED : NEED + MAX_SLOTS].tolist()

    def close(self) -> None:
        self._words.release()
        self._map.close()
