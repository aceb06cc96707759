"""``bench placing``: decisions of the cluster's placement, by how many nodes there are.

One core, 2,000 models with two holders each, requests for few of them often. After each decision
its node's load changes, as it does in a running cluster, which counts among the time.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Sequence
from typing import Final

from pipeswitch.cluster.placement import Node, Nodes

from .trials import Run

NODES: Final = (100, 1_000, 10_000)
MODELS: Final = 2_000
DECISIONS: Final = 20_000
QUICK_DECISIONS: Final = 2_000
FEWEST_A_SECOND: Final = 10_000
FREE_BYTES: Final = (0, 1 << 28, 1 << 30, 1 << 33, 1 << 34)
MODEL_BYTES: Final = (1 << 24, 1 << 26, 1 << 28, 1 << 30)


def run(bench: Run, _: Sequence[str] = ()) -> None:
    """Each number of nodes."""
    for count in NODES:
        case = f"{count} nodes"
        bench.say(f"{case}, {MODELS} models")
        rng = random.Random(bench.seed)
        tracemalloc.start()
        known = {f"n{n}": Node(f"n{n}", rng.choice(FREE_BYTES), 0.0, 0, 12e6) for n in range(count)}
        nodes = Nodes()
        for node in known.values():
            nodes.put(node)
        for model in range(MODELS):
            nodes.holders[f"m{model}"] |= set(rng.sample(list(known), 2))
        kept_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        decisions = bench.rounds(DECISIONS, QUICK_DECISIONS)
        seconds, kept = _decide(nodes, known, decisions, rng)
        numbers = {"decisions": decisions, "seconds": seconds, "bytes": kept_bytes, "kept": kept}
        bench.record(case, "choose", 0, numbers)
        bench.find(f"{case}: decisions a second", decisions / seconds, "1/s",
                   at_least=FEWEST_A_SECOND)  # fmt: skip
        bench.find(f"{case}: memory", kept_bytes / (1 << 20), "MiB")


def _decide(
    nodes: Nodes, known: dict[str, Node], decisions: int, rng: random.Random
) -> tuple[float, int]:
    """Seconds, and how often a model stayed though another node was earlier."""
    asked = [
        (f"m{min(MODELS - 1, int(rng.expovariate(0.005)))}", rng.choice(MODEL_BYTES))
        for _ in range(decisions)
    ]
    changes_ms = [rng.uniform(-10.0, 10.0) for _ in range(decisions)]
    serving: dict[str, str] = {}
    kept = 0
    began_s = time.perf_counter()
    for (model, size_bytes), change_ms in zip(asked, changes_ms, strict=True):
        found = nodes.choose(model, size_bytes, at=serving.get(model, ""))
        serving[model] = found.node
        kept += found.reason == "kept"
        node = known[found.node]
        node = node._replace(queue_ms=max(0.0, node.queue_ms + change_ms), waiting=1)
        known[found.node] = node
        nodes.put(node)
    return time.perf_counter() - began_s, kept
