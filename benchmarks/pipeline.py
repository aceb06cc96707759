"""``bench pipeline``: a cold switch against the optimal pipeline of the same run (PipeSwitch 4.2).

M* is the largest over i of the time to send layers 1…i plus the time to compute layers i…n: no
schedule that sends in order and computes in order can be faster. Both times are those of the very
switch that is judged. The copy engine's speed is judged against a plain copy of the same bytes,
alone and beside the same computation.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np

from pipeswitch.client.client import Client
from pipeswitch.planning.fit import quantile

from .models import MLP_WIDTH, MODELS, BenchModel, mlp
from .plans import QUIET, compare_plans
from .serving import TWINS, ask, serving
from .trials import Arm, Numbers, Run, now_ms, ratio

MLP_BYTES: Final = 12 * MLP_WIDTH * MLP_WIDTH * 4
CHUNK_BYTES: Final = 8 << 20  # as the copy engine's
RATIOS: Final = (0.5, 1.0, 2.0)  # transfer : compute
QUICK_RATIOS: Final = (1.0,)
ROUNDS: Final = 30
QUICK_ROUNDS: Final = 6
PROBE_ROUNDS: Final = 3
PROBE_BATCH: Final = 64
COMPUTE_OVER_MEMCPY: Final = 2.5  # a batch is chosen for at least 2
MAX_OVER_OPTIMUM: Final = 1.15
MIN_EFFICIENCY: Final = 0.90


def run(bench: Run, models: Sequence[str] = ()) -> None:
    """Choose the batch, measure the link, one server per ratio; then groupings (``plans``)."""
    copier = PlainCopy(MLP_BYTES)
    memcpy_ms = min(copier.measure()["transfer_ms"] for _ in range(2 * PROBE_ROUNDS))
    bench.say(f"plain copy of {MLP_BYTES / 1e6:.0f} MB: {memcpy_ms:.1f} ms")
    with serving(mlp(PROBE_BATCH), bench.threads, bench.seed) as (_running, client):
        probe_ms = _compute_ms(client, PROBE_BATCH)
    batch = max(8, round(PROBE_BATCH * COMPUTE_OVER_MEMCPY * memcpy_ms / probe_ms / 8) * 8)
    model = mlp(batch)
    bench.say(f"batch {batch}")
    with serving(model, bench.threads, bench.seed) as (_running, client):
        _compute_ms(client, batch)
        _link(bench, client, batch, copier)
    # Computing beside a copy is slower than alone: the ratio is set by what a switch will see.
    compute_ms = quantile(bench.values("link", "switch", "group_compute_ms"), 0.5)
    for share in QUICK_RATIOS if bench.is_quick else RATIOS:
        link_gbps = MLP_BYTES / (share * compute_ms) / 1e6
        with serving(model, bench.threads, bench.seed, link_gbps=link_gbps) as (_running, client):
            bench.say(f"transfer:compute {share:g}, link {link_gbps:.2f} GB/s")
            _one_ratio(bench, client, model, share)
    bench.notes.append(f"batch {batch}: compute {compute_ms:.1f} ms, plain copy {memcpy_ms:.1f} ms")
    bench.notes.append("makespan: dispatch to the end of the last group; no training runs")
    for each in [MODELS[name] for name in models] or [model]:
        compare_plans(bench, each)


def _payload(batch: int) -> Any:
    return np.ones((batch, MLP_WIDTH), dtype=np.float32)


def _compute_ms(client: Client, batch: int) -> float:
    """The computation alone: resident, warm, the best of some."""
    for name in TWINS:
        client.infer(name, _payload(batch))
    results = [client.infer(TWINS[1], _payload(batch)) for _ in range(PROBE_ROUNDS)]
    return min(result.timing.compute_ms for result in results)


class PlainCopy:
    """A copy of as many bytes between two mappings like the store's and the arena's."""

    def __init__(self, size_bytes: int) -> None:
        self._source, self._target = mapping(size_bytes), mapping(size_bytes)
        self._source[:] = 1
        self._target[:] = 0

    def measure(self) -> Numbers:
        """``transfer_ms``, and ``typical_transfer_ms`` as of a switch."""
        marks_ms = [now_ms()]
        for start in range(0, len(self._source), CHUNK_BYTES):
            end = start + CHUNK_BYTES
            np.copyto(self._target[start:end], self._source[start:end])
            marks_ms.append(now_ms())
        pieces = [b - a for a, b in pairwise(marks_ms)]
        return {"transfer_ms": sum(pieces), "typical_transfer_ms": typical(pieces)}


def mapping(size_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Zeros in a memfd; it has no page before the first write."""
    descriptor = os.memfd_create("bench", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes)
    mapped = mmap.mmap(descriptor, size_bytes)
    os.close(descriptor)
    return np.frombuffer(mapped, dtype=np.uint8)


class _Twins:
    """Each request is for the twin that is not on the device."""

    def __init__(self, client: Client, batch: int) -> None:
        self._client, self._batch, self._number = client, batch, 1  # twin-b may be there
        self._payload = _payload(batch)

    @property
    def here(self) -> str:
        """The one that is on the device."""
        return TWINS[self._number % 2]

    def switch(self) -> Numbers:
        self._number += 1
        name = self.here
        result, numbers = ask(self._client, name, self._payload, is_resident=False)
        return numbers | makespan(self._client.trace(5.0), result.request_id, name)


