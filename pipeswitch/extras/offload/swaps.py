"""Choice of the saved tensors of a training step that leave the device until their use. Pure.

vDNN (MICRO'16) takes the tensors that forward saves. It copies them out to the host while later
layers compute, and back before backward uses them. Here one measured step determines the choice,
and a simulator rates it, as in SwapAdvisor (ASPLOS'20). Only as many storages leave as needed;
operators keep the script's order.

The simulation has three queues: compute, copies out and copies in. Each kind of copy runs in the
order of its requests. A copy out is requested at the save. Forward waits at a save until there is
room, and backward waits at a use until the bytes are back. From the first use on, storages are
requested back in the order of use, each as soon as there is room for it. ``forecast`` simulates a
step by these rules, and ``activations.py`` follows them. Another order or a later
copy out gains nothing (ADR 47), so the set of storages that leave is the whole plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal

MIN_BYTES: Final = 4096  # smaller storages stay: their copies would cost more than they free
MAX_TRIES: Final = 32  # approximate number of plans that ``hiding`` tries

What = Literal["save", "use", "release"]
Place = Literal["", "device", "leaving", "host", "coming"]


@dataclass(frozen=True, slots=True)
class Event:
    """Save, use or release of a storage in a measured step.

    ``compute_ms`` is the time since the previous event, without waits for copies. A storage has one
    save, and only the first of its uses counts.
    """

    what: What
    storage: int
    compute_ms: float


@dataclass(frozen=True, kw_only=True)
class Step:
    """One measured step: the storages' sizes in the order of their saves, and the events."""

    sizes_bytes: Sequence[int]
    events: Sequence[Event]


@dataclass(frozen=True, kw_only=True)
class LinkQueue:
    """Link that carries the copies of one direction."""

    bytes_per_ms: float
    call_ms: float = 0.0  # fixed cost of each copy

    def copy_ms(self, size_bytes: int) -> float:
        return self.call_ms + size_bytes / self.bytes_per_ms


Links = tuple[LinkQueue, LinkQueue]  # (link for copies out, link for copies in)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted course of a step if the storages in ``leaving`` leave the device."""

    leaving: frozenset[int]
    wait_ms: float
    peak_bytes: int
    moved_bytes: int  # bytes that are copied out; the same bytes are copied back
    fetches: tuple[tuple[int, int], ...] = ()  # (storage, index of the event that requests it back)


class _ForecastState:
    """State of the simulation in ``forecast``."""

    def __init__(
        self, step: Step, leaving: Collection[int], budget_bytes: int, links: Links
    ) -> None:
        self._step, self._leaving, self._budget = step, leaving, budget_bytes
        self._place: list[Place] = [""] * len(step.sizes_bytes)
        self._links = {"leaving": links[0], "coming": links[1]}
        self._queues: dict[str, deque[tuple[int, float]]] = {  # storage, time of the request
            "leaving": deque(),
            "coming": deque(),
        }
        self._free_ms = {"leaving": 0.0, "coming": 0.0}
        self._now_ms = 0.0
        self._held = 0
        self._is_turned = False  # the last save or use was a use, so storages are requested back
        self._ahead: list[int] = []  # storages to request back, the next one last
        self._rank = {storage: -rank for rank, storage in enumerate(order_of_use(step))}
        self._used: set[int] = set()
        self.wait_ms, self.peak, self.moved = 0.0, 0, 0
        self.fetches: list[tuple[int, int]] = []

    def is_possible(self) -> bool:
        """Simulate the step; return False if an event needs more room than waiting can free."""
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
            self._queues["leaving"].append((storage, self._now_ms))
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
            away = (
                one
                for one in self._rank.keys() - self._used
                if self._place[one] in ("host", "leaving")
            )
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
        """Cancel a storage's copy out if the copy has not ended."""
        if self._place[storage] == "leaving":
            queue = self._queues["leaving"]
            queue.remove(next(one for one in queue if one[0] == storage))
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
        self._queues["coming"].append((storage, self._now_ms))
        self.fetches.append((storage, self._number))

    def _hold(self, storage: int) -> None:
        self._held += self._step.sizes_bytes[storage]
        self.peak = max(self.peak, self._held)

    def _make_room(self, storage: int) -> bool:
        """Wait until the storage fits, and count its bytes; return False if it never fits."""
        while self._held + self._step.sizes_bytes[storage] > self._budget:
            if not self._queues["leaving"]:
                return False
            self._wait()
        self._hold(storage)
        return True

    def _wait(self) -> None:
        end_ms = min(self._end_ms(way) for way, queue in self._queues.items() if queue)
        self.wait_ms += max(0.0, end_ms - self._now_ms)
        self._now_ms = max(self._now_ms, end_ms)
        self._carry(self._now_ms)

    def _end_ms(self, way: str) -> float:
        storage, asked_ms = self._queues[way][0]
        copy_ms = self._links[way].copy_ms(self._step.sizes_bytes[storage])
        return max(self._free_ms[way], asked_ms) + copy_ms

    def _carry(self, until_ms: float) -> None:
        """Finish the copies that end by ``until_ms``."""
        for way, queue in self._queues.items():
            while queue and (end_ms := self._end_ms(way)) <= until_ms:
                storage, _ = queue.popleft()
                self._free_ms[way] = end_ms
                if way == "leaving":
                    self._place[storage] = "host"
                    self._held -= self._step.sizes_bytes[storage]
                    self.moved += self._step.sizes_bytes[storage]
                elif self._place[storage] == "coming":
                    self._place[storage] = "device"


