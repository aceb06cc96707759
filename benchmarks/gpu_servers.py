"""Stages with a server on the GPU, by their argument.

``switch`` measures one model at batch 8 and 1. The arms take turns: cold, resident, ready-eager,
ready-graph, serial, to-device and stop-and-start. *cold*: the arena holds one of two twins (same
structure, different weights), and the request is for the other twin. All arms begin and end with
tensors in host memory. Answers are compared with ready-eager's: a wrong answer ends the stage.
``training``: how much slower a job is because it is preemptible, and how fast it leaves the device.
``generation``: tokens per second of a GPT-2, ours and transformers' ``generate()``.
``precision``: bytes, error and times of one model in each precision.
``soak``: 2,000 cold switches, after which device bytes, descriptors and answers are unchanged.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from . import gpu_common as gpu
from .baselines import TRAIN_MODULE
from .gpu_common import is_fake, now_ms, percentiles, put, rung_environment, served
from .models import MIB
from .serving import TRAIN_ENTRY, TWINS, Training
from .setting import end, read_line, spawn
from .training import Suspensions

BATCHES = (8, 1)
SWITCH_ROUNDS = 25
WARM_UP_ROUNDS = 8  # rounds in which every worker runs eagerly once, then captures graphs
SEED = 0
TOLERANCE = 1e-4  # allowed relative error of the outputs' sum, because kernels differ
BASELINE_ARMS = ("ready-eager", "ready-graph", "serial", "to-device")
TAX_ROUNDS = 2
HOLDS = "PIPESWITCH_DEVICE__HOLDS"
REQUESTS = 40
WARM_UP_STEPS = 15
WARM_JOB_STEPS = 20  # steps of the job before the first request
SMALL = ("--width", "64", "--layers", "2", "--batch", "16")
SWITCHES = 2000
SETTLE = 60  # switches before the first memory reading: workers capture graphs, caches fill
ALLOWED_BYTES = 2 * MIB  # growth that the driver's own bookkeeping may cause


def switch(name: str) -> None:
    known = gpu.models()
    model = next(iter(known.values())) if is_fake() else known[name]
    with tempfile.TemporaryDirectory(prefix="pipeswitch-gpu-") as folder:
        _switch(model, Path(folder))


def _switch(model: gpu.GpuModel, folder: Path) -> None:
    order: dict[str, Any] = {
        "source": model.source,
        "inputs": dict(model.inputs),
        "seed": SEED,
        "batches": list(BATCHES),
        "inputs_path": str(folder / "inputs.npz"),
        "weights_path": str(folder / "weights.safetensors"),
        "threads": 4,
    }
    inputs = _inputs(model)
    np.savez(order["inputs_path"], **inputs)
    began_ms = now_ms()
    arena = model.room_bytes + 4 * MIB
    store = str(2 * model.room_bytes + 64 * MIB)
    with (
        contextlib.closing(_Baselines(order)) as baselines,
        served(str(arena), store, PIPESWITCH_SERVER__MAX_MESSAGE="256MiB") as (running, client),
    ):
        put(case=model.name, ready_line=running.ready_line)
        for number, twin in enumerate(TWINS):
            client.register(
                twin, model.source, weights=f"random:{SEED + number}", inputs=model.inputs or None
            )
        put(case=model.name, setup_s=round((now_ms() - began_ms) / 1000, 1))
        turns = itertools.cycle((0, 1))  # index of the twin that is requested in a round
        for batch in BATCHES:
            _rounds(model, batch, client, baselines, inputs, turns)
        _stop_and_start(model, order, baselines)
        captured = running.log().count("graphs=captured")
        refused = [line for line in running.log().splitlines() if "graphs=refused" in line]
        put(case=model.name, captures=captured, captures_refused=refused[:5])


def _inputs(model: gpu.GpuModel) -> dict[str, Any]:
    """Return the arrays of one request at the largest batch, by input name."""
    from pipeswitch.programs.compiler.sources import example_specs, load_source
    from pipeswitch.programs.interface.synthetic_inputs import random_inputs
    from pipeswitch.programs.spec import BuildSpec

    shapes = dict(model.inputs)
    if not shapes:  # the inputs are known only after the source was built
        spec = BuildSpec(name="bench", source=model.source, weights=f"random:{SEED}", inputs={})
        shapes = dict(load_source(spec).inputs)
    specs = example_specs(shapes)
    values = random_inputs(specs, {}, seed=SEED)
    return {spec.name: value for spec, value in zip(specs, values, strict=True)}


def _rounds(
    model: gpu.GpuModel,
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
    for number in range(-WARM_UP_ROUNDS, SWITCH_ROUNDS):
        here = next(turns)
        results = {}
        for arm in ("cold", "resident"):
            began_ms = now_ms()
            result = client.infer(TWINS[here], cut)
            total_ms = now_ms() - began_ms
            # In warm-up rounds a request may find either state: workers still prepare models.
            if number >= 0 and result.timing.resident != (arm == "resident"):
                raise RuntimeError(f"{case}, round {number}: {arm} request: {result.timing}")
            results[arm] = float(next(iter(result.outputs.values())).astype("float64").sum())
            if number >= 0:
                times.setdefault(arm, []).append(total_ms)
                bills[arm].append(result.timing)
        for arm in BASELINE_ARMS:
            if arm == "to-device" and number % 4:
                continue  # runs in every fourth round, because its untimed preparation is slow
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
    # Times by the server's clock, from dispatch to the end of the last group, without the network.
    served = [t.switch_ms + t.compute_ms for t in bills["cold"]]
    ready = percentiles(times["ready-eager"])["p50"]
    copy_ms = percentiles([t.copy_ms for t in bills["cold"]])["p50"]
    put(
        case=case,
        checksum_error=worst,
        is_correct=worst <= TOLERANCE,
        cold_over_ready=round(percentiles(served)["p50"] / ready, 3),
        client_cold_over_ready=round(percentiles(times["cold"])["p50"] / ready, 3),
        target=model.target if batch == BATCHES[0] else None,
        link_gb_s=round(model.room_bytes / 1e6 / max(copy_ms, 1e-3), 2),
    )
    if worst > TOLERANCE:
        raise RuntimeError(f"{case}: answers differ from plain PyTorch by {worst:.2g}")


def _stop_and_start(model: gpu.GpuModel, order: dict[str, Any], baselines: _Baselines) -> None:
    baselines.close()  # the new process needs the memory of this one
    times = []
    began_ms = now_ms()
    child = spawn("once", order | {"device": "cpu" if is_fake() else "cuda"})
    child.communicate(timeout=120)
    if child.returncode:
        raise RuntimeError(f"stop-and-start ended with status {child.returncode}")
    times.append(now_ms() - began_ms)
    put(case=f"{model.name}/{BATCHES[0]}", arm="stop-and-start", total_ms=percentiles(times))


class _Baselines:
    """Client of a ``gpu_baselines.py`` process."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._child = spawn("answer", order, module="gpu_baselines")
        read_line(self._child)

    def ask(self, arm: str, batch: int) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{arm} {batch}\n")
        return read_line(self._child)

    def close(self) -> None:
        end(self._child)


