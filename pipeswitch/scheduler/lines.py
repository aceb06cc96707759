"""Which request a policy puts first, known without a look at all that wait."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from ..ipc.messages import ModelName
from .policies import Policy, Waiting
from .records import Request

# A rank is asked for anew a little before it changes: a sum of floating-point numbers may say
# that it is not yet time when their difference says that it is.
MARGIN_MS = 1e-3

Rank = tuple[float, ...]
IsResident = Callable[[ModelName], bool]


def _view(request: Request, is_resident: bool = False, is_current: bool = False) -> Waiting:
    return Waiting(
        request.token, request.model, request.priority, request.deadline_at_ms,
        request.arrived_at_ms, is_resident, is_current,
    )  # fmt: skip


class Line:
    """The waiting requests of one model and one priority, sorted by key and by age."""

    __slots__ = ("by_age", "by_key", "entries", "model", "place", "priority", "until")

    def __init__(self, model: ModelName, priority: int) -> None:
        self.model = model
        self.priority = priority
        self.entries: dict[int, tuple[Rank, int, Waiting, Request]] = {}  # by number
        self.by_key: list[tuple[Rank, int]] = []
        self.by_age: list[tuple[float, int]] = []
        self.place: tuple[Rank, int, Line, Waiting] | None = None  # of its head, among all
        self.until: tuple[float, int, Line] | None = None  # when that must be looked at again

    def head(self, now_ms: float, patience_ms: float) -> int:
        """The number of the request that goes first."""
        arrived_at_ms, number = self.by_age[0]
        return number if now_ms - arrived_at_ms >= patience_ms else self.by_key[0][1]


class Lines:
    """All requests that wait, in lines; the lines in the order of their heads.

    A line is ranked again when a request comes or leaves, when its model comes to the device or
    leaves it, when its model starts or ends computing, and when time alone changes its rank.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lines: dict[ModelName, dict[int, Line]] = {}
        self._ranked: list[tuple[Rank, int, Line, Waiting]] = []
        self._until: list[tuple[float, int, Line]] = []
        self._stale: dict[Line, None] = {}
        self._current: ModelName | None = None

    def add(self, request: Request, number: int) -> None:
        """``number``: the order of requests that are equal otherwise."""
        waiting = _view(request)
        lines = self._lines.setdefault(request.model, {})
        line = lines.get(request.priority)
        if line is None:
            line = lines[request.priority] = Line(request.model, request.priority)
        key = self._policy.key(waiting)
        line.entries[number] = (key, number, waiting, request)
        bisect.insort(line.by_key, (key, number))
        bisect.insort(line.by_age, (request.arrived_at_ms, number))
        self._stale[line] = None

    def discard(self, request: Request, number: int) -> None:
        """It is in its line."""
        line = self._lines[request.model][request.priority]
        key, *_ = line.entries.pop(number)
        del line.by_key[bisect.bisect_left(line.by_key, (key, number))]
        del line.by_age[bisect.bisect_left(line.by_age, (request.arrived_at_ms, number))]
        self._stale[line] = None
        if not line.entries:
            self._take_out(line)
            del self._stale[line]
            del self._lines[request.model][request.priority]
            if not self._lines[request.model]:
                del self._lines[request.model]

    def changed(self, model: ModelName | None) -> None:
        """It came to the device or left it, or computes, or does no more."""
        if model is not None:
            self._stale.update(dict.fromkeys(self._lines.get(model, {}).values()))

    def heads(
        self, is_resident: IsResident, current: ModelName | None, now_ms: float
    ) -> Iterator[tuple[Waiting, Request]]:
        """The first of each line, best first; until a request comes or leaves."""
        self.settle(is_resident, current, now_ms)
        for _, number, line, waiting in self._ranked:
            yield waiting, line.entries[number][3]

    def settle(self, is_resident: IsResident, current: ModelName | None, now_ms: float) -> None:
        """Rank what has changed: after each event, so that no decision has to do it for many."""
        if current != self._current:
            self.changed(self._current)
            self.changed(current)
            self._current = current
        while self._until and self._until[0][0] <= now_ms + MARGIN_MS:
            _, _, line = self._until.pop(0)
            line.until = None
            self._stale[line] = None
        for line in self._stale:
            self._rank(line, is_resident(line.model), now_ms)
        self._stale.clear()

    def check(
        self, requests: list[Request], is_resident: IsResident, current: ModelName | None,
        now_ms: float,
    ) -> None:  # fmt: skip
        """A look at all requests finds the heads in the same order."""
        policy = self._policy

        def rank(request: Request) -> Rank:
            view = _view(request, is_resident(request.model), request.model == current)
            return policy.rank(view, now_ms)

        found: dict[tuple[ModelName, int], Request] = {}
        for request in sorted(requests, key=rank):
            found.setdefault((request.model, request.priority), request)
        heads = [request for _, request in self.heads(is_resident, current, now_ms)]
        assert heads == list(found.values()), "another request is first"

    def _rank(self, line: Line, is_resident: bool, now_ms: float) -> None:
        policy = self._policy
        self._take_out(line)
        number = line.head(now_ms, policy.patience_ms)
        head = line.entries[number][2]._replace(
            is_resident=is_resident, is_current=line.model == self._current
        )
        line.place = (policy.rank(head, now_ms), number, line, head)
        bisect.insort(self._ranked, line.place)
        until_ms = policy.stays_until_ms(head, now_ms)
        overdue_at_ms = line.by_age[0][0] + policy.patience_ms
        if overdue_at_ms > now_ms:
            until_ms = min(until_ms, overdue_at_ms)
        line.until = (until_ms, number, line)
        bisect.insort(self._until, line.until)

    def _take_out(self, line: Line) -> None:
        if line.place is not None:
            del self._ranked[bisect.bisect_left(self._ranked, line.place)]
            line.place = None
        if line.until is not None:
            del self._until[bisect.bisect_left(self._until, line.until)]
            line.until = None
