"""A trace through the real scheduler in the simulated world, and what its clients saw. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ..ipc.messages import ModelName
from ..planning.fit import MIB
from ..planning.planned import costs_of, plan_of
from ..planning.profile import Profile
from ..planning.windows import Job, Memory, run
from ..programs.layout import REGION_ALIGN_BYTES, aligned
from ..scheduler import events as ev
from ..scheduler.core import SchedulerSettings
from ..scheduler.scheduler import Scheduler
from .arrivals import Arrival
from .costs import Costs, Link
from .programs import ALIGNMENT_BYTES, Program, manifest_of
from .world import World

WORDS_BYTES: Final = REGION_ALIGN_BYTES  # of the arena, for the arrival words
NEAR_MS: Final = 1e-6  # rounding of a sum of instants
REPORT_EVERY: Final = 500  # requests between two words to who watches
ENDLESS: Final = 1 << 30  # a limit of the queue that no trace reaches


@dataclass(frozen=True, kw_only=True)
class PaperModel:
    """A model as layers: bytes, and computing time in milliseconds at batch 1.

    ``plan``: the layers that open a group.
    """

    name: str
    layer_bytes: tuple[int, ...]
    layer_ms: tuple[float, ...]
    plan: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return sum(self.layer_bytes)

    @property
    def compute_ms(self) -> float:
        return sum(self.layer_ms)

    def program(self) -> Program:
        """As the simulated world takes it; sizes go up to whole tensors."""
        sizes = tuple(aligned(size, ALIGNMENT_BYTES) for size in self.layer_bytes)
        return Program(
            manifest=manifest_of(f"d-{self.name}", sizes, self.plan), plan=self.plan,
            layer_ms=self.layer_ms,
        )  # fmt: skip


def paper_model(name: str, profile: Profile) -> PaperModel:
    """As it was measured, in the groups that are planned from that."""
    costs, (plan, _) = costs_of(profile), plan_of(profile)
    return PaperModel(name=name, layer_bytes=costs.layer_bytes, layer_ms=costs.compute_ms,
                      plan=plan)  # fmt: skip


def link_of(profile: Profile) -> Link:
    """As it was measured."""
    beta = profile.link.beta_ms_per_mib
    return Link(bytes_per_ms=MIB / beta if beta else math.inf, fixed_ms=profile.link.alpha_ms)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One server to replay on.

    Attributes:
        memory_bytes: of the device, for models.
        slo_ms: how long a request may take beyond its own computing.
        has_deadlines: whether requests carry that as their deadline; without, a late one is
            computed all the same.
    """

    memory_bytes: int
    costs: Costs
    policy: str = "priority"
    max_wait_ms: float = 2000.0
    slo_ms: float = 100.0
    has_deadlines: bool = False
    admission: str = "off"
    look_ahead: bool = True


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a trace's requests; milliseconds of the virtual clock.

    Attributes:
        latency_ms: of each request that was computed, in order of arrival.
        in_slo: how many of all ended in time.
        refused: how many of all were not computed, by the error's name.
        busy_ms: the device computed this long.
        order: the requests by their number in the trace, as they were computed.
    """

    requests: int
    latency_ms: tuple[float, ...]
    in_slo: int
    refused: dict[str, int]
    switches: int
    copied_bytes: int
    busy_ms: float
    makespan_ms: float
    order: tuple[int, ...]

    @property
    def share_in_slo(self) -> float:
        return self.in_slo / self.requests if self.requests else 1.0

    @property
    def idle_share(self) -> float:
        return 1.0 - self.busy_ms / self.makespan_ms if self.makespan_ms else 1.0


def replay(
    setting: Setting,
    models: Sequence[PaperModel],
    arrivals: Sequence[Arrival],
    *,
    watch: Callable[[int], None] | None = None,
    take_span: Callable[[ev.Span], None] | None = None,
) -> Outcome:
    """All requests of a trace, on one server that has registered the models.

    Args:
        watch: is told how many have been answered.
        take_span: takes each interval of the timeline.

    Raises:
        ValueError: a model is larger than the memory.
    """
    largest = max(models, key=lambda model: model.size_bytes)
    if largest.size_bytes > setting.memory_bytes:
        raise ValueError(
            f'"{largest.name}" has {largest.size_bytes} bytes, the device {setting.memory_bytes}'
        )
    world = _Replay(setting, models, watch, take_span)
    return world.replay(arrivals)


def serial(setting: Setting, models: Sequence[PaperModel], arrivals: Sequence[Arrival]) -> Outcome:
    """The reference: in order of arrival, a model's copy and its computing one after the other, and
    nothing beside them, as in the loop that PipeSwitch's authors published; the least recently
    used model leaves."""
    link = setting.costs.to_device
    jobs = [
        Job(model=models[arrival.model].name, compute_ms=models[arrival.model].compute_ms,
            load_ms=link.copy_ms(models[arrival.model].size_bytes),
            size_bytes=models[arrival.model].size_bytes, arrived_at_ms=arrival.at_ms)
        for arrival in arrivals
    ]  # fmt: skip
    memory = Memory(capacity_bytes=setting.memory_bytes, is_prefetching=False, is_belady=False)
    turns = run(jobs, range(len(jobs)), memory)
    took_ms = [turn.ends_at_ms - job.arrived_at_ms for turn, job in zip(turns, jobs, strict=True)]
    loads = [
        job for turn, job in zip(turns, jobs, strict=True) if turn.load_begins_at_ms is not None
    ]
    return Outcome(
        requests=len(jobs), latency_ms=tuple(took_ms), refused={}, switches=len(loads),
        in_slo=sum(ms <= setting.slo_ms + job.compute_ms + NEAR_MS
                   for ms, job in zip(took_ms, jobs, strict=True)),
        copied_bytes=sum(job.size_bytes for job in loads),
        busy_ms=sum(job.compute_ms for job in jobs),
        makespan_ms=max((turn.ends_at_ms for turn in turns), default=0.0),
        order=tuple(range(len(jobs))),
    )  # fmt: skip


class _Replay(World):
    def __init__(
        self, setting: Setting, models: Sequence[PaperModel],
        watch: Callable[[int], None] | None, take_span: Callable[[ev.Span], None] | None,
    ) -> None:  # fmt: skip
        self._setting, self._models = setting, models
        self._watch, self._take_span = watch, take_span
        self._asked: dict[ev.Token, tuple[int, Arrival, float]] = {}  # number, arrival, when
        self._latency_ms: dict[int, float] = {}
        self._order: list[tuple[float, int]] = []
        self._refused: Counter[str] = Counter()
        self._in_slo = 0
        self._busy_ms = self._last_ms = 0.0
        models = list({model.name: model for model in models}.values())
        words = sum(len(model.plan) for model in models) + len(models)
        settings = SchedulerSettings(
            arena_bytes=aligned(setting.memory_bytes, REGION_ALIGN_BYTES) + WORDS_BYTES,
            store_bytes=sum(aligned(m.size_bytes, REGION_ALIGN_BYTES) for m in models) * 2,
            words=words, max_queue=ENDLESS, max_queue_per_model=ENDLESS,
            max_waiting_builds=len(models), max_waiting_builds_in_all=len(models),
            admission=setting.admission, look_ahead=setting.look_ahead,
        )  # fmt: skip
        super().__init__(
            Scheduler(settings, setting.policy, setting.max_wait_ms),
            costs=setting.costs,
            is_checked=False,
        )
        for model in models:
            self.clients.register(ModelName(model.name), model.program())
        self.run()

    def replay(self, arrivals: Sequence[Arrival]) -> Outcome:
        begin_ms, count = self.now_ms, self.scheduler.core.counts
        before = (count["switches"], count["transmitted_bytes"])
        for number, arrival in enumerate(arrivals):
            self.clock.at(begin_ms + arrival.at_ms, partial(self._ask, number, arrival))
        self.run()
        return Outcome(
            requests=len(arrivals),
            latency_ms=tuple(self._latency_ms[n] for n in sorted(self._latency_ms)),
            in_slo=self._in_slo, refused=dict(self._refused),
            switches=count["switches"] - before[0],
            copied_bytes=count["transmitted_bytes"] - before[1],
            busy_ms=self._busy_ms, makespan_ms=max(0.0, self._last_ms - begin_ms),
            order=tuple(number for _, number in sorted(self._order)),
        )  # fmt: skip

    def _ask(self, number: int, arrival: Arrival) -> None:
        model = self._models[arrival.model]
        deadline_ms = arrival.deadline_ms
        if deadline_ms is None and self._setting.has_deadlines:
            deadline_ms = self._setting.slo_ms + model.compute_ms
        # Known before the scheduler is: it may answer at once.
        self._asked[ev.Token(self.clients.last_token + 1)] = (number, arrival, self.now_ms)
        self.clients.infer(ModelName(model.name), deadline_ms=deadline_ms)

    def _perform(self, command: ev.Command) -> None:
        if isinstance(command, ev.Span):
            if self._take_span is not None:
                self._take_span(command)
            return
        if isinstance(command, ev.Answer) and not command.more:
            self._answered(command)
        super()._perform(command)

    def _answered(self, answer: ev.Answer) -> None:
        asked = self._asked.pop(answer.token, None)
        if asked is None:
            return  # a registration
        number, arrival, at_ms = asked
        self._last_ms = self.now_ms
        if answer.error is not None:
            self._refused[type(answer.error).__name__] += 1
        else:
            assert answer.timing is not None
            model, took_ms = self._models[arrival.model], self.now_ms - at_ms
            self._latency_ms[number] = took_ms
            self._in_slo += took_ms <= self._setting.slo_ms + model.compute_ms + NEAR_MS
            self._busy_ms += model.compute_ms
            self._order.append((answer.timing["epoch"], number))
        done = len(self._latency_ms) + self._refused.total()
        if self._watch is not None and done % REPORT_EVERY == 0:
            self._watch(done)


def quantile_ms(outcome: Outcome, fraction: float) -> float:
    """Of the latencies: the least that at least this fraction does not exceed; NaN for none."""
    ordered = sorted(outcome.latency_ms)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]
