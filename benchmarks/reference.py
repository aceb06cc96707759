"""Two plain servers to hold the scheduler against: exact times, one link, one device. Pure.

``greedy``: copies and computations overlap. Whenever the device is free it takes the request whose
deadline is next, of those whose model is there; whenever the link is free it brings the model of
the next of the others. Models leave least recently used. A request that can no longer be in time,
its copy included, is dropped, however long ago it came.

``keeping``: the same device and link, but what is accepted is kept. When a request comes, all that
wait are simulated to their ends with it, copies included; it is refused if any of them is late.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

from pipeswitch.simulator.arrivals import Arrival
from pipeswitch.simulator.replay import NEAR_MS, PaperModel, Setting


@dataclass(slots=True)
class _Asked:
    model: int
    at_ms: float
    due_ms: float


def greedy(
    setting: Setting, models: Sequence[PaperModel], arrivals: Sequence[Arrival]
) -> tuple[float, float]:
    """Of the requests that are in time: the share of all, and what they computed (ms)."""
    load_ms = [model.load_ms(setting.costs.to_device) for model in models]
    took_ms = [model.compute_ms for model in models]
    asked = [
        _Asked(one.model, one.at_ms, one.at_ms + setting.slo_ms + took_ms[one.model])
        for one in arrivals
    ]
    waiting: list[_Asked] = []
    used: dict[int, float] = {}  # what is on the device, or on its way: when it was last used
    computing: _Asked | None = None
    coming = -1  # the model that the link brings
    free_ms = link_ms = math.inf  # when the device, or the link, is free; infinite: it is
    now_ms, work_ms, number, in_time = 0.0, 0.0, 0, 0

    def is_possible(one: _Asked) -> bool:
        copy_ms = 0.0 if one.model in used else load_ms[one.model]
        if coming >= 0 and (one.model == coming or one.model not in used):
            copy_ms += link_ms - now_ms
        return now_ms + copy_ms + took_ms[one.model] <= one.due_ms + NEAR_MS

    while True:
        waiting = sorted(filter(is_possible, waiting), key=lambda one: one.due_ms)
        if computing is None:
            ready = (one for one in waiting if one.model in used and one.model != coming)
            computing = next(ready, None)
            if computing is not None:
                waiting.remove(computing)
                used[computing.model] = now_ms
                free_ms = now_ms + took_ms[computing.model]
        for one in waiting if coming < 0 else ():
            room = setting.memory_bytes - sum(models[name].size_bytes for name in used)
            kept = computing.model if computing is not None else -1
            leaving = []
            for name in sorted(set(used) - {kept}, key=used.__getitem__):
                if room >= models[one.model].size_bytes:
                    break
                leaving.append(name)
                room += models[name].size_bytes
            if one.model not in used and room >= models[one.model].size_bytes:
                used = {name: at for name, at in used.items() if name not in leaving}
                coming, link_ms = one.model, now_ms + load_ms[one.model]
                used[coming] = now_ms
                break
        next_ms = asked[number].at_ms if number < len(asked) else math.inf
        now_ms = min(free_ms, link_ms, next_ms)
        if now_ms == math.inf:
            return in_time / len(asked), work_ms
        if computing is not None and free_ms <= now_ms:
            in_time += 1  # it was possible when it began
            work_ms += took_ms[computing.model]
            computing, free_ms = None, math.inf
        if coming >= 0 and link_ms <= now_ms:
            used[coming], coming, link_ms = now_ms, -1, math.inf
        while number < len(asked) and asked[number].at_ms <= now_ms:
            waiting.append(asked[number])
            number += 1


@dataclass(slots=True)
class _Server:
    """One that keeps its promises; requests are (due, number, model)."""

    load_ms: list[float]
    took_ms: list[float]
    sizes: list[int]
    memory_bytes: int
    now_ms: float = 0.0
    waiting: list[tuple[float, int, int]] = field(default_factory=list)  # by deadline
    used: dict[int, float] = field(default_factory=dict)  # what is there or comes: last use
    computing: tuple[float, int, int] | None = None
    coming: int = -1
    free_ms: float = math.inf  # when the device, or the link, is free; infinite: it is
    link_ms: float = math.inf
    in_time: int = 0
    late: int = 0
    work_ms: float = 0.0

    def copy(self) -> _Server:
        other = copy(self)
        other.waiting, other.used = [*self.waiting], {**self.used}
        return other

    def run(self, until_ms: float) -> None:
        """Until then, if nothing else comes."""
        while True:
            self._begin()
            if min(self.free_ms, self.link_ms) > until_ms:
                self.now_ms = until_ms
                return
            self.now_ms = min(self.free_ms, self.link_ms)
            if self.now_ms == math.inf:
                return
            if self.computing is not None and self.free_ms <= self.now_ms:
                due_ms, _, model = self.computing
                is_in_time = self.now_ms <= due_ms + NEAR_MS
                self.in_time, self.late = self.in_time + is_in_time, self.late + (not is_in_time)
                self.work_ms += is_in_time * self.took_ms[model]
                self.computing, self.free_ms = None, math.inf
            if self.coming >= 0 and self.link_ms <= self.now_ms:
                self.used[self.coming], self.coming, self.link_ms = self.now_ms, -1, math.inf

    def _begin(self) -> None:
        """The device takes the first whose model is there, the link the first of the others."""
        if self.computing is None:
            ready = (one for one in self.waiting if one[2] in self.used and one[2] != self.coming)
            self.computing = next(ready, None)
            if self.computing is not None:
                self.waiting.remove(self.computing)
                self.used[self.computing[2]] = self.now_ms
                self.free_ms = self.now_ms + self.took_ms[self.computing[2]]
        absent = next((model for *_, model in self.waiting if model not in self.used), -1)
        if self.coming >= 0 or absent < 0:
            return
        kept = self.computing[2] if self.computing is not None else -1
        room, leaving = self.memory_bytes - sum(self.sizes[name] for name in self.used), []
        for name in sorted(set(self.used) - {kept}, key=self.used.__getitem__):
            if room >= self.sizes[absent]:
                break
            leaving.append(name)
            room += self.sizes[name]
        if room >= self.sizes[absent]:
            self.used = {name: at for name, at in self.used.items() if name not in leaving}
            self.coming, self.link_ms = absent, self.now_ms + self.load_ms[absent]
            self.used[absent] = self.now_ms


def keeping(
    setting: Setting, models: Sequence[PaperModel], arrivals: Sequence[Arrival]
) -> tuple[float, float]:
    """Of the requests that are in time: the share of all, and what they computed (ms)."""
    server = _Server(
        [model.load_ms(setting.costs.to_device) for model in models],
        [model.compute_ms for model in models],
        [model.size_bytes for model in models],
        setting.memory_bytes,
    )
    for number, one in enumerate(arrivals):
        server.run(one.at_ms)
        due_ms = one.at_ms + setting.slo_ms + server.took_ms[one.model]
        tried = server.copy()
        insort(tried.waiting, (due_ms, number, one.model))
        tried.run(math.inf)
        if not tried.late:
            insort(server.waiting, (due_ms, number, one.model))
    server.run(math.inf)
    return server.in_time / len(arrivals), server.work_ms
