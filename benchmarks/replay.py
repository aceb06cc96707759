"""``bench replay``: the scheduler with admission beside two plain servers that know exact times.

In the simulator alone, on seven traces that ask for too much of the device, the link or both. Both
servers have one link and one device, where copies and computations overlap: whenever the device is
free it takes the request whose deadline is next, of those whose model is there; whenever the link
is free it brings the model of the next of the others. Models leave least recently used.

``keeping``: what is accepted is kept. When a request comes, all that wait are simulated to their
ends with it, copies included; it is refused if any of them is late.

``greedy``: it accepts everything. A request that can no longer be in time, its copy included, is
dropped, however long ago it came.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Final

from pipeswitch.scheduler import events as ev
from pipeswitch.simulator.arrivals import Arrival
from pipeswitch.simulator.costs import Costs, Link
from pipeswitch.simulator.replay import NEAR_MS, Models, PaperModel, Replay, Setting

from .models import MIB
from .trials import Run

SLO_MS: Final = 100.0  # beyond a request's computing
MODELS: Final = 40
REQUESTS: Final = 1800
MIB_EACH, MS_EACH, SIGMA, GROUPS = 200.0, 14.0, 0.6, 5  # lognormal
TRACES: Final = {  # computing time over time, memory over all models, bytes per millisecond
    "device 1.2": (1.2, 0.25, 12.6e6), "device 1.5": (1.5, 0.4, 12.6e6),
    "device 2.0": (2.0, 0.5, 50e6), "link": (0.8, 0.15, 6e6),
    "link x 2": (0.8, 0.15, 3e6),
    "memory": (1.0, 0.12, 12.6e6), "both": (0.9, 0.15, 12.6e6),
}  # fmt: skip


def run(bench: Run, _: Sequence[str] = ()) -> None:
    """Replay every trace; with ``--quick`` only the first."""
    for name in list(TRACES)[: 1 if bench.is_quick else None]:
        found = beside_plain(name, bench.seed, REQUESTS)
        for whose, shares in found.items():
            bench.find(f"{name}: in time, {whose}", shares[0])
        for whose in ("greedy", "keeping"):
            share = found["ours"][1] / found[whose][1]
            bench.find(f"{name}: computed in time / by a {whose} server", share)


def beside_plain(name: str, seed: int, count: int) -> dict[str, tuple[float, float]]:
    """Return the share in time and its computing (ms) on one of ``TRACES``.

    Rows: ours, those that ours accepted (with no computing), and the two plain servers.
    """
    load, memory, rate = TRACES[name]
    draw = random.Random(f"{seed} {name}")
    models = []
    for number in range(MODELS):
        size = draw.lognormvariate(math.log(MIB_EACH * MIB), SIGMA) / GROUPS
        ms = draw.lognormvariate(math.log(MS_EACH), SIGMA) / GROUPS
        models.append(
            PaperModel(
                name=f"m{number}",
                layer_bytes=(int(size),) * GROUPS,
                layer_ms=(ms,) * GROUPS,
                plan=tuple(range(GROUPS)),
            )
        )
    weights = [1 / (1 + number) for number in range(MODELS)]
    mean_ms = sum(w * m.compute_ms for w, m in zip(weights, models, strict=True)) / sum(weights)
    asked, at_ms = [], 0.0
    for _ in range(count):
        at_ms += draw.expovariate(load / mean_ms)
        asked.append(Arrival(at_ms, draw.choices(range(MODELS), weights)[0]))
    sizes = [model.size_bytes for model in models]
    setting = Setting(
        memory_bytes=max(int(memory * sum(sizes)), 2 * max(sizes)),
        costs=Costs(to_device=Link(bytes_per_ms=rate, fixed_ms=0.01)), policy="edf",
        slo_ms=SLO_MS, has_deadlines=True, admission="deadline", is_known=True,
    )  # fmt: skip
    ours = Kept(setting, Models(models))
    ours.serve(models)
    outcome = ours.replay(asked)
    return {
        "ours": (outcome.share_in_slo, outcome.busy_ms),
        "ours, of the accepted": (outcome.in_slo / (count - ours.refused_at_once), 0.0),
        "keeping": plain(setting, models, asked, is_greedy=False),
        "greedy": plain(setting, models, asked, is_greedy=True),
    }


class Kept(Replay):
    """Replay that counts the requests that are refused on arrival, so never accepted."""

    refused_at_once = 0

    def _answered(self, answer: ev.Answer) -> None:
        asked = self.asked.get(answer.token)
        if asked is not None and answer.error is not None and asked.at_ms == self.now_ms:
            self.refused_at_once += 1
        super()._answered(answer)


@dataclass(slots=True)
class _Server:
    """Plain server with exact times; requests are (due, number, model)."""

    load_ms: list[float]
    took_ms: list[float]
    sizes: list[int]
    memory_bytes: int
    is_greedy: bool = False
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
        """Run until then, if no request comes meanwhile."""
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
        if self.is_greedy:
            self.waiting = [one for one in self.waiting if self._is_possible(one)]
        if self.computing is None:
            ready = (one for one in self.waiting if one[2] in self.used and one[2] != self.coming)
            self.computing = next(ready, None)
            if self.computing is not None:
                self.waiting.remove(self.computing)
                self.used[self.computing[2]] = self.now_ms
                self.free_ms = self.now_ms + self.took_ms[self.computing[2]]
        absent = (model for *_, model in self.waiting if model not in self.used)
        for model in list(absent)[: None if self.is_greedy else 1] if self.coming < 0 else ():
            if self._has_room(model):
                self.coming, self.link_ms = model, self.now_ms + self.load_ms[model]
                self.used[model] = self.now_ms
                return

    def _has_room(self, wanted: int) -> bool:
        """Whether a model fits, once those that were not used for longest have left."""
        kept = self.computing[2] if self.computing is not None else -1
        room, leaving = self.memory_bytes - sum(self.sizes[name] for name in self.used), []
        for name in sorted(set(self.used) - {kept}, key=self.used.__getitem__):
            if room >= self.sizes[wanted]:
                break
            leaving.append(name)
            room += self.sizes[name]
        if room < self.sizes[wanted]:
            return False
        self.used = {name: at for name, at in self.used.items() if name not in leaving}
        return True

    def _is_possible(self, one: tuple[float, int, int]) -> bool:
        """Whether a request can still be in time, its model's copy included."""
        due_ms, _, model = one
        copy_ms = 0.0 if model in self.used else self.load_ms[model]
        if self.coming >= 0 and (model == self.coming or model not in self.used):
            copy_ms += self.link_ms - self.now_ms
        return self.now_ms + copy_ms + self.took_ms[model] <= due_ms + NEAR_MS


def plain(
    setting: Setting, models: Sequence[PaperModel], arrivals: Sequence[Arrival], is_greedy: bool
) -> tuple[float, float]:
    """Return the share of requests in time, and what those computed (ms)."""
    server = _Server(
        [model.load_ms(setting.costs.to_device) for model in models],
        [model.compute_ms for model in models],
        [model.size_bytes for model in models],
        setting.memory_bytes,
        is_greedy,
    )
    for number, one in enumerate(arrivals):
        server.run(one.at_ms)
        request = (one.at_ms + setting.slo_ms + server.took_ms[one.model], number, one.model)
        tried = server.copy()
        insort(tried.waiting, request)
        if not is_greedy:
            tried.run(math.inf)
        if not tried.late:
            insort(server.waiting, request)
    server.run(math.inf)
    return server.in_time / len(arrivals), server.work_ms
