"""The papers' claims, figure by figure, with our newest numbers, for the page ``docs/papers.md``.

``python -m benchmarks.readme`` writes the page, and a test fails if the page is stale. The claims
are in our own words. This module decides from the newest results if a claim holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .trials import table

Results = Mapping[str, tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Number:
    """Name of one of our findings, with bounds: the claim holds if the value is within bounds."""

    finding: str
    label: str
    low: float = -math.inf
    high: float = math.inf
    above: str = ""  # name of another finding whose value is a lower bound

    def holds(self, values: Mapping[str, float]) -> bool | None:
        """Return True if the value is within the bounds; None without a value or without bounds."""
        value = values.get(self.finding)
        if value is None or (self.low, self.high, self.above) == (-math.inf, math.inf, ""):
            return None
        return max(self.low, values.get(self.above, -math.inf)) <= value <= self.high


@dataclass(frozen=True)
class Claim:
    """Claim of one figure or table, with our numbers, and how our measurement differs."""

    figure: str
    claim: str
    differs: str  # how our measurement differs; without a number, why there is none
    benchmark: str = ""
    numbers: Sequence[Number] = ()

    @property
    def command(self) -> str:
        known = {"simulated": "python -m benchmarks.thesis", "": ""}
        return known.get(self.benchmark, f"python -m benchmarks {self.benchmark}")


CPU: Final = "Two CPU cores, where a copy takes from the computing"

PIPESWITCH: Final = (
    Claim(
        "Figure 5",
        "A request that preempts training takes little longer than on a model that is "
        "always loaded; stopping and starting a process takes seconds.",
        f"{CPU}; no MPS arm, which is a GPU's. Stop-and-start has no CUDA context to make here.",
        "switch",
        (
            Number("resnet152: cold / ready, p50", "switched in / always loaded", high=1.15),
            Number("mlp: cold / ready, p50", "the same, mlp", high=1.15),
            Number(
                "resnet152: pipeswitch-style overhead / ours, p50 of pairs",
                "overhead of PipeSwitch as published / ours",
            ),
            Number("mlp: pipeswitch-style overhead / ours, p50 of pairs", "the same, mlp"),
            Number(
                "resnet152: stop-and-start overhead / ours",
                "overhead of stop-and-start / ours",
                low=10,
            ),
        ),
    ),
    Claim(
        "Figure 6",
        "Throughput stays near that of one model, however often models are switched.",
        f"{CPU}; one model of the three, and intervals down to 0.1 s.",
        "throughput",
        (
            Number("resnet152, 1 s: cold / ready, p50", "of the throughput, every 1 s", low=0.95),
            Number("resnet152, 10 s: cold / ready, p50", "every 10 s", low=0.95),
            Number(
                "resnet152, 10 s: stop-and-start / ready, p50",
                "stop-and-start, every 10 s",
                high=0.95,
            ),
        ),
    ),
    Claim(
        "Figure 7",
        "Pipelined groups of layers beat a copy of the whole model before computing, "
        "and planned groups are no worse than one for each layer.",
        "A link of a modelled speed on the cpu device; the bound M* is of the run's own layers.",
        "pipeline",
        (
            Number("mlp, link:compute 1: no-pipeline / M*, p50", "no pipeline / bound", low=1.2),
            Number("mlp, link:compute 1: planned / M*, p50", "planned / bound", high=1.15),
            Number(
                "mlp, link:compute 1: planned / best other, minimums",
                "planned / best other way",
                high=1.05,
            ),
        ),
    ),
    Claim(
        "Figure 8",
        "One owner of the memory, and handles that are sent once, save time at each switch.",
        "Memory of the host: pages that are not mapped stand for memory that is not pinned.",
        "memory",
        (
            Number(
                "resnet152: without-arena, more than ours, p50 of pairs",
                "more without the arena, ms",
                low=0,
            ),
            Number(
                "resnet152: without-ipc-reuse, more than ours, p50 of pairs",
                "more with new handles, ms",
                low=0,
            ),
            Number(
                "resnet152: store-pages-unmapped, more than ours, p50 of pairs",
                "more with unmapped pages, ms",
                low=0,
            ),
        ),
    ),
    Claim(
        "Figure 9",
        "A standby worker makes the switch faster than one process that cleans up "
        "first, and much faster than two processes of which one starts.",
        "Without a CUDA context one process has next to nothing to clean up, so it is as fast.",
        "workers",
        (
            Number(
                "resnet152: cold, more than ready, p50 of pairs", "standby, more than ready, ms"
            ),
            Number(
                "resnet152: two-processes, more than ready, p50 of pairs",
                "two processes, ms",
                above="resnet152: cold, more than ready, p50 of pairs",
            ),
            Number(
                "resnet152: one-process, more than ready, p50 of pairs",
                "one process, ms",
                above="resnet152: cold, more than ready, p50 of pairs",
            ),
        ),
    ),
)
SWITCHFLOW: Final = (
    Claim(
        "Figure 3",
        "Kernels of two models hardly run at the same time on one GPU.",
        "it is a trace of a GPU's kernels, and this has run on none",
    ),
    Claim(
        "Figure 6",
        "Inference beside training has up to ten times less tail latency than where "
        "both share the device.",
        "Threads that share two cores stand for a shared GPU.",
        "interference",
        (
            Number("resnet18: threads / pipeswitch, p99", "p99, shared / ours", low=10),
            Number("resnet18: threads / pipeswitch, p95", "p95, shared / ours", low=1),
            Number(
                "resnet18: session-slicing / pipeswitch, p99", "p99, whole sessions / ours", low=1
            ),
        ),
    ),
    Claim(
        "Figure 7",
        "A preempted job continues at once on another device, and the request "
        "does not pay for that.",
        "Devices are parts of one host. Our job moves through the host's memory.",
        "devices",
        (
            Number(
                "requests stay: steps a second, the job moves / waits",
                "steps, moves / waits",
                low=1,
            ),
            Number(
                "requests stay: a request, the job moves / waits",
                "request, moves / waits",
                high=1.05,
            ),
        ),
    ),
    Claim(
        "Figures 8 to 10",
        "Several jobs that train on one stream of input do more together than "
        "with an input each: two, three, and of mixed models.",
        "Images a second of all jobs, not of one; decoding and training share two cores.",
        "shared-input",
        (
            Number("2 equal jobs: images a second, shared / own", "2 equal jobs", low=1),
            Number("3 equal jobs: images a second, shared / own", "3 equal jobs", low=1),
            Number("3 mixed jobs: images a second, shared / own", "3 mixed jobs", low=1),
        ),
    ),
    Claim(
        "Table 1",
        "The state of a model moves in a time that its size explains, of few or of many tensors.",
        "From store to arena in the host, not from GPU to GPU: compare the ratios.",
        "state",
        (
            Number("resnet50: packed / plain copy, p50", "resnet50, ours / one copy", high=1.25),
            Number("densenet169: packed / plain copy, p50", "densenet169, the same", high=1.25),
            Number("resnet50: per-tensor / packed, p50", "resnet50, by tensor / ours", low=1),
        ),
    ),
)
THESIS: Final = (
    Claim(
        "The example",
        "Four jobs take 2375 ms one after the other, 2062.5 ms if the next one "
        "loads while one computes, and 2005 ms in alternating order.",
        "Computed, not measured.",
        "simulated",
        (
            Number("serial", "one after the other, ms", 2375, 2375),
            Number("prefetch, fifo", "with prefetch, ms", 2062.5, 2062.5),
            Number("prefetch, alternating", "alternating, ms", 2005, 2005),
        ),
    ),
)
SOURCES: Final = {
    "PipeSwitch": (
        "Zhihao Bai, Zhen Zhang, Yibo Zhu, Xin Jin: *PipeSwitch: Fast Pipelined Context Switching "
        "for Deep Learning Applications*. 14th USENIX Symposium on Operating Systems Design and "
        "Implementation (OSDI '20), pages 499 to 514, 2020. "
        "[usenix.org](https://www.usenix.org/conference/osdi20/presentation/bai)",
        PIPESWITCH,
    ),
    "SwitchFlow": (
        "Xiaofeng Wu, Jia Rao, Wei Chen, Hang Huang, Chris Ding, Heng Huang: *SwitchFlow: "
        "Preemptive Multitasking for Deep Learning*. 22nd International Middleware Conference "
        "(Middleware '21), 2021. [hdl.handle.net](http://hdl.handle.net/10106/31596)",
        SWITCHFLOW,
    ),
    "The thesis": (
        "A thesis on the order in which a window of models is loaded and computed. This project "
        "has its worked example, and not its author and title. "
        "[What it became](scheduling.md#the-thesis-window).",
        THESIS,
    ),
}


def page(results: Results) -> list[str]:
    """Return the paragraphs of ``docs/papers.md``."""
    parts = []
    for name, (citation, claims) in SOURCES.items():
        rows = [_row(claim, results) for claim in claims]
        head = "figure | claim | ours | our numbers | holds | what differs"
        parts.append("\n".join([f"## {name}", "", citation, "", *table(head, rows)]))
    return parts


def _row(claim: Claim, results: Results) -> list[str]:
    if not claim.benchmark:
        return [claim.figure, claim.claim, "", f"no number, because {claim.differs}", "", ""]
    if claim.benchmark == "simulated":
        from .thesis import example

        source, quick = "", False
        values = {str(row["way"]): float(row["total_ms"]) for row in example()}
    else:
        if claim.benchmark not in results:
            why = "no number, because no result of this benchmark is kept"
            return [claim.figure, claim.claim, f"`{claim.command}`", why, "", claim.differs]
        file, document = results[claim.benchmark]
        source, quick = f" ([{file}](../benchmarks/results/{file}))", document["is_quick"]
        values = {row["name"]: float(row["value"]) for row in document["findings"]}
    numbers = [
        f"{one.label}: {values[one.finding]:.5g}"
        if one.finding in values
        else f"{one.label}: not in the newest result"
        for one in claim.numbers
    ]
    verdicts = {one.label: one.holds(values) for one in claim.numbers}
    missed = [label for label, is_held in verdicts.items() if is_held is False]
    holds = "yes" if True in verdicts.values() else "not decided"
    if missed:
        holds = f"partly, not: {'; '.join(missed)}" if True in verdicts.values() else "**no**"
    shown = "; ".join(numbers) + (" (a quick run)" if quick else "") + source
    return [claim.figure, claim.claim, f"`{claim.command}`", shown, holds, claim.differs]
