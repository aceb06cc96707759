"""Stage: one model's cold switch against resident, ready-eager, ready-graph, serial, to-device and
stop-and-start, in turns, at batch 8 and 1. Usage: ``gpu_switch.py MODEL``.

*cold*: the arena holds one of two twins (same structure, other weights), the request is for the
other. All arms start and end with tensors in host memory. Every answer is compared with
ready-eager's: a fast wrong answer ends the stage.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .gpu_common import (
    MIB,
    GpuModel,
    is_fake,
    models,
    now_ms,
    percentiles,
    put,
    require_gpu,
    rung_environment,
)

BATCHES = (8, 1)
ROUNDS = 25
WARM_UP_ROUNDS = 8  # every worker runs eagerly once, then captures
SEED = 0
TOLERANCE = 1e-4  # of the sum of all outputs, relative to that of their sizes: other kernels
TWINS = ("twin-a", "twin-b")
BASELINE_ARMS = ("ready-eager", "ready-graph", "serial", "to-device")


def main(name: str) -> None:
    require_gpu()
    known = models()
    model = next(iter(known.values())) if is_fake() else known[name]
    with tempfile.TemporaryDirectory(prefix="pipeswitch-gpu-") as folder:
        _measure(model, Path(folder))


def _measure(model: GpuModel, folder: Path) -> None:
    import numpy as np

    from pipeswitch.testing import server

    order: dict[str, Any] = {
        "source": model.source, "inputs": dict(model.inputs), "seed": SEED,
        "batches": list(BATCHES), "inputs_path": str(folder / "inputs.npz"),
        "weights_path": str(folder / "weights.safetensors"), "threads": 4,
    }  # fmt: skip
    inputs = _inputs(model)
    np.savez(order["inputs_path"], **inputs)
    began_ms = now_ms()
    arena = model.room_bytes + 4 * MIB
    environment = rung_environment() | {"PIPESWITCH_SERVER__MAX_MESSAGE": "256MiB"}
    with (
        _Baselines(order) as baselines,
        server(
            arena=str(arena), host_store=str(2 * model.room_bytes + 64 * MIB),
            devices=("cuda:0",), environment=environment,
        ) as running,
        running.client() as client,
    ):  # fmt: skip
        put(case=model.name, ready_line=running.ready_line)
        for number, twin in enumerate(TWINS):
            client.register(
                twin, model.source, weights=f"random:{SEED + number}", inputs=model.inputs or None
            )
        put(case=model.name, setup_s=round((now_ms() - began_ms) / 1000, 1))
        try:
            turns = itertools.cycle((0, 1))  # of the twins, over all batches
            for batch in BATCHES:
                _rounds(model, batch, client, baselines, inputs, turns)
            _stop_and_start(model, order, baselines)
        except Exception:
            put(case=model.name, server_log=running.log()[-6000:])
            raise
        captured = running.log().count("graphs=captured")
        refused = [line for line in running.log().splitlines() if "graphs=refused" in line]
        put(case=model.name, captures=captured, captures_refused=refused[:5])


def _inputs(model: GpuModel) -> dict[str, Any]:
    """One request's arrays at the largest batch, by input name."""
    from pipeswitch.programs.build.sources import example_specs, load_source
    from pipeswitch.programs.requests import random_inputs
    from pipeswitch.programs.spec import BuildSpec

    shapes = dict(model.inputs)
    if not shapes:  # the source's own; building it is the only way to ask
        spec = BuildSpec(name="bench", source=model.source, weights=f"random:{SEED}", inputs={})
        shapes = dict(load_source(spec).inputs)
    specs = example_specs(shapes)
    values = random_inputs(specs, {}, seed=SEED)
    return {spec.name: value for spec, value in zip(specs, values, strict=True)}


