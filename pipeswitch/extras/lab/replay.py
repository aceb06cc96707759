"""Replay of a trace through the real scheduler in the simulated world. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any, Final, NamedTuple

from ...base.quantiles import percentile
from ...ipc.messages.base import JobName, ModelName
from ...programs.interface.layout import REGION_ALIGN_BYTES, Batching, aligned
from ...scheduler.memory.commits import HEADER_BYTES
from ...scheduler.policies import Policy
from ...scheduler.scheduler import Scheduler
from ...scheduler.state import events as ev
from ...scheduler.state.core import SchedulerSettings
from ...scheduler.state.device_state import FENCE_BYTES
from .arrivals import Arrival
from .costs import MIB, Costs, Link, Training
from .planner import costs_of, plan_of
from .profile import Profile
from .programs import ALIGNMENT_BYTES, SimulatedProgram, manifest_of, variant_of
from .world import World

NEAR_MS: Final = 1e-6  # tolerance for the rounding of a sum of instants
REPORT_EVERY: Final = 500  # number of answered requests between two calls of ``watch``
ENDLESS: Final = 1 << 30  # a limit that no trace reaches


@dataclass(frozen=True, kw_only=True)
class PaperModel:
    """Model described by its layers: bytes, and computing time in milliseconds at batch 1.

    Attributes:
        plan: indices of the layers that begin a group.
        batching: rules for batches of its requests; None: its requests run alone.
        row_share: time of each further request in a batch, as a fraction of the first one's.
        family: name that it and its variants have in common; empty: it has no variants.
        shared_bytes: bytes of the first layers, equal in its variants.
    """

    name: str
    layer_bytes: tuple[int, ...]
    layer_ms: tuple[float, ...]
    plan: tuple[int, ...]
    batching: Batching | None = None
    row_share: float = 1.0
    family: str = ""
    shared_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(self.layer_bytes)

    @property
    def compute_ms(self) -> float:
        return sum(self.layer_ms)

    def load_ms(self, link: Link) -> float:
        """Return the time to copy the model group after group."""
        begins = [*self.plan, len(self.layer_bytes)]
        return sum(link.copy_ms(sum(self.layer_bytes[a:b])) for a, b in pairwise(begins))

    def program(self) -> SimulatedProgram:
        """Return the program for the simulated world; layer sizes are rounded up to alignment."""
        sizes = tuple(aligned(size, ALIGNMENT_BYTES) for size in self.layer_bytes)
        program = SimulatedProgram(
            manifest=manifest_of(f"d-{self.name}", sizes, self.plan, self.batching),
            plan=self.plan,
            layer_ms=self.layer_ms,
            row_share=self.row_share,
        )
        ends = enumerate(accumulate(self.layer_bytes))
        own = [index for index, end in ends if end > self.shared_bytes]
        return variant_of(program, self.name, own, self.family) if self.family else program


def paper_model(name: str, profile: Profile) -> PaperModel:
    """Return a model with the measured times, and with groups that are planned from them."""
    costs, plan = costs_of(profile), plan_of(profile)
    return PaperModel(
        name=name,
        layer_bytes=costs.layer_bytes,
        layer_ms=costs.compute_ms,
        plan=plan,
        row_share=_row_share(profile),
    )


def _row_share(profile: Profile) -> float:
    """Return ``row_share`` from batch 1 and the largest measured batch; 1 without both of them."""
    most = max(times.batch for times in profile.batches)
    if most == 1 or profile.batch(1) is None:
        return 1.0
    alone_ms, joined_ms = (sum(costs_of(profile, batch).compute_ms) for batch in (1, most))
    return min(1.0, max(0.0, joined_ms / alone_ms - 1.0) / (most - 1)) if alone_ms else 1.0


def link_of(profile: Profile) -> Link:
    """Return the link with the measured speed."""
    beta = profile.link.beta_ms_per_mib
    return Link(bytes_per_ms=MIB / beta if beta else math.inf, fixed_ms=profile.link.alpha_ms)


@dataclass(frozen=True, kw_only=True)
class PaperJob:
    """Job whose script has equal steps. It is submitted ``at_ms`` after the trace begins."""

    name: str
    steps: int
    step_ms: float
    memory_bytes: int  # size of its memory on the device; a commit copies all of it
    at_ms: float = 0.0

    def script(self) -> Training:
        """Return the script for the simulated world."""
        return Training(
            steps=self.steps,
            step_ms=self.step_ms,
            slice_bytes=self.memory_bytes,
            state_bytes=self.memory_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of an ended job, in milliseconds of the virtual clock.

    Attributes:
        jct_ms: time from its submission to its end (job completion time).
        trained_ms: part of ``jct_ms`` for which it had the device.
        preempted_ms: part of ``jct_ms`` for which it was suspended in place and kept its memory.
        evictions: number of times that it lost its memory.
    """

    name: str
    at_ms: float
    jct_ms: float
    trained_ms: float
    preempted_ms: float
    evictions: int

    @property
    def share(self) -> float:
        """Fraction of the time from its submission to its end for which the job had the device."""
        return self.trained_ms / self.jct_ms if self.jct_ms else 1.0


