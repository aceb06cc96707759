"""Fair queues over a device's callers, and over the connections of each caller.

A member is a caller or a connection; its *urgency* is the best priority that waits in it. Inside
each urgency there is start-time fair queueing (docs/adr/0037-turns-by-tenant.md). A member's *tag*
is its service time divided by its weight; the smallest tag goes first. The *clock* is the tag of
the last turn. A member that begins to wait gets at least the clock as its tag, so idle time earns
nothing. A run is charged with its predicted time at dispatch, because the next run is chosen before
it ends. At its end the charge is corrected.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Generic, NamedTuple, TypeVar

LONG_MS: Final = 100.0  # a step this long makes its caller yield, even if the device is idle
MAX_DEATHS: Final = 3  # recent worker deaths that a caller may cause without a penalty
BAR_MS: Final = 1000.0  # penalty for one more death; each further one doubles it
HALF_MS: Final = 60_000.0  # half-life of the count of deaths
UNKNOWN_MS: Final = 1.0  # charge for a run without a prediction, until it has ended
MAX_IDLE: Final = 64  # number of members without requests that are kept in any case


@dataclass(eq=False, slots=True)
class MemberShare:
    """Member of a fair queue; ``tags`` has its tag for each urgency (``effective_priority``)."""

    caller: str  # name of the tenant or of the connection
    weight: float = 1.0
    waiting: Counter[int] = field(default_factory=Counter)  # priority -> number of requests
    effective_priority: float = math.inf  # urgency: the most urgent priority in ``waiting``
    tags: defaultdict[float, float] = field(default_factory=lambda: defaultdict(float))
    running: int = 0  # number of dispatched runs in which it has a part
    earned_tag: float = 0.0  # its tag without the clock, when its waiting requests last changed
    number: int = 0  # number in the order of creation: decides between equal tags
    # Urgency and entry in ``_order``, which are brought up to date before they are read.
    place: tuple[float, tuple[float, int, Any]] | None = field(default=None, repr=False)


S = TypeVar("S", bound=MemberShare)


@dataclass(eq=False, slots=True)
class CallerShare(MemberShare):
    """Share of one caller on one device."""

    used_ms: float = 0.0  # total time of its finished runs
    seen_at_ms: float = -math.inf  # time of the caller's last request or reply
    throttled_until_ms: float = -math.inf
    deaths: float = 0.0  # count of worker deaths in its runs, halved in every ``HALF_MS``
    died_at_ms: float = -math.inf
    penalty_until_ms: float = -math.inf
    connections: FairQueue[MemberShare] | None = None  # set while several connections wait


class Charge(NamedTuple):
    """Advance charge for a run that has not ended."""

    effective_priority: float
    ms: float
    parts: dict[CallerShare, float]  # each caller's fraction of the rows
    clock: float = 0.0  # clock of the callers before the run
    connections: tuple[ConnectionCharge, ...] = ()


class ConnectionCharge(NamedTuple):
    """Part of an advance charge for the connections of one caller."""

    queue: FairQueue[MemberShare]
    effective_priority: float
    parts: dict[MemberShare, float]
    clock: float


class FairQueue(Generic[S]):
    """Fair queue of members. A decision looks only at the next members, never at all of them."""

    def __init__(self, max_wait_ms: float, make: Callable[[str], S]) -> None:
        """``make``: creates a member from its name."""
        self._max_wait_ms = max_wait_ms
        self._make = make
        self._of: dict[str, S] = {}
        self._clock: defaultdict[float, float] = defaultdict(float)  # urgency -> clock
        self._had_at_ms: dict[float, float] = {}  # urgency -> its last turn or empty time
        self._order: dict[float, list[tuple[float, int, S]]] = {}  # waiting members, by urgency
        self._changed: dict[S, None] = {}  # members whose place in the order may have changed
        self._idle: dict[S, None] = {}  # members with nothing waiting; the latest change is last
        self._made = 0

    def __iter__(self) -> Iterator[S]:
        return iter(self._of.values())

    def of(self, caller: str) -> S:
        """Return the member with that name; create it if there is none."""
        if caller not in self._of:
            self._made += 1
            self._of[caller] = member = self._make(caller)
            member.number = self._made
            self._idle[member] = None
        return self._of[caller]

    def tag(self, share: S, effective_priority: float) -> float:
        """Return the member's tag at an urgency; if it does not wait there, at least the clock."""
        tag = share.tags[effective_priority]
        return (
            tag
            if share.effective_priority == effective_priority
            else max(tag, self._clock[effective_priority])
        )

    def count(self, share: S, priority: int, change: int) -> None:
        """Add ``change`` to the member's number of waiting requests of that priority."""
        share.waiting[priority] += change
        if not share.waiting[priority]:
            del share.waiting[priority]
        effective_priority = min(share.waiting, default=math.inf)
        share.earned_tag = share.tags[effective_priority]
        share.tags[effective_priority] = self.tag(share, effective_priority)
        share.effective_priority = effective_priority
        self._changed[share] = None

    def in_rounds(self, switch_ms: Callable[[S], float], now_ms: float) -> list[Iterator[S]]:
        """Return the waiting members by urgency; within an urgency the first one has the next turn.

        The iterators are lazy and valid until a request is added or removed. An urgency is raised
        by one for each ``max_wait_ms`` without a turn. The age of requests does not count: it
        would favour the member with the most requests.

        Args:
            switch_ms: returns the time to copy a member's next model to the device. The member's
            tag counts as later by that time. Otherwise two models that do not fit together would
            replace each other at every request.
        """
        self._update(now_ms)
        by: dict[float, Iterator[S]] = {}
        for effective_priority, order in self._order.items():
            turns = self._by_tag(order, switch_ms, now_ms)
            for first in turns:
                by[effective_priority] = chain((first,), turns)
                break
        self._had_at_ms = {
            effective_priority: self._had_at_ms.get(effective_priority, now_ms)
            for effective_priority in by
        }
        if len(by) < 2:
            return [*by.values()]

        def rank(effective_priority: float) -> tuple[float, ...]:
            wait_ms = now_ms - self._had_at_ms[effective_priority]
            waits = wait_ms // self._max_wait_ms if self._max_wait_ms > 0 else 0
            return (effective_priority - waits, -waits)

        return [by[effective_priority] for effective_priority in sorted(by, key=rank)]

    def _by_tag(
        self, order: list[tuple[float, int, S]], switch_ms: Callable[[S], float], now_ms: float
    ) -> Iterator[S]:
        """Yield the members that may have a turn, each delayed by the cost of its switch."""
        behind: list[tuple[float, int, S]] = []  # a heap
        for tag, number, share in order:
            while behind and behind[0][0] <= tag:
                yield heapq.heappop(behind)[2]
            if not self._may_go(share, now_ms):
                continue
            delay_ms = switch_ms(share) / share.weight if len(order) > 1 else 0.0
            if delay_ms:
                heapq.heappush(behind, (tag + delay_ms, number, share))
            else:
                yield share
        while behind:
            yield heapq.heappop(behind)[2]

    def _may_go(self, share: S, now_ms: float) -> bool:
        return True

    def _update(self, now_ms: float) -> None:
        """Sort changed members into the order; drop idle members without state."""
        for share in self._changed:
            if share.place is not None:
                effective_priority, entry = share.place
                same = self._order[effective_priority]
                del same[bisect.bisect_left(same, entry)]
                if not same:
                    del self._order[effective_priority]
                share.place = None
            self._idle.pop(share, None)
            if share.waiting:
                entry = (share.tags[share.effective_priority], share.number, share)
                bisect.insort(self._order.setdefault(share.effective_priority, []), entry)
                share.place = share.effective_priority, entry
            else:
                self._idle[share] = None
        self._changed.clear()
        while len(self._idle) > MAX_IDLE and self._has_nothing(
            oldest := next(iter(self._idle)), now_ms
        ):
            self._forget(oldest)

    def _has_nothing(self, share: S, now_ms: float) -> bool:
        """Return True if a new member would have the same turns as this idle one."""
        return not share.running and self._ahead_ms(share) <= 0.0

    def _ahead_ms(self, share: S) -> float:
        """Return the member's lead in service time over the others."""
        return max(
            [
                (tag - self._clock[effective_priority]) * share.weight
                for effective_priority, tag in share.tags.items()
            ],
            default=0.0,
        )

    def _forget(self, share: S) -> None:
        del self._idle[share], self._of[share.caller]

    def take(self, parts: Mapping[S, float], ms: float, now_ms: float) -> tuple[float, float]:
        """Charge all members in ``parts`` for a turn of the first one.
        Return its urgency, and the clock before the turn."""
        first = next(iter(parts))
        effective_priority, tag = first.effective_priority, first.tags[first.effective_priority]
        clock = self._clock[effective_priority]
        self._clock[effective_priority], self._had_at_ms[effective_priority] = (
            max(clock, tag),
            now_ms,
        )
        for share, part in parts.items():
            share.tags[effective_priority] += part * ms / share.weight
            share.running += 1
            self._changed[share] = None
        return effective_priority, clock

    def without_last_turn(self, share: S, effective_priority: float, clock: float) -> None:
        """Set the clock, and the tag of a member that has just begun to wait, as if the last turn
        had not been given. ``clock``: the clock before that turn."""
        share.tags[effective_priority] = max(share.earned_tag, clock)
        self._clock[effective_priority] = clock
        self._changed[share] = None

    def correct(self, parts: Mapping[S, float], effective_priority: float, more_ms: float) -> None:
        """Correct the charge of a finished run that took ``more_ms`` longer than charged."""
        for share, part in parts.items():
            share.tags[effective_priority] += part * more_ms / share.weight
            share.running -= 1
            self._changed[share] = None


