"""Two trainings on one device: one after the other, in turns, and phase by phase (cpu device).

    python -m benchmarks.coshift [ROUNDS]

Layers wait where others compute, so that neighbours on the machine change little. ``loader``: each
job's loader takes as long as its step. ``copies``: activations leave over a slow link, and both
jobs together may hold ``BUDGET`` (where one at a time is in its step, that one). ``mixed``: one of
these beside one that only computes. One JSON line for each run: the makespan, from the first step
of the first job to the last one of the last; ``peak``: the most that both held at once, looked at
whenever one came to hold more. ``serial`` is the sum of both, each run alone.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from pipeswitch.testing import server

BUDGET = 6 << 20
CASES: dict[str, list[tuple[str, ...]]] = {  # steps, layers, KiB, ms of a layer, of the loader
    "loader": [("60", "5", "4", "2", "30")] * 2,
    "copies": [("40", "10", "1024", "2", "0")] * 2,
    "mixed": [("40", "10", "1024", "2", "0"), ("100", "5", "4", "2", "0")],
}
ORDERS = ("rotate", "coshift")


def run(case: str, order: str, jobs: list[tuple[str, ...]]) -> dict[str, Any]:
    environment = {"PIPESWITCH_SCHEDULER__TRAINING": order, "PIPESWITCH_DEVICE__LINK_GBPS": "0.1"}
    if case != "loader":
        environment["PIPESWITCH_SCHEDULER__ACTIVATION_MEMORY"] = str(BUDGET)
    os.environ |= environment
    script = Path(__file__).with_name("coshift_script.py")
    with (
        tempfile.TemporaryDirectory(prefix="pipeswitch-bench-") as folder,
        server(arena="64MiB") as running,
        running.client() as client,
    ):
        tasks = [
            client.train(
                str(script),
                name=f"j{n}",
                args=[f"{folder}/{n}", *args],
                activation_memory=BUDGET if case != "loader" else None,
            )
            for n, args in enumerate(jobs)
        ]
        for task in tasks:
            task.wait()
        found = [json.loads(Path(folder, str(n)).read_text()) for n in range(len(jobs))]
        rows = [task.status() for task in tasks]
    for name in environment:
        del os.environ[name]
    spans = [one["span"] for one in found]
    shown = [row.get("activations", {}) for row in rows]
    return {
        "case": case, "order": order, "jobs": len(jobs),
        "makespan_s": round(max(end for _, end in spans) - min(begin for begin, _ in spans), 3),
        "suspensions": [row["suspensions"] for row in rows],
        "states": [one["state"][:12] for one in found],
        "step_ms": [one.get("step_ms") for one in shown],
        "waited_ms": [one.get("waited_ms") for one in shown],
        "moved": [one.get("offloaded_bytes") for one in shown],
        "peak": max((one.get("device_peak_bytes") or 0 for one in shown), default=0),
        "budget": BUDGET if case != "loader" else None,
    }  # fmt: skip


def main(rounds: int = 3) -> None:
    for case, jobs in CASES.items():
        took: dict[str, list[float]] = {"serial": [], **{order: [] for order in ORDERS}}
        for _ in range(rounds):
            alone = [run(case, "rotate", [one]) for one in jobs]
            took["serial"].append(sum(one["makespan_s"] for one in alone))
            beside = {order: run(case, order, jobs) for order in ORDERS}
            for one in (*alone, *beside.values()):
                print(json.dumps(one), flush=True)
            for order, one in beside.items():
                took[order].append(one["makespan_s"])
                assert one["states"] == [other["states"][0] for other in alone], "other weights"
                assert one["budget"] is None or one["peak"] <= one["budget"]
        print(json.dumps({"case": case, **{
            order: {"makespan_s": median(all_s), "of_serial": round(median(
                own / serial for own, serial in zip(all_s, took["serial"], strict=True)), 3)}
            for order, all_s in took.items()
        }}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
