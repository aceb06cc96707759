"""Measurement of a profile: chooses the next run, and computes the profile from all runs. Pure.

A *trial* is one run of the real program on the real device with one plan. It is *cold* if the model
is copied during the run, else *resident*. Trials of the finest plan (one group for each layer)
measure each layer. Trials of coarser plans measure larger copies and the fixed cost of a group. The
last trials use the planned groups and show how good the prediction is. The first trial of a plan at
a batch size is not counted, because it compiles the groups and touches their memory. The time of
the very first trial determines the number of trials.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from msgspec.structs import replace

from ...base.quantiles import quantile, spread
from ...planning.grouping import Plan, spans
from ...planning.planned_groups import VERSION, Identity
from . import profile as profiles
from .costs import MIB
from .planner import plan_of, predict

MIN_REPEATS: Final = 5  # minimum number of counted trials of each kind
MAX_REPEATS: Final = 25  # maximum number, if trials are short: medians become steadier
BLOCK_MS: Final = 1000.0  # approximate time for all trials of one kind
ONE_SHOT: Final[Plan] = (0,)  # all layers in one group
ROUNDS: Final = 4  # rounds of the fit; the line changes little after the second
FLOOR_MS: Final = 1e-3  # in shorter times, the clocks' noise would dominate the relative error


@dataclass(frozen=True)
class Trial:
    """Kind of run that the measurement needs; equal trials are repetitions."""

    plan: Plan
    batch: int
    is_cold: bool
    is_counted: bool

    @property
    def text(self) -> str:
        """Description for people who wait."""
        kind = "cold" if self.is_cold else "resident"
        return f"batch {self.batch}, {len(self.plan)} groups, {kind}"


@dataclass(frozen=True)
class RunInstants:
    """Instants of one run on one clock, in ms; each tuple has one entry for each group.

    ``copy_ends_ms`` is empty if the model was resident.
    """

    copy_started_ms: float
    copy_ends_ms: tuple[float, ...]
    begins_ms: tuple[float, ...]
    ends_ms: tuple[float, ...]

    @property
    def makespan_ms(self) -> float:
        """Time from the start of the first copy to the end of the last group."""
        return self.ends_ms[-1] - self.copy_started_ms

    @property
    def compute_ms(self) -> list[float]:
        return [end - begin for begin, end in zip(self.begins_ms, self.ends_ms, strict=True)]

    @property
    def copy_ms(self) -> list[float]:
        return [end - start for start, end in pairwise((self.copy_started_ms, *self.copy_ends_ms))]

    @property
    def gaps_ms(self) -> list[float]:
        """Times between the end of each group and the beginning of the next group."""
        return [
            begin - end for end, begin in zip(self.ends_ms[:-1], self.begins_ms[1:], strict=True)
        ]

    @property
    def wakes_ms(self) -> list[float]:
        """Times from the end of a copy to the group's start, if the worker waited for the copy."""
        free_at_ms = (self.copy_started_ms, *self.ends_ms[:-1])
        return [
            begin - arrived
            for free, arrived, begin in zip(
                free_at_ms, self.copy_ends_ms, self.begins_ms, strict=True
            )
            if arrived > free
        ]


@dataclass(frozen=True)
class MeasuredProgram:
    """Facts about a program that a measurement needs."""

    model: str
    digest: str
    layer_bytes: tuple[int, ...]
    labels: tuple[str, ...]
    built_plan: Plan  # groups of the program when it has no profile

    @property
    def finest(self) -> Plan:
        return tuple(range(len(self.layer_bytes)))


