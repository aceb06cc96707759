"""``bench swap``: requests whose model does not fit beside the training job. The arms are in
README.md."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from pipeswitch.client.client import Client
from pipeswitch.testing import server

from .baselines import TRAIN_MODULE
from .models import MIB, BenchModel
from .serving import TRAIN_ENTRY, WAIT_S
from .setting import Setting, end, read_line, spawn
from .trials import Numbers, Run, now_ms, ratio

ROUNDS: Final = 5
REQUESTS: Final = 4  # requests of an arm in each round, of which the first is not recorded
LOAD_S: Final = 3.0
TRAINED_MIB: Final = 4  # of a slice, with Adam's state; the rest: frozen weights, and as much again
STEPS: Final = 5  # between two requests
EVICTS: Final = {"PIPESWITCH_SCHEDULER__MAX_SWAPPED": "0"}
SLACK: Final = 1.3
REQUEST_MS: Final = 10.0
STEP_MS: Final = 50.0
COPIES: Final = {
    "out_ms": "copy out",
    "in_ms": "copy in",
    "copy_ms": "model's copy",
    "link_ms": "slice at the speed of the model's copy",
}


class Case(NamedTuple):
    """Size of a slice, and a model that does not fit beside it in the arena."""

    slice_mib: int
    arena_mib: int
    model_mib: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.slice_mib} MiB"

    @property
    def model(self) -> BenchModel:
        source, inputs = f"benchmarks.factories:mlp_{self.model_mib}", ((1, self.width), "float32")
        return BenchModel("m", source, self.model_mib * MIB, {"x": inputs})


CASES: Final = (Case(128, 200, 144, 2048), Case(1024, 1600, 1152, 4096))


def run(bench: Run, models: Sequence[str]) -> None:
    """Measure each case; in each round, each arm has the machine for itself."""
    for case in CASES[:1] if bench.is_quick else CASES:
        with tempfile.TemporaryDirectory(prefix="pipeswitch-bench-") as folder:
            setting = Setting(case.model, Path(folder), bench.threads, bench.seed)
            setting.write_files()
            arms = _arms(case, setting)
            for number in range(bench.rounds(ROUNDS, 1)):
                for arm, measure in arms.items():
                    bench.say(f"{case.name}: {arm}, round {number}")
                    for index, numbers in enumerate(measure()):
                        if index:
                            bench.record(case.name, arm, number, numbers)
        _findings(bench, case.name)
    bench.notes.append(f"total_ms is the client's clock; the script loads for {LOAD_S:g} s")
    bench.notes.append("step_ms: from the answer to the end of a step that had not ended before")


def _arms(case: Case, setting: Setting) -> dict[str, Callable[[], Iterator[Numbers]]]:
    both = case.arena_mib + case.slice_mib

    def served(arena_mib: int, name: str, **environment: str) -> Callable[[], Iterator[Numbers]]:
        return lambda: _served(case, setting, arena_mib, setting.folder / name, environment)

    return {
        "swap": served(case.arena_mib, "swap"),
        "evict": served(case.arena_mib, "evict", **EVICTS),
        "stop-and-start": lambda: _stop_and_start(case, setting),
        "fits": served(both, "fits"),
    }


class Script:
    """The training script's arguments, and the steps that it reports."""

    def __init__(self, case: Case, setting: Setting) -> None:
        self._live = setting.folder / f"steps-{random.getrandbits(64):x}"
        frozen = str((case.slice_mib - TRAINED_MIB) // 2)
        self.args = ["--threads", str(setting.threads), "--batch", "16", "--width", "256"]
        self.args += ["--load-s", str(LOAD_S), "--frozen-mib", frozen, "--live", str(self._live)]

    def steps(self) -> list[tuple[int, float]]:
        """Return number and instant of each step's beginning."""
        with contextlib.suppress(FileNotFoundError):
            lines = self._live.read_text().splitlines(keepends=True)
            pairs = [line.split() for line in lines if line.endswith("\n")]
            return [(int(number), float(at_ms)) for number, at_ms in pairs]
        return []

    def wait(self, beyond: int, since_ms: float = 0.0) -> float:
        """Return the instant at which a later step than ``beyond`` began, after ``since_ms``."""
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            for number, at_ms in self.steps():
                if number > beyond and at_ms >= since_ms:
                    return at_ms
            time.sleep(0.01)
        raise RuntimeError(f"the job has not come to step {beyond + 1}")

    def last(self) -> int:
        return max((number for number, _ in self.steps()), default=0)


def _served(
    case: Case, setting: Setting, arena_mib: int, state: Path, environment: dict[str, str]
) -> Iterator[Numbers]:
    """Start a server and a job; measure requests. The model is kept for the next round."""
    store_mib = case.model.room_bytes // MIB + 4 * case.slice_mib
    with (
        server(
            arena=f"{arena_mib}MiB",
            host_store=f"{store_mib}MiB",
            state_dir=state,
            args=("--threads", str(setting.threads)),
            environment=environment,
        ) as running,
        running.client() as client,
    ):
        model, script = case.model, Script(case, setting)
        if not client.models():
            weights = f"random:{setting.seed}"
            client.register("m", model.source, weights=weights, inputs=model.inputs)
        (inputs,) = setting.arrays()
        task = client.train(TRAIN_ENTRY, name=f"j{now_ms():.0f}", args=script.args)
        for _ in range(REQUESTS):
            script.wait(script.last() + STEPS)
            time.sleep(random.uniform(0.0, 0.05))  # so that requests arrive anywhere in a step
            began_ms = now_ms()
            timing = client.infer("m", inputs).timing
            answered_ms = now_ms()
            before = max(number for number, at_ms in script.steps() if at_ms <= answered_ms)
            step_ms = script.wait(before, answered_ms) - answered_ms
            row = task.status()
            bill = {key: getattr(timing, key) for key in ("queue_ms", "copy_ms", "compute_ms")}
            counts = {key: row[key] for key in ("swaps", "evictions", "steps_recomputed")}
            times = {"total_ms": answered_ms - began_ms, "step_ms": step_ms}
            yield times | bill | counts | _copies(client, answered_ms - began_ms + step_ms)
        task.cancel()


def _copies(client: Client, last_ms: float) -> Numbers:
    """Return the durations of the slice's last copies at the daemon, and of one at the rate at
    which the model's groups were copied."""
    events: list[dict[str, Any]] = client.trace(last_ms / 1000 + 0.05)["traceEvents"]
    spans = [one for one in events if one["ph"] == "X" and "bytes" in one["args"]]
    copies = {way: one for one in spans if (way := one["name"].rpartition(" ")[2]) in ("out", "in")}
    groups = [one for one in spans if one not in copies.values()]
    if not copies or not groups:
        return {}
    bytes_per_ms = sum(g["args"]["bytes"] for g in groups) / sum(g["dur"] / 1000 for g in groups)
    link_ms = copies["out"]["args"]["bytes"] / bytes_per_ms
    return {f"{way}_ms": one["dur"] / 1000 for way, one in copies.items()} | {"link_ms": link_ms}


def _stop_and_start(case: Case, setting: Setting) -> Iterator[Numbers]:
    """Kill the process that trains, run the model in a new process, and start the script again."""

    def start() -> tuple[Script, subprocess.Popen[bytes]]:
        script = Script(case, setting)
        return script, subprocess.Popen([sys.executable, "-P", "-m", TRAIN_MODULE, *script.args])

    script, training = start()
    try:
        for _ in range(REQUESTS):
            script.wait(STEPS)
            began_ms = now_ms()
            training.kill()
            training.wait()
            child = spawn("once", setting.order())
            read_line(child)
            answered_ms = now_ms()
            end(child)
            script, training = start()
            step_ms = script.wait(0) - answered_ms
            yield {"total_ms": answered_ms - began_ms, "step_ms": step_ms}
    finally:
        training.kill()
        training.wait()


def _findings(bench: Run, case: str) -> None:
    def p50(arm: str, key: str) -> float:
        return bench.p50(case, arm, key)

    for arm in ("swap", "evict", "stop-and-start", "fits"):
        for key, share in (("total_ms", 0.5), ("total_ms", 0.9), ("step_ms", 0.5)):
            what = {"total_ms": "request", "step_ms": "next step"}[key]
            name = f"{case}: {arm}, {what}, p{share * 100:.0f}"
            bench.find(name, bench.p50(case, arm, key, share), "ms")
    for key, what in COPIES.items():
        bench.find(f"{case}: {what}, p50", p50("swap", key), "ms")
    request_ms, step_ms = p50("swap", "total_ms"), p50("swap", "step_ms")
    for out, back, how in (
        ("out_ms", "in_ms", ""),
        ("link_ms", "link_ms", ", at the link's speed"),
    ):
        copies_ms = SLACK * (p50("swap", out) + p50("swap", "copy_ms"))
        used = ratio(request_ms, p50("fits", "total_ms") + copies_ms + REQUEST_MS)
        bench.find(f"{case}: request / (ready + 1.3 copies + 10 ms){how}", used, at_most=1.0)
        used = ratio(step_ms, SLACK * p50("swap", back) + STEP_MS)
        bench.find(f"{case}: next step / (1.3 copy in + 50 ms){how}", used, at_most=1.0)
    for key, what in (("total_ms", "request"), ("step_ms", "next step")):
        for arm in ("evict", "stop-and-start"):
            bench.find(f"{case}: {what}, {arm} / swap", ratio(p50(arm, key), p50("swap", key)))
    again = sum(bench.values(case, "swap", "steps_recomputed"))
    bench.find(f"{case}: steps computed again by swaps", again, at_most=0.0)
