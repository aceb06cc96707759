"""Language models that are measured: sizes, folders, systems that serve them, and their speed."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeswitch.client.client import Client
from pipeswitch.testing import RunningServer, server

from .foreign import Foreign, arms_of, used_ms
from .models import MIB
from .setting import end, read_line, spawn
from .trials import Numbers, Run, now_ms

NEW: Final = 128  # number of new tokens of an answer
MANY: Final = 8
PROMPT: Final = 33
PROMPTS: Final = (32, 512)
Prompts = Sequence[Sequence[int]]
Asking = Callable[[int], tuple[list[int], float]]
"""Function that sends the prompt with this index; it returns all tokens, and the first one's ms."""


@dataclass(frozen=True)
class Size:
    """Size of a GPT-2 model: name, width, number of layers, vocabulary."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    context: int = 640

    def prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        """Return random prompts; equal seeds give equal prompts."""
        chance = random.Random(seed)
        return [chance.choices(range(self.vocabulary), k=length) for _ in range(count)]


SMALL: Final = Size("small", 256, 4, 1000)
MIDDLE: Final = Size("gpt2", 768, 12, 52_000)  # GPT-2's own size, 500 MB
SIZES: Final = (SMALL, MIDDLE)


@dataclass(frozen=True)
class Place:
    """Folder with models of one size, from which every system loads them."""

    bench: Run
    size: Size
    folder: Path
    count: int

    @property
    def folders(self) -> list[str]:
        return [str(self.folder / f"lm-{number}") for number in range(self.count)]

    @property
    def model_bytes(self) -> int:
        return Path(self.folders[0], "model.safetensors").stat().st_size


@contextlib.contextmanager
def placed(bench: Run, size: Size, count: int, *, has_letters: bool = False) -> Iterator[Place]:
    """Write the models; with ``has_letters``, also a tokenizer whose tokens are characters."""
    with tempfile.TemporaryDirectory(prefix="pipeswitch-bench-") as folder:
        place = Place(bench, size, Path(folder), count)
        order = vars(size) | {"folders": place.folders, "has_letters": has_letters}
        child = spawn("write", order, module="lm_child")
        try:
            read_line(child)
        finally:
            end(child)
        yield place


@contextlib.contextmanager
def served(
    place: Place, rooms: float = 1.0, *, http: bool = False, precision: str = "exact"
) -> Iterator[tuple[RunningServer, Client]]:
    """Start a server with all models of the folder, and with arena room for ``rooms`` of them."""
    more = 1.35 if precision == "fast" else 1.0  # a packed head beside the token table
    with (
        server(
            arena=str(int(rooms * 1.05 * more * place.model_bytes) + 8 * MIB),
            host_store=str(int(1.1 * more * place.count * place.model_bytes) + 64 * MIB),
            http=http,
            args=("--threads", str(place.bench.threads)),
        ) as running,
        running.client() as client,
    ):
        for number, folder in enumerate(place.folders):
            client.register(
                f"lm-{number}",
                f"hf:{folder}",
                weights="pretrained",
                generate=True,
                precision=precision,
            )
        yield running, client


@contextlib.contextmanager
def transformers_child(place: Place) -> Iterator[subprocess.Popen[str]]:
    """Start a process that answers requests, read as lines, with transformers' ``generate()``."""
    order = {"folders": place.folders[:1], "threads": place.bench.threads}
    child = spawn("serve", order, module="lm_child")
    try:
        yield child
    finally:
        end(child)


@dataclass
class Peer(Foreign):
    """A system that answers prompts. ``ask`` returns ``tokens``, ``took_ms`` and ``first_ms``."""

    root: int = 0  # id of the system's first process, if the benchmark never stops the system

    def ask(self, model: int, prompts: Prompts, new: int) -> Numbers:
        raise NotImplementedError

    def costing(self, model: int, prompts: Prompts, new: int) -> Numbers:
        """Call ``ask``; add ``cpu_ms``, the processor time of the system and of this process."""
        root = self.process.pid if self.process else self.root
        before_ms, own_s = used_ms(root), time.process_time()
        costs = self.ask(model, prompts, new)
        own_s = time.process_time() - own_s
        return costs | {"cpu_ms": used_ms(root) - before_ms + own_s * 1e3}


