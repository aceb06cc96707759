"""``bench batching``: 64 requests that wait for one model, joined and each alone; and a single one.

Each model is registered twice, with and without batching, both pinned: the warm-up brings them to
the device. A trial sends 64 requests of
one row at once and waits for the last answer; the arms take turns. Under light load one request is
out at a time, and the arms take turns again: the difference is what waiting for others costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from pipeswitch.client.client import Client
from pipeswitch.planning.fit import quantile
from pipeswitch.testing import server

from .models import MIB, MLP_SOURCE, MLP_WIDTH
from .trials import Arm, Numbers, Run, now_ms

WAITING: Final = 64
LIMIT: Final = 16
DELAY_MS: Final = 2.0
ROUNDS, QUICK_ROUNDS = 15, 3
SINGLE_ROUNDS, QUICK_SINGLE_ROUNDS = 200, 20
ARENA_BYTES: Final = 512 * MIB


@dataclass(frozen=True)
class Batched:
    """A model, one row of its input, and how much faster it is asked to be."""

    name: str
    source: str
    row: Any
    at_least: float


CASES: Final = (
    Batched("mlp", MLP_SOURCE, np.full((1, MLP_WIDTH), 0.01, np.float32), 3.0),
    Batched("bert-small", "benchmarks.factories:bert_small",
            np.arange(32, dtype=np.int64)[None], 1.5),
)  # fmt: skip
ARMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "alone": {},
    "joined": {"batch": LIMIT, "batch_delay_ms": DELAY_MS},
}


def run(bench: Run, _: Sequence[str] = ()) -> None:
    """Each model on a server of its own."""
    for case in CASES:
        bench.say(f"{case.name}: starting a server")
        arguments = ("--threads", str(bench.threads))
        with (
            server(arena=str(ARENA_BYTES), host_store="1GiB", args=arguments) as running,
            running.client() as client,
        ):
            names = {arm: f"{case.name}-{arm}" for arm in ARMS}
            for arm, name in names.items():
                inputs = {"x": (case.row.shape, str(case.row.dtype))}
                row = client.register(name, case.source, weights="random:1", inputs=inputs,
                                      pin=True, **ARMS[arm])  # fmt: skip
            bench.notes.append(f"{case.name}: bits depend on the batch: "
                               f"{'no' if row['batching']['is_exact'] else 'yes'}")  # fmt: skip
            _measure(bench, case, client, names)
    bench.notes.append(f"joined: up to {LIMIT} rows, after {DELAY_MS:g} ms at the latest; "
                       f"{WAITING} requests of one row each, of one client")  # fmt: skip


def _measure(bench: Run, case: Batched, client: Client, names: dict[str, str]) -> None:
    crowd, single = f"{case.name}, {WAITING} waiting", f"{case.name}, one at a time"
    bench.say(f"{crowd}: measuring")
    arms = [Arm(arm, partial(_all_at_once, client, name, case.row)) for arm, name in names.items()]
    bench.trial_loop(crowd, arms, bench.rounds(ROUNDS, QUICK_ROUNDS), warmup=2)
    bench.say(f"{single}: measuring")
    arms = [Arm(arm, partial(_one, client, name, case.row)) for arm, name in names.items()]
    bench.trial_loop(single, arms, bench.rounds(SINGLE_ROUNDS, QUICK_SINGLE_ROUNDS), warmup=2)
    alone, joined = (quantile(bench.values(crowd, arm, "answers_per_s"), 0.5) for arm in ARMS)
    bench.find(f"{crowd}: alone, p50", alone, "answers/s")
    bench.find(f"{crowd}: joined / alone, p50", joined / alone, at_least=case.at_least)
    for share in (0.5, 0.99):
        alone, joined = (quantile(bench.values(single, arm, "total_ms"), share) for arm in ARMS)
        what = f"{single}: joined - alone, p{share * 100:g}"
        bench.find(what, joined - alone, "ms", at_most=DELAY_MS)
    waited_ms = quantile(bench.values(single, "joined", "queue_ms"), 0.99)
    bench.find(f"{single}: joined, waited for others, p99", waited_ms, "ms")


def _all_at_once(client: Client, name: str, row: Any) -> Numbers:
    began_ms = now_ms()
    futures = [client.submit(name, row) for _ in range(WAITING)]
    timings = [future.result().timing for future in futures]
    took_ms = now_ms() - began_ms
    runs = {timing.epoch: timing.joined for timing in timings}
    return {
        "answers_per_s": WAITING / took_ms * 1e3,
        "took_ms": took_ms,
        "runs": len(runs),
        "largest": max(runs.values()),
    }


def _one(client: Client, name: str, row: Any) -> Numbers:
    began_ms = now_ms()
    timing = client.infer(name, row).timing
    return {
        "total_ms": now_ms() - began_ms,
        "queue_ms": timing.queue_ms,
        "compute_ms": timing.compute_ms,
    }