def trained(job: PaperJob, jct_ms: float, row: Mapping[str, Any]) -> Trained:
    """Return a job's result. ``row``: its last row of ``pipeswitch jobs``."""
    return Trained(
        name=job.name,
        at_ms=job.at_ms,
        jct_ms=jct_ms,
        trained_ms=1000.0 * row["trained_s"],
        preempted_ms=1000.0 * row["preempted_s"],
        evictions=row["swaps"] + row["evictions"],
    )


@dataclass(frozen=True, kw_only=True)
class Setting(SchedulerSettings):
    """Server for a replay. Its standby workers load programs in zero simulated time.

    Attributes:
        memory_bytes: memory of each device for models and jobs.
        own: function that returns a new policy; None: ``policy`` names a built-in one.
        slo_ms: time that a request may take in addition to its own computation.
        has_deadlines: whether requests have a deadline: ``slo_ms`` plus their own computation. If
            not, late requests are computed, too.
        is_known: whether each model's times are known from the start, without measurements.
        prompt_share: time of each prompt token in the first step, as a fraction of a step's time.
    """

    memory_bytes: int
    costs: Costs
    policy: str = "priority"
    own: Callable[[], Policy] | None = None
    max_wait_ms: float = 2000.0
    slo_ms: float = 100.0
    has_deadlines: bool = False
    is_known: bool = False
    prompt_share: float = 0.0
    devices: int = 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of a trace's requests, in milliseconds of the virtual clock.

    Attributes:
        latency_ms: latency of each computed request, in order of arrival. For an answer of several
            tokens, it is the time to the first token.
        between_ms: times between two successive tokens of an answer, sorted.
        in_slo: number of requests whose tokens all arrived in time.
        refused: error's name -> number of requests that were not computed because of it.
        busy_ms: total time for which the devices computed or trained.
        order: numbers of the requests in the trace, in the order of their computation.
        jobs: results of the jobs, in the order of the arguments.
        warnings: warnings for a server's log.
        failure: why the policy failed; the rest was decided by ``priority``. Empty: it did not.
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
    failure: str = ""
    devices: int = 1

    @property
    def jct_ms(self) -> float:
        """Mean of the jobs' completion times; NaN if there are no jobs."""
        return fmean(job.jct_ms for job in self.jobs) if self.jobs else math.nan

    @property
    def share_in_slo(self) -> float:
        return self.in_slo / self.requests if self.requests else 1.0

    @property
    def idle_share(self) -> float:
        there_ms = self.makespan_ms * self.devices
        return max(0.0, 1.0 - self.busy_ms / there_ms) if there_ms else 1.0


def replay(
    setting: Setting,
    models: Sequence[PaperModel],
    arrivals: Sequence[Arrival],
    jobs: Sequence[PaperJob] = (),
    *,
    watch: Callable[[int], None] | None = None,
    take_span: Callable[[ev.Spans], None] | None = None,
) -> Outcome:
    """Replay all requests of a trace, and all jobs, on one server that has registered the models.

    Args:
        watch: called with the number of answered requests.
        take_span: called with intervals of the timeline.

    Raises:
        ValueError: a model or a job is larger than the memory.
    """
    sizes = [(model.size_bytes, model.name) for model in models]
    size_bytes, largest = max([*sizes, *((job.memory_bytes, job.name) for job in jobs)])
    if size_bytes > setting.memory_bytes:
        raise ValueError(f'"{largest}" has {size_bytes} bytes, the device {setting.memory_bytes}')
    world = Replay(setting, Models(models), jobs, watch, take_span)
    world.serve(world.models.first.values())
    return world.replay(arrivals)


