"""A trace through the real scheduler in the simulated world, and what its clients saw. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any, Final

from ..ipc.messages import JobName, ModelName
from ..planning.fit import MIB, percentile
from ..planning.planned import costs_of, plan_of
from ..planning.profile import Profile
from ..planning.windows import Job, Memory, run
from ..programs.layout import REGION_ALIGN_BYTES, Batching, aligned
from ..scheduler import events as ev
from ..scheduler.core import SchedulerSettings
from ..scheduler.policies import Policy
from ..scheduler.scheduler import Scheduler
from ..scheduler.training.commits import HEADER_BYTES
from .arrivals import Arrival
from .costs import Costs, Link, Training
from .programs import ALIGNMENT_BYTES, Program, manifest_of
from .world import World

WORDS_BYTES: Final = REGION_ALIGN_BYTES  # of the arena, for the arrival words
NEAR_MS: Final = 1e-6  # rounding of a sum of instants
REPORT_EVERY: Final = 500  # requests between two words to who watches
ENDLESS: Final = 1 << 30  # a limit of the queue that no trace reaches


@dataclass(frozen=True, kw_only=True)
class PaperModel:
    """A model as layers: bytes, and computing time in milliseconds at batch 1.

    Attributes:
        plan: the layers that open a group.
        batching: how its requests are joined; None: they are not.
        row_share: of a joined request's computing time, what each further one adds.
    """

    name: str
    layer_bytes: tuple[int, ...]
    layer_ms: tuple[float, ...]
    plan: tuple[int, ...]
    batching: Batching | None = None
    row_share: float = 1.0

    @property
    def size_bytes(self) -> int:
        return sum(self.layer_bytes)

    @property
    def compute_ms(self) -> float:
        return sum(self.layer_ms)

    def load_ms(self, link: Link) -> float:
        """Of its copy, group after group."""
        begins = [*self.plan, len(self.layer_bytes)]
        return sum(link.copy_ms(sum(self.layer_bytes[a:b])) for a, b in pairwise(begins))

    def program(self) -> Program:
        """As the simulated world takes it; sizes go up to whole tensors."""
        sizes = tuple(aligned(size, ALIGNMENT_BYTES) for size in self.layer_bytes)
        return Program(
            manifest=manifest_of(f"d-{self.name}", sizes, self.plan, self.batching),
            plan=self.plan, layer_ms=self.layer_ms, row_share=self.row_share,
        )  # fmt: skip


def paper_model(name: str, profile: Profile) -> PaperModel:
    """As it was measured, in the groups that are planned from that."""
    costs, (plan, _) = costs_of(profile), plan_of(profile)
    return PaperModel(name=name, layer_bytes=costs.layer_bytes, layer_ms=costs.compute_ms,
                      plan=plan, row_share=_row_share(profile))  # fmt: skip


def _row_share(profile: Profile) -> float:
    """From batch 1 and the largest that was measured; 1 where there are not both."""
    most = max(times.batch for times in profile.batches)
    if most == 1 or profile.batch(1) is None:
        return 1.0
    alone_ms, joined_ms = (sum(costs_of(profile, batch).compute_ms) for batch in (1, most))
    return min(1.0, max(0.0, joined_ms / alone_ms - 1.0) / (most - 1)) if alone_ms else 1.0


def link_of(profile: Profile) -> Link:
    """As it was measured."""
    beta = profile.link.beta_ms_per_mib
    return Link(bytes_per_ms=MIB / beta if beta else math.inf, fixed_ms=profile.link.alpha_ms)


@dataclass(frozen=True, kw_only=True)
class PaperJob:
    """A script of equal steps, submitted ``at_ms`` after the trace begins."""

    name: str
    steps: int
    step_ms: float
    memory_bytes: int  # of the device; a commit copies all of it
    at_ms: float = 0.0

    def script(self) -> Training:
        """As the simulated world takes it."""
        return Training(steps=self.steps, step_ms=self.step_ms, slice_bytes=self.memory_bytes,
                        state_bytes=self.memory_bytes)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A job's end; milliseconds of the virtual clock.

    Attributes:
        jct_ms: from its submission to its end (job completion time).
        trained_ms: of that, it had the device.
        preempted_ms: of that, it waited in place, its memory kept, for requests or other jobs.
        evictions: how often it had to leave its memory.
    """

    name: str
    at_ms: float
    jct_ms: float
    trained_ms: float
    preempted_ms: float
    evictions: int

    @property
    def share(self) -> float:
        """Of the device's time while it was there."""
        return self.trained_ms / self.jct_ms if self.jct_ms else 1.0


