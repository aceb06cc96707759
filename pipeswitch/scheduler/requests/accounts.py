"""What each caller has had of a device, and whose turn it is (docs/adr/0037-turns-by-tenant.md).

Start-time fair queueing inside each priority: a caller's *tag* is the time it was given over its
weight, and the smallest goes first. The *clock* is the tag of the last turn: who begins to wait is
not behind it, so idle time earns nothing. A run is charged with its prediction when it is
dispatched, since the next one is chosen before it ends, and with the truth when it has ended.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

LONG_MS: Final = 100.0  # of one run: then the device is left to others, if need be idle
MOST_DEATHS: Final = 3  # of workers, that a caller may cause one soon after the other
BAR_MS: Final = 1000.0  # after one more; twice as long after the next
HALF_MS: Final = 60_000.0  # in which half of them are forgotten
UNKNOWN_MS: Final = 1.0  # charged for a run of which nothing is known, until it has ended


@dataclass(eq=False, slots=True)
class Account:
    """One caller's, on one device."""

    caller: str
    weight: float
    used_ms: float = 0.0  # by runs that are over
    waiting: Counter[int] = field(default_factory=Counter)  # requests, by priority; none is 0
    urgency: float = math.inf  # the most urgent of these; which one runs is the policy's to say
    tags: defaultdict[float, float] = field(default_factory=lambda: defaultdict(float))  # by it
    running: int = 0  # runs that it has a part in
    seen_at_ms: float = -math.inf  # it asked, or was answered
    rests_until_ms: float = -math.inf
    deaths: float = 0.0  # of workers, in its runs; they are forgotten by and by
    died_at_ms: float = -math.inf
    barred_until_ms: float = -math.inf


class Charge(NamedTuple):
    """For a run that is not over."""

    urgency: float
    ms: float
    parts: dict[Account, float]  # by rows


