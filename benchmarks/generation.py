"""``bench generation``: tokens a second, first tokens of cold models, and more models than fit.

*served* asks a server over its owner's socket, *generate* is transformers' own in a process that
does nothing else; both must say the same tokens. A cold model's first token is beside the larger of
its copy and of a resident one's prompt. Four models share memory for one and a half: requests
come by chance (Poisson), beside the same with memory for all, and beside starting a process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from pipeswitch.client.client import Client
from pipeswitch.planning.fit import quantile
from pipeswitch.testing import server

from .models import MIB
from .setting import end, read_line, spawn
from .trials import Arm, Numbers, Run, now_ms

NEW: Final = 128
MANY: Final = 8
FOUR: Final = 4
ROUNDS, QUICK_ROUNDS = 7, 2
SECONDS, QUICK_SECONDS = 60.0, 8.0
A_SECOND: Final = 0.6  # requests, of all four models together
PROMPTS: Final = (32, 512)


@dataclass(frozen=True)
class Size:
    """A GPT-2."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    context: int = 640


SMALL: Final = Size("small", 256, 4, 1000)
MIDDLE: Final = Size("gpt2", 768, 12, 52_000)  # GPT-2's own, 500 MB
SIZES: Final = (SMALL, MIDDLE)


def run(bench: Run, _: Sequence[str] = ()) -> None:
    """Speed of each size; the rest of the larger one."""
    for size in SIZES[:1] if bench.is_quick else SIZES:
        with _folders(size, 1) as (folders, model_bytes):
            _speed(bench, size, folders, model_bytes)
    size = SMALL if bench.is_quick else MIDDLE
    with _folders(size, FOUR) as (folders, model_bytes):
        _cold(bench, size, folders[:2], model_bytes)
        _four(bench, size, folders, model_bytes)
    asked = [trial for trial in bench.trials if "alike" in trial]
    alike, count = (
        sum(trial["alike"] for trial in asked),
        sum(MANY if f"{MANY} at" in trial["case"] else 1 for trial in asked),
    )
    bench.find("answers whose tokens all equal generate()'s, of all", alike / count)
    bench.notes.append("both ways compute with the same threads")


@contextlib.contextmanager
def _folders(size: Size, count: int) -> Iterator[tuple[list[str], int]]:
    """Models on disk, and the bytes of each."""
    with tempfile.TemporaryDirectory(prefix="pipeswitch-bench-") as folder:
        folders = [str(Path(folder) / f"{size.name}-{number}") for number in range(count)]
        child = spawn("write", vars(size) | {"folders": folders}, module="lm_child")
        try:
            yield folders, read_line(child)["bytes"]
        finally:
            end(child)


@contextlib.contextmanager
def _served(bench: Run, folders: Sequence[str], model_bytes: int, rooms: float) -> Iterator[Client]:
    """A server with these models, its memory for so many of them."""
    arena = int(rooms * 1.05 * model_bytes) + 8 * MIB
    store = int(1.1 * len(folders) * model_bytes) + 64 * MIB
    arguments = ("--threads", str(bench.threads))
    with (
        server(arena=str(arena), host_store=str(store), args=arguments) as running,
        running.client() as client,
    ):
        for number, folder in enumerate(folders):
            client.register(f"lm-{number}", f"hf:{folder}", weights="pretrained", generate=True)
        yield client


def _prompt(size: Size, count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(size.vocabulary), k=count)


# ---- tokens a second -----------------------------------------------------------------------------


