"""``overload``: more requests than the device can compute, and what admission makes of them.

``edf`` with ``--admission deadline``, one model, deadlines of 10 to 20 of its runs. Each door has
Poisson arrivals at 1.5, 2 and 4 times the capacity (a closed loop, just before), from a process of
its own (``open_loop.py``).
*Accepted* is also what was refused within four runs of its deadline: such a one had waited, and is
not in time. All share this machine's cores: ``late_ms`` is how late the generator itself was.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from pipeswitch.client.client import Client
from pipeswitch.planning.fit import quantile
from pipeswitch.simulator.arrivals import poisson
from pipeswitch.testing import server

from .models import MIB, MLP_WIDTH, mlp
from .trials import Arm, Numbers, Run, now_ms

MODEL: Final = mlp(1)
TIMES: Final = (1.5, 2.0, 4.0)  # the capacity
RUNS: Final = (10.0, 20.0)  # of the model, in a deadline
OPEN: Final = 4  # requests of the closed loop
SECONDS, QUICK_SECONDS = 8.0, 4.0
CAPACITY_S: Final = 1.0
IN_TIME, GOODPUT, REFUSAL_MS = 0.99, 0.9, 5.0
DROPPED: Final = 4.0  # runs before its deadline at most, if it waited
ARGS: Final = ("--policy", "edf", "--admission", "deadline")


def run(bench: Run, _: Sequence[str] = ()) -> None:
    """Each round: the capacity, then all doors at all loads."""
    seconds = QUICK_SECONDS if bench.is_quick else SECONDS
    with (
        server(
            arena=str(MODEL.room_bytes + 8 * MIB), host_store=str(2 * MODEL.room_bytes), http=True,
            args=(*ARGS, "--threads", str(bench.threads)),
        ) as running,
        running.client() as client,
    ):  # fmt: skip
        client.register(MODEL.name, MODEL.source, weights="random:0", inputs=MODEL.inputs)
        addresses = {
            "own": running.tcp_address, "http": running.http_address, "grpc": running.grpc_address
        }  # fmt: skip
        arms = [
            Arm(
                f"{door} {times:g}",
                partial(_trial, client, running.process.pid, door, address, times, seconds),
            )
            for door, address in addresses.items()
            for times in TIMES
        ]
        bench.say("measuring")
        bench.trial_loop("overload", arms, bench.rounds(5, 2), warmup=0)
    for arm in arms:
        _find(bench, arm.name)
    bench.notes.append(f"deadlines: {RUNS[0]:g} to {RUNS[1]:g} times compute_ms; Poisson arrivals")
    bench.notes.append("late_ms: p99 of how late a generator that only slept was woken")
    bench.notes.append("controller_waits: of the time in which it could run, for a core")


def _capacity(client: Client) -> tuple[float, float]:
    """Answers a second while some requests wait always, and the median of their computing."""
    x, took_ms = np.ones((1, MLP_WIDTH), np.float32), []
    began_ms = now_ms()
    futures = [client.submit(MODEL.name, x) for _ in range(OPEN)]
    while now_ms() - began_ms < CAPACITY_S * 1e3:
        took_ms.append(futures.pop(0).result().timing.compute_ms)
        futures.append(client.submit(MODEL.name, x))
    answers_per_s = len(took_ms) * 1e3 / (now_ms() - began_ms)
    for future in futures:
        future.result()
    return answers_per_s, quantile(took_ms, 0.5)


def _scheduled_s(pid: int) -> tuple[float, float]:
    """What its main thread had of a core, and how long it waited for one."""
    used, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(used) / 1e9, int(waited) / 1e9


def _trial(
    client: Client, controller: int, door: str, address: str, times: float, seconds: float
) -> Numbers:
    """One door at one load; the capacity is that before and after."""
    before, run_ms = _capacity(client)
    rate, chance = times * before, random.Random(times)
    trace = poisson(rate, count=round(rate * seconds), model_count=1, seed=round(times * 10))
    asked = [(one.at_ms, chance.uniform(*RUNS) * run_ms) for one in trace.arrivals]
    order = {"door": door, "address": address, "model": MODEL.name, "shape": [1, MLP_WIDTH],
             "requests": asked}  # fmt: skip
    used_s, waited_s = _scheduled_s(controller)
    child = subprocess.run(
        [sys.executable, "-m", f"{__package__}.open_loop"], input=json.dumps(order) + "\n",
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    used_s, waited_s = np.subtract(_scheduled_s(controller), (used_s, waited_s)).tolist()
    capacity = (before + _capacity(client)[0]) / 2.0
    planned, sent, took, status, may_retry = np.array(sorted(json.loads(child.stdout))).T
    deadline = np.array([deadline_ms for _, deadline_ms in asked])
    is_answered = status == 200
    # A refusal that comes later is of a request that waited: it had been accepted.
    is_accepted = is_answered | (took > deadline - DROPPED * run_ms)
    is_in_time = is_answered & (took <= deadline)
    refusals_ms = took[~is_accepted].tolist() or [0.0]
    duration_s = ((sent + took).max() - sent[0]) / 1e3
    return {
        "capacity_per_s": capacity,
        "compute_ms": run_ms,
        "requests": len(took),
        "accepted": float(is_accepted.mean()),
        "in_time": float(is_in_time.sum() / is_accepted.sum()),
        "dropped": float((is_accepted & ~is_answered).sum() / is_accepted.sum()),
        "goodput": float(is_in_time.sum() / duration_s / capacity),
        "refusal_p50_ms": quantile(refusals_ms, 0.5),
        "refusal_p99_ms": quantile(refusals_ms, 0.99),
        "late_ms": quantile((sent - planned).tolist(), 0.99),
        "controller_waits": waited_s / (used_s + waited_s),
        "statuses": dict(Counter(f"{one:.0f}" for one in status)),
        "told_when": float(may_retry[~is_answered].sum() / max(1, (~is_answered).sum())),
    }


def _find(bench: Run, arm: str) -> None:
    """The medians of its rounds."""
    for key, what, unit, target in (
        ("accepted", "accepted", "", {}),
        ("in_time", "in time, of the accepted", "", {"at_least": IN_TIME}),
        ("goodput", "goodput / capacity", "", {"at_least": GOODPUT}),
        ("refusal_p50_ms", "refusal, p50", "ms", {}),
        ("refusal_p99_ms", "refusal, p99", "ms", {"at_most": REFUSAL_MS}),
    ):
        bench.find(f"{arm}: {what}", bench.p50("overload", arm, key), unit, **target)
