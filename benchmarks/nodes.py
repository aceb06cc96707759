"""``bench nodes``: what the simulator predicts for three nodes, beside three live ones.

The nodes are servers on this machine under a Ray of their own, each with a cpu device whose link is
slow: switching is what takes time, and the cores are not asked for more than they have. Twenty
towers, each on two nodes, are asked for by Zipf's law in Poisson's times, in an open loop. Then
``pipeswitch.cluster.simulated`` replays the very instants, with profiles of one server alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from pipeswitch.client.client import Client
from pipeswitch.cluster.simulated import Cluster, place
from pipeswitch.planning.fit import quantile
from pipeswitch.simulator.arrivals import poisson
from pipeswitch.simulator.costs import Costs
from pipeswitch.simulator.replay import Setting
from pipeswitch.testing import server

from .models import MIB
from .replay import (
    BATCH,
    MODELS,
    WIDTH,
    compared,
    measured,
    register_towers,
    same_ranks,
    sent_live,
)
from .trials import Run

POLICIES: Final = ("priority", "fifo", "collate")
NODES: Final = 3
ARENA_BYTES: Final = 48 * MIB  # of 280 for all models
ROOM_BYTES: Final = 2 * MIB  # for arrival words
LINK_GBPS: Final = 0.1
LOAD: Final = 0.3  # computing time over time, of all nodes together: they share two cores
SLO_MS: Final = 200.0  # beyond a request's computing: a large tower's copy takes 250
REQUESTS, QUICK_REQUESTS = 600, 200
ROUNDS: Final = 3
WITHIN: Final = 0.05  # shares in time
COMMAND: Final = (sys.executable, "-P", "-c", "from pipeswitch.cli.main import main; main()")
SERVE: Final = ("--device", "cpu", "--threads", "1", "--link-gbps", str(LINK_GBPS))


def run(bench: Run, _: Sequence[str] = ()) -> None:
    """Measure the towers on one server; then a cluster for each policy, one after the other."""
    if importlib.util.find_spec("ray") is None:
        bench.skip({"nodes": "no Ray: pip install 'pipeswitch[ray]'"})
        return
    x = np.full((BATCH, WIDTH), 0.01, np.float32)
    count = QUICK_REQUESTS if bench.is_quick else REQUESTS
    bench.say(f"measuring {MODELS} models")
    arena, store = str(ARENA_BYTES + ROOM_BYTES), str(600 * MIB)
    with (
        server(arena=arena, host_store=store, args=SERVE[2:]) as running,
        running.client() as client,
    ):
        register_towers(client)
        models, link = measured(client)
    rate = LOAD * 1e3 * MODELS / sum(model.compute_ms for model in models)
    with _environment() as folder:
        for policy in POLICIES:
            bench.say(f"{policy}: starting {NODES} nodes")
            flags = (*SERVE, "--arena", arena, "--host-store", store, "--policy", policy)
            with _cluster(folder / policy, flags), Client("cluster") as client:
                register_towers(client)
                for model in models:  # its program is in its node's workers
                    client.infer(model.name, {"x": x})
                for number in range(bench.rounds(ROUNDS, 1)):
                    asked = poisson(rate, count=count, model_count=MODELS, seed=bench.seed + number)
                    bench.say(
                        f"{policy}: {count} requests in {asked.arrivals[-1].at_ms / 1e3:.1f} s"
                    )
                    live = sent_live(client, models, asked.arrivals, {"x": x})
                    setting = Setting(memory_bytes=ARENA_BYTES, costs=Costs(to_device=link),
                                      policy=policy, slo_ms=SLO_MS)  # fmt: skip
                    placed = place(Cluster(nodes=NODES), setting, models, live.sent)
                    bench.record("three nodes", policy, number,
                                 compared(live, placed.outcome, models, SLO_MS))  # fmt: skip
    _find(bench)


@contextlib.contextmanager
def _environment() -> Iterator[Path]:
    """For a Ray of its own, whatever else runs on this machine: a folder, of which nothing stays.
    One for all clusters, since Ray reads its token once in a process."""
    before = dict(os.environ)  # Ray adds to it
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # its sockets want a short name
    root = str(Path(__file__).parents[1])  # the nodes make the towers by name
    os.environ |= {
        "RAY_TMPDIR": str(folder), "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "XDG_RUNTIME_DIR": str(folder),  # others' nodes may have the same names
        "PYTHONPATH": os.pathsep.join(filter(None, (root, before.get("PYTHONPATH")))),
    }  # fmt: skip
    try:
        yield folder
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _cluster(state: Path, flags: Sequence[str]) -> Iterator[None]:
    command = [*COMMAND, "cluster", "up", "--local", str(NODES), "--state-dir", str(state),
               "--json", "--", *flags]  # fmt: skip
    os.environ.pop("RAY_ADDRESS", None)
    made = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert made.stdout is not None
        told = [""]
        while '"address":' not in told[-1]:
            told.append(made.stdout.readline())
            if not told[-1]:
                raise RuntimeError(f"no cluster: {''.join(told)}")
        os.environ["RAY_ADDRESS"] = told[-1].split('"')[3]
        yield
        subprocess.run([*COMMAND, "cluster", "down"], check=True, capture_output=True)
        made.wait(200)
    finally:
        made.terminate()
        made.communicate()


def _find(bench: Run) -> None:
    found: dict[str, dict[str, float]] = {"in_slo": {}, "simulated_in_slo": {}}
    for policy in POLICIES:
        for key, shares in found.items():
            shares[policy] = quantile(bench.values("three nodes", policy, key), 0.5)
        bench.find(f"{policy}: in time, live", found["in_slo"][policy])
        bench.find(f"{policy}: in time, simulated", found["simulated_in_slo"][policy])
        apart = abs(found["in_slo"][policy] - found["simulated_in_slo"][policy])
        bench.find(f"{policy}: in time, apart", apart, at_most=WITHIN)
    ranks = same_ranks(found["in_slo"], found["simulated_in_slo"])
    bench.find("policies in the simulator's order, by what is in time", ranks, at_least=1.0)
