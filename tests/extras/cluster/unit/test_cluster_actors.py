"""Placement of a cluster, with several threads, and with nodes that fail during a call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pipeswitch.base.errors import AlreadyExists, InvalidInput, ModelNotFound, ServerUnavailable
from pipeswitch.base.plain_files import write_whole
from pipeswitch.extras.cluster import (
    job_reconciler,
    node_actor,
    node_lease,
    placement_actor,
    ray_nodes,
)
from pipeswitch.extras.cluster.choice import Scale
from pipeswitch.extras.cluster.holders import Table
from pipeswitch.extras.cluster.node_actor import NodeActor
from pipeswitch.extras.cluster.placement_actor import Placement

HOME = job_reconciler.JobReplica(incarnation=1, state="home")


class Remote:
    """Method of a Ray actor, whose answer is available at once."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work

    def remote(self, *args: Any) -> Callable[[], Any]:
        if self._work.__name__ == "do_learn":
            self._work(*args)  # runs now, because the caller does not fetch the answer
        return lambda: self._work(*args)


class FakeNode:
    def __init__(self, name: str) -> None:
        self.facts: dict[str, Any] = {
            "name": name,
            "address": f"tcp://{name}",
            "keys": (b"p", b"s", b"k"),
            "free_bytes": 1 << 20,
            "gateway_keys": (),
            "learned": 0,
            "each_ms": 0.0,
            "queue_ms": 0.0,
            "waiting": 0,
            "jobs": 0,
            "copies": {},
            "models": {},
            "bodies": {},
            "aliases": {},
        }
        self.number, self.tables = 0, list[dict[str, Any]]()
        self.on_adopt: Callable[[], None] = lambda: None

    def __getattr__(self, verb: str) -> Remote:
        return Remote(getattr(self, f"do_{verb}"))

    def do_summary(self, heard: int) -> dict[str, Any]:
        self.number += 1
        return {**self.facts, "number": self.number}

    def do_learn(self, table: dict[str, Any]) -> None:
        self.facts["learned"] = table["number"]
        self.tables.append(table)

    def do_remember(self, model: str, body: Any) -> None:
        self.facts["bodies"][model] = body

    def do_unregister(self, name: str) -> None:
        for names in ("models", "aliases"):
            self.facts[names].pop(name, None)

    def do_bundle(self, digest: str) -> bytes:
        return b""

    def do_adopt(self, model: str, body: Any, digest: str, bundle: Any) -> None:
        self.on_adopt()
        self.facts["models"][model] = (digest, 1)