@dataclass
class OwnSocket(Peer):
    """Our server, asked by our own client over the owner's socket."""

    client: Client | None = None

    def ask(self, model: int, prompts: Prompts, new: int) -> Numbers:
        def ask(number: int) -> tuple[list[int], float]:
            assert self.client is not None
            prompt = [*prompts[number]]
            answer = self.client.generate(f"lm-{model}", prompt, max_new_tokens=new)
            tokens = [token.id for token in answer]
            return tokens, answer.first_token_ms

        return side_by_side(ask, len(prompts))


@dataclass
class Lines(Peer):
    """A process of ``peer_child.py`` or ``lm_child.py``, which gets requests as lines of JSON."""

    child: subprocess.Popen[str] | None = None

    def ask(self, model: int, prompts: Prompts, new: int) -> Numbers:
        assert self.child is not None
        assert self.child.stdin is not None
        order = {"model": model, "prompts": prompts, "ids": prompts, "new": new}
        self.child.stdin.write(json.dumps(order) + "\n")
        return read_line(self.child)


def side_by_side(ask: Asking, count: int) -> Numbers:
    """Send ``count`` prompts at once, each in its own thread."""
    with ThreadPoolExecutor(count) as pool:
        began_ms = now_ms()
        answers = [*pool.map(ask, range(count))]
        took_ms = now_ms() - began_ms
    tokens, firsts_ms = zip(*answers, strict=True)
    return {"tokens": [*tokens], "took_ms": took_ms, "first_ms": max(firsts_ms)}


def speed(bench: Run, size: Size, peers: Sequence[Peer], rounds: int) -> Iterator[str]:
    """Measure one prompt, and ``MANY`` prompts at once; yield the name of each measured case.

    The first peer's tokens are the reference. All peers get the same prompts in a round, and new
    prompts in each round, so that no peer can reuse an earlier result.
    """
    right = peers[0]
    for count in (1, MANY):
        case, facts, seeds = f"{size.name}, {count} at once", dict[str, Any](), itertools.count()
        bench.say(f"{case}: measuring")

        def prepare(peer: Peer, count: int = count, facts: Any = facts, seeds: Any = seeds) -> None:
            if peer is right:
                facts["prompts"] = size.prompts(count, PROMPT, count << 16 | next(seeds))

        def measure(peer: Peer, facts: Any = facts) -> Numbers:
            costs, tokens = peer.costing(0, facts["prompts"], NEW), len(facts["prompts"]) * NEW
            if peer is right:
                facts["tokens"] = costs["tokens"]
            return {
                "tokens_per_s": tokens / costs["took_ms"] * 1e3,
                "cpu_per_token_ms": costs["cpu_ms"] / tokens,
                **_agreement(costs["tokens"], facts["tokens"]),
            }

        bench.trial_loop(case, arms_of(peers, measure, prepare), rounds)
        yield case
    for one in peers[1:]:
        rows = [
            row
            for row in bench.trials
            if (row["arm"], "alike" in row) == (one.name, True)
            and row["case"].startswith(size.name)
        ]
        share = sum(row["alike"] for row in rows) / sum(row["answers"] for row in rows)
        bench.find(f"{size.name}: answers with all of generate()'s tokens, {one.name}", share)


def _agreement(actual: Prompts, right: Prompts) -> Numbers:
    """Return how many answers are right, and the fewest right tokens at an answer's start."""
    same = [
        next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
        for one, other in zip(actual, right, strict=True)
    ]
    return {
        "answers": len(right),
        "alike": sum(n == NEW for n in same),
        "same_from_start": min(same),
    }
