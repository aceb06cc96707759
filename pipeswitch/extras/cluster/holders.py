"""Table of a cluster, and choice of the node that gets a model's next request. Pure.

Clients and gateways of a cluster use the same table. Each counts its own requests, and gets the
loads of all nodes once a second. From both it predicts when each node that holds a model (a holder)
would finish a request. The request goes to the preferred node unless another holder is clearly
faster, because that holder may first have to copy the model to its device.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Final

import msgspec

from ...base import errors
from ...client.calls import RETURN_S

ELSEWHERE: Final = (errors.ServerUnavailable, errors.ModelNotFound, errors.PermissionDenied)
"""Errors after which another node may succeed. All nodes admit the cluster's key, so a server that
refuses it is a foreign one that now has a node's former port."""
KEEP_MS: Final = 20.0  # minimum gain, in ms, for which a request leaves the preferred node
KEEP_SHARE: Final = 0.25  # minimum gain as a share of the time on the preferred node
UNKNOWN_MS: Final = 1.0  # assumed time of a request if nothing was measured

Load = tuple[float, float]
"""Predicted ms in which a node answers all accepted requests, and ms for one more request."""


class Reach(Enum):
    """Nodes of a cluster that answer a verb."""

    HOLDER = auto()  # one node that holds the model; if it does not answer, another one
    HOLDERS = auto()  # all nodes that hold the model
    CLUSTER = auto()  # no node alone, because placement takes part


REACHES: Final[Mapping[str, Reach]] = {
    "infer": Reach.HOLDER,
    "generate": Reach.HOLDER,
    "show": Reach.HOLDER,
    "generation": Reach.HOLDER,
    "load": Reach.HOLDERS,
    "unload": Reach.HOLDERS,
    "put": Reach.CLUSTER,
    "register": Reach.CLUSTER,
    "unregister": Reach.CLUSTER,
}
"""Other verbs work in a cluster only if ``ClusterVerbs`` has a ``_do_`` method for them."""


class NodeAddress(msgspec.Struct, frozen=True):
    """Address of a node's port for clients with keys, and the keys for it."""

    address: str
    keys: tuple[str, ...] = ()
    gateway_keys: tuple[str, ...] = ()  # keys with the owner's rights; only in a gateway's table


class Table(msgspec.Struct, frozen=True):
    """Placement's table: which node serves a model, and which nodes hold it."""

    version: int = 0
    here: str = ""  # node on which the table's gateway runs; it needs no row in ``nodes``
    nodes: dict[str, NodeAddress] = {}
    models: dict[str, str] = {}  # model -> node that serves it
    holders: dict[str, list[str]] = {}
    loads: dict[str, Load] = {}
    may_come: bool = False  # a node that is gone may return

    def address(self, node: str) -> str:
        """Return a node's address, or its name if the table has no address."""
        return self.nodes[node].address if node in self.nodes else node

    def untried(self, model: str, tried: Collection[str] = ()) -> list[str]:
        """Return the holders that were not tried: ``here`` first, then the node that serves."""
        nodes = self.holders.get(model, ())
        return [
            node
            for node in dict.fromkeys((self.here, self.models.get(model, ""), *nodes))
            if node in nodes
            and (node in self.nodes or node == self.here)
            and self.address(node) not in tried
        ]


def no_sequence(sequence: str) -> errors.SequenceNotFound:
    """Return the error of a sequence whose node is gone."""
    text = f'no node still has sequence "{sequence}"'
    return errors.SequenceNotFound(text, hint="open a new sequence")


class Retry(Enum):
    """Step that the caller performs before ``Failover.next`` can return nodes."""

    RENEW = 1  # fetch the newest table
    WAIT = 2  # wait ``look_s``, then look at the table again


