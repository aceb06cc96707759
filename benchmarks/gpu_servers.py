"""Stages with a server on the GPU, by their argument.

``switch`` measures one model at batch 8 and 1. The arms take turns: cold, resident, ready-eager,
ready-graph, serial and to-device. *cold*: the arena holds one of two twins (same
structure, different weights), and the request is for the other twin. All arms begin and end with
tensors in host memory. Answers are compared with ready-eager's: a wrong answer ends the stage.
``training``: how much slower a job is because it is preemptible, and how fast it leaves the device.
``generation``: tokens per second of a GPT-2, ours and transformers' ``generate()``.
``precision``: bytes, error and times of one model in each precision.
``soak``: 2,000 cold switches, each of which stops a job; afterwards device bytes, descriptors and
answers are unchanged.
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
from pathlib import Path
from typing import Any

import numpy as np

from . import gpu_common as gpu
from .baselines import TRAIN_MODULE
from .gpu_common import is_fake, now_ms, percentiles, put, served
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
HOLDS = "PIPESWITCH_DEVICE__HOLDS"
REQUESTS = 40
STOPS = 200
WARM_JOB_STEPS = 20  # steps of the job before the first request
SMALL = ("--width", "64", "--layers", "2", "--batch", "16")
SWITCHES = 2000
SLICE_ROOM_BYTES = 12 * MIB  # slice of the small job, and what the arena itself needs
SETTLE = 60  # switches before the first memory reading: workers capture graphs, caches fill
ALLOWED_BYTES = 2 * MIB  # growth that the driver's own bookkeeping may cause


def switch(name: str, words: str = "") -> None:
    """Measure a model; with ``words``, in a server that writes fences in this way."""
    known = gpu.models()
    model = next(iter(known.values())) if is_fake() else known[name]
    with tempfile.TemporaryDirectory(prefix="pipeswitch-gpu-") as folder:
        _switch(model, words, Path(folder))


def _switch(model: gpu.GpuModel, words: str, folder: Path) -> None:
    title = f"{model.name}, words={words}" if words else model.name
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
    environment = {"PIPESWITCH_SERVER__MAX_MESSAGE": "256MiB"}
    environment |= {"PIPESWITCH_DEVICE__WORDS": words} if words else {}
    with (
        contextlib.closing(_Baselines(order)) as baselines,
        served(str(arena), store, **environment) as (running, client),
    ):
        put(case=title, ready_line=running.ready_line)
        for number, twin in enumerate(TWINS):
            weights = f"random:{SEED + number}"
            row = client.register(twin, model.source, weights=weights, inputs=model.inputs)
        put(case=title, setup_s=round((now_ms() - began_ms) / 1000, 1))
        turns = itertools.cycle((0, 1))  # index of the twin that is requested in a round
        for batch in BATCHES:
            measured = _Measured(f"{title}/{batch}", row["bytes"])
            try:
                _rounds(measured, batch, client, baselines, inputs, turns)
            finally:
                measured.put(model.target if batch == BATCHES[0] else None)
        captured = running.log().count("graphs=captured")
        refused = [line for line in running.log().splitlines() if "graphs=refused" in line]
        put(case=title, captures=captured, captures_refused=refused[:5])


def _inputs(model: gpu.GpuModel) -> dict[str, Any]:
    """Return the arrays of one request at the largest batch, by input name."""
    from pipeswitch.programs.compiler.sources import example_specs
    from pipeswitch.programs.interface.synthetic_inputs import random_inputs

    specs = example_specs(dict(model.inputs))
    values = random_inputs(specs, {}, seed=SEED)
    return {spec.name: value for spec, value in zip(specs, values, strict=True)}


class _Measured:
    """Times of one model at one batch. The times are printed even if a round fails."""

    def __init__(self, case: str, size_bytes: int) -> None:
        self.case, self._size_bytes = case, size_bytes
        self.times_ms: dict[str, list[float]] = {}
        self.timings: dict[str, list[Any]] = {"cold": [], "resident": []}
        self.odd = 0  # requests that found the model where they should not
        self.worst = 0.0  # largest relative error of an answer

    def add(self, arm: str, total_ms: float, timing: Any = None) -> None:
        """Add a measured request; one whose model was elsewhere is only counted."""
        if timing is not None and timing.resident != (arm == "resident"):
            self.odd += 1
            return
        self.times_ms.setdefault(arm, []).append(total_ms)
        if timing is not None:
            self.timings[arm].append(timing)

    def put(self, target: float | None) -> None:
        """Print a row per arm, the parts of a request's time, and the ratios."""
        p50 = {arm: percentiles(values)["p50"] for arm, values in self.times_ms.items()}
        for arm, values in self.times_ms.items():
            put(case=self.case, arm=arm, total_ms=percentiles(values))
        parts = ("queue_ms", "switch_ms", "copy_ms", "stall_ms", "compute_ms")
        for arm, timings in self.timings.items():
            if timings:
                bill = {
                    key: percentiles([getattr(t, key) for t in timings])["p50"] for key in parts
                }
                put(case=self.case, arm=arm, bill=bill)
        put(case=self.case, checksum_error=self.worst, is_correct=self.worst <= TOLERANCE)
        put(case=self.case, requests_at_the_wrong_place=self.odd)
        colds = self.timings["cold"]
        if not colds or "ready-eager" not in p50:
            return
        # Times by the server's clock, from dispatch to the end of the last group, without network.
        served_ms = percentiles([t.switch_ms + t.stall_ms + t.compute_ms for t in colds])["p50"]
        copy_ms = percentiles([t.copy_ms for t in colds])["p50"]
        against = {arm: p50[arm] for arm in ("ready-eager", "ready-graph") if arm in p50}
        put(
            case=self.case,
            cold_over={arm: round(served_ms / ms, 3) for arm, ms in against.items()},
            client_cold_over={arm: round(p50["cold"] / ms, 3) for arm, ms in against.items()},
            target=target,
            link_gb_s=round(self._size_bytes / 1e6 / max(copy_ms, 1e-3), 2),
        )