def _speed(bench: Run, size: Size, folders: list[str], model_bytes: int) -> None:
    bench.say(f"{size.name}: starting a server, and transformers")
    child = spawn("serve", {"folders": folders, "threads": bench.threads}, module="lm_child")
    try:
        with _served(bench, folders, model_bytes, 1.0) as client:
            for count in (1, MANY):
                told: dict[str, list[list[int]]] = {}
                seeds = iter(range(count << 16, 1 << 31))
                case = f"{size.name}, {count} at once"
                bench.say(f"{case}: measuring")
                arms = [
                    Arm("served", partial(_ask_all, client, told),
                        partial(_new_prompts, size, count, seeds, told)),
                    Arm("generate", partial(_ask_child, child, told)),
                ]  # fmt: skip
                bench.trial_loop(case, arms, bench.rounds(ROUNDS, QUICK_ROUNDS), warmup=1)
    finally:
        end(child)
    for count in (1, MANY):
        case = f"{size.name}, {count} at once"
        ours, theirs = (bench.values(case, arm, "tokens_per_s") for arm in ("served", "generate"))
        bench.find(f"{case}: served, p50", quantile(ours, 0.5), "tokens/s")
        share = quantile([a / b for a, b in zip(ours, theirs, strict=True)], 0.5)
        bench.find(f"{case}: served / generate(), by pairs, p50", share,
                   at_least=1.0 if count == 1 else None)  # fmt: skip
    for arm in ("served", "generate"):
        one, many = (
            quantile(bench.values(f"{size.name}, {count} at once", arm, "tokens_per_s"), 0.5)
            for count in (1, MANY)
        )
        bench.find(f"{size.name}: {MANY} at once / one, {arm}", many / one,
                   at_least=3.0 if arm == "served" else None)  # fmt: skip


def _new_prompts(size: Size, count: int, seeds: Iterator[int], told: dict[str, Any]) -> None:
    """For a round: what was asked before would not be computed again."""
    told["prompts"] = [_prompt(size, 33, next(seeds)) for _ in range(count)]


def _ask_all(client: Client, told: dict[str, Any]) -> Numbers:
    """Each prompt by a thread of its own."""
    prompts = told["prompts"]
    answers: list[list[int]] = [[] for _ in prompts]
    firsts = [0.0 for _ in prompts]

    def ask(number: int) -> None:
        answer = client.generate("lm-0", prompts[number], max_new_tokens=NEW)
        answers[number] = [token.id for token in answer]
        firsts[number] = answer.first_token_ms

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    began_ms = now_ms()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_ms = now_ms() - began_ms
    told["served"] = answers
    return {"tokens_per_s": len(prompts) * NEW / took_ms * 1e3, "first_ms": max(firsts)}


def _ask_child(child: Any, told: dict[str, Any]) -> Numbers:
    child.stdin.write(json.dumps({"ids": told["prompts"], "new": NEW}) + "\n")
    answer = read_line(child)
    alike = sum(a == b for a, b in zip(answer["tokens"], told["served"], strict=True))
    return {
        "tokens_per_s": alike and len(told["prompts"]) * NEW / answer["took_ms"] * 1e3,
        "alike": alike,  # where two logits are within 1e-6 another batch may choose the other
    }


# ---- a cold model's first token ------------------------------------------------------------------


def _cold(bench: Run, size: Size, folders: list[str], model_bytes: int) -> None:
    bench.say("a cold model's first token: starting a server")
    with _served(bench, folders, model_bytes, 1.0) as client:
        for count in PROMPTS:
            case = f"first token, prompt of {count}"
            seeds = iter(range(count << 16, 1 << 31))  # no prompt twice: nothing is known of it
            arms = [
                Arm(arm, partial(_first, client, name, size, count, seeds))
                for arm, name in (("cold", "lm-0"), ("resident", "lm-0"), ("other", "lm-1"))
            ]
            bench.trial_loop(case, arms, bench.rounds(2 * ROUNDS, QUICK_ROUNDS), warmup=1)
            cold, resident, copy = (
                quantile(bench.values(case, arm, key), 0.5)
                for arm, key in (
                    ("cold", "total_ms"),
                    ("resident", "total_ms"),
                    ("cold", "copy_ms"),
                )
            )
            bench.find(f"{case}: cold, p50", cold, "ms")
            bench.find(f"{case}: cold / max(copy, resident), p50", cold / max(copy, resident),
                       at_most=1.15)  # fmt: skip


