"""Stage: 2,000 cold switches; device bytes, descriptors and answers are the same behind them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from .gpu_common import MIB, is_fake, now_ms, package, percentiles, put, require_gpu
from .gpu_common import rung_environment as rungs

SWITCHES = 2000
SETTLE = 60  # before the first look: every worker has captured, caches have their size
ALLOWED_BYTES = 2 * MIB  # the driver's own bookkeeping, not ours


def main() -> None:
    require_gpu()
    from pipeswitch.testing import server

    model: tuple[str, dict[str, tuple[tuple[int, ...], str]], int]
    model = ("benchmarks.gpu_models:tiny", {"x": ((8, 64), "float32")}, 0)
    if not is_fake():
        model = ("torchvision:resnet18", {"x": ((1, 3, 224, 224), "float32")}, 48 * MIB)
    source, inputs, room_bytes = model
    shape = inputs["x"][0]
    payload = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    switches = 100 if is_fake() else SWITCHES
    with (
        server(
            arena=str(room_bytes + 4 * MIB), host_store="512MiB",
            devices=("cuda:0",), environment=rungs(),
        ) as running,
        running.client() as client,
    ):  # fmt: skip
        for number, name in enumerate(("a", "b")):
            client.register(name, source, weights=f"random:{number}", inputs=inputs)
        wrong = 0
        times: list[float] = []
        try:
            answers = {name: _ask(client, name, payload) for name in ("a", "b")}
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
            put(done=len(times), wrong_answers=wrong, server_log=running.log()[-6000:])
            raise
        leaked = before["free_bytes"] - after["free_bytes"]
        put(
            switches=switches, total_ms=percentiles(times), wrong_answers=wrong, before=before,
            after=after, leaked_device_bytes=leaked,
            is_clean=leaked <= ALLOWED_BYTES and not wrong and before["pids"] == after["pids"],
        )  # fmt: skip
        if wrong:
            put(server_log=running.log()[-4000:])


def _ask(client: Any, name: str, payload: Any) -> Any:
    result = client.infer(name, payload)
    if result.timing.resident:
        raise RuntimeError(f"{name} was resident: no switch")
    return next(iter(result.outputs.values()))


def _look(client: Any) -> dict[str, Any]:
    """Free device bytes as a fresh process sees them, and what each worker holds open."""
    from pipeswitch.devices.cuda.examine import examine

    device = examine(package(), 0)["device"]
    pids = sorted(row["pid"] for row in client.ps() if row.get("kind") == "worker")
    open_files = [len(os.listdir(Path("/proc", str(pid), "fd"))) for pid in pids]
    return {"free_bytes": device["free_bytes"], "pids": pids, "open_files": open_files}


if __name__ == "__main__":
    main()
