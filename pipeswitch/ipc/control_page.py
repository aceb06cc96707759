"""The control page, whose words all processes of a device share, and doorbells that wake them.

The control page is a sealed memfd that the controller creates and every worker maps. Its words:

- ``TURN_WORD``: the *turn*, the number of the task that may compute on the device now (invariant
  I5). The process that gives the device away writes it: the worker that parks, or the controller
  when a task ended or its worker was reaped.
- ``COMPUTED_WORD``: the number of groups of a streamed model that have computed (ADR 43), and the
  operation id of the model's copy, to ignore other copies. The worker that has the turn writes it.
- ``BEGUN + slot``: the operation id of the last task that the slot's worker began to compute. If
  the worker dies, the death counts only against this task.
- ``STOP + slot``: the operation id of the task that must yield between two groups (a pass of a
  streamed model) or end after its current step (one that samples tokens), because a request waits.
- ``TAKEN_BACK + slot``: the slot's worker drops its task if the task's operation id is at most
  this one. Only tasks that have no turn, and are promised none, are taken back.
- ``RUN + slot``: 1; 0 while the GPU must not run the slot's training stream, which waits for it.
- ``MARKS + slot``: the stream's last marks, which the GPU writes: the one that it has reached in
  the low half, the one that it has passed in the high half (``devices/cuda/stream_gate.py``).
- ``CLAIM + slot``, ``NEED + slot``: the activation memory that the slot's job claims, and the
  minimum that it needs (``pipeswitch/extras/offload/activation_budget.py``).

A *doorbell* is an eventfd, one for each worker slot and one for the memory daemon. It wakes the
process, which then reads the words that it waits for. An eventfd counts, so no wake-up is lost.
"""

from __future__ import annotations

import ctypes
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
TAKEN_BACK: Final = NEED + MAX_SLOTS
RUN: Final = TAKEN_BACK + MAX_SLOTS
MARKS: Final = RUN + MAX_SLOTS

F_SEAL_FUTURE_WRITE: Final = 0x0010  # Linux 5.1; Python 3.11's fcntl does not name it


def sealed_memfd(name: str, size_bytes: int, *, reserve_bytes: int = 0) -> int:
    """Create an anonymous shared memory file of fixed size, which has no name in /dev/shm.

    It is sealed against shrinking and growing, so that no process can cause a SIGBUS in another.
    ``reserve_bytes`` are allocated now, so a lack of memory raises OSError here, not SIGBUS later.
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
    """Forbid new writable mappings of a memfd; existing mappings stay writable."""
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
        """Return the operation id of the last task the slot's worker began to compute, or 0."""
        return self._words[BEGUN + slot]

    def write_stop(self, slot: int, op_id: int) -> None:
        self._words[STOP + slot] = op_id

    def stop(self, slot: int) -> int:
        """Return the operation id of the task that the slot's worker must interrupt, or 0."""
        return self._words[STOP + slot]

    def write_taken_back(self, slot: int, op_id: int) -> None:
        self._words[TAKEN_BACK + slot] = op_id

    def is_taken_back(self, slot: int, op_id: int) -> bool:
        """Return True if the slot's worker must drop this task, which never gets its turn."""
        return self._words[TAKEN_BACK + slot] >= op_id

    def write_run(self, slot: int, is_open: bool) -> None:
        self._words[RUN + slot] = is_open

    def open_stream(self, slot: int) -> None:
        """Open the slot for a new stream, which has no marks."""
        self._words[RUN + slot], self._words[MARKS + slot] = 1, 0

    def marks(self, slot: int) -> tuple[int, int]:
        """Return the slot's last marks, (reached, passed), from one load."""
        marks = self._words[MARKS + slot] & (1 << 64) - 1
        return marks & (1 << 32) - 1, marks >> 32

    @property
    def address(self) -> int:
        """Address of the page in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def write_tiles(self, slot: int, claim: int, least: int) -> None:
        self._words[CLAIM + slot] = claim
        self._words[NEED + slot] = least

    def tiles(self) -> tuple[list[int], list[int]]:
        """Return each slot's claim of activation memory, and the minimum that its step needs."""
        return self._words[CLAIM:NEED].tolist(), self._words[NEED : NEED + MAX_SLOTS].tolist()

    def close(self) -> None:
        self._words.release()
        self._map.close()