def makespan(trace: dict[str, Any], request_id: str, model: str) -> Numbers:
    """Group times of a cold request, its makespan and M*, from the server's timeline."""
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    task = next(s for s in spans if s["name"] == f"{request_id} {model}")
    switch = next(s for s in spans if s["name"] == f"switch {request_id} {model}")
    end = task["ts"] + task["dur"]
    groups = [
        s for s in spans
        if s["tid"] == task["tid"] and s["name"].startswith("group ")
        and task["ts"] <= s["ts"] < end
    ]  # fmt: skip
    copies = [
        s for s in spans
        if s["name"].startswith(f"{model} group ") and switch["ts"] <= s["ts"] < end
    ]  # fmt: skip
    if len(groups) != len(copies):
        raise RuntimeError(f"{len(copies)} groups were copied, {len(groups)} computed")
    computes = [s["dur"] / 1000 for s in groups]
    # The copy thread may lose its core between raising a word and reading the clock; a group
    # that computes has arrived, whatever the clock said.
    arrivals = [
        min(copy["ts"] + copy["dur"], group["ts"])
        for copy, group in zip(copies, groups, strict=True)
    ]
    begins = [copies[0]["ts"], *arrivals]
    transfers = [(b - a) / 1000 for a, b in zip(begins, arrivals, strict=False)]
    return {
        "makespan_ms": (end - switch["ts"]) / 1000,
        "optimum_ms": optimal_makespan(transfers, computes),
        "transfer_ms": sum(transfers),
        "typical_transfer_ms": typical(s["dur"] / 1000 for s in copies),
        "group_compute_ms": sum(computes),
        "until_copy_ms": (copies[0]["ts"] - switch["ts"]) / 1000,
        "first_wake_ms": (groups[0]["ts"] - copies[0]["ts"] - copies[0]["dur"]) / 1000,
        "after_copy_ms": (end - copies[-1]["ts"] - copies[-1]["dur"]) / 1000,
    }


def typical(pieces_ms: Iterable[float]) -> float:
    """The whole, had every one of its equal pieces taken the median piece's time.

    On a machine with other work a thread loses its core for some milliseconds now and then;
    this is what the copy itself takes.
    """
    pieces = list(pieces_ms)
    return quantile(pieces, 0.5) * len(pieces)


def optimal_makespan(transfers_ms: Sequence[float], computes_ms: Sequence[float]) -> float:
    """M* = max over i of (sum of transfers 1…i + sum of computes i…n)."""
    sent = list(accumulate(transfers_ms))
    left = list(accumulate(reversed(computes_ms)))[::-1]
    return max(a + b for a, b in zip(sent, left, strict=True))


def _one_ratio(bench: Run, client: Client, model: BenchModel, share: float) -> None:
    """One twin stays as it was registered, the other is profiled: each switch is one of each."""
    case = f"{share:g}:1"
    (batch, _width), _dtype = model.inputs["x"]
    for name in TWINS:
        client.infer(name, _payload(batch))  # groups are made for the batch that is asked for
    client.profile(TWINS[1])
    twins = _Twins(client, batch)
    arms = [Arm("cold", twins.switch), Arm("cold-profiled", twins.switch)]
    bench.trial_loop(case, arms, bench.rounds(ROUNDS, QUICK_ROUNDS), warmup=2)
    for arm in arms:
        spans, optima, transfers, computes = (
            bench.values(case, arm.name, key)
            for key in ("makespan_ms", "optimum_ms", "transfer_ms", "group_compute_ms")
        )
        text = f"{case}, {arm.name}" if arm is not arms[0] else case
        over = [a / b for a, b in zip(spans, optima, strict=True)]
        bench.find(f"{text}: makespan / M*, p50", quantile(over, 0.5), at_most=MAX_OVER_OPTIMUM)
        bench.find(f"{text}: makespan / M*, minimum", min(over), at_most=MAX_OVER_OPTIMUM)
        actual = [a / b for a, b in zip(transfers, computes, strict=True)]
        bench.find(f"{text}: transfer / compute as measured, p50", quantile(actual, 0.5))
    grouped, planned = (bench.values(case, arm.name, "makespan_ms") for arm in arms)
    p50 = quantile(planned, 0.5) / quantile(grouped, 0.5)
    bench.find(f"{case}: profiled / by size, p50", p50, at_most=QUIET)
    bench.find(f"{case}: profiled / by size, minimums", min(planned) / min(grouped), at_most=QUIET)


def _link(bench: Run, client: Client, batch: int, copier: PlainCopy) -> None:
    """The copy of a switch beside the computation, and plain copies: alone, and beside it too."""
    twins = _Twins(client, batch)
    payload = _payload(batch)

    def beside_compute() -> Numbers:
        future = client.submit(twins.here, payload)
        time.sleep(0.003)  # the request is on its way; it computes for longer than the copy
        numbers = copier.measure()
        was_beside = not future.done()
        future.result()
        return numbers | {"was_beside": was_beside}

    arms = [
        Arm("switch", twins.switch),
        Arm("copy-beside-compute", beside_compute),
        Arm("copy-alone", copier.measure),
    ]
    bench.trial_loop("link", arms, bench.rounds(ROUNDS, QUICK_ROUNDS), warmup=4)
    for key, what in (("transfer_ms", "all"), ("typical_transfer_ms", "typical piece")):
        ours = bench.values("link", "switch", key)
        for arm, at_least in (("copy-beside-compute", MIN_EFFICIENCY), ("copy-alone", None)):
            plain = bench.values("link", arm, key)
            p50 = ratio(quantile(plain, 0.5), quantile(ours, 0.5))
            bench.find(f"link efficiency against {arm}, {what}, p50", p50, at_least=at_least)
            least = ratio(min(plain), min(ours))
            bench.find(f"link efficiency against {arm}, {what}, minimums", least, at_least=at_least)
    speed = MLP_BYTES / quantile(bench.values("link", "switch", "transfer_ms"), 0.5) / 1e6
    bench.find("link speed during a switch, p50", speed, "GB/s")


__all__ = ["makespan", "optimal_makespan", "run"]
