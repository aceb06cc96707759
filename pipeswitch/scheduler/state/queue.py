"""Waiting requests by token, by model and by deadline; no operation scans all of them."""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Iterator

from ...ipc.messages.base import ModelName
from ..policies import View, Waiting
from ..policies.guard import PolicyGuard
from ..policies.policy import SortsBy
from .events import Token
from .fair_queue import CallerQueue
from .policy_queue import IsResident, PolicyQueue
from .records import Request

SPARE_DEADLINES = 64  # entries beyond twice the queue's length at which the heap is rebuilt


class Queue:
    """Waiting requests, in the order in which they were added and in the order of a policy.

    Attributes:
        unchecked: models that must be checked for a place on the device: their first request was
            just added, or the pinned models have changed.
    """

    def __init__(
        self, judge: PolicyGuard | None = None, accounts: CallerQueue | None = None
    ) -> None:
        self.unchecked: dict[ModelName, None] = {}
        self._lines = PolicyQueue(judge, accounts) if judge and accounts else None
        self.requests: dict[Token, tuple[int, Request]] = {}  # (number by arrival, request)
        self._of: dict[ModelName, dict[Token, Request]] = {}
        self._held: Counter[tuple[str, str]] = Counter()  # (caller, model or "" for all)
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; also has removed ones
        self._due: list[tuple[float, int, Request]] = []  # requests with a deadline, sorted by it
        self._added = 0
        self.fresh: list[Request] = []  # requests that were added since the dispatcher looked

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self.requests.values())

    def __contains__(self, token: Token) -> bool:
        return token in self.requests

    def get(self, token: Token) -> Request | None:
        """Return the request of that token, if it waits here."""
        return self.requests[token][1] if token in self.requests else None

    def add(self, request: Request, *, is_back: bool = False) -> None:
        """Add the request at the end, or at its old place if it was dispatched (``is_back``)."""
        if is_back and request.batching.number:
            number = request.batching.number
        else:
            self._added += 1
            number = request.batching.number = self._added
        self.requests[request.token] = (number, request)
        if request.model not in self._of:
            self._of[request.model] = {}
            self.unchecked[request.model] = None
        self._of[request.model][request.token] = request
        self._held[request.origin.caller, ""] += 1
        self._held[request.origin.caller, request.model] += 1
        if self._lines is not None:
            self._lines.add(request, number, is_back=is_back)
            self.fresh.append(request)
        if request.origin.deadline_at_ms is not None:
            bisect.insort(self._due, (request.origin.deadline_at_ms, number, request))
        due_at_ms = request.forecast.infeasible_after_ms
        if due_at_ms is None or due_at_ms > request.due_ms:
            due_at_ms = request.origin.deadline_at_ms
        if due_at_ms is not None:
            if len(self._deadlines) > 2 * len(self) + SPARE_DEADLINES:
                self._deadlines = [entry for entry in self._deadlines if self._holds(entry)]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (due_at_ms, number, request))

    def discard(self, request: Request) -> None:
        """Remove a request; do nothing if it is not in this queue."""
        entry = self.requests.pop(request.token, None)
        if entry is None:
            return
        for key in ((request.origin.caller, ""), (request.origin.caller, request.model)):
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
        if request.origin.deadline_at_ms is not None:
            at = (request.origin.deadline_at_ms, entry[0])
            del self._due[bisect.bisect_left(self._due, at)]
        same = self._of[request.model]
        del same[request.token]
        if not same:
            del self._of[request.model]
            self.unchecked.pop(request.model, None)
        if self._lines is not None:
            self._lines.discard(request, entry[0])

    def heads(
        self, is_resident: IsResident, current: ModelName | None, view: View
    ) -> Iterator[tuple[Waiting, Request]]:
        """Yield the first request of each caller, model and priority; callers take turns.

        A caller's requests are in policy order. Valid only until a request is added or discarded.
        """
        assert self._lines is not None
        return self._lines.heads(is_resident, current, view)

    def reorder(self, is_resident: IsResident, current: ModelName | None, view: View) -> None:
        """Update the ranks of changed lines (``SubQueue``)."""
        assert self._lines is not None
        self._lines.reorder(is_resident, current, view)

    @property
    def until_ms(self) -> float:
        """Next instant at which time alone changes a rank."""
        assert self._lines is not None
        return self._lines.until_ms

    def held_by(self, caller: str, model: str = "") -> int:
        """Return the number of the caller's waiting requests, for one model or for all."""
        return self._held[caller, model]

    def ahead(self, request: Request) -> tuple[int, int]:
        """Return lower bounds for the caller's requests before a new one: number and batch."""
        assert self._lines is not None
        return self._lines.ahead(request)

    def around(self, request: Request, sorts_by: SortsBy) -> tuple[list[Request], list[Request]]:
        """Return the caller's requests before a new one, and those with later deadlines."""
        if sorts_by == "arrival":
            return [one for one in self if one.origin.caller == request.origin.caller], []
        at = (request.due_ms, self._added + 1)
        own = [due for due in self._due if due[2].origin.caller == request.origin.caller]
        return [due[2] for due in own if due <= at], [due[2] for due in own if due > at]

    def of_line(self, request: Request) -> Iterator[Request]:
        """Yield the request and all others with its model and priority; callers take turns."""
        assert self._lines is not None
        return self._lines.of_line(request)

    def changed(self, model: ModelName) -> None:
        """Mark a model for checks and ranking: its residency or its prediction has changed."""
        if model in self._of:
            self.unchecked[model] = None
        if self._lines is not None:
            self._lines.changed(model)

    def pins_changed(self) -> None:
        """Check every model again: after a change of the pinned models, other models may fit."""
        self.unchecked = dict.fromkeys(self._of)

    def models(self) -> list[ModelName]:
        """Return the models that waiting requests need."""
        return list(self._of)

    def count(self, model: ModelName) -> int:
        return len(self._of[model]) if model in self._of else 0

    def of(self, model: ModelName) -> list[Request]:
        """Return the requests for one model, in order."""
        return list(self._of.get(model, {}).values())

    def expired(self, now_ms: float) -> list[Request]:
        """Return the requests whose deadline can no longer be met; each is returned only once."""
        if not self._deadlines:
            return []
        due = {}
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            entry = heapq.heappop(self._deadlines)
            if self._holds(entry):
                due[entry[1]] = entry[2]  # once, also if it was queued twice
        return [due[number] for number in sorted(due)]

    def check(self) -> None:
        """Assert that the requests of all models are exactly the waiting ones."""
        waiting = {token for same in self._of.values() for token in same}
        assert waiting == self.requests.keys(), "a request is counted but does not wait"

    def check_heads(self, is_resident: IsResident, current: ModelName | None, view: View) -> None:
        """Assert that a scan of all waiting requests finds the same order."""
        assert self._lines is not None
        by_number = sorted(self.requests.values(), key=lambda entry: entry[0])
        self._lines.check([request for _, request in by_number], is_resident, current, view)

    def _holds(self, entry: tuple[float, int, Request]) -> bool:
        _, number, request = entry
        return self.requests.get(request.token, (0, None))[0] == number