class Measurement:
    """The trials of one program, in order, and the profile that results from them.

    Args:
        program: the program to measure.
        batches: batch sizes to time; plans are made for the first one.
        identity: the device and the versions with which the trials run.
    """

    def __init__(
        self, program: MeasuredProgram, batches: Sequence[int], identity: Identity
    ) -> None:
        self._program = program
        self._batches = tuple(dict.fromkeys(batches))
        self._identity = identity
        self._repeats = MIN_REPEATS
        self._runs: dict[Trial, list[RunInstants]] = defaultdict(list)
        self._profile: profiles.Profile | None = None
        self._planned: Plan = ()
        self._trials = self._first_trials()
        self._done = 0

    def _first_trials(self) -> list[Trial]:
        finest = self._program.finest
        trials: list[Trial] = []
        for batch in self._batches:
            trials += self._block(finest, batch, has_resident=True)
        for plan in dict.fromkeys((self._program.built_plan, ONE_SHOT)):
            if plan != finest:
                trials += self._block(plan, self._batches[0], has_resident=plan == ONE_SHOT)
        return trials

    def _block(self, plan: Plan, batch: int, *, has_resident: bool) -> list[Trial]:
        block = [Trial(plan, batch, is_cold=True, is_counted=False)]
        block += [Trial(plan, batch, is_cold=True, is_counted=True)] * self._repeats
        if has_resident:
            block += [Trial(plan, batch, is_cold=False, is_counted=True)] * self._repeats
        return block

    @property
    def next(self) -> Trial | None:
        """The trial to run now; None when the profile is complete."""
        return self._trials[self._done] if self._done < len(self._trials) else None

    @property
    def fraction(self) -> float:
        """Finished fraction of all trials, including those of the planned groups: 0 to 1."""
        total = len(self._trials) + (0 if self._profile is not None else self._repeats + 1)
        return self._done / total

    def take(self, run: RunInstants | None) -> bool:
        """Record the run of trial ``next``; return False if it is unusable and must be repeated."""
        trial = self.next
        assert trial is not None
        if run is None or not len(run.begins_ms) == len(run.ends_ms) == len(trial.plan):
            return False
        if trial.is_cold and len(run.copy_ends_ms) != len(trial.plan):
            return False
        if trial.is_counted:
            self._runs[trial].append(run)
        if not self._done:
            fitting = int(BLOCK_MS / max(run.makespan_ms, 1.0))
            self._repeats = min(max(fitting, MIN_REPEATS), MAX_REPEATS)
            self._trials = self._first_trials()
        self._done += 1
        if self._done == len(self._trials) and self._profile is None:
            self._profile = self._measured()
            self._planned = plan_of(self._profile)
            if not self._cold(self._planned):
                self._trials += self._block(self._planned, self._batches[0], has_resident=False)
        return True

    def profile(self, measured_at: str) -> profiles.Profile:
        """Return the finished profile; call it only when ``next`` is None.

        Args:
            measured_at: the current time, as ISO 8601.
        """
        assert self._profile is not None
        plans = dict.fromkeys(trial.plan for trial in self._runs)
        others = [plan for plan in plans if plan != self._planned]
        checks = tuple(self._check(plan) for plan in (*others, self._planned))
        predicted = {
            str(batch): _round(predict(self._profile, self._planned, batch))
            for batch in self._batches
        }
        finished: profiles.Profile = replace(
            self._profile, measured_at=measured_at, checks=checks, predicted_ms=predicted
        )
        return finished

    def _cold(self, plan: Plan, batch: int | None = None) -> list[RunInstants]:
        batch = self._batches[0] if batch is None else batch
        return self._runs.get(Trial(plan, batch, is_cold=True, is_counted=True), [])

    def _resident(self, plan: Plan, batch: int) -> list[RunInstants]:
        return self._runs.get(Trial(plan, batch, is_cold=False, is_counted=True), [])

    def _check(self, plan: Plan) -> profiles.PlanCheck:
        assert self._profile is not None
        times = [run.makespan_ms for run in self._cold(plan)]
        return profiles.PlanCheck(
            plan=plan,
            batch=self._batches[0],
            predicted_ms=_round(predict(self._profile, plan, self._batches[0])),
            measured_ms=_round(median(times)),
            spread_ms=_round(spread(times)),
            trials=len(times),
        )

    # -- from runs to numbers -----------------------------------------------------------------

    def _measured(self) -> profiles.Profile:
        program = self._program
        copies = [run.copy_ms for run in self._cold(program.finest)]
        layers = tuple(
            profiles.LayerProfile(
                label=label,
                size_bytes=size,
                copy_ms=_round(median(times)),
                copy_spread_ms=_round(spread(times)),
            )
            for label, size, times in zip(
                program.labels, program.layer_bytes, zip(*copies, strict=True), strict=True
            )
        )
        return profiles.Profile(
            version=VERSION,
            model=program.model,
            digest=program.digest,
            measured_at="",
            identity=self._identity,
            layers=layers,
            batches=tuple(self._batch(batch) for batch in self._batches),
            link=self._link(),
            overheads=self._overheads(),
        )

    def _batch(self, batch: int) -> profiles.BatchProfile:
        finest = self._program.finest
        switch = list(zip(*(r.compute_ms for r in self._cold(finest, batch)), strict=True))
        resident = list(zip(*(r.compute_ms for r in self._resident(finest, batch)), strict=True))
        return profiles.BatchProfile(
            batch=batch,
            switch_ms=tuple(_round(median(times)) for times in switch),
            switch_spread_ms=tuple(_round(spread(times)) for times in switch),
            resident_ms=tuple(_round(median(times)) for times in resident),
            resident_spread_ms=tuple(_round(spread(times)) for times in resident),
            trials=self._repeats,
        )

    def _link(self) -> profiles.LinkProfile:
        """Fit the link's speed to copy times: the median of each group of every plan."""
        samples: list[tuple[int, float]] = []
        sizes = self._program.layer_bytes
        for plan in dict.fromkeys(trial.plan for trial in self._runs):
            times = zip(*(run.copy_ms for run in self._cold(plan)), strict=True)
            groups = [sum(sizes[first:end]) for first, end in spans(plan, len(sizes))]
            samples += [(size, median(ms)) for size, ms in zip(groups, times, strict=True)]
        link = fit_link(samples)
        return replace(
            link,
            alpha_ms=_round(link.alpha_ms),
            beta_ms_per_mib=_round(link.beta_ms_per_mib),
            residual_p50=_round(link.residual_p50),
            residual_p90=_round(link.residual_p90),
        )

    def _overheads(self) -> profiles.Overheads:
        """Return the costs of a group: sigma from gaps between groups, wake-up time from waits.
        The launch time is the difference between runs with many groups and with one group."""
        finest, batch = self._program.finest, self._batches[0]
        gaps = [ms for run in self._resident(finest, batch) for ms in run.gaps_ms]
        wakes = [
            ms
            for trial, runs in self._runs.items()
            if trial.is_cold
            for run in runs
            for ms in run.wakes_ms
        ]
        fine = [sum(run.compute_ms) for run in self._resident(finest, batch)]
        whole = [sum(run.compute_ms) for run in self._resident(ONE_SHOT, batch)]
        launch = 0.0
        if len(finest) > 1 and whole:
            launch = max(0.0, (median(fine) - median(whole)) / (len(finest) - 1))
        return profiles.Overheads(
            sigma_ms=_round(max(0.0, median(gaps)) if gaps else 0.0),
            launch_ms=_round(launch),
            wake_ms=_round(max(0.0, median(wakes)) if wakes else 0.0),
        )


