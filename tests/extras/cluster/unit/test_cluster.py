"""Placement of requests on nodes, compared with a ranking of all nodes; and the client's table."""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import contextlib
import importlib.util
import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from pipeswitch.base import errors
from pipeswitch.client.client import Client
from pipeswitch.extras.cluster import cluster_client, holders
from pipeswitch.extras.cluster.choice import RANK, Nodes
from pipeswitch.extras.cluster.choice import NodeLoad as Summary
from pipeswitch.extras.cluster.command import _check_token
from pipeswitch.extras.cluster.holders import (
    KEEP_MS,
    KEEP_SHARE,
    Failover,
    NodeAddress,
    Retry,
    Table,
)
from pipeswitch.extras.cluster.node_actor import NodeActor
from pipeswitch.scheduler.policies.placement import Place
from pipeswitch.wire.frames import UPLOAD_LOST

LINK = 1e6


def summary(name: str, queue_ms: float = 0.0, free_bytes: int = 1 << 30) -> Summary:
    return Summary(name, free_bytes, queue_ms, int(queue_ms > 0), LINK)


def plain(
    known: dict[str, Summary], nodes_holding: set[str], size_bytes: int, without: set[str]
) -> Place:
    """Return the best place for a request, found by comparing every node."""
    places = []
    for number, (name, one) in enumerate(sorted(known.items(), key=lambda pair: int(pair[0]))):
        if name not in without:
            is_held = name in nodes_holding and not without
            free_bytes = 1 << int(math.log2(one.free_bytes)) if one.free_bytes else 0
            switch_ms = 0.0 if is_held else size_bytes / one.link_bytes_per_ms
            places.append(
                Place(
                    number,
                    is_held,
                    one.waiting > 0,
                    one.waiting,
                    one.queue_ms,
                    switch_ms,
                    free_bytes,
                    size_bytes,
                )
            )
    return min(places, key=RANK)


@pytest.mark.parametrize("seed", range(20))
def test_of_thousands_the_few_that_are_looked_at_hold_the_best(seed: int) -> None:
    """Make 300 decisions; between them, change loads, memory and holders, and end nodes."""
    rng = random.Random(seed)
    nodes, known, holders_by_model = Nodes(), {}, nodes_held()
    count = rng.choice([2, 7, 40])
    for number in range(count):
        known[str(number)] = summary(str(number))
        nodes.put(known[str(number)])
    for _ in range(300):
        name = rng.choice(sorted(known))
        known[name] = Summary(
            name,
            rng.choice([0, 1000, 1 << 20, 3 << 20, 1 << 30]),
            rng.choice([0.0, 5.0, 50.0]),
            rng.randrange(3),
            rng.choice([LINK, LINK / 8]),
        )
        nodes.put(known[name])
        model, size_bytes = rng.choice("ab"), rng.choice([500, 2 << 20, 2 << 30])
        holders_by_model[model] ^= {rng.choice(sorted(known))}
        nodes.holders[model] = set(holders_by_model[model])
        without = set(rng.sample(sorted(known), rng.choice([0, 0, 1])))
        choice = nodes.choose(model, size_bytes, without=without)
        expected = plain(known, holders_by_model[model], size_bytes, without)
        assert (choice.finish_ms, choice.node) == (expected.finish_ms, str(expected.device))
        assert choice.reason == expected.reason
    lengths = [len(order) for orders in nodes._orders.values() for order in orders.values()]
    assert max(lengths) <= 2 * count + 2  # although more than 300 summaries were added
    for name in sorted(known):
        nodes.remove(name)
    with pytest.raises(errors.ServerUnavailable):
        nodes.choose("a", 1)


def nodes_held() -> dict[str, set[str]]:
    return {"a": set(), "b": set()}