class Failover:
    """Rules for one request whose node did not answer. Pure.

    The caller reports each failure with ``failed``. Then it performs the steps from ``next`` until
    ``next`` returns nodes. Each address is tried once. If the last node died, the table's other
    holders are tried. If that node lives but lacks the model, the table is renewed first.
    """

    def __init__(self, model: str, options: Mapping[str, Any], now_s: float, look_s: float) -> None:
        """Begin at ``now_s``; ``look_s`` is the interval between two looks at the table."""
        body = options.get("body") or {}
        self._model, self._look_s, self._began_s = model, look_s, now_s
        # Only the node on which a sequence began has the state for its later steps.
        self._bound_to = "" if body.get("start") else body.get("sequence", "")
        self._deadline_ms: float | None = options.get("deadline_ms")
        wait_s = math.inf if self._deadline_ms is None else self._deadline_ms / 1000.0
        self.until_s = now_s + min(RETURN_S, wait_s)
        self._tried: set[str] = set()
        self._is_renewed = False

    def failed(self, error: errors.PipeSwitchError, address: str) -> None:
        """Record that the node at an address did not answer.

        Raises:
            SequenceNotFound: no other node has the request's sequence.
        """
        self._error, self._is_renewed = error, False
        self._tried.add(address)
        if self._bound_to:
            raise no_sequence(self._bound_to) from error

    @property
    def is_dead(self) -> bool:
        """Return True if the last node did not answer at all; a failed model's error has data."""
        return isinstance(self._error, errors.ServerUnavailable) and not self._error.data

    def next(self, table: Table, now_s: float) -> list[str] | Retry:
        """Return the nodes that are left to try, the preferred one first, or a step to perform.

        Raises:
            PipeSwitchError: the last node's error: no node is left, and none will come.
        """
        is_trusted = self.is_dead or self._is_renewed
        if is_trusted and (nodes := table.untried(self._model, self._tried)):
            return nodes
        if not self._is_renewed:
            self._is_renewed = True
            return Retry.RENEW
        if not (self.is_dead or table.may_come) or now_s + self._look_s > self.until_s:
            raise self._error
        self._is_renewed = False
        return Retry.WAIT

    def options(self, options: dict[str, Any], now_s: float) -> dict[str, Any]:
        """Return a request's options with the time that is left until its deadline."""
        if self._deadline_ms is None:
            return options
        left_ms = self._deadline_ms - (now_s - self._began_s) * 1000.0
        return {**options, "deadline_ms": max(left_ms, 0.001)}


def choose(nodes: Sequence[str], finish_ms: Callable[[str], float]) -> str:
    """Return the node that would finish a request first if the gain is large enough, else the
    preferred node, which is the first of ``nodes``."""
    stay_ms = finish_ms(nodes[0])
    if stay_ms <= KEEP_MS or len(nodes) == 1:
        return nodes[0]  # the wait is short, or there is no other node
    earliest = min(nodes, key=finish_ms)
    return earliest if is_worth(stay_ms, finish_ms(earliest)) else nodes[0]


def left_ms(queue_ms: float, since_ms: float, own_ms: float) -> float:
    """Return the predicted time until a node has answered everything: the reported queue minus the
    time since the report, or the time of this client's own requests if that is longer."""
    return max(queue_ms - since_ms, own_ms, 0.0)


class Balance:
    """Load of each node, as one client predicts it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outstanding: Counter[str] = Counter()  # node -> this client's unanswered requests
        self._loads: Mapping[str, Load] = {}
        self._at_s = 0.0

    def count(self, node: str, more: int) -> None:
        """Add ``more`` (below 0 after an answer) to a node's unanswered requests. Thread-safe."""
        with self._lock:
            self._outstanding[node] += more

    def learn(self, loads: Mapping[str, Load], now_s: float) -> None:
        """Store the loads that the nodes reported at ``now_s``."""
        self._loads, self._at_s = loads, now_s

    def choose(self, nodes: Sequence[str], now_s: float) -> str:
        """Return the node that the function ``choose`` selects for the current loads."""
        since_ms = (now_s - self._at_s) * 1000.0

        def finish_ms(node: str) -> float:
            queue_ms, each_ms = self._loads.get(node, (0.0, 0.0))
            return left_ms(queue_ms, since_ms, self._outstanding[node] * (each_ms or UNKNOWN_MS))

        return choose(nodes, finish_ms)


def is_worth(stay_ms: float, leave_ms: float) -> bool:
    """Return True if a request gains enough by leaving the preferred node."""
    return stay_ms - leave_ms > max(KEEP_MS, KEEP_SHARE * stay_ms)


def home_of(sequence: str, holders: Iterable[str]) -> str:
    """Return the holder for a sequence; all gateways that know these holders choose the same."""
    return max(holders, key=lambda node: hashlib.sha256(f"{node}\0{sequence}".encode()).digest())


def models_of(answers: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the models that the nodes list, each once, with the names of its nodes."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for node, answer in answers.items():
        for row in answer["models"]:
            entry = rows.setdefault((row["name"], row["version"]), {**row, "nodes": []})
            entry["nodes"].append(node)
            if entry["nodes"] != [node]:
                entry["requests"] += row["requests"]
    return list(rows.values())