# ---- training ----------------------------------------------------------------------------------


def training() -> None:
    chosen = rung_environment().get(HOLDS, "drain")
    for holds in sorted({chosen, "drain"}, reverse=True):  # ``stream`` first
        put(holds=holds)
        _training({HOLDS: holds})


def _training(environment: dict[str, str]) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="pipeswitch-gpu-") as folder,
        served("1GiB" if is_fake() else "4GiB", "1GiB", **environment) as (_, client),
    ):
        source = "benchmarks.factories:small_mlp"
        client.register("tiny", source, weights="random:0", inputs={"x": ((1, 64), "float32")})
        _tax(client, Path(folder))
        _preemption(client)


def _model() -> tuple[str, ...]:
    return SMALL if is_fake() else ("--resnet50",)


def _tax(client: Any, folder: Path) -> None:
    """Measure the training script in turns as a plain process and as a job with default commits.

    A step lasts until the next one begins. The final commit is not counted.
    """
    times_ms: dict[str, list[float]] = {"plain": [], "job": []}
    middle_ms: dict[str, list[float]] = {"plain": [], "job": []}
    cpu_ms: dict[str, list[float]] = {"plain": [], "job": []}
    waits: list[list[float]] = []  # how often, and for how many ms, a step waited for the limit
    gpu_ms: list[float] = []
    steps = 40 if is_fake() else 200
    device = ["--device", "cpu" if is_fake() else "cuda"]
    for number in range(TAX_ROUNDS):
        for arm in times_ms:
            record = folder / f"{arm}-{number}.json"
            words = ["--steps", str(steps), "--record", str(record), *_model()]
            words += ["--warm-up", str(WARM_UP_STEPS)]
            if arm == "job":
                client.train(TRAIN_ENTRY, name=f"tax-{number}", args=words).wait()
            else:
                words += [] if is_fake() else ["--replay"]
                command = [sys.executable, "-m", TRAIN_MODULE, *words, *device]
                subprocess.run(command, check=True, timeout=120)
            record_read = json.loads(record.read_text())
            began_ms = record_read["instants_ms"][WARM_UP_STEPS:]
            gaps_ms = sorted(after - before for before, after in pairwise(began_ms))
            times_ms[arm].append(sum(gaps_ms) / len(gaps_ms))
            middle_ms[arm].append(gaps_ms[len(gaps_ms) // 2])
            used_ms = record_read["cpu_ms"][-1] - record_read["cpu_ms"][WARM_UP_STEPS]
            cpu_ms[arm].append(used_ms / len(gaps_ms))
            if arm == "job":
                then, *_, now = record_read["waits"][WARM_UP_STEPS:]
                waits.append((np.subtract(now, then) / len(gaps_ms)).tolist())
            elif "gpu_step_ms" in record_read:
                gpu_ms.append(record_read["gpu_step_ms"])
    profile = folder / "profile"
    words = [*_model(), "--steps", str(steps), "--warm-up", str(WARM_UP_STEPS)]
    client.train(TRAIN_ENTRY, name="profiled", args=[*words, "--profile", str(profile)]).wait()
    put(job_profile=profile.read_text().splitlines())
    tax = min(times_ms["job"]) / min(times_ms["plain"]) - 1
    middle = min(middle_ms["job"]) / min(middle_ms["plain"]) - 1
    put(
        training_step_ms=times_ms,
        step_p50_ms=middle_ms,
        main_thread_cpu_ms=cpu_ms,
        waits_and_ms_per_step=waits,
        gpu_step_ms=gpu_ms,
        training_tax=round(tax, 4),
        training_tax_of_medians=round(middle, 4),
        target=0.01,
    )


def _preemption(client: Any) -> None:
    """Send requests at random moments of a training job; time each stop by the worker's clock."""
    job = Training(client, 1, 0, _model(), "endless")
    job.run(WARM_JOB_STEPS)
    events = Suspensions(client)
    dice = random.Random(0)
    totals = []
    payload = np.ones((1, 64), np.float32)
    for _ in range(REQUESTS):
        time.sleep(dice.uniform(0.02, 0.12))
        began_ms = now_ms()
        client.infer("tiny", payload)
        totals.append(now_ms() - began_ms)
    stops = [float(event["stop_ms"]) for event in events.stop()]
    job.task.cancel()
    if stops:
        put(preemption_stop_ms=percentiles(stops), requests=len(totals))
    put(preempting_request_ms=percentiles(totals))


# ---- precision ---------------------------------------------------------------------------------


def precision() -> None:
    """Register models in each precision; print bytes, error, and cold and resident times."""
    known = gpu.models()
    for name in known if is_fake() else ("resnet50", "bert-base"):
        _precision(known[name])


def _precision(model: gpu.GpuModel) -> None:
    inputs = _inputs(model)
    with served(str(model.room_bytes + 32 * MIB), "2GiB") as (_, client):
        exact: Any = None
        for form in ("exact", "fast", "bf16", "int8"):
            options: dict[str, Any] = {"inputs": model.inputs or None, "precision": form}
            row = client.register(form, model.source, weights="random:0", **options)
            bills = [client.infer(form, inputs) for _ in range(1 + REQUESTS)]
            output = next(iter(bills[-1].outputs.values())).astype("float64")
            exact = output if exact is None else exact
            put(
                case=model.name,
                precision=form,
                bytes=row["bytes"],
                notes=row["notes"],
                error=float(abs(output - exact).max() / abs(exact).max()),
                cold_copy_ms=bills[0].timing.copy_ms,
                compute_ms=percentiles([one.timing.compute_ms for one in bills[1:]]),
            )


# ---- generation --------------------------------------------------------------------------------


def generation() -> None:
    """Measure one stream and several at once; count the tokens that equal ``generate()``'s."""
    from . import lm

    size = lm.SMALL if is_fake() else lm.MIDDLE
    device, new = "cpu" if is_fake() else "cuda", lm.NEW
    prompts = size.prompts(lm.MANY, lm.PROMPT, SEED)
    with tempfile.TemporaryDirectory(prefix="pipeswitch-gpu-") as folder:
        order = vars(size) | {"folders": [f"{folder}/lm-0"], "has_letters": False}
        child = spawn("write", order, module="lm_child")
        read_line(child)
        end(child)
        order = {"folders": order["folders"], "threads": 4, "device": device}
        child = spawn("serve", order, module="lm_child")
        plain = lm.Lines("generate", child=child)
        right = {}
        for count in (1, 1, lm.MANY, lm.MANY):  # the first of each warms up
            right[count] = plain.ask(0, prompts[:count], new)
        for count, answer in right.items():
            rate = round(count * new / answer["took_ms"] * 1e3, 1)
            put(case=f"{size.name}, {count} at once", arm="generate", tokens_per_s=rate)
        end(child)
        for precision in ("exact", "fast", "bf16"):
            with served("64MiB" if is_fake() else "2GiB", "1GiB") as (_, client):
                _generate(client, size, f"hf:{folder}/lm-0", precision, prompts, right)


def _generate(
    client: Any, size: Any, source: str, precision: str, prompts: Any, right: dict[int, Any]
) -> None:
    from . import lm

    began_ms = now_ms()
    client.register("lm-0", source, weights="pretrained", generate=True, precision=precision)
    registered_s = round((now_ms() - began_ms) / 1000, 1)
    ours = lm.OwnSocket("served", client=client)
    for count in right:
        answers = [ours.ask(0, prompts[:count], lm.NEW) for _ in range(4)][1:]
        took_ms = min(answer["took_ms"] for answer in answers)
        alike = [
            sum(a == b for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in zip(answers[0]["tokens"], right[count]["tokens"], strict=True)
        ]
        put(
            case=f"{size.name}, {count} at once",
            arm=precision,
            tokens_per_s=round(count * lm.NEW / took_ms * 1e3, 1),
            first_token_ms=min(answer["first_ms"] for answer in answers),
            tokens_like_generate=alike,
            registered_s=registered_s,
        )


# ---- soak --------------------------------------------------------------------------------------


def soak() -> None:
    source, shape, room_bytes = "torchvision:resnet18", [1, 3, 224, 224], 48 * MIB
    if is_fake():
        source, shape, room_bytes = "benchmarks.factories:tiny", [8, 64], 0
    payload = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    switches = 100 if is_fake() else SWITCHES
    with served(str(room_bytes + 4 * MIB)) as (running, client):
        for number, name in enumerate("ab"):
            inputs = {"x": (tuple(shape), "float32")}
            client.register(name, source, weights=f"random:{number}", inputs=inputs)
        wrong = 0
        times: list[float] = []
        try:
            answers = {name: _ask(client, name, payload) for name in "ab"}
            for number in range(SETTLE):
                _ask(client, "ab"[number % 2], payload)
            before = _look(client)
            for number in range(switches):
                name = "ab"[number % 2]
                began_ms = now_ms()
                wrong += not np.array_equal(_ask(client, name, payload), answers[name])
                times.append(now_ms() - began_ms)
            after = _look(client)
        except Exception:
            put(done=len(times), wrong_answers=wrong)
            raise
        leaked = before["free_bytes"] - after["free_bytes"]
        put(
            switches=switches,
            total_ms=percentiles(times),
            wrong_answers=wrong,
            before=before,
            after=after,
            leaked_device_bytes=leaked,
            is_clean=leaked <= ALLOWED_BYTES and not wrong and before["pids"] == after["pids"],
        )
        if wrong:
            put(server_log=running.log()[-4000:])


def _ask(client: Any, name: str, payload: Any) -> Any:
    result = client.infer(name, payload)
    if result.timing.resident:
        raise RuntimeError(f"{name} was resident: no switch")
    return next(iter(result.outputs.values()))


def _look(client: Any) -> dict[str, Any]:
    """Return the device's free bytes, read in a new process, and the workers' open descriptors."""
    from pipeswitch.devices.cuda.examine import examine

    device = examine(gpu.package(), 0)["device"]
    pids = sorted(row["pid"] for row in client.ps() if row.get("kind") == "worker")
    open_files = [len(os.listdir(Path("/proc", str(pid), "fd"))) for pid in pids]
    return {"free_bytes": device["free_bytes"], "pids": pids, "open_files": open_files}


if __name__ == "__main__":
    gpu.require_gpu()
    stages: dict[str, Callable[..., None]] = {
        "switch": switch,
        "training": training,
        "generation": generation,
        "precision": precision,
        "soak": soak,
    }
    stages[sys.argv[1]](*sys.argv[2:])
