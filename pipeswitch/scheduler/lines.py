"""Which request a policy puts first, known without a look at all that wait."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import TypeVar

from ..ipc.messages import ModelName
from .judge import Judge
from .policies import View, Waiting
from .records import Request

# A rank is asked for anew a little before it changes: a sum of floating-point numbers may say
# that it is not yet time when their difference says that it is.
MARGIN_MS = 1e-3

Rank = tuple[float, ...]
Place = tuple[Rank, int, "Line", Waiting]  # of a line among all: its head's rank and number
Until = tuple[float, int, "Line"]  # when its place must be looked at again
T = TypeVar("T", Place, Until)
IsResident = Callable[[ModelName], bool]


def _view(request: Request, is_resident: bool = False, is_current: bool = False) -> Waiting:
    return Waiting(
        request.token, request.model, request.priority, request.deadline_at_ms,
        request.arrived_at_ms, request.batch, request.size_bytes, is_resident, is_current,
    )  # fmt: skip


class Line:
    """The waiting requests of one model and one priority, sorted by key and by age."""

    __slots__ = (
        "by_age", "by_key", "entries", "model", "place", "smallest_batch", "until",
    )  # fmt: skip

    def __init__(self, model: ModelName, smallest_batch: int) -> None:
        self.model = model
        self.smallest_batch = smallest_batch  # since it was empty
        self.entries: dict[int, tuple[Rank, int, Waiting, Request]] = {}  # by number
        self.by_key: list[tuple[Rank, int]] = []
        self.by_age: list[tuple[float, int]] = []
        self.place: Place | None = None
        self.until: Until | None = None

    def head(self, now_ms: float, patience_ms: float) -> int:
        """The number of the request that goes first."""
        arrived_at_ms, number = self.by_age[0]
        return number if now_ms - arrived_at_ms >= patience_ms else self.by_key[0][1]


class Lines:
    """All requests that wait, in lines; the lines in the order of their heads.

    A line is ranked again when a request comes or leaves, when its model comes to the device or
    leaves it, when its model starts or ends computing, and when time alone changes its rank.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._generation = judge.generation
        self._lines: dict[ModelName, dict[int, Line]] = {}
        self._ranked: list[Place] = []
        self._until: list[Until] = []
        self._stale: dict[Line, None] = {}
        self._current: ModelName | None = None
        self._window: list[tuple[Line, int]] = []  # with the last number that belongs to it
        self._last_number = 0

    def add(self, request: Request, number: int) -> None:
        """``number``: the order of requests that are equal otherwise."""
        waiting = _view(request)
        key = self._judge.key(waiting)
        self._renew()
        self._last_number = number
        lines = self._lines.setdefault(request.model, {})
        line = lines.get(request.priority)
        if line is None:
            line = lines[request.priority] = Line(request.model, request.batch)
        line.entries[number] = (key, number, waiting, request)
        line.smallest_batch = min(line.smallest_batch, request.batch)
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

    def ahead(self, request: Request) -> tuple[int, int]:
        """Those of its line that go before one that comes now, and a batch none is smaller than."""
        line = self._lines.get(request.model, {}).get(request.priority)
        if line is None:
            return 0, 1
        key = self._judge.key(_view(request))
        return bisect.bisect_right(line.by_key, (key, self._last_number)), line.smallest_batch

    def of_line(self, request: Request) -> Iterator[Request]:
        """All of its line, itself too, by key."""
        line = self._lines[request.model][request.priority]
        return (line.entries[number][3] for _, number in line.by_key)

    def changed(self, model: ModelName | None) -> None:
        """It came to the device or left it, or computes, or does no more."""
        if model is not None:
            self._stale.update(dict.fromkeys(self._lines.get(model, {}).values()))

    def heads(
        self, is_resident: IsResident, current: ModelName | None, view: View
    ) -> Iterator[tuple[Waiting, Request]]:
        """The first of each line, best first; until a request comes or leaves."""
        self.settle(is_resident, current, view)
        places = self._in_window(view) if self._judge.window else self._ranked
        for _, number, line, waiting in places:
            yield waiting, line.entries[number][3]

    def settle(self, is_resident: IsResident, current: ModelName | None, view: View) -> None:
        """Rank what has changed: after each event, so that no decision has to do it for many."""
        self._renew()
        if current != self._current:
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

    def _renew(self) -> None:
        """The policy has failed: all that it said is void."""
        if self._generation == self._judge.generation:
            return
        self._generation = self._judge.generation
        lines = [line for same in self._lines.values() for line in same.values()]
        self._ranked, self._until, self._window = [], [], []
        for line in lines:
            line.place = line.until = None
            line.entries = {
                number: (self._judge.key(waiting), number, waiting, request)
                for number, (_, _, waiting, request) in line.entries.items()
            }
            line.by_key = sorted((entry[0], number) for number, entry in line.entries.items())
            self._stale[line] = None

    def _in_window(self, view: View) -> list[Place]:
        """The lines of the window that is under way, or of the next one."""
        self._window = [
            (line, last)
            for line, last in self._window
            if line.entries and next(iter(line.entries)) <= last
        ]
        if not self._window and self._ranked:
            chosen = self._ranked[: self._judge.window]
            counts = [len(line.entries) for _, _, line, _ in chosen]
            order = self._judge.arrange([place[3] for place in chosen], counts, view)
            self._window = [(chosen[index][2], self._last_number) for index in order]
        return [line.place for line, _ in self._window if line.place is not None]

    def check(
        self, requests: list[Request], is_resident: IsResident, current: ModelName | None,
        view: View,
    ) -> None:  # fmt: skip
        """A look at all requests finds the heads in the same order."""

        def rank(request: Request) -> Rank:
            shown = _view(request, is_resident(request.model), request.model == current)
            return self._judge.rank(shown, view)

        self.settle(is_resident, current, view)
        found: dict[tuple[ModelName, int], Request] = {}
        for request in sorted(requests, key=rank):
            found.setdefault((request.model, request.priority), request)
        if self._judge.generation != self._generation:
            return  # it failed at these questions
        heads = [line.entries[number][3] for _, number, line, _ in self._ranked]
        assert heads == list(found.values()), "another request is first"

    def _rank(self, line: Line, is_resident: bool, view: View) -> None:
        judge, now_ms = self._judge, view.now_ms
        number = line.head(now_ms, judge.patience_ms)
        shown = line.entries[number][2]
        head = Waiting(*shown[:-2], is_resident=is_resident, is_current=line.model == self._current)
        place = (judge.rank(head, view), number, line, head)
        line.place = _moved(self._ranked, line.place, place)
        until_ms = judge.stays_until_ms(head, view)
        overdue_at_ms = line.by_age[0][0] + judge.patience_ms
        if overdue_at_ms > now_ms:
            until_ms = min(until_ms, overdue_at_ms)
        line.until = _moved(self._until, line.until, (until_ms, number, line))

    def _take_out(self, line: Line) -> None:
        line.place = _moved(self._ranked, line.place, None)
        line.until = _moved(self._until, line.until, None)


def _moved(sorted_list: list[T], old: T | None, new: T | None) -> T | None:
    """``new``, which the list has instead of ``old`` now; most ranks stay as they are."""
    if old != new:
        if old is not None:
            del sorted_list[bisect.bisect_left(sorted_list, old)]
        if new is not None:
            bisect.insort(sorted_list, new)
    return new
