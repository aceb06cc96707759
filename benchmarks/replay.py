"""``bench replay``: the same arrivals on the live server and in the simulator, policies in turns.

Twenty towers of three sizes over an arena a tenth as large. Arrivals are Zipf's in Poisson's times,
or recorded ones (Azure's busiest functions); they are sent whether or not answers have come (an
open loop). Each policy has a server of its own; all of them
are up, one is asked at a time. Then the simulator replays the very instants at which the requests
were sent, with the models' measured profiles, and the decisions of both are compared. The picture
is each policy's 99th percentile over the median of a model that is ready.

Before, and in the simulator alone: seven traces that ask for too much of the device, the link or
both, ``edf`` with admission beside two plain servers (``reference.py``), exact times in all.
"""

from __future__ import annotations

import contextlib
import math
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import combinations, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
import numpy as np

from pipeswitch.client.client import Client
from pipeswitch.client.tensors import Result
from pipeswitch.errors import DeadlineExceeded
from pipeswitch.planning.fit import quantile
from pipeswitch.planning.profile import Profile
from pipeswitch.scheduler import events as ev
from pipeswitch.simulator.arrivals import Arrival, of_functions, poisson
from pipeswitch.simulator.costs import Costs, Link
from pipeswitch.simulator.replay import (
    Models,
    Outcome,
    PaperModel,
    Replay,
    Setting,
    link_of,
    paper_model,
    quantile_ms,
    replay,
)
from pipeswitch.testing import server

from .models import MIB
from .reference import greedy, keeping
from .trials import Arm, Numbers, Run, now_ms

ADMISSION: Final = (
    "edf + admission"  # its requests have deadlines; what cannot meet them is refused
)
POLICIES: Final = ("priority", "fifo", "collate", ADMISSION)
MODELS: Final = 20
TOWERS: Final = (6, 12, 24)  # layers of 1 MiB
BATCH: Final = 128
WIDTH: Final = 512
ROOM_BYTES: Final = 2 * MIB  # for arrival words
LINK_GBPS: Final = 1.0
LOAD: Final = 0.5  # computing time over time
RECORDED_LOAD: Final = 0.7  # a burst then asks for more than the device can do
RECORDED: Final = "azure_functions_2019_100fn_invocations.csv"
RECORDED_FROM: Final = 28_800  # of the busiest functions' arrivals: a few bursts follow
REQUESTS, QUICK_REQUESTS = 300, 100
ROUNDS: Final = 3
SLO_MS: Final = 100.0  # beyond a request's computing
READY_REQUESTS: Final = 50  # one after the other, of one model
MAKESPAN_WITHIN: Final = 0.10
PAPER_MODELS: Final = 40
PAPER_REQUESTS: Final = 1800
PAPER_MIB, PAPER_MS, PAPER_SIGMA, PAPER_GROUPS = 200.0, 14.0, 0.6, 5  # lognormal
TRACES: Final = {  # computing time over time, memory over all models, bytes per millisecond
    "device 1.2": (1.2, 0.25, 12.6e6), "device 1.5": (1.5, 0.4, 12.6e6),
    "device 2.0": (2.0, 0.5, 50e6), "link": (0.8, 0.15, 6e6),
    "link x 2": (0.8, 0.15, 3e6),
    "memory": (1.0, 0.12, 12.6e6), "both": (0.9, 0.15, 12.6e6),
}  # fmt: skip
APART: Final = 0.02  # shares in time that are nearer each other are taken for equal


@dataclass(frozen=True)
class Live:
    """What the server did with the arrivals; the instants at which they were really sent.

    Attributes:
        latency_ms: of each request that was answered, by its number.
    """

    sent: tuple[Arrival, ...]
    order: tuple[int, ...]
    switches: int
    latency_ms: dict[int, float]
    makespan_ms: float


