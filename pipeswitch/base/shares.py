"""Who may have how much of what all share: bytes of memory or disk, places in a queue. Pure.

A holder may take more while what it has then is at most ``ALPHA`` times what stays free (a dynamic
threshold: Choudhury and Hahne, 1998). So one alone has three quarters, and who comes next finds
three quarters of the rest, however many places the first would still take: nothing is set aside for
those who are not there, and no list of them is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from .errors import QueueFull

ALPHA: Final = 3


def left(size: int, held: int, own: int) -> int:
    """How much more one may take that has ``own`` of the ``held`` of ``size``."""
    return max(0, (ALPHA * (size - held) - own) // (ALPHA + 1))


class Shares:
    """Of one thing, by holder.

    Invariants (``check``): what is held is the sum over holders.
    """

    def __init__(self, size: int, what: str = "") -> None:
        """``what``: is held, as a refused holder reads it."""
        self.size = size
        self.held = 0
        self._what = what
        self._of: dict[str, int] = {}

    def of(self, holder: str) -> int:
        """How much it has."""
        return self._of.get(holder, 0)

    def left(self, holder: str) -> int:
        """How much more it may take."""
        return left(self.size, self.held, self._of.get(holder, 0))

    def refusal(self, holder: str, amount: int) -> QueueFull | None:
        """Why it may not take so much; what is larger than any share it may if nothing is held."""
        if not self.held or amount <= self.left(holder):
            return None
        return QueueFull(
            f"{self._what}: {self.of(holder)} of {self.size} are this client's, {amount} more are "
            "over its share of what is free",
            hint="wait for answers, then send again",
            requested=amount,
        )

    def take(self, holder: str, amount: int) -> None:
        """Raises QueueFull: see ``refusal``."""
        if refusal := self.refusal(holder, amount):
            raise refusal
        self.add(holder, amount)

    def add(self, holder: str, amount: int) -> None:
        """``take`` where there is room: ``left`` was asked."""
        self.held += amount
        self._of[holder] = self._of.get(holder, 0) + amount

    def give(self, holder: str, amount: int) -> None:
        """It has them no more."""
        self.held -= amount
        if rest := self._of.pop(holder, 0) - amount:
            self._of[holder] = rest

    @contextmanager
    def holding(self, holder: str, amount: int) -> Iterator[None]:
        """``take``, and ``give`` at the end."""
        self.take(holder, amount)
        try:
            yield
        finally:
            self.give(holder, amount)

    def check(self) -> None:
        """Assert the invariants."""
        assert self.held == sum(self._of.values())
        assert all(amount >= 0 for amount in self._of.values())
