"""What each caller has had of a device, and whose turn it is (docs/adr/0037-turns-by-tenant.md).

Start-time fair queueing inside each priority: a caller's *tag* is the time it was given over its
weight, and the smallest goes first. The *clock* is the tag of the last turn: who begins to wait is
not behind it, so idle time earns nothing. A run is charged with its prediction when it is
dispatched, since the next one is chosen before it ends, and with the truth when it has ended.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

LONG_MS: Final = 100.0  # of one run: then the device is left to others, if need be idle


@dataclass(eq=False, slots=True)
class Account:
    """One caller's, on one device."""

    caller: str
    weight: float
    used_ms: float = 0.0  # by runs that are over
    waiting: Counter[int] = field(default_factory=Counter)  # requests, by priority; none is 0
    urgency: float = math.inf  # the most urgent of these; which one runs is the policy's to say
    since_ms: float = 0.0  # it waits with that
    tags: defaultdict[float, float] = field(default_factory=lambda: defaultdict(float))  # by it
    turn: int = 0  # the number of its last one: of equal tags the one longest ago
    running: int = 0  # runs that it has a part in
    seen_at_ms: float = -math.inf  # it asked, or was answered
    rests_until_ms: float = -math.inf


class Charge(NamedTuple):
    """A caller's part of a run that is not over."""

    account: Account
    urgency: float
    part: float  # its rows among all
    ms: float  # charged for it so far


