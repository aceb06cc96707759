"""Placement on simulated machines: each request is answered once, and a single node behaves like
the server of ``replay``."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from click.testing import CliRunner

from pipeswitch.cli.main import main
from pipeswitch.extras.lab import arrivals
from pipeswitch.extras.lab.arrivals import Arrival, Trace
from pipeswitch.extras.lab.costs import Costs, Link
from pipeswitch.extras.lab.replay import Models, PaperModel, Replay, Setting, replay
from pipeswitch.extras.lab.simulated_cluster import SILENT_MS, Cluster, Placed, _ClusterRun, place

MIB = 1 << 20
MODELS = [
    PaperModel(
        name=f"m{i}", layer_bytes=((20 + 3 * i) * MIB,) * 2, layer_ms=(2.0 + i, 3.0), plan=(0, 1)
    )
    for i in range(6)
]
SETTING = Setting(memory_bytes=120 * MIB, costs=Costs(to_device=Link(bytes_per_ms=6 * MIB)))


def asked(count: int, rate_per_s: float = 60.0, seed: int = 0) -> Trace:
    return arrivals.poisson(rate_per_s, count=count, model_count=len(MODELS), seed=seed)


def placed(trace: Trace, cluster: Cluster) -> Placed:
    return place(cluster, SETTING, MODELS, arrivals.tiled(trace, cluster.tiles, 10**6).arrivals)


@pytest.mark.parametrize("seed", range(3))
def test_one_node_is_one_server(seed: int) -> None:
    trace = asked(150, seed=seed)
    alone, outcome = (
        replay(SETTING, MODELS, trace.arrivals),
        placed(trace, Cluster(nodes=1)).outcome,
    )
    assert outcome.latency_ms == pytest.approx(alone.latency_ms)
    assert (outcome.switches, outcome.in_slo) == (alone.switches, alone.in_slo)
    assert outcome.idle_share == pytest.approx(alone.idle_share)


@pytest.mark.parametrize("seed", range(2))
def test_nodes_die_and_each_request_is_answered_once(seed: int) -> None:
    """End several of four nodes within minutes: their models and requests go to other nodes."""
    trace = asked(300, 1.0, seed=seed)
    cluster = Cluster(nodes=4, tiles=2, failures=1 - 1e-14, seed=seed)
    quiet, outcome = placed(trace, replace(cluster, failures=0.0)), placed(trace, cluster)
    assert outcome.outcome == placed(trace, cluster).outcome
    assert (quiet.failures, quiet.resent, quiet.outcome.refused) == (0, 0, {})
    assert outcome.failures >= 2
    refused = sum(outcome.outcome.refused.values())
    assert outcome.outcome.requests == len(outcome.outcome.latency_ms) + refused == 600
    assert outcome.moved_bytes > quiet.moved_bytes == sum(2 * one.size_bytes for one in MODELS)
    assert 0 < sum(ms >= SILENT_MS for ms in outcome.outcome.latency_ms) <= outcome.resent
    assert outcome.outcome.share_in_slo < quiet.outcome.share_in_slo


@pytest.mark.parametrize(
    ("share_of_one", "least", "median_ms"), [(0.5, 0.0, 10), (1.5, 0.3, 50), (1.9, 0.44, 300)]
)
def test_two_holders_share_the_load_that_one_cannot_bear(
    share_of_one: float, least: float, median_ms: float
) -> None:
    """Send requests of 5 ms. The second node must get a share if one node cannot bear the load."""
    trace = arrivals.poisson(200.0 * share_of_one, count=3000, model_count=1, seed=0)
    run = _ClusterRun(Cluster(nodes=2), SETTING, Models(MODELS[:1], 1))
    outcome = run.run(arrivals.tiled(trace, 1, 10**6).arrivals, None).outcome
    counts = [len(server.latency_ms) for server in run._servers.values()]
    assert sum(counts) == 3000
    assert 3000 - max(counts) >= least * 3000
    assert sorted(outcome.latency_ms)[1500] < median_ms


def test_the_fewest_nodes_that_suffice() -> None:
    trace, cluster = asked(40, 40.0), Cluster(nodes=6, tiles=4)
    need = placed(trace, replace(cluster, nodes=4)).outcome.share_in_slo
    outcome = placed(trace, replace(cluster, need=need))
    assert outcome.outcome.share_in_slo >= need
    assert outcome.nodes <= 4
    assert placed(trace, replace(cluster, nodes=outcome.nodes - 1)).outcome.share_in_slo < need
    assert placed(trace, replace(cluster, nodes=1, need=1.0)).nodes == 1


def test_what_is_registered_while_nothing_runs_is_spread() -> None:
    run = _ClusterRun(Cluster(nodes=4, tiles=2), SETTING, Models(MODELS, 2))
    run._register(0)
    run._register(1)
    assert sorted(Counter(run._serving.values()).values()) == [3, 3, 3, 3]
    assert all(len(holders) == 2 for name, holders in run._placing.holders.items() if name)


def test_each_tile_asks_for_models_of_its_own_from_its_own_instant_on() -> None:
    trace = Trace("t", tuple(Arrival(10.0 * i, i % 3) for i in range(30)), 3)
    whole = arrivals.tiled(trace, 4, 10**6)
    assert whole.model_count == 12
    for tile in range(4):
        mine = [one for one in whole.arrivals if one.model // 3 == tile]
        assert [(one.model - mine[0].model) % 3 for one in mine] == [0, 1, 2] * 10
        gaps = [after.at_ms - one.at_ms for one, after in pairwise(mine)]
        assert gaps == pytest.approx([10.0] * 29, abs=0.4)
    assert whole.arrivals[0] == trace.arrivals[0]
    assert 40 <= len(arrivals.tiled(trace, 4, 60).arrivals) <= 64


def test_only_processes_of_a_touched_device_are_asked_what_they_do_next() -> None:
    """Compare with a run that asks all processes after every event: the outcome is the same."""

    class Everything(set[int]):
        def __contains__(self, _: object) -> bool:
            return True

    outcomes = []
    for touched in (set[int](), Everything()):
        world = Replay(replace(SETTING, devices=4), Models(MODELS))
        world._touched = touched
        world.serve(MODELS)
        outcomes.append(world.replay(asked(150, 300.0).arrivals))
    one, other = outcomes
    assert one == other
    assert one.switches > len(MODELS)


def told(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["simulate", *args])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_tells_what_placement_did() -> None:
    args = ("poisson:20", "--nodes", "3", "--devices", "2", "--requests", "120", "--policy", "fifo")
    status, text, _ = told(*args, "--models", "random:20", "--json")
    report: dict[str, Any] = json.loads(text)
    (row,) = report["runs"]
    assert (status, report["tiles"], row["nodes"], row["failures"]) == (0, 6, 3, 0)
    assert row["moved_bytes"] == report["models_bytes"] * 6
    status, text, _ = told(*args, "--models", "random:20", "--tiles", "2", "--need", "50%")
    assert status == 0
    assert "the fewest for 50.00% in time" in text


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("azure", "--devices", "8"), "add --nodes 1"),
        (("azure", "--nodes", "3", "--failures", "100%"), "less than 100%"),
        (("azure", "--nodes", "3", "--policy", "serial"), "--nodes excludes --job"),
    ],
)
def test_what_a_cluster_cannot_be_is_said(args: tuple[str, ...], text: str) -> None:
    status, _, error = told(*args)
    assert status == 1
    assert text in error
