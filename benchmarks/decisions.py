"""``bench decisions``: what one decision costs, by how many requests wait.

The real scheduler in the simulated world, 1,000 models of which 20 fit on the device. Each trial
is one event, timed through ``handle`` by the thread's own processor time: an arrival, or what a
process says. For each one that is answered another comes, so that as many wait all the time.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from typing import Final

from pipeswitch.ipc.messages import ModelName
from pipeswitch.planning.fit import quantile
from pipeswitch.scheduler import events as ev
from pipeswitch.scheduler.core import SchedulerSettings
from pipeswitch.scheduler.scheduler import Scheduler
from pipeswitch.simulator.costs import Costs, Link
from pipeswitch.simulator.programs import program_of
from pipeswitch.simulator.world import World

from .models import MIB
from .trials import Run

WAITING: Final = (10, 1_000, 10_000)
MODELS: Final = 1_000
RESIDENT: Final = 20
EVENTS: Final = 10_000
QUICK_EVENTS: Final = 2_000
MAX_P99_MS: Final = 0.2
DEADLINES_MS: Final = (None, 1e6, 2e6)


def run(bench: Run, _: Sequence[str] = ()) -> None:
    """Each number of waiting requests."""
    for waiting in WAITING:
        case = f"{waiting} waiting"
        bench.say(f"{case}, {MODELS} models")
        times = Timed(waiting, bench.seed).measure(bench.rounds(EVENTS, QUICK_EVENTS))
        p50_ms, p99_ms = quantile(times, 0.5), quantile(times, 0.99)
        numbers = {"events": len(times), "p50_ms": p50_ms, "p99_ms": p99_ms, "max_ms": max(times)}
        bench.record(case, "handle", 0, numbers)
        bench.find(f"{case}: handle, p50", p50_ms, "ms")
        bench.find(f"{case}: handle, p99", p99_ms, "ms", at_most=MAX_P99_MS)
    bench.notes.append(
        f"{MODELS} models of equal size, {RESIDENT} of them fit; uniform arrivals in three "
        "priorities, two of three requests with a deadline; the garbage collector is off"
    )


class Timed(World):
    """A server with so many waiting requests."""

    def __init__(self, waiting: int, seed: int) -> None:
        self.times_ms: list[float] = []
        self._random = random.Random(seed)
        self._waiting = waiting
        self._is_full = False
        settings = SchedulerSettings(
            arena_bytes=(RESIDENT + 1) * 4 * MIB, store_bytes=MODELS * 4 * MIB, words=2 * MODELS,
            max_queue=2 * waiting, max_queue_per_model=2 * waiting,
        )  # fmt: skip
        link = Link(bytes_per_ms=8 * MIB)
        super().__init__(Scheduler(settings), costs=Costs(to_device=link), is_checked=False)
        for index in range(MODELS):
            program = program_of(f"d{index}", 4 * MIB, groups=1, layer_ms=0.05)
            self.clients.register(ModelName(f"m{index}"), program)
        self.run()

    def measure(self, count: int) -> list[float]:
        """So many events with the queue full; milliseconds of each."""
        for _ in range(self._waiting):
            self.ask()
        self._is_full = True
        self.times_ms.clear()
        gc.collect()
        gc.disable()
        while len(self.times_ms) < count:
            self.run(self.now_ms + 5.0)
        gc.enable()
        return self.times_ms[:count]

    def ask(self) -> None:
        """One more request for any model."""
        model = ModelName(f"m{self._random.randrange(MODELS)}")
        priority, deadline_ms = self._random.randrange(3), self._random.choice(DEADLINES_MS)
        self.clients.infer(model, priority=priority, deadline_ms=deadline_ms)

    def handle(self, event: ev.Event) -> None:
        began = time.thread_time()
        commands = self.scheduler.handle(event, self.now_ms)
        self.times_ms.append(1000 * (time.thread_time() - began))
        self.perform(commands)
        if self._is_full and any(isinstance(command, ev.Answer) for command in commands):
            self.ask()