def trained(job: PaperJob, jct_ms: float, row: Mapping[str, Any]) -> Trained:
    """``row``: of ``pipeswitch jobs``, as it ended."""
    return Trained(
        name=job.name, at_ms=job.at_ms, jct_ms=jct_ms, trained_ms=1000.0 * row["trained_s"],
        preempted_ms=1000.0 * row["preempted_s"], evictions=row["evictions"],
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One server to replay on.

    Attributes:
        memory_bytes: of the device, for models and jobs.
        own: the policy itself where ``policy`` is no name of ours; of one replay, since it may
            remember.
        slo_ms: how long a request may take beyond its own computing.
        has_deadlines: whether requests carry that as their deadline; without, a late one is
            computed all the same.
        is_known: what each model takes is known before it was measured.
        prompt_share: of a step's computing, what each token of a prompt adds to the first one.
    """

    memory_bytes: int
    costs: Costs
    policy: str = "priority"
    own: Policy | None = None
    max_wait_ms: float = 2000.0
    slo_ms: float = 100.0
    has_deadlines: bool = False
    admission: str = "off"
    look_ahead: bool = True
    training: str = "rotate"
    is_known: bool = False
    prompt_share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a trace's requests; milliseconds of the virtual clock.

    Attributes:
        latency_ms: of each request that was computed, in order of arrival; of several tokens, until
            the first.
        between_ms: from each token of an answer to its next, sorted.
        in_slo: how many of all ended in time, with all their tokens.
        refused: how many of all were not computed, by the error's name.
        busy_ms: the device computed this long, or trained.
        order: the requests by their number in the trace, as they were computed.
        jobs: in the order in which they were named.
        warnings: what a server's log would have, such as of a policy that failed.
    """

    requests: int
    latency_ms: tuple[float, ...]
    between_ms: tuple[float, ...] = ()
    in_slo: int
    refused: dict[str, int]
    switches: int
    copied_bytes: int
    busy_ms: float
    makespan_ms: float
    order: tuple[int, ...]
    jobs: tuple[Trained, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def jct_ms(self) -> float:
        """Mean of the jobs' completion times; NaN for none."""
        return fmean(job.jct_ms for job in self.jobs) if self.jobs else math.nan

    @property
    def share_in_slo(self) -> float:
        return self.in_slo / self.requests if self.requests else 1.0

    @property
    def idle_share(self) -> float:
        return max(0.0, 1.0 - self.busy_ms / self.makespan_ms) if self.makespan_ms else 1.0


def replay(
    setting: Setting,
    models: Sequence[PaperModel],
    arrivals: Sequence[Arrival],
    jobs: Sequence[PaperJob] = (),
    *,
    watch: Callable[[int], None] | None = None,
    take_span: Callable[[ev.Spans], None] | None = None,
) -> Outcome:
    """All requests of a trace and all jobs, on one server that has registered the models.

    Args:
        watch: is told how many have been answered.
        take_span: takes the intervals of the timeline.

    Raises:
        ValueError: a model or a job is larger than the memory.
    """
    sizes = [(model.size_bytes, model.name) for model in models]
    size_bytes, largest = max([*sizes, *((job.memory_bytes, job.name) for job in jobs)])
    if size_bytes > setting.memory_bytes:
        raise ValueError(f'"{largest}" has {size_bytes} bytes, the device {setting.memory_bytes}')
    world = _Replay(setting, models, jobs, watch, take_span)
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
        self, setting: Setting, models: Sequence[PaperModel], jobs: Sequence[PaperJob],
        watch: Callable[[int], None] | None, take_span: Callable[[ev.Spans], None] | None,
    ) -> None:  # fmt: skip
        self._setting, self._models, self._jobs = setting, models, jobs
        self._watch, self._take_span = watch, take_span
        # Number, arrival, when this token was asked for, which one it is, none was late.
        self._asked: dict[ev.Token, tuple[int, Arrival, float, int, bool]] = {}
        self._latency_ms: dict[int, float] = {}
        self._between_ms: list[float] = []
        self._order: list[tuple[float, int]] = []
        self._refused: Counter[str] = Counter()
        self._training: dict[ev.Token, PaperJob] = {}  # by who waits for its end
        self._trained: dict[str, Trained] = {}
        self._warnings: list[str] = []
        self._in_slo = 0
        self._begin_ms = self._busy_ms = self._last_ms = 0.0
        models = list({model.name: model for model in models}.values())
        words = 1 + sum(len(model.plan) for model in models) + len(models)
        commits = [aligned(HEADER_BYTES + 2 * job.memory_bytes, REGION_ALIGN_BYTES) for job in jobs]
        settings = SchedulerSettings(
            arena_bytes=aligned(setting.memory_bytes, REGION_ALIGN_BYTES) + WORDS_BYTES,
            store_bytes=sum(aligned(m.size_bytes, REGION_ALIGN_BYTES) for m in models) * 2
            + sum(commits),
            words=words, max_queue=ENDLESS, max_queue_per_model=ENDLESS,
            max_waiting_builds=4 * len(models) + 4,
            admission=setting.admission, look_ahead=setting.look_ahead, training=setting.training,
        )  # fmt: skip
        super().__init__(
            Scheduler(settings, setting.own or setting.policy, setting.max_wait_ms),
            costs=setting.costs,
            is_checked=False,
        )
        for model in models:
            self.clients.register(ModelName(model.name), model.program())
        self.run()
        if setting.is_known:
            predictions = self.scheduler.machine.devices[0].state.predictions
            for model in models:
                predictions.computed(model.name, 1, model.compute_ms, self.now_ms)
                predictions.sent(model.name, model.load_ms(setting.costs.to_device), self.now_ms)

    def replay(self, arrivals: Sequence[Arrival]) -> Outcome:
        begin_ms = self._begin_ms = self.now_ms
        count = self.scheduler.core.counts
        before = (count["switches"], count["transmitted_bytes"])
        for number, arrival in enumerate(arrivals):
            self.clock.at(begin_ms + arrival.at_ms, partial(self._ask, number, arrival, 0))
        for job in self._jobs:
            self.clock.at(begin_ms + job.at_ms, partial(self._train, job))
        self.run()
        jobs = tuple(self._trained[job.name] for job in self._jobs)
        return Outcome(
            requests=len(arrivals),
            latency_ms=tuple(self._latency_ms[n] for n in sorted(self._latency_ms)),
            between_ms=tuple(sorted(self._between_ms)),
            in_slo=self._in_slo, refused=dict(self._refused),
            switches=count["switches"] - before[0],
            copied_bytes=count["transmitted_bytes"] - before[1],
            busy_ms=self._busy_ms + sum(job.trained_ms for job in jobs), jobs=jobs,
            makespan_ms=max(0.0, self._last_ms - begin_ms),
            order=tuple(number for _, number in sorted(self._order)),
            warnings=tuple(self._warnings),
        )  # fmt: skip

    def _own_ms(self, arrival: Arrival, step: int) -> float:
        """What one of its tokens computes, alone."""
        prompt = 0.0 if step else arrival.prompt * self._setting.prompt_share
        return self._models[arrival.model].compute_ms * (1.0 + prompt)

    def _ask(self, number: int, arrival: Arrival, step: int, is_in_time: bool = True) -> None:
        model = self._models[arrival.model]
        deadline_ms = arrival.deadline_ms
        if deadline_ms is None and self._setting.has_deadlines:
            deadline_ms = self._setting.slo_ms + self._own_ms(arrival, step)
        # Known before the scheduler is: it may answer at once.
        token = self.clients.last_token + 1
        self._asked[ev.Token(token)] = (number, arrival, self.now_ms, step, is_in_time)
        if not step and arrival.prompt:
            self.scene.prompts[f"r{token}"] = arrival.prompt * self._setting.prompt_share
        name = ModelName(model.name)
        self.clients.infer(name, deadline_ms=deadline_ms, caller=arrival.caller)

    def _train(self, job: PaperJob) -> None:
        self.clients.train(JobName(job.name), job.script())
        self._training[self.clients.ask(JobName(job.name), "wait")] = job

    def _perform(self, command: ev.Command) -> None:
        if isinstance(command, ev.Spans):
            if self._take_span is not None:
                self._take_span(command)
            return
        if isinstance(command, ev.Warn):
            self._warnings.append(command.text)
        if isinstance(command, ev.Answer) and not command.more:
            self._answered(command)
        super()._perform(command)

    def _answered(self, answer: ev.Answer) -> None:
        job = self._training.pop(answer.token, None)
        if job is not None:
            if answer.error is not None:
                raise answer.error
            self._last_ms = self.now_ms
            jct_ms = self.now_ms - self._begin_ms - job.at_ms
            self._trained[job.name] = trained(job, jct_ms, answer.body["job"])
        asked = self._asked.pop(answer.token, None)
        if asked is None:
            return  # no request
        number, arrival, at_ms, step, is_in_time = asked
        self._last_ms = self.now_ms
        self.scene.prompts.pop(f"r{answer.token}", None)
        if answer.error is not None:
            self._refused[type(answer.error).__name__] += 1
        else:
            assert answer.timing is not None
            model, took_ms = self._models[arrival.model], self.now_ms - at_ms
            own_ms, joined = self._own_ms(arrival, step), answer.timing.joined
            shared = 1.0 - (joined - 1) * (1.0 - model.row_share) / joined
            self._busy_ms += own_ms - model.compute_ms * (1.0 - shared)
            is_in_time &= took_ms <= self._setting.slo_ms + own_ms + NEAR_MS
            if step:
                self._between_ms.append(took_ms)
            else:
                self._latency_ms[number] = took_ms
                self._order.append((answer.timing.epoch, number))
            if step + 1 < arrival.tokens:
                soon = partial(self._ask, number, arrival, step + 1, is_in_time)
                self.clock.at(self.now_ms, soon)
                return
            self._in_slo += is_in_time
        done = len(self._latency_ms) + self._refused.total()
        if self._watch is not None and done % REPORT_EVERY == 0:
            self._watch(done)


def quantile_ms(outcome: Outcome, fraction: float) -> float:
    """Of the latencies; NaN for none."""
    return percentile(outcome.latency_ms, fraction) if outcome.latency_ms else math.nan