@pytest.mark.parametrize("waiting_ms", [0.0, 10.0, 100.0, 1000.0])
def test_a_model_wanders_only_to_a_node_that_is_earlier_by_enough(waiting_ms: float) -> None:
    nodes = Nodes()
    for ahead_ms in (1.0, KEEP_MS, KEEP_MS + 1.0, waiting_ms * KEEP_SHARE + KEEP_MS):
        nodes.put(summary("here", waiting_ms + ahead_ms))
        nodes.put(summary("there", waiting_ms))
        nodes.holders["m"] = {"here", "there"}
        choice = nodes.choose("m", 1 << 20, at="here")
        is_enough = ahead_ms > max(KEEP_MS, KEEP_SHARE * (waiting_ms + ahead_ms))
        assert (choice.node, choice.reason == "kept") == (
            ("there", False) if is_enough else ("here", True)
        )
        assert nodes.choose("m", 1 << 20, at="gone").node == "there"


# ---- the client's table --------------------------------------------------------------------------


class Door:
    """Connection to a node, which answers with the node's name or with an error."""

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, 0
        self.error: errors.PipeSwitchError | None = None

    def call(self, op: str, **options: Any) -> str:
        return str(self.request(op, **options).result())

    def request(self, op: str, **options: Any) -> Future[str]:
        self.asked += 1
        future: Future[str] = Future()
        if self.error is None:
            future.set_result(self.name)
        else:
            future.set_exception(self.error)
        return future


class Rig(cluster_client.ClusterConnection):
    """Client's connection to two nodes that have model ``m``, and to a placement. The placement
    answers with each item of ``soon`` once, then always with ``later``."""

    def __init__(self) -> None:
        self.doors = {name: Door(name) for name in "ab"}
        self.later = self.table(1, "a", "ab")
        self.soon: list[dict[str, Any] | Exception] = []
        self.asked: list[tuple[Any, ...]] = []
        self.home = "a"  # node for new uploads
        super().__init__("ray://auto", 1.0)
        self.asked.clear()

    @staticmethod
    def table(
        version: int, serving: str, holders: str, *, may_come: bool = False, **addresses: str
    ) -> dict[str, Any]:
        """Return a table. A node's address is its name, unless ``addresses`` has another one."""
        nodes = {name: {"address": addresses.get(name, name)} for name in "ab"}
        models = {"m": serving} if serving else {}
        return {
            "version": version,
            "nodes": nodes,
            "models": models,
            "holders": {"m": list(holders)},
            "may_come": may_come,
        }

    def _ask(self, verb: str = "", *args: Any) -> Any:
        self.asked.append((verb, *args))
        table = self.soon.pop(0) if self.soon else self.later
        if isinstance(table, Exception):
            raise table
        self._table = msgspec.convert(table, Table)
        return self.home

    def _to(self, node: str) -> Any:
        if node not in self._table.nodes:
            raise errors.ServerUnavailable(f"no {node}")
        return self.doors[self._table.nodes[node].address]


@pytest.fixture(params=["call", "request"])
def asking(request: pytest.FixtureRequest) -> Callable[..., str]:
    def ask(rig: Rig, step: dict[str, Any] | None = None) -> str:
        options = {"is_safe": step is None, "body": step}
        answer = getattr(rig, request.param)("infer", model="m", **options)
        return str(answer if request.param == "call" else answer.result(10))

    return ask


def test_a_request_asks_its_node_and_nobody_else(asking: Callable[[Rig], str]) -> None:
    rig = Rig()
    assert [asking(rig) for _ in range(3)] == ["a", "a", "a"]
    assert not rig.asked
    assert rig.doors["b"].asked == 0