def _first(client: Client, name: str, size: Size, count: int, seeds: Iterator[int]) -> Numbers:
    """One step: as ``generate`` asks for a prompt."""
    inputs = {"ids": [_prompt(size, count, next(seeds))], "count": [count], "used": [0]}
    began_ms = now_ms()
    with client.sequence(name) as sequence:
        timing = sequence.infer(_as_int64(inputs)).timing
        total_ms = now_ms() - began_ms
    return {"total_ms": total_ms, "copy_ms": timing.copy_ms, "stall_ms": timing.stall_ms,
            "compute_ms": timing.compute_ms, "resident": timing.resident}  # fmt: skip


def _as_int64(inputs: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    return {name: np.array(value, np.int64) for name, value in inputs.items()}


# ---- four models, memory for one and a half ------------------------------------------------------


def _four(bench: Run, size: Size, folders: list[str], model_bytes: int) -> None:
    seconds = QUICK_SECONDS if bench.is_quick else SECONDS
    case = f"{FOUR} models, requests by chance"
    for arm, rooms in (("switching", 1.5), ("all resident", float(FOUR))):
        bench.say(f"{case}: {arm}, {seconds:.0f} s")
        with _served(bench, folders, model_bytes, rooms) as client:
            for number in range(FOUR):  # each has answered once
                list(client.generate(f"lm-{number}", [1, 2, 3], max_new_tokens=2))
            for number, row in enumerate(_by_chance(client, size, seconds, bench.seed)):
                bench.record(case, arm, number, row)
    rounds = bench.rounds(3, 1)
    for number in range(rounds):
        bench.say(f"{case}: stop and start, {number + 1} of {rounds}")
        began_ms = now_ms()
        child = spawn("serve", {"folders": folders[:1], "threads": bench.threads},
                      module="lm_child")  # fmt: skip
        try:
            child.stdin.write(json.dumps({"ids": [_prompt(size, 32, 0)], "new": 1}) + "\n")  # type: ignore[union-attr]
            read_line(child)
            bench.record(case, "stop-and-start", number, {"first_ms": now_ms() - began_ms})
        finally:
            end(child)
    for share in (0.5, 0.99):
        first = {
            arm: quantile(bench.values(case, arm, "first_ms"), share)
            for arm in ("switching", "all resident", "stop-and-start")
        }
        between = {
            arm: quantile(bench.values(case, arm, "between_p50_ms" if share < 0.9 else
                                       "between_worst_ms"), share)
            for arm in ("switching", "all resident")
        }  # fmt: skip
        name = f"p{share * 100:g}"
        bench.find(f"first token, switching, {name}", first["switching"], "ms")
        bench.find(f"first token, switching / all resident, {name}",
                   first["switching"] / first["all resident"], at_most=1.5)  # fmt: skip
        bench.find(f"first token, stop-and-start / switching, {name}",
                   first["stop-and-start"] / first["switching"], at_least=100.0)  # fmt: skip
        bench.find(f"between tokens, switching / all resident, {name}",
                   between["switching"] / between["all resident"], at_most=1.5)  # fmt: skip


def _by_chance(client: Client, size: Size, seconds: float, seed: int) -> list[Numbers]:
    """Requests of 32 tokens and 16 to come, the same ones for each arm."""
    chance, rows, threads = random.Random(seed), list[Numbers](), list[threading.Thread]()

    def ask(name: str, prompt: list[int]) -> None:
        times_ms, began_ms = [], now_ms()
        for _ in client.generate(name, prompt, max_new_tokens=16):
            times_ms.append(now_ms())
        gaps = sorted(b - a for a, b in itertools.pairwise(times_ms))
        rows.append({"first_ms": times_ms[0] - began_ms, "between_p50_ms": gaps[len(gaps) // 2],
                     "between_worst_ms": gaps[-1]})  # fmt: skip

    began_s, at_s = time.monotonic(), 0.0
    while (at_s := at_s + chance.expovariate(A_SECOND)) < seconds:
        name, prompt = f"lm-{chance.randrange(FOUR)}", _prompt(size, 32, chance.randrange(1 << 30))
        threading.Event().wait(max(0.0, began_s + at_s - time.monotonic()))
        threads.append(threading.Thread(target=ask, args=(name, prompt)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return rows