def serial(setting: Setting, models: Sequence[PaperModel], arrivals: Sequence[Arrival]) -> Outcome:
    """Replay a trace with the loop that PipeSwitch's authors published, for comparison.
    Requests run in order of arrival. A model is copied completely before it computes, and the least
    recently used model is evicted."""
    resident: dict[str, int] = {}  # bytes by name; the first model was used least recently
    latency_ms: list[float] = []
    ends_at_ms = busy_ms = 0.0
    in_slo = switches = copied_bytes = 0
    for arrival in arrivals:
        model = models[arrival.model]
        ends_at_ms = max(ends_at_ms, arrival.at_ms)
        if resident.pop(model.name, None) is None:
            if model.size_bytes > setting.memory_bytes:
                sizes = f"{model.size_bytes} bytes, the device {setting.memory_bytes}"
                raise ValueError(f'"{model.name}" has {sizes}')
            while sum(resident.values()) + model.size_bytes > setting.memory_bytes:
                del resident[next(iter(resident))]
            ends_at_ms += setting.costs.to_device.copy_ms(model.size_bytes)
            switches, copied_bytes = switches + 1, copied_bytes + model.size_bytes
        resident[model.name] = model.size_bytes
        ends_at_ms, busy_ms = ends_at_ms + model.compute_ms, busy_ms + model.compute_ms
        latency_ms.append(ends_at_ms - arrival.at_ms)
        in_slo += latency_ms[-1] <= setting.slo_ms + model.compute_ms + NEAR_MS
    return Outcome(
        requests=len(arrivals),
        latency_ms=tuple(latency_ms),
        refused={},
        switches=switches,
        in_slo=in_slo,
        copied_bytes=copied_bytes,
        busy_ms=busy_ms,
        makespan_ms=ends_at_ms,
        order=tuple(range(len(arrivals))),
    )


class Models(dict[int, PaperModel]):
    """Models by their number in the trace; all but the first ones are created on first access.
    A tile is one client's copy of the trace: the same models, under its own names."""

    def __init__(self, first: Sequence[PaperModel], tiles: int = 1) -> None:
        super().__init__(enumerate(first))
        self.first, self.tiles = {model.name: model for model in first}, tiles
        self.per_tile = len(first)

    def __missing__(self, number: int) -> PaperModel:
        tile, place = divmod(number, self.per_tile)
        one = self[place]
        family = one.family and f"{one.family}/{tile}"
        model = self[number] = replace(one, name=f"{one.name}/{tile}", family=family)
        return model


class Asked(NamedTuple):
    """Request, or one token of a request, that has no answer yet."""

    number: int
    arrival: Arrival
    at_ms: float
    step: int = 0  # index of the token
    is_in_time: bool = True  # no earlier token was late


