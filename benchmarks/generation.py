"""``bench generation``: tokens a second, first tokens of cold models, and more models than fit.

*served* is our server over its owner's socket; *generate* is transformers' ``generate()`` alone in
a process. Both must return the same tokens. The time of a cold model's first token is compared with
the model's copy time or a resident model's time for the prompt, whichever is larger. Four models
get random requests (Poisson) in an arena with room for 1.5 models. Their times are compared with
those in an arena with room for all four, and with those of a process per request."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from pipeswitch.base.quantiles import quantile
from pipeswitch.client.client import Client

from . import lm
from .trials import Arm, Numbers, Run, now_ms

FOUR: Final = 4
LONG: Final = 4096  # number of tokens of a long prompt
ROUNDS, QUICK_ROUNDS = 7, 2
SECONDS, QUICK_SECONDS = 60.0, 8.0
SERVED: Final = {"served": "exact", "fast": "fast", "bf16": "bf16", "int8": "int8"}
A_SECOND: Final = 0.6  # requests per second to the four models together


def run(bench: Run, _: Sequence[str] = ()) -> None:
    """Measure the speed of each model size, and the other cases with only the larger size."""
    for size in lm.SIZES[:1] if bench.is_quick else lm.SIZES:
        with lm.placed(bench, size, 1) as place:
            _speed(bench, place)
    size = lm.SMALL if bench.is_quick else lm.MIDDLE
    with lm.placed(bench, replace(size, context=LONG + 64), 2) as place:
        _cold(bench, place)
    with lm.placed(bench, size, FOUR) as place:
        _four(bench, place)
    bench.notes.append("both ways compute with the same threads")


def _speed(bench: Run, place: lm.Place) -> None:
    name = place.size.name
    bench.say(f"{name}: starting a server, and transformers")
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(lm.transformers_child(place))
        peers: list[lm.Peer] = [lm.Lines("generate", root=child.pid, child=child)]
        for arm, precision in SERVED.items():
            running, client = stack.enter_context(lm.served(place, precision=precision))
            peers.append(lm.OwnSocket(arm, root=running.pid, client=client))
        for case in lm.speed(bench, place.size, peers, bench.rounds(ROUNDS, QUICK_ROUNDS)):
            theirs = bench.values(case, "generate", "tokens_per_s")
            for arm in SERVED:
                ours = bench.values(case, arm, "tokens_per_s")
                bench.find(f"{case}: {arm}, p50", quantile(ours, 0.5), "tokens/s")
                share = quantile([a / b for a, b in zip(ours, theirs, strict=True)], 0.5)
                bench.find(
                    f"{case}: {arm} / generate(), by pairs, p50",
                    share,
                    at_least=0.95 if arm == "served" else None,
                )
    for arm in ("generate", *SERVED):
        least = 3.0 if arm == "served" else None
        one, many = (
            bench.p50(f"{name}, {count} at once", arm, "tokens_per_s") for count in (1, lm.MANY)
        )
        bench.find(f"{name}: {lm.MANY} at once / one, {arm}", many / one, at_least=least)


def _cold(bench: Run, place: lm.Place) -> None:
    bench.say("a cold model's first token: starting a server")
    with lm.served(place) as (_, client):
        for count in (*lm.PROMPTS, LONG):
            case = f"first token, prompt of {count}"
            seeds = iter(range(count << 16, 1 << 31))  # each prompt is new: no result is reused
            arms = [
                Arm(arm, partial(_first, client, name, place.size, count, seeds))
                for arm, name in (("cold", "lm-0"), ("resident", "lm-0"), ("other", "lm-1"))
            ]
            rounds = bench.rounds(ROUNDS // 2 if count == LONG else 2 * ROUNDS, QUICK_ROUNDS)
            bench.trial_loop(case, arms, rounds, warmup=1)
            cold, resident = (bench.p50(case, arm, "total_ms") for arm in ("cold", "resident"))
            copy = bench.p50(case, "cold", "copy_ms")
            bench.find(f"{case}: cold, p50", cold, "ms")
            bench.find(
                f"{case}: cold / max(copy, resident), p50", cold / max(copy, resident), at_most=1.15
            )


def _first(client: Client, name: str, size: lm.Size, count: int, seeds: Iterator[int]) -> Numbers:
    """Measure the answer to a new prompt of ``count`` tokens; the answer has one token."""
    [ids] = size.prompts(1, count, next(seeds))
    began_ms = now_ms()
    with client.generate(name, ids, max_new_tokens=1) as answer:
        assert len([*answer]) == 1
        timing, total_ms = answer.timing, now_ms() - began_ms
    assert timing is not None
    return {
        "total_ms": total_ms,
        "copy_ms": timing.copy_ms,
        "stall_ms": timing.stall_ms,
        "compute_ms": timing.compute_ms,
        "resident": timing.resident,
    }


def _four(bench: Run, place: lm.Place) -> None:
    seconds = QUICK_SECONDS if bench.is_quick else SECONDS
    case = f"{FOUR} models, requests by chance"
    for arm, rooms in (("switching", 1.5), ("all resident", float(FOUR))):
        bench.say(f"{case}: {arm}, {seconds:.0f} s")
        with lm.served(place, rooms) as (_, client):
            for number in range(FOUR):  # warm up each model with one answer
                list(client.generate(f"lm-{number}", [1, 2, 3], max_new_tokens=2))
            for number, row in enumerate(_by_chance(client, place.size, seconds, bench.seed)):
                bench.record(case, arm, number, row)
    rounds = bench.rounds(3, 1)
    for number in range(rounds):
        bench.say(f"{case}: stop and start, {number + 1} of {rounds}")
        began_ms = now_ms()
        with lm.transformers_child(place) as child:
            lm.Lines("stop-and-start", child=child).ask(0, place.size.prompts(1, 32, 0), 1)
            bench.record(case, "stop-and-start", number, {"first_ms": now_ms() - began_ms})
    for share in (0.5, 0.99):
        both = ("switching", "all resident")
        first = {arm: bench.p50(case, arm, "first_ms", share) for arm in (*both, "stop-and-start")}
        key = "between_p50_ms" if share < 0.9 else "between_worst_ms"
        between = {arm: bench.p50(case, arm, key, share) for arm in both}
        name = f"p{share * 100:g}"
        bench.find(f"first token, switching, {name}", first["switching"], "ms")
        bench.find(
            f"first token, switching / all resident, {name}",
            first["switching"] / first["all resident"],
            at_most=1.5,
        )
        bench.find(
            f"first token, stop-and-start / switching, {name}",
            first["stop-and-start"] / first["switching"],
            at_least=100.0,
        )
        bench.find(
            f"between tokens, switching / all resident, {name}",
            between["switching"] / between["all resident"],
            at_most=1.5,
        )


def _by_chance(client: Client, size: lm.Size, seconds: float, seed: int) -> list[Numbers]:
    """Send prompts of 32 tokens at times that follow from the seed; each asks for 16 new tokens."""
    chance, rows, threads = random.Random(seed), list[Numbers](), list[threading.Thread]()

    def ask(name: str, prompt: list[int]) -> None:
        times_ms, began_ms = [], now_ms()
        for _ in client.generate(name, prompt, max_new_tokens=16):
            times_ms.append(now_ms())
        gaps = sorted(b - a for a, b in itertools.pairwise(times_ms))
        rows.append(
            {
                "first_ms": times_ms[0] - began_ms,
                "between_p50_ms": gaps[len(gaps) // 2],
                "between_worst_ms": gaps[-1],
            }
        )

    began_s, at_s = time.monotonic(), 0.0
    while (at_s := at_s + chance.expovariate(A_SECOND)) < seconds:
        name = f"lm-{chance.randrange(FOUR)}"
        (prompt,) = size.prompts(1, 32, chance.randrange(1 << 30))
        threading.Event().wait(max(0.0, began_s + at_s - time.monotonic()))
        threads.append(threading.Thread(target=ask, args=(name, prompt)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return rows