class Accounts:
    """Of all callers that ever asked: they have keys or tokens, which the owner makes."""

    def __init__(self, weights: Mapping[str, float], max_wait_ms: float) -> None:
        self._weights = weights
        self._max_wait_ms = max_wait_ms
        self._of: dict[str, Account] = {}
        self._clock: defaultdict[float, float] = defaultdict(float)  # by urgency, as the next one
        self._had_at_ms: defaultdict[float, float] = defaultdict(lambda: -math.inf)  # a turn
        self._charged_at_ms = 0.0
        self._turns = 0

    def __iter__(self) -> Iterator[Account]:
        return iter(self._of.values())

    def of(self, caller: str) -> Account:
        """Its own; from now on it has one."""
        found = self._of.get(caller)
        if found is None:
            found = self._of[caller] = Account(caller, self._weights.get(caller, 1.0))
        return found

    def waits(self, account: Account, priority: int, arrived_at_ms: float) -> None:
        """With one request more."""
        account.waiting[priority] += 1
        account.seen_at_ms = max(account.seen_at_ms, arrived_at_ms)
        if priority < account.urgency:
            self._is_urgent(account, priority, arrived_at_ms)

    def leaves(self, account: Account, priority: int) -> None:
        """One of its requests waits no more."""
        account.waiting[priority] -= 1
        if not account.waiting[priority]:
            del account.waiting[priority]
            if priority == account.urgency:
                self._is_urgent(
                    account, min(account.waiting, default=math.inf), self._charged_at_ms
                )

    def _is_urgent(self, account: Account, urgency: float, at_ms: float) -> None:
        account.urgency, account.since_ms = urgency, at_ms
        account.tags[urgency] = max(account.tags[urgency], self._clock[urgency])

    def tag(self, account: Account, urgency: float) -> float:
        """If it waits, or were to wait, with that urgency."""
        is_counted = account.urgency == urgency
        return (
            account.tags[urgency]
            if is_counted
            else max(account.tags[urgency], self._clock[urgency])
        )

    def in_turns(
        self, waiting: Iterable[Account], switch_ms: Callable[[Account], float], now_ms: float
    ) -> list[list[Account]]:
        """Those that may have the next turn, by urgency; of each the first has it first.

        ``switch_ms``: to bring the model it wants to the device. Others go before it for so long:
        models that do not fit together would else change places for each request.
        """
        by: defaultdict[float, list[Account]] = defaultdict(list)
        for account in waiting:
            if self.rests_until_ms(account, now_ms) <= now_ms:
                by[account.urgency].append(account)
        for same in by.values():
            same.sort(key=lambda a: (a.tags[a.urgency] + switch_ms(a) / a.weight, a.turn))
        found = sorted(by.values(), key=lambda same: self._rank(same, now_ms))
        return [] if found and self._gives_way(found[0][0], now_ms) else found

    def _rank(self, same: list[Account], now_ms: float) -> tuple[float, ...]:
        """Raised by one for each ``max_wait`` in which none of that urgency had a turn. Not by the
        age of requests: those of who asks the most are the oldest."""
        urgency = same[0].urgency
        since_ms = max(self._had_at_ms[urgency], min(account.since_ms for account in same))
        waits = (now_ms - since_ms) // self._max_wait_ms if self._max_wait_ms > 0 else 0
        return (urgency - waits, -waits)

    def rests_until_ms(self, account: Account, now_ms: float) -> float:
        """Now, unless it had a long run and others are there: meanwhile they go before it."""
        if account.rests_until_ms <= now_ms:
            return now_ms
        there = [self._there_until_ms(one) for one in self._of.values() if one is not account]
        return max(now_ms, min(account.rests_until_ms, max(there, default=now_ms)))

    def _there_until_ms(self, account: Account) -> float:
        is_served = account.waiting or account.running
        return math.inf if is_served else account.seen_at_ms + self._max_wait_ms

    def _gives_way(self, account: Account, now_ms: float) -> bool:
        """It computes, and its next run is not chosen yet: before it has ended one may ask again
        that had less. Who waits for his answers has nothing in the queue all the time."""
        urgency = account.urgency
        tag, clock = account.tags[urgency], self._clock[urgency]
        return account.running > 0 and any(
            max(one.tags[urgency], clock) <= tag and one.seen_at_ms + self._max_wait_ms > now_ms
            for one in self._of.values()
            if one is not account and not one.waiting
        )

    def rests(self, now_ms: float) -> list[float]:
        """Until when each rests that waits; now: it does not."""
        return [self.rests_until_ms(one, now_ms) for one in self._of.values() if one.waiting]

    def charge(
        self, rows: Iterable[tuple[str, int]], predicted_ms: float, now_ms: float
    ) -> tuple[Charge, ...]:
        """A run is dispatched, in the turn of the first; its requests are counted as waiting yet.

        Args:
            rows: of each request, whose it is and its batch.
            predicted_ms: 0 when nothing is known of it.
        """
        shares: Counter[Account] = Counter()
        for caller, batch in rows:
            shares[self.of(caller)] += batch
        charges: list[Charge] = []
        self._charged_at_ms = now_ms
        for account, own in shares.items():
            urgency, part = account.urgency, own / shares.total()
            ms = part * predicted_ms
            if not charges:
                self._had_at_ms[urgency] = now_ms
                self._clock[urgency] = max(self._clock[urgency], account.tags[urgency])
            self._turns += 1
            account.turn = self._turns
            account.tags[urgency] += ms / account.weight
            account.running += 1
            charges.append(Charge(account, urgency, part, ms))
        return tuple(charges)

    def settle(self, charges: Iterable[Charge], took_ms: float, now_ms: float) -> None:
        """The run is over. Who had a long one rests: for as long, or as its weight allows."""
        for account, urgency, part, ms in charges:
            own_ms = part * took_ms
            account.used_ms += own_ms
            account.tags[urgency] += (own_ms - ms) / account.weight
            account.running -= 1
            account.seen_at_ms = self._had_at_ms[urgency] = now_ms
            if own_ms >= LONG_MS:
                others = [a for a in self._of.values() if self._there_until_ms(a) > now_ms]
                weight = sum(a.weight for a in others if a is not account)
                rest_ms = own_ms * min(1.0, weight / account.weight)
                account.rests_until_ms = now_ms + rest_ms
