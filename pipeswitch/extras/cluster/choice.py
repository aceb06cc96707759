"""Choice of a node for a model, and of the number of nodes. Pure: summaries of nodes go in.

Nodes are ranked like the devices of one machine (``scheduler/policies/placement.py``). Among
thousands of nodes only those that can be the best are ranked: the holders of the model, and the
earliest free node for each link speed and size of free memory.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from ...base.errors import ServerUnavailable
from ...scheduler.policies.placement import PLACEMENTS, Place
from .holders import is_worth

RANK: Final = PLACEMENTS["least-finish"]
COPIES: Final = 2  # copies of each model, on different nodes
ROUND_S: Final = 1.0  # interval between two queries of all nodes
MISSED_S: Final = 10.0  # for this long a silent node may come back with its models
LINK_BYTES_PER_MS: Final = 12e6  # link speed of a node that has not measured its own
LONG_MS: Final = 500.0  # a node with a longer queue is overloaded
SHORT_MS: Final = 100.0  # limit on the mean queue of the remaining nodes if one is removed
MORE_ROUNDS: Final = 5  # overloaded rounds in a row before a node is added; bursts are shorter
FEWER_ROUNDS: Final = 60  # idle rounds in a row before a node is removed; adding takes minutes


class NodeLoad(NamedTuple):
    """Load of one server, without details about its devices."""

    name: str
    free_bytes: int  # free bytes of its arena; ``Nodes`` rounds them down to a power of two
    queue_ms: float  # predicted time until all accepted requests are done
    waiting: int
    link_bytes_per_ms: float = LINK_BYTES_PER_MS
    served_bytes: int = 0  # size of the models whose requests go to this node


Entry = tuple[float, bool, int, int, int, int]
"""Rank of a node, where less is better: ``queue_ms``, whether it is busy, ``waiting``, negative
free bytes, ``served_bytes``, number of the node."""


class Decision(NamedTuple):
    """Placement's choice for a request."""

    node: str
    reason: str  # from ``Place``; or "kept": no node is much earlier than the current one
    finish_ms: float


