"""Passes of a model three times as large as the arena, on the cpu device.

    python -m benchmarks.streamed [PASSES]

The link is set so that what a pass sends takes 0.5, 1 and 2 times as long as the pass computes. One
JSON line for each: the median pass and what was predicted (``planning.streaming.pass_ms``), both
over the longer one of link and compute, which no pass can beat. A pass is a request's time in the
server without its wait for the device. The same passes tell how long they computed, which beside a
copy at another speed is not what was aimed at.
"""

from __future__ import annotations

import json
import os
import statistics
import sys

import torch
from torch import nn

from pipeswitch.planning.costs import LayerCosts, LinkCost
from pipeswitch.planning.streaming import land, pass_ms
from pipeswitch.programs.layout import REGION_ALIGN_BYTES
from pipeswitch.testing import server
from pipeswitch.wire.bill import Bill

RATIOS = (0.5, 1.0, 2.0)  # link : compute
LAYERS, WIDTH, BATCH = 24, 1024, 192  # 4 MiB each
ARENA = "34MiB"  # 32 and the arrival words
WARM_UP, PROBES = 2, 4


Pass = tuple[list[Bill], list[int], int]


def run(count: int, link_gbps: float = 0.0) -> Pass:
    """So many passes; the sizes of the groups, and of the window that they stream through."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(LAYERS)]
    args = ["--threads", "1", *(["--link-gbps", f"{link_gbps:.6f}"] if link_gbps else [])]
    x = torch.randn(BATCH, WIDTH)
    with server(arena=ARENA, args=tuple(args)) as running, running.client() as client:
        client.register("large", nn.Sequential(*layers).eval(), example_inputs=(x,))
        bills = [client.infer("large", x).timing for _ in range(WARM_UP + count)]
        sizes = next(row["group_bytes"] for row in client.ps() if row["name"] == "large")
        return bills[WARM_UP:], sizes, client.show("large")["streams"]["window_bytes"]


def predicted_ms(sizes: list[int], window_bytes: int, compute_ms: float, link: LinkCost) -> float:
    landings = land(sizes, range(len(sizes)), window_bytes, REGION_ALIGN_BYTES)
    assert landings is not None
    computes = tuple(compute_ms * size / sum(sizes) for size in sizes)
    return pass_ms(tuple(range(len(sizes))), LayerCosts(tuple(sizes), computes, link), landings)


def main(count: int = 12) -> None:
    probe = run(PROBES)[0]
    alone_ms = statistics.median(bill.compute_ms for bill in probe)
    for ratio in RATIOS:
        bytes_per_ms = probe[-1].streamed / (ratio * alone_ms)
        bills, sizes, window_bytes = run(count, bytes_per_ms / 1e6)
        compute_ms = statistics.median(bill.compute_ms for bill in bills)
        link_ms = bills[-1].streamed / bytes_per_ms
        longer_ms = max(link_ms, compute_ms)
        took_ms = statistics.median(bill.total_ms - bill.queue_ms for bill in bills)
        link = LinkCost(0.0, 1 / bytes_per_ms)
        predicted = predicted_ms(sizes, window_bytes, compute_ms, link)
        print(json.dumps({
            "ratio": ratio, "link_ms": round(link_ms, 1), "compute_ms": round(compute_ms, 1),
            "pass_ms": round(took_ms, 1), "predicted_ms": round(predicted, 1),
            "pass_over_longer": round(took_ms / longer_ms, 3),
            "predicted_over_longer": round(predicted / longer_ms, 3),
            "sent_bytes": bills[-1].streamed, "groups": len(sizes), "passes": len(bills),
            "load_1m": os.getloadavg()[0], "torch": torch.__version__,
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