def run(bench: Run, _: Sequence[str] = ()) -> None:
    """Start a server for each policy, profile the models, then replay in turns."""
    count = QUICK_REQUESTS if bench.is_quick else REQUESTS
    for name in list(TRACES)[: 1 if bench.is_quick else None]:
        bench.say(f"{name}: two plain servers beside the simulated one")
        found = beside_plain(name, bench.seed, PAPER_REQUESTS)
        for whose, plain in found.items():
            bench.find(f"{name}: in time, {whose}", plain[0])
        for whose in ("greedy", "keeping"):
            bench.find(
                f"{name}: computed in time / by a {whose} server",
                found["ours"][1] / found[whose][1],
            )
    inputs = {"x": np.full((BATCH, WIDTH), 0.01, np.float32)}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="pipeswitch-bench-")))
        bench.say(f"registering {MODELS} models")
        with _serving(POLICIES[0], bench, folder, "prepared") as client:
            register_towers(client)
            bench.say("measuring the models")
            models, link = measured(client)
        clients: dict[str, Client] = {}
        for policy in POLICIES:
            bench.say(f"{policy}: starting a server")
            name = _order(policy)
            shutil.copytree(folder / "prepared", folder / name)
            clients[policy] = stack.enter_context(_serving(policy, bench, folder, name))
            for model in models:  # once each: it is in the host store again, its program in workers
                clients[policy].infer(model.name, inputs)
        rate = LOAD * 1e3 * MODELS / sum(model.compute_ms for model in models)
        cases = {
            f"Zipf, {MODELS} models": poisson(
                rate, count=count, model_count=MODELS, seed=bench.seed
            ).arrivals,
            f"Azure, {MODELS} models": recorded(models, count),
        }

        def trial(asked: Sequence[Arrival], policy: str) -> Numbers:
            ready_ms = _ready_ms(clients[policy], inputs)
            is_strict = policy == ADMISSION
            live = sent_live(clients[policy], models, asked, inputs, is_strict)
            setting = Setting(memory_bytes=_arena_bytes(), costs=Costs(to_device=link),
                              policy=_order(policy), slo_ms=SLO_MS, has_deadlines=is_strict,
                              admission="deadline" if is_strict else "off")  # fmt: skip
            numbers = compared(live, replay(setting, models, live.sent), models)
            return {**numbers, "ready_ms": ready_ms,
                    "p99_over_ready": numbers["p99_ms"] / ready_ms}  # fmt: skip

        for case, asked in cases.items():
            seconds = asked[-1].at_ms / 1e3
            bench.say(f"{case}: {count} requests in {seconds:.1f} s, each policy in each round")
            arms = [Arm(policy, partial(trial, asked, policy)) for policy in POLICIES]
            bench.trial_loop(case, arms, bench.rounds(ROUNDS, 1), warmup=0)
            _find(bench, case)


def beside_plain(name: str, seed: int, count: int) -> dict[str, tuple[float, float]]:
    """Of one of ``TRACES``, the share in time and its computing (ms): of ours, of those that ours
    accepted (with no computing), and of the two plain servers."""
    load, memory, rate = TRACES[name]
    draw = random.Random(f"{seed} {name}")
    models = []
    for number in range(PAPER_MODELS):
        size = draw.lognormvariate(math.log(PAPER_MIB * MIB), PAPER_SIGMA) / PAPER_GROUPS
        ms = draw.lognormvariate(math.log(PAPER_MS), PAPER_SIGMA) / PAPER_GROUPS
        models.append(
            PaperModel(
                name=_name(number),
                layer_bytes=(int(size),) * PAPER_GROUPS,
                layer_ms=(ms,) * PAPER_GROUPS,
                plan=tuple(range(PAPER_GROUPS)),
            )
        )
    weights = [1 / (1 + number) for number in range(PAPER_MODELS)]
    mean_ms = sum(w * m.compute_ms for w, m in zip(weights, models, strict=True)) / sum(weights)
    asked, at_ms = [], 0.0
    for _ in range(count):
        at_ms += draw.expovariate(load / mean_ms)
        asked.append(Arrival(at_ms, draw.choices(range(PAPER_MODELS), weights)[0]))
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
        "keeping": keeping(setting, models, asked),
        "greedy": greedy(setting, models, asked),
    }