class Accounts:
    """Of all callers that ever asked: they have keys or tokens, which the owner makes.

    Attributes:
        again_at_ms: when one that gave way in the last ``in_turns`` may do so no more.
    """

    def __init__(self, weights: Mapping[str, float], max_wait_ms: float) -> None:
        self._weights = weights
        self._max_wait_ms = max_wait_ms
        self._of: dict[str, Account] = {}
        self._clock: defaultdict[float, float] = defaultdict(float)  # by urgency, as the next one
        self.again_at_ms = math.inf
        self._had_at_ms: dict[float, float] = {}  # a turn, or nobody who waits for one

    def __iter__(self) -> Iterator[Account]:
        return iter(self._of.values())

    def of(self, caller: str) -> Account:
        """Its own; from now on it has one."""
        if caller not in self._of:
            self._of[caller] = Account(caller, self._weights.get(caller, 1.0))
        return self._of[caller]

    def tag(self, account: Account, urgency: float) -> float:
        """If it waits, or were to wait, with that."""
        tag = account.tags[urgency]
        return tag if account.urgency == urgency else max(tag, self._clock[urgency])

    def count(self, account: Account, priority: int, change: int) -> None:
        """It waits with so many requests more, or less."""
        account.waiting[priority] += change
        if not account.waiting[priority]:
            del account.waiting[priority]
        urgency = min(account.waiting, default=math.inf)
        account.tags[urgency] = self.tag(account, urgency)
        account.urgency = urgency

    def in_turns(self, switch_ms: Callable[[Account], float], now_ms: float) -> list[list[Account]]:
        """Those that wait and may have the next turn, by urgency; of each the first has it first.

        One urgency is raised by one for each ``max_wait`` in which it had no turn: not by the age
        of requests, since those of who asks the most are the oldest.

        ``switch_ms``: to bring the model it wants to the device. Others go before it for so long:
        models that do not fit together would else change places for each request.
        """
        self.again_at_ms = math.inf
        by: defaultdict[float, list[Account]] = defaultdict(list)
        for account in self:
            if not account.waiting or now_ms < account.barred_until_ms:
                continue
            if now_ms >= account.rests_until_ms or not self._gives_way(account, now_ms):
                by[account.urgency].append(account)
        self._had_at_ms = {urgency: self._had_at_ms.get(urgency, now_ms) for urgency in by}
        for same in by.values():
            same.sort(key=lambda one: one.tags[one.urgency] + switch_ms(one) / one.weight)

        def rank(urgency: float) -> tuple[float, ...]:
            wait_ms = now_ms - self._had_at_ms[urgency]
            waits = wait_ms // self._max_wait_ms if self._max_wait_ms > 0 else 0
            return (urgency - waits, -waits)

        found = [by[urgency] for urgency in sorted(by, key=rank)]
        is_ahead = bool(found) and found[0][0].running and self._gives_way(found[0][0], now_ms)
        return [] if is_ahead else found

    def _gives_way(self, account: Account, now_ms: float) -> bool:
        """Whether one that had less is there and may ask: who waits for his answers has nothing in
        the queue when the run after another one's is chosen, or when a long one has ended."""
        tag = account.tags[account.urgency]
        others = [
            one
            for one in self
            if one is not account
            and not one.waiting
            and (one.running or now_ms < one.seen_at_ms + self._max_wait_ms)
            and self.tag(one, account.urgency) <= tag
        ]
        if others:
            until_ms = max(one.seen_at_ms for one in others) + self._max_wait_ms
            self.again_at_ms = min(self.again_at_ms, until_ms)
        return bool(others)

    def charge(self, rows: Counter[str], predicted_ms: float, now_ms: float) -> Charge:
        """A run is dispatched, in the turn of the first; its requests are counted as waiting yet.

        ``rows``: by caller. ``predicted_ms``: 0 when nothing is known.
        """
        ms, total = predicted_ms or UNKNOWN_MS, rows.total()
        parts = {self.of(caller): own / total for caller, own in rows.items()}
        first = next(iter(parts))
        urgency, tag = first.urgency, first.tags[first.urgency]
        self._clock[urgency], self._had_at_ms[urgency] = max(self._clock[urgency], tag), now_ms
        for account, part in parts.items():
            account.tags[urgency] += part * ms / account.weight
            account.running += 1
        return Charge(urgency, ms, parts)

    def charge_alone(
        self, account: Account, priority: int, predicted_ms: float, arrived_at_ms: float,
        now_ms: float,
    ) -> Charge:  # fmt: skip
        """As ``charge``, for one that never waited, when nobody waits."""
        urgency, ms, tag = float(priority), predicted_ms or UNKNOWN_MS, account.tags[priority]
        tag = max(tag, self._clock[urgency])
        account.seen_at_ms = max(account.seen_at_ms, arrived_at_ms)
        self._clock[urgency], self._had_at_ms = tag, {urgency: now_ms}
        account.tags[urgency] = tag + ms / account.weight
        account.running += 1
        return Charge(urgency, ms, {account: 1.0})

    def settle(self, charge: Charge, took_ms: float, now_ms: float) -> float:
        """The run is over. Who had a long one rests for as long, or as its weight allows; until
        when, if any does."""
        for account, part in charge.parts.items():
            own_ms = part * took_ms
            account.used_ms += own_ms
            account.tags[charge.urgency] += part * (took_ms - charge.ms) / account.weight
            account.running -= 1
            account.seen_at_ms = self._had_at_ms[charge.urgency] = now_ms
            if own_ms >= LONG_MS:
                account.rests_until_ms = now_ms + own_ms / max(1.0, account.weight)
        return max([account.rests_until_ms for account in charge.parts])

    def died(self, charge: Charge, now_ms: float) -> float:
        """Its run took a worker with it. A caller that goes on so, with one model after another,
        has no turn for a while, longer each time (8 to 16 s in the end); until when. The owner is
        never barred."""
        account = next(iter(charge.parts))
        kept = 0.5 ** ((now_ms - account.died_at_ms) / HALF_MS)
        account.deaths, account.died_at_ms = account.deaths * kept + 1.0, now_ms
        above = math.ceil(account.deaths) - MOST_DEATHS
        if account.caller and above > 0:
            account.barred_until_ms = now_ms + BAR_MS * 2 ** (above - 1)
        return account.barred_until_ms