class Replay(World):
    """One server, and the requests of a trace that it gets; ``models`` has the trace's models."""

    def __init__(
        self,
        setting: Setting,
        models: Models,
        jobs: Sequence[PaperJob] = (),
        watch: Callable[[int], None] | None = None,
        take_span: Callable[[ev.Spans], None] | None = None,
    ) -> None:
        self._setting, self.models, self.jobs = setting, models, jobs
        self._watch, self._take_span = watch, take_span
        self.asked: dict[ev.Token, Asked] = {}
        self.latency_ms: dict[int, float] = {}
        self.between_ms: list[float] = []
        self.order: list[tuple[float, int]] = []
        self.refused: Counter[str] = Counter()
        self._training: dict[ev.Token, PaperJob] = {}  # request that waits for a job's end -> job
        self.trained: dict[str, Trained] = {}
        self.warnings: list[str] = []
        self.in_slo = 0
        self.begin_ms = self.busy_ms = self.last_ms = 0.0
        first, tiles = models.first.values(), models.tiles
        fence_count = 1 + tiles * (sum(len(model.plan) for model in first) + len(first))
        commits = [aligned(HEADER_BYTES + 2 * job.memory_bytes, REGION_ALIGN_BYTES) for job in jobs]
        settings = replace(
            setting,
            arena_bytes=aligned(setting.memory_bytes, REGION_ALIGN_BYTES)
            + aligned(fence_count * FENCE_BYTES, REGION_ALIGN_BYTES),
            store_bytes=sum(aligned(m.size_bytes or 1, REGION_ALIGN_BYTES) for m in first)
            * 2
            * tiles
            + sum(commits),
            fence_count=fence_count,
            max_queue=ENDLESS,
            max_queue_per_model=ENDLESS,
            max_waiting_builds=4 * len(first) + 4,
            max_models_per_client=ENDLESS,
        )
        super().__init__(
            Scheduler(
                settings,
                setting.own() if setting.own else setting.policy,
                setting.max_wait_ms,
                [replace(settings, device=f"cpu:{i}") for i in range(setting.devices)],
            ),
            costs=setting.costs,
            is_checked=False,
        )

    def serve(self, models: Iterable[PaperModel], until_ms: float = math.inf) -> None:
        """Register the models, and run until the instant ``until_ms``."""
        for model in models:
            self.clients.register(ModelName(model.name), model.program())
        self.run(until_ms)
        predictions = self.scheduler.machine.devices[0].state.predictions
        for model in models if self._setting.is_known else ():
            load_ms = model.load_ms(self._setting.costs.to_device)
            predictions.computed(model.name, 1, model.compute_ms, self.now_ms)
            predictions.sent(model.name, load_ms, self.now_ms)

    def replay(self, arrivals: Sequence[Arrival]) -> Outcome:
        begin_ms = self.begin_ms = self.now_ms
        for number, arrival in enumerate(arrivals):
            at_ms = begin_ms + arrival.at_ms
            self.clock.at(at_ms, partial(self.ask, Asked(number, arrival, at_ms)))
        for job in self.jobs:
            self.clock.at(begin_ms + job.at_ms, partial(self._train, job))
        self.run()
        return outcome([self], len(arrivals))

    def _own_ms(self, arrival: Arrival, step: int) -> float:
        """Return the computing time of one token of a request that runs alone."""
        prompt = 0.0 if step else arrival.prompt * self._setting.prompt_share
        return self.models[arrival.model].compute_ms * (1.0 + prompt)

    def ask(self, request: Asked) -> None:
        """Send a request now."""
        arrival, step = request.arrival, request.step
        model = self.models[arrival.model]
        deadline_ms = arrival.deadline_ms
        if deadline_ms is None and self._setting.has_deadlines:
            deadline_ms = self._setting.slo_ms + self._own_ms(arrival, step)
        # The request is recorded before the scheduler gets it, because it may answer at once.
        token = self.clients.last_token + 1
        self.asked[ev.Token(token)] = request
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
        if isinstance(command, ev.LogWarning):
            self.warnings.append(command.text)
        if isinstance(command, ev.Reply) and not command.more:
            self._answered(command)
        super()._perform(command)

    def _answered(self, answer: ev.Reply) -> None:
        job = self._training.pop(answer.token, None)
        if job is not None:
            if answer.error is not None:
                raise answer.error
            self.last_ms = self.now_ms
            jct_ms = self.now_ms - self.begin_ms - job.at_ms
            self.trained[job.name] = trained(job, jct_ms, answer.body["job"])
        request = self.asked.pop(answer.token, None)
        if request is None:
            return  # the answer is not for a request of the trace
        number, arrival, at_ms, step, is_in_time = request
        self.last_ms = self.now_ms
        self.scene.prompts.pop(f"r{answer.token}", None)
        if answer.error is not None:
            self.refused[type(answer.error).__name__] += 1
        else:
            assert answer.timing is not None
            model, took_ms = self.models[arrival.model], self.now_ms - at_ms
            own_ms, batched = self._own_ms(arrival, step), answer.timing.batched
            shared = 1.0 - (batched - 1) * (1.0 - model.row_share) / batched
            self.busy_ms += own_ms - model.compute_ms * (1.0 - shared)
            is_in_time &= took_ms <= self._setting.slo_ms + own_ms + NEAR_MS
            if step:
                self.between_ms.append(took_ms)
            else:
                self.latency_ms[number] = took_ms
                self.order.append((answer.timing.op_id, number))
            if step + 1 < arrival.tokens:
                soon = Asked(number, arrival, self.now_ms, step + 1, is_in_time)
                self.clock.at(self.now_ms, partial(self.ask, soon))
                return
            self.in_slo += is_in_time
        done = len(self.latency_ms) + self.refused.total()
        if self._watch is not None and done % REPORT_EVERY == 0:
            self._watch(done)


def outcome(servers: Sequence[Replay], requests: int, devices: int = 1) -> Outcome:
    """Return the outcome of requests that were distributed over the servers."""
    first, counts = servers[0], [server.scheduler.core.counts for server in servers]
    latency_ms = {n: ms for server in servers for n, ms in server.latency_ms.items()}
    jobs = tuple(first.trained[job.name] for job in first.jobs)
    return Outcome(
        requests=requests,
        latency_ms=tuple(latency_ms[n] for n in sorted(latency_ms)),
        between_ms=tuple(sorted(ms for server in servers for ms in server.between_ms)),
        in_slo=sum(server.in_slo for server in servers),
        refused=dict(sum((server.refused for server in servers), Counter[str]())),
        switches=sum(count["switches"] for count in counts),
        copied_bytes=sum(count["transmitted_bytes"] for count in counts),
        busy_ms=sum(server.busy_ms for server in servers) + sum(job.trained_ms for job in jobs),
        makespan_ms=max(0.0, max(server.last_ms for server in servers) - first.begin_ms),
        order=tuple(number for _, number in sorted(first.order)),
        jobs=jobs,
        warnings=tuple(text for server in servers for text in server.warnings),
        failure=next(filter(None, (s.scheduler.core.judge.failure for s in servers)), ""),
        devices=devices,
    )


def quantile_ms(outcome: Outcome, fraction: float) -> float:
    """Return a quantile of the latencies; NaN if there are none."""
    return percentile(outcome.latency_ms, fraction) if outcome.latency_ms else math.nan