class Nodes:
    """The living nodes, and which models they hold."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeLoad] = {}
        self._numbers: dict[str, int] = {}  # by node; of equal nodes, the lowest number is chosen
        self._names: list[str] = []
        self.holders: defaultdict[str, set[str]] = defaultdict(set)  # model -> nodes that have it
        # Link speed -> bit length of free bytes -> heap of entries. An outdated entry is dropped
        # when it is at the top.
        self._orders: dict[float, dict[int, list[Entry]]] = {}
        self._entries: dict[str, Entry] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def put(self, node: NodeLoad) -> None:
        """Add a node, or replace its load."""
        bits = node.free_bytes.bit_length()
        node = node._replace(free_bytes=1 << bits - 1 if bits else 0)
        if node.name not in self._numbers:
            self._numbers[node.name] = len(self._names)
            self._names.append(node.name)
        number = self._numbers[node.name]
        entry = (
            node.queue_ms,
            node.waiting > 0,
            node.waiting,
            -node.free_bytes,
            node.served_bytes,
            number,
        )
        before = self._nodes.get(node.name)
        self._nodes[node.name] = node
        if before is not None and (entry, node.link_bytes_per_ms) == (
            self._entries[node.name],
            before.link_bytes_per_ms,
        ):
            return
        self._entries[node.name] = entry
        order = self._orders.setdefault(node.link_bytes_per_ms, {}).setdefault(bits, [])
        heapq.heappush(order, entry)
        if len(order) > 2 * len(self._entries) + 2:  # most entries are outdated
            order[:] = [one for one in order if self._entries.get(self._names[one[-1]]) is one]
            heapq.heapify(order)

    def remove(self, name: str) -> None:
        """Remove a node that is dead or draining."""
        self._nodes.pop(name, None)
        self._entries.pop(name, None)
        for holders in self.holders.values():
            holders.discard(name)

    def choose(
        self, model: str, size_bytes: int, *, at: str = "", without: Collection[str] = ()
    ) -> Decision:
        """Return the node for a model's requests, or for another copy of it.

        Args:
            at: the current node of the requests; it is kept unless another is much earlier.
            without: nodes to exclude, because they hold a copy already.

        Raises:
            ServerUnavailable: there is no node left.
        """
        holders = self.holders.get(model, ()) if not without else ()
        places = [
            self._place(self._nodes[name], size_bytes, is_resident=True)
            for name in holders
            if name in self._nodes
        ]
        places += self._first(size_bytes, without)
        if not places:
            raise ServerUnavailable("the cluster has no node left", hint="pipeswitch cluster up")
        choice = min(places, key=RANK)
        node = self._names[choice.device]
        if at and at != node and at in self._nodes and at in holders:
            stay = self._place(self._nodes[at], size_bytes, is_resident=True)
            if not is_worth(stay.finish_ms, choice.finish_ms):
                return Decision(at, "kept", stay.finish_ms)
        return Decision(node, choice.reason, choice.finish_ms)

    def serving(self, model: str, size_bytes: int, at: str = "") -> str:
        """Return the holder that gets a model's requests; the model has at least one holder."""
        chosen, holders = self.choose(model, size_bytes, at=at).node, self.holders[model]
        return chosen if chosen in holders else min(holders)

    def _first(self, size_bytes: int, without: Collection[str]) -> list[Place]:
        """Return for each link speed the earliest node that has space for the model, and the
        earliest without space. Holders need not be excluded: each ranks better as a holder."""
        ranked = []
        for link in list(self._orders):
            with_room: list[Entry] = []
            short: list[Entry] = []
            for bits, order in list(self._orders[link].items()):
                entry = self._top(link, bits, order, without)
                if entry is not None:
                    (with_room if -entry[3] >= size_bytes else short).append(entry)
            ranked += [min(entries) for entries in (with_room, short) if entries]
        return [
            self._place(self._nodes[self._names[entry[-1]]], size_bytes, is_resident=False)
            for entry in ranked
        ]

    def _top(
        self, link: float, bits: int, order: list[Entry], without: Collection[str]
    ) -> Entry | None:
        """Return the first entry of a heap that is up to date and not excluded."""
        excluded, best_entry = [], None
        while order:
            name = self._names[order[0][-1]]
            if self._entries.get(name) is order[0]:
                if name not in without:
                    best_entry = order[0]
                    break
                excluded.append(order[0])
            heapq.heappop(order)
        for entry in excluded:
            heapq.heappush(order, entry)
        if not order:
            del self._orders[link][bits]
        return best_entry

    def _place(self, node: NodeLoad, size_bytes: int, *, is_resident: bool) -> Place:
        return Place(
            device=self._numbers[node.name],
            is_resident=is_resident,
            is_busy=node.waiting > 0,
            waiting=node.waiting,
            queue_ms=node.queue_ms,
            switch_ms=0.0 if is_resident else size_bytes / node.link_bytes_per_ms,
            free_bytes=node.free_bytes,
            size_bytes=size_bytes,
        )


class Scale:
    """Target size of a cluster whose machines Ray adds and removes."""

    def __init__(self, least: int, most: int, target: int) -> None:
        self._least, self._most = least, most
        self.wanted = max(least, min(most, target))
        self._run = 0  # rounds in a row that need more nodes; negative: fewer nodes

    def look(self, queues_ms: Sequence[float], jobs: int) -> int:
        """Return the wanted number of nodes; call it once a round with the nodes' predicted queues.

        1. Add one after MORE_ROUNDS in which all wanted nodes run and are overloaded.
        2. Subtract one after FEWER_ROUNDS in which the remaining nodes would have short queues, and
           no more jobs than nodes.
        """
        is_behind = len(queues_ms) >= self.wanted and min(queues_ms, default=0.0) > LONG_MS
        fewer = self.wanted - 1
        is_idle = sum(queues_ms) <= SHORT_MS * fewer and jobs <= fewer
        turn = is_behind - is_idle
        self._run = self._run + turn if self._run * turn > 0 else turn
        if self._run == MORE_ROUNDS:
            self.wanted, self._run = min(self.wanted + 1, self._most), 0
        elif self._run == -FEWER_ROUNDS:
            self.wanted, self._run = max(fewer, min(self.wanted, self._least)), 0
        return self.wanted