def _rounds(
    measured: _Measured,
    batch: int,
    client: Any,
    baselines: _Baselines,
    inputs: dict[str, Any],
    turns: Iterator[int],
) -> None:
    cut = {name: value[:batch] for name, value in inputs.items()}
    case = measured.case
    for number in range(-WARM_UP_ROUNDS, SWITCH_ROUNDS):
        here = next(turns)
        results = {}
        client.ps()  # wakes the path, which has slept during the other arms
        for arm in ("cold", "resident"):
            began_ms = now_ms()
            result = client.infer(TWINS[here], cut)
            total_ms = now_ms() - began_ms
            results[arm] = float(next(iter(result.outputs.values())).astype("float64").sum())
            if number >= 0:  # before, workers still prepare models
                measured.add(arm, total_ms, result.timing)
        for arm in BASELINE_ARMS:
            if arm == "to-device" and number % 4:
                continue  # runs in every fourth round, because its untimed preparation is slow
            answer = baselines.ask(arm, batch)
            if "error" in answer:
                if number == 0:
                    put(case=case, arm=arm, error=answer["error"])
                continue
            if here == 0:
                error = abs(results["cold"] - answer["checksum"]) / answer["scale"]
                measured.worst = max(measured.worst, error)
            if number >= 0:
                measured.add(arm, answer["total_ms"])
        if results["cold"] != results["resident"]:
            put(case=case, differs=f"cold {results['cold']!r}, resident {results['resident']!r}")
    if measured.worst > TOLERANCE:
        raise RuntimeError(f"{case}: answers differ from plain PyTorch by {measured.worst:.2g}")


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


ARMS: dict[str, dict[str, dict[str, int]]] = {  # setting ``holds`` -> arm -> orders to its script
    "drain": {"limit 2": {"looks": 4, "ahead": 2}, "limit 8": {"looks": 4, "ahead": 8}},
    "stream": {f"{round(27 * 4 / looks)} marks": {"looks": looks} for looks in (4, 8, 16)},
}
BLOCK_STEPS = 20
BLOCKS = 8


def training() -> None:
    chosen = gpu.rung_environment().get(HOLDS, "drain")
    for holds in sorted({chosen, "drain"}, reverse=True):  # ``stream`` first
        arms = ARMS[holds]
        with (
            tempfile.TemporaryDirectory(prefix="pipeswitch-gpu-") as folder,
            served("1GiB" if is_fake() else "4GiB", "1GiB", **{HOLDS: holds}) as (
                _,
                client,
            ),
        ):
            source = "benchmarks.factories:small_mlp"
            client.register("tiny", source, weights="random:0", inputs={"x": ((1, 64), "float32")})
            _tax(client, Path(folder), holds, arms)
            _preemption(client, holds)


def _model() -> tuple[str, ...]:
    return SMALL if is_fake() else ("--resnet50",)


class _Blocks:
    """A training script that computes a block of steps when it is told to."""

    def __init__(self, folder: Path, start: Callable[[list[str]], Any]) -> None:
        folder.mkdir()
        for name in ("orders", "answers"):
            os.mkfifo(folder / name)
        self.process = start(["--turns", str(folder), *_model()])
        self._orders = open(folder / "orders", "w", buffering=1)  # noqa: SIM115 - see ``close``
        self._answers = open(folder / "answers")  # noqa: SIM115

    def run(self, **order: int) -> dict[str, list[float]]:
        """Compute a block; return the times of its steps, and the thread's CPU time and waits."""
        self._orders.write(json.dumps({"steps": BLOCK_STEPS, **order}) + "\n")
        answer: dict[str, list[float]] = json.loads(self._answers.readline())
        return answer

    def close(self) -> None:
        """Close the pipes, which ends the script; wait for it."""
        self._orders.close()
        self._answers.close()
        self.process.wait()


