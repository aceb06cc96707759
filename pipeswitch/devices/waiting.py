"""How a worker's thread waits on the host: for its turn on the board, or for an arrival word."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from ..ipc.board import Board, ring


def now_ms() -> float:
    """Milliseconds of the system-wide monotonic clock."""
    return time.monotonic() * 1000.0


class Waiter:
    """A worker's own bell, and those of the others; the board's mapping is its own."""

    def __init__(
        self,
        *,
        board: int,
        bell: int,
        bells: Sequence[int],
        on_wake: Callable[[], None] | None = None,
    ) -> None:
        """The descriptors stay the caller's; bells must outlive this object.

        Args:
            bell: this worker's own eventfd; ``bells`` are all of them, by slot.
            on_wake: called each time a bell rang for something else than what is waited for.
                It may raise to leave the wait: a wait for a cancelled transmission ends so.
        """
        self._bell = bell
        self._bells = tuple(bells)
        self._on_wake = on_wake
        self.board = Board(board)

    def wait_turn(self, turn: int) -> float:
        """Block until the board's turn is exactly ``turn``; milliseconds blocked."""
        board = self.board
        return self.wait(lambda: board.turn == turn)

    def wait(self, is_true: Callable[[], bool]) -> float:
        """No wake-up is lost: the word is written before the bell, and read after it."""
        if is_true():
            return 0.0
        began_at_ms = now_ms()
        while not is_true():
            if self._on_wake is not None:
                self._on_wake()
            os.eventfd_read(self._bell)
        return now_ms() - began_at_ms

    def raise_turn(self, turn: int, slot: int) -> None:
        """Give the device away: write the turn, ring that slot's bell."""
        self.board.write_turn(turn)
        ring(self._bells[slot])

    def close(self) -> None:
        self.board.close()