class CallerQueue(FairQueue[CallerShare]):
    """Fair queue of all callers. Each caller has a key or a token from the owner.

    Attributes:
        again_at_ms: earliest instant at which a caller that yielded in ``in_rounds`` may go.
    """

    def __init__(self, weights: Mapping[str, float], max_wait_ms: float) -> None:
        self._forgotten_ms: dict[str, float] = {}  # ``used_ms`` of dropped callers

        def make(caller: str) -> CallerShare:
            used_ms = self._forgotten_ms.pop(caller, 0.0)
            return CallerShare(caller, weights.get(caller, 1.0), used_ms=used_ms)

        super().__init__(max_wait_ms, make)
        self.again_at_ms = math.inf

    def used_ms(self) -> dict[str, float]:
        """Return the total time of each caller's finished runs."""
        return self._forgotten_ms | {account.caller: account.used_ms for account in self}

    def connections(self) -> FairQueue[MemberShare]:
        """Return a fair queue for the connections of one caller."""
        return FairQueue(self._max_wait_ms, MemberShare)

    def in_rounds(
        self, switch_ms: Callable[[CallerShare], float], now_ms: float
    ) -> list[Iterator[CallerShare]]:
        """Return the callers that wait and may have the next turn; see ``FairQueue.in_rounds``."""
        self.again_at_ms = math.inf
        rounds = super().in_rounds(switch_ms, now_ms)
        if rounds:
            first = next(rounds[0])
            if first.running and self._should_yield(first, now_ms):
                return []
            rounds[0] = chain((first,), rounds[0])
        return rounds

    def _may_go(self, share: CallerShare, now_ms: float) -> bool:
        if now_ms < share.penalty_until_ms:
            return False
        return now_ms >= share.throttled_until_ms or not self._should_yield(share, now_ms)

    def _should_yield(self, account: CallerShare, now_ms: float) -> bool:
        """Return True if another caller, with less service, may soon send a request.
        That caller may lack a waiting request only because its last reply is on its way, or has
        just arrived after a long run."""
        tag = account.tags[account.effective_priority]
        for one in reversed(self._idle):
            if not one.running and now_ms >= one.seen_at_ms + self._max_wait_ms:
                continue
            if self.tag(one, account.effective_priority) <= tag:
                until_ms = one.seen_at_ms + self._max_wait_ms
                self.again_at_ms = min(self.again_at_ms, until_ms)
                return True
        return False

    def _has_nothing(self, share: CallerShare, now_ms: float) -> bool:
        """Return True if only the used time of a caller must be kept.
        It has been idle for longer than its lead over the others, and has no penalty."""
        away_from_ms = share.seen_at_ms + max(self._max_wait_ms, self._ahead_ms(share))
        held_until_ms = max(away_from_ms, share.throttled_until_ms, share.penalty_until_ms)
        deaths = share.deaths * 0.5 ** ((now_ms - share.died_at_ms) / HALF_MS)
        return not share.running and now_ms >= held_until_ms and deaths < 0.5

    def _forget(self, share: CallerShare) -> None:
        super()._forget(share)
        if share.used_ms:
            self._forgotten_ms[share.caller] = share.used_ms

    def charge(self, rows: Counter[str], predicted_ms: float, now_ms: float) -> Charge:
        """Charge a dispatched run, whose requests must still count as waiting, to its callers.

        ``rows``: caller -> rows; the first caller has the turn. ``predicted_ms``: 0 if unknown.
        """
        ms, total = predicted_ms or UNKNOWN_MS, rows.total()
        parts = {self.of(caller): own / total for caller, own in rows.items()}
        effective_priority, clock = self.take(parts, ms, now_ms)
        return Charge(effective_priority, ms, parts, clock)

    @staticmethod
    def charge_connections(
        charge: Charge, rows: Iterable[tuple[str, str, int]], now_ms: float
    ) -> Charge:
        """Charge the run of ``charge`` also to connections, if a caller's connections take turns.

        ``rows``: caller, connection and rows of each request.
        """
        total, by = 0, defaultdict[str, Counter[str]](Counter)
        for caller, connection, count in rows:
            by[caller][connection] += count
            total += count
        shares = []
        for account in charge.parts:
            if (queue := account.connections) is not None:
                own = by[account.caller].items()
                parts = {queue.of(connection): count / total for connection, count in own}
                effective_priority, clock = queue.take(parts, charge.ms, now_ms)
                shares.append(ConnectionCharge(queue, effective_priority, parts, clock))
        return charge._replace(connections=tuple(shares))

    def charge_alone(
        self,
        account: CallerShare,
        priority: int,
        predicted_ms: float,
        arrived_at_ms: float,
        now_ms: float,
    ) -> Charge:
        """Charge a request that never waited, when no request waits; see ``charge``."""
        ms, clock = predicted_ms or UNKNOWN_MS, self._clock[priority]
        tag = max(account.tags[priority], clock)
        account.seen_at_ms = max(account.seen_at_ms, arrived_at_ms)
        self._clock[priority], self._had_at_ms = tag, {priority: now_ms}
        account.tags[priority] = tag + ms / account.weight
        account.running += 1
        self._changed[account] = None
        return Charge(priority, ms, {account: 1.0}, clock)

    def reconcile_cost(
        self, charge: Charge, took_ms: float, now_ms: float, steps: int = 1
    ) -> float:
        """Correct the charge of a finished run; return the end of its callers' pauses.
        A caller with a long part of a step pauses for the run's time, divided by
        ``max(1, weight)``: a request of another caller can end a run only between two steps."""
        for account, part in charge.parts.items():
            own_ms = part * took_ms
            account.used_ms += own_ms
            account.tags[charge.effective_priority] += part * (took_ms - charge.ms) / account.weight
            account.running -= 1
            account.seen_at_ms = self._had_at_ms[charge.effective_priority] = now_ms
            self._changed[account] = None
            if own_ms / steps >= LONG_MS:
                account.throttled_until_ms = now_ms + own_ms / max(1.0, account.weight)
        for queue, effective_priority, parts, _ in charge.connections:
            queue.correct(parts, effective_priority, took_ms - charge.ms)
        return max([account.throttled_until_ms for account in charge.parts])

    def refund(self, charge: Charge, now_ms: float) -> None:
        """Cancel the charge of a run that was taken back before its turn."""
        self.reconcile_cost(charge, 0.0, now_ms)

    def died(self, charge: Charge, now_ms: float) -> float:
        """Record that the run killed its worker; return when its caller's penalty ends.
        The penalty of a caller that keeps killing workers, with one model after another, grows to
        8 to 16 s. The server's owner never has a penalty."""
        account = next(iter(charge.parts))
        decay = 0.5 ** ((now_ms - account.died_at_ms) / HALF_MS)
        account.deaths, account.died_at_ms = account.deaths * decay + 1.0, now_ms
        above = math.ceil(account.deaths) - MAX_DEATHS
        if account.caller and above > 0:
            account.penalty_until_ms = now_ms + BAR_MS * 2 ** (above - 1)
        return account.penalty_until_ms