def _round(value: float) -> float:
    return round(value, 4)


def _line(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Fit a line by weighted least squares; return its intercept and slope, each at least 0."""
    weighted = [(x, y, w) for (x, y), w in zip(points, weights, strict=True)]
    total = sum(weights)
    mean_x = sum(w * x for x, _, w in weighted) / total
    mean_y = sum(w * y for _, y, w in weighted) / total
    variance = sum(w * (x - mean_x) ** 2 for x, _, w in weighted)
    slope = 0.0
    if variance > 0:
        slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in weighted) / variance
    if slope <= 0.0:
        return mean_y, 0.0
    alpha = mean_y - slope * mean_x
    if alpha >= 0.0:
        return alpha, slope
    return 0.0, sum(w * x * y for x, y, w in weighted) / sum(w * x * x for x, _, w in weighted)


def fit_link(samples: Sequence[tuple[int, float]]) -> profiles.LinkProfile:
    """Fit ``alpha + beta * size`` to (bytes, ms) by least squares of the *relative* error.

    Sizes span five orders of magnitude. With absolute errors the largest groups would determine
    alpha, but alpha matters most for many small groups. Each error is divided by the time on the
    fitted line, so the fit needs several rounds. If errors were divided by the samples' own times,
    a copy with a time near zero would outweigh all others. (On a busy machine a modelled link has
    such copies.) Samples are medians, so one outlier has no effect. Alpha and beta are at least 0.

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("a link cannot be fitted without copies")
    points = [(size / MIB, ms) for size, ms in samples]
    share = sum(ms for _, ms in points) / max(sum(x for x, _ in points), FLOOR_MS)
    expected = [max(ms, share * x) for x, ms in points]
    for _ in range(ROUNDS):
        alpha, beta = _line(points, [1.0 / max(ms, FLOOR_MS) ** 2 for ms in expected])
        expected = [alpha + beta * x for x, _ in points]
    residuals = [abs(y - alpha - beta * x) / max(y, FLOOR_MS) for x, y in points]
    sizes = [size for size, _ in samples]
    return profiles.LinkProfile(
        alpha_ms=alpha,
        beta_ms_per_mib=beta,
        residual_p50=median(residuals),
        residual_p90=quantile(residuals, 0.9),
        samples=len(samples),
        smallest_bytes=min(sizes),
        largest_bytes=max(sizes),
    )
