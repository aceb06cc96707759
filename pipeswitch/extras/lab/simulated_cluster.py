"""Simulation of a cluster in virtual time: the real placement code, and simulated servers.

Each tile of a trace is a client with its own models. Before its first request a client registers
them and gets placement's table. It gets a new table only after a node's death, as real clients do.
Placement gets each node's load once a second, as in a real cluster.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Final

from ...ipc.messages.base import ModelName
from ..cluster.choice import COPIES, MISSED_S, ROUND_S, NodeLoad, Nodes
from ..cluster.holders import choose, left_ms
from .arrivals import Arrival
from .replay import Asked, Models, Outcome, PaperModel, Replay, Setting, outcome

ROUND_MS: Final = ROUND_S * 1e3
SILENT_MS: Final = 2500.0  # a client gives a dead node up after this (CONNECT_TIMEOUT_S)
HOUR_MS: Final = 3.6e6


@dataclass(frozen=True)
class Cluster:
    """Machines of a simulated cluster, and its clients."""

    nodes: int  # number of nodes; with ``need`` the maximum
    devices: int = 1  # devices of each node
    tiles: int = 1  # number of clients, each with its own models
    failures: float = 0.0  # share of the nodes that die within an hour
    need: float = 0.0  # required share of requests that end in time; 0: use all nodes
    seed: int = 0


@dataclass(frozen=True)
class Placed:
    """Outcome of the requests, and what placement did."""

    outcome: Outcome
    nodes: int  # number of nodes at the start
    moved_bytes: int  # bytes of models that were copied from node to node
    failures: int  # number of nodes that died; none comes back
    resent: int  # requests that were sent again after a node's death


def place(
    cluster: Cluster,
    setting: Setting,
    models: Sequence[PaperModel],
    arrivals: Sequence[Arrival],
    watch: Callable[[int], None] | None = None,
) -> Placed:
    """Simulate all requests, on all nodes or on the fewest that meet ``cluster.need``.

    ``models``: models of one tile; ``watch``: called with the number of requests sent so far."""

    def on(nodes: int) -> Placed:
        known = Models(models, cluster.tiles)
        return _ClusterRun(replace(cluster, nodes=nodes), setting, known).run(arrivals, watch)

    run, least = on(cluster.nodes), 1
    while cluster.need and run.outcome.share_in_slo >= cluster.need and least < run.nodes:
        tried = on((least + run.nodes) // 2)
        if tried.outcome.share_in_slo >= cluster.need:
            run = tried
        else:
            least = tried.nodes + 1
    return run


class _ClusterRun:
    """One simulation: all nodes, clients and placement."""

    def __init__(self, cluster: Cluster, setting: Setting, models: Models) -> None:
        # Loading a program takes no simulated time, but simulating it would double the real time.
        self._setting = replace(setting, devices=cluster.devices, prepares=False)
        self._cluster, self._models = cluster, models
        self._placing, self._now_ms = Nodes(), 0.0
        self._told: dict[str, NodeLoad] = {}  # last reports of the living nodes
        self._servers: dict[str, Replay] = {}  # simulated servers; created by the first request
        self._busy: set[str] = set()  # nodes that have unanswered requests
        self._holds: defaultdict[str, list[int]] = defaultdict(list)  # node -> its models
        self._serving: dict[str, str] = {}
        # Tile -> model -> its holders as the client knows them, the preferred one first.
        self._tables: dict[int, dict[int, list[str]]] = {}
        # Clients' predictions: a request's time on a node, and when their requests end there.
        self._each_ms: dict[str, float] = {}
        self._done_ms: defaultdict[tuple[int, str], float] = defaultdict(float)
        self._knows_ms: dict[tuple[int, str], float] = {}  # when a client (tile) gives up a node
        self._coming: list[tuple[float, int, Asked]] = []
        self._short: list[tuple[float, int]] = []  # when to copy a model again, and the model
        self._lost = self._moved_bytes = self._resent = 0
        for number in range(cluster.nodes):
            self._tell(NodeLoad(f"node-{number}", setting.memory_bytes * cluster.devices, 0.0, 0))
        chance = Random(f"failures {cluster.seed}")
        rate = -math.log1p(-cluster.failures) / HOUR_MS
        self._deaths = sorted((chance.expovariate(rate), name) for name in self._told if rate)

    def run(self, arrivals: Sequence[Arrival], watch: Callable[[int], None] | None) -> Placed:
        """Simulate all arrivals, round after round."""
        self._coming = [(one.at_ms, n, Asked(n, one, one.at_ms)) for n, one in enumerate(arrivals)]
        while self._coming or self._busy:
            self._round()
            if watch is not None:
                watch(len(arrivals) - len(self._coming))
        count = self._cluster.nodes
        result = outcome(list(self._servers.values()), len(arrivals), count * self._cluster.devices)
        if self._lost:
            result = replace(result, refused={**result.refused, "ModelNotFound": self._lost})
        return Placed(
            result,
            count,
            self._moved_bytes,
            count - len(self._told),
            self._resent,
        )

    def _round(self) -> None:
        """Simulate one round of placement; skip rounds in which nothing happens."""
        if not self._busy:
            queues = (self._coming, self._deaths, self._short)
            next_ms = min(queue[0][0] for queue in queues if queue)
            self._now_ms = max(self._now_ms, next_ms // ROUND_MS * ROUND_MS)
        while self._deaths and self._deaths[0][0] <= self._now_ms and len(self._told) > 1:
            self._lose(self._deaths.pop(0)[1])
        while self._short and self._short[0][0] <= self._now_ms:
            self._copy(self._short.pop(0)[1])
        until_ms = self._now_ms + ROUND_MS
        while self._coming and self._coming[0][0] < until_ms:
            self._send(*heapq.heappop(self._coming))
        for name in sorted(self._busy):
            self._servers[name].run(until_ms)
            self._poll(name)
        self._now_ms = until_ms

    # ---- clients -------------------------------------------------------------------------------

    def _send(self, at_ms: float, number: int, request: Asked) -> None:
        """Send a request to the node that its client believes to have the model."""
        model = request.arrival.model
        tile = model // self._models.per_tile
        if tile not in self._tables:
            self._register(tile)
        table = self._tables[tile]
        while table[model]:
            node = choose(table[model], partial(self._finish_ms, tile, at_ms))
            if node in self._told:
                begin_ms = max(at_ms, self._done_ms[tile, node])
                self._done_ms[tile, node] = begin_ms + self._each_ms.get(node, 0.0)
                return self._ask(node, at_ms, request)
            knows_ms = self._knows_ms.setdefault((tile, node), at_ms + SILENT_MS)
            if at_ms < knows_ms:
                return self._again(knows_ms, request)
            table[model].remove(node)
            if not table[model]:
                self._fetch(tile)
        self._lost += 1

    def _finish_ms(self, tile: int, at_ms: float, node: str) -> float:
        """Return the ms after which a client expects a node's answer; a dead node has no queue."""
        queue_ms = self._told[node].queue_ms if node in self._told else 0.0
        return left_ms(queue_ms, at_ms - self._now_ms, self._done_ms[tile, node] - at_ms)

    def _again(self, at_ms: float, request: Asked) -> None:
        self._resent += 1
        heapq.heappush(self._coming, (at_ms, request.number, request))

    def _ask(self, node: str, at_ms: float, request: Asked) -> None:
        if node not in self._servers:
            self._servers[node] = Replay(self._setting, self._models)
        server, model = self._servers[node], self._models[request.arrival.model]
        if ModelName(model.name) not in server.scene.programs:  # the copy was only recorded so far
            server.serve([model], self._now_ms)
        server.clock.at(at_ms, partial(server.ask, request))
        self._busy.add(node)

    def _register(self, tile: int) -> None:
        """Register all models of a client, each with its second copy."""
        begin = tile * self._models.per_tile
        numbers = range(begin, begin + self._models.per_tile)
        for number in {self._models[number].name: number for number in numbers}.values():
            home = self._placing.choose("", self._models[number].size_bytes).node
            self._hold(home, number)
            self._serve(home, number)
            self._copy(number)
        self._tables[tile] = {number: [] for number in numbers}
        self._fetch(tile)

    def _fetch(self, tile: int) -> None:
        """Give the client the current table of placement."""
        for number in self._tables[tile]:
            model = self._models[number]
            nodes, at = self._placing.holders[model.name], self._serving[model.name]
            if nodes:
                node = self._placing.serving(model.name, model.size_bytes, at)
                self._serve(node, number)
                self._tables[tile][number] = [node, *sorted(nodes - {node})]

    # ---- placement -----------------------------------------------------------------------------

    def _hold(self, node: str, number: int) -> None:
        self._placing.holders[self._models[number].name].add(node)
        self._holds[node].append(number)

    def _serve(self, node: str, number: int) -> None:
        """Make a node serve a model. A client uses that node when it gets its next table."""
        model = self._models[number]
        before, self._serving[model.name] = self._serving.get(model.name, ""), node
        for name, size_bytes in ((before, -model.size_bytes), (node, model.size_bytes)):
            if before != node and name in self._told:
                one = self._told[name]
                self._tell(one._replace(served_bytes=one.served_bytes + size_bytes))

    def _copy(self, number: int) -> None:
        """Copy a model to another node if it has too few copies."""
        model = self._models[number]
        nodes = self._placing.holders[model.name]
        if 0 < len(nodes) < min(COPIES, len(self._told)):
            choice = self._placing.choose(model.name, model.size_bytes, without=nodes)
            self._hold(choice.node, number)
            self._moved_bytes += model.size_bytes

    def _tell(self, summary: NodeLoad) -> None:
        self._told[summary.name] = summary
        self._placing.put(summary)

    def _poll(self, name: str) -> None:
        """Report a node's state to placement, as a real node does."""
        server, waiting = self._servers[name], len(self._servers[name].asked)
        each_ms = server.busy_ms / max(1, len(server.latency_ms))
        self._each_ms[name] = each_ms
        devices = server.scheduler.machine.devices
        free_bytes = sum(device.arena.regions.free_bytes for device in devices)
        self._tell(
            self._told[name]._replace(
                free_bytes=free_bytes, queue_ms=waiting * each_ms, waiting=waiting
            )
        )
        if not waiting:
            self._busy.discard(name)

    def _lose(self, name: str) -> None:
        """Simulate a node's death; clients send its unanswered requests again."""
        self._placing.remove(name)
        del self._told[name]
        self._busy.discard(name)
        due_ms = self._now_ms + MISSED_S * 1e3
        self._short += [(due_ms, number) for number in self._holds.pop(name, ())]
        for request in self._servers[name].asked.values() if name in self._servers else ():
            client = request.arrival.model // self._models.per_tile, name
            self._again(self._knows_ms.setdefault(client, self._now_ms + SILENT_MS), request)