def _rounds(
    model: GpuModel,
    batch: int,
    client: Any,
    baselines: _Baselines,
    inputs: dict[str, Any],
    turns: Iterator[int],
) -> None:
    cut = {name: value[:batch] for name, value in inputs.items()}
    case = f"{model.name}/{batch}"
    times: dict[str, list[float]] = {}
    bills: dict[str, list[Any]] = {"cold": [], "resident": []}
    worst = 0.0
    for number in range(-WARM_UP_ROUNDS, ROUNDS):
        here = next(turns)
        results = {}
        for arm in ("cold", "resident"):
            began_ms = now_ms()
            result = client.infer(TWINS[here], cut)
            total_ms = now_ms() - began_ms
            if result.timing.resident != (arm == "resident"):
                raise RuntimeError(f"{case}: the {arm} request found resident={arm == 'cold'}")
            results[arm] = float(next(iter(result.outputs.values())).astype("float64").sum())
            if number >= 0:
                times.setdefault(arm, []).append(total_ms)
                bills[arm].append(result.timing)
        for arm in BASELINE_ARMS:
            if arm == "to-device" and number % 4:
                continue  # copying the module first is slow, and not what is timed
            answer = baselines.ask(arm, batch)
            if "error" in answer:
                if number == 0:
                    put(case=case, arm=arm, error=answer["error"])
                continue
            if here == 0:
                worst = max(worst, abs(results["cold"] - answer["checksum"]) / answer["scale"])
            if number >= 0:
                times.setdefault(arm, []).append(answer["total_ms"])
        if results["cold"] != results["resident"]:
            put(case=case, differs=f"cold {results['cold']!r}, resident {results['resident']!r}")
    for arm, values in times.items():
        put(case=case, arm=arm, total_ms=percentiles(values))
    for arm, timings in bills.items():
        parts = ("queue_ms", "switch_ms", "copy_ms", "stall_ms", "compute_ms")
        bill = {key: percentiles([getattr(t, key) for t in timings])["p50"] for key in parts}
        put(case=case, arm=arm, bill=bill)
    # Of the server's own clock: dispatch to the end of the last group, without network and SDK.
    served = [t.switch_ms + t.compute_ms for t in bills["cold"]]
    ready = percentiles(times["ready-eager"])["p50"]
    copy_ms = percentiles([t.copy_ms for t in bills["cold"]])["p50"]
    put(
        case=case, checksum_error=worst, is_correct=worst <= TOLERANCE,
        cold_over_ready=round(percentiles(served)["p50"] / ready, 3),
        client_cold_over_ready=round(percentiles(times["cold"])["p50"] / ready, 3),
        target=model.target if batch == BATCHES[0] else None,
        link_gb_s=round(model.room_bytes / 1e6 / max(copy_ms, 1e-3), 2),
    )  # fmt: skip
    if worst > TOLERANCE:
        raise RuntimeError(f"{case}: answers differ from plain PyTorch by {worst:.2g}")


def _stop_and_start(model: GpuModel, order: dict[str, Any], baselines: _Baselines) -> None:
    baselines.close()  # its memory is what the new process needs
    times = []
    for _ in range(1 if is_fake() else 2):
        began_ms = now_ms()
        child = _spawn("once", order)
        child.communicate(timeout=120)
        if child.returncode:
            raise RuntimeError(f"stop-and-start ended with status {child.returncode}")
        times.append(now_ms() - began_ms)
    put(case=f"{model.name}/{BATCHES[0]}", arm="stop-and-start", total_ms=percentiles(times))


def _spawn(verb: str, order: dict[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu_baselines", verb, json.dumps(order)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip


class _Baselines:
    """The process of ``gpu_baselines.py``."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._child = _spawn("answer", order)

    def __enter__(self) -> _Baselines:
        self._line()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, arm: str, batch: int) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{arm} {batch}\n")
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the baselines' process ended with status {self._child.wait()}")
        values: dict[str, Any] = json.loads(line)
        return values

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue


if __name__ == "__main__":
    main(sys.argv[1])