def _tax(client: Any, folder: Path, holds: str, arms: dict[str, dict[str, int]]) -> None:
    """Measure the script as a plain process and as a job with default commits, in turns."""
    device = ["--device", "cpu" if is_fake() else "cuda"]
    command = [sys.executable, "-m", TRAIN_MODULE, *device]

    def in_process(words: list[str]) -> Any:
        return subprocess.Popen([*command, *words])

    def as_job(words: list[str]) -> Any:
        return client.train(TRAIN_ENTRY, name="tax", args=words)

    rows: dict[str, list[dict[str, list[float]]]] = {arm: [] for arm in ("plain", *arms)}
    with (
        contextlib.closing(_Blocks(folder / "plain", in_process)) as plain,
        contextlib.closing(_Blocks(folder / "job", as_job)) as job,
    ):
        for number in range(-1, BLOCKS):
            for arm in rows:
                row = plain.run() if arm == "plain" else job.run(**arms[arm])
                rows[arm] += [row] if number >= 0 else []
        state = job.process.status()
    middle, mean = dict[str, float](), dict[str, float]()
    for arm, blocks in rows.items():
        gaps_ms = [gap for block in blocks for gap in block["gaps_ms"]]
        cpu_ms, waits, waited_ms = np.mean([b["cpu_waits_waited"] for b in blocks], 0) / BLOCK_STEPS
        middle[arm], mean[arm] = percentiles(gaps_ms)["p50"], float(np.mean(gaps_ms))
        put(
            case=f"training, holds={holds}",
            arm=arm,
            total_ms=percentiles(gaps_ms),
            per_step={"main_thread_cpu_ms": cpu_ms, "waits": waits, "waited_ms": waited_ms},
        )
    put(
        training_tax={arm: round(middle[arm] / middle["plain"] - 1, 4) for arm in arms},
        training_tax_of_means={arm: round(mean[arm] / mean["plain"] - 1, 4) for arm in arms},
        committed_step=state["committed_step"],
        target=0.01,
    )
    if holds == "drain" and not is_fake():
        record = folder / "gpu.json"
        words = ["--steps", "5", "--record", str(record), "--replay", *_model()]
        subprocess.run([*command, *words], check=True, timeout=120)
        put(gpu_step_ms=json.loads(record.read_text())["gpu_step_ms"])


def _preemption(client: Any, holds: str) -> None:
    """Send requests at random moments of a training job; time each stop by the worker's clock."""
    job = Training(client, 1, 0, _model(), "endless")
    job.run(WARM_JOB_STEPS)
    events = Suspensions(client)
    dice = random.Random(0)
    totals = []
    payload = np.ones((1, 64), np.float32)
    for _ in range(STOPS):
        time.sleep(dice.uniform(0.01, 0.06))
        began_ms = now_ms()
        client.infer("tiny", payload)
        totals.append(now_ms() - began_ms)
    stops = [float(event["stop_ms"]) for event in events.stop()]
    job.task.cancel()
    if stops:
        put(case=f"stops, holds={holds}", arm="worker's clock", total_ms=percentiles(stops))
    put(case=f"stops, holds={holds}", arm="request", total_ms=percentiles(totals))


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
            options: dict[str, Any] = {"inputs": model.inputs, "precision": form}
            row = client.register(form, model.source, weights="random:0", **options)
            bills = [client.infer(form, inputs) for _ in range(1 + REQUESTS)]
            output = next(iter(bills[-1].outputs.values())).astype("float64")
            exact = output if exact is None else exact
            alone = client.infer(form, {name: value[:1] for name, value in inputs.items()})
            put(
                case=model.name,
                precision=form,
                bytes=row["bytes"],
                notes=row["notes"],
                is_batch_invariant=np.array_equal(next(iter(alone.outputs.values())), output[:1]),
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
        for precision in ("fast", "bf16", "exact"):  # ``fast`` has not met a GPU
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
    payload = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    switches = 100 if is_fake() else SWITCHES
    # The arena holds the job's slice and one of the two models; each request stops the job.
    with served(str(room_bytes + SLICE_ROOM_BYTES)) as (running, client):
        job = Training(client, 1, 0, SMALL, "beside")
        job.run(WARM_JOB_STEPS)
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
        job.run()  # it still trains
        put(
            job=job.task.status(),
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