def test_of_two_holders_the_one_that_finishes_first_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Send 200 requests at once: the client adds its own requests to the queues in the table."""
    rig, names = Rig(), list[str]()
    pending = [Future[str]() for _ in range(200)]

    def request(name: str) -> Future[str]:
        names.append(name)
        return pending[len(names) - 1]

    for name, door in rig.doors.items():
        monkeypatch.setattr(door, "request", lambda op, name=name, **_: request(name))
    for _ in range(100):
        rig.request("infer", model="m", is_safe=True)
    assert 35 <= names.count("b") < 50  # the preferred node gets a few more requests
    for future in pending[:100]:
        future.set_result("done")
    now_s = time.monotonic()
    for age_s in (0.0, 1.0):
        rig._balance.learn({"a": (500.0, 5.0), "b": (100.0, 5.0)}, now_s - age_s)
        rig.request("infer", model="m", is_safe=True)
    assert names[100:] == ["b", "a"]


def test_a_client_that_stays_connected_learns_of_a_new_table(
    asking: Callable[[Rig], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Get tables from a node, without Ray. An older table, or an error, must change nothing."""
    rig = Rig()
    verbs: list[str] = []
    answer: Future[Any] = Future()

    class Link:
        def request(self, op: str, **_: Any) -> Future[Any]:
            verbs.append(op)
            return answer

    rig._connections[NodeAddress("a")] = Link()  # type: ignore[assignment]
    for table, expected in (
        (rig.table(0, "b", "b"), "a"),
        (rig.table(9, "b", "ab"), "b"),
        (errors.ServerUnavailable("gone"), "b"),
    ):
        rig._learnt_at_s = -cluster_client.FRESH_S
        asking(rig)
        asking(rig)
        if isinstance(table, Exception):
            answer.set_exception(table)
        else:
            nodes = {name: {**facts, "keys": ["k"]} for name, facts in table["nodes"].items()}
            answer.set_result(cluster_client._reply({**table, "nodes": nodes}))
        answer = Future()
        assert asking(rig) == expected
    assert verbs == ["nodes"] * 3
    assert rig._table.nodes["a"] == NodeAddress("a", ("k",))
    assert not rig.asked


def test_a_model_is_loaded_on_all_its_holders() -> None:
    rig = Rig()
    rig.call("load", model="m")
    assert [door.asked for door in rig.doors.values()] == [1, 1]
    rig.doors["a"].error = errors.ServerUnavailable("gone")
    rig.call("unload", model="m")
    assert rig.doors["b"].asked == 2


def test_of_a_dead_node_the_other_holder_is_asked_without_placement(
    asking: Callable[[Rig], str],
) -> None:
    rig = Rig()
    rig.doors["a"].error = errors.ServerUnavailable("gone")
    assert [asking(rig) for _ in range(3)] == ["b", "b", "b"]
    assert rig.doors["a"].asked == 1
    assert not rig.asked


def test_a_model_that_has_moved_is_followed_once(asking: Callable[[Rig], str]) -> None:
    rig = Rig()
    rig.later = rig.table(2, "b", "b")
    rig.doors["a"].error = errors.ModelNotFound("moved")
    assert [asking(rig), asking(rig)] == ["b", "b"]
    assert rig.asked == [("",)]
    rig.doors["b"].error = errors.ModelNotFound("moved again")
    rig.later = rig.table(3, "a", "a")
    with pytest.raises(errors.ModelNotFound):
        asking(rig)
    assert [rig.doors[name].asked for name in "ab"] == [2, 3]