def forecast(
    step: Step, leaving: Collection[int], budget_bytes: int, links: Links
) -> Forecast | None:
    """Return the predicted course of a step, or None if the step needs more than the budget."""
    run = _ForecastState(step, leaving, budget_bytes, links)
    if not run.is_possible():
        return None
    return Forecast(
        leaving=frozenset(leaving),
        wait_ms=run.wait_ms,
        peak_bytes=run.peak,
        moved_bytes=run.moved,
        fetches=tuple(run.fetches),
    )


def order_of_use(step: Step) -> tuple[int, ...]:
    """Return the storages in order of their first use."""
    return tuple(dict.fromkeys(event.storage for event in step.events if event.what == "use"))


def plan(step: Step, budget_bytes: int, links: Links) -> Forecast | None:
    """Return the best of vDNN's and Belady's plans, or None if all exceed the budget."""
    forecasts = hiding(step, budget_bytes, links)
    if one := forecast(step, farthest(step, budget_bytes), budget_bytes, links):
        forecasts.append(one)
    return min(forecasts, key=lambda one: (one.wait_ms, one.moved_bytes), default=None)


def min_bytes(step: Step) -> int:
    """Return the smallest budget a step can keep, in bytes; all storages of ``_ranked`` leave."""
    links = (LinkQueue(bytes_per_ms=1.0),) * 2
    unlimited = forecast(step, (), 1 << 62, links)
    assert unlimited is not None
    low, high, leaving = 0, unlimited.peak_bytes, _ranked(step, links)
    while low < high:
        middle = (low + high) // 2
        fit = forecast(step, leaving, middle, links)
        low, high = (low, middle) if fit else (middle + 1, high)
    return high


def hiding(step: Step, budget_bytes: int, links: Links) -> list[Forecast]:
    """Return the plans of vDNN's rule: storages leave in the order of ``_ranked``.
    The copies of the first storages hide best behind computation. In the first plan as few storages
    leave as the budget allows; more leave in each later plan."""
    ranked = _ranked(step, links)
    low, high = 0, len(ranked)
    while low < high:  # binary search: the step needs less room if more storages leave
        middle = (low + high) // 2
        fit = forecast(step, ranked[:middle], budget_bytes, links)
        low, high = (low, middle) if fit else (middle + 1, high)
    stride = max(1, (len(ranked) - low) // MAX_TRIES)
    tried = [
        forecast(step, ranked[:n], budget_bytes, links) for n in range(low, len(ranked) + 1, stride)
    ]
    return [one for one in tried if one is not None]


def farthest(step: Step, budget_bytes: int) -> set[int]:
    """Return the storages that leave by Belady's rule: those whose next use comes latest."""
    sizes, order = step.sizes_bytes, order_of_use(step)
    here: set[int] = set()
    leaving: set[int] = set()
    for event in step.events:
        here = here - {event.storage} if event.what == "release" else here | {event.storage}
        for one in reversed(order):
            if sum(sizes[storage] for storage in here) <= budget_bytes:
                break
            if one in here - {event.storage} and sizes[one] >= MIN_BYTES:
                here.remove(one)
                leaving.add(one)
    return leaving


def _ranked(step: Step, links: Links) -> list[int]:
    """Return the storages that may leave, ordered by falling slack.
    Slack is the time between save and first use, minus the time of both copies."""
    now_ms, saved_ms, slack_ms = 0.0, {}, {}
    for event in step.events:
        now_ms += event.compute_ms
        if event.what == "save":
            saved_ms[event.storage] = now_ms
        elif event.what == "use" and event.storage not in slack_ms:
            copies_ms = sum(link.copy_ms(step.sizes_bytes[event.storage]) for link in links)
            slack_ms[event.storage] = now_ms - saved_ms[event.storage] - copies_ms
    large = [storage for storage in slack_ms if step.sizes_bytes[storage] >= MIN_BYTES]
    return sorted(large, key=slack_ms.__getitem__, reverse=True)
