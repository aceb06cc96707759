"""Which saved tensors of a training step leave the device, so that a budget is kept. Pure.

vDNN (MICRO'16): what forward saves goes to the host while later layers compute, and comes back
ahead of its use in backward. We differ: not layers are chosen but storages, by what one step has
shown, and only as many as the budget asks for.

The model: one lane carries copies in the order in which they are asked for. Forward waits at a
save that has no room yet; backward at a use whose bytes are not back yet. Bytes come back in the
order of their use, each as soon as there is room for it. ``forecast`` runs a step by these rules,
which are the executor's (``workers/training/activations.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal

LEAST_BYTES: Final = 4096  # smaller ones stay: a copy costs more than they hold
MAX_TRIES: Final = 32  # of how many of the best to send, and of which to keep after all

What = Literal["save", "use", "release"]
Place = Literal["", "device", "leaving", "host", "coming"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a storage in a measured step, in order.

    ``compute_ms``: since the event before, without what the step waited for copies. A storage has
    one save; only its first use counts.
    """

    what: What
    storage: int
    compute_ms: float


@dataclass(frozen=True, kw_only=True)
class Step:
    """One measured step: sizes in the order of saving, and what happened to them."""

    sizes_bytes: Sequence[int]
    events: Sequence[Event]


@dataclass(frozen=True, kw_only=True)
class Lane:
    """What carries the copies."""

    bytes_per_ms: float
    call_ms: float = 0.0  # of each copy, whatever its size

    def copy_ms(self, size_bytes: int) -> float:
        return self.call_ms + size_bytes / self.bytes_per_ms


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a step does when these storages leave."""

    leaving: frozenset[int]
    wait_ms: float
    peak_bytes: int
    moved_bytes: int  # out; as many come back
    fetches: tuple[tuple[int, int], ...] = ()  # (storage, the event at which it is asked back)


class _Run:
    """The state of ``forecast``."""

    def __init__(self, step: Step, leaving: Collection[int], budget_bytes: int, lane: Lane) -> None:
        self._step, self._leaving, self._budget, self._lane = step, leaving, budget_bytes, lane
        self._place: list[Place] = [""] * len(step.sizes_bytes)
        self._queue: deque[tuple[int, float]] = deque()  # storage, asked for at
        self._lane_free_ms = self._now_ms = 0.0
        self._held = 0
        self._is_turned = False  # a use was the last of saves and uses: bytes are asked back
        self._ahead: list[int] = []  # what will be, the next one last
        uses = [event.storage for event in step.events if event.what == "use"]
        self._rank = {storage: -rank for rank, storage in reversed([*enumerate(uses)])}
        self._used: set[int] = set()
        self.wait_ms, self.peak, self.moved = 0.0, 0, 0
        self.fetches: list[tuple[int, int]] = []

    def is_possible(self) -> bool:
        """Run to the end; False: there is a moment at which waiting makes no room."""
        for number, event in enumerate(self._step.events):
            self._number = number
            self._now_ms += event.compute_ms
            self._carry(self._now_ms)
            if event.what == "release":
                self._release(event.storage)
            elif not (self._save if event.what == "save" else self._use)(event.storage):
                return False
        return True

    def _save(self, storage: int) -> bool:
        self._is_turned = False
        if not self._make_room(storage):
            return False
        self._place[storage] = "device"
        if storage in self._leaving:
            self._place[storage] = "leaving"
            self._queue.append((storage, self._now_ms))
        return True

    def _use(self, storage: int) -> bool:
        self._stay(storage)
        if self._place[storage] == "host":
            if not self._make_room(storage):
                return False
            self._ask_back(storage)
        self._used.add(storage)
        if not self._is_turned:
            self._is_turned = True
            away = (one for one in self._rank.keys() - self._used
                    if self._place[one] in ("host", "leaving"))  # fmt: skip
            self._ahead = sorted(away, key=self._rank.__getitem__)
        self._look_ahead()
        while self._place[storage] == "coming":
            self._wait()
        return True

    def _release(self, storage: int) -> None:
        self._stay(storage)
        if self._place[storage] in ("device", "coming"):
            self._held -= self._step.sizes_bytes[storage]
        self._place[storage] = ""
        if self._is_turned:
            self._look_ahead()

    def _stay(self, storage: int) -> None:
        """Its copy out has not ended: it need not leave."""
        if self._place[storage] == "leaving":
            self._queue.remove(next(one for one in self._queue if one[0] == storage))
            self._place[storage] = "device"

    def _look_ahead(self) -> None:
        while self._ahead:
            storage = self._ahead[-1]
            self._stay(storage)
            if self._place[storage] == "host":
                if self._held + self._step.sizes_bytes[storage] > self._budget:
                    return
                self._hold(storage)
                self._ask_back(storage)
            self._ahead.pop()

    def _ask_back(self, storage: int) -> None:
        self._place[storage] = "coming"
        self._queue.append((storage, self._now_ms))
        self.fetches.append((storage, self._number))

    def _hold(self, storage: int) -> None:
        self._held += self._step.sizes_bytes[storage]
        self.peak = max(self.peak, self._held)

    def _make_room(self, storage: int) -> bool:
        """Wait until it fits, and count it."""
        while self._held + self._step.sizes_bytes[storage] > self._budget:
            if not any(self._place[one] == "leaving" for one, _ in self._queue):
                return False
            self._wait()
        self._hold(storage)
        return True

    def _wait(self) -> None:
        end_ms = self._end_ms()
        self.wait_ms += max(0.0, end_ms - self._now_ms)
        self._now_ms = max(self._now_ms, end_ms)
        self._carry(self._now_ms)

    def _end_ms(self) -> float:
        storage, asked_ms = self._queue[0]
        begin_ms = max(self._lane_free_ms, asked_ms)
        return begin_ms + self._lane.copy_ms(self._step.sizes_bytes[storage])

    def _carry(self, until_ms: float) -> None:
        """The lane goes on until then."""
        while self._queue and (end_ms := self._end_ms()) <= until_ms:
            storage, _ = self._queue.popleft()
            self._lane_free_ms = end_ms
            if self._place[storage] == "leaving":
                self._place[storage] = "host"
                self._held -= self._step.sizes_bytes[storage]
                self.moved += self._step.sizes_bytes[storage]
            else:
                self._place[storage] = "device"


def forecast(
    step: Step, leaving: Collection[int], budget_bytes: int, lane: Lane
) -> Forecast | None:
    """What comes of it; None when it cannot keep the budget."""
    run = _Run(step, leaving, budget_bytes, lane)
    if not run.is_possible():
        return None
    return Forecast(
        leaving=frozenset(leaving), wait_ms=run.wait_ms, peak_bytes=run.peak,
        moved_bytes=run.moved, fetches=tuple(run.fetches),
    )  # fmt: skip


def plan(step: Step, budget_bytes: int, lane: Lane) -> Forecast | None:
    """The storages that leave: those first whose way there and back hides best behind compute.

    1. Rank them by how much of the time between save and use is left over by their two copies.
    2. Take the fewest of the best that keep the budget, and look whether more wait less.
    3. Of the largest, keep those after all that need not leave, or let them leave too.

    Returns:
        None where no choice keeps the budget by waiting.
    """
    ranked = _ranked(step, lane)
    low, high = 0, len(ranked)
    while low < high:  # 2. more that leave need less room
        middle = (low + high) // 2
        found = forecast(step, ranked[:middle], budget_bytes, lane)
        low, high = (low, middle) if found else (middle + 1, high)
    stride = max(1, (len(ranked) - low) // MAX_TRIES)
    tried = [forecast(step, ranked[:n], budget_bytes, lane)
             for n in range(low, len(ranked) + 1, stride)]  # fmt: skip
    fitting = [one for one in tried if one is not None]
    if not fitting:
        return None
    best = _better(*fitting)
    by_size = sorted(ranked, key=step.sizes_bytes.__getitem__, reverse=True)
    for storage in by_size[:MAX_TRIES]:  # 3.
        other = forecast(step, best.leaving ^ {storage}, budget_bytes, lane)
        best = best if other is None else _better(best, other)
    return best


def _better(*found: Forecast) -> Forecast:
    return min(found, key=lambda one: (one.wait_ms, one.moved_bytes))


def _ranked(step: Step, lane: Lane) -> list[int]:
    """Those that may leave, the best hidden first."""
    now_ms, saved_ms, slack_ms = 0.0, {}, {}
    for event in step.events:
        now_ms += event.compute_ms
        if event.what == "save":
            saved_ms[event.storage] = now_ms
        elif event.what == "use" and event.storage not in slack_ms:
            copies_ms = 2 * lane.copy_ms(step.sizes_bytes[event.storage])
            slack_ms[event.storage] = now_ms - saved_ms[event.storage] - copies_ms
    large = [storage for storage in slack_ms if step.sizes_bytes[storage] >= LEAST_BYTES]
    return sorted(large, key=slack_ms.__getitem__, reverse=True)