class Kept(Replay):
    """Counts the requests that are refused when they come, and so were never accepted."""

    refused_at_once = 0

    def _answered(self, answer: ev.Answer) -> None:
        asked = self.asked.get(answer.token)
        if asked is not None and answer.error is not None and asked.at_ms == self.now_ms:
            self.refused_at_once += 1
        super()._answered(answer)


def recorded(models: Sequence[PaperModel], count: int) -> tuple[Arrival, ...]:
    """Of Azure's busiest functions, one for each model; time is scaled to the load."""
    text = (files("pipeswitch.simulator") / "data" / RECORDED).read_text("utf-8")
    busiest = [one for one in of_functions(text).arrivals if one.model < len(models)]
    part = busiest[RECORDED_FROM : RECORDED_FROM + count]
    work_ms = sum(models[one.model].compute_ms for one in part)
    begin_ms, end_ms = part[0].at_ms, part[-1].at_ms
    scale = work_ms / RECORDED_LOAD / (end_ms - begin_ms)
    return tuple(Arrival((one.at_ms - begin_ms) * scale, one.model) for one in part)


def _arena_bytes() -> int:
    """A tenth of all models."""
    return sum(_tower(i) * MIB for i in range(MODELS)) // 10


def _tower(number: int) -> int:
    """A model's layers."""
    return TOWERS[number % len(TOWERS)]


@contextlib.contextmanager
def _serving(policy: str, bench: Run, folder: Path, name: str) -> Iterator[Client]:
    """A server whose state is in the folder of that name; profiles are shared."""
    arguments = ["--policy", _order(policy), "--threads", str(bench.threads), "--link-gbps",
                 str(LINK_GBPS), "--profiles-dir", str(folder)]  # fmt: skip
    if policy == ADMISSION:
        config = folder / "admission.toml"
        config.write_text('[scheduler]\nadmission = "deadline"\n')
        arguments += ["--config", str(config)]
    arena, store = _arena_bytes() + ROOM_BYTES, 20 * _arena_bytes()
    with (
        server(
            arena=str(arena), host_store=str(store), args=tuple(arguments), state_dir=folder / name
        ) as running,
        running.client() as client,
    ):
        yield client


def register_towers(client: Client) -> None:
    for number in range(MODELS):
        client.register(
            _name(number), f"benchmarks.factories:tower_{_tower(number)}",
            weights=f"random:{number}", inputs={"x": ((BATCH, WIDTH), "float32")},
        )  # fmt: skip


def _order(policy: str) -> str:
    """The policy as the server calls it."""
    return policy.removesuffix(" + admission")


def _name(number: int) -> str:
    return f"m{number:02d}"


def measured(client: Client) -> tuple[list[PaperModel], Link]:
    """The models as they are profiled, and the link."""
    found = [
        msgspec.convert(client.profile(_name(number), [BATCH]), Profile) for number in range(MODELS)
    ]
    return [paper_model(_name(i), one) for i, one in enumerate(found)], link_of(found[0])


def _ready_ms(client: Client, inputs: Any) -> float:
    """The median of a model that is on the device when it is asked."""
    took_ms = [client.infer(_name(0), inputs).timing for _ in range(READY_REQUESTS)]
    return quantile([timing.total_ms for timing in took_ms if timing.resident], 0.5)