class FakeRay:
    def __init__(self) -> None:
        self.nodes = {name: FakeNode(name) for name in "abc"}

    def wait(self, answers: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return answers, []

    def get(self, answer: Callable[[], Any], timeout: float | None = None) -> Any:
        return answer()


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray_made = FakeRay()
    ray_made.nodes["a"].facts |= {"models": {"m": ("digest", 1)}, "bodies": {"m": {}}}
    monkeypatch.setattr(node_actor, "connect_ray", lambda: ray_made)
    monkeypatch.setattr(placement_actor, "connect_ray", lambda: ray_made)
    monkeypatch.setattr(placement_actor, "node_names", lambda ray: sorted(ray_made.nodes))
    monkeypatch.setattr(ray_nodes, "node_names", lambda ray: sorted(ray_made.nodes))
    monkeypatch.setattr(ray_nodes, "node_of", lambda ray, name: ray_made.nodes[name])
    monkeypatch.setattr(placement_actor, "node_of", lambda ray, name: ray_made.nodes[name])
    monkeypatch.setattr(placement_actor, "answer_of", lambda ray, answer, timeout_s=None: answer())
    monkeypatch.setattr(Placement, "_reconcile_loop", lambda self: None)
    return ray_made


@pytest.fixture
def placed(ray: FakeRay) -> Placement:
    return Placement("folder", (), None)


def is_locked(placed: Placement) -> bool:
    """Return True if other threads cannot take placement's lock."""
    with ThreadPoolExecutor(1) as other:
        is_free = other.submit(placed._lock.acquire, blocking=False).result()
        if is_free:
            other.submit(placed._lock.release).result()
    return not is_free


def nodes_of(placed: Placement) -> list[str]:
    placed._poll()
    return [name for name in "abc" if name in placed._nodes]


@pytest.mark.parametrize("error", [ValueError("a bug"), ServerUnavailable("gone"), MemoryError()])
def test_a_node_whose_drain_fails_serves_again(
    ray: FakeRay, placed: Placement, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(placed, "_copy", fails)
        with pytest.raises(type(error)):
            placed.drain("a")
    assert nodes_of(placed) == ["a", "b", "c"]
    assert placed.drain("a") == []


def test_a_drain_looks_once_at_who_is_left(
    ray: FakeRay, placed: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drain a node: read the other nodes once, because another thread could remove the last one."""
    ray.nodes["a"].facts |= {"copies": {"j": HOME}, "jobs": 1}
    placed._poll()
    targets = placed._targets
    looks: list[bool] = []
    monkeypatch.setattr(placed, "_targets", lambda: (looks.append(is_locked(placed)), targets())[1])
    monkeypatch.setattr(placed, "move", lambda job, to: None)
    placed.drain("a")
    assert looks == [True]


def test_a_drain_with_no_node_left_names_what_stays(ray: FakeRay, placed: Placement) -> None:
    ray.nodes["a"].facts |= {"copies": {"j": HOME}, "jobs": 1}
    for name in "bc":
        del ray.nodes[name]
    placed._poll()
    missed = placed.drain("a")
    assert [note.partition(":")[0] for note in missed] == ["job j", "m"]
    assert nodes_of(placed) == ["a"]
    with pytest.raises(ModelNotFound):
        placed.drain("b")


def test_a_model_lost_with_its_last_node_is_no_error_of_the_drain(
    ray: FakeRay, placed: Placement
) -> None:
    placed._facts.pop("a")
    assert placed._copy("m", leaving="a") == ["m was lost with a"]


def test_a_node_that_scaling_could_not_leave_is_left_later(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed drain, or a thread that cannot start, must not prevent the next attempt."""
    placed, scale = Placement("folder", (), None), Scale(1, 3, 3)
    monkeypatch.setattr(placement_actor, "machines", lambda ray, only_ours: ({}, {}))
    monkeypatch.setattr(ray_nodes, "machines", lambda ray, only_ours: ({}, {}))
    monkeypatch.setattr(placement_actor, "request_machines", lambda count: None)
    monkeypatch.setattr(ray_nodes, "request_machines", lambda count: None)
    monkeypatch.setattr(Scale, "look", lambda self, queues_ms, jobs: 2)

    def fails(*_: Any) -> None:
        raise ServerUnavailable("gone")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        with pytest.raises(ServerUnavailable):
            placed._follow(scale)
    assert not placed._leaving
    for step in ("drain", "stop"):
        with monkeypatch.context() as patched:
            if step == "drain":
                patched.setattr(placed, "drain", fails)
            else:
                patched.setattr(placement_actor, "stop_nodes", fails)
                patched.setattr(ray_nodes, "stop_nodes", fails)
                patched.setattr(placed, "drain", lambda node: [])
            placed._leaving.add("b")
            with pytest.raises(ServerUnavailable):
                placed._leave(scale, "b")
        assert not placed._leaving


def test_a_copy_that_hangs_does_not_hold_up_the_rounds(ray: FakeRay, placed: Placement) -> None:
    """Placement must contact each node in every round; else the node pauses its jobs."""
    is_begun, may_end = threading.Event(), threading.Event()

    def hangs() -> None:
        is_begun.set()
        assert may_end.wait(20)

    for name in "bc":
        ray.nodes[name].on_adopt = hangs
    placed._short()
    placed._short_since = {"m": -1e9}
    placed._copy_short()
    assert is_begun.wait(20)
    placed._copy_short()  # does not start a second copy
    may_end.set()
    placed._copying.result(20)
    assert len(placed.status()["models"]["m"]["nodes"]) == 2


def test_an_order_that_is_done_is_taken_away_under_the_lock(
    ray: FakeRay, placed: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remove a done order only under the lock, because other threads iterate over the orders."""

    class Guarded(dict[tuple[str, str], Any]):
        def __delitem__(self, key: tuple[str, str]) -> None:
            assert is_locked(placed)
            super().__delitem__(key)

        pop = None  # type: ignore[assignment]

    placed._ordered = Guarded({("a", "j"): lambda: True})
    placed._reconcile()
    assert not placed._ordered


def test_who_accuses_a_node_that_has_started_again_is_late(placed: Placement) -> None:
    placed.report_unreachable("a", "tcp://former")
    assert set(placed.table()["nodes"]) == set("abc")
    assert not placed.table()["may_come"]
    placed.report_unreachable("a", "tcp://a")
    assert set(placed.table()["nodes"]) == set("bc")
    assert placed.table()["may_come"]


def test_a_client_reads_the_table_that_placement_sends(placed: Placement) -> None:
    table = msgspec.convert(placed.table(), Table)
    assert set(table.nodes) == set("abc")
    assert table.address("a") == "tcp://a"
    assert table.nodes["a"].keys == ("p", "s", "k")


def test_a_node_that_vanishes_while_it_is_looked_for_is_only_missing(
    ray: FakeRay, placed: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    def node_of(ray: Any, name: str) -> Any:
        if name == "b":
            raise ValueError("no actor of that name")
        return ray.nodes[name]

    monkeypatch.setattr(ray_nodes, "node_of", node_of)
    monkeypatch.setattr(placement_actor, "node_of", node_of)
    assert nodes_of(placed) == ["a", "c"]


# ---- a node --------------------------------------------------------------------------------------


class Ended(BaseException):
    """End of the process."""


def ends(status: int) -> None:
    raise Ended


@pytest.mark.parametrize(
    ("part", "error"),
    [("_keys", OSError(28, "No space left on device")), ("connect_ray", RuntimeError("Ray"))],
)
def test_a_node_that_cannot_start_again_now_is_started_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str, error: Exception
) -> None:
    """Only a node's first start may raise in the constructor, because Ray then drops the actor."""

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setattr(os, "_exit", ends)
    monkeypatch.setattr(node_actor, part, fails)
    with pytest.raises(type(error)):
        NodeActor("n", str(tmp_path), "127.0.0.1", ())
    (tmp_path / "n" / "started").touch()
    with pytest.raises(Ended):
        NodeActor("n", str(tmp_path), "127.0.0.1", ())


def test_placement_that_cannot_look_yet_is_started_later(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("Ray is not there")

    monkeypatch.setattr(os, "_exit", ends)
    monkeypatch.setattr(placement_actor, "node_names", fails)
    monkeypatch.setattr(ray_nodes, "node_names", fails)
    with pytest.raises(Ended):
        Placement("folder", (), None)


def test_two_who_hear_a_node_at_once_renew_its_lease_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a node from two threads of placement at once."""
    node = NodeActor.__new__(NodeActor)
    node._lock, node._answered, node._owners = threading.Lock(), 7, "ipc://owner"
    node._answered_s = {7: 1.0}
    monkeypatch.setattr(NodeActor, "_summary", lambda self: {})
    leased: list[tuple[float, bool]] = []
    monkeypatch.setattr(
        NodeActor, "_lease", lambda self, at_s, _: leased.append((at_s, self._lock.locked()))
    )
    node.summary(7)
    assert leased == [(1.0 + node_actor.LEASE_S, True)]


@pytest.mark.parametrize("heard", [b"nonsense", b"\xff\xff", b""])
def test_a_server_whose_lease_cannot_be_read_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, heard: bytes
) -> None:
    """End the server, because its jobs must not run on a node without a valid lease."""
    killed: list[int] = []
    monkeypatch.setattr(node_lease.select, "select", lambda *_: ([0], [], []))
    monkeypatch.setattr(node_lease.os, "read", lambda *_: heard)
    monkeypatch.setattr(node_lease.os, "kill", lambda pid, number: killed.append(number))
    try:
        node_lease.watch(tmp_path)
    except (ValueError, IndexError):
        assert heard
    assert killed == [node_lease.signal.SIGTERM]


def test_a_job_that_ends_with_the_lease_does_not_end_the_server(tmp_path: Path) -> None:
    (tmp_path / "j").mkdir()
    ended = Future[Any]()
    ended.set_exception(InvalidInput("the job has ended"))
    client: Any = SimpleNamespace(jobs=lambda: [{"name": "j", "state": "running"}])
    client._connection = SimpleNamespace(request=lambda *_, **__: ended)
    node_lease.pause_jobs(client, tmp_path)


def test_a_full_disk_leaves_what_a_node_knew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = NodeActor.__new__(NodeActor)
    node._lock, node._state = threading.Lock(), tmp_path
    node.remember("m", {"mode": "graph"})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        node.remember("n", {})
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "other", b"data")
    assert node._bodies() == {"m": {"mode": "graph"}}
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]


def test_nodes_are_sent_each_new_table_once(ray: FakeRay, placed: Placement) -> None:
    def round_() -> list[str]:
        before = {name: len(node.tables) for name, node in ray.nodes.items()}
        placed._poll()
        placed._share(1.0)
        return [name for name, node in ray.nodes.items() if len(node.tables) > before[name]]

    assert round_() == ["a", "b", "c"]
    assert round_() == []
    ray.nodes["b"].facts["learned"] = 0  # node b has restarted
    assert round_() == ["b"]
    ray.nodes["c"].facts["queue_ms"] = 9.0
    assert round_() == ["a", "b", "c"]
    table = ray.nodes["a"].tables[-1]
    assert table["loads"]["c"] == (9.0, 0.0)
    assert table["holders"] == {"m": ["a"]}


def test_a_name_or_an_alias_leads_to_one_model_of_the_cluster(
    ray: FakeRay, placed: Placement
) -> None:
    nodes = ray.nodes
    nodes["a"].facts["aliases"] = {"gpt": "m"}
    placed._poll()
    table = placed.table()
    assert (table["models"]["gpt"], table["holders"]["gpt"]) == ("a", ["a"])
    for name, aliases in (("n", ["gpt"]), ("n", ["m"]), ("gpt", [])):
        nodes["b"].facts |= {"models": {name: ("d", 1)}, "aliases": dict.fromkeys(aliases, name)}
        with pytest.raises(AlreadyExists):
            placed.registered(name, "b", {"aliases": aliases})
        assert name not in nodes["b"].facts["models"]
    known = {"models": {"n": ("d", 1)}, "aliases": {"x": "n", "m": "n"}, "bodies": {"n": {}}}
    nodes["b"].facts |= known
    with pytest.raises(AlreadyExists):  # the known model must not get the new alias
        placed.registered("n", "b", {"aliases": ["x", "m"]})
    assert (nodes["b"].facts["aliases"], [*nodes["b"].facts["models"]]) == ({"x": "n"}, ["n"])
