"""Limits on bytes (``FairQuota``), requests (``TurnQueue``) and connections (``Places``). Pure.

A holder of a quota may take more while its amount is at most ``ALPHA`` times the free amount (a
dynamic threshold: Choudhury and Hahne, 1998). So a single holder gets at most three quarters, and
the next holder three quarters of the rest, even if the first one could use more. Nothing is
reserved for absent holders, and no list of holders is needed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Generic, TypeVar

from .errors import QueueFull

ALPHA: Final = 3
MAX_PASSES: Final = 64  # urgent items that may go before a waiting item that is not urgent
CLAIMS_S: Final = 0.05  # minimum time between comparisons of all connections; one takes 1 ms
T = TypeVar("T")
Claim = tuple[bool, float]
"""``(has had an answer, idle since)`` of a connection. The one with the lowest claim is closed."""


def left(size: int, used: int, own: int) -> int:
    """Return how much more a holder of ``own`` may take while ``used`` of ``size`` is in use."""
    return max(0, (ALPHA * (size - used) - own) // (ALPHA + 1))


class FairQuota:
    """Amounts of one resource by holder.

    Invariant (``check``): ``held`` is the sum over all holders.
    """

    def __init__(self, size: int, what: str = "", limit: str = "") -> None:
        """Set up quotas for ``size`` units; errors have ``what`` they are, and the ``limit``."""
        self.size = size
        self.held = 0
        self._what, self._limit = what, limit
        self._of: dict[str, int] = {}

    def of(self, holder: str) -> int:
        """Return the amount that a holder has."""
        return self._of.get(holder, 0)

    def left(self, holder: str) -> int:
        """Return how much more a holder may take."""
        return left(self.size, self.held, self._of.get(holder, 0))

    def refusal(self, holder: str, amount: int) -> QueueFull | None:
        """Return the error if a holder may not take ``amount``, else None.

        If no holder has anything, any amount is allowed, even one that exceeds a share.
        """
        if not self.held or amount <= self.left(holder):
            return None
        return QueueFull(
            f"{self._what}: {self.of(holder)} of {self.size} belong to this client; {amount} more "
            "exceed its share of the free part",
            hint="wait for answers, then try again",
            limit=self._limit,
            requested=amount,
        )

    def take(self, holder: str, amount: int) -> None:
        """Take an amount, or raise QueueFull if ``refusal`` returns an error."""
        if refusal := self.refusal(holder, amount):
            raise refusal
        self.add(holder, amount)

    def add(self, holder: str, amount: int) -> None:
        """Take an amount without a check; the caller has checked ``left``."""
        self.held += amount
        self._of[holder] = self._of.get(holder, 0) + amount

    def give(self, holder: str, amount: int) -> None:
        """Return ``amount`` from a holder to the resource."""
        self.held -= amount
        if rest := self._of.pop(holder, 0) - amount:
            self._of[holder] = rest

    @contextmanager
    def holding(self, holder: str, amount: int) -> Iterator[None]:
        """Take an amount for the block and return it at the end; raise QueueFull like ``take``."""
        self.take(holder, amount)
        try:
            yield
        finally:
            self.give(holder, amount)

    def check(self) -> None:
        """Assert the invariants."""
        assert self.held == sum(self._of.values())
        assert all(amount >= 0 for amount in self._of.values())


class TurnQueue(Generic[T]):
    """Queue for one resource in which callers take turns. Pure.

    Urgent items go first. After ``MAX_PASSES`` of them, one other item goes.
    """

    def __init__(self) -> None:
        self._lines: tuple[dict[str, deque[T]], dict[str, deque[T]]] = {}, {}  # urgent, others
        self._passes = 0

    def put(self, caller: str, one: T, *, is_urgent: bool = False) -> None:
        self._lines[not is_urgent].setdefault(caller, deque()).append(one)

    def take(self) -> T | None:
        """Return the next item, of the caller whose last turn is longest ago; None if empty."""
        urgent, others = self._lines
        is_urgent = bool(urgent) and (not others or self._passes < MAX_PASSES)
        self._passes = self._passes + 1 if is_urgent and others else 0
        lines = urgent if is_urgent else others
        if not lines:
            return None
        caller = next(iter(lines))
        line = lines.pop(caller)
        one = line.popleft()
        if line:
            lines[caller] = line
        return one

    def clear(self) -> list[T]:
        """Remove and return all waiting items."""
        items = [one for lines in self._lines for line in lines.values() for one in line]
        self._lines = {}, {}
        return items


class Places(Generic[T]):
    """Places for connections. If none is free, the connection with the weakest claim loses its own.

    Comparing all for each new one of a crowd would take too long. So the candidates of a comparison
    that had no answer are kept for the next ones.
    """

    def __init__(
        self, size: int, size_per_address: int, claim: Callable[[T, float], Claim | None]
    ) -> None:
        """If ``claim(connection, now_s)`` is None, the connection may not be evicted."""
        self._size, self._size_per_address, self._claim = size, size_per_address, claim
        self.addresses: dict[T, str] = {}  # connection -> its address
        self.by_address: Counter[str] = Counter()  # number of connections
        # Address (None: all) -> time of a comparison, and candidates; the last is evicted first.
        self._claims: dict[str | None, tuple[float, list[tuple[Claim, T]]]] = {}

    def enter(self, one: T, address: str, now_s: float, evict: Callable[[T], None]) -> bool:
        """Take a place; if needed, evict a connection. False: there is none."""
        is_crowded = self.by_address[address] >= self._size_per_address
        if is_crowded or len(self.addresses) >= self._size:
            if (least := self._least(address if is_crowded else None, now_s)) is None:
                return False
            self.leave(least)  # at once: others may arrive before its end is reported
            evict(least)
        self.addresses[one] = address
        self.by_address[address] += 1
        return True

    def leave(self, one: T) -> None:
        """Return a connection's place, if it has one."""
        if (address := self.addresses.pop(one, None)) is not None:
            self.by_address[address] -= 1
            if not self.by_address[address]:
                del self.by_address[address]

    def _least(self, address: str | None, now_s: float) -> T | None:
        """Return the connection with the weakest claim, of ``address`` or, if None, of all."""
        compared_at_s, strangers = self._claims.get(address, (-CLAIMS_S, []))
        while strangers:
            before, other = strangers.pop()
            if other in self.addresses and self._claim(other, now_s) == before:  # still idle
                return other
        if now_s - compared_at_s < CLAIMS_S:
            return None
        idle = [
            (claim, other)
            for other, its_address in self.addresses.items()
            if address in (None, its_address) and (claim := self._claim(other, now_s)) is not None
        ]
        idle.sort(key=lambda one: one[0], reverse=True)
        least = idle.pop()[1] if idle else None
        recent = {key: one for key, one in self._claims.items() if now_s - one[0] < CLAIMS_S}
        self._claims = recent | {address: (now_s, [one for one in idle if not one[0][0]])}
        return least
