"""Choice of the node for a gateway's request, and of another node if one does not answer."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from pipeswitch.base import errors
from pipeswitch.client.calls import FinalReply
from pipeswitch.extras.cluster import holders
from pipeswitch.extras.cluster import nodes as module
from pipeswitch.extras.cluster.holders import REACHES, Reach
from pipeswitch.extras.cluster.nodes import NodeConnections
from pipeswitch.frontend.verbs import VERBS

KEYS = ["p" * 40, "s" * 40, "k" * 40]


def test_a_cluster_reaches_only_verbs_of_the_table() -> None:
    assert set(REACHES) <= set(VERBS)


class Server:
    """Node that answers with its name or an error: at once, or when ``pending`` is done."""

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, list[dict[str, Any]]()
        self.error: errors.PipeSwitchError | None = None
        self.pending: Future[Any] | None = None
        self.rows: list[dict[str, Any]] = []
        self.is_closed = False

    def request(self, op: str, **options: Any) -> Future[Any]:
        self.asked.append({"op": op, **options})
        if self.pending is not None:
            return self.pending
        future: Future[Any] = Future()
        if self.error is not None:
            future.set_exception(self.error)
        else:
            body = {"node": self.name, "models": self.rows, "ready": True}
            future.set_result(FinalReply(request_id="", body=body, outputs=(), frames=()))
        return future

    def ask(self, op: str, **options: Any) -> Awaitable[Any]:
        return asyncio.wrap_future(self.request(op, **options))

    def close(self) -> None:
        self.is_closed = True


class Rig:
    """The gateway of node ``a``, with further nodes ``b`` and ``c``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers = {name: Server(name) for name in "abc"}
        self.path, self._count = folder / "table.json", 0
        monkeypatch.setattr(module, "CurveConnection", lambda address, *_: self.servers[address])
        monkeypatch.setattr(holders, "RETURN_S", 0.0)

    def table(self, holders: str, serving: str = "", nodes: str = "abc", **facts: Any) -> None:
        """Write a table in which the nodes ``holders`` have the model ``m``."""
        holders_by_model = {"m": list(holders)} if holders else {}
        rows = {name: {"address": name, "gateway_keys": KEYS} for name in nodes}
        models = {"m": serving or holders[:1]}
        table = {"here": "a", "models": models, "holders": holders_by_model, "nodes": rows, **facts}
        self.path.write_text(json.dumps(table))
        self._count += 1
        os.utime(self.path, ns=(0, self._count))  # a new time stamp, even for quick writes

    def run(self, work: Callable[[NodeConnections], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            nodes = NodeConnections(self.servers["a"], self.path)  # type: ignore[arg-type]
            try:
                return await work(nodes)
            finally:
                nodes.close()

        return asyncio.run(main())

    def counts(self) -> list[int]:
        return [len(self.servers[name].asked) for name in "abc"]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


async def infer(nodes: NodeConnections, **options: Any) -> str:
    options = {"is_safe": True, "model": "m", "body": {}, **options}
    return str((await nodes.ask("infer", **options)).body["node"])


@pytest.mark.parametrize(
    ("holders", "serving", "server"),
    [("ab", "b", "a"), ("bc", "c", "c"), ("bc", "b", "b"), ("c", "c", "c")],
)
def test_a_request_goes_to_this_node_if_it_holds_the_model_else_where_it_is_served(
    rig: Rig, holders: str, serving: str, server: str
) -> None:
    rig.table(holders, serving)
    assert rig.run(infer) == server
    assert sum(rig.counts()) == 1


def test_without_a_table_all_is_asked_of_the_server_here(rig: Rig) -> None:
    assert rig.run(infer) == "a"
    assert rig.run(lambda nodes: nodes.ask("models", model="", body=None)).body["models"] == []
    assert rig.counts() == [2, 0, 0]


@pytest.mark.parametrize(
    "error", [errors.ServerUnavailable, errors.ModelNotFound, errors.PermissionDenied]
)
def test_each_other_holder_is_asked_once(rig: Rig, error: type[errors.PipeSwitchError]) -> None:
    rig.table("abc")
    rig.servers["a"].error = rig.servers["b"].error = error("gone")
    assert rig.run(infer) == "c"
    rig.servers["c"].error = error("gone too")
    with pytest.raises(error, match="gone"):
        rig.run(infer)
    assert rig.counts() == [2, 2, 2]


@pytest.mark.parametrize("error", [errors.InvalidInput, errors.QueueFull, errors.DeadlineExceeded])
def test_what_another_node_would_say_too_is_the_answer(
    rig: Rig, error: type[errors.PipeSwitchError]
) -> None:
    rig.table("bc")
    rig.servers["b"].error = error("no")
    with pytest.raises(error):
        rig.run(infer)
    assert rig.counts() == [0, 1, 0]


def test_a_model_that_has_just_come_or_moved_is_found_in_the_newest_table(rig: Rig) -> None:
    async def work(nodes: NodeConnections) -> list[str]:
        rig.table("b")
        first = await infer(nodes)
        rig.servers["b"].error = errors.ModelNotFound("moved")
        rig.table("c")
        return [first, await infer(nodes)]

    assert rig.run(work) == ["b", "c"]


def test_a_node_that_did_not_answer_is_asked_last_for_a_while(rig: Rig) -> None:
    rig.table("bc")
    rig.servers["b"].error = errors.ServerUnavailable("gone")

    async def work(nodes: NodeConnections) -> list[str]:
        return [await infer(nodes) for _ in range(3)]

    assert rig.run(work) == ["c", "c", "c"]
    assert rig.counts() == [0, 1, 3]


def test_the_next_node_has_what_is_left_of_the_deadline(rig: Rig) -> None:
    rig.table("bc")
    rig.servers["b"].error = errors.ServerUnavailable("gone")
    rig.run(lambda nodes: infer(nodes, deadline_ms=5000.0))
    first, second = (rig.servers[name].asked[0]["deadline_ms"] for name in "bc")
    assert 0 < second < first == 5000.0


def test_who_hangs_up_takes_the_request_back_at_the_other_node(rig: Rig) -> None:
    rig.table("b")
    pending = rig.servers["b"].pending = Future()

    async def work(nodes: NodeConnections) -> None:
        task = asyncio.ensure_future(nodes.ask("infer", model="m", body={}))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    rig.run(work)
    assert pending.cancelled()


def test_a_node_that_is_drained_answers_what_it_has(rig: Rig) -> None:
    rig.table("b")
    pending = rig.servers["b"].pending = Future()

    async def work(nodes: NodeConnections) -> Any:
        task = asyncio.ensure_future(infer(nodes))
        await asyncio.sleep(0)
        rig.table("c", nodes="ac")
        nodes._read()
        assert not rig.servers["b"].is_closed
        body = {"node": "b"}
        pending.set_result(FinalReply(request_id="", body=body, outputs=(), frames=()))
        return [await task, await infer(nodes)]

    assert rig.run(work) == ["b", "c"]


@pytest.mark.parametrize(("holders", "node"), [("ab", "a"), ("bc", "b")])
def test_a_generation_goes_where_a_request_would_and_on_to_another_node_with_its_tokens(
    rig: Rig, holders: str, node: str
) -> None:
    """End a node after its connection's thread has delivered two tokens of an answer."""
    rig.table(holders)
    came: list[int] = []
    body: dict[str, Any] = {"so_far": []}

    def on_progress(reply: dict[str, Any]) -> None:
        came.extend(reply["tokens"])
        body["so_far"].extend(reply["tokens"])

    async def work(nodes: NodeConnections) -> str:
        dying = rig.servers[node]
        dying.pending = Future()
        generation = nodes.ask(
            "generate", model="m", is_safe=True, body=body, on_progress=on_progress
        )
        task = asyncio.ensure_future(generation)
        while not dying.asked:
            await asyncio.sleep(0)
        tell = dying.asked[0]["on_progress"]
        await asyncio.to_thread(tell, {"tokens": [7, 8]})
        dying.pending.set_exception(errors.ServerUnavailable("gone"))
        return str((await task).body["node"])

    [other] = set(holders) - {node}
    assert rig.run(work) == other
    assert came == [7, 8]
    assert rig.servers[other].asked[0]["body"]["so_far"] == [7, 8]


def test_a_sequence_stays_on_its_node_and_ends_with_that(rig: Rig) -> None:
    rig.table("bc")

    async def work(nodes: NodeConnections) -> list[str]:
        async def step(name: str, tenant: str = "t", **more: Any) -> str:
            body = {"sequence": name, "tenant": tenant, **more}
            return await infer(nodes, is_safe=False, body=body)

        homes = {}
        for number in range(40):
            name = str(number)
            homes[name] = await step(name, start=True)
            assert await step(name) == await step(name) == homes[name]
        assert {*homes.values()} == {"b", "c"}
        other = NodeConnections(rig.servers["a"], rig.path)  # type: ignore[arg-type]  # at another gateway
        for name, home in homes.items():
            body = {"sequence": name, "tenant": "t"}
            assert await infer(other, is_safe=False, body=body) == home
        other.close()
        lost_name = next(name for name, home in homes.items() if home == "b")
        rig.servers["b"].error = errors.ServerUnavailable("gone")
        ask_count = len(rig.servers["c"].asked)
        with pytest.raises(errors.SequenceNotFound):
            await step(lost_name)
        assert len(rig.servers["c"].asked) == ask_count
        return [await step(lost_name, start=True), await step(lost_name)]

    assert rig.run(work) == ["c", "c"]


@pytest.mark.parametrize("op", ["register", "unregister", "put"])
def test_what_is_for_the_whole_cluster_is_refused(rig: Rig, op: str) -> None:
    rig.table("abc")

    async def work(nodes: NodeConnections) -> None:
        with pytest.raises(errors.InvalidInput):
            await nodes.ask(op, model="m", body={})

    rig.run(work)
    assert rig.counts() == [0, 0, 0]


def test_models_are_those_of_all_nodes_that_answer(rig: Rig) -> None:
    rig.table("ab")
    for name, models in (("a", "mn"), ("b", "mo"), ("c", "p")):
        rig.servers[name].rows = [{"name": one, "version": 1, "requests": 2} for one in models]
    rig.servers["c"].error = errors.ServerUnavailable("gone")
    rows = rig.run(lambda nodes: nodes.ask("models", model="", body=None)).body["models"]
    assert {row["name"]: row["requests"] for row in rows} == {"m": 4, "n": 2, "o": 2}


def test_a_model_is_loaded_on_all_its_holders(rig: Rig) -> None:
    rig.table("bc")
    rig.run(lambda nodes: nodes.ask("load", model="m", body=None))
    assert rig.counts() == [0, 1, 1]


@pytest.mark.parametrize(
    ("reach", "counts"), [(Reach.HOLDER, [0, 1, 0]), (Reach.HOLDERS, [0, 1, 1]), (None, [1, 0, 0])]
)
def test_the_table_of_reaches_decides_which_nodes_answer_a_verb(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, reach: Reach | None, counts: list[int]
) -> None:
    rig.table("bc", "b")
    monkeypatch.setattr(module, "REACHES", {"peek": reach})
    rig.run(lambda nodes: nodes.ask("peek", model="m", body=None))
    assert rig.counts() == counts


def test_a_verb_of_the_cluster_is_refused_by_one_nodes_gateway(rig: Rig) -> None:
    for verb in (verb for verb, reach in REACHES.items() if reach is Reach.CLUSTER):
        with pytest.raises(errors.InvalidInput):
            rig.run(lambda nodes, verb=verb: nodes.ask(verb, model="m", body=None))
    assert rig.counts() == [0, 0, 0]


@pytest.mark.parametrize("dead", ["a", "ab"])
def test_a_gateway_is_ready_while_any_node_is(rig: Rig, dead: str) -> None:
    rig.table("ab")
    for name in dead:
        rig.servers[name].error = errors.ServerUnavailable("gone")
    assert rig.run(lambda nodes: nodes.ask("ping", model="", body=None)).body["ready"]


def test_a_table_that_is_no_good_changes_nothing(rig: Rig) -> None:
    async def work(nodes: NodeConnections) -> list[str]:
        rig.table("b")
        first = await infer(nodes)
        rig.path.write_text('{"nodes": 3}')
        nodes._read()
        return [first, await infer(nodes)]

    assert rig.run(work) == ["b", "b"]