def test_when_no_node_is_left_the_error_is_the_nodes_own(
    asking: Callable[[Rig], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "RETURN_S", 0.0)
    rig = Rig()
    for door in rig.doors.values():
        door.error = errors.ServerUnavailable("gone")
    with pytest.raises(errors.ServerUnavailable):
        asking(rig)
    assert [door.asked for door in rig.doors.values()] == [1, 1]


GONE = errors.ServerUnavailable("gone")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the client's waits for placement's next table take no time."""
    monkeypatch.setattr(cluster_client, "LOOK_S", 0.0)


def lost_twice() -> Rig:
    """Return a client with an old table: both nodes have died; ``a`` is back on another port."""
    rig = Rig()
    for door in rig.doors.values():
        door.error = GONE
    rig.doors["a2"] = Door("a2")
    rig.later = rig.table(3, "a", "a", a="a2")
    return rig


def test_when_the_second_holder_is_gone_too_placement_says_where_the_first_is_now(
    asking: Callable[[Rig], str],
) -> None:
    rig = lost_twice()
    assert [asking(rig), asking(rig)] == ["a2", "a2"]
    assert rig.asked == [("report_unreachable", "b", "b")]
    assert [door.asked for door in rig.doors.values()] == [1, 1, 2]


@pytest.mark.parametrize(
    "soon",
    [
        [GONE, GONE],  # placement is restarted, too
        [Rig.table(2, "", "", may_come=True)],  # placement knows neither node yet
        [Rig.table(2, "b", "b")],  # placement does not know yet that b is gone
    ],
)
def test_a_model_whose_nodes_are_all_gone_is_waited_for(
    asking: Callable[[Rig], str], at_once: None, soon: list[Any]
) -> None:
    rig = lost_twice()
    rig.soon = list(soon)
    assert asking(rig) == "a2"


def test_a_model_that_placement_does_not_know_yet_is_waited_for(
    asking: Callable[[Rig], str], at_once: None
) -> None:
    """Restart placement and the nodes: placement then does not know the nodes' models yet."""
    rig = Rig()
    rig.soon = [rig.table(2, "", "", may_come=True)] * 2
    rig._ask()
    assert asking(rig) == "a"
    rig.soon = [rig.table(3, "", "")]
    rig._ask()
    rig.later = rig.table(3, "", "")
    with pytest.raises(errors.ModelNotFound):
        asking(rig)


def test_a_request_with_a_deadline_waits_no_longer_than_that() -> None:
    """The client renews its table at once and after each wait; a later node gets the time left."""
    failover = Failover("m", {"deadline_ms": 3000.0}, now_s=10.0, look_s=1.0)
    table = msgspec.convert(Rig.table(2, "a", "ab"), Table)
    failover.failed(GONE, "a")
    assert failover.next(table, 10.5) == ["b"]
    assert failover.options({"deadline_ms": 3000.0}, 10.5) == {"deadline_ms": 2500.0}
    failover.failed(GONE, "b")
    steps = [failover.next(table, now_s) for now_s in (10.5, 10.5, 11.5, 11.5)]
    assert steps == [Retry.RENEW, Retry.WAIT] * 2
    assert failover.next(table, 12.5) is Retry.RENEW
    with pytest.raises(errors.ServerUnavailable):
        failover.next(table, 12.5)


def test_a_node_that_lives_without_the_model_sends_a_request_to_the_newest_table_first() -> None:
    failover = Failover("m", {}, now_s=0.0, look_s=1.0)
    failover.failed(errors.model_failed("m", "no file"), "a")
    assert not failover.is_dead  # the node lives
    failover.failed(errors.ModelNotFound("moved"), "a")
    table = msgspec.convert(Rig.table(1, "a", "ab"), Table)
    assert failover.next(table, 0.0) is Retry.RENEW
    assert failover.next(table, 0.0) == ["b"]


@pytest.mark.parametrize("start", [True, False])
def test_a_later_step_of_a_sequence_goes_to_no_other_node(start: bool) -> None:
    failover = Failover("m", {"body": {"sequence": "s", "start": start}}, now_s=0.0, look_s=1.0)
    with contextlib.nullcontext() if start else pytest.raises(errors.SequenceNotFound):
        failover.failed(GONE, "a")


def test_the_next_node_has_what_is_left_of_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, deadlines_ms = Rig(), list[float]()
    monkeypatch.setattr(cluster_client.time, "monotonic", lambda: 2.0 * len(deadlines_ms))
    rig.doors["a"].error = GONE
    for door in rig.doors.values():
        ask = door.request
        monkeypatch.setattr(
            door,
            "request",
            lambda op, ask=ask, **o: (deadlines_ms.append(o["deadline_ms"]), ask(op))[1],
        )
    rig.call("infer", model="m", is_safe=True, deadline_ms=5000.0)
    assert deadlines_ms == [5000.0, 3000.0]


def test_another_server_that_has_the_port_of_a_node_is_not_the_node(
    asking: Callable[[Rig], str],
) -> None:
    rig = lost_twice()
    rig.doors["a"].error = errors.PermissionDenied("it does not know the key")
    assert asking(rig) == "a2"


def test_a_node_that_the_table_has_lost_meanwhile_is_not_waited_for(
    asking: Callable[[Rig], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Install a newer table in another thread, after a node is chosen and before the message."""
    rig = Rig()
    to = rig._to

    def late(node: str) -> Any:
        monkeypatch.undo()
        del rig._table.nodes["a"]
        return to(node)

    monkeypatch.setattr(rig, "_to", late)
    assert asking(rig) == "b"


@pytest.mark.parametrize("error", [KeyError("a bug"), MemoryError(), RuntimeError("no thread")])
def test_a_request_ends_with_whatever_error_its_second_try_has(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    rig = Rig()
    rig.doors["a"].error = GONE
    rig.doors["b"].error = error  # type: ignore[assignment]
    answer = rig.request("infer", model="m", is_safe=True)
    assert answer.exception(10) is error


def test_a_second_try_that_has_not_begun_ends_with_its_client() -> None:
    rig = Rig()
    rig.doors["a"].error = GONE
    is_busy, may_end = threading.Barrier(rig._pool._max_workers + 1), threading.Event()
    for _ in range(is_busy.parties - 1):
        rig._pool.submit(lambda: (is_busy.wait(10), may_end.wait(10)))
    is_busy.wait(10)
    answer = rig.request("infer", model="m", is_safe=True)
    rig.close()
    assert isinstance(answer.exception(10), errors.Cancelled)
    may_end.set()


def test_a_client_that_has_no_descriptor_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail to open a connection: the client must not report the node as failed."""

    class Whole(Rig):
        _to = cluster_client.ClusterConnection._to

    def none_left(*_: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(cluster_client, "CurveConnection", none_left)
    monkeypatch.setattr(cluster_client, "ClientKeys", lambda *keys: keys)
    rig = Whole()
    with pytest.raises(errors.PipeSwitchError, match="Too many open files"):
        rig.call("infer", model="m", is_safe=True)
    assert not rig.asked


def test_a_connection_is_of_an_address_and_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new node may get the port of a node that has left, so the keys must match, too."""

    class Whole(Rig):
        _to = cluster_client.ClusterConnection._to

    monkeypatch.setattr(cluster_client, "CurveConnection", lambda address, timeout_s, keys: keys)
    monkeypatch.setattr(cluster_client, "ClientKeys", lambda *keys: keys)
    rig = Whole()
    connections = []
    for keys in (("one",), ("other",), ("one",)):
        rig._table.nodes["a"] = NodeAddress("tcp://host:1", keys)
        connections.append(rig._to("a"))
    assert connections == [(b"one",), (b"other",), (b"one",)]


def test_a_version_from_a_file_is_refused_where_nodes_would_differ() -> None:
    rig = Rig()
    with pytest.raises(errors.InvalidInput) as refused:
        rig.call("register", model="m", body={"as_version": True, "weights": "put:0"})
    assert "unregister m" in refused.value.hint
    assert not rig.asked


@pytest.mark.parametrize(("names", "node", "other"), [("12", "a", "b"), ("21", "b", "a")])
def test_files_go_together_to_a_living_node(names: str, node: str, other: str) -> None:
    rig = Rig()
    put = lambda name: rig.call("put", body={"digest": name, "size_bytes": 1})  # noqa: E731
    assert put("1") == "a"
    rig.doors["a"].error = errors.InvalidInput("refused")
    with pytest.raises(errors.InvalidInput):
        rig.call("register", model="n", body={"source": "put:1"})
    rig.home, rig.doors["a"].error = "b", None
    assert [put(name) for name in names] == [node, node]
    rig.doors[node].error = GONE
    del rig.later["nodes"][node]
    rig.home = other
    for ask in (
        lambda: put("1"),
        lambda: rig.call("register", model="n", body={"source": "put:1"}),
    ):
        rig._files["put:1"] = node
        with pytest.raises(errors.ServerUnavailable) as lost:
            ask()
        assert lost.value.data["reason"] == UPLOAD_LOST
        assert put("1") == other


def test_a_request_waits_for_no_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.later = rig.table(2, "", "", may_come=True)
    rig._ask()
    monkeypatch.setattr(cluster_client, "_RAY", held := threading.Lock())
    held.acquire()
    error = rig.request("infer", model="m", is_safe=True, deadline_ms=50.0).exception(5)
    assert isinstance(error, errors.ModelNotFound)


def test_what_changes_something_is_sent_once() -> None:
    rig = Rig()
    rig.doors["a"].error = errors.ServerUnavailable("may have been carried out")
    with pytest.raises(errors.ServerUnavailable, match="carried out"):
        rig.request("register", model="m", body={}).result(10)
    assert [door.asked for door in rig.doors.values()] == [1, 0]
    with pytest.raises(errors.InvalidInput):
        rig.request("publish", model="m").result(10)
    assert [door.asked for door in rig.doors.values()] == [1, 0]


def test_a_sequence_stays_on_its_node_and_ends_with_it(asking: Callable[..., str]) -> None:
    """Only the first step may go to another node; later steps need the state that the node has."""
    rig = Rig()
    first, later = ({"sequence": "s", **start} for start in ({"start": True}, {}))
    assert asking(rig, first) == "a"
    rig.later = rig.table(2, "b", "ba")  # now b is preferred, as if a's load had grown
    rig._ask()
    assert [asking(rig, later), asking(rig)] == ["a", "b"]
    rig.doors["a"].error = errors.ServerUnavailable("gone")
    for _ in range(2):  # the step is not sent to another node
        with pytest.raises(errors.SequenceNotFound):
            asking(rig, later)
    assert rig.doors["b"].asked == 1
    rig.later = rig.table(3, "a", "ab")
    rig._ask()
    assert [asking(rig, first), asking(rig, later)] == ["b", "b"]


# ---- access --------------------------------------------------------------------------------------


def test_without_ray_a_cluster_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.ConfigError, match=r"pip install 'pipeswitch\[ray\]'"):
        Client("cluster")


def test_a_ray_that_lets_everybody_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(errors.ConfigError, match="lets everybody"):
        Client("ray://head:10001")


def test_a_node_does_not_start_under_a_ray_without_a_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(errors.ConfigError, match="started without a token"):
        NodeActor("n", str(tmp_path), "127.0.0.1", ())
    assert not list(tmp_path.iterdir())


def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    token = tmp_path / ".ray" / "auth_token"
    _check_token(token)
    assert (token.stat().st_mode & 0o777, len(token.read_text())) == (0o600, 64)
    _check_token(token)
    token.chmod(0o644)
    with pytest.raises(errors.ConfigError, match="chmod"):
        _check_token(token)


def test_a_copy_that_became_another_program_is_not_served(tmp_path: Path) -> None:
    """Copy a model between nodes (real code) to a server that builds another program from it."""

    class Server:
        served: ClassVar = {"another"}

        def _ask(self, op: str, *, model: str, body: dict[str, Any]) -> dict[str, Any]:
            self.served.add(model)
            return {"digest": "other"}

        def unregister(self, model: str) -> None:
            self.served.discard(model)

    node = NodeActor.__new__(NodeActor)
    node._name, node._state, node._tenant = "n", tmp_path, Server()  # type: ignore[assignment]
    with pytest.raises(errors.PipeSwitchError, match="another program"):
        node.adopt("m", {"source": "torchvision:x"}, "digest", b"")
    assert Server.served == {"another"}
