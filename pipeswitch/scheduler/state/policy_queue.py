"""Order of the waiting requests under a policy, updated without a scan of all requests.

All questions to the policy go through its guard (``policies/guard.py``).
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ...ipc.messages.base import ModelName
from ..policies import View, Waiting
from ..policies.guard import PolicyGuard
from .fair_queue import CallerQueue, CallerShare, MemberShare
from .records import Request

# A rank is computed again slightly before it changes: with rounding, ``now < begin + wait`` may be
# true although ``now - begin >= wait`` is true, too.
MARGIN_MS = 1e-3

Rank = tuple[float, ...]
Place = tuple[Rank, int, "SubQueue", Waiting]  # place of a line: its head's rank and number
Until = tuple[float, int, "SubQueue"]  # instant at which a line must be ranked again
T = TypeVar("T", Place, Until)
S = TypeVar("S", Place, Request)
IsResident = Callable[[ModelName], bool]


def shown(request: Request, is_resident: bool = False, is_current: bool = False) -> Waiting:
    """Return a request as a policy sees it."""
    return Waiting(
        request.token,
        request.model,
        request.origin.priority,
        request.origin.deadline_at_ms,
        request.origin.arrived_at_ms,
        request.batch,
        request.size_bytes,
        is_resident,
        is_current,
    )


class SubQueue:
    """Line: the waiting requests of one connection, model and priority, by key and by age."""

    __slots__ = (
        "account",
        "by_age",
        "by_key",
        "connection",
        "entries",
        "model",
        "place",
        "smallest_batch",
        "until",
    )

    def __init__(
        self, account: CallerShare, connection: str, model: ModelName, smallest_batch: int
    ) -> None:
        self.account = account
        self.connection = connection
        self.model = model
        self.smallest_batch = smallest_batch  # smallest since the line was last empty
        self.entries: dict[int, tuple[Rank, int, Waiting, Request]] = {}  # number -> entry
        self.by_key: list[tuple[Rank, int]] = []
        self.by_age: list[tuple[float, int]] = []
        self.place: Place | None = None
        self.until: Until | None = None

    def requests(self) -> Iterator[Request]:
        """Yield the requests by key."""
        return (self.entries[number][3] for _, number in self.by_key)

    def head(self, now_ms: float, aging_ms: float) -> int:
        """Return the number of the request that goes first."""
        arrived_at_ms, number = self.by_age[0]
        return number if now_ms - arrived_at_ms >= aging_ms else self.by_key[0][1]


class PolicyQueue:
    """All waiting requests, in lines (``SubQueue``), which are sorted by their heads.

    Callers take turns (``CallerQueue``), and so do the connections of one caller, unless the policy
    sorts all of a caller's requests by one key. The policy orders the requests of a connection,
    with its rules for age and windows. A line is ranked again when a request is added or removed,
    when its model is copied to the device or evicted, when its model starts or ends computing (if
    the policy ranks by that), and when time alone changes its rank.
    """

    def __init__(self, judge: PolicyGuard, accounts: CallerQueue) -> None:
        self._judge = judge
        self._accounts = accounts
        self._failure_count = judge.failure_count
        self._has_connections = not judge.sorts_by
        self._lines: dict[ModelName, dict[tuple[CallerShare, str, int], SubQueue]] = {}
        self._ranked: dict[CallerShare, dict[str, list[Place]]] = {}  # places by connection
        self._until: list[Until] = []
        self._stale: dict[SubQueue, None] = {}
        self._current: ModelName | None = None
        # Window of each connection: lines, each with its last request number in the window.
        self._windows: dict[tuple[CallerShare, str], list[tuple[SubQueue, int]]] = {}
        self._last_number = 0

    def add(self, request: Request, number: int, *, is_back: bool = False) -> None:
        """Add a request to its line. ``number`` decides between otherwise equal requests.
        ``is_back``: it was dispatched before, so its connection is not new."""
        waiting = shown(request)
        key = self._judge.key(waiting)
        self._renew()
        self._last_number = max(self._last_number, number)
        account = self._accounts.of(request.origin.caller)
        account.seen_at_ms = max(account.seen_at_ms, request.origin.arrived_at_ms)
        self._accounts.count(account, request.origin.priority, 1)
        connection = request.origin.connection if self._has_connections else ""
        lines = self._lines.setdefault(request.model, {})
        line = lines.get((account, connection, request.origin.priority))
        if line is None:
            ranked = self._ranked.setdefault(account, {})
            if ranked and connection not in ranked and account.connections is None:
                self._split(account, next(iter(ranked)) if is_back else connection)
            ranked.setdefault(connection, [])
            line = SubQueue(account, connection, request.model, request.batch)
            lines[account, connection, request.origin.priority] = line
        if account.connections is not None:
            share = account.connections.of(connection)
            account.connections.count(share, request.origin.priority, 1)
        line.entries[number] = (key, number, waiting, request)
        line.smallest_batch = min(line.smallest_batch, request.batch)
        bisect.insort(line.by_key, (key, number))
        bisect.insort(line.by_age, (request.origin.arrived_at_ms, number))
        self._stale[line] = None

    def _split(self, account: CallerShare, newcomer: str) -> None:
        """Make the caller's connections take turns from now, since a second one begins to wait.
        The first connection had all turns so far, so the second one gets the next turn."""
        account.connections = queue = self._accounts.connections()
        queue.of(newcomer)
        for lines in self._lines.values():
            for (owner, connection, priority), line in lines.items():
                if owner is account:
                    queue.count(queue.of(connection), priority, len(line.entries))

    def discard(self, request: Request, number: int) -> None:
        """Remove a request from its line."""
        account = self._accounts.of(request.origin.caller)
        self._accounts.count(account, request.origin.priority, -1)
        connection = request.origin.connection if self._has_connections else ""
        share: MemberShare = account
        if account.connections is not None:
            share = account.connections.of(connection)
            account.connections.count(share, request.origin.priority, -1)
        line = self._lines[request.model][account, connection, request.origin.priority]
        key, *_ = line.entries.pop(number)
        del line.by_key[bisect.bisect_left(line.by_key, (key, number))]
        del line.by_age[bisect.bisect_left(line.by_age, (request.origin.arrived_at_ms, number))]
        self._stale[line] = None
        if not line.entries:
            self._take_out(line)
            del self._stale[line]
            del self._lines[request.model][account, connection, request.origin.priority]
            if not self._lines[request.model]:
                del self._lines[request.model]
            if not share.waiting:
                del self._ranked[account][connection]
                self._windows.pop((account, connection), None)
            if not account.waiting:
                del self._ranked[account]
                account.connections = None

    def ahead(self, request: Request) -> tuple[int, int]:
        """Return lower bounds for the requests that precede a new one: their number and batch.
        They have its model and priority. They are in its line, or have earlier turns in the
        caller's other connections, if these wait only for that model and priority."""
        account = self._accounts.of(request.origin.caller)
        own = request.origin.connection if self._has_connections else ""
        priority = request.origin.priority
        lines, queue = self._lines.get(request.model, {}), account.connections
        line = lines.get((account, own, priority))
        count, batch = 0, 1
        if line is not None:
            key = self._judge.key(shown(request))
            count = bisect.bisect_right(line.by_key, (key, self._last_number))
            batch = line.smallest_batch
        if queue is None:
            return count, batch
        turn = queue.tag(queue.of(own), priority)
        entries = [(count, batch)] if count else []
        for connection, places in self._ranked[account].items():
            other = lines.get((account, connection, priority))
            if connection != own and other is not None and len(places) <= 1:
                is_before = queue.of(connection).tags[priority] <= turn
                before = min(count + is_before, len(other.entries))
                entries += [(before, other.smallest_batch)] if before else []
        return sum([one for one, _ in entries]), min([rows for _, rows in entries], default=1)

    def of_line(self, request: Request) -> Iterator[Request]:
        """Yield the request and all others with its model and priority.
        Callers take turns, and so do a caller's connections, whose requests are sorted by key."""
        by: dict[CallerShare, list[SubQueue]] = {}
        own = request.origin.priority
        for (account, _, priority), line in self._lines[request.model].items():
            if priority == own:
                by.setdefault(account, []).append(line)

        def turn(line: SubQueue) -> float:
            queue = line.account.connections
            return queue.of(line.connection).tags[own] if queue is not None else 0.0

        return _in_rounds(
            _in_rounds(map(SubQueue.requests, sorted(by[account], key=turn)))
            for account in sorted(by, key=lambda account: account.tags[own])
        )

    def changed(self, model: ModelName | None) -> None:
        """Mark the model's lines for ranking: it was copied or evicted, or began or ended a run."""
        if model is not None:
            self._stale.update(dict.fromkeys(self._lines.get(model, {}).values()))

    def heads(
        self, is_resident: IsResident, current: ModelName | None, view: View
    ) -> Iterator[tuple[Waiting, Request]]:
        """Yield the head of each line, best first; valid until a request is added or removed.

        Callers of equal urgency take turns, one line each, as if all runs were equally long.
        """
        self.reorder(is_resident, current, view)

        def switch_ms(account: CallerShare) -> float:
            connection = next(iter(self._ranked[account]))
            if account.connections is not None:
                connection = next(self._connections(account, view)[0]).caller
            return self._switch_ms(account, connection, view)

        for same in self._accounts.in_rounds(switch_ms, view.now_ms):
            for _, number, line, waiting in _in_rounds(self._places(one, view) for one in same):
                yield waiting, line.entries[number][3]

    def _connections(self, account: CallerShare, view: View) -> list[Iterator[MemberShare]]:
        """Return the caller's connections by urgency, each group in the order of turns."""
        assert account.connections is not None

        def switch_ms(share: MemberShare) -> float:
            return self._switch_ms(account, share.caller, view)

        return account.connections.in_rounds(switch_ms, view.now_ms)

    def _switch_ms(self, account: CallerShare, connection: str, view: View) -> float:
        head = self._ranked[account][connection][0][3]
        return 0.0 if head.is_resident else view.predict(head.model, head.batch).load_ms

    def _places(self, account: CallerShare, view: View) -> Iterator[Place]:
        """Yield one caller's lines: connections take turns, each in the policy's order."""
        if account.connections is None:
            yield from self._of_connection(account, next(iter(self._ranked[account])), view)
            return
        for same in self._connections(account, view):
            yield from _in_rounds(self._of_connection(account, one.caller, view) for one in same)

    def _of_connection(self, account: CallerShare, connection: str, view: View) -> Iterator[Place]:
        """Return the connection's lines in order; this may form the next window."""
        if self._judge.window:
            return iter(self._in_window(account, connection, view))
        return iter(self._ranked[account][connection])

    def reorder(self, is_resident: IsResident, current: ModelName | None, view: View) -> None:
        """Rank changed lines. Called after each event, so that no decision has to rank many."""
        self._renew()
        if current != self._current:
            if self._judge.ranks_runs:
                self.changed(self._current)
                self.changed(current)
            self._current = current
        while self._until and self._until[0][0] <= view.now_ms + MARGIN_MS:
            _, _, line = self._until.pop(0)
            line.until = None
            self._stale[line] = None
        while self._stale:
            stale, self._stale = self._stale, {}
            for line in stale:
                self._rank(line, is_resident(line.model), view)
            self._renew()

    @property
    def until_ms(self) -> float:
        """Next instant at which time alone changes a rank."""
        return self._until[0][0] if self._until else math.inf

    def _renew(self) -> None:
        """Compute all keys and ranks again if the policy has failed and was replaced."""
        if self._failure_count == self._judge.failure_count:
            return
        self._failure_count = self._judge.failure_count
        lines = [line for same in self._lines.values() for line in same.values()]
        self._ranked, self._until, self._windows = {}, [], {}
        for line in lines:
            self._ranked.setdefault(line.account, {})[line.connection] = []
            line.place = line.until = None
            line.entries = {
                number: (self._judge.key(waiting), number, waiting, request)
                for number, (_, _, waiting, request) in line.entries.items()
            }
            line.by_key = sorted((entry[0], number) for number, entry in line.entries.items())
            self._stale[line] = None

    def _in_window(self, account: CallerShare, connection: str, view: View) -> list[Place]:
        """Return the lines of the connection's current window, or of the next one."""
        window = [
            (line, last)
            for line, last in self._windows.get((account, connection), [])
            if line.entries and next(iter(line.entries)) <= last
        ]
        if not window:
            chosen = self._ranked[account][connection][: self._judge.window]
            counts = [len(line.entries) for _, _, line, _ in chosen]
            order = self._judge.arrange([place[3] for place in chosen], counts, view)
            window = [(chosen[index][2], self._last_number) for index in order]
        self._windows[account, connection] = window
        return [line.place for line, _ in window if line.place is not None]

    def check(
        self,
        requests: list[Request],
        is_resident: IsResident,
        current: ModelName | None,
        view: View,
    ) -> None:
        """Assert that a scan of all requests finds the same heads in the same order."""

        def rank(request: Request) -> Rank:
            head = shown(request, is_resident(request.model), request.model == current)
            return self._judge.rank(head, view)

        self.reorder(is_resident, current, view)
        first_of: dict[tuple[str, str, ModelName, int], Request] = {}
        for request in sorted(requests, key=rank):
            connection = request.origin.connection if self._has_connections else ""
            place = (request.origin.caller, connection, request.model, request.origin.priority)
            first_of.setdefault(place, request)
        if self._judge.failure_count != self._failure_count:
            return  # the policy failed during this check
        for account in self._accounts:
            own: dict[str, list[Request]] = {}
            for (caller, connection, *_), one in first_of.items():
                if caller == account.caller:
                    own.setdefault(connection, []).append(one)
            heads = {
                connection: [line.entries[number][3] for _, number, line, _ in places]
                for connection, places in self._ranked.get(account, {}).items()
            }
            assert heads == own, "another request is first"
            assert account.connections is not None or len(own) < 2, "nobody takes turns"
            waiting = Counter(
                one.origin.priority for one in requests if one.origin.caller == account.caller
            )
            assert account.waiting == waiting, f"{account.caller!r} does not wait with {waiting}"

    def _rank(self, line: SubQueue, is_resident: bool, view: View) -> None:
        judge, now_ms = self._judge, view.now_ms
        number = line.head(now_ms, judge.aging_ms)
        entry = line.entries[number][2]
        head = Waiting(*entry[:-2], is_resident=is_resident, is_current=line.model == self._current)
        place = (judge.rank(head, view), number, line, head)
        ranked = self._ranked[line.account][line.connection]
        line.place = _moved(ranked, line.place, place)
        until_ms = judge.stays_until_ms(head, view)
        overdue_at_ms = line.by_age[0][0] + judge.aging_ms
        if overdue_at_ms > now_ms:
            until_ms = min(until_ms, overdue_at_ms)
        line.until = _moved(self._until, line.until, (until_ms, number, line))

    def _take_out(self, line: SubQueue) -> None:
        line.place = _moved(self._ranked[line.account][line.connection], line.place, None)
        line.until = _moved(self._until, line.until, None)


def _moved(sorted_list: list[T], old: T | None, new: T | None) -> T | None:
    """Replace ``old`` by ``new`` in the sorted list, unless both are equal; return ``new``."""
    if old != new:
        if old is not None:
            del sorted_list[bisect.bisect_left(sorted_list, old)]
        if new is not None:
            bisect.insort(sorted_list, new)
    return new


def _in_rounds(streams: Iterable[Iterator[S]]) -> Iterator[S]:
    """Yield the first of each stream, then the second of each, and so on."""
    streams_left: deque[Iterator[S]] = deque()
    for stream in streams:
        for one in stream:
            yield one
            streams_left.append(stream)
            break
    while streams_left:
        for one in streams_left[0]:
            yield one
            streams_left.append(streams_left[0])
            break
        streams_left.popleft()
