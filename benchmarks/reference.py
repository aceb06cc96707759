"""A plain greedy server to hold the scheduler against: exact times, one link, one device. Pure.

Copies and computations overlap. Whenever the device is free it takes the request whose deadline is
next, of those whose model is there; whenever the link is free it brings the model of the next of
the others. Models leave least recently used. A request that can no longer be in time, its copy
included, is dropped, however long ago it came.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
