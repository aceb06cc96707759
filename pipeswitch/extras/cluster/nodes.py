"""Connections of one node's gateway to all nodes of a cluster.

The node's actor writes placement's table into a file, which the gateway reads; it does not use Ray.
A request goes to this node's server if it holds the model, else to the server of another node, at
its port for clients with keys. No server forwards a request, so there is at most one hop. If a node
does not answer, the request goes to each of the model's other holders once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from ...base.codec import UNREADABLE
from ...base.errors import InvalidInput, ServerUnavailable
from ...client.calls import FinalReply
from ...client.connection import Connection
from ...client.looped import LoopConnection
from ..curve.curve_bridge import CurveConnection
from ..curve.curve_keys import ClientKeys
from . import holders
from .holders import REACHES, Reach

HELLO_S: Final = 2.5  # limit for the answer of a live node
LOOK_S: Final = 0.25  # interval between checks of the table
FAILED_S: Final = 5.0  # time for which a node that did not answer is tried last
MAX_SEQUENCES: Final = 1 << 16  # limit of remembered nodes; ``home_of`` finds the others
log = logging.getLogger(__name__)


class NodeConnections:
    """Replacement for a ``LoopConnection``; used by the loop's thread."""

    def __init__(self, local: LoopConnection, path: Path) -> None:
        """Read the table from ``path``, which need not exist yet, and follow its changes."""
        self._local, self._path = local, path
        self._seen: tuple[int, int] = (0, 0)
        self._table = holders.Table()
        self._links: dict[holders.NodeAddress, Connection] = {}
        self._balance = holders.Balance()
        self._busy: Counter[str] = Counter()  # address -> number of requests under way
        self._failed_s: dict[str, float] = {}  # address -> time of the last failure
        self._began: dict[tuple[str, str], str] = {}  # (tenant, sequence) -> node
        self._read()
        self._reading = asyncio.get_running_loop().create_task(self._follow())

    def close(self) -> None:
        self._reading.cancel()
        for link in self._links.values():
            link.close()
        self._local.close()

    def ask(self, op: str, **options: Any) -> Awaitable[Any]:
        """Send a request as ``LoopConnection.ask`` does, to the right node."""
        reach = REACHES.get(op)
        if reach is Reach.CLUSTER:
            raise InvalidInput(
                f"{op} concerns the whole cluster, but this address is one node's",
                hint="pipeswitch --host cluster register NAME SOURCE; in Python Client('cluster')",
            )
        if reach is Reach.HOLDER:
            return self._of_model(op, options)
        if reach is Reach.HOLDERS:
            return self._of_holders(op, options)
        if op == "ping":
            return self._ping(options)
        if op == "models" and not options.get("body"):
            return self._models(options)
        if op == "sequences" and options.get("body"):
            return self._end(options)
        return self._local.ask(op, **options)

    # ---- one model -----------------------------------------------------------------------------

    async def _of_model(self, op: str, options: dict[str, Any]) -> Any:
        """Return the answer of one holder of the model; try the others if it fails.
        Raises SequenceNotFound: the node that has the sequence does not answer; PipeSwitchError:
        the last node's error."""
        model, body = options["model"], options.get("body") or {}
        failover = holders.Failover(model, options, time.monotonic(), LOOK_S)
        nodes = self._table.untried(model)
        if not nodes and self._read():
            nodes = self._table.untried(model)
        while True:
            node = self._node_for(nodes, body)
            try:
                return await self._send(node, op, options)
            except holders.ELSEWHERE as error:
                address = self._table.address(node)
                if isinstance(error, ServerUnavailable) and not error.data:  # no failed model
                    self._failed_s[address] = time.monotonic()
                if "sequence" in body:
                    self._began.pop(_key(body), None)
                failover.failed(error, address)
            while isinstance(step := failover.next(self._table, time.monotonic()), holders.Retry):
                if step is holders.Retry.RENEW:
                    self._read()
                else:
                    await asyncio.sleep(LOOK_S)
            nodes, options = step, failover.options(options, time.monotonic())

    def _fresh(self, nodes: list[str]) -> list[str]:
        """Return the nodes that have not failed recently; all nodes if each one has."""
        since_s, table = time.monotonic() - FAILED_S, self._table
        return [
            node for node in nodes if self._failed_s.get(table.address(node), -math.inf) < since_s
        ] or nodes

    def _node_for(self, nodes: list[str], body: Mapping[str, Any]) -> str:
        """Return the node for a request; this node if no node is known to have the model.
        Raises SequenceNotFound: the node that has the sequence is gone."""
        if not nodes:
            return self._table.here
        first = self._balance.choose(self._fresh(nodes), time.monotonic())
        if "sequence" not in body:
            return first
        key = _key(body)
        node = "" if body.get("start") else self._began.get(key, "")
        self._began.pop(key, None)
        if node and node not in nodes:
            raise holders.no_sequence(body["sequence"])
        if not node:  # by a hash, because the next request may reach another gateway
            node = holders.home_of("\0".join(key), self._fresh(nodes))
        if not body.get("end"):
            self._began[key] = node
        if len(self._began) > MAX_SEQUENCES:
            del self._began[next(iter(self._began))]
        return node

    async def _of_holders(self, op: str, options: dict[str, Any]) -> Any:
        """Send the verb to all nodes with the model, as requests may go to any of them."""
        nodes = self._table.untried(options["model"]) or [self._table.here]
        return next(iter((await self._all(nodes, op, options)).values()))

    # ---- all nodes -----------------------------------------------------------------------------

    async def _all(
        self, nodes: Sequence[str], op: str, options: dict[str, Any]
    ) -> dict[str, FinalReply]:
        """Return the answers of all nodes that answer.
        Raises PipeSwitchError: no node answers, or a node refuses."""
        replies = [self._send(node, op, options) for node in nodes]
        answers = dict(
            zip(nodes, await asyncio.gather(*replies, return_exceptions=True), strict=True)
        )
        errors = [one for one in answers.values() if isinstance(one, BaseException)]
        for error in errors:
            if not isinstance(error, holders.ELSEWHERE) or len(errors) == len(nodes):
                raise error
        return {node: one for node, one in answers.items() if isinstance(one, FinalReply)}

    async def _models(self, options: dict[str, Any]) -> FinalReply:
        names = dict.fromkeys((self._table.here, *self._table.nodes))
        answers = await self._all([*names], "models", options)
        bodies = {node: answer.body for node, answer in answers.items()}
        first = next(iter(answers.values()))
        return msgspec.structs.replace(first, body={"models": holders.models_of(bodies)})

    async def _ping(self, options: dict[str, Any]) -> Any:
        first_reply: Any = None
        for node in dict.fromkeys((self._table.here, *self._table.nodes)):
            with contextlib.suppress(*holders.ELSEWHERE):
                reply = await self._send(node, "ping", options)
                if reply.body["ready"]:
                    return reply
                first_reply = first_reply or reply
        return first_reply or await self._local.ask("ping", **options)

    async def _end(self, options: dict[str, Any]) -> Any:
        body = options["body"]
        node = self._began.pop((body.get("tenant", ""), body["end"]), self._table.here)
        return await self._send(node, "sequences", options)

    # ---- one node ------------------------------------------------------------------------------

    async def _send(self, node: str, op: str, options: dict[str, Any]) -> Any:
        """Send a request to one node. Cancelling this cancels the request there, too."""
        address = self._table.address(node)
        self._balance.count(node, 1)
        self._busy[address] += 1
        try:
            if node == self._table.here:
                return await self._local.ask(op, **options)
            if on_progress := options.get("on_progress"):  # the link has a thread of its own
                loop = asyncio.get_running_loop()
                options = options | {"on_progress": partial(loop.call_soon_threadsafe, on_progress)}
            return await asyncio.wrap_future(self._link(node).request(op, **options))
        finally:
            self._balance.count(node, -1)
            self._busy[address] -= 1

    def _link(self, node: str) -> Connection:
        """Return the connection to a node.
        Raises ServerUnavailable: the node has left, or it cannot be reached."""
        facts = self._table.nodes.get(node)
        if facts is None:
            raise ServerUnavailable(f"{node} is no longer part of the cluster")
        if facts not in self._links:
            keys = ClientKeys(*(key.encode() for key in facts.gateway_keys))
            try:
                self._links[facts] = CurveConnection(facts.address, HELLO_S, keys)
            except (OSError, RuntimeError, MemoryError) as error:
                raise ServerUnavailable(f"cannot connect to {node}: {error}") from error
        return self._links[facts]

    # ---- the table -----------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self._read()
            except Exception:  # a bug: later tables still count
                log.exception("nodes=unchanged")

    def _read(self) -> bool:
        """Read the table if it has changed; return True if it was read. An error is logged."""
        try:
            facts = self._path.stat()
            stamp = facts.st_mtime_ns, facts.st_ino
            if stamp == self._seen:
                return False
            self._seen = stamp
            self._table = msgspec.json.decode(self._path.read_bytes(), type=holders.Table)
        except (OSError, *UNREADABLE) as error:
            if not isinstance(error, FileNotFoundError):
                log.error("nodes=unchanged: %s", error)
            return False
        self._balance.learn(self._table.loads, time.monotonic())
        living = {facts.address for facts in self._table.nodes.values()}
        self._failed_s = {one: at_s for one, at_s in self._failed_s.items() if one in living}
        for node in self._links.keys() - {*self._table.nodes.values()}:
            if not self._busy[node.address]:  # a drained node's requests finish first
                link = self._links.pop(node)  # ``close`` waits for its thread's end
                asyncio.get_running_loop().run_in_executor(None, link.close)
        return True


def _key(body: Mapping[str, Any]) -> tuple[str, str]:
    return body.get("tenant", ""), body["sequence"]
