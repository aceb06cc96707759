"""Stage: what being preemptible costs a job, and how fast it leaves the device for a request."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from .gpu_common import is_fake, percentiles, put, require_gpu, rung_environment

SCRIPT = "benchmarks.gpu_train_script"
ROUNDS = 2
REQUESTS = 40
EVENTS_S = 0.3  # after the last request, for the last event


def main() -> None:
    require_gpu()
    from pipeswitch.testing import server

    with (
        tempfile.TemporaryDirectory(prefix="pipeswitch-gpu-") as folder,
        server(
            arena="1GiB" if is_fake() else "4GiB", host_store="1GiB",
            devices=("cuda:0",), environment=rung_environment(),
        ) as running,
        running.client() as client,
    ):  # fmt: skip
        source = "benchmarks.factories:small_mlp"
        client.register("tiny", source, weights="random:0", inputs={"x": ((1, 64), "float32")})
        try:
            _tax(client, Path(folder))
            _preemption(client)
        except Exception:
            put(server_log=running.log()[-6000:])
            raise


def _words(record: Path | None, steps: int) -> list[str]:
    words = ["--steps", str(steps), *(["--small"] if is_fake() else [])]
    return words + (["--record", str(record)] if record is not None else [])


def _tax(client: Any, folder: Path) -> None:
    """Plain and as a job, in turns; commits as by default."""
    found: dict[str, list[float]] = {"plain": [], "job": []}
    steps = 40 if is_fake() else 80
    for number in range(ROUNDS):
        record = folder / f"plain-{number}.json"
        device = ["--device", "cpu" if is_fake() else "cuda"]
        subprocess.run(
            [sys.executable, "-m", SCRIPT, *_words(record, steps), *device], check=True, timeout=120
        )
        found["plain"].append(json.loads(record.read_text())["step_ms"])
        record = folder / f"job-{number}.json"
        task = client.train(f"{SCRIPT}:main", name=f"tax-{number}", args=_words(record, steps))
        task.wait()
        found["job"].append(json.loads(record.read_text())["step_ms"])
    tax = min(found["job"]) / min(found["plain"]) - 1
    put(training_step_ms=found, training_tax=round(tax, 4), target=0.01)


def _preemption(client: Any) -> None:
    """Requests at random moments of a job that goes on; the worker's own clock of each stop."""
    task = client.train(f"{SCRIPT}:main", name="endless", args=_words(None, 1_000_000))
    _until_it_trains(task)
    stops: list[float] = []
    is_over = threading.Event()
    records = client.events("job.suspended", timeout_s=EVENTS_S)

    def collect() -> None:
        nonlocal records
        while True:
            stops.extend(float(event["stop_ms"]) for event in records)
            if is_over.is_set():
                return
            records = client.events("job.suspended", timeout_s=EVENTS_S)

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    dice = random.Random(0)
    totals = []
    payload = np.ones((1, 64), np.float32)
    for _ in range(REQUESTS):
        time.sleep(dice.uniform(0.02, 0.12))
        began_s = time.monotonic()
        client.infer("tiny", payload)
        totals.append((time.monotonic() - began_s) * 1000)
    is_over.set()
    thread.join()
    task.cancel()
    if stops:
        put(preemption_stop_ms=percentiles(stops), requests=len(totals))
    put(preempting_request_ms=percentiles(totals))


def _until_it_trains(task: Any) -> None:
    ends_at_s = time.monotonic() + 60
    while task.status()["step"] < 20:
        row = task.status()
        if row["state"] in ("failed", "done", "cancelled") or time.monotonic() > ends_at_s:
            raise RuntimeError(f"the job does not train: {row}")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