def sent_live(
    client: Client,
    models: Sequence[PaperModel],
    asked: Sequence[Arrival],
    inputs: Any,
    is_strict: bool = False,
) -> Live:
    """Send each request at its time, whatever has been answered; then wait for all."""
    ended_ms: dict[int, float] = {}
    futures: list[Future[Result]] = []
    sent: list[Arrival] = []
    began_ms = now_ms()

    def ended(number: int, _: Future[Result]) -> None:
        ended_ms[number] = now_ms() - began_ms

    for number, arrival in enumerate(asked):
        ahead_ms = arrival.at_ms - (now_ms() - began_ms)
        if ahead_ms > 0:
            time.sleep(ahead_ms / 1e3)  # the pace of an open loop
        sent.append(Arrival(now_ms() - began_ms, arrival.model))
        model = models[arrival.model]
        deadline_ms = SLO_MS + model.compute_ms if is_strict else None
        future = client.submit(model.name, inputs, deadline_ms=deadline_ms)
        future.add_done_callback(partial(ended, number))
        futures.append(future)
    timings = {}
    for number, future in enumerate(futures):
        with contextlib.suppress(DeadlineExceeded):
            timings[number] = future.result().timing
    return Live(
        sent=tuple(sent), order=tuple(sorted(timings, key=lambda n: timings[n].epoch)),
        switches=sum(not timing.resident for timing in timings.values()),
        latency_ms={number: timing.total_ms for number, timing in timings.items()},
        makespan_ms=max(ended_ms.values()),
    )  # fmt: skip


def compared(
    live: Live, paper: Outcome, models: Sequence[PaperModel], slo_ms: float = SLO_MS
) -> Numbers:
    """Both sides of one trial."""
    in_time = sum(took_ms <= slo_ms + models[live.sent[number].model].compute_ms
                  for number, took_ms in live.latency_ms.items())  # fmt: skip
    took = list(live.latency_ms.values())
    return {
        "p50_ms": quantile(took, 0.5), "p99_ms": quantile(took, 0.99),
        "in_slo": in_time / len(live.sent), "refused": len(live.sent) - len(took),
        "switches": live.switches, "makespan_ms": live.makespan_ms,
        "simulated_refused": sum(paper.refused.values()),
        "simulated_p50_ms": quantile_ms(paper, 0.5), "simulated_p99_ms": quantile_ms(paper, 0.99),
        "simulated_in_slo": paper.share_in_slo, "simulated_switches": paper.switches,
        "simulated_makespan_ms": paper.makespan_ms,
        "same_place": same_places(live.order, paper.order),
    }  # fmt: skip


def same_places(one: Sequence[int], other: Sequence[int]) -> float:
    """Of what is in both: the share of neighbours that stand in the same order in the other."""
    place = {number: index for index, number in enumerate(other)}
    pairs = [place[a] < place[b] for a, b in pairwise(n for n in one if n in place)]
    return sum(pairs) / len(pairs) if pairs else 1.0


def same_ranks(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Of the pairs that the first tells apart by more than ``APART``: the share that the other puts
    in the same order."""
    pairs = [(a, b) for a, b in combinations(one, 2) if abs(one[a] - one[b]) > APART]
    same = [(one[a] - one[b]) * (other[a] - other[b]) > 0 for a, b in pairs]
    return sum(same) / len(same) if same else 1.0


def _find(bench: Run, case: str) -> None:
    kind = case.partition(",")[0]

    def middle(policy: str, key: str) -> float:
        return quantile(bench.values(case, policy, key), 0.5)

    for policy in POLICIES:
        name = f"{kind}, {policy}"
        ratio = middle(policy, "makespan_ms") / middle(policy, "simulated_makespan_ms")
        bench.find(f"{name}: live / simulated makespan", ratio, at_most=1 + MAKESPAN_WITHIN)
        switches = middle(policy, "switches") / middle(policy, "simulated_switches")
        bench.find(f"{name}: live / simulated switches", switches)
        bench.find(f"{name}: neighbours in the simulator's order", middle(policy, "same_place"))
        bench.find(f"{name}: in time, live", middle(policy, "in_slo"))
        bench.find(f"{name}: in time, simulated", middle(policy, "simulated_in_slo"))
        bench.find(f"{name}: p99 / p50 of a model that is ready", middle(policy, "p99_over_ready"))
    paper, live = ({policy: middle(policy, key) for policy in POLICIES}
                   for key in ("simulated_in_slo", "in_slo"))  # fmt: skip
    bench.find(f"{kind}: policies in the simulator's order, by what is in time",
               same_ranks(paper, live), at_least=1.0)  # fmt: skip
