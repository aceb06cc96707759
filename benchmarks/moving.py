"""Jobs that go to another device: what requests see of it, and what it gives.

SwitchFlow's figure 7. On two cpu devices with one compute thread each, a model that the first one
alone may serve. A job that moves is evicted, and its script starts again on the other device. Arms
take turns in each case:

* *its own job moves*: a request preempts a job, which in the arm *moving* is sent to the other
  device at that instant;
* *another job moves*: the same, and the job that moves is one that trained on the other device;
* *requests stay*: a client asks back to back; the job *waits* beside it, or *moves* away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from pipeswitch.client.client import Client
from pipeswitch.planning.fit import quantile
from pipeswitch.testing import RunningServer

from .models import MIB, MODELS
from .serving import TWINS, Training, ask, inputs_of, serving, window
from .trials import Arm, Numbers, Run, nothing, now_ms

MODEL: Final = "resnet18"
HOME, AWAY = "cpu:0", "cpu:1"
FEW: Final = ("--width", "1024", "--layers", "4", "--batch", "64")  # 64 MiB with Adam's state
MANY: Final = ("--width", "128", "--layers", "256", "--batch", "64")  # as many bytes, 64 x tensors
SLICES_BYTES: Final = 192 * MIB  # both jobs' on one device
MOST_LATER: Final = 1.05  # a request beside a move, over one without
WINDOW_S: Final = 3.0
QUICK_WINDOW_S: Final = 1.5
ROUNDS: Final = 50
QUICK_ROUNDS: Final = 3


def run(bench: Run) -> None:
    """All cases on a server of their own."""
    with served(bench) as (running, client):
        measure(bench, running, client)


@contextlib.contextmanager
def served(bench: Run) -> Iterator[tuple[RunningServer, Client]]:
    """Two devices; each may serve one of the twins."""
    with serving(
        MODELS[MODEL], 1, bench.seed, devices=(HOME, AWAY), are_pinned=True,
        slices_bytes=SLICES_BYTES,
    ) as entered:  # fmt: skip
        yield entered


def measure(bench: Run, running: RunningServer, client: Client) -> None:
    """All cases. No job of these names may be there."""
    inputs = inputs_of(client)
    client.infer(TWINS[0], inputs)
    with running.client() as second, ThreadPoolExecutor(1) as pool:

        def preempt(case: str, jobs: Sequence[Training], home: str, away: str) -> None:
            """The last of the jobs moves."""
            task = second.task(jobs[-1].task.name)
            others: dict[str, Callable[[], Any]] = {
                "not moving": task.status,
                "moving": partial(task.move, away),
            }
            prepare = partial(_bring, jobs, home)
            arms = [
                Arm(name, partial(_request, client, inputs, pool, other), prepare)
                for name, other in others.items()
            ]
            _compare(bench, case, arms)

        few = Training(client, 1, bench.seed, FEW, "few-tensors")
        preempt("its own job moves", [few], HOME, AWAY)
        _requests_stay(bench, running, few, inputs)
        many = Training(client, 1, bench.seed, MANY, "many-tensors")
        few.task.move(HOME)
        preempt("another job moves", [few, many], AWAY, HOME)
        for job in (few, many):
            job.task.cancel()
    bench.notes.append("beside_ms: so long of the request a move was under way")


def _bring(jobs: Sequence[Training], device: str) -> None:
    """The last of the jobs trains on that device, the others where they are."""
    jobs[-1].task.move(device)
    for job in jobs:
        job.run()


def _request(
    client: Client, inputs: Any, pool: ThreadPoolExecutor, other: Callable[[], Any]
) -> Numbers:
    """A request that preempts, and a word about a job at the same instant."""

    def ended_ms() -> float:
        other()
        return now_ms()

    began_ms, ended = now_ms(), pool.submit(ended_ms)
    _, numbers = ask(client, TWINS[0], inputs, is_resident=True)
    total_ms = numbers["total_ms"]
    more = {
        "beside_ms": min(total_ms, ended.result() - began_ms),
        "before_ms": total_ms - numbers["compute_ms"],
    }
    return numbers | more


def _compare(bench: Run, case: str, arms: Sequence[Arm]) -> None:
    bench.say(f"{case}: measuring")
    bench.trial_loop(case, arms, bench.rounds(ROUNDS, QUICK_ROUNDS))
    p50 = {
        (arm.name, key): quantile(bench.values(case, arm.name, key), 0.5)
        for arm in arms
        for key in ("total_ms", "before_ms", "beside_ms")
    }
    later = p50["moving", "total_ms"] / p50["not moving", "total_ms"]
    bench.find(f"{case}: request, moving / not, p50", later, at_most=MOST_LATER)
    more_ms = p50["moving", "before_ms"] - p50["not moving", "before_ms"]
    bench.find(f"{case}: request before it computes, moving - not, p50", more_ms, "ms")
    bench.find(f"{case}: of the request beside the move, p50", p50["moving", "beside_ms"], "ms")


def _requests_stay(bench: Run, running: RunningServer, job: Training, inputs: Any) -> None:
    """What the job gets done, and the requests beside it."""
    case, seconds = "requests stay", QUICK_WINDOW_S if bench.is_quick else WINDOW_S

    def held(meanwhile: Callable[[], Any]) -> Numbers:
        first, began_ms = job.task.status()["step"], now_ms()
        found = window(running, TWINS[:1], inputs, seconds, meanwhile)
        steps = job.task.status()["step"] - first
        return found | {"trained_per_s": steps * 1000.0 / (now_ms() - began_ms)}

    prepare = partial(_bring, [job], HOME)
    arms = [
        Arm("waits", partial(held, nothing), prepare),
        Arm("moves", partial(held, partial(job.task.move, AWAY)), prepare),
    ]
    bench.say(f"{case}: measuring")
    bench.trial_loop(case, arms, bench.rounds(10, 2))
    for key, what in (("trained_per_s", "steps a second"), ("median_ms", "a request")):
        waits, moves = (quantile(bench.values(case, arm.name, key), 0.5) for arm in arms)
        bench.find(f"{case}: {what}, the job moves / waits", moves / waits)
